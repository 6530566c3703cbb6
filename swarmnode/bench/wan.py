"""What decoding over a distance costs, lever by lever, beside its physical bound: `python -m swarmnode.bench.wan`.

Real `swarmnode up` processes on this machine behind an emulated link (`wan_swarm.py`). A step of a decode needs one
round trip per layer whose experts are elsewhere, so that

    bound   generations at once × accepted tokens per step ÷ (remote layers × round trip)

Rows, one per link, path, set of levers (`wan_cases.py`), kind of text, temperature and number of streams:

    tokens_per_s            of all streams together, after the prompts. Where every stream is generating at once: from
                            the moment when all have begun until the first ends; where they wait for each other: each
                            one's own time, added up
    steps_per_s             decodes per second that a stream takes part in
    accepted_per_step       tokens that a decode gave a stream: 1 without speculation
    blocking_round_trips_per_token   round trips that a stream stood still for, per token
    bound_tokens_per_s      see above; nothing where there is no round trip. Remote layers are the model's, or, where
                            the backbone keeps experts itself, as many as a step was found to wait for
    bytes_per_token         both ways, whole frames, prompts and every step included
    gain, break_even        only with speculation: tokens/s beside the same without, measured in turns in the same
                            swarm, and the tokens that a step must give to be worth its longer time
    wire                    what rows travelled as: a model's gate may not allow what a lever asks for
    local_step_ms           a step of plain llama.cpp with the whole model in one process and as many threads: what
                            the bound does not know of (`local_step.py`; only in JSON)

Ways to use it:

    --rtt … --levers …              some rows with care: `--seconds` of decoding each, in turns
    --grid --out FILE [--resume]    the whole grid, a few seconds per cell; what FILE has is not measured again
    --grid --quick                  a part of it, within a minute
    --from FILE --plot FOLDER       tables and figures of what was measured before
    --shape NAME:LAYERS             a random-weight model of that model's layer shape (`wan_model.py`)
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from swarmnode.bench import wan_model, wan_plot
from swarmnode.bench.command import Result, markdown, parser, run_command
from swarmnode.bench.swarm_start import onboarded
from swarmnode.bench.wan_cases import KEPT, Case, WanOptions, cases, parse_levers, short
from swarmnode.bench.wan_lines import Row, RowFile, key_of, load
from swarmnode.bench.wan_measure import Bench, axes_of
from swarmnode.bench.wan_swarm import PathName
from swarmnode.bench.wan_table import by_round_trip, table, waterfall
from swarmnode.bench.wan_text import CLASSES
from swarmnode.demo import MODEL
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.model.gguf_file import GgufFile
from swarmnode.tables import print_rows

RTT = "0,5,20,80,100,200"
CELL_S = 6.0
LEAST_S, MOST, MOST_STREAMS = 0.01, 1e6, 4096  # that may be asked for
CELL_PROMPT = 160  # characters: a whole prompt in exact mode at 10 Mbit/s would be all that a cell has time for
GATE_POSITIONS, QUICK_GATE_POSITIONS = 2048, 1024


@dataclass(frozen=True, slots=True)
class _Axes:
    """What is measured where a flag does not say otherwise; each as its flag has it."""

    rtt: str = RTT
    mbit: str = "0"
    streams: str = "1"
    text: str = ",".join(CLASSES)
    path: str = "direct"
    seconds: float = 20.0


GRID = _Axes(mbit="0,100,10", streams="1,4,8", text="code", path="direct,relay", seconds=3.0)
QUICK = _Axes(rtt="5,80", streams="1,4", text="code", seconds=2.0)


def run(options: WanOptions, file: RowFile | None = None, note: str = "") -> dict[str, Any]:
    """Measure; starts and ends processes of this machine. SwarmnodeError where they do not run.

    Rows go to `file` as soon as they are known, and those that it has are not measured again. `note` says what the
    model is.
    """
    rows = _Rows(options, file)
    asyncio.run(_run(options, rows))
    return {**about(options, note), "rows": rows.in_order()}


async def _run(options: WanOptions, rows: _Rows) -> None:
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        # A model of the cache has its pack there too: it was read once, and keeps its gate's verdict.
        kept = options.model.is_relative_to(wan_model.cache_folder())
        place = options.model.with_suffix(".pack") if kept else folder / "pack"
        pack = await onboarded(options.model, place)
        await Bench(options, pack, folder, rows.add, tell).run(rows.missing)


class _Rows:
    """What was measured: before, by the file, and now; tells how long it will go on."""

    def __init__(self, options: WanOptions, file: RowFile | None) -> None:
        self._file, self._all = file, cases(options)
        self._found: dict[tuple[Any, ...], Row] = {key_of(row): row for row in (file.rows if file else ())}
        self.missing = [case for case in self._all if key_of(axes_of(case)) not in self._found]
        self._began, self._now = time.monotonic(), 0
        if kept := len(self._all) - len(self.missing):
            tell(f"{kept} of {len(self._all)} cells are measured already")

    def add(self, case: Case, row: Row) -> None:
        """A row is known. One without figures is not kept in the file: it is tried again another time."""
        self._found[key_of(row)] = row
        self._now += 1
        if self._file is not None and "tokens_per_s" in row:
            self._file.add(row)
        left = (time.monotonic() - self._began) / self._now * (len(self.missing) - self._now)
        tell(f"{self._now} of {len(self.missing)}: {_said(case, row)}; about {_minutes(left)} left")

    def in_order(self) -> list[Row]:
        """All rows of these options, as they were asked for."""
        return [self._found[key] for key in (key_of(axes_of(case)) for case in self._all) if key in self._found]


def _said(case: Case, row: Row) -> str:
    rate = "unlimited" if case.mbit is None else f"{case.mbit:g} Mbit/s"
    streams = f"{case.streams} stream{'s' if case.streams > 1 else ''}"
    what = f"{case.rtt_ms:g} ms, {rate}, {case.path}, {case.text}, {streams}, {short(case.levers)}"
    if "tokens_per_s" not in row:
        return f"{what}: no figures: {row['skipped']}"
    bound = f", {row['ratio_to_bound']:.2f} of the bound" if row["ratio_to_bound"] else ""
    return f"{what}: {row['tokens_per_s']:.4g} tokens/s{bound}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def about(options: WanOptions, note: str = "") -> dict[str, Any]:
    """What all rows of one run have in common, beside their axes: a file goes on only where this is the same."""
    said = {
        "model": options.model.stem,
        "note": note,
        "seconds": options.seconds,
        "cell_s": options.cell_s,
        "tokens": options.tokens,
        "kept": options.kept,
        "prompt_characters": options.prompt_characters,
        "threads": options.threads if options.threads > 1 else None,
        "draft": options.draft.name if options.draft is not None else None,
    }
    return {name: value for name, value in said.items() if value not in (None, "", 0)}


def tell(text: str) -> None:
    """Progress, for whoever watches."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ---- the command line


