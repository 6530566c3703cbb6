"""Figures of `bench wan` as PNG: a waterfall of the levers, and tokens/s over the round trip beside the bound.

Needs matplotlib (the extra `bench`); imported only when figures are asked for. Called by `wan.py`, or with a result
that was kept: `python -m swarmnode.bench.wan_plot RESULT.json FOLDER`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarmnode.bench.wan import short
from swarmnode.errors import UsageError

Row = dict[str, Any]  # as `wan.run` makes them

WATERFALL_RTT_MS = 80.0  # or what was measured nearest to it
MOST_CURVES = 8
_SIZE = (8.0, 4.8)  # inches
_DPI = 120
_BLUE, _GREEN, _GREY = "#3b6fb6", "#3f9b63", "#8a8a8a"


def check() -> None:
    """UsageError where figures cannot be drawn, before anything is measured."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise UsageError("figures need matplotlib: pip install 'swarmnode[bench]'") from None


def figures(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what the rows have enough of: a waterfall per kind of text, curves where several round trips were measured.

    Each for the rows of one path, rate, number of streams and temperature; the files are named after them.
    """
    check()
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    rows = [row for row in result["rows"] if row.get("tokens_per_s")]
    for key in dict.fromkeys(_group(row) for row in rows):
        of_key = [row for row in rows if _group(row) == key]
        name = "-".join(str(part).replace(".", "_") for part in key if part is not None)
        if steps := waterfall_steps(of_key):
            made.append(_waterfall(steps, _title(of_key[0]), folder / f"waterfall-{name}.png"))
        if len({row["rtt_ms"] for row in of_key}) > 1:
            made.append(_curves(of_key, _title(of_key[0]), folder / f"curves-{name}.png"))
    return made


def waterfall_steps(rows: Sequence[Row]) -> list[Row]:
    """The rows at one round trip that add levers one after the other, from none; [] where there is no such chain."""
    if not rows:
        return []
    rtt = min({row["rtt_ms"] for row in rows}, key=lambda one: abs(one - WATERFALL_RTT_MS))
    chain: list[Row] = []
    for row in sorted((row for row in rows if row["rtt_ms"] == rtt), key=lambda row: len(row["levers"])):
        last = chain[-1]["levers"] if chain else None
        more = set(row["levers"]).difference(last or ())
        if (last is None and not more) or (last is not None and len(more) == 1 and set(last) < set(row["levers"])):
            chain.append(row)
    return chain if len(chain) > 2 else []


def _group(row: Row) -> tuple[Any, ...]:
    return row["path"], row["mbit"], row["text"], row["streams"], row["temperature"]


def _title(row: Row) -> str:
    rate = f"{row['mbit']:g} Mbit/s" if row["mbit"] is not None else "unlimited rate"
    how = "greedy" if not row["temperature"] else f"temperature {row['temperature']:g}"
    streams = f"{row['streams']} stream{'s' if row['streams'] != 1 else ''}"
    return f"{row['path']}, {rate}, {row['text']}, {how}, {streams}"


def _waterfall(steps: Sequence[Row], title: str, file: Path) -> Path:
    figure, axes = _figure()
    before = 0.0
    for place, row in enumerate(steps):
        rate = row["tokens_per_s"]
        low, high = sorted((before, rate))
        axes.bar(place, high - low, bottom=low, width=0.7, color=_BLUE if rate >= before else _GREY)
        axes.plot([place - 0.35, place + 0.35], [rate, rate], color="black", linewidth=1.2)
        bound = row["bound_tokens_per_s"] or 0.0
        if bound:
            axes.plot([place - 0.35, place + 0.35], [bound, bound], color=_GREEN, linewidth=1.5, linestyle="--")
        said = f"{rate:.2f}" + (f"\n× {rate / before:.2f}" if before else "")
        above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 8}
        axes.annotate(said, (place, max(high, bound)), **above)
        before = rate
    added = ["none"] + [_added(a, b) for a, b in itertools.pairwise(steps)]
    axes.set_xticks(range(len(steps)), added, rotation=20, ha="right")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    axes.set_title(f"One lever after the other at {steps[0]['rtt_ms']:g} ms\n{title}", fontsize=10)
    axes.plot([], [], color=_GREEN, linestyle="--", label="bound")
    axes.legend(loc="upper left", fontsize=8)
    return _save(figure, file)


def _curves(rows: Sequence[Row], title: str, file: Path) -> Path:
    figure, axes = _figure()
    sets = list(dict.fromkeys(tuple(row["levers"]) for row in rows))[:MOST_CURVES]
    for levers in sets:
        of_set = sorted((row for row in rows if tuple(row["levers"]) == levers), key=lambda row: float(row["rtt_ms"]))
        label = short(levers)
        line = axes.plot([r["rtt_ms"] for r in of_set], [r["tokens_per_s"] for r in of_set], marker="o", label=label)[0]
        bounds = [(r["rtt_ms"], r["bound_tokens_per_s"]) for r in of_set if r["bound_tokens_per_s"]]
        if bounds:
            axes.plot(*zip(*bounds, strict=True), color=line.get_color(), linestyle="--", linewidth=1, alpha=0.7)
    axes.plot([], [], color=_GREY, linestyle="--", linewidth=1, label="bound")
    axes.set_yscale("log")
    axes.set_xlabel("round trip, ms")
    axes.set_ylabel("tokens/s")
    axes.set_title(f"Decoding over a distance\n{title}", fontsize=10)
    axes.legend(fontsize=8)
    return _save(figure, file)


def _added(before: Row, after: Row) -> str:
    return "+ " + ", ".join(lever for lever in after["levers"] if lever not in before["levers"])


def _figure() -> Any:  # matplotlib's own types would need it to be imported here
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, file: Path) -> Path:
    figure.savefig(file, dpi=_DPI)
    return file


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m swarmnode.bench.wan_plot RESULT.json FOLDER`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 2:
        print("usage: python -m swarmnode.bench.wan_plot RESULT.json FOLDER", file=sys.stderr)
        return 2
    for file in figures(json.loads(Path(given[0]).read_text("utf-8")), Path(given[1])):
        print(file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
