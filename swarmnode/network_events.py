"""Turns an endpoint's news into a node's events, each told once: relays that come and go, peers that change their path.

    relay-connected url          relay-lost url reason          relay-failed url reason (never connected, or not again)
    relay-left url reason (on purpose)
    path  peer path address relay rtt_ms was reason

Only peers that are connected are spoken of, and only paths that were kept for a moment: what is tried before anybody
answers is of no use to people. Of relays only those that the user named: what peers name may be anything. Changes
nothing. Called by node.py.
"""

from __future__ import annotations

import asyncio

from swarmnode.config import format_address
from swarmnode.parts import Report
from transport.connection import ConnectionStats
from transport.identity import PeerId
from transport.news import NOT_NEEDED, News, PathNews, RelayNews

NOWHERE = "no path"
SETTLED = 0.3  # seconds: a path that was left sooner is not spoken of
MAX_RELAYS = 64  # whose state is remembered; users name a few


class NetworkEvents:
    """Listens to one endpoint's `on_news`. On one loop; end it with `close`."""

    def __init__(self, emit: Report) -> None:
        self._emit = emit
        self._relays: dict[str, str | None] = {}  # url → why it is not there; None when it is
        self._told: dict[PeerId, tuple[str, str]] = {}  # connected peers → the path told last: its kind, and all of it
        self._latest: dict[PeerId, PathNews] = {}
        self._timers: dict[PeerId, asyncio.TimerHandle] = {}

    def __call__(self, news: News) -> None:
        """Something has happened."""
        if isinstance(news, RelayNews):
            if news.own:
                self._relay(news)
        elif news.peer in self._told:
            self._latest[news.peer] = news
            if news.peer not in self._timers:
                loop = asyncio.get_running_loop()
                self._timers[news.peer] = loop.call_later(SETTLED, self._settled, news.peer)

    def connected(self, peer: PeerId, stats: ConnectionStats) -> None:
        """A connection of this peer begins, on the path that it has now."""
        where = stats.relay or format_address(stats.path_address)
        self._told[peer] = (stats.path, path_text(stats.path, where))
        self._emit("connected", peer=str(peer), path=stats.path)

    def forget(self, peer: PeerId) -> None:
        """The peer's last connection is over."""
        self._told.pop(peer, None)
        self._latest.pop(peer, None)
        timer = self._timers.pop(peer, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Tell nothing more of any peer."""
        for peer in list(self._told):
            self.forget(peer)

    def _relay(self, news: RelayNews) -> None:
        if news.reason == NOT_NEEDED:
            if self._relays.pop(news.url, NOT_NEEDED) != NOT_NEEDED:
                self._emit("relay-left", url=news.url, reason=news.reason)
            return
        why = None if news.up else news.reason
        known = news.url in self._relays
        before = self._relays.get(news.url)
        self._relays[news.url] = why
        if len(self._relays) > MAX_RELAYS:
            del self._relays[next(iter(self._relays))]
        if known and before == why:
            return
        if why is None:
            self._emit("relay-connected", url=news.url)
        elif known and before is None:
            self._emit("relay-lost", url=news.url, reason=why)
        else:
            self._emit("relay-failed", url=news.url, reason=why)

    def _settled(self, peer: PeerId) -> None:
        del self._timers[peer]
        news = self._latest.pop(peer)
        path = news.path
        kind = "none" if path is None else str(path.kind)
        relay = "" if path is None else path.id.relay
        address = "" if path is None or relay else format_address(path.id.address)
        text = path_text(kind, relay or address)
        was_kind, was = self._told[peer]
        self._told[peer] = (kind, text)
        if text == was:
            return
        self._emit(
            "path",
            peer=str(peer),
            path=kind,
            address=address,
            relay=relay,
            rtt_ms=None if news.rtt is None else round(news.rtt * 1e3, 3),
            was=was if was_kind == kind else was_kind,
            reason=news.reason,
        )


def path_text(kind: str, where: str) -> str:
    """A path in a few words: its kind, and the address or relay."""
    return f"{kind} {where}" if where else NOWHERE
