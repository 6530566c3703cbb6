"""What a stream of requests feels when its path dies, in every way in which paths die. Run as root:

    python -m tests.natlab.outage [--events 50] [--kinds both,back,…] [--json]

One pair, each side behind a NAT of its own, two relays, a request of 12 KB every 20 ms. One event at a time, kind after
kind; then the damage is undone and the pair must be direct again before the next one. Stall: the longest time without
any answer. Exit code 1 when a request was lost, or when the stalls are longer than STALL_MS in more than 5 % of events.

    both    UDP between the two hosts vanishes              renumber  the gateway gets another address
    there   … only from the asking side to the other        roam      the asking side moves to another network
    back    … only the other way: requests still arrive     relays    all relays are killed, and started again
    flush   the asking side's gateway forgets all mappings
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

from tests.natlab import matrix
from tests.natlab.lab import Lab, why_not
from tests.natlab.nat import Nat
from tests.natlab.node import Host
from tests.natlab.sites import build
from tests.natlab.swarm import Agent, AgentError, Relay

KINDS = ("both", "there", "back", "flush", "renumber", "roam", "relays")
STALL_MS = 1500.0
BEFORE, AFTER = 1.0, 2.5  # seconds of traffic around the event
BACK_SECONDS = 60.0  # until the pair must be direct again
QUIET_SECONDS = 1.0  # between two events, with everything in order


@dataclass(frozen=True, slots=True)
class Event:
    """One outage. Times in milliseconds; back_ms: from the end of the traffic until both sides were direct again."""

    kind: str
    lost: int
    stall_ms: float
    worst_ms: float  # the slowest request
    back_ms: float | None
    switches: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """All outages of one kind."""

    kind: str
    count: int
    lost: int
    median_ms: float
    p95_ms: float
    max_ms: float
    back_median_ms: float | None

    @classmethod
    def of(cls, kind: str, events: Sequence[Event]) -> Summary:
        """Of at least one event."""
        stalls = sorted(event.stall_ms for event in events)
        back = [event.back_ms for event in events if event.back_ms is not None]
        return cls(
            kind,
            len(events),
            sum(event.lost for event in events),
            statistics.median(stalls),
            stalls[math.ceil(0.95 * len(stalls)) - 1],
            stalls[-1],
            statistics.median(back) if back else None,
        )


class Pair:
    """The two agents, what is between them, and how to break it."""

    def __init__(self, lab: Lab, relays: Sequence[Relay], one: Agent, other: Agent) -> None:
        self.lab, self.relays, self.one, self.other = lab, relays, one, other

    async def outage(self, kind: str) -> Event:
        """Break it amid traffic, look, and heal. Raises AgentError when the pair does not become direct again."""
        seconds = BEFORE + AFTER
        streaming = asyncio.create_task(self.one.ask("stream", peer=self.other.peer, seconds=seconds))
        await asyncio.sleep(BEFORE)
        await self._break(kind)
        answer = await streaming
        ended = time.monotonic()
        await self._heal(kind)
        back_ms: float | None = None
        try:
            await self.direct()
            back_ms = round((time.monotonic() - ended) * 1e3, 1)
        except AgentError as error:
            answer["failure"] = f"{answer['failure']} {error}".strip()
        await asyncio.sleep(QUIET_SECONDS)
        switches = tuple(f"{one['path']}: {one['reason']}" for one in answer["switches"])
        worst = answer["max_ms"] or math.inf
        stall = answer["gap_ms"] or math.inf
        return Event(kind, answer["lost"], stall, worst, back_ms, switches, answer["failure"])

    async def direct(self) -> None:
        """Wait until both sides send directly, and only directly. Raises AgentError."""
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            sides = ((self.one, self.other), (self.other, self.one))
            paths = [await side.ask("wait", peer=peer.peer, direct=True, timeout=BACK_SECONDS) for side, peer in sides]
            if not any(path["doubled"] for path in paths):
                return
            if time.monotonic() > deadline:
                raise AgentError(f"still sends twice: {paths}")
            await asyncio.sleep(0.05)

    async def _break(self, kind: str) -> None:
        one, other = self.one.host, self.other.host
        gateway = one.uplink.parent
        assert isinstance(gateway, Nat)
        match kind:
            case "both" | "there":
                self.lab.black_hole(one, other, both=kind == "both")
            case "back":
                self.lab.black_hole(other, one, both=False)
            case "flush":
                gateway.flush()
            case "renumber":
                gateway.renumber()
            case "roam":
                one.use(next(uplink for uplink in one.uplinks if uplink is not one.uplink))
            case "relays":
                await asyncio.gather(*(relay.stop(kill=True) for relay in self.relays))

    async def _heal(self, kind: str) -> None:
        self.lab.heal(self.one.host, self.other.host)
        if kind == "relays":
            await asyncio.gather(*(relay.restart() for relay in self.relays))
        await asyncio.gather(*(matrix.settled(agent, timeout=30.0) for agent in (self.one, self.other)))


async def run(lab: Lab, kinds: Sequence[str], count: int) -> AsyncIterator[Event]:
    """Build the pair, and give each event as it is over."""
    relays = [Relay(lab.host(name, ipv6=True, **matrix.RELAY_LINK)) for name in ("relay1", "relay2")]
    await asyncio.gather(*(relay.ready() for relay in relays))
    urls = [relay.url for relay in relays]
    phone: Host = build(lab, "easy", "phone", **matrix.SITE_LINK)
    phone.plug(lab.nat("mobile", "easy", **matrix.SITE_LINK))
    home = build(lab, "easy", "home", **matrix.SITE_LINK)
    async with AsyncExitStack() as stack:
        agents = [Agent(host, host.name, urls) for host in (phone, home)]
        for agent in agents:
            stack.push_async_callback(agent.close)
        await asyncio.gather(*(agent.ready() for agent in agents))
        await asyncio.gather(*(matrix.settled(agent) for agent in agents))
        pair = Pair(lab, relays, *agents)
        await pair.one.ask("dial", peer=pair.other.peer)
        await pair.direct()
        await asyncio.sleep(QUIET_SECONDS)
        for kind in itertools.islice(itertools.cycle(kinds), count):
            yield await pair.outage(kind)


def line(event: Event) -> str:
    """An event for people."""
    back = "never" if event.back_ms is None else f"{event.back_ms:6.0f} ms"
    return (
        f"{event.kind:>9}   lost {event.lost}   stall {event.stall_ms:6.0f} ms   slowest {event.worst_ms:6.0f} ms   "
        f"direct again after {back}   {' → '.join(event.switches)} {event.failure}"
    )


def table(summaries: Sequence[Summary]) -> str:
    """All kinds for people."""
    rows = [f"{'':>9} {'count':>6} {'lost':>6} {'median':>8} {'p95':>8} {'max':>8}   direct again (median)"]
    for one in summaries:
        back = "never" if one.back_median_ms is None else f"{one.back_median_ms:.0f} ms"
        stalls = " ".join(f"{value:5.0f} ms" for value in (one.median_ms, one.p95_ms, one.max_ms))
        rows.append(f"{one.kind:>9} {one.count:6} {one.lost:6} {stalls}   {back}")
    return "\n".join(rows)


async def main() -> int:
    """Run with the flags from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="outage", description="What a stream of requests feels when its path dies.")
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of lines")
    given = parser.parse_args()
    if given.events < 1:
        parser.error("--events is at least 1")
    kinds = given.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    events: list[Event] = []
    start = time.monotonic()
    with Lab(seed=1) as lab:
        async for event in run(lab, kinds, given.events):
            events.append(event)
            if not given.json:
                print(line(event), flush=True)
        drops = lab.ring_drops()
    seconds = round(time.monotonic() - start, 1)
    summaries = [Summary.of(kind, [event for event in events if event.kind == kind]) for kind in kinds[: len(events)]]
    total = Summary.of("all", events)
    if given.json:
        rows = [asdict(one) for one in (*summaries, total)]
        print(json.dumps({"seconds": seconds, "lab_drops": drops, "kinds": rows, "events": list(map(asdict, events))}))
    else:
        print("\n" + table([*summaries, total]))
        print(f"\n{len(events)} events in {seconds:.0f} s; lab drops: {drops or 0}")
    failed = total.lost or total.p95_ms > STALL_MS or any(event.failure for event in events)
    return 1 if failed or drops else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
