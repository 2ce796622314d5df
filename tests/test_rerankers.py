"""Rerankers against the reference, one pair at a time, on both backends; pairs and prompts token by token; what is refused."""
from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from inference import rerankers
from inference.batching import Batch, common_prefix
from inference.checkpoint import Checkpoint
from inference.config import Settings
from inference.errors import CheckpointError, InferenceFailed, InvalidRequest, NotLoaded, TimedOut
from inference.loader import open_checkpoint
from inference.opened import Opened
from inference.rerankers import generative_text
from inference.resolve import Source
from inference.tokenizer import Tokenizer
from inference.transports.local import LocalClient
from inference.wire import RerankJob, RerankResult
from tests.checkpoints import kept
from tests.rerankers import DOCUMENTS, PAIRINGS, QUERIES, Pairing

BACKENDS = ("host", "mlx")
each_pairing = pytest.mark.parametrize("pairing", PAIRINGS, ids=lambda pairing: pairing.name)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
CLASSIFIERS = [pairing for pairing in PAIRINGS if pairing.scoring == "sequence_classifier"]
GENERATIVE = [pairing for pairing in PAIRINGS if pairing.scoring == "generative_text"]


def source(folder: Path) -> Source:
    return Source(folder, folder.name, "", "", "directory")


def opened(folder: Path, backend: str = "host", **options) -> Opened:
    return open_checkpoint(Checkpoint.read(source(folder)), Settings(backend=backend, **options), "reranker")


@cache
def client(folder: Path, backend: str, **options) -> LocalClient:
    return kept(LocalClient(Settings(embedding_models=(), reranker_models=(str(folder),), backend=backend, threads=2, **options)))


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    client.cache_clear()


def reference_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "reference.npz") as stored:
        return dict(stored)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def rerank(served: LocalClient, query: str, documents, instruction: str | None = None, **options) -> RerankResult:
    return served.rerank(RerankJob(query, tuple(documents), instruction=instruction, **options))


def errors(pairing: Pairing, folder: Path, backend: str) -> tuple[float, float]:
    """The greatest distance of a probability and of a logit from the reference, all documents of a query in one job."""
    served, reference = client(folder, backend), reference_of(folder)
    logits = np.split(reference["logits"], len(QUERIES))
    results = [rerank(served, query, DOCUMENTS, pairing.instruction) for query in QUERIES]
    raw = [rerank(served, query, DOCUMENTS, pairing.instruction, raw_scores=True) for query in QUERIES]
    tokens = np.concatenate([result.tokens for result in results])
    assert tokens.tolist() == reference["lengths"].tolist()
    assert all(result.scores.dtype == np.float32 for result in results)
    return (max(np.abs(result.scores - sigmoid(x)).max() for result, x in zip(results, logits, strict=True)),
            max(np.abs(result.scores - x).max() for result, x in zip(raw, logits, strict=True)))


def test_files_and_pairings_are_the_same_set() -> None:
    assert {info.name for info in iter_modules(rerankers.__path__)} == {pairing.scoring for pairing in PAIRINGS}
    assert {pairing.folder for pairing in PAIRINGS} == {path.parent for path in PAIRINGS[0].folder.parent.glob("*/made_by.json")}
    assert {way.SCORING for way in rerankers.ways()} == {pairing.scoring for pairing in PAIRINGS}


@each_pairing
@each_backend
def test_equals_the_reference(pairing: Pairing, backend: str) -> None:
    probability, logit = errors(pairing, pairing.folder, backend)
    print(f"{pairing.name} {backend}: {probability:.1e} {logit:.1e}")
    assert probability <= pairing.tolerance and logit <= 5e-5


@each_pairing
@each_backend
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: the stored answers were compared instead")
def test_equals_the_live_reference(pairing: Pairing, backend: str, tmp_path: Path) -> None:
    from tests.make_golden import make_pairing

    make_pairing(pairing, tmp_path, seed=1)
    probability, _ = errors(pairing, tmp_path, backend)
    assert probability <= pairing.tolerance


