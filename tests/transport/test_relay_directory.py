"""Nodes that meet in the directories of real relays, each a process of its own; and hostile relays, which are fakes."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.transport.fake_relay import FakeRelay
from tests.transport.pool_node import MakeNode, StartRelay
from transport import relay_directory
from transport.config import TransportConfig
from transport.identity import Identity, PeerId
from transport.peer_socket import SocketHandlers
from transport.proto import relay_frames as frames
from transport.proto.relay_frames import MAX_BLOB, MAX_TOPICS, RelayFrameError
from transport.reach import Reach
from transport.relay_directory import NoDirectory, RelayDirectory

TOPIC = b"t" * 32


async def test_two_nodes_meet_before_and_after_their_links_are_up(start_relay: StartRelay, make_node: MakeNode) -> None:
    relay = await start_relay()
    a, b = make_node([relay.url]), make_node([relay.url])
    for node in (a, b):
        node.watch(TOPIC)
        node.directory.publish(TOPIC, 60, b"early")
    for node in (a, b):
        await node.until(lambda node=node: node.there == {a.peer: b"early", b.peer: b"early"})  # type: ignore[misc]
    a.directory.publish(TOPIC, 60, b"late")
    await b.until(lambda: b.there[a.peer] == b"late")
    a.directory.withdraw(TOPIC)
    await b.until(lambda: a.peer not in b.there)
    b.directory.unwatch(TOPIC)
    told = len(b.told)
    a.directory.publish(TOPIC, 60, b"unheard")
    await a.until(lambda: a.there.get(a.peer) == b"unheard")
    assert len(b.told) == told


async def test_a_relay_that_restarts_is_told_again_and_nobody_flaps(
    start_relay: StartRelay, make_node: MakeNode
) -> None:
    relay = await start_relay()
    a, b = make_node([relay.url]), make_node([relay.url])
    a.directory.publish(TOPIC, 600, b"x")
    b.watch(TOPIC)
    await b.until(lambda: a.peer in b.there)
    for how in (signal.SIGKILL, signal.SIGTERM):
        await relay.end(how)
        await b.is_up(0)
        await relay.start()
        late = make_node([relay.url])  # whoever comes now finds it only because it was told again
        late.watch(TOPIC)
        await late.until(lambda late=late: late.there == {a.peer: b"x"})  # type: ignore[misc]
    assert b.told == [(a.peer, b"x")]


async def test_with_two_relays_gone_on_one_is_not_gone(start_relay: StartRelay, make_node: MakeNode) -> None:
    first, second = await start_relay(), await start_relay()
    a, b = make_node([first.url, second.url]), make_node([first.url, second.url])
    await a.is_up(2)
    await b.is_up(2)
    a.directory.publish(TOPIC, 3, b"x")
    b.watch(TOPIC)
    await b.until(lambda: a.peer in b.there)
    await first.end()
    await b.is_up(1)
    a.directory.publish(TOPIC, 600, b"y")
    await b.until(lambda: b.there[a.peer] == b"y")
    one_more = make_node([second.url])
    one_more.directory.publish(TOPIC, 1, b"short")
    await b.until(lambda: one_more.peer in b.there)
    await b.until(lambda: one_more.peer not in b.there)  # by now what the first relay had is over, too
    assert [blob for peer, blob in b.told if peer == a.peer] == [b"x", b"y"]
    a.directory.withdraw(TOPIC)
    await b.until(lambda: a.peer not in b.there)


async def test_two_hundred_members_are_found(start_relay: StartRelay, make_node: MakeNode) -> None:
    relay = await start_relay()
    watcher = make_node([relay.url])
    watcher.watch(TOPIC)
    members = [make_node([relay.url]) for _ in range(200)]
    for number, member in enumerate(members):
        member.directory.publish(TOPIC, 600, number.to_bytes(2, "big") * 350)
    await watcher.until(lambda: len(watcher.there) == 200, 60)
    late = make_node([relay.url])
    late.watch(TOPIC)
    await late.until(lambda: late.there == watcher.there)
    assert len(watcher.told) == len(late.told) == 200


async def test_publishing_often_sends_the_newest_and_is_never_dropped(
    start_relay: StartRelay, make_node: MakeNode
) -> None:
    relay = await start_relay()
    a, b = make_node([relay.url]), make_node([relay.url])
    await a.is_up()
    b.watch(TOPIC)
    topics = [bytes((number,)) * 32 for number in range(MAX_TOPICS - 1)]
    for number in range(100):
        for topic in topics:
            a.directory.publish(topic, 60, b"busy")
        a.directory.publish(TOPIC, 60, number.to_bytes(2, "big"))
    await b.until(lambda: b.there.get(a.peer) == (99).to_bytes(2, "big"))
    assert len(b.told) < 20


async def test_bounds_of_what_the_application_may_ask_for(start_relay: StartRelay, make_node: MakeNode) -> None:
    node = make_node(["http://127.0.0.1:9"])
    for topic, ttl, blob in ((TOPIC[1:], 10, b""), (TOPIC, 0, b""), (TOPIC, 1 << 16, b""), (TOPIC, 9, bytes(1401))):
        with pytest.raises(RelayFrameError):
            node.directory.publish(topic, ttl, blob)
    for number in range(MAX_TOPICS):
        node.directory.publish(bytes((number,)) * 32, 10, bytes(MAX_BLOB))
        node.directory.watch(bytes((number,)) * 32, node.on_record)
    with pytest.raises(RelayFrameError, match="withdraw one"):
        node.directory.publish(TOPIC, 10, b"")
    with pytest.raises(RelayFrameError, match="unwatch one"):
        node.directory.watch(TOPIC, node.on_record)


async def test_a_relay_without_a_directory_is_not_asked_and_a_rude_one_not_believed(make_node: MakeNode) -> None:
    async with FakeRelay() as relay:
        node = make_node([relay.url])
        node.watch(TOPIC)
        node.directory.publish(TOPIC, 600, b"x")
        await node.is_up()
        await relay.tell(frames.Record(TOPIC, bytes(32), 10, b"unasked").encode())
        await relay.tell(b"\x42" + TOPIC + bytes(32) + b"\0\1\xff\xff")  # breaks the protocol
        await node.is_up(0)
        assert node.told == []
        assert relay.records == []
        relay.features = 0xFF
        await node.is_up(1)
        await relay.until(lambda: len(relay.records) == 2)
        watch, publish = relay.records
        assert watch == frames.Watch(TOPIC, True)
        assert isinstance(publish, frames.Publish)
        assert (publish.topic, publish.blob) == (TOPIC, b"x")
        assert 0 < publish.ttl_s <= 600
        await relay.tell(frames.Record(b"u" * 32, bytes(32), 10, b"unasked").encode())
        await relay.tell(frames.Record(TOPIC, node.peer.raw, 10, b"asked").encode())
        await node.until(lambda: bool(node.told))
        assert node.told == [(node.peer, b"asked")]


async def test_what_a_callback_raises_does_no_harm() -> None:
    sent: list[bytes] = []

    def send(_url: str, message: bytes) -> bool:
        sent.append(message)
        return True

    directory = RelayDirectory(send)

    def bad(_peer: PeerId, _blob: bytes | None) -> None:
        raise RuntimeError

    directory.watch(TOPIC, bad)
    directory.relay_up("http://a")
    assert [frames.decode_client(message) for message in sent] == [frames.Watch(TOPIC, True)]
    directory.heard("http://a", frames.Record(TOPIC, bytes(32), 10, b"x"))
    directory.heard("http://stranger", frames.Record(TOPIC, bytes(32), 10, b"y"))
    directory.close()


async def test_a_full_socket_is_tried_again_and_says_only_what_is_true_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_directory, "RETRY_SECONDS", 0.01)
    sent: list[frames.ClientFrame] = []
    full, told = True, asyncio.Event()

    def send(_url: str, message: bytes) -> bool:
        if full:
            return False
        sent.append(frames.decode_client(message))
        told.set()
        return True

    directory = RelayDirectory(send)
    directory.relay_up("http://a")
    directory.publish(TOPIC, 10, b"old")
    directory.publish(TOPIC, 10, b"new")
    directory.watch(TOPIC, lambda *_: None)
    directory.unwatch(TOPIC)
    full = False
    await asyncio.wait_for(told.wait(), 10)
    assert sent == [frames.Watch(TOPIC, False), frames.Publish(TOPIC, 10, b"new")]
    directory.close()


async def test_without_relays_there_is_a_directory_that_does_nothing() -> None:
    reach = Reach(
        Identity.generate(),
        ("127.0.0.1", 0),
        TransportConfig(),
        SocketHandlers(*[lambda *_: None] * 3),
        admits=lambda _: True,
        on_switch=lambda *_: None,
        on_path=lambda _: None,
        on_news=lambda _: None,
    )
    try:
        assert type(reach.directory) is NoDirectory
        reach.directory.publish(TOPIC, 10, b"x")
        reach.directory.watch(TOPIC, lambda *_: None)
        reach.directory.unwatch(TOPIC)
        reach.directory.withdraw(TOPIC)
    finally:
        await reach.close()
