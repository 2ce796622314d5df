"""What the backends must agree on, written once with operators that numpy and mlx arrays share."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..batching import Segments


def visible(queries: Any, keys: Any, hidden: Any, causal: bool, window: int | None) -> Any:
    """Who sees whom: positions [..., Lq] and [..., Lk], `hidden` [..., Lk] bool or None -> [..., Lq, Lk] bool.

    None where every row sees every key. A row that sees nothing sees itself, since softmax over nothing is NaN; see `blind`.
    """
    if not causal and window is None and hidden is None:
        return None
    apart = keys[..., None, :] - queries[..., :, None]
    allowed = apart <= (0 if causal else window if window is not None else np.iinfo(np.int32).max)
    if window is not None:
        allowed = allowed & (apart >= -window)
    if hidden is not None:
        allowed = allowed & ~hidden[..., None, :]
        allowed = allowed | ((apart == 0) & ~allowed.any(axis=-1, keepdims=True))
    return allowed


def blind(segments: Segments, causal: bool, window: int | None) -> np.ndarray | None:
    """The rows of a pack that see no row at all, ascending; None where there are none."""
    if segments.hidden is None:
        return None

    def build() -> np.ndarray:
        assert segments.hidden is not None
        found = []
        for b in range(segments.count):
            own, keys = segments.rows(b), np.arange(segments.total)[segments.keys(b)]
            seen = segments.positions[keys][~segments.hidden[keys]]
            at, radius = segments.positions[own], segments.total if window is None else window
            counts = np.searchsorted(seen, at if causal else at + radius, "right") - np.searchsorted(seen, at - radius, "left")
            found.append(np.flatnonzero(counts == 0) + own.start)
        return np.concatenate(found)

    rows: np.ndarray = segments.memo(("blind", causal, window), build)
    return rows if len(rows) else None


def neighbour(segments: Segments, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """For every row of a pack the row `offset` places further on in its segment, [T] int32, itself where there is none, and the rows
    that have none."""
    def build() -> tuple[np.ndarray, np.ndarray]:
        index = np.arange(segments.total, dtype=np.int32)
        place = index - np.repeat(segments.first, segments.lengths) + offset
        inside = (place >= 0) & (place < np.repeat(segments.lengths, segments.lengths))
        return np.where(inside, index + np.int32(offset), index), np.flatnonzero(~inside)

    found: tuple[np.ndarray, np.ndarray] = segments.memo(("neighbour", offset), build)
    return found


def check_ids(ids: np.ndarray, rows: int) -> None:
    """numpy takes negative ids from the end and mlx takes anything: both would answer with a wrong row."""
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise IndexError(f"ids from {ids.min()} to {ids.max()} in a table of {rows} rows")
