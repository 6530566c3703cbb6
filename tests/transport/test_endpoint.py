"""Who may connect, and which connection stays: real endpoints on loopback."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise

import pytest

from tests.transport.conftest import Bind
from transport import errors
from transport.connection import Connection
from transport.connection_table import TWIN_MEMORY
from transport.dialing import Resolved
from transport.endpoint import Endpoint
from transport.identity import Identity

LOW, HIGH = sorted((Identity.generate(b"1" * 32), Identity.generate(b"2" * 32)), key=lambda one: one.peer_id)


@pytest.fixture
def dead_port() -> int:
    """A UDP port of this machine where nobody listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def connect(client: Endpoint, server: Endpoint, lane: str = "dispatch") -> tuple[Connection, Connection]:
    """A new connection seen from both ends."""
    async with asyncio.timeout(10):
        ours = await client.dial(server.peer_id, [server.address], lane=lane)
        return ours, await server.accept()


async def test_both_sides_know_each_other_and_exchange_bytes(bind: Bind, engines: tuple[str, str]) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])
    ours, theirs = await connect(client, server)
    assert (ours.peer, theirs.peer) == (server.peer_id, client.peer_id)
    assert (ours.lane, theirs.lane) == ("dispatch", "dispatch")
    assert (ours.is_client, theirs.is_client) == (True, False)
    assert ours.connection_id == theirs.connection_id
    stream = await ours.open_stream()
    await stream.write(b"question")
    incoming = await theirs.accept_stream()
    assert await incoming.readexactly(8) == b"question"
    await incoming.write(b"answer")
    await incoming.finish()
    assert await stream.readexactly(6) == b"answer"
    assert await stream.read(1) == b""
    back = await theirs.open_stream()
    await back.write(b"from the server")
    assert await (await ours.accept_stream()).readexactly(15) == b"from the server"
    stats = ours.stats()
    assert stats.path == "loopback"
    assert stats.path_address == server.address
    assert stats.rtt_s is not None
    assert min(stats.bytes_in, stats.bytes_out, stats.datagrams_in, stats.datagrams_out) > 0
    assert client.connections() == [ours]
    assert server.connections() == [theirs]


async def test_a_peer_that_is_not_admitted_gets_the_reason(bind: Bind, engines: tuple[str, str]) -> None:
    asked: list[object] = []

    def nobody(peer: object) -> bool:
        asked.append(peer)
        return False

    client, server = await bind(engines[0]), await bind(engines[1], admit=nobody)
    with pytest.raises(errors.NotAdmitted, match="not admitted"):
        await client.dial(server.peer_id, [server.address])
    assert asked == [client.peer_id]
    assert server.connections() == []


async def test_an_admit_callback_that_raises_refuses(bind: Bind) -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def broken(_: object) -> bool:
        raise RuntimeError("broken")

    client, server = await bind(), await bind(admit=broken)
    with pytest.raises(errors.NotAdmitted):
        await client.dial(server.peer_id, [server.address])
    assert "admit raised" in str(reported[0]["message"])


async def test_another_identity_at_the_address_is_named(bind: Bind, engines: tuple[str, str]) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])
    expected = Identity.generate().peer_id
    with pytest.raises(errors.WrongPeer) as caught:
        await client.dial(expected, [server.address])
    assert (caught.value.expected, caught.value.found) == (expected, server.peer_id)
    assert str(expected) in str(caught.value)
    assert str(server.peer_id) in str(caught.value)
    assert server.connections() == []


async def test_nobody_at_the_address_is_unreachable_in_time(bind: Bind, dead_port: int) -> None:
    client = await bind()
    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(errors.Unreachable, match=f"127.0.0.1:{dead_port}") as caught:
        await client.dial(LOW.peer_id, [("127.0.0.1", dead_port)], timeout=0.4)
    assert loop.time() - start < 2
    assert caught.value.addresses == (("127.0.0.1", dead_port),)
    with pytest.raises(errors.Unreachable, match="no address"):
        await client.dial(LOW.peer_id, [])
    with pytest.raises(errors.Unreachable, match="this node itself"):
        await client.dial(client.peer_id, [client.address])
    with pytest.raises(errors.ConfigError, match="lane"):
        await client.dial(LOW.peer_id, [("127.0.0.1", dead_port)], lane="x" * 40)


