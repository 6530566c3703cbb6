"""Brings the directory's records to those who watch, a little at a time. SHELL.

Records may never be in the way of anything else: a client is given BATCH of them every TICK and only when none of
its last ones waits, all clients together at most TICK_RECORDS in a tick and `record_rate` bytes per second. What is
late is not queued but looked up when its turn comes (directory.py). The timer runs only while somebody waits.
Made by the server, which also calls `expire`; sessions hand in what clients say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Protocol

from relay.config import RelayConfig
from relay.directory import Directory, Published
from relay.limits import TokenBucket
from relay.metrics import Counts, Drop
from transport.proto.relay_frames import Publish, Watch

TICK = 0.05
BATCH = 16  # for one client and tick: 320 records/s and at most 24 KB that disco may find before it
TICK_RECORDS = 1024  # takes about 5 ms


class RecordWatcher(Hashable, Protocol):
    """A client's session."""

    def send_records(self, messages: list[bytes]) -> None:
        """Send RECORD messages."""

    def takes_records(self) -> bool:
        """Whether none that it was sent waits."""


class RecordPump:
    """The relay's directory with its timer."""

    def __init__(self, config: RelayConfig, counts: Counts, loop: asyncio.AbstractEventLoop) -> None:
        self.directory: Directory[RecordWatcher] = Directory(config.max_directory)
        self._counts, self._loop = counts, loop
        self._rate = TokenBucket(config.record_rate, config.record_rate, loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def publish(self, key: bytes, frame: Publish) -> None:
        """A client shows something, or withdraws it."""
        outcome = self.directory.publish(key, frame.topic, frame.ttl_s, frame.blob, self._loop.time())
        if outcome is Published.TAKEN:
            self._counts.records_published += 1
        else:
            drop = Drop.DIRECTORY_FULL if outcome is Published.FULL else Drop.RECORD_TOPICS
            self._counts.drops[drop] += 1
        self._start()

    def watch(self, watcher: RecordWatcher, frame: Watch) -> None:
        """A client wants to hear of a topic, or no longer."""
        if not self.directory.watch(watcher, frame.topic, frame.on):
            self._counts.drops[Drop.RECORD_TOPICS] += 1
        self._start()

    def leave(self, watcher: RecordWatcher, key: bytes) -> None:
        """A session has ended."""
        self.directory.leave(watcher, key, self._loop.time())

    def expire(self) -> None:
        """Called about once a second."""
        self.directory.expire(self._loop.time())
        self._start()

    def close(self) -> None:
        """Send no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        if self._timer is None and not self._closed and self.directory.waits:
            self._timer = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        left = TICK_RECORDS
        for watcher in self.directory.waiting():
            if left <= 0 or not self._rate.ready(now):
                break
            if not watcher.takes_records():
                continue
            messages = self.directory.take(watcher, min(BATCH, left), now)
            left -= len(messages)
            self._rate.spend(sum(map(len, messages)))
            self._counts.records_sent += len(messages)
            watcher.send_records(messages)
        self._start()
