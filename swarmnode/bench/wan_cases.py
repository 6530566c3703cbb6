"""What `bench wan` measures: levers, sets of them, and one case per row. Nothing is started here.

Levers, each a switch of `up`; they add up in this order:

    partial         one weighted sum per worker and token instead of every expert's row
    f16             rows of F16 both ways
    int8            INT8 on the way out, F16 back; the gate is run first
    int8-back       INT8 both ways
    speculation     drafts by n-gram lookup, verified in one step
    local-experts   a share of the experts' bytes on the backbone itself, those that make whole layers local
    batch           all streams in one step; without it they wait for each other
    overlap         two llama contexts: one computes while the other waits
    star            four workers instead of one

Sets: `none`; `all`; `all-remote`, all but local-experts; names joined by +; `one-by-one`: none, each alone, all;
`waterfall`: none, then one more at a time. Called by `wan.py` and `wan_measure.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.bench.wan_swarm import PathName, SwarmSetting
from swarmnode.bench.wan_text import TextClass
from swarmnode.demo import MODEL
from swarmnode.errors import UsageError

LEVERS = (
    "partial", "f16", "int8", "int8-back", "speculation", "local-experts", "batch", "overlap", "star",
)  # fmt: skip
ALL_REMOTE = tuple(lever for lever in LEVERS if lever != "local-experts")
WIRES = {"f16": "f16", "int8": "int8/f16", "int8-back": "int8"}  # later ones win
WATERFALL = LEVERS[:-1]  # the star's worth is that it costs nothing: `star.py`
STREAMS_ONLY = ("batch", "overlap")  # change nothing for a single stream
STAR_WORKERS = 4
KEPT = 0.5  # of all experts' bytes, with local-experts
LANES = 2
GATE_POSITIONS = 2048
WATERFALL_RTT_MS = 80.0


@dataclass(frozen=True, slots=True)
class WanOptions:
    """What to measure. `seconds` is the least time of decoding per row; `tokens` fixes a generation's length, which is
    else what the time has room for. `mbit` None is a link without a limit. `draft`: a small model for speculation.
    `threads` are each node's: those of one machine take turns with a single stream.

    `cell_s` bounds a row's whole time, seconds, prompts included: it is one round then, rows do not take turns, and all
    numbers of streams have one swarm with room for the most. None: no bound, and a swarm of its own for each number.
    `waterfall` adds one lever after the other at the round trip nearest to WATERFALL_RTT_MS, for the first of all
    else and the second number of streams. `prompt_characters`: only so many of a prompt's last ones, 0 for all.
    """

    rtt_ms: tuple[float, ...] = (0, 5, 20, 80, 100, 200)
    mbit: tuple[float | None, ...] = (None,)
    streams: tuple[int, ...] = (1,)
    levers: tuple[tuple[str, ...], ...] = ((), LEVERS)
    text: tuple[TextClass, ...] = ("prose", "code", "edit")
    path: tuple[PathName, ...] = ("direct",)
    temperature: tuple[float, ...] = (0.0,)
    seconds: float = 20.0
    tokens: int = 0
    model: Path = MODEL
    draft: Path | None = None
    threads: int = 1
    kept: float = KEPT
    gate_positions: int = GATE_POSITIONS
    cell_s: float | None = None
    waterfall: bool = False
    prompt_characters: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be measured."""

    rtt_ms: float
    mbit: float | None
    path: PathName
    levers: tuple[str, ...]
    text: TextClass
    streams: int
    temperature: float

    @property
    def speculates(self) -> bool:
        """Does it draft?"""
        return "speculation" in self.levers

    @property
    def at_once(self) -> int:
        """Generations that are not waiting for another one."""
        return _at_once(self.levers, self.streams)

    @property
    def lanes(self) -> int:
        """Contexts that its generations are spread over."""
        return LANES if "overlap" in self.levers and self.at_once > 1 else 1

    def setting(self, options: WanOptions) -> SwarmSetting:
        """The swarm of this case and of the same without speculation; in bounded cells of all numbers of streams."""
        most = self.streams if options.cell_s is None else max(options.streams)
        levers = self.levers
        if options.cell_s is not None and self.streams == 1:  # the set that a single stream has left something out of
            levers = next((one for one in options.levers if _of_one_stream(one) == self.levers), levers)
        return SwarmSetting(
            self.rtt_ms,
            self.mbit,
            self.path,
            STAR_WORKERS if "star" in levers else 1,
            flags_of(levers, _at_once(levers, most)),
            options.kept if "local-experts" in levers else 0.0,
            options.threads,
        )


