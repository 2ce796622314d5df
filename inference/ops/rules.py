"""What the backends must agree on, written once with operators that numpy and mlx arrays share."""
from __future__ import annotations

from typing import Any

import numpy as np


def visible(queries: Any, keys: Any, hidden: Any, causal: bool, window: int | None) -> Any:
    """Who sees whom: positions [..., Lq] and [..., Lk], `hidden` [..., Lk] bool or None -> [..., Lq, Lk] bool.

    None where every row sees every key. A row that sees nothing sees itself: softmax over nothing is NaN.
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


def check_ids(ids: np.ndarray, rows: int) -> None:
    """numpy takes negative ids from the end and mlx takes anything: both would answer with a wrong row."""
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise IndexError(f"ids from {ids.min()} to {ids.max()} in a table of {rows} rows")