@each_pairing
def test_ids_are_those_of_the_reference_tokenizer(pairing: Pairing) -> None:
    """Type ids where the model has two; the others get none, whatever their tokenizer.json says."""
    model, reference = opened(pairing.folder), reference_of(pairing.folder)
    way = rerankers.find(model.checkpoint)
    pairs = [pair for query in QUERIES for pair in way.Pairs(model)(query, DOCUMENTS, pairing.instruction)]
    cuts = np.cumsum(reference["lengths"])[:-1]
    ids, types = np.split(reference["ids"], cuts), np.split(reference["type_ids"], cuts)
    for pair, wanted, kinds in zip(pairs, ids, types, strict=True):
        if pairing.name == "bert":
            assert pair.ids.tolist() == [wanted.tolist(), kinds.tolist()]
        else:
            assert pair.ids.tolist() == wanted.tolist()
        assert pair.ids.dtype == np.int32
        assert pair.truncated == (len(wanted) == pairing.max_length)


@each_pairing
@each_backend
def test_a_document_among_others_equals_itself_alone(pairing: Pairing, backend: str) -> None:
    """Bit for bit on host; within 1e-5 on mlx and where a beginning is shared."""
    served = client(pairing.folder, backend)
    together = rerank(served, QUERIES[0], DOCUMENTS).scores
    alone = np.concatenate([rerank(served, QUERIES[0], [document]).scores for document in DOCUMENTS])
    again = rerank(served, QUERIES[0], DOCUMENTS[::-1]).scores[::-1]
    if backend == "host" and pairing in CLASSIFIERS:
        assert np.array_equal(together, alone) and np.array_equal(together, again)
    else:
        assert np.abs(together - alone).max() <= 1e-5 and np.abs(together - again).max() <= 1e-5


@each_backend
def test_equal_documents_have_equal_scores_and_raw_scores_are_logits(backend: str) -> None:
    served = client(PAIRINGS[0].folder, backend)
    result = rerank(served, "the red planet", ["mars", "venus", "mars"])
    raw = rerank(served, "the red planet", ["mars", "venus", "mars"], raw_scores=True)
    assert result.scores[0] == result.scores[2] and result.tokens.tolist() == [7, 7, 7] and result.truncated == ()
    assert np.abs(sigmoid(raw.scores) - result.scores).max() < 1e-6 and raw.scores.dtype == np.float32
    assert rerank(served, "the red planet", ["mars", "jupiter " * 80, "venus"]).truncated == (1,)


def test_great_logits_do_not_overflow() -> None:
    from inference.reranker import _sigmoid

    with np.errstate(all="raise", under="ignore"):
        assert _sigmoid(np.array([-1000, -88, 0, 88, 1000], np.float32)) == pytest.approx([0, 0, 0.5, 1, 1], abs=1e-30)


@each_pairing
@each_backend
def test_half_precision_files_give_near_probabilities(pairing: Pairing, backend: str, tmp_path: Path) -> None:
    """mlx computes in the file's own type, host widens to f32 at load; what files of half the digits can move a random model's answer
    is bounded, and none of it is NaN."""
    import mlx.core as mx

    wanted = sigmoid(np.split(reference_of(pairing.folder)["logits"], len(QUERIES))[0])
    for dtype, most in ((mx.float16, 0.01), (mx.bfloat16, 0.08)):
        folder = tmp_path / str(dtype)
        shutil.copytree(pairing.folder, folder)
        tensors = mx.load(str(pairing.folder / "model.safetensors"))
        mx.save_safetensors(str(folder / "model.safetensors"), {name: x.astype(dtype) for name, x in tensors.items()})
        scores = rerank(client(folder, backend), QUERIES[0], DOCUMENTS, pairing.instruction).scores
        assert scores.dtype == np.float32 and np.abs(scores - wanted).max() <= most, str(dtype)


@each_pairing
@each_backend
def test_quantised_files_score_as_their_dequantised_weights_do(pairing: Pairing, backend: str, tmp_path: Path) -> None:
    """As MLX's converters write them: every matrix of 32 columns or more, the output head and the classifier among them."""
    import mlx.core as mx

    packed, plain = tmp_path / "packed", tmp_path / "plain"
    tensors = mx.load(str(pairing.folder / "model.safetensors"))
    quantised, widened = {}, {}
    for name, x in tensors.items():
        if x.ndim == 2 and x.shape[1] % 32 == 0:
            words, scales, biases = mx.quantize(x, group_size=32, bits=8)
            stem = name.removesuffix(".weight")
            quantised |= {name: words, f"{stem}.scales": scales, f"{stem}.biases": biases}
            widened[name] = mx.dequantize(words, scales, biases, group_size=32, bits=8)
        else:
            quantised[name] = widened[name] = x
    for folder, found in ((packed, quantised), (plain, widened)):
        shutil.copytree(pairing.folder, folder)
        mx.save_safetensors(str(folder / "model.safetensors"), found)
    raw = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(raw | {"quantization": {"group_size": 32, "bits": 8}}))
    scores = [rerank(client(folder, backend), QUERIES[0], DOCUMENTS, pairing.instruction).scores for folder in (packed, plain)]
    assert np.abs(scores[0] - scores[1]).max() <= 1e-5