def _at_once(levers: Sequence[str], streams: int) -> int:
    if "batch" in levers:
        return streams
    return min(streams, LANES) if "overlap" in levers else 1


def _of_one_stream(levers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one for one in levers if one not in STREAMS_ONLY)


def flags_of(levers: Sequence[str], at_once: int) -> tuple[str, ...]:
    """The flags of `up` for a backbone with these levers, but for speculation, which its requests decide on."""
    wires = [wire for lever, wire in WIRES.items() if lever in levers]
    flags = ["--mode", "partial" if wires or "partial" in levers else "exact"]
    flags += ["--wire", wires[-1]] if wires else []
    if at_once > 1:
        lanes = LANES if "overlap" in levers else 1
        flags += ["--parallel", str(at_once), "--lanes", str(lanes)]
    return tuple(flags)


def parse_levers(text: str) -> tuple[tuple[str, ...], ...]:
    """Sets of levers, in the order of LEVERS; see the module. UsageError names what is unknown."""
    found: list[tuple[str, ...]] = []
    for part in filter(None, (piece.strip() for piece in text.lower().split(","))):
        match part:
            case "none":
                found.append(())
            case "all":
                found.append(LEVERS)
            case "all-remote":
                found.append(ALL_REMOTE)
            case "one-by-one":
                found += [(), *((lever,) for lever in LEVERS), LEVERS]
            case "waterfall":
                found += [WATERFALL[:count] for count in range(len(WATERFALL) + 1)]
            case _:
                names = part.split("+")
                if unknown := [name for name in names if name not in LEVERS]:
                    raise UsageError(
                        f"--levers {unknown[0]}: known are none, all, all-remote, one-by-one, waterfall, "
                        f"{', '.join(LEVERS)}"
                    )
                found.append(tuple(lever for lever in LEVERS if lever in names))
    if not found:
        raise UsageError("--levers: give at least one set, such as none,all")
    return tuple(dict.fromkeys(found))


def cases(options: WanOptions) -> list[Case]:
    """All rows, those of one swarm together, and those that speculate right behind those that do not."""
    rows = [
        Case(rtt, mbit, path, levers if streams > 1 else _of_one_stream(levers), text, streams, temperature)
        for path in options.path
        for mbit in options.mbit
        for rtt in options.rtt_ms
        for streams in options.streams
        for levers in options.levers
        for temperature in options.temperature
        for text in options.text
    ]
    if options.waterfall:
        rtt = min(options.rtt_ms, key=lambda one: abs(one - WATERFALL_RTT_MS))
        first = Case(rtt, options.mbit[0], options.path[0], (), options.text[0], options.streams[:2][-1], 0.0)
        rows += [replace(first, levers=levers) for levers in parse_levers("waterfall")]
    places: dict[SwarmSetting, int] = {}
    for case in rows:
        places.setdefault(case.setting(options), len(places))
    return sorted(dict.fromkeys(rows), key=lambda case: places[case.setting(options)])


def short(levers: Sequence[str]) -> str:
    """A set of levers in a word: those that a later one contains are left out."""
    missing = set(LEVERS).difference(STREAMS_ONLY).difference(levers)
    if not missing:
        return "all"
    if missing == {"local-experts"}:
        return "all-remote"
    wires = [lever for lever in ("partial", *WIRES) if lever in levers]
    return "+".join(lever for lever in levers if lever not in wires[:-1]) or "none"
