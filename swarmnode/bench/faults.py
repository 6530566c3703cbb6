"""What the sudden death of a worker costs a generation: `python -m swarmnode.bench.faults [--minutes 10]`.

A founder that computes no experts itself, and workers whose budgets together hold every expert twice, as processes of
this machine. The founder generates the same greedy text without a pause; every 20 to 40 s a random worker is killed
(SIGKILL) and started again some seconds later. With --single N instead: N generations with one kill each, at a random
moment, the next one when the worker is back; --within S: within so many seconds of the request, so that it meets the
prompt.

    aborted     generations that ended with an error
    different   generations whose tokens, or any row of logits, are not those of the plain local run
    stall       the longest pause between two tokens in the WINDOW_S after a kill, less the usual one; a pause before a
                generation's first token is compared with the usual one before first tokens
    in use      the same, only where the worker had been asked something in the second before it was killed
    spared      kills at which every expert had COPIES on workers: only finding out costs time; else, perhaps, a fetch
    quiet       the same over windows without a kill: what the machine's other work does alone
    bound       two round trips and half a second

Run by hand, and in small by its test.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.backbone.session import GenerateRequest
from swarmnode.bench.command import Result, count, parser, positive, run_command
from swarmnode.bench.swarm_start import all_started, onboarded
from swarmnode.control import Json
from swarmnode.demo import BATCH, CONTEXT, MODEL, PROMPT, local_run
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.local_swarm import FoundedSwarm
from transport.emulation import LinkEmulation

WINDOW_S = 3.0
AWAY_S = (3.5, 6.0)  # from the kill to the restart: longer than the window, shorter than the plan's patience
WHOLE_S = 60.0
USE_S = 1.0  # a worker that was asked nothing for so long is not in use
COPIES = 2


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """What to run. `every`: seconds between two kills, from and to. `single`: so many runs with one kill each; `within`
    so many seconds of the request, or, where it is 0, at any moment of the generation."""

    minutes: float = 10.0
    every: tuple[float, float] = (20.0, 40.0)
    single: int = 0
    within: float = 0.0
    workers: int = 4
    memory: str = "5M"
    tokens: int = 96
    emulate: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens, or, `first`, from the request to the first one. Seconds of the loop's clock."""

    began: float
    ended: float
    first: bool


@dataclass(slots=True)
class Kill:
    """One worker's death. `in_use`: it was being asked. `until`: it was taken up again, or the window ended."""

    at: float
    worker: str
    in_use: bool
    spared: bool  # there were copies of everything
    until: float = 0.0
    watched_until: float = math.inf  # the generation that it met ended
    stall_s: float = 0.0
    before_first: bool = False  # the longest pause was one before a first token


@dataclass(slots=True)
class Record:
    """What happened."""

    gaps: list[Gap] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    generations: int = 0
    aborted: list[str] = field(default_factory=list)
    different: int = 0
    tokens: int = 0

    def usual(self, first: bool) -> float:
        """The median pause of its kind, outside the windows of kills."""
        calm = [gap for gap in self.gaps if gap.first is first and not any(_meet(gap, k) for k in self.kills)]
        lengths = [gap.ended - gap.began for gap in calm or self.gaps if gap.first is first]
        return statistics.median(lengths) if lengths else 0.0

    def stall(self, began: float, ended: float) -> tuple[float, bool]:
        """The longest pause that meets this window, less the usual one; and whether it was before a first token."""
        usual = {first: self.usual(first) for first in (False, True)}
        met = [(g.ended - g.began - usual[g.first], g.first) for g in self.gaps if g.began < ended and g.ended > began]
        return max(met, default=(0.0, False))

    def quiet(self) -> list[float]:
        """Stalls of all whole windows in which nothing was killed, started, or taken up again."""
        if not self.gaps:
            return []
        stalls, at, end = [], self.gaps[0].began, self.gaps[-1].ended
        disturbed = [(kill.at, kill.until) for kill in self.kills]
        while at + WINDOW_S <= end:
            if all(at + WINDOW_S <= start or at >= stop for start, stop in disturbed):
                stalls.append(self.stall(at, at + WINDOW_S)[0])
            at += WINDOW_S
        return stalls


def _meet(gap: Gap, kill: Kill) -> bool:
    return gap.began < kill.until and gap.ended > kill.at


