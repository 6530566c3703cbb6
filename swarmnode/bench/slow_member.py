"""What a slow member costs a swarm: tokens per second without it, with it, and after the founder has planned anew.

Real processes: a founder that computes no experts itself, three good workers that together hold the model, and one that
turns bad while it holds its share. Nobody is told; the founder finds out from what it measures.

    compute   its engine takes ten times as long
    distance  300 ms away
    rate      2 Mbit/s each way

`ratio` is after / without; `recovered_s` is how long a member that is good again waits until it has half of the experts
again that it had, `again` the tokens per second then.

Called by `python -m swarmnode.bench.slow_member [compute|distance|rate …] [--json]`. The worker that turns bad is this
module too (`… up …`): SIGUSR1 makes it bad, SIGUSR2 good again.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from swarmnode.bench.command import Result, count, not_negative, parser, positive, run_command
from swarmnode.bench.swarm_start import all_started, onboarded
from swarmnode.compute.engine import ExpertEngine
from swarmnode.demo import MODEL
from swarmnode.errors import SwarmnodeError
from swarmnode.local_swarm import FoundedSwarm, NodeProcess
from swarmnode.model.random_model import RandomModel, write_random_model
from transport.emulation import LinkEmulation, LinkModel

SLOWER = 10.0  # times as long
# Experts whose computing is most of a call, as in models that need a swarm: one row takes about 0.4 ms.
COMPUTING = RandomModel(
    d_model=1024,
    n_layers=4,
    n_ff_expert=1024,
    n_expert=16,
    n_used=4,
    expert_types={"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"},
    dense_type="Q8_0",
    n_ff_shared=256,
    context=4096,
)
PROMPT = "import os\nimport re\n"  # short: what is measured is decoding
RUN_S = 5.0  # of generation per figure
GOOD = 3
PATIENCE_S = 60.0
_ROOM = 1.15  # the good workers' memory together, in units of the model's experts


@dataclass(frozen=True, slots=True)
class Case:
    """`bad` is what the bad one's link becomes, `slower` how many times as long its engine takes then. `computing`:
    with the model whose experts are most of a call."""

    name: str
    bad: str = ""
    slower: float = 1.0
    computing: bool = False
    rtt_ms: float = 10.0  # of the good ones


CASES = (
    Case("compute", slower=SLOWER, computing=True, rtt_ms=4.0),
    Case("distance", bad="rtt=300ms"),
    Case("rate", bad="rate=2mbit"),
)


# ---- the worker that turns bad


class _Switch:
    """Whether it is bad now."""

    bad = False


def _up(arguments: list[str]) -> int:
    """`up` of a node whose engine and link turn bad at SIGUSR1. First argument: the case's name."""
    case = next(case for case in CASES if case.name == arguments[0])
    signal.signal(signal.SIGUSR1, lambda *_: setattr(_Switch, "bad", True))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(_Switch, "bad", False))

    class SlowEngine(ExpertEngine):
        def _run(self, graph: int) -> None:
            began = time.perf_counter()
            super()._run(graph)
            if _Switch.bad:
                time.sleep((time.perf_counter() - began) * (case.slower - 1))

    class SwitchedLink(LinkModel):
        def __init__(self, setting: LinkEmulation, random: Random) -> None:
            super().__init__(setting, random)
            self._other = LinkModel(LinkEmulation.parse(case.bad), random)

        def offer(self, size: int, now: float) -> float | None:
            return self._other.offer(size, now) if _Switch.bad else super().offer(size, now)

    import runpy  # noqa: PLC0415

    import swarmnode.parts  # noqa: PLC0415  patched here alone, in a process of its own
    import transport.peer_socket  # noqa: PLC0415

    vars(swarmnode.parts)["ExpertEngine"] = SlowEngine
    vars(transport.peer_socket)["LinkModel"] = SwitchedLink
    sys.argv = ["swarmnode", "up", *arguments[1:]]
    runpy.run_module("swarmnode", run_name="__main__")
    return 0


# ---- the swarm


def run(
    cases: Sequence[str] = (), *, rtt_ms: float = 0.0, replicas: int = 1, run_s: float = RUN_S, recover: bool = True
) -> dict[str, Any]:
    """Measure. Starts and ends processes of this machine."""
    wanted = [case for case in CASES if not cases or case.name in cases]
    rows = [asyncio.run(_measure(case, rtt_ms or case.rtt_ms, replicas, run_s, recover)) for case in wanted]
    return {"replicas": replicas, "rows": rows}


