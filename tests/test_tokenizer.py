"""The real MiniLM tokenizer: limits, cutting, odd characters, passages. Reference ids are those of the published checkpoint."""
from __future__ import annotations

import base64
import hashlib
import json
import random
import shutil
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import CheckpointError
from inference.tokenizer import Tokenizer, clean


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return Tokenizer(minilm)


def text_of(case):
    if "text" in case:
        return case["text"]
    recipe = case["recipe"]
    if recipe.get("kind") == "base64-of-random":
        return base64.b64encode(random.Random(recipe["seed"]).randbytes(recipe["bytes"])).decode()
    return recipe.get("prefix", "") + recipe["unit"] * recipe["n"]


def test_hostile_texts_give_the_reference_ids(tokenizer, data):
    cases = json.loads((data / "hostile" / "text" / "cases.json").read_text())
    checked = 0
    for case in cases:
        reference = case.get("reference", {})
        if "minilm_ids_sha256" not in reference:
            continue
        began = time.process_time()
        encoded, = tokenizer.encode([text_of(case)], 256)
        assert time.process_time() - began < case.get("time_limit_s", 5), case["id"]
        assert hashlib.sha256(str(encoded.ids.tolist()).encode()).hexdigest()[:16] == reference["minilm_ids_sha256"], case["id"]
        assert len(encoded.ids) == reference["minilm_ids_len"], case["id"]
        checked += 1
    assert checked >= 70


def test_baked_in_truncation_and_padding_are_gone(tokenizer):
    short, long = tokenizer.encode(["hello", "hello " * 200], 256)
    assert short.ids.tolist() == [101, 7592, 102] and not short.truncated
    assert len(long.ids) == 202


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 256])
def test_truncation_keeps_the_last_special_token(tokenizer, limit):
    encoded, = tokenizer.encode(["one two three four five six seven eight"], limit)
    assert len(encoded.ids) == min(limit, 10) and encoded.length == 10
    assert encoded.ids[-1] == 102 and (limit == 1 or encoded.ids[0] == 101)
    assert encoded.truncated == (limit < 10)


def test_a_text_cut_in_characters_reports_at_least(tokenizer):
    encoded, = tokenizer.encode(["hello world " * 100_000], 256)
    assert len(encoded.ids) == 256 and encoded.truncated and not encoded.exact and encoded.length > 256


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a", "antidisestablishmentarianism", "日本語", "x" * 120, "é", "ß", "?!", "\n", "\u3000"]), min_size=1,
                max_size=400), st.integers(4, 24))
def test_cutting_characters_first_changes_no_id(tokenizer, words, limit):
    text = " ".join(words)
    encoded, = tokenizer.encode([text], limit)
    whole, = tokenizer.encode([text], 100_000)
    want = whole.ids if len(whole.ids) <= limit else [*whole.ids[:limit - 1], 102]
    if encoded.exact or len(encoded.ids) == limit:
        assert encoded.ids.tolist() == list(want)


def test_surrogates(tokenizer):
    assert clean("\ud83d\ude00") == "😀" and clean("a\ud800b") == "a\ufffdb" and clean("plain") == "plain"
    assert len(tokenizer.encode(["\ud800"], 256)[0].ids) >= 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["alpha", "beta", "gamma", "internationalization", "delta.", "epsilon,", "zeta\n\n"]), min_size=1,
                max_size=300), st.integers(12, 64), st.integers(0, 5))
def test_passages_cover_the_text_and_fit(tokenizer, pieces, tokens, overlap):
    text = " ".join(pieces)
    spans = tokenizer.split(text, tokens, overlap)
    counts = tokenizer.count([text[s.start:s.end] for s in spans])
    assert all(count <= tokens for count in counts) and [s.tokens for s in spans] == counts
    assert spans[0].start == 0 and not text[spans[-1].end:].strip()
    for before, after in pairwise(spans):
        assert before.start < after.start and before.end < after.end
        assert not text[before.end:after.start].strip()
    for span in spans:
        assert not any(0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum() for at in (span.start, span.end))


def test_a_word_longer_than_a_passage_is_cut(tokenizer):
    text = "abcdefghij" * 9                                        # one word of many pieces
    spans = tokenizer.split(text, 10, 2)
    assert len(spans) > 1 and spans[0].start == 0 and spans[-1].end == len(text)
    assert all(s.tokens <= 10 for s in spans)


def test_passages_of_a_megabyte_are_quick(tokenizer):
    began = time.process_time()
    spans = tokenizer.split("lorem ipsum dolor " * 58_000, 256, 32)
    assert time.process_time() - began < 20 and len(spans) > 500


def test_a_prompt_takes_its_room(tokenizer):
    spans = tokenizer.split("one two three four five six seven eight nine ten", 10, 0, prompt="passage: ")
    assert all(tokenizer.count(["passage: " + "one two three four five six seven eight nine ten"[s.start:s.end]])[0] <= 10 for s in spans)
    with pytest.raises(ValueError, match="no room"):
        tokenizer.split("text", 4, 0, prompt="a long prompt of words ")


def test_blank_text_has_no_passage(tokenizer):
    assert tokenizer.split("  \n ", 16, 0) == []


def test_no_tokenizer(tmp_path, data):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    shutil.copy(data / "checkpoints" / "_traps" / "git-lfs-pointers" / "tokenizer.json", tmp_path)
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be loaded"):
        Tokenizer(tmp_path)