class _Bench:
    """The swarm, and the record that is filled with it."""

    def __init__(self, options: FaultOptions, folder: Path) -> None:
        self.options, self._folder = options, folder
        self.record = Record()
        self._chance = random.Random(options.seed)
        self._workers: list[str] = []
        self._rows: dict[str, int] = {}
        self._used_at: dict[str, float] = {}
        self._away = ""  # who is killed, and not taken up again
        self._request = GenerateRequest(prompt=PROMPT, max_tokens=options.tokens, digests=True, ignore_end=True)
        self._expected: list[tuple[int, str]] = []

    async def start(self) -> None:
        """Reference, founder, workers; until every expert is held COPIES times."""
        pack = await onboarded(MODEL, self._folder / "pack")
        self._experts = sum(site.n_expert for site in pack.manifest.sites)
        tokens, _ = await asyncio.to_thread(local_run, MODEL, self._request)
        self._expected = [(event.token, event.digest) for event in tokens]
        emulate = ["--emulate", self.options.emulate] if self.options.emulate else []
        self._swarm = FoundedSwarm(self._folder, pack.path)
        flags = "--no-local-experts", "--context", str(CONTEXT), "--batch", str(BATCH)
        self._founder = await self._swarm.found(*flags, *emulate)
        self._workers = [f"worker-{i + 1}" for i in range(self.options.workers)]
        await all_started(self._swarm.join(name, "--memory", self.options.memory) for name in self._workers)
        try:
            await self._whole()
        except TimeoutError:
            raise SwarmnodeError(f"after {WHOLE_S:g} s there are not {COPIES} copies of each expert") from None

    async def stop(self) -> None:
        """End all processes."""
        if hasattr(self, "_swarm"):
            await self._swarm.stop()

    async def run(self) -> None:
        """The kills."""
        await self._generate()  # the first one finds out what is usual
        self.record = Record()
        watching = asyncio.create_task(self._watch_use())
        try:
            await (self._singles() if self.options.single else self._continuously())
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        for kill in self.record.kills:
            ends = min(kill.at + WINDOW_S, kill.watched_until)
            kill.stall_s, kill.before_first = self.record.stall(kill.at, ends)

    async def _continuously(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self.options.minutes * 60
        generating = asyncio.create_task(self._generate_until(end))
        try:
            while (at := loop.time() + self._chance.uniform(*self.options.every)) < end - AWAY_S[1]:
                await asyncio.sleep(at - loop.time())
                kill = await self._kill()
                await asyncio.sleep(self._chance.uniform(*AWAY_S))
                await self._bring_back(kill)
            await generating
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)

    async def _singles(self) -> None:
        loop = asyncio.get_running_loop()
        usual = 1.0
        for _ in range(self.options.single):
            generating, began = asyncio.create_task(self._generate()), loop.time()
            await asyncio.sleep(self._chance.uniform(0.0, self.options.within or usual))
            kill = await self._kill()
            await generating
            kill.watched_until = loop.time()
            took = kill.watched_until - began
            usual = took if usual > took or len(self.record.kills) == 1 else usual + (took - usual) / 4
            await self._bring_back(kill)

    async def _generate_until(self, end: float) -> None:
        while asyncio.get_running_loop().time() < end:
            await self._generate()

    async def _generate(self) -> None:
        record, clock = self.record, asyncio.get_running_loop().time
        got: list[tuple[int, str]] = []
        before, ended = clock(), False
        record.generations += 1
        try:
            async for event in self._founder.generate(msgspec.to_builtins(self._request)):
                if event["event"] == "token" and event["token"] >= 0:
                    now = clock()
                    record.gaps.append(Gap(before, now, first=not got))
                    before = now
                    got.append((event["token"], event["digest"]))
                ended = ended or event["event"] == "result"
        except SwarmnodeError as error:
            record.aborted.append(str(error))
            record.gaps.append(Gap(before, clock(), first=not got))
            await asyncio.sleep(0.1)
        else:
            if not ended:
                record.aborted.append("no result")
            elif got != self._expected:
                record.different += 1
        record.tokens += len(got)

    # ---- workers

    async def _kill(self) -> Kill:
        name = self._chance.choice(self._workers)
        spared = self._is_whole(await self._founder.status())
        now = asyncio.get_running_loop().time()
        kill = Kill(now, name, in_use=now - self._used_at.get(name, 0.0) < USE_S, spared=spared)
        kill.until = now + WINDOW_S
        self.record.kills.append(kill)
        self._swarm.nodes[name].kill()
        self._away = name
        return kill

    async def _bring_back(self, kill: Kill) -> None:
        loop = asyncio.get_running_loop()
        await self._swarm.nodes[kill.worker].stop()
        attached = len(self._founder.events("attached"))
        await self._swarm.again(kill.worker, "--memory", self.options.memory)
        await self._founder.wait_for("attached", attached + 1)
        self._away = ""
        with contextlib.suppress(TimeoutError):
            await self._whole()
        kill.until = max(kill.until, loop.time() + 1.0)

    async def _whole(self) -> None:
        """Wait until every worker is attached and there are COPIES of every expert. Raises TimeoutError."""
        async with asyncio.timeout(WHOLE_S):
            while not self._is_whole(await self._founder.status()):  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    def _is_whole(self, status: Json) -> bool:
        workers = [peer for peer in status["peers"] if peer["role"] == "worker" and peer["name"] != self._away]
        attached = sum(bool(peer["experts"]) for peer in workers) == len(self._workers)
        return attached and fewest_copies([peer["holdings"] for peer in workers], self._experts) >= COPIES

    async def _watch_use(self) -> None:
        while True:
            status = await self._founder.status()
            for peer in status["peers"]:
                name, rows = str(peer["name"]), peer.get("rows", 0)
                if rows != self._rows.get(name, 0):
                    self._used_at[name] = asyncio.get_running_loop().time()
                self._rows[name] = rows
            await asyncio.sleep(USE_S / 4)