def _numbers(text: str, name: str, least: float) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--{name} {text}: give numbers with commas between them") from None
    if not all(least <= number <= MOST for number in found):
        raise UsageError(f"--{name} {text}: give numbers from {least:g} to {MOST:,.10g}")
    return found


def _number(value: float, name: str, least: float, most: float = MOST) -> float:
    """An option as it was parsed, within bounds. UsageError where it is not."""
    if not least <= value <= most:
        raise UsageError(f"--{name} {value:g}: give {least:g} to {most:,.10g}")
    return value


def _counts(text: str, name: str) -> tuple[int, ...]:
    numbers = _numbers(text, name, 1)
    if not all(number.is_integer() and number <= MOST_STREAMS for number in numbers):
        raise UsageError(f"--{name} {text}: give whole numbers, {MOST_STREAMS} at most")
    return tuple(int(number) for number in numbers)


def _names(text: str, name: str, known: Iterable[str]) -> tuple[Any, ...]:  # of a Literal type that the caller knows
    found, known = tuple(part.strip() for part in text.split(",")), tuple(known)
    if wrong := [part for part in found if part not in known]:
        raise UsageError(f"--{name} {wrong[0]}: say {', '.join(known)}")
    return found


def _check_gguf(file: Path, name: str) -> None:
    """UsageError, before anything is started, where a file is not there or is none."""
    try:
        GgufFile.open(file)
    except SwarmnodeError as error:
        raise UsageError(f"--{name} {error}") from None


