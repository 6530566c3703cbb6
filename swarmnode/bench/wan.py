"""What decoding over a distance costs, lever by lever, beside its physical bound: `python -m swarmnode.bench.wan`.

Real `swarmnode up` processes on this machine behind an emulated link (`wan_swarm.py`). A step of a decode needs one
round trip per layer whose experts are elsewhere, so that

    bound   generations at once × accepted tokens per step ÷ (remote layers × round trip)

Rows, one per link, path, set of levers, kind of text, temperature and number of streams:

    tokens_per_s            of all streams together, after the prompts. Where every stream is generating at once: from
                            the moment when all have begun until the first ends; where they wait for each other: from
                            the first token of any to the last, prompts in between included
    steps_per_s             decodes per second that a stream takes part in
    accepted_per_step       tokens that a decode gave a stream: 1 without speculation
    blocking_round_trips_per_token   round trips that a stream stood still for, per token
    bound_tokens_per_s      see above; nothing where there is no round trip. Remote layers are the model's, or, where
                            the backbone keeps experts itself, as many as a step was found to wait for
    bytes_per_token         both ways, whole frames, prompts and every step included
    gain, break_even        only with speculation: tokens/s beside the same without, measured in turns in the same
                            swarm, and the tokens that a step must give to be worth its longer time

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

Sets: `none`; `all`; names joined by +; `one-by-one`: none, each alone, all; `waterfall`: none, then one more at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from swarmnode.bench.wan_swarm import PathName, SwarmSetting, learn_routing, wan_swarm
from swarmnode.bench.wan_text import CLASSES, TextClass, prompts
from swarmnode.control import Json
from swarmnode.demo import MODEL
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.local_swarm import NodeProcess
from swarmnode.onboard import ModelPack, onboard

LEVERS = (
    "partial", "f16", "int8", "int8-back", "speculation", "local-experts", "batch", "overlap", "star",
)  # fmt: skip
WIRES = {"f16": "f16", "int8": "int8/f16", "int8-back": "int8"}  # later ones win
WATERFALL = LEVERS[:-1]  # the star's worth is that it costs nothing: `star.py`
STREAMS_ONLY = ("batch", "overlap")  # change nothing for a single stream
STAR_WORKERS = 4
KEPT = 0.5  # of all experts' bytes, with local-experts
LANES = 2
LEAST_TOKENS, MOST_TOKENS = 16, 192  # of one generation: the demo model's context has 512, with the prompt
GATE_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class WanOptions:
    """What to measure. `seconds` is the least time of decoding per row; `tokens` fixes a generation's length, which is
    else what the time has room for. `mbit` None is a link without a limit. `draft`: a small model for speculation."""

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
    kept: float = KEPT
    gate_positions: int = GATE_POSITIONS


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
        if "batch" in self.levers:
            return self.streams
        return min(self.streams, LANES) if "overlap" in self.levers else 1

    def setting(self, options: WanOptions) -> SwarmSetting:
        """The swarm of this case and of the same without speculation."""
        return SwarmSetting(
            self.rtt_ms,
            self.mbit,
            self.path,
            STAR_WORKERS if "star" in self.levers else 1,
            flags_of(self.levers, self.at_once),
            options.kept if "local-experts" in self.levers else 0.0,
        )


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
            case "one-by-one":
                found += [(), *((lever,) for lever in LEVERS), LEVERS]
            case "waterfall":
                found += [WATERFALL[:count] for count in range(len(WATERFALL) + 1)]
            case _:
                names = part.split("+")
                if unknown := [name for name in names if name not in LEVERS]:
                    raise UsageError(
                        f"--levers {unknown[0]}: known are none, all, one-by-one, waterfall, {', '.join(LEVERS)}"
                    )
                found.append(tuple(lever for lever in LEVERS if lever in names))
    if not found:
        raise UsageError("--levers: give at least one set, such as none,all")
    return tuple(dict.fromkeys(found))


def cases(options: WanOptions) -> list[Case]:
    """All rows, those of one swarm together, and those that speculate right behind those that do not."""
    rows = [
        Case(rtt, mbit, path, tuple(one for one in levers if streams > 1 or one not in STREAMS_ONLY), *rest)
        for path in options.path
        for mbit in options.mbit
        for rtt in options.rtt_ms
        for streams in options.streams
        for levers in options.levers
        for temperature in options.temperature
        for text in options.text
        for rest in [(text, streams, temperature)]
    ]
    places: dict[SwarmSetting, int] = {}
    for case in rows:
        places.setdefault(case.setting(options), len(places))
    return sorted(dict.fromkeys(rows), key=lambda case: places[case.setting(options)])


# ---- measuring


@dataclass(slots=True)
class Stream:
    """One generation as it was seen from outside: when its tokens came (seconds), and the node's own result."""

    times: list[float] = field(default_factory=list)
    result: Json = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """What the rounds of a case have added up to."""

    seconds: float = 0.0  # of the windows in which tokens were counted
    tokens: int = 0
    decode_s: float = 0.0  # of all streams, each by itself
    steps: int = 0
    decoded: int = 0  # tokens after each stream's first
    waits: float = 0.0  # round trips that streams stood still for
    drafted: int = 0
    accepted: int = 0
    bytes: int = 0
    all_tokens: int = 0  # the prompts' too
    why_not: str = ""

    def add(self, streams: Sequence[Stream], *, together: bool) -> None:
        """Count one round: every stream generated once, all `together` or some waiting for others."""
        counted, seconds = window([stream.times for stream in streams], together=together)
        self.tokens += counted
        self.seconds += seconds
        for stream in streams:
            result = stream.result
            self.decode_s += result["decode_s"]
            self.steps += result["steps"]
            self.decoded += max(0, result["tokens"] - 1)
            self.waits += result["blocking_round_trips_per_token"] * max(0, result["tokens"] - 1)
            self.drafted += result.get("drafted", 0)
            self.accepted += result.get("drafts_accepted", 0)
            self.all_tokens += result["tokens"] + result["prompt_tokens"]
            said = result.get("speculation", "")
            self.why_not = said if said not in ("on", "off") else self.why_not


