"""A swarm over sites that cannot see each other: a founder behind a NAT, workers behind another, one public relay.

All that the workers are given is the founder's ticket. Both sites use the same private addresses and every node the
same port, so that the founder's own address, which is in the ticket, is a worker's at the workers' site. Bounds are
several times what a quiet machine shows; what is asserted tightly is what must not happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, TokenEvent
from swarmnode.membership import Ticket
from swarmnode.onboard import ModelPack
from tests.natlab.lab import Lab
from tests.natlab.matrix import RELAY_LINK, SITE_LINK
from tests.natlab.node import Host
from tests.natlab.swarm import Relay
from tests.natlab.swarm_nodes import SiteNode, until
from tests.swarmnode.backbone.helpers import local_session

PORT = 4433
WAIT_S = 40.0
GONE_S = 15.0
DIRECT = ("punched", "direct-public")
FOUNDER = ("--memory", "1M")  # of 7.3 MiB of experts
WORKER = ("--memory", "4M")  # two of them together hold what the founder does not; one does not
HELD = 4_000_000  # about so many bytes by each
REQUEST = GenerateRequest(
    prompt="import os\nimport sys\n\nclass Parser:\n    def __init__(self, filename):\n",
    max_tokens=12,
    sampling=Sampling(temperature=0.0),
    digests=True,
)

Start = Callable[..., Awaitable[SiteNode]]


@pytest.fixture(scope="module")
def expected(demo_pack: ModelPack) -> list[tuple[int, str]]:
    """What the local run generates."""
    session = local_session(demo_pack)
    try:
        events: list[TokenEvent] = []
        session.generate(REQUEST, events.append)
        return [(e.token, e.digest) for e in events if e.token >= 0]
    finally:
        session.close()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a node in a host: start(host, *arguments)."""
    nodes: list[SiteNode] = []

    async def one(host: Host, *arguments: str) -> SiteNode:
        common = ("--listen", f"0.0.0.0:{PORT}", "--threads", "1", "--no-port-mapping")
        nodes.append(await SiteNode.begin(host, tmp_path, [*arguments, *common]))
        return nodes[-1]

    yield one
    await asyncio.gather(*(node.end() for node in nodes))


@pytest.fixture
async def relay(lab: Lab) -> Relay:
    """A relay that serves."""
    relay = Relay(lab.host("relay", **RELAY_LINK))
    await relay.ready()
    return relay


async def found(start: Start, host: Host, pack: ModelPack, relay: Relay, *arguments: str) -> tuple[SiteNode, str]:
    """The founder, and its ticket."""
    model = ("--model", str(pack.path), "--context", "256", "--batch", "128")
    founder = await start(host, *model, "--relay", relay.url, *FOUNDER, *arguments)
    return founder, (await founder.wait_for("ticket"))["ticket"]


async def carried_out(founder: SiteNode, workers: int) -> object:
    """Whether a plan with so many workers holds everything, and they have it."""
    status = await founder.status()
    plan = status["swarm"]["plan"]
    held = {peer["peer"]: peer["experts"] for peer in status["peers"]}
    if plan is not None and plan["uncovered"] == 0 and len(plan["workers"]) == workers:
        return all(held.get(peer, 0) >= count for peer, count in plan["workers"].items()) or (plan, held)
    return plan, held


async def sees(node: SiteNode, *names: str, linked: bool = True) -> object:
    """Whether these are the members that it sees, and its links to them are up."""
    seen = await node.members()
    return (set(seen) == set(names) and (not linked or all(seen.values()))) or seen


async def goes(node: SiteNode, peer: SiteNode, *paths: str) -> object:
    """Whether the datagrams to a peer take such a path."""
    seen = await node.paths()
    return seen.get(peer.peer) in paths or seen


def fetched(node: SiteNode) -> int:
    """Bytes of slices that it was told to get."""
    return max((event["total"] for event in node.events("slices")), default=0)


async def ready(*nodes: SiteNode) -> None:
    """Wait until all are; what they are called is known then."""
    for node in nodes:
        node.peer = (await node.wait_for("ready", timeout=WAIT_S))["peer"]


