"""Drives QUIC engines over a peer socket: finds the connection of a datagram, feeds it, transmits once. SHELL.

Knows connection IDs, batches and timers; nothing of paths, streams or authentication. The rhythm, which is most of
the speed: drain the socket (≤ 128 datagrams), let each touched connection report what it got, then transmit once
for each; work queued outside of that is flushed by one call_soon. Called by the endpoint; one loop only.

Strangers get little: a first datagram that the engine has no answer to leaves nothing behind, a source that has not
shown that its address is its own is sent at most three times what it sent, and who has not authenticated is heard for
MAX_STRANGER_DATAGRAMS. What a closed connection leaves behind, where the address was the peer's own, is its last
datagram, sent again when the peer still talks (RFC 9000, 10.2.1).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from transport.config import MIN_DATAGRAM_SIZE
from transport.identity import PeerId
from transport.path_keeper import PathKeeper
from transport.peer_socket import PeerSocket
from transport.proto.addresses import PathId
from transport.quic_engine import CID_LENGTH, EngineEvents, QuicEngine
from transport.route import Route

logger = logging.getLogger(__name__)

QUIC_VERSION_1 = b"\x00\x00\x00\x01"
MIN_INITIAL_CID, MAX_CID = 8, 20  # RFC 9000, 7.2 and 17.2
AMPLIFICATION_LIMIT = 3  # RFC 9000, 8.1
# What may come before authentication, in datagrams of the link's own size (80 KiB on the Internet). Both engines buffer
# stream data behind a hole without a word, megabytes of it. A handshake with its proof takes under ten datagrams and
# is repeated at doubling intervals, a dozen times in an hour.
MAX_STRANGER_DATAGRAMS = 64
CLOSE_REPEATS = 8  # how often the last word is said again
CLOSED_SECONDS = 5.0  # … and for how long: longer than a keep-alive interval of the peer
MAX_CLOSED = 1024


class LinkOwner(EngineEvents, Protocol):
    """The connection above a link."""

    def before_transmit(self) -> None:
        """Last call for bytes (credits, queued writes) before the datagrams are built."""

    def after_transmit(self) -> None:
        """Datagrams went out; the engine's backlog may be smaller."""

    def failed(self, error: Exception) -> None:
        """The engine or its owner raised; the link is of no use any more."""

    def flooded(self, limit: int) -> None:
        """More than `limit` bytes came before authentication; end the link."""


class Link:
    """One QUIC connection on the wire: engine, route, connection IDs, timer, counters."""

    __slots__ = (
        "authenticated",
        "bytes_in",
        "bytes_out",
        "cids",
        "datagrams_in",
        "datagrams_out",
        "deadline",
        "dirty",
        "dropped",
        "engine",
        "last_received",
        "owner",
        "route",
        "timer",
        "validated",
    )

    def __init__(self, engine: QuicEngine, route: Route, *, validated: bool) -> None:
        """`validated`: the address is known to be the peer's own, as those are that we dial."""
        self.engine = engine
        self.route = route
        self.owner: LinkOwner
        self.cids: set[bytes] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.deadline: float | None = None  # when `timer` fires; may be earlier than the engine asks
        self.dirty = False
        self.dropped = False
        self.validated = validated
        self.authenticated = False  # set by the owner once the peer has proved who it is
        self.last_received = 0.0
        self.bytes_in = self.bytes_out = self.datagrams_in = self.datagrams_out = 0


@dataclass(slots=True)
class _Closed:
    """What is left of a closed connection."""

    last_word: list[bytes]
    route: Route
    repeats: int = CLOSE_REPEATS


@dataclass(slots=True)
class DriverCounters:
    """What came and led to nothing, since the endpoint was bound."""

    unknown: int = 0  # datagrams of no connection, that open none
    unauthentic: int = 0  # batches for a connection, in which no packet was its peer's
    flooded: int = 0  # connections ended for what came before authentication
    early_excess: int = 0  # connections ended for more than a request before they were let in
    early_dropped: int = 0  # connections that were not let in, with the requests that they had sent already


