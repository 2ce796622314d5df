"""bench-results/cpu.json as a picture. Needs matplotlib, which the `reference` extra brings."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

PANELS = (("mixed lengths, texts per CPU-second", "mixed"), ("16-token texts, texts per CPU-second", "short"),
          ("single text, ms (median)", "single"), ("peak RSS, MiB", "rss"))


def value(result: dict[str, Any], key: str) -> float:
    found = result[key]
    return float(median(found["cpu"]) if isinstance(found, dict) else median(found) if isinstance(found, list) else found)


def draw(report: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(16, 4), constrained_layout=True)
    names = list(next(iter(report["threads"].values())))
    for axis, (title, key) in zip(axes, PANELS, strict=True):
        for shift, (threads, results) in enumerate(report["threads"].items()):
            places = [i + 0.38 * shift for i in range(len(names))]
            values = [value(results[name], key) for name in names]
            bars = axis.barh(places, values, 0.36, alpha=1 - 0.45 * shift, label=f"{threads} thread{'s' * (int(threads) > 1)}",
                             color=["#2a6f97" if name.startswith("host") else "#9aa5b1" for name in names])
            axis.bar_label(bars, [f"{v:.3g}" if v < 100 else f"{v:.0f}" for v in values], padding=2, fontsize=8)
        axis.set_yticks([i + 0.19 * (len(report["threads"]) - 1) for i in range(len(names))], names)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.15)
    axes[0].legend(fontsize=8, frameon=False, loc="lower right")
    load = f"{report['load_before'][0]:.1f} to {report['load_after'][0]:.1f}"
    figure.suptitle(f"all-MiniLM-L6-v2 on {report['processor']}, load average {load}, {report['when']}", fontsize=11)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