def window(times: Sequence[Sequence[float]], *, together: bool) -> tuple[int, float]:
    """Tokens and seconds that tell the rate of streams whose tokens came at these times.

    Streams that run together: after the last one's first token, up to the first one's last. Where that is no time at
    all, and where they take turns: after the first token of any, up to the last.
    """
    begins = [one[0] for one in times if one]
    ends = [one[-1] for one in times if one]
    if not begins:
        return 0, 0.0
    start, stop = max(begins), min(ends)
    if not together or stop <= start:
        start, stop = min(begins), max(ends)
    return sum(start < at <= stop for one in times for at in one), stop - start


class _Bench:
    """Measures cases one swarm after the other."""

    def __init__(self, options: WanOptions, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._routing: bytes | None = None
        self._gated: str | None = None  # why not; "" when it has passed

    async def run(self) -> list[dict[str, Any]]:
        """All rows. Where the gate does not let a lever be used, rows say so in `skipped` and have no figures."""
        options = self._options
        pack = await asyncio.to_thread(onboard, options.model, self._folder / "pack")
        todo, rows = cases(options), list[dict[str, Any]]()
        if any(case.setting(options).kept for case in todo):
            texts = [one for text in options.text for one in prompts(text)]
            self._routing = await learn_routing(self._folder / "learning", pack, texts)
        settings = list(dict.fromkeys(case.setting(options) for case in todo))
        for number, setting in enumerate(settings):
            group = [case for case in todo if case.setting(options) == setting]
            if why := await self._barred(group[0].levers, pack):
                rows += [{**_axes(case), "skipped": why} for case in group]
                continue
            _tell(f"swarm {number + 1} of {len(settings)}: {setting}")
            rows += await self._measure(pack, group, self._folder / str(number))
        return rows

    async def _barred(self, levers: Sequence[str], pack: ModelPack) -> str:
        """Why these levers cannot be used; the gate is run when the first one needs it."""
        if not {"int8", "int8-back"}.intersection(levers):
            return ""
        if self._gated is None:
            _tell(f"the gate, on {self._options.gate_positions} positions")
            self._gated = await asyncio.to_thread(_gate, pack, self._options.gate_positions)
        return self._gated

    async def _measure(self, pack: ModelPack, group: Sequence[Case], folder: Path) -> list[dict[str, Any]]:
        """Rows of one swarm. The cases take turns, one round each, so that all have the same machine."""
        options = self._options
        setting = group[0].setting(options)
        drafter = str(options.draft or "ngram") if any(case.speculates for case in group) else "off"
        setting = replace(setting, flags=(*setting.flags, "--speculate", drafter))
        tallies = {case: Tally() for case in group}
        n_sites = len(pack.manifest.sites)
        async with wan_swarm(folder, pack, setting, self._routing) as backbone:
            await self._round(backbone, group[0], 0, 8)  # graphs, the path, the first answers
            number = 0
            while waiting := [case for case in group if tallies[case].seconds < options.seconds]:
                for case in waiting:
                    tokens = options.tokens or self._length(case, n_sites)
                    before = await _bytes(backbone)
                    streams = await self._round(backbone, case, number, tokens)
                    tally = tallies[case]
                    tally.add(streams, together=case.at_once == case.streams)
                    tally.bytes += await _bytes(backbone) - before
                number += 1
        found = {case: row(case, tally, n_sites) for case, tally in tallies.items()}
        for case, one in found.items():
            compare(case, one, found)
            _tell(json.dumps(one))
        return list(found.values())

    async def _round(self, backbone: NodeProcess, case: Case, number: int, tokens: int) -> list[Stream]:
        """Every stream generates once, all at the same time. The same prompts and seeds whatever the levers are."""
        texts = prompts(case.text)
        made = [Stream() for _ in range(case.streams)]

        async def generate(place: int, stream: Stream) -> None:
            request: Json = {
                "prompt": texts[(number + place) % len(texts)],
                "max_tokens": tokens,
                "ignore_end": True,
                "sampling": {"temperature": case.temperature, "seed": number * 1000 + place + 1},
                "speculate": case.speculates,
            }
            async for event in backbone.generate(request):
                if event["event"] == "token" and event["token"] >= 0:
                    stream.times.append(time.monotonic())
                elif event["event"] == "result":
                    stream.result = event["result"]

        await asyncio.gather(*(generate(place, stream) for place, stream in enumerate(made)))
        return made

    def _length(self, case: Case, n_sites: int) -> int:
        step = n_sites * (case.rtt_ms / 1e3 + 1e-3)
        return max(LEAST_TOKENS, min(MOST_TOKENS, int(self._options.seconds / step)))


def row(case: Case, tally: Tally, n_sites: int) -> dict[str, Any]:
    """A case's figures; see the module."""
    accepted = tally.decoded / tally.steps if tally.steps else 0.0
    waits = tally.waits / tally.decoded if tally.decoded else 0.0
    remote = min(n_sites, waits * accepted) if "local-experts" in case.levers else n_sites
    rate = tally.tokens / tally.seconds if tally.seconds else 0.0
    step_s = remote * case.rtt_ms / 1e3
    bound = case.at_once * accepted / step_s if step_s else None
    return {
        **_axes(case),
        "tokens_per_s": round(rate, 3),
        "steps_per_s": round(tally.steps / tally.decode_s, 3) if tally.decode_s else 0.0,
        "accepted_per_step": round(accepted, 3),
        "blocking_round_trips_per_token": round(waits, 3),
        "bound_tokens_per_s": round(bound, 3) if bound is not None else None,
        "ratio_to_bound": round(rate / bound, 3) if bound else None,
        "bytes_per_token": round(tally.bytes / max(1, tally.all_tokens)),
        "gain": None,
        "break_even": None,
        "drafted": tally.drafted,
        "drafts_accepted": tally.accepted,
        "tokens": tally.tokens,
        "skipped": tally.why_not if case.speculates and not tally.drafted else "",
    }


def compare(case: Case, one: dict[str, Any], found: dict[Case, dict[str, Any]]) -> None:
    """Fill in what speculation gained over the same case without it, where both were measured."""
    levers = tuple(lever for lever in case.levers if lever != "speculation")
    plain = found.get(Case(case.rtt_ms, case.mbit, case.path, levers, case.text, case.streams, case.temperature))
    if case.speculates and plain is not None and plain["tokens_per_s"] and one["steps_per_s"]:
        one["gain"] = round(one["tokens_per_s"] / plain["tokens_per_s"], 3)
        one["break_even"] = round(plain["steps_per_s"] / one["steps_per_s"], 3)


def _axes(case: Case) -> dict[str, Any]:
    return {
        "rtt_ms": case.rtt_ms,
        "mbit": case.mbit,
        "path": case.path,
        "levers": list(case.levers),
        "text": case.text,
        "temperature": case.temperature,
        "streams": case.streams,
    }


async def _bytes(backbone: NodeProcess) -> int:
    return sum(site["bytes_out"] + site["bytes_back"] for site in (await backbone.status())["sites"])


def _gate(pack: ModelPack, positions: int) -> str:
    """Let the gate judge the wire types for this pack. Returns why it could not, "" where it has a verdict."""
    command = [sys.executable, "-m", "swarmnode", "gate", str(pack.path), "--positions", str(positions), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line.strip("│ ") for line in done.stderr.splitlines() if re.search(r"\w", line)]
    return "" if not done.returncode else f"the gate: {said[-1] if said else f'exit code {done.returncode}'}"


def _tell(text: str) -> None:
    """Progress, for whoever watches."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ---- from outside


def run(options: WanOptions) -> dict[str, Any]:
    """Measure; starts and ends processes of this machine. SwarmnodeError where they do not run."""
    return asyncio.run(_run(options))


async def _run(options: WanOptions) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        rows = await _Bench(options, Path(name)).run()
    return {"model": options.model.stem, "seconds": options.seconds, "rows": rows}


def table(result: dict[str, Any]) -> dict[str, Any]:
    """The same for people: levers as one word, without the columns that nobody reads in a table."""
    hidden = ("drafted", "drafts_accepted", "tokens")
    names = [name for name in dict.fromkeys(name for one in result["rows"] for name in one) if name not in hidden]
    names.sort(key="skipped".__eq__)  # it is the last column
    rows = [
        {name: short(one["levers"]) if name == "levers" else one.get(name) for name in names} for one in result["rows"]
    ]
    return {**result, "rows": rows}


def short(levers: Sequence[str]) -> str:
    """A set of levers in a word: those that a later one contains are left out."""
    if set(levers) >= set(LEVERS).difference(STREAMS_ONLY):
        return "all"
    wires = [lever for lever in ("partial", *WIRES) if lever in levers]
    return "+".join(lever for lever in levers if lever not in wires[:-1]) or "none"


def _numbers(text: str, name: str, least: float) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--{name} {text}: give numbers with commas between them") from None
    if not all(least <= number <= 1e6 for number in found):
        raise UsageError(f"--{name} {text}: give numbers from {least:g} up")
    return found


def _names(text: str, name: str, known: Iterable[str]) -> tuple[Any, ...]:  # of a Literal type that the caller knows
    found, known = tuple(part.strip() for part in text.split(",")), tuple(known)
    if wrong := [part for part in found if part not in known]:
        raise UsageError(f"--{name} {wrong[0]}: say {', '.join(known)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m swarmnode.bench.wan [--rtt …] [--mbit …] [--streams …] [--levers …] [--text …] [--path …] …`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rtt", default="0,5,20,80,100,200", help="round trips in ms")
    parser.add_argument("--mbit", default="0", help="rates each way in Mbit/s, 0 for no limit")
    parser.add_argument("--streams", default="1", help="generations that are asked for at the same time")
    parser.add_argument("--levers", default="none,all", help="sets of levers; see the module")
    parser.add_argument("--text", default=",".join(CLASSES), help="kinds of text")
    parser.add_argument("--path", default="direct", help="direct, relay")
    parser.add_argument("--temperature", default="0")
    parser.add_argument("--seconds", type=float, default=20.0, help="of decoding per row, at least")
    parser.add_argument("--tokens", type=int, default=0, help="of each generation, instead of what fits the time")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--draft", type=Path, help="speculate with this small model instead of n-gram lookup")
    parser.add_argument("--kept", type=float, default=KEPT, help="share of the experts' bytes with local-experts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="folder for figures as PNG")
    given = parser.parse_args(arguments)
    try:
        options = WanOptions(
            rtt_ms=_numbers(given.rtt, "rtt", 0),
            mbit=tuple(rate or None for rate in _numbers(given.mbit, "mbit", 0)),
            streams=tuple(int(count) for count in _numbers(given.streams, "streams", 1)),
            levers=parse_levers(given.levers),
            text=_names(given.text, "text", CLASSES),
            path=_names(given.path, "path", get_args(PathName)),
            temperature=_numbers(given.temperature, "temperature", 0),
            seconds=given.seconds,
            tokens=given.tokens,
            model=given.model,
            draft=given.draft,
            kept=given.kept,
        )
        if given.plot is not None:
            from swarmnode.bench import wan_plot  # noqa: PLC0415  matplotlib is an extra

            wan_plot.check()
        result = run(options)
    except SwarmnodeError as error:
        print(f"wan: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    if given.plot is not None:
        for file in wan_plot.figures(result, given.plot):
            _tell(f"wrote {file}")
    from swarmnode.tables import print_rows  # noqa: PLC0415

    print_rows(result if given.json else table(result), as_json=given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
