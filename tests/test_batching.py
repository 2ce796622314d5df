"""Segments, packs and rotations: plain numpy, checked against the definition row by row."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.batching import Batch, GrowingRope, RopeSpec, Segments, rope_parameters
from inference.errors import CheckpointError


@given(st.data())
def test_segments_say_where_every_row_stands(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    parent = [-1] + [data.draw(st.sampled_from([-1, 0])) for _ in lengths[1:]]
    segments = Segments(np.array(lengths), np.array(parent))
    assert segments.count == len(lengths)
    assert segments.total == sum(lengths)
    row = 0
    for b, (length, above) in enumerate(zip(lengths, parent, strict=True)):
        before = lengths[above] if above >= 0 else 0
        own = list(range(row, row + length))
        assert np.arange(segments.total)[segments.rows(b)].tolist() == own
        assert np.arange(segments.total)[segments.keys(b)].tolist() == list(range(before)) + own
        assert segments.positions[own].tolist() == list(range(before, before + length))
        assert (segments.first[b], segments.last[b], segments.offsets[b]) == (own[0], own[-1], before)
        row += length


@pytest.mark.parametrize(("arguments", "said"), [
    (([],), "at least 1"), (([3, 0],), "at least 1"), (([[1, 2]],), "at least 1"),
    (([2, 2], [-1]), "2 segments have 1 parents"), (([2, 2], [-1, 2]), "must name segments"), (([2, 2], [-1, 1]), "must name segments"),
    (([2, 2, 2], [-1, 0, 1]), "must name segments"), (([2, 2], None, [True]), "1 hidden flags for 4 rows"),
])
def test_segments_that_make_no_sense_are_refused(arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Segments(*arguments)


def test_batch_of_sequences() -> None:
    batch = Batch.of([[5, 6, 7], [8]])
    assert (batch.ids.tolist(), batch.positions.tolist(), batch.type_ids.tolist()) == ([5, 6, 7, 8], [0, 1, 2, 0], [0, 0, 0, 0])
    assert Batch.of([[5, 6], [7]], [[0, 1], [1]]).type_ids.tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=r"lengths \[1, 2\] for sequences of lengths \[2, 1\]"):
        Batch.of([[5, 6], [7]], [[0], [1, 1]])
    for sequences in ([], [[]], [[1], []]):
        with pytest.raises(ValueError, match="at least 1"):
            Batch.of(sequences)


def test_memo_builds_once() -> None:
    batch, built = Batch.of([[1]]), []
    for _ in range(2):
        batch.memo("key", lambda: built.append(1))
    assert built == [1]
    spec = RopeSpec(4, 10_000.0)
    assert batch.rope(spec) is batch.rope(RopeSpec.of(4, 10_000.0, {"rope_type": "default"}))
    assert batch.rope(spec) is not batch.rope(RopeSpec(4, 160_000.0))


def test_rope_table_holds_the_angles_of_positions() -> None:
    segments = Segments(np.array([3, 2]), np.array([-1, 0]))
    table = RopeSpec(6, 100.0).table(segments)
    for row, position in enumerate([0, 1, 2, 3, 4]):
        angles = [position * 100.0 ** (-2 * i / 6) for i in range(3)]
        np.testing.assert_allclose(table.cos[row], np.cos(angles), atol=1e-7)
        np.testing.assert_allclose(table.sin[row], np.sin(angles), atol=1e-7)
    assert table.cos.dtype == table.sin.dtype == np.float32


def test_rope_of_an_unknown_type_or_size_is_refused() -> None:
    assert RopeSpec.of(8, 1e4, {"rope_type": "default", "rope_theta": 5e5}) == RopeSpec(8, 5e5)
    assert RopeSpec.of(8, 1e4, {"type": None}) == RopeSpec.of(8, 1e4) == RopeSpec(8, 1e4)
    for scaling in ({"rope_type": "longrope", "factor": 4.0}, {"type": "linear"}):
        with pytest.raises(CheckpointError, match=r"rope_type '(longrope|linear)' is not implemented; known: default"):
            RopeSpec.of(8, 1e4, scaling)
    with pytest.raises(CheckpointError, match="low_freq_factor of the rope parameters is None; expected a number"):
        RopeSpec.of(8, 1e4, {"rope_type": "llama3", "factor": 4.0})
    for dim, theta in ((7, 1e4), (0, 1e4), (8, 0.0)):
        with pytest.raises(CheckpointError, match="expected an even number"):
            RopeSpec(dim, theta)


def test_rope_of_heads_that_turn_in_part() -> None:
    assert RopeSpec.of(16, 1e4, {"partial_rotary_factor": 0.25}) == RopeSpec(4, 1e4)


def test_older_spellings_of_rope_parameters_are_one_table() -> None:
    llama = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = rope_parameters({"rope_scaling": llama, "rope_theta": 500_000.0, "max_position_embeddings": 131_072}, 1e4)
    new = rope_parameters({"rope_parameters": llama | {"rope_theta": 500_000.0}, "rope_scaling": None}, 1e4)
    assert RopeSpec.of(64, 1e4, old) == RopeSpec.of(64, 1e4, new)
    assert rope_parameters({}, 1e4)["rope_theta"] == 1e4
    yarn = rope_parameters({"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 4096}, 1e4)
    assert RopeSpec.of(64, 1e4, yarn).original == 4096                        # type: ignore[attr-defined]


def test_llama3_leaves_short_waves_and_slows_long_ones() -> None:
    spec = RopeSpec.of(64, 5e5, {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})
    plain, turned = RopeSpec(64, 5e5).frequencies(), spec.frequencies()
    waves = 2 * np.pi / plain
    np.testing.assert_array_equal(turned[waves < 2048], plain[waves < 2048])
    np.testing.assert_allclose(turned[waves > 8192], plain[waves > 8192] / 32)
    between = (waves >= 2048) & (waves <= 8192)
    assert between.any()
    assert ((turned < plain) & (turned > plain / 32))[between].all()
    assert (np.diff(turned) < 0).all()


@pytest.mark.parametrize(("more", "gain"), [
    ({}, 1 + 0.1 * np.log(4)), ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0), ({"attention_factor": 0.5}, 0.5)])
def test_yarn_ramps_from_kept_to_slowed_and_scales_the_table(more: dict, gain: float) -> None:
    spec = RopeSpec.of(64, 1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384} | more)
    slowed = RopeSpec(64, 1e6).frequencies() / spec.frequencies()
    assert slowed[0] == 1
    np.testing.assert_allclose(slowed[-1], 4)
    assert (np.diff(slowed) >= 0).all()
    table = spec.table(Segments(np.array([9])))
    np.testing.assert_allclose(np.hypot(table.cos, table.sin), gain, rtol=1e-6)


def test_growing_queries_grow_at_each_multiple_of_the_span() -> None:
    plain = RopeSpec(8, 1e4)
    segments = Segments(np.array([7, 12]))
    table, base = GrowingRope(plain, 0.1, 5).table(segments), plain.table(segments)
    want = [1 + 0.1 * np.log(1 + position // 5) for position in segments.positions]
    np.testing.assert_allclose(table.cos, base.cos * np.array(want)[:, None], rtol=1e-6)
    np.testing.assert_allclose(table.sin, base.sin * np.array(want)[:, None], rtol=1e-6)
    np.testing.assert_array_equal(table.cos[:5], base.cos[:5])
