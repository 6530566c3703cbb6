"""This node's side of its relays' directories: publishes records under topics, and hears of others'. SHELL.

A directory is a meeting place: who knows a 32-byte topic shows there a blob of at most 1,400 bytes for some seconds, in
the name of its key, which the relay has proved; whoever watches the topic is told. Relays store nothing and may
withhold, and they can show old blobs, or invent keys' blobs: what is in a blob must be signed. Owned by relay_pool,
which tells of its own relays' links; a stranger's relay is never asked. Offered to the application as
`Reach.directory`. One loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import ceil
from typing import TypeAlias

from transport.identity import PeerId
from transport.proto.relay_frames import MAX_TOPICS, Publish, Record, RelayFrameError, Watch
from transport.proto.relay_records import Change, PublishPace, RecordBook

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # how late the end of a record may be noticed
RETRY_SECONDS = 0.25  # for a socket that is full

OnRecord: TypeAlias = Callable[[PeerId, bytes | None], None]


class NoDirectory:
    """Where no relay is configured: nobody is told, and nobody is heard of."""

    def publish(self, topic: bytes, ttl_s: int, blob: bytes) -> None:
        """Nothing."""

    def withdraw(self, topic: bytes) -> None:
        """Nothing."""

    def watch(self, topic: bytes, on_record: OnRecord) -> None:
        """Nothing."""

    def unwatch(self, topic: bytes) -> None:
        """Nothing."""


class _Link:
    """What one session of one relay has still to be told."""

    def __init__(self, now: float) -> None:
        self.pace = PublishPace(now)
        self.publish: dict[bytes, None] = {}
        self.watch: dict[bytes, None] = {}


class RelayDirectory(NoDirectory):
    """See the module. `send(url, message)` gives a message to the session of a relay now, or returns False."""

    def __init__(self, send: Callable[[str, bytes], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._published: dict[bytes, tuple[float, bytes]] = {}  # until, blob
        self._watched: dict[bytes, OnRecord] = {}
        self._book = RecordBook()
        self._links: dict[str, _Link] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closed = False

    # -- for the application

    @property
    def in_use(self) -> bool:
        """Whether anything is published or watched."""
        return bool(self._published or self._watched)

    def publish(self, topic: bytes, ttl_s: int, blob: bytes) -> None:
        """Show `blob` (at most 1,400 bytes) under `topic` (32 bytes) on all our relays for ttl_s seconds (1 to 65,535).

        Again, to refresh or replace it: more than about one a second are not sent, but the newest always is. A relay
        that comes back is sent it anew. Raises RelayFrameError on a wrong size, or beyond MAX_TOPICS.
        """
        if ttl_s < 1:
            raise RelayFrameError(f"a record for {ttl_s} s; the shortest time to live is 1 s")
        Publish(topic, ttl_s, blob).encode()
        self._forget_expired()
        if topic not in self._published and len(self._published) >= MAX_TOPICS:
            raise RelayFrameError(f"records under more than {MAX_TOPICS} topics; withdraw one")
        self._published[topic] = (self._loop.time() + ttl_s, blob)
        self._tell_all(lambda link: link.publish.setdefault(topic))

    def withdraw(self, topic: bytes) -> None:
        """Show it no longer."""
        if self._published.pop(topic, None) is not None:
            self._tell_all(lambda link: link.publish.setdefault(topic))

    def watch(self, topic: bytes, on_record: OnRecord) -> None:
        """Call `on_record(publisher, blob)` for each record of `topic` that is new or has changed, and with None when
        no relay has it any more; never from within this call. Our own records are among them. A second watch of a topic
        replaces the first and begins anew. Raises RelayFrameError on a wrong size, or beyond MAX_TOPICS.
        """
        Watch(topic, True).encode()
        if topic not in self._watched and len(self._watched) >= MAX_TOPICS:
            raise RelayFrameError(f"more than {MAX_TOPICS} topics are watched; unwatch one")
        self._watched[topic] = on_record
        self._book.unwatch(topic)
        self._book.watch(topic)
        self._tell_all(lambda link: link.watch.setdefault(topic))

    def unwatch(self, topic: bytes) -> None:
        """Hear no more of the topic."""
        if self._watched.pop(topic, None) is not None:
            self._book.unwatch(topic)
            self._tell_all(lambda link: link.watch.setdefault(topic))

    # -- for the pool

    def relay_up(self, url: str) -> None:
        """A session with one of our own relays, which has a directory, stands."""
        now = self._loop.time()
        link = self._links[url] = _Link(now)
        self._forget_expired()
        link.publish = dict.fromkeys(self._published)
        link.watch = dict.fromkeys(self._watched)
        self._book.relay_up(url, now)
        self._flush(url, link)

    def relay_down(self, url: str, left: bool) -> None:
        """It ended. left: because nobody needs that relay."""
        self._links.pop(url, None)
        if left:
            self._book.relay_left(url, self._loop.time())

    def heard(self, url: str, record: Record) -> None:
        """A relay says something of a record; one that is none of our own is not listened to."""
        if url in self._links and not self._closed:
            change = self._book.heard(url, record, self._loop.time())
            if change is not None:
                self._report(change)
            self._look_in(LOOK_SECONDS)

    def close(self) -> None:
        """Tell nobody anything any more; the relays notice by the end of the sessions."""
        self._closed = True
        self._links.clear()
        if self._timer is not None:
            self._timer.cancel()

    # -- inside

    def _tell_all(self, note: Callable[[_Link], None]) -> None:
        for url, link in list(self._links.items()):
            note(link)
            self._flush(url, link)

    def _flush(self, url: str, link: _Link) -> None:
        """Send what may be sent now, look again for the rest."""
        now = self._loop.time()
        while link.watch:
            topic = next(iter(link.watch))
            if not self._send(url, Watch(topic, topic in self._watched).encode()):
                self._look_in(RETRY_SECONDS)
                return
            link.watch.pop(topic, None)
        while link.publish:
            if wait := link.pace.wait(now):
                self._look_in(wait)
                return
            topic = next(iter(link.publish))
            until, blob = self._published.get(topic, (now, b""))
            left = max(0, min(ceil(until - now), 0xFFFF))
            if not self._send(url, Publish(topic, left, blob if left else b"").encode()):
                self._look_in(RETRY_SECONDS)
                return
            link.pace.take(now)
            link.publish.pop(topic, None)

    def _forget_expired(self) -> None:
        now = self._loop.time()
        self._published = {topic: kept for topic, kept in self._published.items() if kept[0] > now}

    def _look_in(self, seconds: float) -> None:
        at = self._loop.time() + seconds
        if self._closed or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        for change in self._book.expire(self._loop.time()):
            self._report(change)
        for url, link in list(self._links.items()):
            self._flush(url, link)
        if not self._book.empty:
            self._look_in(LOOK_SECONDS)

    def _report(self, change: Change) -> None:
        on_record = self._watched.get(change.topic)
        if on_record is None:
            return
        try:
            on_record(PeerId(change.key), change.blob)
        except Exception:  # the application's fault must not cost the session
            logger.exception("relay.callback_failed")