async def test_the_address_that_works_is_found_among_others(bind: Bind, dead_port: int) -> None:
    client, server, stranger = await bind(), await bind(), await bind()
    addresses = [("127.0.0.1", dead_port), stranger.address, ("no-such-name.invalid", 9), server.address]
    async with asyncio.timeout(10):
        connection = await client.dial(server.peer_id, addresses)
    assert connection.stats().path_address == server.address
    assert stranger.connections() == []


async def test_names_are_looked_up(bind: Bind) -> None:
    client, server = await bind(), await bind()
    connection = await client.dial(server.peer_id, [("localhost", server.address[1])])
    assert connection.peer == server.peer_id


async def test_a_live_connection_is_reused_and_a_running_dial_shared(bind: Bind) -> None:
    client, server = await bind(), await bind()
    dials = [client.dial(server.peer_id, [server.address]) for _ in range(5)]
    connections = await asyncio.gather(*dials)
    assert len(set(connections)) == 1
    assert await client.dial(server.peer_id, []) is connections[0]
    await server.accept()
    assert len(server.connections()) == 1


async def test_a_caller_that_gives_up_does_not_end_the_dial_of_others(bind: Bind) -> None:
    client, server = await bind(), await bind()
    patient = asyncio.ensure_future(client.dial(server.peer_id, [server.address]))
    hasty = asyncio.ensure_future(client.dial(server.peer_id, [server.address]))
    await asyncio.sleep(0)
    hasty.cancel()
    assert (await patient).peer == server.peer_id
    assert hasty.cancelled() or (await asyncio.gather(hasty, return_exceptions=True))


async def test_lanes_never_share_a_connection(bind: Bind) -> None:
    client, server = await bind(), await bind()
    dispatch, _ = await connect(client, server, "dispatch")
    bulk, theirs = await connect(client, server, "bulk")
    assert bulk is not dispatch
    assert theirs.lane == "bulk"
    assert bulk.link is not dispatch.link
    assert bulk.link.route is dispatch.link.route
    assert len(client.connections()) == len(server.connections()) == 2


@pytest.mark.parametrize("attempt", range(3))
async def test_dials_from_both_sides_end_as_one_connection(bind: Bind, engines: tuple[str, str], attempt: int) -> None:
    one, other = await bind(engines[0], identity=LOW), await bind(engines[1], identity=HIGH)
    if attempt == 1:  # let one be ahead by a moment
        first = asyncio.ensure_future(one.dial(other.peer_id, [other.address]))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(other.dial(one.peer_id, [one.address]))
    else:
        second = asyncio.ensure_future(other.dial(one.peer_id, [one.address]))
        first = asyncio.ensure_future(one.dial(other.peer_id, [other.address]))
    async with asyncio.timeout(10):
        ours, theirs = await asyncio.gather(first, second)
    assert ours.connection_id == theirs.connection_id
    assert ours.is_client != theirs.is_client
    stream = await ours.open_stream()
    await stream.write(b"x")
    async with asyncio.timeout(10):
        assert await (await theirs.accept_stream()).readexactly(1) == b"x"
    assert one.connections() == [ours]
    assert other.connections() == [theirs]
    assert ours.close_reason is None
    assert theirs.close_reason is None


async def test_one_way_reachability_is_enough(bind: Bind, dead_port: int) -> None:
    """The smaller side waits for its own dial; when that reaches nobody, it takes the peer's connection."""
    low, high = await bind(identity=LOW), await bind(identity=HIGH)
    blind = asyncio.ensure_future(low.dial(high.peer_id, [("127.0.0.1", dead_port)]))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        theirs = await high.dial(low.peer_id, [low.address])
        ours = await blind
    assert ours.connection_id == theirs.connection_id


async def test_a_restarted_peer_replaces_its_stale_connections_at_once(bind: Bind, engines: tuple[str, str]) -> None:
    identity = Identity.generate()
    server = await bind(engines[1])
    first = await bind(engines[0], identity=identity)
    _, stale = await connect(first, server)
    _, stale_bulk = await connect(first, server, "bulk")
    first.socket.udp.close()  # it dies without a word
    second = await bind(engines[0], identity=identity)
    _, fresh = await connect(second, server)
    assert isinstance(stale.close_reason, errors.ConnectionReplaced)
    assert isinstance(stale_bulk.close_reason, errors.ConnectionReplaced)
    assert server.connections() == [fresh]
    assert fresh.stats().path_address == second.address


