"""Reach anyone: our endpoints and relays as processes behind real NATs, and what happens to traffic when paths change.

Every bound is several times what a quiet machine shows: these run beside other tests. What is asserted tightly is what
must not happen at all: a lost request, a connection that ends, a path that cannot be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from tests.natlab import matrix
from tests.natlab.agent import Json, peer_of
from tests.natlab.lab import Lab
from tests.natlab.nat import CARRIER
from tests.natlab.node import Host
from tests.natlab.sites import SITES, build
from tests.natlab.swarm import Agent, AgentError, Relay

SITE, RELAY = matrix.SITE_LINK, matrix.RELAY_LINK

Start = Callable[..., Awaitable[list[Agent]]]


@pytest.fixture
async def relays(lab: Lab) -> list[Relay]:
    """Two relays that serve."""
    started = [Relay(lab.host(name, ipv6=True, **RELAY)) for name in ("relay1", "relay2")]
    await asyncio.gather(*(relay.ready() for relay in started))
    return started


@pytest.fixture
async def start(relays: list[Relay]) -> AsyncIterator[Start]:
    """Start an agent in each of these hosts: start(host, …); they are connected to a relay when it returns."""
    async with AsyncExitStack() as stack:

        async def start_all(*hosts: Host) -> list[Agent]:
            agents = [Agent(host, host.name, [relay.url for relay in relays]) for host in hosts]
            for agent in agents:
                stack.push_async_callback(agent.close)
            await asyncio.gather(*(agent.ready() for agent in agents))
            await asyncio.gather(*(matrix.settled(agent) for agent in agents))
            return agents

        yield start_all


async def dialled(one: Agent, other: Agent, **wanted: object) -> None:
    """Dial by PeerId alone, and wait for a path like this."""
    await one.ask("dial", peer=other.peer)
    await asyncio.gather(one.ask("wait", peer=other.peer, **wanted), other.ask("wait", peer=one.peer, **wanted))


def kinds(answer: Json) -> list[str]:
    """The paths that were taken during a stream, in order."""
    return [switch["path"] for switch in answer["switches"]]


@pytest.mark.timeout(200)
async def test_every_site_reaches_every_other(lab: Lab) -> None:
    """66 pairs: all of them by the relay at least, and directly wherever that is possible without trying ports."""
    rows = [row async for row in matrix.run(lab, tuple(SITES), jobs=4, luck_seconds=0.5, both_ways=False)]
    assert len(rows) == len(SITES) * (len(SITES) + 1) // 2
    assert not {f"{row.left} → {row.right}": row.wrong for row in rows if row.wrong}


@pytest.mark.parametrize("hard", ["symmetric", "symmetric-seq"])
async def test_a_hard_nat_meets_an_easy_one(lab: Lab, start: Start, hard: str) -> None:
    """By predicting the next port, or by trying enough of them."""
    one, other = await start(build(lab, hard, "hard", **SITE), build(lab, "easy", "easy", **SITE))
    await dialled(one, other, direct=True, timeout=25)
    assert (await one.ask("stream", peer=other.peer, seconds=1))["lost"] == 0


async def test_neighbours_talk_over_their_lan(lab: Lab, start: Start) -> None:
    home = lab.nat("home", "easy", **SITE)
    one, other = await start(home.host("one"), home.host("other"))
    await dialled(one, other, kind="direct-lan")
    pings = [(await one.ask("ping", peer=other.peer))["rtt_ms"] for _ in range(5)]
    assert min(pings) < 30  # the gateway's link alone is 40; one of them may meet a busy moment


async def test_homes_with_the_same_addresses_behind_one_carrier(lab: Lab, start: Start) -> None:
    """Both hosts are 192.168.1.2; the carrier's NAT does not let them meet; each other's address is their own."""
    carrier = lab.nat("carrier", "easy", lan=CARRIER, **SITE)
    one, other = await start(*(carrier.nat(f"{name}/gw").host(name) for name in ("one", "other")))
    await one.ask("dial", peer=other.peer)
    answer = await one.ask("stream", peer=other.peer, seconds=2)
    assert answer["lost"] == 0


@pytest.mark.parametrize("direction", ["both", "there", "back"])
async def test_a_direct_path_that_dies_is_replaced_without_losing_anything(
    lab: Lab, start: Start, direction: str
) -> None:
    """`back`: requests arrive, answers do not; the peer hears us well and must find out that we do not hear it."""
    one, other = await start(build(lab, "easy", "one", **SITE), build(lab, "easy", "other", **SITE))
    await dialled(one, other, direct=True)
    streaming = asyncio.create_task(one.ask("stream", peer=other.peer, seconds=5))
    await asyncio.sleep(1)  # of traffic
    source, target = (other, one) if direction == "back" else (one, other)
    lab.black_hole(source.host, target.host, both=direction == "both")
    answer = await streaming
    assert answer["lost"] == 0, answer
    assert answer["gap_ms"] < (3000 if direction == "back" else 1500), answer["switches"]
    assert "relay" in kinds(answer)
    lab.heal(one.host, other.host)
    assert (await one.ask("wait", peer=other.peer, direct=True, timeout=30))["path"] != "relay"
    assert (await one.ask("stream", peer=other.peer, seconds=1))["lost"] == 0


async def test_a_device_moves_to_another_network(lab: Lab, start: Start) -> None:
    phone = build(lab, "easy", "phone", **SITE)
    mobile = phone.plug(lab.nat("mobile", "symmetric", delay_ms=25))
    one, other = await start(phone, build(lab, "public", "server", **SITE))
    await dialled(one, other, direct=True)
    streaming = asyncio.create_task(one.ask("stream", peer=other.peer, seconds=6))
    await asyncio.sleep(1)  # of traffic
    phone.use(mobile)
    answer = await streaming
    assert answer["lost"] == 0, answer
    assert answer["gap_ms"] < 2500, answer["switches"]
    assert (await one.ask("wait", peer=other.peer, direct=True, timeout=20))["via"]


@pytest.mark.parametrize("event", ["flush", "renumber"])
async def test_a_gateway_forgets_everything(lab: Lab, start: Start, event: str) -> None:
    """Mappings die, as when it restarts; with `renumber`, it also has another address then."""
    gateway = lab.nat("home", "symmetric", **SITE)
    one, other = await start(gateway.host("one"), build(lab, "public", "server", **SITE))
    await dialled(one, other, direct=True)
    streaming = asyncio.create_task(one.ask("stream", peer=other.peer, seconds=5))
    await asyncio.sleep(1)  # of traffic
    if event == "flush":
        gateway.flush()
    else:
        gateway.renumber()
    answer = await streaming
    assert answer["lost"] == 0, answer
    assert answer["gap_ms"] < 2500, answer["switches"]
    await one.ask("wait", peer=other.peer, direct=True, timeout=20)


async def test_a_network_that_stops_letting_udp_out(lab: Lab, start: Start) -> None:
    gateway = lab.nat("office", "easy", **SITE)
    one, other = await start(gateway.host("one"), build(lab, "public", "server", **SITE))
    await dialled(one, other, direct=True)
    gateway.set_udp(False)
    answer = await one.ask("stream", peer=other.peer, seconds=3)
    assert answer["lost"] == 0, answer
    assert answer["path"] == "relay"
    gateway.set_udp(True)
    await one.ask("wait", peer=other.peer, direct=True, timeout=30)


async def test_a_path_that_carries_less_is_used_all_the_same(lab: Lab, start: Start) -> None:
    """Large datagrams vanish on it, first from the start, then from one moment to the next."""
    one, other = await start(
        build(lab, "easy", "one", carry=1300, delay_ms=10.0), build(lab, "public", "server", **SITE)
    )
    await dialled(one, other, direct=True)
    assert (await one.ask("stream", peer=other.peer, seconds=2))["lost"] == 0
    gateway = lab.nodes["one/gw"]
    gateway.set(carry=0)
    streaming = asyncio.create_task(one.ask("stream", peer=other.peer, seconds=6))
    await asyncio.sleep(2)  # of traffic
    gateway.set(carry=1260)
    answer = await streaming
    assert answer["lost"] == 0, answer
    assert answer["gap_ms"] < 2500, answer["switches"]


@pytest.mark.parametrize("mtu", [1228, 1000, 700])
async def test_a_device_whose_link_is_narrow(lab: Lab, start: Start, mtu: int) -> None:
    """1228 bytes are what QUIC asks of a link; below that, datagrams go in smaller pieces."""
    narrow = lab.host("one", mtu=mtu, delay_ms=10.0)
    one, other = await start(narrow, build(lab, "easy", "server", **SITE))
    await dialled(one, other, direct=True)
    answer = await one.ask("stream", peer=other.peer, seconds=5)
    assert answer["lost"] == 0, answer
    assert answer["gap_ms"] < 3000, answer


async def test_a_lossy_direct_path_loses_to_the_relay(lab: Lab, start: Start) -> None:
    one, other = await start(build(lab, "easy", "one", **SITE), build(lab, "public", "server", **SITE))
    await dialled(one, other, direct=True)
    lab.nodes["one/gw"].set(udp_loss=0.15)
    answer = await one.ask("stream", peer=other.peer, seconds=8)
    assert answer["lost"] == 0, answer
    assert answer["path"] == "relay", answer
    assert "los" in answer["reason"]


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
async def test_the_second_relay_takes_over(lab: Lab, relays: list[Relay], start: Start, kill: bool) -> None:
    one, other = await start(build(lab, "udp-blocked", "one", **SITE), build(lab, "udp-blocked", "other", **SITE))
    await dialled(one, other, direct=False)
    via = (await one.ask("ping", peer=other.peer))["via"]
    home = next(relay for relay in relays if relay.url == via)
    streaming = asyncio.create_task(one.ask("stream", peer=other.peer, seconds=6))
    await asyncio.sleep(1)  # of traffic
    await home.stop(kill=kill)
    answer = await streaming
    assert answer["lost"] == 0, answer
    assert answer["gap_ms"] < 2500, answer["switches"]
    assert answer["via"] != via


async def test_all_relays_restart(lab: Lab, relays: list[Relay], start: Start) -> None:
    """A pair that has nothing but relays loses nothing, and is there again soon after them."""
    one, other = await start(build(lab, "udp-blocked", "one", **SITE), build(lab, "udp-blocked", "other", **SITE))
    await dialled(one, other, direct=False)
    streaming = asyncio.create_task(one.ask("stream", peer=other.peer, seconds=7))
    await asyncio.sleep(1)  # of traffic
    await asyncio.gather(*(relay.stop() for relay in relays))
    await asyncio.gather(*(relay.restart() for relay in relays))
    answer = await streaming
    assert answer["lost"] == 0, answer
    assert answer["gap_ms"] < 5000, answer["switches"]


async def test_a_direct_pair_does_not_care_about_relays(lab: Lab, relays: list[Relay], start: Start) -> None:
    one, other = await start(build(lab, "easy", "one", **SITE), build(lab, "easy", "other", **SITE))
    await dialled(one, other, direct=True)
    before = lab.stats()
    streaming = asyncio.create_task(one.ask("stream", peer=other.peer, seconds=4))
    await asyncio.sleep(2)  # of traffic
    after = lab.stats()
    used = {name: after[name]["other_bytes"] - before[name]["other_bytes"] for name in ("relay1", "relay2")}
    # A busy machine may doubt the path for a moment, and send twice meanwhile.
    assert sum(used.values()) < 200_000, f"{used}, and 1.2 MB went directly"
    await asyncio.gather(*(relay.stop(kill=True) for relay in relays))
    answer = await streaming
    assert answer["lost"] == 0, answer
    assert answer["gap_ms"] < 1000
    assert "relay" not in kinds(answer)
    await asyncio.gather(*(relay.restart() for relay in relays))
    await matrix.settled(one, timeout=30)


async def test_an_idle_direct_path_stays_open(lab: Lab, start: Start) -> None:
    """Both gateways forget a mapping after eight silent seconds."""
    homes = [lab.nat(f"{name}/gw", "easy", udp_timeout=(8, 8), delay_ms=10.0).host(name) for name in ("one", "other")]
    one, other = await start(*homes)
    await dialled(one, other, direct=True)
    await asyncio.sleep(12)  # of silence
    answer = await one.ask("stream", peer=other.peer, seconds=1)
    assert answer["lost"] == 0
    assert answer["gap_ms"] < 1000
    assert kinds(answer) == []
    assert answer["path"] != "relay"


async def test_a_peer_that_is_nowhere_is_unreachable_in_time(lab: Lab, start: Start) -> None:
    (one,) = await start(build(lab, "easy", "one", **SITE))
    with pytest.raises(AgentError, match="Unreachable"):
        await one.ask("dial", peer=peer_of("nobody"), timeout=3)
