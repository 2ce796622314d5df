"""bench-results/serving.json as a picture. Needs matplotlib, which the `reference` extra brings."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

OURS, THEIRS = "#2a6f97", "#9aa5b1"
Panel = tuple[str, list[str], list[float], list[str], dict[str, float]]
"""Title, names, values, colours, and goals by the name of the bar."""


def panels(report: dict[str, Any]) -> list[Panel]:
    found: list[Panel] = []
    if web := report.get("throughput"):
        names = [f"{n} callers" for n in (1, 8, 32)]
        found.append(("web + lane + 3 ms model, requests/s", names, [web[f"callers_{n}"]["requests_per_s"] for n in (1, 8, 32)], [OURS] * 3,
                      {"32 callers": 600}))
    if cpu := report.get("cpu"):
        names = {"reference": "sentence-transformers", "callers_1": "1 caller", "callers_8": "8 callers", "callers_32": "32 callers",
                 "batch_64": "64 texts a request"}
        goals = {"callers_1": 1.2, "callers_8": 1.0, "callers_32": 0.7, "batch_64": 0.6}
        spent = {key: median(cpu["cpu_ms_per_text"][key]) for key in names}
        found.append(("CPU a text, web + worker, ms", list(names.values()), list(spent.values()), [THEIRS] + [OURS] * 4,
                      {names[key]: goal * spent["reference"] for key, goal in goals.items()}))
    if bulk := report.get("bulk"):
        times = {"p50 alone": bulk["online_p50_ms"]["alone"], "p50 under bulk": bulk["online_p50_ms"]["under"],
                 "p95 alone": bulk["online_p95_ms"]["alone"], "p95 under bulk": bulk["online_p95_ms"]["under"]}
        found.append(("a query every 0.2 s, ms", list(times), list(times.values()), [THEIRS, OURS, THEIRS, OURS],
                      {"p95 under bulk": times["p95 alone"] + bulk["longest_pack_ms"]}))
        rates = {name: median(values) for name, values in bulk["bulk_texts_per_s"].items()}
        found.append(("bulk, texts/s", ["alone", "under queries"], [rates["alone"], rates["under"]], [THEIRS, OURS],
                      {"under queries": 0.7 * rates["alone"]}))
    if workers := report.get("workers"):
        rates = {name: median(values) for name, values in workers["tokens_per_s"].items()}
        found.append(("bulk, tokens/s", ["one worker", "two workers"], [rates["one"], rates["two"]], [THEIRS, OURS],
                      {"two workers": 1.6 * rates["one"]}))
    return found


def draw(report: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = panels(report)
    figure, axes = pyplot.subplots(1, len(shown), figsize=(4 * len(shown), 3.4), constrained_layout=True, squeeze=False)
    for axis, (title, names, values, colours, goals) in zip(axes[0], shown, strict=True):
        bars = axis.barh(names, values, 0.6, color=colours)
        axis.bar_label(bars, [f"{v:.3g}" if v < 100 else f"{v:,.0f}" for v in values], padding=2, fontsize=8)
        for name, goal in goals.items():
            axis.plot([goal, goal], [names.index(name) - 0.38, names.index(name) + 0.38], color="#d1495b", linewidth=2)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.18)
    parts = [part for part in report.values() if "load_before" in part]
    loads = [part[key][0] for part in parts for key in ("load_before", "load_after")]
    figure.suptitle(f"serving on {report['machine']['cpus']} CPUs of {report['machine']['processor']}, load average {min(loads):.1f} to "
                    f"{max(loads):.1f}, {max(part['when'] for part in parts)}; red: the goal", fontsize=11)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
