"""Links and pools against the real relay, as a process of its own."""

from __future__ import annotations

import asyncio
import signal

from tests.transport.pool_node import MakeNode, StartRelay
from transport.identity import Identity
from transport.proto.relay_frames import GoneReason


async def test_datagrams_of_every_size_arrive_from_who_sent_them(start_relay: StartRelay, make_node: MakeNode) -> None:
    relay = await start_relay()
    a, b = make_node([relay.url]), make_node([relay.url])
    await a.is_up()
    await b.is_up()
    sizes = [1, 1200, 1452, 8900, 65_535]
    a.pool.send(relay.url, b.peer, [bytes([7]) * size for size in sizes])
    a.pool.send(relay.url, b.peer, [b"call"], disco=True)
    await b.until(lambda: sum(len(datagrams) for _, datagrams, _ in b.received) == len(sizes) + 1)
    bulk = [datagram for _, datagrams, disco in b.received if not disco for datagram in datagrams]
    assert [len(datagram) for datagram in bulk] == sizes
    assert {peer for peer, _, _ in b.received} == {a.peer}
    assert [datagrams for _, datagrams, disco in b.received if disco] == [[b"call"]]


async def test_the_relay_says_who_is_not_there(start_relay: StartRelay, make_node: MakeNode) -> None:
    relay = await start_relay()
    node, nobody = make_node([relay.url]), Identity.generate().peer_id
    await node.is_up()
    node.pool.send(relay.url, nobody, [b"x"])
    await node.until(lambda: bool(node.gone))
    assert node.gone == [(nobody, GoneReason.NOT_CONNECTED)]
    link = node.pool.link(relay.url)
    assert link is not None
    assert link.observed.startswith("127.0.0.1:")
    assert link.reflectors == []


async def test_a_relay_that_crashed_is_come_back_to(start_relay: StartRelay, make_node: MakeNode) -> None:
    relay = await start_relay()
    node = make_node([relay.url])
    await node.is_up()
    await relay.end()
    await node.is_up(0)
    await relay.start()
    await node.is_up()


async def test_a_relay_that_was_told_to_end_sends_its_clients_to_their_second_at_once(
    start_relay: StartRelay, make_node: MakeNode
) -> None:
    first, second = await start_relay(), await start_relay()
    node = make_node([first.url, second.url])
    await node.is_up(2)
    home, other = (first, second) if node.pool.home == first.url else (second, first)
    ending = asyncio.create_task(home.end(signal.SIGTERM))
    await node.until(lambda: node.pool.up() == (other.url,))
    assert node.pool.home == other.url
    assert "restarts" in next(reason for _, up, reason in node.states if not up)
    await ending


async def test_a_relay_that_hangs_is_left_within_three_seconds_of_traffic(
    start_relay: StartRelay, make_node: MakeNode
) -> None:
    first, second = await start_relay(), await start_relay()
    node, peer = make_node([first.url, second.url]), make_node([first.url, second.url])
    await node.is_up(2)
    await peer.is_up(2)
    home, other = (first, second) if node.pool.home == first.url else (second, first)
    home.freeze()
    loop = asyncio.get_running_loop()
    began = loop.time()
    while node.pool.home == home.url:
        node.pool.send(home.url, peer.peer, [bytes(1200)])
        await asyncio.sleep(0.02)
        assert loop.time() - began < 15  # 2.5 s on a quiet machine
    assert node.pool.send(other.url, peer.peer, [b"by the second"])
    await peer.until(lambda: (node.peer, [b"by the second"], False) in peer.received)


async def test_a_wrong_name_is_refused_and_said(start_relay: StartRelay, make_node: MakeNode) -> None:
    relay = await start_relay("--name", "relay.example")
    node = make_node([relay.url])
    await node.until(lambda: bool(node.states))
    url, up, reason = node.states[0]
    assert (url, up) == (relay.url, False)
    assert "refused" in reason
