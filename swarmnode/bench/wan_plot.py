"""Figures of `bench wan` as PNG: a waterfall of the levers, and tokens/s over the round trip beside the bound.

Needs matplotlib (the extra `bench`); imported only when figures are asked for. Called by `wan.py`, or with a result
that was kept, or a file of its rows: `python -m swarmnode.bench.wan_plot RESULT.json FOLDER`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarmnode.bench.wan_cases import short
from swarmnode.bench.wan_lines import load
from swarmnode.bench.wan_table import added, group_of, waterfall_steps
from swarmnode.errors import SwarmnodeError, UsageError

Row = Mapping[str, Any]  # as `wan.run` makes them

MOST_CURVES = 8
_SIZE = (8.0, 4.8)  # inches
_DPI = 120
_BLUE, _GREEN, _GREY = "#3b6fb6", "#3f9b63", "#8a8a8a"


def check(folder: Path) -> None:
    """UsageError where figures cannot be drawn, or not be written to `folder`, which is made; before anything is
    measured."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise UsageError("figures need matplotlib: pip install 'swarmnode[bench]'") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # a NUL in its name
        raise UsageError(f"{folder}: figures cannot be written there ({_why(error)})") from None


def figures(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the rows have enough of: a waterfall per kind of text, curves where several round trips were measured.

    Each for the rows of one path, rate, number of streams and temperature; the files are named after them. Where there
    are several rates and numbers of streams, the curves of a path are one figure. Raises UsageError as `check` does,
    SwarmnodeError where a figure cannot be written.
    """
    check(folder)
    made: list[Path] = []
    rows = [row for row in result["rows"] if row.get("tokens_per_s")]
    for key in dict.fromkeys(group_of(row) for row in rows):
        of_key = [row for row in rows if group_of(row) == key]
        name = "-".join(str(part).replace(".", "_") for part in key if part is not None)
        if steps := waterfall_steps(of_key):
            made.append(_waterfall(steps, _title(of_key[0]), folder / f"waterfall-{name}.png"))
        if len({row["rtt_ms"] for row in of_key}) > 1 and not _is_grid(rows):
            made.append(_curves(of_key, _title(of_key[0]), folder / f"curves-{name}.png"))
    if _is_grid(rows):
        for path, text in dict.fromkeys((row["path"], row["text"]) for row in rows):
            of_path = [row for row in rows if (row["path"], row["text"]) == (path, text)]
            made.append(_grid(of_path, f"{path}, {text}", folder / f"grid-{path}-{text}.png"))
    return made


def _is_grid(rows: Sequence[Row]) -> bool:
    return all(len({row[axis] for row in rows}) > 1 for axis in ("rtt_ms", "mbit", "streams"))


def _title(row: Row) -> str:
    how = "greedy" if not row["temperature"] else f"temperature {row['temperature']:g}"
    return f"{row['path']}, {_rate(row['mbit'])}, {row['text']}, {how}, {_streams(row['streams'])}"


def _rate(mbit: float | None) -> str:
    return f"{mbit:g} Mbit/s" if mbit is not None else "unlimited rate"


def _streams(count: int) -> str:
    return f"{count} stream{'s' if count != 1 else ''}"


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
    names = ["none"] + [added(a, b) for a, b in itertools.pairwise(steps)]
    axes.set_xticks(range(len(steps)), names, rotation=20, ha="right")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    axes.set_title(f"One lever after the other at {steps[0]['rtt_ms']:g} ms\n{title}", fontsize=10)
    axes.plot([], [], color=_GREEN, linestyle="--", label="bound")
    axes.legend(loc="upper left", fontsize=8)
    return _save(figure, file)


def _curves(rows: Sequence[Row], title: str, file: Path) -> Path:
    figure, axes = _figure()
    _draw_curves(axes, rows)
    axes.set_xlabel("round trip, ms")
    axes.set_ylabel("tokens/s")
    axes.set_title(f"Decoding over a distance\n{title}", fontsize=10)
    axes.legend(fontsize=8)
    return _save(figure, file)


def _grid(rows: Sequence[Row], title: str, file: Path) -> Path:
    """A panel per rate (down) and number of streams (across), all with the same scales. Of lever sets, those that are
    in every panel's rows."""
    rates = sorted({row["mbit"] for row in rows}, key=lambda rate: -(rate if rate is not None else float("inf")))
    streams = sorted({row["streams"] for row in rows})
    figure, panels = _figure(len(rates), len(streams))
    for line, rate in zip(panels, rates, strict=True):
        for axes, count in zip(line, streams, strict=True):
            here = [row for row in rows if row["mbit"] == rate and row["streams"] == count]
            several = [row for row in here if sum(one["levers"] == row["levers"] for one in here) > 1]
            _draw_curves(axes, several)
            axes.set_title(f"{_rate(rate)}, {_streams(count)}", fontsize=9)
    panels[0][0].legend(fontsize=8)
    figure.supxlabel("round trip, ms", fontsize=9)
    figure.supylabel("tokens/s", fontsize=9)
    figure.suptitle(f"Decoding over a distance: {title}", fontsize=11)
    return _save(figure, file)


def _draw_curves(axes: Any, rows: Sequence[Row]) -> None:
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


def _figure(down: int = 1, across: int = 1) -> Any:  # matplotlib's own types would need it to be imported here
    """A figure and its axes; several: in a list per line, with the same scales."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    many = down * across > 1
    figure = Figure(figsize=(3.2 * across + 0.6, 2.4 * down + 0.8) if many else _SIZE, layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for axes in panels.flat:
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return (figure, panels) if many else (figure, panels[0][0])


def _save(figure: Any, file: Path) -> Path:
    try:
        figure.savefig(file, dpi=_DPI)
    except OSError as error:
        raise SwarmnodeError(f"{file}: cannot be written ({_why(error)})") from None
    return file


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m swarmnode.bench.wan_plot RESULT.json FOLDER`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 2:
        print("usage: python -m swarmnode.bench.wan_plot RESULT.json FOLDER", file=sys.stderr)
        return 2
    kept = Path(given[0])
    try:
        result = {"rows": load(kept)[1]} if kept.suffix == ".jsonl" else json.loads(kept.read_text("utf-8"))
        for file in figures(result, Path(given[1])):
            print(file)
    except SwarmnodeError as error:
        print(f"wan_plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
