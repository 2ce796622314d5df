"""`python -m inference`: what it prints, and how it fails."""
from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from inference.__main__ import main

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


@pytest.mark.parametrize("arguments, part", [
    (["embed"], "at least one -p"), (["embed", "-m", "/nowhere", "-p", "x"], "was not found"), (["embed", "-p", ""], "empty string"),
    (["embed", "-p", "x", "--dimensions", "1000"], "between 1 and 384"),
    (["embed", "-p", "x", "--image", "cat.png"], "does not accept images")])
def test_errors_are_one_message(capsys, minilm, arguments, part):
    arguments = [*arguments, "-m", str(minilm)] if "-m" not in arguments else arguments
    code, out, err = run(capsys, *arguments)
    assert code == 1 and out == "" and err.startswith("error: ") and part in err


@pytest.mark.parametrize("arguments", [["embed", "-p", "x", "--dimensions", "0"], ["embed", "-p", "x", "--pooling", "none"],
                                       ["embed", "-p", "x", "--embd-normalize", "-3"], [], ["nothing"]])
def test_usage_errors(arguments):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2


def test_arch(capsys):
    code, out, _ = run(capsys, "arch")
    assert code == 0 and "bert" in out and "backend: " in out
    shown = json.loads(run(capsys, "arch", "--json")[1])
    assert {"family", "kind", "model_types", "architectures", "pooling"} <= shown["families"][0].keys() and "rerankers" in shown


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "inference", "arch", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["families"]
