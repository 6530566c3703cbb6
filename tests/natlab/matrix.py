"""NAT × NAT: how every kind of site reaches every other, with real processes and real NATs. `make natlab`, or

    python -m tests.natlab.matrix [--sites easy,symmetric,…] [--jobs 4] [--luck 16] [--json]

For each pair: time to the first byte of an answer, time until datagrams go directly, the path at the end, and how many
bytes went over the relay (TCP on the dialling side's access link, headers and keep-alives included). Each site has two
hosts, one for rows and one for columns, so that a site also meets its own kind. A pair dials by PeerId alone: all that
both know is two relays. Pairs run several at a time, and no host is in two of them. Called by test_reach.py too.

Exit code 1 when a pair did not reach what sites.hope() says: that it does at all, and directly where it can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace

from tests.natlab.lab import Lab, why_not
from tests.natlab.node import LinkOptions
from tests.natlab.sites import SITES, Hope, build, hope
from tests.natlab.swarm import Agent, AgentError, Relay

SITE_LINK = LinkOptions(delay_ms=10.0)  # 40 ms round trip directly
RELAY_LINK = LinkOptions(delay_ms=5.0)  # 60 ms over a relay
DIRECT_SECONDS = 5.0  # a punch that can work is over long before
STAY_SECONDS = 0.5  # … and a relayed pair is looked at once more after this
FIRST_BYTE_SECONDS = 20.0
LUCK_SECONDS = 15.0  # a punch with many sockets is to be over by then
STARTED_AT_ONCE = 4
MARKS = {"": "FAIL", "relay": "relay", "punched": "punched", "direct-public": "direct", "direct-lan": "lan"}


@dataclass(frozen=True, slots=True)
class Row:
    """One pair. Times in milliseconds since the dial, None when it did not happen."""

    left: str
    right: str
    hope: Hope
    dial_ms: float | None = None
    first_byte_ms: float | None = None
    direct_ms: float | None = None
    path: str = ""
    via: str = ""
    reason: str = ""
    relay_bytes: int = 0
    relay_rtt_ms: float | None = None
    call_bytes: int = 0
    error: str = ""

    @property
    def wrong(self) -> str:
        """What the pair did not reach; empty when all is well."""
        if self.error:
            return self.error
        if self.hope is Hope.DIRECT and self.direct_ms is None:
            return f"not direct: {self.reason}"
        if self.hope is Hope.RELAY and self.direct_ms is not None:
            return f"direct, which cannot be: {self.via}"
        return ""


def rounds(sites: Sequence[str], *, both_ways: bool) -> Iterator[list[tuple[str, str]]]:
    """All pairs of sites in rounds in which no site is twice on the same side; both_ways: also with sides exchanged."""
    count = len(sites)
    for shift in range(count if both_ways else count // 2 + 1):
        pairs = [(sites[i], sites[(i + shift) % count]) for i in range(count)]
        yield pairs[: count // 2] if not both_ways and 2 * shift == count else pairs


@asynccontextmanager
async def swarm(lab: Lab, sites: Sequence[str], *flags: str) -> AsyncIterator[dict[tuple[str, str], Agent]]:
    """Two relays, and an agent on each side of every site, connected to a relay; keys are (side, site)."""
    relays = [Relay(lab.host(name, ipv6=True, **RELAY_LINK)) for name in ("relay1", "relay2")]
    await asyncio.gather(*(relay.ready() for relay in relays))
    urls = [relay.url for relay in relays]
    agents: dict[tuple[str, str], Agent] = {}
    turns = asyncio.Semaphore(STARTED_AT_ONCE)

    async def start(side: str, site: str) -> None:
        async with turns:
            name = f"{side}-{site}"
            agent = agents[side, site] = Agent(build(lab, site, name, **SITE_LINK), name, urls, *flags)
            await agent.ready()

    try:
        await asyncio.gather(*(start(side, site) for side in ("left", "right") for site in sites))
        await asyncio.gather(*(settled(agent) for agent in agents.values()))
        yield agents
    finally:
        await asyncio.gather(*(agent.close() for agent in agents.values()))


async def settled(agent: Agent, timeout: float = 15.0) -> None:
    """Wait until an agent is connected to a relay and knows its kind of NAT. Raises AssertionError."""
    deadline = time.monotonic() + timeout
    while True:
        status = await agent.ask("status")
        if any(relay["up"] for relay in status["relays"]) and status.get("nat") != "unknown":
            return
        if time.monotonic() > deadline:
            if any(relay["up"] for relay in status["relays"]):
                return  # a node that knows nothing of its NAT must work too
            raise AssertionError(f"{agent.name} reaches no relay: {status['relays']}\n{agent.errors}")
        await asyncio.sleep(0.05)


async def meet(lab: Lab, left: Agent, right: Agent, row: Row, luck_seconds: float) -> Row:
    """Dial from left to right, and watch."""
    link = lab.access(left.host)
    before = lab.stats()[link]["other_bytes"]
    start = time.monotonic()
    try:
        dialled = await left.ask("dial", peer=right.peer, timeout=FIRST_BYTE_SECONDS)
        row = replace(row, dial_ms=dialled["dial_ms"], first_byte_ms=dialled["first_byte_ms"])
        patience = {Hope.DIRECT: DIRECT_SECONDS, Hope.LUCK: luck_seconds, Hope.RELAY: STAY_SECONDS}[row.hope]
        try:
            await left.ask("wait", peer=right.peer, direct=True, timeout=patience)
            row = replace(row, direct_ms=round((time.monotonic() - start) * 1e3, 1))
        except AgentError:
            pass
        last = await left.ask("ping", peer=right.peer)
        row = replace(
            row,
            path=last["path"],
            via=last["via"],
            reason=last["reason"],
            relay_rtt_ms=last.get("relay_rtt_ms"),
            call_bytes=last.get("call_bytes", 0),
        )
    except AgentError as error:
        row = replace(row, error=str(error))
    used = lab.stats()[link]["other_bytes"] - before
    for one, other in ((left, right), (right, left)):
        await one.ask("hangup", peer=other.peer)
    return replace(row, relay_bytes=used)


async def run(
    lab: Lab, sites: Sequence[str], *, jobs: int, luck_seconds: float, both_ways: bool, flags: Sequence[str] = ()
) -> AsyncIterator[Row]:
    """Build everything, and give each pair's row as it is known."""
    async with swarm(lab, sites, *flags) as agents:
        turns = asyncio.Semaphore(jobs)

        async def one(left: str, right: str) -> Row:
            async with turns:
                row = Row(left, right, hope(left, right))
                return await meet(lab, agents["left", left], agents["right", right], row, luck_seconds)

        for pairs in rounds(sites, both_ways=both_ways):
            for done in asyncio.as_completed([one(*pair) for pair in pairs]):
                yield await done


