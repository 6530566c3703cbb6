"""Which records a member passes on over which of its links. PURE: `now` is an argument, in seconds.

A record goes over a link at most once, never back to who told it nor to the member that it is about, and only while it
is fresh: what is passed on late would keep a member in view that is long dead. What all links together carry is capped,
evenly shared, and what is new or has changed goes first. So somebody with a link to everybody (a hub) tells each member
a part only, and each member a hub the same part: the rest goes around among the others, whose links make a net that
reaches all in three or four steps. With 200 members, of whom one is a hub, the hub hears and says 450 records a second
instead of the 27,000 that it would if everybody told everybody, and a dead one's last record reaches nobody after 5 s.

Called by discovery.Discovery, every second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transport.identity import PeerId

TELL_S = 2.0  # older news is not passed on: two hops add 4 s to a record's life, and 15 s are promised
MAX_TOLD_PER_S = 400  # records over all links, 150 KB, or more in a swarm where that is too little for each to be seen:
PER_MEMBER_PER_S = 2.0  # each is issued every 3 s, and comes twice or three times
_STRIDE = 7919  # a prime: where the next round begins among the records


@dataclass(slots=True)
class _News:
    about: PeerId
    blob: bytes
    heard: float
    is_new: bool  # or has changed: more than a sign of life
    known_by: set[PeerId]


class Gossip:
    """See the module."""

    def __init__(self, own: PeerId) -> None:
        self._news: dict[PeerId, _News] = {}
        self._own = b""
        self._own_told: set[PeerId] = set()
        self._turn = int.from_bytes(own.raw[:4], "big")  # members do not all pass on the same
        self._last = float("-inf")

    def issued(self, blob: bytes) -> None:
        """This node has a new record of its own."""
        self._own = blob
        self._own_told.clear()

    def learned(self, about: PeerId, blob: bytes, now: float, *, is_new: bool, teller: PeerId | None) -> None:
        """A record was heard that is newer than any before."""
        self._news[about] = _News(about, blob, now, is_new, {about} if teller is None else {about, teller})

    def repeated(self, about: PeerId, blob: bytes, teller: PeerId) -> None:
        """A link's other end has told a record that was known."""
        news = self._news.get(about)
        if news is not None and news.blob == blob:
            news.known_by.add(teller)

    def told_everything(self, link: PeerId) -> None:
        """The whole view was sent over a link."""
        self._own_told.add(link)
        for news in self._news.values():
            news.known_by.add(link)

    def share(
        self, links: Sequence[PeerId], hubs: Collection[PeerId], members: int, now: float
    ) -> dict[PeerId, list[bytes]]:
        """What to send over each link now; ask every second. The own record comes first.

        hubs: those of the links' other ends that everybody has a link to; members: how many that is.
        """
        self._news = {about: news for about, news in self._news.items() if now - news.heard <= TELL_S}
        room = int(max(MAX_TOLD_PER_S, PER_MEMBER_PER_S * members) * min(1.0, now - self._last))
        self._last = now
        self._turn += _STRIDE
        first = [news for news in self._news.values() if news.is_new]
        then = [news for news in self._news.values() if not news.is_new]
        told: dict[PeerId, list[bytes]] = {}
        for at, link in enumerate(links):
            share = max(1, room // (max(members, len(links)) if link in hubs else len(links)))
            blobs = self._pick(first, link, share, at)
            blobs += self._pick(then, link, share - len(blobs), at)
            if self._own and link not in self._own_told:
                self._own_told.add(link)
                blobs.insert(0, self._own)
            if blobs:
                told[link] = blobs
        return told

    def _pick(self, some: list[_News], link: PeerId, most: int, at: int) -> list[bytes]:
        """Up to `most` of these that the link's other end does not know, for neighbouring links others."""
        blobs: list[bytes] = []
        start = (self._turn + at * most) % max(1, len(some))
        for news in (*some[start:], *some[:start]) if most > 0 else ():
            if link not in news.known_by:
                news.known_by.add(link)
                blobs.append(news.blob)
                if len(blobs) == most:
                    break
        return blobs