async def test_a_restarted_server_is_noticed_by_the_client_that_dials_it(bind: Bind) -> None:
    identity = Identity.generate()
    client, first = await bind(), await bind(identity=identity)
    stale, _ = await connect(client, first)
    first.socket.udp.close()
    second = await bind(identity=identity)
    fresh, _ = await connect(client, second, "bulk")
    assert isinstance(stale.close_reason, errors.ConnectionReplaced)
    assert client.connections() == [fresh]


@pytest.mark.parametrize("forgetful", ["client", "server"])
async def test_a_side_that_lost_its_connection_gets_a_new_one(bind: Bind, forgetful: str) -> None:
    """Same process, but its close never arrived: the other side still believes in the old connection."""
    client, server = await bind(), await bind()
    ours, theirs = await connect(client, server)
    gone, kept = (ours, theirs) if forgetful == "client" else (theirs, ours)
    dialler, acceptor = (client, server) if forgetful == "client" else (server, client)
    gone.link.engine.datagrams = lambda now: []  # type: ignore[method-assign]
    await gone.close()
    fresh, accepted = await connect(dialler, acceptor)
    assert isinstance(kept.close_reason, errors.ConnectionReplaced)
    assert dialler.connections() == [fresh]
    assert acceptor.connections() == [accepted]


async def test_connections_beyond_the_limit_are_refused(bind: Bind) -> None:
    server = await bind(max_connections=1)
    await connect(await bind(), server)
    late = await bind()
    with pytest.raises(errors.Overloaded):
        await late.dial(server.peer_id, [server.address])


async def test_closing_an_endpoint_ends_everything(bind: Bind, dead_port: int) -> None:
    client, server = await bind(), await bind()
    ours, theirs = await connect(client, server)
    accepting = asyncio.ensure_future(client.accept())
    dialling = asyncio.ensure_future(client.dial(LOW.peer_id, [("127.0.0.1", dead_port)]))
    await asyncio.sleep(0)
    await client.close()
    for task in (accepting, dialling):
        with pytest.raises(errors.EndpointClosed):
            await task
    async with asyncio.timeout(5):
        reason = await theirs.wait_closed()
    assert isinstance(reason, errors.ConnectionClosed)
    assert (reason.reason, reason.by) == ("endpoint closed", "peer")
    assert ours.close_reason is not None
    with pytest.raises(errors.EndpointClosed):
        await client.dial(server.peer_id, [server.address])
    with pytest.raises(errors.EndpointClosed):
        await client.accept()
    await client.close()


async def test_a_port_that_is_taken_is_a_typed_error(bind: Bind) -> None:
    first = await bind()
    with pytest.raises(errors.BindFailed):
        await bind(port=first.address[1])


async def test_one_socket_serves_both_roles_and_many_peers(bind: Bind) -> None:
    nodes = [await bind() for _ in range(4)]
    for one, other in [*pairwise(nodes), (nodes[3], nodes[0])]:
        await connect(one, other)
    assert [len(node.connections()) for node in nodes] == [2, 2, 2, 2]
    roles = {connection.is_client for connection in nodes[1].connections()}
    assert roles == {True, False}


async def test_ipv6_works_where_the_system_has_it(bind: Bind) -> None:
    try:
        server, client = await bind(host="::1"), await bind(host="::1")
    except errors.BindFailed:
        pytest.skip("no IPv6 here")
    ours, _ = await connect(client, server)
    assert ours.stats().path_address[0] == "::1"


async def test_a_dial_to_nothing_that_can_be_tried_says_why_at_once(bind: Bind) -> None:
    client = await bind()
    for address, words in (
        (("no-such-name.invalid", 9), "no-such-name.invalid:9 (the name was not found"),
        (("::1", 9), "[::1]:9 (this node listens on 127.0.0.1 and has no IPv6"),
        (("198.51.100.1", 9), "198.51.100.1:9 (this node listens on 127.0.0.1 only and cannot reach other machines"),
    ):
        with pytest.raises(errors.Unreachable) as caught:
            await client.dial(LOW.peer_id, [address])
        assert words in str(caught.value)
        assert list(caught.value.skipped) == [address]