def line(row: Row) -> str:
    """A row for people."""
    if row.error:
        return f"{row.left:>14} → {row.right:14} {row.error}"
    direct = "–" if row.direct_ms is None else f"{row.direct_ms:.0f} ms"
    return (
        f"{row.left:>14} → {row.right:14} first byte {row.first_byte_ms or 0:6.0f} ms   direct {direct:>9}   "
        f"{row.path:13} relay {row.relay_bytes / 1000:7.1f} kB   {row.reason}{'   WRONG' if row.wrong else ''}"
    )


def grid(rows: Sequence[Row], sites: Sequence[str]) -> str:
    """The final paths as a table; `*` where the pair did not reach what it can."""
    cells = {(row.left, row.right): MARKS.get(row.path, row.path) + "*" * bool(row.wrong) for row in rows}
    head = " " * 14 + "".join(f"{site:>14}" for site in sites)
    return "\n".join([head, *(f"{a:14}" + "".join(f"{cells.get((a, b), ''):>14}" for b in sites) for a in sites)])


def summary(rows: Sequence[Row]) -> list[str]:
    """The figures that matter of all pairs together."""
    lines = []
    first = [row.first_byte_ms for row in rows if row.first_byte_ms is not None]
    trips = [row.first_byte_ms / row.relay_rtt_ms for row in rows if row.first_byte_ms and row.relay_rtt_ms]
    if first and trips:
        p50, p95 = _percentiles(first)
        lines.append(
            f"first byte: p50 {p50:.0f} ms, p95 {p95:.0f} ms; in round trips over the relay:"
            f" p50 {_percentiles(trips)[0]:.2f}, p95 {_percentiles(trips)[1]:.2f}"
        )
    sure = [row for row in rows if row.hope is Hope.DIRECT]
    direct = [row.direct_ms for row in sure if row.direct_ms is not None]
    if direct:
        p50, p95 = _percentiles(direct)
        lines.append(f"direct where it can be: {len(direct)} of {len(sure)}, p50 {p50:.0f} ms, p95 {p95:.0f} ms")
    lucky = [row for row in rows if row.hope is Hope.LUCK]
    met = [row.direct_ms for row in lucky if row.direct_ms is not None and row.direct_ms <= LUCK_SECONDS * 1e3]
    if met:
        p50, p95 = _percentiles(met)
        share = f"{len(met)} of {len(lucky)} within {LUCK_SECONDS:.0f} s"
        lines.append(f"hard × easy: {share}, p50 {p50 / 1e3:.1f} s, p95 {p95 / 1e3:.1f} s")
    lines.append(f"calls over the relay: at most {max(row.call_bytes for row in rows)} bytes per side and pair")
    return lines


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


