"""What a decode step costs between two sites, directly and through the relay, beside its physical bound. Run as root:

    python -m tests.natlab.wan [--rtt 80] [--tokens 64] [--rounds 3] [--relay-ms 0] [--founder FLAGS]… [--json]

The demo model: a founder that computes no experts, behind a NAT; two workers that joined with its ticket and hold them
all, behind another; a public relay. Both access links take a quarter of the round trip each way, so that it is the same
directly and over the relay (whose own link takes --relay-ms each way on top). First datagrams go directly; then the
workers' gateway lets no UDP pass any more, and the same processes go on over the relay. On each path the same greedy
text is generated without any distance and at --rtt, and each once unmeasured before, so that everybody knows the path.

    trips       site calls of a step that waited for another node
    bound       steps a second if nothing but the distance took time: 1 / (trips × round trip)
    overhead    what is missing to that, as a share of it: everything that a step costs, the computation too
    unexplained the share of a step that is neither distance nor what a step takes on the direct path without any
    roadmap     throughput overhead measured there: directly, and through a CDN's relay

--founder: flags of `swarmnode up` for the founder in one argument, one swarm for each; default MODES. The lab's router
is a process of this machine too, and what it delays by itself is in the figures; they are void where it dropped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from swarmnode.backbone.session import GenerateRequest
from swarmnode.control import request
from swarmnode.demo import MODEL, PROMPT
from swarmnode.onboard import onboard
from tests.natlab.lab import Lab, why_not
from tests.natlab.nat import Nat
from tests.natlab.swarm import Relay
from tests.natlab.swarm_nodes import Json, SiteNode, until

MODES = ("", "--mode partial --wire f16")
WORKERS = ("one", "two")
DIRECT, RELAY = "direct", "relay"
PATHS = {DIRECT: ("punched", "direct-public"), RELAY: ("relay",)}
ROADMAP = {DIRECT: 0.012, RELAY: 0.28}
PORT = 4433
WAIT_S = 60.0
SETTLE_TOKENS = 12  # before a measurement: the new round trip is known, to QUIC and to who judges lateness
PINGS, PING_S = 5, 0.1
MEMORY = "4M"  # of each worker: two of them hold the demo model's experts


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. Times in milliseconds."""

    rtt_ms: float = 80.0
    tokens: int = 64
    rounds: int = 3
    relay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One path at one distance. `rtt_ms` is the links', `seen_rtt_ms` what the founder's pings take to the
    farther worker; steps per second are the median of the rounds, and the lowest and highest of them."""

    founder: str
    path: str
    rtt_ms: float
    seen_rtt_ms: float
    trips: float
    steps_per_s: float
    low: float
    high: float
    step_ms: float
    bound_steps_per_s: float | None
    overhead: float | None
    unexplained: float | None
    roadmap: float
    error: str = ""


class Backbone(SiteNode):
    """A node that generates."""

    async def generated(self, tokens: int) -> Json:
        """The result of a generation, see GenerateResult."""
        wanted: Json = {"prompt": PROMPT, "max_tokens": tokens, "sampling": {"temperature": 0.0}, "ignore_end": True}
        if "speculate" in GenerateRequest.__struct_fields__:
            wanted["speculate"] = False  # a step is a token

        async def collect() -> Json:
            result: Json = {}
            async for event in request(self.state, "generate", request=wanted):
                if event["event"] == "result":
                    result = event["result"]
            return result

        return await self._ask(collect)

    async def rtt_ms(self, peer: SiteNode) -> float:
        """The shortest answer to a few pings; infinite where none came."""

        async def ping() -> float:
            pings = request(self.state, "ping", peer=peer.peer, count=PINGS, interval=PING_S)
            times = [event["rtt_ms"] async for event in pings if event["event"] == "ping"]
            return min((time for time in times if time is not None), default=math.inf)

        return await self._ask(ping)


class Sites:
    """The founder, its workers, and the distance between them. Made by `build`."""

    def __init__(self, home: Nat, office: Nat, founder: Backbone, workers: Sequence[SiteNode]) -> None:
        self._home, self._office = home, office
        self.founder, self.workers = founder, workers

    @classmethod
    async def build(
        cls, lab: Lab, pack: Path, folder: Path, flags: str, stack: AsyncExitStack, relay_ms: float
    ) -> Sites:
        """Everything, without any distance; until the workers hold all experts and are reached directly."""
        relay = Relay(lab.host("relay", delay_ms=relay_ms))
        await relay.ready()
        home, office = lab.nat("home", "easy"), lab.nat("office", "easy")
        common = ("--listen", f"0.0.0.0:{PORT}", "--threads", "1", "--no-port-mapping", "--no-lan")
        model = ("--model", str(pack), "--no-local-experts", "--context", "512", "--batch", "128", "--relay", relay.url)
        founder = await Backbone.begin(home.host("founder"), folder, [*model, *flags.split(), *common])
        stack.push_async_callback(founder.end)
        assert isinstance(founder, Backbone)
        ticket = (await founder.wait_for("ticket"))["ticket"]
        workers = []
        for name in WORKERS:
            workers.append(await SiteNode.begin(office.host(name), folder, [ticket, "--memory", MEMORY, *common]))
            stack.push_async_callback(workers[-1].end)
        for worker in workers:
            worker.peer = (await worker.wait_for("ready", timeout=WAIT_S))["peer"]
        sites = cls(home, office, founder, workers)
        await until("the workers hold everything", sites._hold_everything, WAIT_S)
        await sites.go(DIRECT)
        return sites

    async def go(self, path: str) -> None:
        """Let datagrams take this path, and wait until they do."""
        self._office.set_udp(path == DIRECT)
        await until(f"the {path} path", partial(self.goes, path), WAIT_S)

    async def goes(self, path: str) -> object:
        """Whether the datagrams to all workers take this path now."""
        seen = await self.founder.paths()
        taken = [seen.get(worker.peer) for worker in self.workers]
        return all(one in PATHS[path] for one in taken) or taken

    def apart(self, rtt_ms: float) -> None:
        """Put so much between the sites."""
        for gateway in (self._home, self._office):
            gateway.set(delay_ms=rtt_ms / 4)

    async def seen_rtt_ms(self) -> float:
        """Of the best of some pings, to the farther worker."""
        return max([await self.founder.rtt_ms(worker) for worker in self.workers])

    async def _hold_everything(self) -> object:
        status = await self.founder.status()
        plan = status["swarm"]["plan"]
        held = {peer["peer"]: peer["experts"] for peer in status["peers"]}
        if plan is None or plan["uncovered"] or len(plan["workers"]) != len(self.workers):
            return plan
        return all(held.get(peer, 0) >= count for peer, count in plan["workers"].items()) or (plan, held)


async def measure(lab: Lab, pack: Path, folder: Path, flags: str, options: Options) -> AsyncIterator[Row]:
    """The rows of one swarm: both paths, each without distance and at `options.rtt_ms`."""
    async with AsyncExitStack() as stack:
        sites = await Sites.build(lab, pack, folder, flags, stack, options.relay_ms)
        near_s = 0.0
        for path in (DIRECT, RELAY):
            await sites.go(path)
            for rtt_ms in (0.0, options.rtt_ms):
                sites.apart(rtt_ms)
                await sites.founder.generated(SETTLE_TOKENS)
                results = [await sites.founder.generated(options.tokens) for _ in range(options.rounds)]
                steps_s = [result["decode_s"] / result["steps"] for result in results]
                if not near_s:
                    near_s = statistics.median(steps_s)
                seen, stayed = await sites.seen_rtt_ms(), await sites.goes(path)
                distance_ms = rtt_ms + (4 * options.relay_ms if path == RELAY else 0.0)
                error = "" if stayed is True else f"the path changed: {stayed}"
                yield row(flags, path, distance_ms, seen, near_s, results, error)


def row(
    flags: str, path: str, rtt_ms: float, seen_ms: float, near_s: float, results: Sequence[Json], error: str = ""
) -> Row:
    """What generations say. `near_s`: a step on the direct path without distance."""
    rates = [result["steps"] / result["decode_s"] for result in results]
    steps_per_s = statistics.median(rates)
    trips = statistics.median(result["blocking_round_trips_per_token"] for result in results)
    distance_s = trips * rtt_ms / 1e3
    bound = 1 / distance_s if distance_s else None
    return Row(
        founder=flags or "exact",
        path=path,
        rtt_ms=rtt_ms,
        seen_rtt_ms=round(seen_ms, 1),
        trips=round(trips, 3),
        steps_per_s=round(steps_per_s, 4),
        low=round(min(rates), 4),
        high=round(max(rates), 4),
        step_ms=round(1e3 / steps_per_s, 2),
        bound_steps_per_s=round(bound, 4) if bound else None,
        overhead=round(1 - steps_per_s / bound, 4) if bound else None,
        unexplained=round(1 - (distance_s + near_s) * steps_per_s, 4) if bound else None,
        roadmap=ROADMAP[path],
        error=error,
    )


async def run(options: Options, founders: Sequence[str] = MODES, tell: Callable[[Row], None] | None = None) -> Json:
    """A lab and a swarm for each of `founders`; the shape of --json. `tell` hears of each row at once."""
    rows: list[Row] = []
    drops: dict[str, int] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="natlab-wan-") as name:
        pack = await asyncio.to_thread(onboard, MODEL, Path(name) / "pack")
        for number, flags in enumerate(founders):
            folder = Path(name) / f"swarm-{number}"
            with Lab(seed=1) as lab:
                async for one in measure(lab, pack.path, folder, flags, options):
                    rows.append(one)
                    if tell is not None:
                        tell(one)
                drops |= lab.ring_drops()
    seconds = round(time.monotonic() - start, 1)
    return {"seconds": seconds, "options": asdict(options), "lab_drops": drops, "rows": [asdict(one) for one in rows]}


HEAD = f"{'path':<8}{'RTT':>6}{'seen':>8}{'trips':>7}{'steps/s':>9}{'(low–high)':>18}{'step':>10}{'bound':>9}"
HEAD += f"{'overhead':>10}{'unexplained':>13}{'roadmap':>9}  founder"


def line(row: Row) -> str:
    """A row for people, below HEAD."""
    spread = f"({row.low:.3f}–{row.high:.3f})"
    bound = "" if row.bound_steps_per_s is None else f"{row.bound_steps_per_s:.3f}"
    overhead, unexplained = ("" if one is None else f"{one:.1%}" for one in (row.overhead, row.unexplained))
    return (
        f"{row.path:<8}{row.rtt_ms:>6g}{row.seen_rtt_ms:>8.1f}{row.trips:>7g}{row.steps_per_s:>9.3f}{spread:>18}"
        f"{row.step_ms:>7.1f} ms{bound:>9}{overhead:>10}{unexplained:>13}{row.roadmap:>9.1%}  {row.founder} {row.error}"
    )


async def main() -> int:
    """Run with the flags from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="wan", description="A decode step between two sites, direct and relayed.")
    parser.add_argument("--rtt", type=float, default=80.0, help="between the sites, ms")
    parser.add_argument("--tokens", type=int, default=64, help="of each generation")
    parser.add_argument("--rounds", type=int, default=3, help="generations per row")
    parser.add_argument("--relay-ms", type=float, default=0.0, help="the relay's own link, each way")
    parser.add_argument("--founder", action="append", help="flags of `up` for the founder; repeat for more swarms")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of lines")
    given = parser.parse_args()
    if given.rtt <= 0 or given.tokens < 2 or given.rounds < 1 or given.relay_ms < 0:
        parser.error("--rtt is more than 0, --tokens at least 2, --rounds at least 1, --relay-ms not negative")
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    options = Options(given.rtt, given.tokens, given.rounds, given.relay_ms)
    if not given.json:
        print(HEAD)
    tell = None if given.json else lambda row: print(line(row), flush=True)
    result = await run(options, given.founder or MODES, tell)
    if given.json:
        print(json.dumps(result))
    else:
        print(f"\n{result['seconds']:.0f} s; lab drops: {result['lab_drops'] or 0}")
    return 1 if result["lab_drops"] or any(row["error"] for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