async def test_addresses_that_were_skipped_are_named_beside_the_silent_ones(bind: Bind, dead_port: int) -> None:
    client = await bind()
    with pytest.raises(errors.Unreachable) as caught:
        await client.dial(LOW.peer_id, [("127.0.0.1", dead_port), ("::1", 9)], timeout=0.05)
    assert f"did not answer at 127.0.0.1:{dead_port}" in str(caught.value)
    assert "not tried: [::1]:9" in str(caught.value)


async def test_closing_while_names_are_looked_up_ends_the_dial(bind: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(*_: object) -> Resolved:
        asked.set()
        await answer.wait()
        return Resolved([("127.0.0.1", 9)], {})

    monkeypatch.setattr("transport.dialer.resolve", slow)
    client = await bind()
    dialling = asyncio.ensure_future(client.dial(LOW.peer_id, [("somewhere", 9)]))
    await asked.wait()
    await client.close()
    answer.set()
    with pytest.raises(errors.EndpointClosed):
        await dialling
    assert not client._dialer.dials
    assert not client._table.all


async def test_a_connection_that_ended_in_the_queue_is_not_handed_out(bind: Bind) -> None:
    server = await bind()
    first, second = await bind(), await bind()
    gone = await first.dial(server.peer_id, [server.address])
    theirs = server.connections()[0]
    await gone.close()
    async with asyncio.timeout(5):
        await theirs.wait_closed()
    _, accepted = await connect(second, server)
    assert accepted.peer == second.peer_id
    assert accepted.close_reason is None


async def test_a_close_that_is_cancelled_still_frees_the_port(bind: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = await bind()
    draining = asyncio.Event()

    async def endless() -> None:
        draining.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(endpoint.socket, "drain", endless)
    closing = asyncio.ensure_future(endpoint.close())
    await draining.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await bind(port=endpoint.address[1])


async def test_a_connection_that_cannot_be_pinged_costs_no_other_its_keep_alive(bind: Bind) -> None:
    client, server = await bind(), await bind()
    connections = [(await connect(client, server, lane))[0] for lane in ("a", "b", "c")]
    pinged: list[Connection] = []

    def broken() -> None:
        raise RuntimeError("a bug")

    for connection in connections:
        connection.link.last_received = float("-inf")  # silent for long
        connection.link.engine.ping = lambda one=connection: pinged.append(one)  # type: ignore[method-assign,misc]
    connections[1].link.engine.ping = broken  # type: ignore[method-assign]
    client._ticker.cancel()
    client._tick()
    assert isinstance(connections[1].close_reason, errors.EngineFault)
    assert set(pinged) == {connections[0], connections[2]}
    assert set(client.connections()) == set(pinged)
    assert not client._ticker.cancelled()


async def test_two_nodes_with_one_key_do_not_replace_each_other_for_ever(bind: Bind) -> None:
    """The later one stays; the earlier one is told why, and is let in again when it alone is left."""
    server, twin = await bind(), Identity.generate()
    first, second = await bind(identity=twin), await bind(identity=twin)
    earlier = await first.dial(server.peer_id, [server.address])
    later = await second.dial(server.peer_id, [server.address])
    async with asyncio.timeout(5):
        await earlier.wait_closed()
    for _ in range(3):
        with pytest.raises(errors.NotAdmitted, match="another node uses this node's key"):
            await first.dial(server.peer_id, [server.address])
    assert later.close_reason is None
    assert [one.boot_id for one in server.connections()] == [second._boot_id]
    (at_server,) = server.connections()
    await later.close()
    await at_server.wait_closed()
    for key in server._table.left:  # as after a while
        server._table.left[key] -= TWIN_MEMORY
    assert (await first.dial(server.peer_id, [server.address])).close_reason is None


async def test_a_peer_that_restarts_after_a_clean_end_is_answered_where_it_is_now(bind: Bind) -> None:
    server, identity = await bind(), Identity.generate()
    before = await bind(identity=identity)
    await before.dial(server.peer_id, [server.address])
    (at_server,) = server.connections()
    await before.close()
    await at_server.wait_closed()
    after = await bind(identity=identity)
    connection = await after.dial(server.peer_id, [server.address], timeout=0.7)
    (at_server,) = server.connections()
    assert at_server.stats().path_address == after.address
    assert connection.close_reason is None
