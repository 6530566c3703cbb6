"""Peers by the relays' directories: every member publishes its record under the swarm's topic and watches it.

Not the directory itself (transport's Reach.directory has it): this gives records to it and takes them from it. A relay
names the key whose session published a record; what claims to be somebody else's is dropped here. Made by the node,
owned by discovery.Discovery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swarmnode.discovery.record import RECORD_TTL_S, peek, swarm_topic
from swarmnode.discovery.source import Sink
from swarmnode.errors import BadRecord
from transport.identity import PeerId

GOODBYE_S = RECORD_TTL_S  # how long a relay shows our goodbye, if our session lasts so long


class Directory(Protocol):
    """What is used of Reach.directory. Called, and calls back, on the loop."""

    def publish(self, topic: bytes, ttl_s: int, blob: bytes) -> None:
        """Show `blob` under a 32-byte topic for ttl_s seconds; again to refresh or replace it."""

    def withdraw(self, topic: bytes) -> None:
        """Show it no longer."""

    def watch(self, topic: bytes, on_record: Callable[[PeerId, bytes | None], None]) -> None:
        """Hear of every record of the topic, and of its end (None)."""

    def unwatch(self, topic: bytes) -> None:
        """Hear no more."""


class RelayDirectory:
    """A Source. See the module."""

    name = "relay"

    def __init__(self, directory: Directory, swarm: PeerId) -> None:
        self._directory, self._topic = directory, swarm_topic(swarm)
        self._sink: Sink | None = None
        self._published = False
        self.misattributed = 0  # records that claimed to be another peer's

    async def start(self, sink: Sink) -> None:
        self._sink = sink
        self._directory.watch(self._topic, self._on_record)

    def announce(self, blob: bytes) -> None:
        leaves = peek(blob).ttl_s == 0
        self._directory.publish(self._topic, GOODBYE_S if leaves else peek(blob).ttl_s, blob)
        self._published = not leaves  # a goodbye stays until the session ends, so that everybody reads it

    def network_changed(self) -> None:
        """Relays find that out themselves."""

    async def close(self) -> None:
        if self._sink is None:
            return
        self._sink = None
        self._directory.unwatch(self._topic)
        if self._published:
            self._directory.withdraw(self._topic)

    def _on_record(self, key: PeerId, blob: bytes | None) -> None:
        if self._sink is None:
            return
        if blob is None:
            self._sink.lost(key, self.name)
            return
        try:
            head = peek(blob)
        except BadRecord:
            self.misattributed += 1
            return
        if head.peer != key.raw:
            self.misattributed += 1
            return
        self._sink.heard(blob, self.name, lasting=False, publisher=key)
