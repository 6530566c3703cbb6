"""What clients publish under a topic, for a while, and who watches it. PURE.

A record is an opaque blob of at most 1,400 bytes, kept in memory under (topic, key): the key is the publisher's proven
one, the topic 32 bytes that only say who belongs together. Nothing is parsed and nothing outlives the process. `now` is
monotonic, in seconds. The session's frames come in by record_pump, which also sends what `take` gives.

    a record ends      at its ttl; when it is withdrawn; GRACE after its publisher's session, unless a new one publishes
                       it again: a node that reconnects does not flap
    a watcher gets     everything under the topic, then what changes. What it has not taken yet is a set of keys and not
                       a queue of messages: whoever is slow misses versions in between, never the last one
    bounds             MAX_TOPICS published and watched by each client; `limit` bytes in all, of which only a client's
                       first topic may use the second half; MAX_BEHIND keys remembered per watcher, and where there are
                       more the topic is gone through again when those are taken

An end that a watcher missed because it was too far behind is not told: its ttl, which every record carries, ends it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from math import ceil
from typing import Generic, TypeAlias, TypeVar

from transport.proto.relay_frames import MAX_TOPICS, Record

GRACE = 5.0
MAX_BEHIND = 1024
OVERHEAD = 400  # bytes that a record takes beside its blob

Watcher = TypeVar("Watcher", bound=Hashable)
_Where: TypeAlias = tuple[bytes, bytes]  # topic, key


class Published(Enum):
    """What became of a PUBLISH."""

    TAKEN = 1
    TOO_MANY_TOPICS = 2
    FULL = 3


@dataclass(slots=True)
class _Entry:
    blob: bytes
    expires: float


class _Watching:
    """One watcher: its topics, what it has still to get, and from which record on a topic is gone through."""

    __slots__ = ("again", "behind", "topics")

    def __init__(self) -> None:
        self.topics: set[bytes] = set()
        self.behind: dict[_Where, None] = {}
        self.again: dict[bytes, int] = {}

    @property
    def waits(self) -> bool:
        return bool(self.behind or self.again)


class Directory(Generic[Watcher]):
    """All records of one relay. `limit`: bytes, OVERHEAD included."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: dict[bytes, dict[bytes, _Entry]] = {}
        self._topics_of: dict[bytes, set[bytes]] = {}  # by publisher's key
        self._watching: dict[Watcher, _Watching] = {}
        self._watchers: dict[bytes, dict[Watcher, None]] = {}  # by topic
        self._waiting: dict[Watcher, None] = {}  # first come, first served
        self.size = 0  # bytes
        self.count = 0  # records

    # -- publishers

    def publish(self, key: bytes, topic: bytes, ttl: int, blob: bytes, now: float) -> Published:
        """Show `blob` for `ttl` seconds in the name of `key`; ttl 0 withdraws."""
        if not ttl:
            if topic in self._topics_of.get(key, ()):
                self._remove(topic, key)
            return Published.TAKEN
        mine = self._topics_of.get(key)
        entry = self._records[topic][key] if mine is not None and topic in mine else None
        if entry is None and mine is not None and len(mine) >= MAX_TOPICS:
            return Published.TOO_MANY_TOPICS
        grows = len(blob) - len(entry.blob) if entry is not None else len(blob) + OVERHEAD
        limit = self._limit if len(mine or ()) - (entry is not None) == 0 else self._limit // 2
        if grows > 0 and self.size + grows > limit:
            return Published.FULL
        self.size += grows
        if entry is not None:
            entry.blob, entry.expires = blob, now + ttl
        else:
            self.count += 1
            self._topics_of.setdefault(key, set()).add(topic)
            self._records.setdefault(topic, {})[key] = _Entry(blob, now + ttl)
        self._changed(topic, key)
        return Published.TAKEN

    def expire(self, now: float) -> None:
        """Drop what has had its time. Goes through everything: call it about once a second."""
        over = [
            (topic, key)
            for topic, records in self._records.items()
            for key, entry in records.items()
            if entry.expires <= now
        ]
        for topic, key in over:
            self._remove(topic, key)

    def _remove(self, topic: bytes, key: bytes) -> None:
        records, mine = self._records[topic], self._topics_of[key]
        self.size -= len(records.pop(key).blob) + OVERHEAD
        self.count -= 1
        mine.discard(topic)
        if not records:
            del self._records[topic]
        if not mine:
            del self._topics_of[key]
        self._changed(topic, key)

    # -- watchers

    def watch(self, watcher: Watcher, topic: bytes, on: bool) -> bool:
        """Begin to watch, or go through the topic again; or stop. False when it watches too many already."""
        watching = self._watching.get(watcher)
        if not on:
            if watching is not None and topic in watching.topics:
                self._unwatch(watcher, watching, topic)
            return True
        if watching is None:
            watching = self._watching[watcher] = _Watching()
        if topic not in watching.topics:
            if len(watching.topics) >= MAX_TOPICS:
                return False
            watching.topics.add(topic)
            self._watchers.setdefault(topic, {})[watcher] = None
        if topic in self._records:
            watching.again[topic] = 0
            self._waiting[watcher] = None
        return True

    def leave(self, watcher: Watcher, key: bytes, now: float) -> None:
        """The session `watcher` of `key` has ended. Before any newer session of the key publishes."""
        for topic in self._topics_of.get(key, ()):
            entry = self._records[topic][key]
            entry.expires = min(entry.expires, now + GRACE)
        watching = self._watching.get(watcher)
        if watching is not None:
            for topic in list(watching.topics):
                self._unwatch(watcher, watching, topic)

    @property
    def waits(self) -> bool:
        """Whether anybody has something to get."""
        return bool(self._waiting)

    def waiting(self) -> list[Watcher]:
        """Who has something to get, longest waiting first."""
        return list(self._waiting)

    def take(self, watcher: Watcher, most: int, now: float) -> list[bytes]:
        """At most `most` RECORD messages for `watcher`, as things are now; it goes to the end of those that wait."""
        watching = self._watching.get(watcher)
        messages: list[bytes] = []
        if watching is None:
            return messages
        while len(messages) < most and watching.waits:
            if not watching.behind:
                self._go_on(watching)
                continue
            topic, key = where = next(iter(watching.behind))
            del watching.behind[where]
            entry = self._records.get(topic, {}).get(key)
            if entry is None:
                messages.append(Record(topic, key, 0).encode())
            else:
                messages.append(Record(topic, key, max(1, ceil(entry.expires - now)), entry.blob).encode())
        self._waiting.pop(watcher, None)
        if watching.waits:
            self._waiting[watcher] = None
        return messages

    @property
    def watches(self) -> int:
        """How many pairs of watcher and topic there are."""
        return sum(map(len, self._watchers.values()))

    def _go_on(self, watching: _Watching) -> None:
        """Take the next records of a topic that has to be gone through."""
        topic, at = next(iter(watching.again.items()))
        records = self._records.get(topic, {})
        for key in islice(records, at, at + MAX_BEHIND):
            watching.behind[topic, key] = None
        if at + MAX_BEHIND < len(records):
            watching.again[topic] = at + MAX_BEHIND
        else:
            del watching.again[topic]

    def _changed(self, topic: bytes, key: bytes) -> None:
        for watcher in self._watchers.get(topic, ()):
            watching = self._watching[watcher]
            if (topic, key) in watching.behind:
                continue
            if len(watching.behind) < MAX_BEHIND:
                watching.behind[topic, key] = None
            else:
                watching.again.setdefault(topic, 0)
            self._waiting.setdefault(watcher)

    def _unwatch(self, watcher: Watcher, watching: _Watching, topic: bytes) -> None:
        watching.topics.discard(topic)
        watching.again.pop(topic, None)
        watching.behind = {where: None for where in watching.behind if where[0] != topic}
        watchers = self._watchers[topic]
        del watchers[watcher]
        if not watchers:
            del self._watchers[topic]
        if not watching.topics:
            del self._watching[watcher]
        if not watching.waits:
            self._waiting.pop(watcher, None)