@pytest.mark.timeout(180)
async def test_workers_of_a_site_and_its_internet(
    lab: Lab, relay: Relay, start: Start, demo_pack: ModelPack, expected: list[tuple[int, str]]
) -> None:
    """They join over the relay, go directly to the founder, and know each other whether there is an Internet or not."""
    office = lab.nat("office", "easy", **SITE_LINK)
    home = lab.nat("home", "easy", **SITE_LINK).host("founder")
    founder, ticket = await found(start, home, demo_pack, relay)
    invitation = Ticket.parse(ticket)
    assert invitation.relays == (relay.url,)
    assert (home.ipv4, PORT) in invitation.peers[0].addresses
    desk = office.host("first")
    first, second = [await start(host, ticket, *WORKER) for host in (desk, office.host("second"))]
    assert desk.ipv4 == home.ipv4  # what the ticket says of the founder leads to a worker here
    await ready(founder, first, second)
    await until("everything is held", partial(carried_out, founder, 2), WAIT_S)
    for worker in (first, second):
        await until("a direct path", partial(goes, founder, worker, *DIRECT), WAIT_S)
    await until("neighbours", partial(goes, first, second, "direct-lan"), WAIT_S)
    assert await founder.tokens(REQUEST) == expected
    for worker in (first, second):
        assert (await worker.status())["served_rows"] > 0

    office.set(up=False)
    gone = asyncio.create_task(until("workers are gone", partial(sees, founder), GONE_S))
    assert await founder.tokens(REQUEST) == expected  # it computes what nobody answers
    first.kill()
    first = await start(desk, *WORKER)  # it was a member: no ticket
    await until("neighbours by mDNS", partial(goes, first, second, "direct-lan"), WAIT_S)
    await gone
    assert not first.events("ready"), "nobody can have told it the model"

    office.set(up=True)
    await ready(first)
    await until("everybody is back", partial(sees, founder, "first", "second"), WAIT_S)
    await until("everything is held", partial(carried_out, founder, 2), WAIT_S)
    assert await founder.tokens(REQUEST) == expected
    assert fetched(first) < HELD / 2, "it had most of it"


@pytest.mark.timeout(180)
async def test_a_site_without_udp(
    lab: Lab, relay: Relay, start: Start, demo_pack: ModelPack, expected: list[tuple[int, str]]
) -> None:
    """All that is between the sites goes over the relay, which restarts; a worker dies, then the founder."""
    office = lab.nat("office", "udp-blocked", **SITE_LINK)
    home = lab.nat("home", "easy", **SITE_LINK).host("founder")
    founder, ticket = await found(start, home, demo_pack, relay, "--no-lan")
    desk = office.host("first")
    first, second = [await start(host, ticket, "--no-lan", *WORKER) for host in (desk, office.host("second"))]
    await ready(founder, first, second)
    await until("everything is held", partial(carried_out, founder, 2), WAIT_S)
    begun = asyncio.Event()
    generating = asyncio.create_task(founder.tokens(REQUEST, begun))
    await begun.wait()
    await relay.stop()
    await relay.restart()
    assert await generating == expected
    for node in (founder, first, second):
        assert not [*node.events("lost"), *node.events("member-gone")]
    for worker in (first, second):
        assert (await worker.status())["served_rows"] > 0
        await until("a relayed path", partial(goes, founder, worker, "relay"), WAIT_S)
    await until("neighbours", partial(goes, first, second, "direct-lan"), WAIT_S)

    first.kill()
    gone = asyncio.gather(
        until("a killed worker is gone for the founder", partial(sees, founder, "second"), GONE_S),
        until("a killed worker is gone for its neighbour", partial(sees, second, "founder"), GONE_S),
    )
    assert await founder.tokens(REQUEST) == expected
    await gone

    founder.kill()
    first = await start(desk, "--no-lan", *WORKER)
    await until("found in the relay's directory", partial(goes, first, second, "direct-lan"), WAIT_S)
    assert not first.events("ready"), "nobody can have told it the model"
    founder, _ = await found(start, home, demo_pack, relay, "--no-lan")
    await ready(founder, first)
    await until("everything is held", partial(carried_out, founder, 2), WAIT_S)
    assert await founder.tokens(REQUEST) == expected
    assert fetched(first) < HELD / 2, "it had most of it"
