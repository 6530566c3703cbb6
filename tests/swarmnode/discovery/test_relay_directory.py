from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarmnode.discovery.record import swarm_topic
from swarmnode.discovery.relay_directory import RelayDirectory
from tests.swarmnode.discovery.samples import SWARM, blob, identity
from transport.identity import PeerId


class Calls:
    """A directory that notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []  # Any: whatever the call had
        self.on_record: Callable[[PeerId, bytes | None], None] = lambda key, blob: None

    def publish(self, topic: bytes, ttl_s: int, blob: bytes) -> None:
        self.calls.append(("publish", topic, ttl_s, blob))

    def withdraw(self, topic: bytes) -> None:
        self.calls.append(("withdraw", topic))

    def watch(self, topic: bytes, on_record: Callable[[PeerId, bytes | None], None]) -> None:
        self.calls.append(("watch", topic))
        self.on_record = on_record

    def unwatch(self, topic: bytes) -> None:
        self.calls.append(("unwatch", topic))


class Heard:
    def __init__(self) -> None:
        self.heard_blobs: list[tuple[bytes, str, bool, PeerId | None]] = []
        self.lost_peers: list[tuple[PeerId, str]] = []

    def heard(self, blob: bytes, source: str, *, lasting: bool, publisher: PeerId | None = None) -> None:
        self.heard_blobs.append((blob, source, lasting, publisher))

    def lost(self, peer: PeerId, source: str) -> None:
        self.lost_peers.append((peer, source))


TOPIC = swarm_topic(SWARM)


async def test_it_publishes_watches_and_withdraws() -> None:
    calls, heard = Calls(), Heard()
    source = RelayDirectory(calls, SWARM)
    await source.start(heard)
    source.announce(blob(1, 0))
    source.network_changed()
    await source.close()
    await source.close()
    assert calls.calls == [
        ("watch", TOPIC),
        ("publish", TOPIC, 10, blob(1, 0)),
        ("unwatch", TOPIC),
        ("withdraw", TOPIC),
    ]


async def test_a_goodbye_is_left_for_everybody_to_read() -> None:
    calls = Calls()
    source = RelayDirectory(calls, SWARM)
    await source.start(Heard())
    source.announce(blob(1, 0))
    source.announce(blob(1, 1, ttl_s=0))
    await source.close()
    assert calls.calls[-2:] == [("publish", TOPIC, 10, blob(1, 1, ttl_s=0)), ("unwatch", TOPIC)]


async def test_only_a_peer_s_own_session_publishes_its_record() -> None:
    calls, heard = Calls(), Heard()
    source = RelayDirectory(calls, SWARM)
    await source.start(heard)
    one, two = identity(1).peer_id, identity(2).peer_id
    calls.on_record(one, blob(1, 0))
    calls.on_record(two, blob(1, 0))
    calls.on_record(two, b"nonsense")
    calls.on_record(two, b"")
    calls.on_record(one, None)
    assert heard.heard_blobs == [(blob(1, 0), "relay", False, one)]
    assert heard.lost_peers == [(one, "relay")]
    assert source.misattributed == 3
    await source.close()
    calls.on_record(one, blob(1, 5))
    assert len(heard.heard_blobs) == 1
