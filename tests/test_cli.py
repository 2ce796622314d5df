"""`python -m inference`: what it prints, and how it fails."""
from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from inference.__main__ import main
from tests.rerankers import DOCUMENTS, PAIRINGS, QUERIES

TEXTS = ["-p", "The weather is lovely today.", "-p", "It's so sunny outside!", "-p", "He drove to the stadium."]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_one_vector_a_line_and_the_cosine_matrix(capsys, minilm):
    code, out, _ = run(capsys, "embed", "-m", str(minilm), *TEXTS)
    lines = out.splitlines()
    vectors = np.array([json.loads(line) for line in lines[:3]])
    assert code == 0 and vectors.shape == (3, 384) and lines[4] == "cosine similarity:"
    printed = np.array([[float(value) for value in line.split()] for line in lines[5:8]])
    assert np.abs(printed - [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]]).max() <= 1e-4


def test_a_single_text_has_no_matrix(capsys, minilm):
    _, out, _ = run(capsys, "embed", "-m", str(minilm), "-p", "hello")
    assert len(out.splitlines()) == 1


def test_json(capsys, minilm):
    code, out, _ = run(capsys, "embed", "-m", str(minilm), *TEXTS, "--json", "--dimensions", "64")
    shown = json.loads(out)
    assert code == 0 and shown["model"] == "model" and shown["shapes"] == [[64]] * 3 and shown["prompt_tokens"] == 25
    assert np.array(shown["embeddings"]).shape == (3, 64) and len(shown["similarity"]) == 3


def test_options_reach_the_model(capsys, minilm):
    _, out, err = run(capsys, "embed", "-m", str(minilm), "-p", "word " * 50, "--max-length", "8", "--pooling", "cls",
                      "--embd-normalize", "-1", "--backend", "host", "--batch-size", "1", "--json")
    shown = json.loads(out)
    assert shown["prompt_tokens"] == 8 and shown["truncated"] == [0] and abs(np.linalg.norm(shown["embeddings"][0]) - 1) > 0.1
    _, _, err = run(capsys, "embed", "-m", str(minilm), "-p", "word " * 50, "--max-length", "8")
    assert "text 1 is longer than 8 tokens and was cut" in err
    _, _, err = run(capsys, "embed", "-m", str(minilm), "-p", "word", "--instruction", "Find it")
    assert err == "note: --instruction has no effect: model takes none\n"


@pytest.mark.parametrize("arguments, part", [
    (["embed"], "at least one -p"), (["embed", "-m", "/nowhere", "-p", "x"], "was not found"), (["embed", "-p", ""], "empty string"),
    (["embed", "-p", "x", "--dimensions", "1000"], "between 1 and 384"),
    (["embed", "-p", "x", "--image", "cat.png"], "does not accept images")])
def test_errors_are_one_message(capsys, minilm, arguments, part):
    arguments = [*arguments, "-m", str(minilm)] if "-m" not in arguments else arguments
    code, out, err = run(capsys, *arguments)
    assert code == 1 and out == "" and err.startswith("error: ") and part in err and "This server" not in err


@pytest.mark.parametrize("arguments", [["embed", "-p", "x", "--dimensions", "0"], ["embed", "-p", "x", "--pooling", "none"],
                                       ["embed", "-p", "x", "--embd-normalize", "-3"], [], ["nothing"]])
def test_usage_errors(arguments):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2


def test_arch(capsys):
    code, out, _ = run(capsys, "arch")
    assert code == 0 and "bert" in out and "generative_text" in out and "backend: " in out
    shown = json.loads(run(capsys, "arch", "--json")[1])
    assert {"family", "kind", "model_types", "architectures", "pooling"} <= shown["families"][0].keys()
    assert [(way["scoring"], way["instructions"]) for way in shown["rerankers"]] == [
        ("generative_text", True), ("sequence_classifier", False)]
    assert {"qwen3"} == set(shown["rerankers"][0]["model_types"]) and "modernbert" in shown["rerankers"][1]["model_types"]


# rerank: tiny random models, whose scores are those of the reference

PLANETS = ["-q", QUERIES[0], *(part for document in DOCUMENTS for part in ("-d", document)), "--backend", "host"]


@pytest.mark.parametrize("pairing", PAIRINGS[:1] + PAIRINGS[-1:], ids=lambda pairing: pairing.name)
def test_scores_in_order_then_the_ranking(capsys, pairing):
    options = ["rerank", "-m", str(pairing.folder), *PLANETS, *(["--instruction", pairing.instruction] if pairing.instruction else [])]
    code, out, err = run(capsys, *options)
    with np.load(pairing.folder / "reference.npz") as stored:
        logits, lengths = stored["logits"][:len(DOCUMENTS)], stored["lengths"][:len(DOCUMENTS)]
    probabilities = 1 / (1 + np.exp(-logits))
    scores, ranking = out.split("\n\nranking:\n")
    assert code == 0 and [float(line) for line in scores.splitlines()] == pytest.approx(probabilities.tolist(), abs=1e-5)
    order = np.argsort(-probabilities, kind="stable").tolist()
    assert [int(line.split("document ")[1].split(":")[0]) - 1 for line in ranking.splitlines()] == order
    assert [f"note: document {i + 1} and" in err for i in range(len(DOCUMENTS))] == (lengths == pairing.max_length).tolist()

    shown = json.loads(run(capsys, *options, "--json", "--top-n", "2", "--raw-scores")[1])
    assert shown["scores"] == pytest.approx(logits.tolist(), abs=5e-5) and shown["ranking"] == order[:2]
    assert (shown["model"], shown["kind"], shown["prompt_tokens"]) == (pairing.name, pairing.scoring, lengths.sum())


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "nothing to score: give at least one -d TEXT"),
    (["-d", "a", "--image", "cat.png"], "cat.png is an image, but bert does not accept images"),
    (["-d", "a", "--query-image", "cat.png"], "cat.png is an image, but bert does not accept images"),
    (["-d", "a", "--instruction", "x"], "`instruction` is only supported by the generative rerankers")])
def test_rerank_errors(capsys, arguments, message):
    code, _, err = run(capsys, "rerank", "-m", str(PAIRINGS[0].folder), "-q", "x", *arguments)
    assert code == 1 and err.startswith(f"error: {message}")


def test_rerank_options_reach_the_model(capsys):
    shown = json.loads(run(capsys, "rerank", "-m", "bert", "--models-dir", str(PAIRINGS[0].folder.parent), *PLANETS, "--json",
                           "--max-length", "9", "--batch-size", "1")[1])
    assert shown["prompt_tokens"] <= 9 * len(DOCUMENTS) and 0 in shown["truncated"]


def test_an_embedder_is_no_reranker(capsys, minilm):
    code, _, err = run(capsys, "rerank", "-m", str(minilm), "-q", "x", "-d", "y")
    assert code == 1 and "Unsupported reranker model type `bert`" in err


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "inference", "arch", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["families"]