def options_of(given: argparse.Namespace) -> tuple[WanOptions, str]:
    """What the flags ask for, and a line about the model. UsageError names a flag that is wrong."""
    preset = QUICK if given.quick else GRID if given.grid else _Axes()
    told = {one.name: getattr(given, one.name) for one in fields(_Axes) if getattr(given, one.name) is not None}
    wish = replace(preset, **told)
    bounded = given.grid or given.quick
    _number(wish.seconds, "seconds", LEAST_S)
    _number(given.kept, "kept", 0, 1)
    if given.cell is not None:
        _number(given.cell, "cell", LEAST_S)
    _number(given.threads, "threads", 1, 256)
    if given.tokens is not None:  # of a single one there is nothing to be measured: the first is not counted
        _number(given.tokens, "tokens", 2)
    rtt_ms = _numbers(wish.rtt, "rtt", 0)
    mbit = tuple(rate or None for rate in _numbers(wish.mbit, "mbit", 0))
    streams, temperature = _counts(wish.streams, "streams"), _numbers(given.temperature, "temperature", 0)
    if given.shape is not None and given.model is not None:
        raise UsageError("--shape with --model: a shape is a model; give one of them")
    for name in ("model", "draft"):
        if (file := getattr(given, name)) is not None:
            _check_gguf(file, name)
    shaped = wan_model.shaped_model(given.shape) if given.shape is not None else None
    # Slices of gigabytes would have to go through the emulated link before anything is measured.
    usual = "none,all" if shaped is None else "none,all-remote"
    levers = parse_levers(given.levers if given.levers is not None else usual)
    text, path = _names(wish.text, "text", CLASSES), _names(wish.path, "path", get_args(PathName))
    if shaped is not None and not shaped.path.is_file():
        tell(f"writing {shaped.path}")
    model = wan_model.written(shaped) if shaped is not None else given.model or MODEL
    options = WanOptions(
        rtt_ms=rtt_ms,
        mbit=mbit,
        streams=streams,
        levers=levers,
        text=text,
        path=path,
        temperature=temperature,
        seconds=wish.seconds,
        tokens=given.tokens or 0,
        model=model,
        draft=given.draft,
        threads=given.threads,
        kept=given.kept,
        gate_positions=QUICK_GATE_POSITIONS if given.quick or shaped is not None else GATE_POSITIONS,
        cell_s=(given.cell or CELL_S) if bounded or given.cell is not None else None,
        waterfall=given.grid and not given.quick and given.levers is None and shaped is None,
        prompt_characters=wan_model.PROMPT_CHARACTERS if shaped is not None else CELL_PROMPT if bounded else 0,
    )
    return options, shaped.note if shaped is not None else ""


def _parser() -> argparse.ArgumentParser:
    made = parser("wan", __doc__)
    made.add_argument(
        "--grid",
        action="store_true",
        help="round trips × rates × streams × direct, relay × none, all; and one waterfall",
    )
    made.add_argument("--quick", action="store_true", help="a part of the grid, within a minute")
    made.add_argument("--rtt", help=f"round trips in ms; {RTT} unless told")
    made.add_argument("--mbit", help="rates each way in Mbit/s, 0 for no limit")
    made.add_argument("--streams", help="generations that are asked for at the same time")
    made.add_argument("--levers", help="sets of levers; none,all unless told, see wan_cases.py")
    made.add_argument("--text", help=f"kinds of text: {', '.join(CLASSES)}")
    made.add_argument("--path", help="direct, relay")
    made.add_argument("--temperature", default="0")
    made.add_argument("--seconds", type=float, help="of decoding per row, at least; with --grid about so many")
    made.add_argument("--cell", type=float, help=f"seconds that a row may take at most; {CELL_S:g} with --grid")
    made.add_argument("--tokens", type=int, help="of each generation, at least 2; else what fits the time")
    made.add_argument("--model", type=Path)
    made.add_argument("--shape", help="a random-weight model of a published layer shape: Qwen3.5-122B:3")
    made.add_argument("--draft", type=Path, help="speculate with this small model instead of n-gram lookup")
    made.add_argument("--kept", type=float, default=KEPT, help="share of the experts' bytes with local-experts")
    made.add_argument("--threads", type=int, default=1, help="of each node; they take turns with a single stream")
    made.add_argument("--out", type=Path, help="append rows to this file of JSON lines as they are measured")
    made.add_argument("--resume", action="store_true", help="go on with --out: do not measure again what it has")
    made.add_argument("--from", dest="kept_rows", type=Path, help="show the rows of such a file, measure nothing")
    made.add_argument("--markdown", action="store_true", help="print a table with a column per round trip for a page")
    made.add_argument("--plot", type=Path, help="folder for figures as PNG")
    return made


def _measure(given: argparse.Namespace) -> Result:
    if given.plot is not None:
        wan_plot.check(given.plot)
    if given.kept_rows is not None:
        said, rows = load(given.kept_rows)
        return {**said, "rows": rows}
    if given.resume and given.out is None:
        raise UsageError("--resume: say which file by --out FILE")
    options, note = options_of(given)
    file = RowFile(given.out, about(options, note), resume=given.resume) if given.out is not None else None
    return run(options, file, note)


def _show(result: Result, given: argparse.Namespace) -> None:
    if given.markdown:
        rows = result["rows"]
        print("\n".join(filter(None, (markdown(by_round_trip(rows)), markdown(waterfall(rows))))), end="")
    else:
        print_rows(table(result), as_json=False)


def _plot(result: Result, given: argparse.Namespace) -> None:
    if given.plot is not None:
        for path in wan_plot.figures(result, given.plot):
            tell(f"wrote {path}")


def _without_figures(result: Result) -> bool:
    """Is there nothing but rows that were skipped? Says so."""
    rows = result["rows"]
    if any("tokens_per_s" in one for one in rows):
        return False
    print("wan: no row has figures" + (f": {rows[0]['skipped']}" if rows else ""), file=sys.stderr)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m swarmnode.bench.wan`; see the module, or --help."""
    return run_command(_parser(), arguments, _measure, _show, failed=_without_figures, then=_plot)


if __name__ == "__main__":
    raise SystemExit(main())
