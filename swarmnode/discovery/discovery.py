"""Keeps a member's own record in front of the others, and theirs in one book. SHELL.

Issues the own record every REISSUE_S and at once when it changed, gives it to every source, puts what they hear into
the PeerBook and takes out whose time is over. What a connection brings comes by `told` and `sees`, and `news` and
`everything` are what to pass on there. Owns the sources it is given; owned by the node, which dials and decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from swarmnode.discovery.gossip import Gossip
from swarmnode.discovery.peer_book import Event, EventKind, PeerBook
from swarmnode.discovery.record import RECORD_TTL_S, REISSUE_S, PeerRecord, next_seq, sign
from swarmnode.discovery.source import Source
from transport.identity import Identity, PeerId

logger = logging.getLogger(__name__)


class Discovery:
    """See the module. On one loop: `start`, then `close`."""

    def __init__(
        self,
        identity: Identity,
        book: PeerBook,
        sources: Sequence[Source],
        *,
        describe: Callable[[], PeerRecord],
        on_event: Callable[[Event], None],
        on_gone: Callable[[PeerId], None],
        on_twin: Callable[[], None] = lambda: None,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """describe: what this node says of itself now; number and life are filled in here.

        on_event: everything but repetition (EventKind.SAME). on_gone: who fell silent. on_twin: another node signs
        records with this node's key. All are called on the loop.
        """
        self.book = book
        self._identity, self._sources = identity, tuple(sources)
        self._describe, self._on_event, self._on_gone, self._unix = describe, on_event, on_gone, unix
        self._on_twin = on_twin
        self._gossip = Gossip(identity.peer_id)
        self._seq = 0
        self._blob = b""
        self._reissue: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._running = False

    @property
    def own(self) -> bytes:
        """The own record as issued last; b"" before `start`."""
        return self._blob

    async def start(self) -> None:
        """Issue the first record and listen to every source."""
        self._running = True
        for source in self._sources:
            await source.start(self)
        self.refresh()

    def refresh(self) -> None:
        """Issue the own record now: something in it has changed."""
        if not self._running:
            return
        if self._reissue is not None:
            self._reissue.cancel()
        self._reissue = asyncio.get_running_loop().call_later(REISSUE_S, self.refresh)
        self._issue(RECORD_TTL_S)

    def network_changed(self) -> None:
        """This machine's addresses may have changed."""
        for source in self._sources:
            source.network_changed()
        self.refresh()

    def leave(self) -> bytes:
        """Say goodbye on every source; the last record, to be sent on every connection. Then `close`."""
        if self._running:
            self._stop()
            self._issue(0)
        return self._blob

    async def close(self) -> None:
        """End the sources. Without `leave`, others learn of it when the last record's life ends."""
        self._stop()
        await asyncio.gather(*(source.close() for source in self._sources))

    # -- what connections bring, and what they are told

    def told(self, blobs: Iterable[bytes], teller: PeerId) -> None:
        """Records that a connected peer passed on."""
        for blob in blobs:
            self._take(blob, f"peer {teller}", lasting=False, teller=teller)

    def sees(self, peer: PeerId) -> None:
        """Something arrived from this peer just now."""
        self._happened(peer, self.book.sees(peer, self._now()))

    def news(
        self, links: Sequence[PeerId], hubs: Collection[PeerId] = (), members: int = 0
    ) -> dict[PeerId, list[bytes]]:
        """What to pass on to each of these connected members; ask every second. See Gossip.share."""
        return self._gossip.share(links, hubs, members, self._now())

    def everything(self, link: PeerId) -> list[bytes]:
        """What to pass on to a member that has just connected: the whole view, and the own record first."""
        self._gossip.told_everything(link)
        return [self._blob, *self.book.all_blobs(self._now())] if self._blob else []

    # -- Sink

    def heard(self, blob: bytes, source: str, *, lasting: bool, publisher: PeerId | None = None) -> None:
        """A source has a record."""
        self._take(blob, source, lasting=lasting, publisher=publisher)

    def lost(self, peer: PeerId, source: str) -> None:
        """A source does not announce a peer any more."""
        self.book.lost(peer, source)

    # -- inside

    def _take(
        self, blob: bytes, source: str, *, lasting: bool, publisher: PeerId | None = None, teller: PeerId | None = None
    ) -> None:
        now = self._now()
        if self._blob and self.book.is_of_twin(blob, self._seq, source, now, publisher=publisher):
            self._on_twin()
            return
        refused = self.book.refused.total()
        event = self.book.offer(blob, source, now, self._unix(), lasting=lasting, publisher=publisher)
        if self.book.refused.total() > refused:
            logger.debug("discovery.refused source=%s why=%s", source, self.book.last_refusal)
        if event is None:
            return
        peer = event.record.peer
        if event.kind is EventKind.SAME:
            if teller is not None:
                self._gossip.repeated(peer, event.blob, teller)
        elif event.kind not in (EventKind.LEFT, EventKind.CANDIDATE):
            is_new = event.kind is not EventKind.REFRESHED
            self._gossip.learned(peer, event.blob, now, is_new=is_new, teller=teller)
        self._happened(peer, event)

    def _happened(self, peer: PeerId, event: Event | None) -> None:
        self._plan_expiry(self.book.until(peer))
        if event is not None and event.kind is not EventKind.SAME and self._running:
            self._on_event(event)

    def _issue(self, ttl_s: int) -> None:
        self._seq = next_seq(self._seq, self._unix())
        self._blob = sign(replace(self._describe(), seq=self._seq, ttl_s=ttl_s), self._identity.sign)
        self._gossip.issued(self._blob)
        for source in self._sources:
            source.announce(self._blob)

    def _plan_expiry(self, due: float | None) -> None:
        """Look at `due` at the latest. Lives are only prolonged, so what was planned may be early, and never late."""
        if due is None or not self._running:
            return
        if self._expiry is not None:
            if self._expiry.when() <= due:
                return  # that one plans the next
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        gone = self.book.expire(self._now())
        self._plan_expiry(self.book.next_expiry)
        for peer in gone:
            logger.info("discovery.gone peer=%s", peer.short)
            self._on_gone(peer)

    def _stop(self) -> None:
        self._running = False
        for timer in (self._reissue, self._expiry):
            if timer is not None:
                timer.cancel()
        self._reissue = self._expiry = None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