# pairs: what the tokenizer itself does with `longest_first`

@pytest.fixture(scope="module")
def ms_marco(data: Path) -> Path:
    return data / "checkpoints/cross-encoder__ms-marco-MiniLM-L6-v2"


SAID = st.lists(st.sampled_from(["a", "planet", "photosynthesis", "[SEP]", "[CLS]", "é", " ", "\n", "."]), max_size=40).map(" ".join)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=SAID, second=SAID, limit=st.integers(5, 70))
def test_pairs_are_cut_as_the_reference_cuts_them(ms_marco: Path, first: str, second: str, limit: int) -> None:
    reference = tokenizers.Tokenizer.from_file(str(ms_marco / "tokenizer.json"))
    whole = len(reference.encode(first, second))
    reference.enable_truncation(limit, strategy="longest_first")
    wanted = reference.encode(first, second)
    (pair,) = Tokenizer(ms_marco).pairs(first, [second], limit)
    assert pair.ids.tolist() == [wanted.ids, wanted.type_ids] and pair.length == whole and pair.exact
    assert pair.truncated == (whole > limit)


def test_pairs_of_the_real_tokenizer(ms_marco: Path) -> None:
    """A document that spells [SEP] gets one, as in the reference: the types still say which text it belongs to."""
    tokenizer = Tokenizer(ms_marco)
    query = "What is the capital of China?"
    plain, injected, empty = tokenizer.pairs(query, ["The capital of China is Beijing.", "a [SEP] b", ""], 512)
    assert plain.ids[0].tolist() == [101, 2054, 2003, 1996, 3007, 1997, 2859, 1029, 102, 1996, 3007, 1997, 2859, 2003, 7211, 1012, 102]
    assert plain.ids[1].tolist() == [0] * 9 + [1] * 8
    assert injected.ids[0, 9:].tolist() == [1037, 102, 1038, 102] and injected.ids[1, 9:].tolist() == [1] * 4
    assert empty.ids[0].tolist() == [*plain.ids[0, :9].tolist(), 102]
    long = "word " * 2000
    both, left = tokenizer.pairs(long, [long, "short"], 512)
    assert (both.ids[1] == 0).sum() == 256 and both.ids.shape == (2, 512) and both.length == 4003
    assert (left.ids[1] == 1).sum() == 2 and left.ids.shape == (2, 512)


def test_an_enormous_document_is_cut_before_it_is_tokenised(ms_marco: Path) -> None:
    (pair,) = Tokenizer(ms_marco).pairs("a question", ["word " * 400_000], 512)
    assert pair.ids.shape == (2, 512) and pair.truncated and not pair.exact
    (piece,) = Tokenizer(ms_marco).pieces(["\u200b" * 50_000], 512)
    assert piece.truncated and not piece.exact             # nothing is left of it, and still it was cut


# prompts

