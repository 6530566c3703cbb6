"""How `bench wan` measures its cases: swarms one after the other, and in each the generations of its cases.

Where a case's time is bounded (`WanOptions.cell_s`), a generation's length is what steps and prompts of this swarm have
taken so far, and what is not done by then is cut off: a stream's tokens count, its steps do not. Called by `wan.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swarmnode.bench.local_step import local_step_s
from swarmnode.bench.wan_cases import Case, WanOptions
from swarmnode.bench.wan_gate import run_gate
from swarmnode.bench.wan_swarm import learn_routing, wan_swarm
from swarmnode.bench.wan_text import TextClass, prompts
from swarmnode.control import Json
from swarmnode.errors import SwarmnodeError
from swarmnode.gate import Verdict, load_verdict
from swarmnode.local_swarm import NodeProcess
from swarmnode.onboard import ModelPack

LEAST_TOKENS, MOST_TOKENS = 16, 192  # of one generation: the demo model's context has 512, with the prompt
LEAST_BOUNDED = 3  # tokens, in bounded cells: the first one, and two steps
WARM_TOKENS, WARM_S = 8, 1.5
_SPARE = 0.85  # of a bounded cell's time is planned for
_LEAST_TOGETHER = 0.3  # of the time that was wanted: with less, a cell is measured once more

Row = dict[str, Any]  # JSON; see `wan.py`
Tell = Callable[[str], None]  # progress, for whoever watches


@dataclass(slots=True)
class Stream:
    """One generation as it was seen from outside: when its tokens came (seconds), and the node's own result.

    No result where it was cut off.
    """

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

    def add(self, streams: Sequence[Stream], *, at_once: int) -> None:
        """Count one round: every stream generated once, `at_once` of them at the same time."""
        counted, seconds = window([stream.times for stream in streams], at_once=at_once)
        self.tokens += counted
        self.seconds += seconds
        done = [stream.result for stream in streams if stream.result]
        prompt = round(sum(result["prompt_tokens"] for result in done) / max(1, len(done)))
        # What was cut off had a prompt too, if it has begun; they are about as long as each other.
        self.all_tokens += sum(len(one.times) + prompt for one in streams if one.times and not one.result)
        for result in done:
            self.decode_s += result["decode_s"]
            self.steps += result["steps"]
            self.decoded += max(0, result["tokens"] - 1)
            self.waits += result["blocking_round_trips_per_token"] * max(0, result["tokens"] - 1)
            self.drafted += result.get("drafted", 0)
            self.accepted += result.get("drafts_accepted", 0)
            self.all_tokens += result["tokens"] + result["prompt_tokens"]
            said = result.get("speculation", "")
            self.why_not = said if said not in ("on", "off") else self.why_not


def window(times: Sequence[Sequence[float]], *, at_once: int) -> tuple[int, float]:
    """Tokens and seconds that tell the rate of streams whose tokens came at these times.

    Streams that all run together: after the last one's first token, up to the first one's last. Where that is no time
    at all: after the first token of any, up to the last. Streams that wait for each other: each one's tokens after its
    first, over its own time, `at_once` of them at the same time.
    """
    begun = [one for one in times if one]
    if not begun:
        return 0, 0.0
    if at_once < len(times):
        return sum(len(one) - 1 for one in begun), sum(one[-1] - one[0] for one in begun) / at_once
    start, stop = max(one[0] for one in begun), min(one[-1] for one in begun)
    if together(times) <= 0:
        start, stop = min(one[0] for one in begun), max(one[-1] for one in begun)
    return sum(start < at <= stop for one in begun for at in one), stop - start


def together(times: Sequence[Sequence[float]]) -> float:
    """Seconds in which all streams were generating, whose tokens came at these times; negative where there are none."""
    begun = [one for one in times if one]
    return min(one[-1] for one in begun) - max(one[0] for one in begun) if begun else -1.0


@dataclass(slots=True)
class _Pace:
    """What this swarm has shown so far: seconds of a prompt and of a step, tokens that come of a step."""

    prompt_s: float
    step_s: float
    accepted: float = 1.0

    def note(self, streams: Sequence[Stream]) -> None:
        """Learn from generations that are done; where none is, from the tokens that came until it was cut off."""
        if done := [stream.result for stream in streams if stream.result.get("steps")]:
            self.prompt_s = min(result["prompt_s"] for result in done)
            self.step_s = max(result["decode_s"] / result["steps"] for result in done)
            self.accepted = sum(max(1.0, result["accepted_per_step"]) for result in done) / len(done)
            return
        seen = [(one.times[-1] - one.times[0]) / (len(one.times) - 1) for one in streams if len(one.times) > 1]
        self.step_s = max([2 * self.step_s, *(self.accepted * token_s for token_s in seen)])

    def length(self, case: Case, seconds: float, most_s: float) -> int:
        """Tokens per generation, so that a round decodes for `seconds` and is over within `most_s`, if all goes on.

        Prompts come one after the other in each lane. Streams that run together are counted from the last one's first
        token until the first one's last, so that a generation outlasts the prompts.
        """
        turns = -(-case.streams // case.at_once)
        prompts_s = self.prompt_s * (-(-case.at_once // case.lanes) if turns == 1 else 1)
        beside_s = prompts_s - self.prompt_s  # of decoding, while others are at their prompts
        decode_s = beside_s + min(seconds / turns, _SPARE * most_s / turns - prompts_s - beside_s)
        tokens = 1 + decode_s / self.step_s * (self.accepted if case.speculates else 1.0)
        return max(LEAST_BOUNDED, min(MOST_TOKENS, int(tokens)))


class Bench:
    """Measures cases one swarm after the other. `report(case, row)` gets each row as soon as it is known.

    In bounded cells a swarm that does not come up costs its own rows their figures and not the others.
    """

    def __init__(
        self, options: WanOptions, pack: ModelPack, folder: Path, report: Callable[[Case, Row], None], tell: Tell
    ) -> None:
        self._options, self._pack, self._folder = options, pack, folder
        self._report, self._tell = report, tell
        self._routing: bytes | None = None
        self._gated: str | None = None  # why not; "" when it has passed
        self._local_ms = 0.0  # of a step of plain llama.cpp

    async def run(self, todo: Sequence[Case]) -> None:
        """Measure. Where the gate does not let a lever be used, rows say so in `skipped` and have no figures."""
        options = self._options
        if not todo:
            return
        self._local_ms = round(1e3 * await asyncio.to_thread(local_step_s, options.model, options.threads), 2)
        self._tell(f"plain llama.cpp, everything in one process: {self._local_ms:g} ms a step")
        if any(case.setting(options).kept for case in todo):
            texts = [one for text in options.text for one in self._prompts(text)]
            self._routing = await learn_routing(self._folder / "learning", self._pack, texts)
        settings = list(dict.fromkeys(case.setting(options) for case in todo))
        for number, setting in enumerate(settings):
            group = [case for case in todo if case.setting(options) == setting]
            if why := await self._barred(group[0].levers):
                self._skip(group, why)
                continue
            self._tell(f"swarm {number + 1} of {len(settings)}: {setting}")
            if options.cell_s is None:
                await self._measure(group, self._folder / str(number))
                continue
            await self._measure_bounded(group, self._folder / str(number), options.cell_s)

    def _skip(self, group: Sequence[Case], why: str) -> None:
        for case in group:
            self._report(case, {**axes_of(case), "skipped": why})

    async def _barred(self, levers: Sequence[str]) -> str:
        """Why these levers cannot be used; the gate is run when the first one needs it."""
        if not {"int8", "int8-back"}.intersection(levers):
            return ""
        if self._gated is None and isinstance(kept := load_verdict(self._pack), Verdict):
            self._gated = f"the gate: {kept.failure}" if kept.failure else ""  # it has been judged before
        if self._gated is None:
            self._tell(f"the gate, on {self._options.gate_positions} positions")
            self._gated = await run_gate(self._pack, self._options.gate_positions)
        return self._gated

    async def _measure(self, group: Sequence[Case], folder: Path) -> None:
        """Rows of one swarm. The cases take turns, one round each, so that all have the same machine."""
        options = self._options
        tallies = {case: Tally() for case in group}
        async with self._swarm(group, folder) as backbone:
            await self._round(backbone, group[0], 0, WARM_TOKENS)  # graphs, the path, the first answers
            number = 0
            while waiting := [case for case in group if tallies[case].seconds < options.seconds]:
                for case in waiting:
                    tokens = options.tokens or self._length(case)
                    before_s = tallies[case].seconds
                    await self._count(backbone, case, number, tokens, tallies[case])
                    if tallies[case].seconds <= before_s:  # it would go on for ever
                        raise SwarmnodeError(f"generations of {tokens} tokens take no time that could be measured")
                number += 1
            more = await self._more(backbone)
        found = {case: {**row(case, tally, self._n_sites), **more} for case, tally in tallies.items()}
        for case, one in found.items():
            compare(case, one, found)
            self._report(case, one)

    async def _measure_bounded(self, group: Sequence[Case], folder: Path, most_s: float) -> None:
        """Rows of one swarm, one round each, every row known when its round is over."""
        left = list(group)
        try:
            async with self._swarm(group, folder) as backbone:
                more = await self._more(backbone)
                step_s = self._n_sites * (group[0].rtt_ms / 1e3 + 1e-3)
                pace = _Pace(step_s, step_s)
                warm = max(LEAST_BOUNDED - 1, min(WARM_TOKENS, int(WARM_S / step_s)))
                pace.note(await self._round(backbone, replace(group[0], streams=1), 0, warm))
                for case in group:
                    self._report(case, await self._bounded(backbone, case, pace, most_s) | more)
                    left.remove(case)
        except SwarmnodeError as error:
            self._skip(left, str(error))

    async def _bounded(self, backbone: NodeProcess, case: Case, pace: _Pace, most_s: float) -> Row:
        """A case's row, of one round; of a second one, with what the first has shown, where nothing was done in time or
        streams that run together hardly did."""
        seconds = self._options.seconds
        found: Row = {}
        for _ in range(2):
            tally = Tally()
            tokens = self._options.tokens or pace.length(case, seconds, most_s)
            streams = await self._count(backbone, case, 0, tokens, tally, most_s)
            pace.note(streams)
            if tally.steps and tally.seconds:
                found = row(case, tally, self._n_sites)
                if case.at_once < case.streams or self._options.tokens or tokens == MOST_TOKENS:
                    break
                if together([stream.times for stream in streams]) > _LEAST_TOGETHER * seconds:
                    break
        return found or {**axes_of(case), "skipped": f"no generation of {tokens} tokens was done within {most_s:g} s"}

    def _swarm(self, group: Sequence[Case], folder: Path) -> contextlib.AbstractAsyncContextManager[NodeProcess]:
        setting = group[0].setting(self._options)
        drafter = str(self._options.draft or "ngram") if any(case.speculates for case in group) else "off"
        setting = replace(setting, flags=(*setting.flags, "--speculate", drafter))
        return wan_swarm(folder, self._pack, setting, self._routing)

    async def _count(
        self, backbone: NodeProcess, case: Case, number: int, tokens: int, tally: Tally, most_s: float | None = None
    ) -> list[Stream]:
        """One round of a case, counted."""
        before = await _bytes(backbone)
        streams = await self._round(backbone, case, number, tokens, most_s)
        tally.add(streams, at_once=case.at_once)
        tally.bytes += await _bytes(backbone) - before
        return streams

    async def _round(
        self, backbone: NodeProcess, case: Case, number: int, tokens: int, most_s: float | None = None
    ) -> list[Stream]:
        """Every stream generates once, all at the same time. The same prompts and seeds whatever the levers are."""
        texts = self._prompts(case.text)
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

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                streams = (generate(place, stream) for place, stream in enumerate(made))
                # One that fails leaves none of the others behind.
                problems = await asyncio.gather(*streams, return_exceptions=True)
            for problem in filter(None, problems):
                raise problem
        return made

    async def _more(self, backbone: NodeProcess) -> Row:
        """What all rows of a swarm have in common, beside their figures."""
        return {"wire": await _wire(backbone), "local_step_ms": self._local_ms}

    def _prompts(self, text: TextClass) -> list[str]:
        last = self._options.prompt_characters
        return [one[-last:] if last else one for one in prompts(text)]

    def _length(self, case: Case) -> int:
        step = self._n_sites * (case.rtt_ms / 1e3 + 1e-3)
        return max(LEAST_TOKENS, min(MOST_TOKENS, int(self._options.seconds / step)))

    @property
    def _n_sites(self) -> int:
        return len(self._pack.manifest.sites)


def row(case: Case, tally: Tally, n_sites: int) -> Row:
    """A case's figures; see `wan.py`."""
    accepted = tally.decoded / tally.steps if tally.steps else 0.0
    waits = tally.waits / tally.decoded if tally.decoded else 0.0
    remote = min(n_sites, waits * accepted) if "local-experts" in case.levers else n_sites
    rate = tally.tokens / tally.seconds if tally.seconds else 0.0
    step_s = remote * case.rtt_ms / 1e3
    bound = case.at_once * accepted / step_s if step_s else None
    return {
        **axes_of(case),
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


def compare(case: Case, one: Row, found: dict[Case, Row]) -> None:
    """Fill in what speculation gained over the same case without it, where both were measured."""
    levers = tuple(lever for lever in case.levers if lever != "speculation")
    plain = found.get(replace(case, levers=levers))
    if case.speculates and plain is not None and plain["tokens_per_s"] and one["steps_per_s"]:
        one["gain"] = round(one["tokens_per_s"] / plain["tokens_per_s"], 3)
        one["break_even"] = round(plain["steps_per_s"] / one["steps_per_s"], 3)


def axes_of(case: Case) -> Row:
    """What a row is a measurement of."""
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


async def _wire(backbone: NodeProcess) -> str:
    """What rows travel as, as the gate has it: a lever that a model's gate does not allow is not what is used."""
    wires = (await backbone.status())["generation"]["wires"]
    return ", ".join(sorted(set(wires.values()))).lower()
