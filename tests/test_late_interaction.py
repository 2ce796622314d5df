"""Late interaction through the loader and the transport, against sentence-transformers, layout by layout and trunk by trunk."""
from __future__ import annotations

import json
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inference.config import Settings
from inference.errors import CheckpointError, ConfigError, InvalidRequest
from inference.loader import load, open_checkpoint
from inference.transports.local import LocalClient
from inference.wire import EmbedJob
from tests.checkpoints import client, read
from tests.late_interaction import LATE, TEXTS, Late

BY_NAME = {case.name: case for case in LATE}
each_case = pytest.mark.parametrize("case", LATE, ids=lambda case: case.name)
each_backend = pytest.mark.parametrize("backend", ["host", "mlx"])


@cache
def served(case: Late, backend: str = "host") -> LocalClient:
    return client(case.folder, backend)


def rows_of(served: LocalClient, side: str, texts=TEXTS, **options) -> list[np.ndarray]:
    return served.embed(EmbedJob(tuple(texts), input_type=side, **options)).vectors()


def assert_matches(folder: Path, served: LocalClient) -> float:
    worst = 0.0
    with np.load(folder / "reference.npz") as reference:
        for side in ("query", "document"):
            for i, got in enumerate(rows_of(served, side)):
                want = reference[f"{side}{i}"]
                assert got.shape == want.shape, (side, TEXTS[i])
                assert got.dtype == np.float32
                worst = max(worst, float(np.abs(got - want).max()))
    return worst


@each_case
@each_backend
def test_equals_the_reference(case: Late, backend: str) -> None:
    assert assert_matches(case.folder, served(case, backend)) <= 1e-5


@each_case
@each_backend
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: the stored answers were compared instead")
def test_equals_the_live_reference(case: Late, backend: str, tmp_path: Path) -> None:
    from tests.late_interaction import make_late

    make_late(case, tmp_path / case.name, seed=1)
    assert assert_matches(tmp_path / case.name, client(tmp_path / case.name, backend)) <= 1e-5


@each_case
@each_backend
def test_alone_is_in_a_batch(case: Late, backend: str) -> None:
    for side in ("query", "document"):
        together = rows_of(served(case, backend), side)
        for text, rows in zip(TEXTS, together, strict=True):
            (alone,) = rows_of(served(case, backend), side, [text])
            if backend == "host":
                np.testing.assert_array_equal(rows, alone)
            else:
                assert np.abs(rows - alone).max() <= 1e-5


@each_case
def test_the_goldens_are_those_of_the_cases(case: Late) -> None:
    assert case.folder.is_dir()
    assert {path.name for path in case.folder.parent.iterdir()} == set(BY_NAME)


def test_what_a_multi_vector_model_promises() -> None:
    spec = served(BY_NAME["bert-pylate"]).models()[0]
    assert (spec.multi_vector, spec.dims, spec.max_length, spec.pooling, spec.normalize) == (True, 16, 60, "none", 2.0)
    native = served(BY_NAME["modernbert-native"]).models()[0]
    assert native.prompts == {} and native.max_length == 70            # its prompts belong to the sides
    assert served(BY_NAME["bert-native-bare"]).models()[0].normalize == -1.0