async def _measure(case: Case, rtt_ms: float, replicas: int, run_s: float, recover: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        model = MODEL
        if case.computing:
            model = folder / "computing.gguf"
            write_random_model(COMPUTING, model)
        pack = await onboarded(model, folder / "pack")
        whole = sum(pack.manifest.expert_bytes(s.index) * s.n_expert for s in pack.manifest.sites)
        memory = ["--memory", str(int(whole * _ROOM / GOOD)), "--emulate"]
        async with FoundedSwarm(folder, pack.path) as swarm:
            founder = await swarm.found("--no-local-experts", "--replicas", str(replicas), "--memory", "1M")
            good = [swarm.join(f"good-{i + 1}", *memory, f"rtt={rtt_ms}ms") for i in range(GOOD)]
            # The nearest at first, so that the first plan uses it whatever else it leaves out.
            near = _join_bad(swarm, folder, case, [*memory, f"rtt={rtt_ms / 2}ms"])
            bad, *_others = await all_started([near, *good])
            meter = _Meter(founder, run_s)
            if not await _holds(founder, bad.peer, meter):
                raise SwarmnodeError(f"the swarm did not take its experts in {PATIENCE_S:g} s")
            await meter.tokens_per_s(discard=True)  # statistics and graphs
            before = await meter.tokens_per_s()
            _tell(founder, f"before {before:.1f} tokens/s")
            share = _share(founder, bad.peer)
            bad.process.send_signal(signal.SIGUSR1)
            turned = time.monotonic()
            first = await meter.tokens_per_s(tokens=8)
            _tell(founder, f"first {first:.1f} tokens/s")
            await meter.until(lambda: _share(founder, bad.peer) < share)
            planned_s = time.monotonic() - turned
            _tell(founder, f"planned anew after {planned_s:.1f} s")
            await meter.tokens_per_s(discard=True)  # orders are carried out meanwhile
            after = await meter.tokens_per_s(times=3)
            _tell(founder, f"after {after:.1f} tokens/s")
            left = _share(founder, bad.peer)
            recovered_s = again = None
            if recover:
                bad.process.send_signal(signal.SIGUSR2)
                turned = time.monotonic()
                enough = max(left + 1, share // 2)
                if await meter.until(lambda: _share(founder, bad.peer) >= enough):
                    recovered_s = round(time.monotonic() - turned, 1)
            if recovered_s is not None:
                await meter.tokens_per_s(discard=True)
                again = round(await meter.tokens_per_s(times=3), 1)
            _tell(founder, f"used again after {recovered_s} s: {again} tokens/s")
            await bad.stop()  # hands over
            await meter.until(lambda: bad.peer not in founder.events("plan")[-1]["workers"])
            await meter.tokens_per_s(discard=True)
            without = await meter.tokens_per_s(times=3)
            _tell(founder, f"without {without:.1f} tokens/s")
    return {
        "case": case.name,
        "rtt_ms": rtt_ms,
        "share": share,
        "all_good": round(before, 1),
        "turned_bad": round(first, 1),
        "planned_s": round(planned_s, 1),
        "share_after": left,
        "after": round(after, 1),
        "without": round(without, 1),
        "ratio": round(after / without, 3),
        "recovered_s": recovered_s,
        "again": again,
    }


async def _join_bad(swarm: FoundedSwarm, folder: Path, case: Case, memory: Sequence[str]) -> NodeProcess:
    arguments = [swarm.ticket, *memory, "--listen", "127.0.0.1:0", "--no-lan", "--threads", "1"]
    node = await NodeProcess.start("bad", folder, [case.name, *arguments], module="swarmnode.bench.slow_member")
    swarm.nodes["bad"] = node
    return node


async def _holds(founder: NodeProcess, bad: str, meter: _Meter) -> bool:
    """Whether everything is held, and a part by the one that will turn bad, for some generations."""

    def planned() -> bool:
        last = founder.events("plan")[-1:]
        return bool(last) and not last[0]["uncovered"] and len(last[0]["workers"]) >= GOOD and _share(founder, bad) > 0

    if not await meter.until(planned):
        return False
    while True:
        status = await founder.status()
        if any(row["peer"] == bad and row["experts"] for row in status["peers"]):
            return True
        await asyncio.sleep(0.2)


def _tell(founder: NodeProcess, text: str) -> None:
    """Progress, for whoever watches."""
    last = founder.events("plan")[-1:]
    print(f"{time.strftime('%H:%M:%S')} {text} {last[0] if last else ''}", file=sys.stderr)


def _share(founder: NodeProcess, peer: str) -> int:
    """Experts that the last plan gives to a peer."""
    count: int = founder.events("plan")[-1]["workers"].get(peer, 0)
    return count


class _Meter:
    """Generates on the founder, greedily, one generation after the other."""

    def __init__(self, founder: NodeProcess, run_s: float) -> None:
        self._founder, self._run_s = founder, run_s
        self._tokens = 32

    async def tokens_per_s(self, *, tokens: int = 0, times: int = 1, discard: bool = False) -> float:
        """The median of `times` runs of about run_s, or of `tokens`."""
        rates = []
        for _ in range(times):
            rate = await self._generate(tokens or self._tokens)
            rates.append(rate)
            if not tokens:
                self._tokens = max(8, min(1024, int(rate * self._run_s)))
        return 0.0 if discard else statistics.median(rates)

    async def until(self, found: Any) -> bool:
        """Generate until something is so; False when it is not after PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while not found():
            if time.monotonic() > deadline:
                return False
            try:
                await self._generate(8)
            except SwarmnodeError:  # nobody holds an expert yet
                await asyncio.sleep(0.5)
        return True

    async def _generate(self, tokens: int) -> float:
        request = {
            "prompt": PROMPT,
            "max_tokens": tokens,
            "ignore_end": True,
            "sampling": {"temperature": 0.0},
        }
        async for event in self._founder.generate(request):
            if event["event"] == "result":
                rate: float = event["result"]["tokens_per_s"]
                return rate
        raise RuntimeError("the generation ended without a result")


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["up"]:
        # NodeProcess's own flags come first, the case's name after them
        name = next(one for one in given if one in {case.name for case in CASES})
        given.remove(name)
        return _up([name, *given[1:]])
    made = parser("python -m swarmnode.bench.slow_member", __doc__)
    made.add_argument("cases", nargs="*", choices=[[], *(case.name for case in CASES)], default=[])
    made.add_argument("--rtt-ms", type=not_negative, default=0.0, help="of the good members, instead of the case's own")
    made.add_argument("--replicas", type=count, default=1)
    made.add_argument("--seconds", type=positive, default=RUN_S, help="of generation per figure")

    def measure(chosen: argparse.Namespace) -> Result:
        return run(chosen.cases, rtt_ms=chosen.rtt_ms, replicas=chosen.replicas, run_s=chosen.seconds)

    return run_command(made, given, measure)


if __name__ == "__main__":
    raise SystemExit(main())
