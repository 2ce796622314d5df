"""Charts of vector components as inline SVG: no script, no colours of their own beyond the page's, readable by a screen reader.

Marks carry class names for the page's style sheet and fall back to `currentColor`; `<title>` and `<desc>` say in words what is drawn.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of an array, over its finite values alone; NaN where there is none. `norm` is euclidean, over all values."""

    size: int
    nans: int
    infinities: int
    norm: float
    least: float
    mean: float
    most: float
    deviation: float

    @classmethod
    def of(cls, values: np.ndarray) -> Summary:
        flat = np.asarray(values, np.float64).ravel()
        finite = flat[np.isfinite(flat)]
        nans = int(np.isnan(flat).sum())
        some = finite if len(finite) else np.array([np.nan])
        return cls(size=len(flat), nans=nans, infinities=len(flat) - len(finite) - nans, norm=float(np.sqrt(flat @ flat)),
                   least=float(some.min()), mean=float(some.mean()), most=float(some.max()), deviation=float(some.std()))

    @property
    def finite(self) -> bool:
        return not (self.nans or self.infinities)

    @property
    def defects(self) -> str:
        """What is wrong with the values, in words; empty where all are finite."""
        return " and ".join(f"{count} {name}" for count, name in ((self.nans, "NaN"), (self.infinities, "infinite")) if count)


def number(value: float) -> str:
    """Four significant digits, for people."""
    return f"{value:.4g}"


def histogram(values: np.ndarray, *, id: str, name: str, bins: int = 41) -> SafeString:
    """How often components take which value. `values` [n] of any float dtype; `id` must be unique within the page."""
    flat = np.asarray(values, np.float64).ravel()
    summary, finite = Summary.of(flat), flat[np.isfinite(flat)]
    if not len(finite):
        return _svg(id, name, f"No finite value among {summary.size}.", 360, 132, _note(360, 66, "no finite value"))
    edge = float(np.abs(finite).max()) or 1.0
    low, high = (-edge, edge) if finite.min() < 0 else (0.0, edge)
    # An even grid around zero, scaled first: subnormal and huge values would overflow numpy's own bin widths.
    counts, _ = np.histogram(finite / edge, bins=bins, range=(low / edge, 1.0))
    width, top = 360 / bins, int(counts.max())
    bars = "".join(f"M{i * width + .5:.2f} 108h{width - 1:.2f}V{108 - 96 * int(count) / top:.2f}h{-(width - 1):.2f}z"
                   for i, count in enumerate(counts) if count)
    at = 360 * -low / (high - low)
    mean = 360 * (summary.mean / edge - low / edge) / ((high - low) / edge)
    labels = [(0.0, "start", low), (360.0, "end", high)] + ([(180.0, "middle", 0.0)] if low else [])
    body = [
        format_html('<path class="chart-bars" fill="currentColor" d="{}"/>', bars),
        format_html('<path class="chart-axis" fill="none" stroke="currentColor" d="M0 108.5H360M{} 108v5"/>', f"{at:.2f}"),
        format_html('<path class="chart-mean" fill="none" stroke="currentColor" stroke-dasharray="3 3" d="M{} 8V108"/>', f"{mean:.2f}"),
        *(format_html('<text class="chart-label" fill="currentColor" x="{}" y="126" text-anchor="{}">{}</text>', x, anchor, number(value))
          for x, anchor, value in labels)]
    if summary.defects:
        body.append(_note(360, 20, summary.defects + " not drawn"))
    words = (f"{summary.size} components from {number(summary.least)} to {number(summary.most)}, mean {number(summary.mean)} "
             f"(dashed line), standard deviation {number(summary.deviation)}; the fullest of {bins} bins holds {top}.")
    return _svg(id, name, words + (f" {summary.defects} not drawn." if summary.defects else ""), 360, 132, *body)


def sparkline(values: np.ndarray, *, id: str, name: str, width: int = 720, height: int = 72) -> SafeString:
    """Values in their order, as strokes from a zero line. Where they are more than half the pixels, a stroke spans its group's extremes."""
    flat = np.asarray(values, np.float64).ravel()
    summary = Summary.of(flat)
    if not len(flat) or not np.isfinite(flat).any():
        return _svg(id, name, f"No finite value among {summary.size}.", width, height, _note(width, height / 2, "no finite value"))
    groups = np.array_split(flat, min(len(flat), width // 2))
    edge = max(abs(summary.least), abs(summary.most)) or 1.0
    least, most = min(summary.least, 0.0) / edge, max(summary.most, 0.0) / edge
    scale = (height - 4) / ((most - least) or 1.0)
    zero = 2 + most * scale
    step = width / len(groups)
    strokes, holes = [], []
    for i, group in enumerate(groups):
        x = (i + .5) * step
        finite = group[np.isfinite(group)]
        if len(finite) < len(group):
            holes.append(f"M{x:.2f} 0V{height}")
        if len(finite):
            strokes.append(f"M{x:.2f} {zero - max(finite.max() / edge, 0) * scale:.2f}V{zero - min(finite.min() / edge, 0) * scale:.2f}")
    thick = f"{min(max(step * .7, 1), 12):.2f}"
    body = [
        *(format_html('<path class="chart-{}" fill="none" stroke="currentColor" stroke-width="{}" d="{}"/>', kind, thick, "".join(marks))
          for kind, marks in (("holes", holes), ("strokes", strokes)) if marks),
        format_html('<path class="chart-axis" fill="none" stroke="currentColor" d="M0 {y}H{w}"/>', y=f"{zero:.2f}", w=width)]
    ordered = np.where(np.isfinite(flat), flat, np.nan)
    words = (f"{summary.size} values in order, least {number(summary.least)} at {int(np.nanargmin(ordered))}, "
             f"most {number(summary.most)} at {int(np.nanargmax(ordered))}, counted from 0.")
    return _svg(id, name, words + (f" {summary.defects}, marked over the full height." if summary.defects else ""), width, height, *body)


def _note(width: float, y: float, text: str) -> SafeString:
    return format_html('<text class="chart-flag" fill="currentColor" x="{}" y="{}" text-anchor="middle">{}</text>', width / 2, y, text)


def _svg(id: str, title: str, desc: str, width: int, height: int, *body: str) -> SafeString:
    return format_html(
        '<svg class="chart" role="img" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
        'aria-labelledby="{id}-title" aria-describedby="{id}-desc">'
        '<title id="{id}-title">{title}</title><desc id="{id}-desc">{desc}</desc>{body}</svg>',
        w=width, h=height, id=id, title=title, desc=desc, body=mark_safe("".join(body)))  # every part of `body` went through format_html