@pytest.fixture(scope="module")
def qwen3(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Qwen3 tokenizer, put together from its vocabulary and merges, over a tiny model."""
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

    published = data / "checkpoints/Qwen__Qwen3-Embedding-0.6B"
    tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(published / "vocab.json"), str(published / "merges.txt")))
    tokenizer.normalizer = normalizers.NFC()
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    config = json.loads((data / "checkpoints/Qwen__Qwen3-Reranker-0.6B/tokenizer_config.json").read_text())
    added = sorted(config["added_tokens_decoder"].items(), key=lambda entry: int(entry[0]))
    tokenizer.add_tokens([AddedToken(token["content"], special=token["special"], normalized=False) for _, token in added])
    folder = tmp_path_factory.mktemp("qwen3") / "Qwen3-Reranker"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    raw = json.loads((GENERATIVE[0].folder / "config.json").read_text()) | {"vocab_size": 151669}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(GENERATIVE[0].folder / "model.safetensors")
    rng = np.random.default_rng(0)
    save_file(tensors | {"model.embed_tokens.weight": rng.standard_normal((151669, 32)).astype(np.float32)}, folder / "model.safetensors")
    return folder


def test_prompts_of_the_real_tokenizer(qwen3: Path, data: Path) -> None:
    """39 tokens before and 9 after, yes 9693 and no 2152, and the bytes of two published templates."""
    model = opened(qwen3, max_length=64)                   # a limit of the embedders
    pairs = generative_text.Pairs(model)
    assert model.spec.max_length == 1024 and model.spec.instructions and model.spec.scoring == "generative_text"
    assert (len(pairs._before), len(pairs._after)) == (39, 9) and generative_text.answers(model) == (9693, 2152)
    query, documents = "What is the capital of China?", ["The capital of China is Beijing.", "Berlin {is} in Germany."]
    plain, braces = pairs(query, documents, None)
    decode = tokenizers.Tokenizer.from_file(str(qwen3 / "tokenizer.json")).decode
    goldens = json.loads((data / "golden.json").read_text())["goldens"]
    published = next(entry for entry in goldens if entry["id"] == "st-qwen3-reranker")["prompt_format"]
    task = generative_text.INSTRUCTION
    assert decode(plain.ids, skip_special_tokens=False) == published.format(instruct=task, query=query, document=documents[0])
    assert decode(braces.ids, skip_special_tokens=False) == published.format(instruct=task, query=query, document=documents[1])
    assert not task.endswith(".") and pairs(query, documents[:1], "Rank")[0].ids.tolist() != plain.ids.tolist()
    template = (data / "checkpoints/vllm_score_templates/qwen3_reranker.jinja").read_text()
    assert template.startswith(generative_text.PREFIX) and generative_text.SUFFIX.strip() in template and task in template


def test_only_the_content_of_a_prompt_is_cut(qwen3: Path) -> None:
    pairs = generative_text.Pairs(opened(qwen3, rerank_max_length=100))
    (pair,) = pairs("q", ["word " * 500], None)
    short, = pairs("q", ["word"], None)
    assert pair.ids.shape == (100,) and pair.truncated and pair.length > 500
    assert pair.ids[:39].tolist() == short.ids[:39].tolist() and pair.ids[-9:].tolist() == short.ids[-9:].tolist()
    assert not short.truncated and short.ids.shape == (short.length,)


def test_common_prefix() -> None:
    def of(*sequences: list[int]) -> int:
        return common_prefix([np.array(s, np.int32) for s in sequences])

    assert of([1, 2, 3]) == 0 and of([1, 2, 3], [1, 2, 4]) == 2 and of([1, 2], [1, 2, 3]) == 1 and of([5], [5]) == 0
    assert of([1, 2, 3, 4], [1, 2, 9], [1, 7, 3, 4, 5]) == 1 and of([1, 2], [3, 4]) == 0


@each_backend
@pytest.mark.parametrize("pairing", GENERATIVE, ids=lambda pairing: pairing.name)
def test_a_shared_beginning_changes_nothing(pairing: Pairing, backend: str) -> None:
    """All rows of the pack, whatever the length of what is shared: nothing but rounding."""
    from inference import ops
    from inference.weights import Weights

    model = opened(pairing.folder, backend)
    weights = Weights.open(pairing.folder, ops.backend(backend)).strip(*model.family.PREFIXES)
    head = model.family.YesNo(weights, model.config, 3, 4)
    rng = np.random.default_rng(7)
    for shared in (1, 2, 17, 40):
        beginning = rng.integers(0, 300, shared)
        sequences = [np.concatenate([beginning, rng.integers(0, 300, n)]).astype(np.int32) for n in (1, 2, 9, 30)]
        apart = ops.numpy(head(Batch.of(sequences)))
        batch = Batch.continuing(sequences, shared)
        assert batch.segments.total == shared + 42 and batch.positions[shared:shared + 3].tolist() == [shared, shared, shared + 1]
        assert np.abs(ops.numpy(head(batch))[1:] - apart).max() <= 1e-5


def test_what_prompts_share_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    continuing = Batch.continuing.__func__

    def watched(cls: type[Batch], sequences, shared: int) -> Batch:
        batch = continuing(cls, sequences, shared)
        rows.append(batch.segments.total)
        return batch

    monkeypatch.setattr(Batch, "continuing", classmethod(watched))
    served = LocalClient(Settings(embedding_models=(), reranker_models=(str(GENERATIVE[0].folder),), backend="host", threads=1,
                                  batch_tokens=4096))
    result = rerank(served, "the red planet", [f"mars {i}" for i in range(10)])
    served.close()
    assert len(rows) == 1 and rows[0] < result.tokens.sum() / 3


# what is refused, and how it is said

def changed(pairing: Pairing, folder: Path, tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda t: t,
            **config) -> Path:
    shutil.copytree(pairing.folder, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors(load_file(pairing.folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def refusal(folder: Path, backend: str = "host", **options) -> str:
    served = LocalClient(Settings(embedding_models=(), reranker_models=(str(folder),), backend=backend, **options))
    with pytest.raises(CheckpointError) as caught:
        served.load()
    served.close()
    return str(caught.value)


HEADS = {"bert": "classifier", "xlm-roberta": "classifier.out_proj", "modernbert-cls": "classifier"}


@pytest.mark.parametrize("name", HEADS)
@each_backend
def test_a_classifier_has_one_label(name: str, backend: str, tmp_path: Path) -> None:
    """Counted in the tensor: what config.json says of labels is often wrong."""
    pairing, head = next(p for p in PAIRINGS if p.name == name), HEADS[name]

    def labels(count: int) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
        return lambda t: t | {f"{head}.weight": np.zeros((count, 32), np.float32), f"{head}.bias": np.zeros(count, np.float32)}

    for count in (0, 2, 3):
        said = refusal(changed(pairing, tmp_path / str(count), labels(count)), backend)
        assert said == f"reranker sequence classifiers must expose exactly one output label, this checkpoint has {count}"
    said = refusal(changed(pairing, tmp_path / "headless", lambda t: {n: x for n, x in t.items() if n != f"{head}.weight"}), backend)
    assert said.startswith(f"the checkpoint has no '{head}.weight'")
    folder = changed(pairing, tmp_path / "labels", id2label={"0": "no", "1": "yes"})
    assert rerank(client(folder, backend), "a", ["b"]).scores.shape == (1,)


def test_an_embedder_is_never_a_reranker(data: Path, tmp_path: Path) -> None:
    """A cross-encoder that was saved as an embedder has lost its head, and its config still speaks of labels."""
    trap = data / "checkpoints/_traps/ms-marco-saved-as-bi-encoder"
    checkpoint = Checkpoint.read(source(trap))
    with pytest.raises(CheckpointError, match=r"Unsupported reranker model type `bert` \(architectures\[0\] = `BertModel`\).*embedders are "
                                              "named in MLXCEL_EMBEDDING_MODEL"):
        rerankers.find(checkpoint)
    from inference.loader import embedding_family

    assert embedding_family(checkpoint).__name__.endswith(".bert") and checkpoint.pooling == "mean"
    with pytest.raises(CheckpointError, match=r"is a reranker \(architectures\[0\] is BertForSequenceClassification\)"):
        embedding_family(Checkpoint.read(source(data / "checkpoints/cross-encoder__ms-marco-MiniLM-L6-v2")))
    folder = changed(GENERATIVE[0], tmp_path / "pooled")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "lasttoken"}')
    assert "embedders are named in MLXCEL_EMBEDDING_MODEL" in refusal(folder)


@pytest.mark.parametrize(("name", "scoring", "family"), [
    ("cross-encoder__ms-marco-MiniLM-L6-v2", "sequence_classifier", "bert"),
    ("BAAI__bge-reranker-v2-m3", "sequence_classifier", "xlm_roberta"),
    ("Qwen__Qwen3-Reranker-0.6B", "generative_text", "qwen3")])
def test_published_configs_are_told_apart(data: Path, name: str, scoring: str, family: str) -> None:
    checkpoint = Checkpoint.read(source(data / "checkpoints" / name))
    way = rerankers.find(checkpoint)
    assert scoring == way.SCORING and way.family(checkpoint).__name__.endswith(f".{family}")
    with pytest.raises(CheckpointError, match="Unsupported reranker"):
        rerankers.find(Checkpoint.read(source(data / "checkpoints/Qwen__Qwen3-Embedding-0.6B")))


def test_answers_have_to_be_single_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    pairing = GENERATIVE[0]
    folder = changed(pairing, tmp_path / "words")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = [m for m in tokenizer["model"]["merges"] if m not in (["ye", "s"], "ye s")]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "splits 'yes' into [" in refusal(folder) and "answers with one token" in refusal(folder)

    folder = changed(pairing, tmp_path / "declared")
    scores = folder / "1_LogitScore/config.json"
    scores.parent.mkdir()
    scores.write_text('{"true_token_id": 5, "false_token_id": 6}')
    assert generative_text.answers(opened(folder)) == (5, 6)
    scores.write_text('{"true_token_id": 5, "false_token_id": 999}')
    assert refusal(folder) == "the token id of 'no' is 999; expected one of the vocabulary, 0 to 319"
    scores.write_text('{"true_token_id": "5", "false_token_id": 6}')
    assert refusal(folder).startswith("the token id of 'yes' is '5'")
    scores.write_text('{"true_token_id": 5}')
    assert refusal(folder).endswith("lacks 'false_token_id' (a token id)")
    assert "vocabulary, 0 to 256" in refusal(changed(pairing, tmp_path / "small", vocab_size=257))


def test_a_prompt_leaves_room(tmp_path: Path) -> None:
    scaffold = refusal(GENERATIVE[0].folder, rerank_max_length=100)
    assert scaffold.startswith("a limit of 100 tokens leaves no room for query and document: the prompt around them has ")
    classifier = refusal(CLASSIFIERS[0].folder, rerank_max_length=4)
    assert classifier == "a limit of 4 tokens leaves no room for a pair beside its special tokens (3)"
    assert rerank(client(CLASSIFIERS[0].folder, "host", rerank_max_length=5), "a b", ["c d"]).tokens.tolist() == [5]


def test_a_missing_output_head_is_named(tmp_path: Path) -> None:
    folder = changed(GENERATIVE[1], tmp_path / "headless", lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"})
    assert refusal(folder).startswith("the checkpoint has no 'lm_head.weight'")


def test_both_kinds_side_by_side(minilm: Path) -> None:
    """The limit of the embedder is not the reranker's; an instruction is for those that read one; messages name the kind."""
    from inference.wire import EmbedJob

    pairing = CLASSIFIERS[0]
    served = LocalClient(Settings(embedding_models=(str(minilm),), reranker_models=(str(pairing.folder), str(GENERATIVE[0].folder)),
                                  backend="host", max_length=16, rerank_batch_size=2))
    assert [(m.kind, m.id, m.scoring, m.max_length) for m in served.models()] == [
        ("embedding", "model", "", 16), ("reranker", "bert", "sequence_classifier", 60), ("reranker", "qwen3-tied", "generative_text", 700)]
    assert served.embed(EmbedJob(("a",))).data.shape == (1, 384)
    assert len(rerank(served, "a", DOCUMENTS).scores) == len(DOCUMENTS)
    with pytest.raises(InvalidRequest, match="`instruction` is only supported by the generative rerankers"):
        rerank(served, "a", DOCUMENTS, "do")
    assert rerank(served, "a", DOCUMENTS, "  ").model == "bert"
    asked = rerank(served, "a", DOCUMENTS, "Find what is far", model="qwen3-tied")
    assert np.abs(asked.scores - rerank(served, "a", DOCUMENTS, model="qwen3-tied").scores).max() > 1e-4
    with pytest.raises(InvalidRequest, match="model `x` is not a served reranker: `bert`, `qwen3-tied`"):
        rerank(served, "a", ["b"], model="x")
    with pytest.raises(TimedOut, match=r"^Rerank request timed out\. Please try again later\.$"):
        rerank(served, "a " * 50, ["b " * 400] * 50, model="qwen3-tied", timeout=0.0)
    served.close()
    with pytest.raises(NotLoaded, match="This server does not support reranking"):
        LocalClient(Settings(embedding_models=())).rerank(RerankJob("a", ("b",)))


def test_a_failing_pass_is_a_failure_of_reranking(monkeypatch: pytest.MonkeyPatch) -> None:
    served = LocalClient(Settings(embedding_models=(), reranker_models=(str(CLASSIFIERS[0].folder),), backend="host"))
    served.load()
    running = served._running("reranker", None)

    def broken(pairs):
        raise RuntimeError("no")

    monkeypatch.setattr(running.engine, "_forward", broken)
    with pytest.raises(InferenceFailed, match=r"^rerank inference failed: no$"):
        rerank(served, "a", ["b"])
    monkeypatch.setattr(running.engine, "_forward", lambda pairs: [np.full((1, 1), np.nan, np.float32) for _ in pairs])
    with pytest.raises(InferenceFailed, match=r"^rerank inference returned an invalid numeric result$"):
        rerank(served, "a", ["b"])
    served.close()