async def run(options: FaultOptions) -> Json:
    """Start the swarm, kill, count. The shape is that of --json; see `report`."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-faults-") as name:
        bench = _Bench(options, Path(name))
        try:
            before = os.getloadavg()
            await bench.start()
            await bench.run()
        finally:
            await bench.stop()
    return report(options, bench.record, before)


def fewest_copies(holdings: Sequence[Mapping[str, str]], n_experts: int) -> int:
    """On how many workers the rarest expert is. `holdings`: of each worker, layer → ranges, as in `status`."""
    copies: Counter[tuple[str, int]] = Counter()
    for held in holdings:
        for layer, ranges in held.items():
            for low, _, high in (part.partition("-") for part in ranges.split(",")):
                copies.update((layer, expert) for expert in range(int(low), int(high or low) + 1))
    return min(copies.values(), default=0) if len(copies) == n_experts else 0


def report(options: FaultOptions, record: Record, load_before: Sequence[float]) -> Json:
    """The figures as JSON; times in milliseconds."""
    rtt_s = LinkEmulation.parse(options.emulate).rtt if options.emulate else 0.0
    return {
        "options": asdict(options),
        "load": {"before": round(load_before[0], 1), "after": round(os.getloadavg()[0], 1)},
        "generations": record.generations,
        "tokens": record.tokens,
        "aborted": len(record.aborted),
        "reasons": record.aborted[:5],
        "different": record.different,
        "kills": len(record.kills),
        "kills_in_use": sum(kill.in_use for kill in record.kills),
        "kills_spared": sum(kill.spared for kill in record.kills),
        "usual_ms": round(record.usual(first=False) * 1e3, 1),
        "usual_first_ms": round(record.usual(first=True) * 1e3, 1),
        "bound_ms": round(2 * rtt_s * 1e3 + 500),
        "stall_ms": _spread([kill.stall_s for kill in record.kills]),
        "stall_spared_ms": _spread([kill.stall_s for kill in record.kills if kill.spared]),
        "stall_in_use_ms": _spread([kill.stall_s for kill in record.kills if kill.in_use]),
        "quiet_ms": _spread(record.quiet()),
        "each": [
            {
                "worker": kill.worker,
                "in_use": kill.in_use,
                "spared": kill.spared,
                "stall_ms": round(kill.stall_s * 1e3),
                "before_first": kill.before_first,
            }
            for kill in record.kills
        ],
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    at = {"p50": 50, "p95": 95, "max": 100}
    spread = {name: ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for name, share in at.items()}
    return {name: round(value * 1e3, 1) for name, value in spread.items()}


def _print(result: Json) -> None:
    kills = f"{result['kills']} kills, {result['kills_in_use']} of workers in use, {result['kills_spared']} spared"
    print(f"{result['generations']} generations, {result['tokens']} tokens, {kills}; load {result['load']}")
    print(f"aborted {result['aborted']}   different from the local run {result['different']}")
    print(f"usual pause {result['usual_ms']} ms, before a first token {result['usual_first_ms']} ms")
    print(f"{'':16}{'p50':>8}{'p95':>8}{'max':>8}   ms, bound {result['bound_ms']}")
    for key in ("stall", "stall_spared", "stall_in_use", "quiet"):
        row: dict[str, Any] | None = result[f"{key}_ms"]
        figures = "       –" * 3 if row is None else "".join(f"{row[p]:8.0f}" for p in row)
        print(f"{key.replace('_', ' '):16}{figures}")
    for reason in result["reasons"]:
        print(f"aborted: {reason}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run; 1 where a generation was aborted or different."""
    made = parser("python -m swarmnode.bench.faults", __doc__)
    made.add_argument("--minutes", type=positive, default=10.0)
    made.add_argument("--every", default="20-40", help="seconds between kills, FROM-TO")
    made.add_argument("--single", type=int, default=0, help="instead: so many generations with one kill each")
    made.add_argument(
        "--within", type=positive, default=0.0, help="with --single: seconds from the request to the kill"
    )
    made.add_argument("--workers", type=count, default=4)
    made.add_argument("--tokens", type=count, default=96, help="of each generation")
    made.add_argument("--emulate", help="a link for the founder, such as rtt=40ms")
    made.add_argument("--seed", type=int, default=0)
    return run_command(
        made, arguments, _measure, lambda result, _given: _print(dict(result)),
        failed=lambda result: bool(result["aborted"] or result["different"]),
    )  # fmt: skip


def _measure(given: argparse.Namespace) -> Result:
    try:
        low, _, high = given.every.partition("-")
        every = positive(low), positive(high or low)
    except argparse.ArgumentTypeError:
        raise UsageError(f"--every {given.every}: give FROM-TO in seconds") from None
    options = FaultOptions(
        minutes=given.minutes, every=every, single=given.single, within=given.within, workers=given.workers,
        tokens=given.tokens, emulate=given.emulate, seed=given.seed,
    )  # fmt: skip
    return asyncio.run(run(options))


if __name__ == "__main__":
    raise SystemExit(main())