class QuicDriver:
    """All links of one endpoint."""

    def __init__(self, on_initial: Callable[[bytes, PathId, PeerId | None], Link | None]) -> None:
        """`on_initial(original CID, source, sender named by a relay)` makes the link for a new incoming connection, or
        declines."""
        self._loop = asyncio.get_running_loop()
        self._on_initial = on_initial
        self.counters = DriverCounters()
        self._links: dict[bytes, Link] = {}
        self._closed: dict[bytes, _Closed] = {}
        self._dirty: list[Link] = []
        self._receiving = False
        self._flush_handle: asyncio.Handle | None = None
        self.socket: PeerSocket  # both set by the endpoint: each needs the others
        self.paths: PathKeeper

    def close(self) -> None:
        """Forget everything. Links have been dropped by their owners."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        self._closed.clear()

    def add(self, link: Link, *cids: bytes) -> None:
        """Receive datagrams for this link under these connection IDs."""
        for cid in cids:
            self.add_cid(link, cid)

    def add_cid(self, link: Link, cid: bytes) -> None:
        """Receive datagrams with this connection ID for this link."""
        if not link.dropped and self._links.setdefault(cid, link) is link:
            link.cids.add(cid)

    def remove_cid(self, link: Link, cid: bytes) -> None:
        """Stop receiving them."""
        if cid in link.cids:
            link.cids.discard(cid)
            del self._links[cid]

    def drop(self, link: Link, *, silently: bool = False) -> None:
        """The connection is over: send what the engine has left to say, and remember it for a while.

        Nothing is remembered of a link that was never validated: whoever asks again may not have been there before.
        """
        if link.dropped:
            return
        link.dropped = True
        if link.timer is not None:
            link.timer.cancel()
        try:
            last_word = [] if silently else link.engine.datagrams(self._loop.time())
        except Exception as error:  # the connection is lost either way
            logger.debug("quic.fault %r", error)
            last_word = []
        if not link.validated:
            last_word = _within_limit(link, last_word)
        if last_word:
            self.socket.send(link.route, last_word)
        cids = tuple(link.cids)
        link.cids.clear()
        for cid in cids:
            del self._links[cid]
        if last_word and link.validated and len(self._closed) < MAX_CLOSED:
            self._closed.update(dict.fromkeys(cids, _Closed(last_word[-1:], link.route)))
            self._loop.call_later(CLOSED_SECONDS, self._forget, cids)

    def _forget(self, cids: tuple[bytes, ...]) -> None:
        for cid in cids:
            self._closed.pop(cid, None)

    # -- receiving (handlers of the peer socket)

    def on_quic(self, data: bytes, segment: int, source: PathId, sender: PeerId | None) -> None:
        """One or more datagrams from one source, each `segment` bytes long but the last. `sender`: named by a relay."""
        self._receiving = True
        if segment < len(data) and not data[0] & 0x80:
            cid = data[1 : 1 + CID_LENGTH]
            link = self._links.get(cid)
            if link is not None and all(
                data[at + 1 : at + 1 + CID_LENGTH] == cid for at in range(segment, len(data), segment)
            ):
                self._feed(link, data, segment, source)
                return
        for at in range(0, len(data), segment):
            self._datagram(data[at : at + segment], source, sender)

    def _datagram(self, data: bytes, source: PathId, sender: PeerId | None) -> None:
        if data[0] & 0x80:
            length = data[5] if len(data) > 5 else 0
            cid = data[6 : 6 + length]
        else:
            cid = data[1 : 1 + CID_LENGTH]
        link = self._links.get(cid)
        if link is None:
            closed = self._closed.get(cid)
            if closed is not None:
                if closed.repeats:
                    closed.repeats -= 1
                    self.socket.send(closed.route, closed.last_word)
                return
            if not _opens_connection(data, cid):
                self.counters.unknown += 1
                return
            try:
                link = self._on_initial(cid, source, sender)
            except Exception as error:
                logger.debug("quic.fault %r", error)
                return
            if link is None:
                return
            self._feed(link, data, len(data), source)
            # An Initial that can be read is acknowledged at once; anything else must not hold a place.
            if not link.dropped and not self._transmit(link):
                self.drop(link, silently=True)
                self._fail(link, ValueError("the first datagram was no QUIC Initial"))
            return
        self._feed(link, data, len(data), source)

    def _feed(self, link: Link, data: bytes, segment: int, source: PathId) -> None:
        now = link.last_received = self._loop.time()
        link.bytes_in += len(data)
        if not link.authenticated:
            limit = MAX_STRANGER_DATAGRAMS * link.engine.datagram_size
            if link.bytes_in > limit:
                self.counters.flooded += 1
                link.owner.flooded(limit)
                return
        engine = link.engine
        opened = engine.opened
        try:
            if segment >= len(data):
                link.datagrams_in += 1
                engine.receive(data, now)
            else:
                link.datagrams_in += -(-len(data) // segment)
                engine.receive_batch(data, segment, now)
        except Exception as error:
            # Anyone can send bytes that the library chokes on; only silence may end a connection for it.
            logger.debug("quic.fault %r", error)
        if engine.opened == opened:
            self.counters.unauthentic += 1
        elif link.authenticated:
            self.paths.heard(link.route, source)
        try:
            engine.dispatch(link.owner)
        except Exception as error:  # the event that raised is gone, and its bytes with it
            self._fail(link, error)
        if not link.dirty and not link.dropped:
            link.dirty = True
            self._dirty.append(link)

    def on_drained(self) -> None:
        """The socket has no more for now: answer."""
        self._receiving = False
        self._flush()

    def on_writable(self) -> None:
        """The socket has room again."""
        self._flush()

    # -- sending

    def mark(self, link: Link) -> None:
        """This link has something to send: it goes out with the next transmit."""
        if link.dirty or link.dropped:
            return
        link.dirty = True
        self._dirty.append(link)
        if not self._receiving:
            self._schedule()

    def _schedule(self) -> None:
        if self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self._scheduled)

    def _scheduled(self) -> None:
        self._flush_handle = None
        self._flush()

    def _flush(self) -> None:
        links, self._dirty = self._dirty, []
        for at, link in enumerate(links):
            if self.socket.blocked:
                self._dirty = links[at:] + self._dirty  # on_writable comes back here
                return
            link.dirty = False
            if not link.dropped:
                self._transmit(link)
        if self._dirty:
            self._schedule()

    def _transmit(self, link: Link) -> bool:
        """Send what is due. Whether the engine had anything to send; what of it the limit let out is another matter."""
        engine = link.engine
        spoke = False
        try:
            link.owner.before_transmit()
            datagrams = engine.datagrams(self._loop.time())
            spoke = bool(datagrams)
            if not link.validated:
                datagrams = _within_limit(link, datagrams)
            if datagrams:
                link.datagrams_out += len(datagrams)
                link.bytes_out += sum(map(len, datagrams))
                self.socket.send(link.route, datagrams)
                if link.authenticated:
                    self.paths.sent(link.route, datagrams)
            if engine.more:  # the burst limit: let the loop read acknowledgements, then go on
                self.mark(link)
            link.owner.after_transmit()
            self._arm(link)
        except Exception as error:
            self._fail(link, error)
        return spoke

    def _fail(self, link: Link, error: Exception) -> None:
        logger.debug("quic.engine_failed %r", error)
        link.owner.failed(error)

    # -- timers

    def _arm(self, link: Link) -> None:
        """Have the timer fire no later than the engine asks. A timer that is early is cheaper than a new one."""
        due = link.engine.timer()
        if due is None or link.dropped:
            return
        if link.timer is not None:
            if link.deadline is not None and link.deadline <= due:
                return
            link.timer.cancel()
        link.deadline = due
        link.timer = self._loop.call_at(due, self._timer, link)

    def _timer(self, link: Link) -> None:
        fired, link.timer, link.deadline = link.deadline, None, None
        if link.dropped or fired is None:
            return
        try:
            due = link.engine.timer()
            now = max(self._loop.time(), fired)
            if due is None or due > now:
                self._arm(link)
                return
            link.engine.handle_timer(now)
            link.engine.dispatch(link.owner)
        except Exception as error:
            self._fail(link, error)
        if not link.dropped and not link.dirty:
            link.dirty = True
            self._dirty.append(link)
        self._flush()


def _within_limit(link: Link, datagrams: list[bytes]) -> list[bytes]:
    """RFC 9000, 8.1: at most three times what came, until the peer has shown that the source address is its own."""
    budget = AMPLIFICATION_LIMIT * link.bytes_in - link.bytes_out
    allowed = []
    for datagram in datagrams:
        budget -= len(datagram)
        if budget < 0:
            break
        allowed.append(datagram)
    return allowed


def _opens_connection(data: bytes, cid: bytes) -> bool:
    """Whether this looks like a client's first datagram: a QUIC version 1 Initial of full size."""
    return (
        len(data) >= MIN_DATAGRAM_SIZE
        and data[0] & 0xF0 == 0xC0
        and data[1:5] == QUIC_VERSION_1
        and MIN_INITIAL_CID <= len(cid) <= MAX_CID
        and len(cid) == data[5]
    )