async def main() -> int:
    """Run with the flags from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="natlab", description="NAT × NAT, in a small Internet of this machine.")
    parser.add_argument("--sites", default=",".join(SITES), help=f"some of {', '.join(SITES)}")
    parser.add_argument("--jobs", type=int, default=4, help="pairs at one time (default 4)")
    parser.add_argument("--luck", type=float, default=16.0, help="seconds to wait for a birthday punch (default 16)")
    parser.add_argument("--times", type=int, default=1, help="the whole matrix so many times, in a lab of its own each")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of lines")
    parser.add_argument("--verbose", action="store_true", help="agents log")
    given = parser.parse_args()
    sites = given.sites.split(",")
    if given.jobs < 1 or given.times < 1 or len(set(sites)) < len(sites):
        parser.error("--jobs and --times are at least 1, and a site is named once")
    if unknown := set(sites) - set(SITES):
        parser.error(f"unknown site {', '.join(sorted(unknown))}; there are {', '.join(SITES)}")
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    rows: list[Row] = []
    start = time.monotonic()
    flags = ("--verbose",) if given.verbose else ()
    lost: dict[str, int] = {}
    for seed in range(given.times):
        with Lab(seed=seed + 1) as lab:
            async for row in run(lab, sites, jobs=given.jobs, luck_seconds=given.luck, both_ways=True, flags=flags):
                rows.append(row)
                if not given.json:
                    print(line(row), flush=True)
            lost |= lab.ring_drops()
    seconds = round(time.monotonic() - start, 1)
    wrong = [row for row in rows if row.wrong]
    if given.json:
        print(json.dumps({"seconds": seconds, "lab_drops": lost, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print("\n" + grid(rows, sites))
        print("\n" + "\n".join(summary(rows)))
        print(
            f"\n{len(rows)} pairs in {seconds:.0f} s, {len(wrong)} did not reach what they can; lab drops: {lost or 0}"
        )
        for row in wrong:
            print(f"  {row.left} → {row.right}: {row.wrong}")
    return 1 if wrong or lost else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