def test_without_an_input_type_items_are_documents() -> None:
    run = served(BY_NAME["bert-pylate"])
    for a, b in zip(run.embed(EmbedJob(TEXTS)).vectors(), rows_of(run, "document"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_expanded_queries_have_as_many_rows_as_they_say_and_tokens_are_what_the_model_saw() -> None:
    run = served(BY_NAME["bert-pylate"])
    queries = run.embed(EmbedJob(TEXTS, input_type="query"))
    assert set(queries.rows.tolist()) == {32} and set(queries.tokens.tolist()) == {32}
    assert queries.truncated == (5,)
    documents = run.embed(EmbedJob(TEXTS))
    assert documents.rows[3] < documents.tokens[3] and documents.truncated == (5,)
    assert documents.tokens[5] == 60


def test_filled_rows_are_seen_by_nobody_unless_the_checkpoint_says_so(tmp_path: Path) -> None:
    """What stands in the filled rows reaches the text's own rows only where they are attended to."""
    def own_rows(attend: bool, length: int) -> np.ndarray:
        folder = copied(BY_NAME["bert-pylate"], tmp_path / f"{attend}{length}", attend_to_expansion_tokens=attend, query_length=length)
        (rows,) = rows_of(client(folder), "query", ["a b c"])
        assert len(rows) == length
        return rows[:6]

    np.testing.assert_array_equal(own_rows(False, 20), own_rows(False, 32))
    assert np.abs(own_rows(True, 20) - own_rows(True, 32)).max() > 1e-3


def test_both_sides_of_one_text_meet_in_one_queue() -> None:
    """The marks are part of what is computed once: a query and a document with equal ids are two things."""
    run = served(BY_NAME["xlm-roberta-colbert-ir"])
    query, document = (rows_of(run, side, ["plants."])[0] for side in ("query", "document"))
    assert len(query) == 32 and len(document) < 10


def test_token_ids_are_taken_as_they_are() -> None:
    run = served(BY_NAME["bert-pylate"])
    tokenizer = run._embedder(None)._tokenizer
    (text,) = rows_of(run, "document", ["plants, sugar"])
    ids = tuple(int(i) for i in tokenizer.encode(["[D] plants, sugar"], 60)[0].ids)
    np.testing.assert_array_equal(rows_of(run, "document", [ids])[0], text)
    assert len(rows_of(run, "query", [ids])[0]) == len(ids)
    with pytest.raises(InvalidRequest, match=r"input\[1\] has only tokens that the model leaves out of documents"):
        run.embed(EmbedJob((ids, (tokenizer.token_id(","), tokenizer.token_id(".")))))


def test_passages_leave_room_for_the_marker() -> None:
    run = served(BY_NAME["bert-pylate"])
    spans = run.split([TEXTS[5]], 20, 4)[0]
    pieces = [TEXTS[5][span.start:span.end] for span in spans]
    result = run.embed(EmbedJob(tuple(pieces)))
    assert max(result.tokens) <= 20 and [span.tokens for span in spans] == result.tokens.tolist()


def test_dimensions_are_cut_row_by_row() -> None:
    run = served(BY_NAME["bert-pylate"])
    (whole,), (short,) = (rows_of(run, "document", ["plants"], dimensions=n) for n in (None, 5))
    np.testing.assert_allclose(short, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True), atol=1e-6)


# ---- what does not fit

def copied(case: Late, folder: Path, **settings) -> Path:
    shutil.copytree(case.folder, folder)
    path = folder / "config_sentence_transformers.json"
    if settings:
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def opened(folder: Path, **settings):
    return open_checkpoint(read(folder), Settings(**{"backend": "host"} | settings))


@pytest.mark.parametrize("settings, said", [
    ({"query_length": 0}, "query_length is 0; expected a number of tokens of at least 1"),
    ({"document_length": "long"}, "document_length is 'long'; expected a int"),
    ({"skiplist_words": "."}, r"skiplist_words is '\.'; expected a list of strings"),
    ({"query_length": 101}, "queries are expanded to 101 tokens, over the limit of 100"),
    ({"query_expansion": {"strategy": "max", "length": 3}}, "the strategy of query_expansion is 'max'; expected 'fixed' or 'min'"),
    ({"query_expansion": {"strategy": "min"}}, "query_expansion names no length"),
    ({"query_expansion": {"strategy": "min", "length": 9, "token": "<x>"}}, "queries are filled with '<x>', which the tokenizer does not"),
])
def test_settings_that_cannot_be_meant_are_named(settings: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        opened(copied(BY_NAME["bert-pylate"], tmp_path / "m", **settings))


def test_a_pooling_for_a_model_that_pools_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="MLXCEL_EMBEDDING_POOLING=mean, but bert-pylate gives a vector for every token"):
        opened(BY_NAME["bert-pylate"].folder, pooling="mean")


def test_a_pooled_dense_module_is_no_projection_of_rows(tmp_path: Path) -> None:
    folder = copied(BY_NAME["bert-pylate"], tmp_path / "m")
    path = folder / "1_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"module_input_name": "sentence_embedding"}))
    with pytest.raises(CheckpointError, match="the module maps 'sentence_embedding' to 'sentence_embedding'; expected 'token_embeddings'"):
        opened(folder)


@pytest.mark.parametrize("change, said", [
    (lambda t: {k: x for k, x in t.items() if k != "linear.weight"}, "a HF_ColBERT without linear.weight, the projection of its rows"),
    (lambda t: t | {"linear.weight": np.zeros((16, 31), np.float32)}, r"is \[16, 31\]; the trunk's rows have 32 components"),
])
def test_projections_of_colbert_ir_that_do_not_fit(change, said: str, tmp_path: Path) -> None:
    folder = copied(BY_NAME["bert-colbert-ir"], tmp_path / "m")
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        opened(folder)


def test_colbert_ir_ranked_by_distance_is_refused(tmp_path: Path) -> None:
    folder = copied(BY_NAME["bert-colbert-ir"], tmp_path / "m")
    (folder / "artifact.metadata").write_text('{"similarity": "l2"}')
    with pytest.raises(CheckpointError, match="similarity is 'l2'; expected 'cosine'"):
        opened(folder)


def test_superfluous_tensors_are_named_here_too(tmp_path: Path) -> None:
    folder = copied(BY_NAME["bert-pylate"], tmp_path / "m")
    file = folder / "1_Dense" / "model.safetensors"
    save_file(load_file(file) | {"linear.bias": np.zeros(16, np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"no use for 1_Dense\.linear\.bias"):
        load(opened(folder))


def test_what_documents_are_made_by_is_part_of_the_weights_hash(tmp_path: Path) -> None:
    plain = opened(BY_NAME["bert-pylate"].folder).spec
    same = opened(copied(BY_NAME["bert-pylate"], tmp_path / "a")).spec
    query = opened(copied(BY_NAME["bert-pylate"], tmp_path / "b", query_length=20)).spec
    skips = opened(copied(BY_NAME["bert-pylate"], tmp_path / "c", skiplist_words=["."])).spec
    assert plain.weights_hash == same.weights_hash == query.weights_hash != skips.weights_hash
