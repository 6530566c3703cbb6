"""All relays of a node: a home, a second one that is kept warm, and those that peers need. SHELL.

Not one link (relay_link) and not the choice of a home (proto/relay_choice), which it composes. Used by peer_socket.
One loop only.

Which links are open:
- the home and the second, always; peers are told the home first;
- one of our own that is down and would be a clearly better home, so that its return is noticed;
- all of our own while we survey: at the start, after a change of network, every SURVEY_EVERY;
- while its directory is used, the first two of our own by name, where there are more than three: with three, any two
  nodes that keep two of them share one; with more they would not;
- what `need` asked for, until it was unused for IDLE_SECONDS: at most MAX_ON_DEMAND.

A relay that a peer named is a stranger: it never becomes the home, only global addresses are tried (unless our own
relays are private too), and a bounded number is remembered.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence

from transport.identity import Identity, PeerId
from transport.news import NOT_NEEDED
from transport.proto.relay_choice import HomeCandidate, HomeChoice, is_better
from transport.proto.relay_url import BadRelayUrl, RelayUrl, is_global, parse_relay_url
from transport.relay_directory import RelayDirectory
from transport.relay_link import OnDatagrams, OnGone, OnState, RelayLink
from transport.relay_session import RelayLinkConfig

logger = logging.getLogger(__name__)

MAX_OWN = 16
MAX_ON_DEMAND = 8
MAX_SURVEYED = 10  # links at one time while we look for the nearest
MAX_STRANGERS = 64
SHARED_ANYWAY = 3
IDLE_SECONDS = 300.0
BUSY_SECONDS = 60.0  # an on-demand link that was used within it is not closed for another
SETTLE_SECONDS = 3.0  # after the start or a change of network: no home is known to others yet
SURVEY_SECONDS = 8.0  # two answers of each relay, one of them not disturbed by the login
SURVEY_EVERY = 1800.0
TICK_SECONDS = 15.0


class _Entry:
    """One relay that is known. `used_at`: when it was last needed or carried something."""

    __slots__ = ("link", "measured", "own", "rtt", "url", "used_at")

    def __init__(self, url: RelayUrl, own: bool) -> None:
        self.url, self.own = url, own
        self.link: RelayLink | None = None
        self.rtt: float | None = None
        self.measured = 0
        self.used_at = float("-inf")

    @property
    def up(self) -> bool:
        return self.link is not None and self.link.up

    @property
    def view(self) -> HomeCandidate:
        return HomeCandidate(self.url.text, self.up, self.rtt, self.measured)


class RelayPool:
    """The links of one node. Callbacks are those of RelayLink; on_change: `home` or `up()` is another.

    on_state also tells, with up false and NOT_NEEDED, of a link that was closed because nobody needs it.
    """

    def __init__(
        self,
        urls: Iterable[str],
        identity: Identity,
        config: RelayLinkConfig,
        on_datagrams: OnDatagrams,
        on_state: OnState,
        on_gone: OnGone,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`urls` are our own relays, in the order of preference. Raises BadRelayUrl."""
        self._loop = asyncio.get_running_loop()
        self._identity, self._config = identity, config
        self._on_datagrams, self._on_state, self._on_gone = on_datagrams, on_state, on_gone
        self._on_change = on_change
        self.directory = RelayDirectory(self._send_record)
        self._choice = HomeChoice()
        self._entries: dict[str, _Entry] = {}
        self._up: tuple[str, ...] = ()
        self._wanted: set[str] = set()  # open for our own sake, not because somebody needed them
        self._told: tuple[str, tuple[str, ...]] = ("", ())
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._settled_at = self._surveyed_at = 0.0
        self._next_survey = 0.0
        self._running = self._closed = False
        for text in urls:
            self.add(text, own=True)

    # -- for the owner

    def start(self) -> None:
        """Begin to connect."""
        if not self._running and not self._closed:
            self._running = True
            self._survey(settle=True)

    async def close(self) -> None:
        """Close all links; takes at most a second or so."""
        self._running, self._closed, self._up = False, True, ()
        self.directory.close()
        if self._timer is not None:
            self._timer.cancel()
        for entry in self._entries.values():
            self._shut(entry)
        if self._closing:
            await asyncio.wait(self._closing)

    def add(self, text: str, own: bool = False) -> str:
        """Make a relay known and return its canonical URL. Raises BadRelayUrl.

        own: the user or a ticket that the user trusts named it; otherwise a peer did, which may be hostile.
        """
        url = parse_relay_url(text)
        entry = self._entries.get(url.text)
        if entry is not None:
            if not own or entry.own:
                return url.text
        elif not own and url.is_private and not self._own_are_private():
            raise BadRelayUrl(f"{url} was named by a peer and is a private address; not used")
        if own and sum(known.own for known in self._entries.values()) >= MAX_OWN:
            raise BadRelayUrl(f"more than {MAX_OWN} relays; leave some out")
        if entry is None:
            if not own:
                self._forget_strangers()
            entry = self._entries[url.text] = _Entry(url, own)
        entry.own = own
        self._tell_directory(entry)
        if self._running and own:
            self._survey(settle=False)
        return url.text

    def need(self, text: str) -> bool:
        """Have a link to this relay, now and for IDLE_SECONDS. False when it cannot be: bad URL, or too many.

        The link comes up later; on_state tells.
        """
        try:
            url = self.add(text)
        except BadRelayUrl as error:
            logger.info("relay.not_used %s", error)
            return False
        entry = self._entries[url]
        if entry.link is None and not (self._running and self._room()):
            return False
        entry.used_at = self._loop.time()
        self._open(entry)
        return True

    def send(self, url: str, peer: PeerId, datagrams: Sequence[bytes], disco: bool = False) -> bool:
        """Send to a peer by this relay, never waits; False when its link is not up (`need` it)."""
        entry = self._entries.get(url)
        if entry is None or entry.link is None:
            return False
        entry.used_at = self._loop.time()
        return entry.link.send(peer, datagrams, disco)

    def kick(self) -> None:
        """The network changed: prove all links or replace them, and look for the nearest relay again."""
        for entry in self._entries.values():
            if entry.link is not None:
                entry.link.kick()
        if self._running:
            self._survey(settle=True)

    @property
    def home(self) -> str:
        """Where peers reach us; "" when no relay of our own is known. It may be down: see `up`."""
        return self._choice.home

    def up(self) -> tuple[str, ...]:
        """The relays that are up: home first, then the second, then the others."""
        return self._up

    def link(self, url: str) -> RelayLink | None:
        """The link to this relay, if there is one."""
        entry = self._entries.get(url)
        return entry.link if entry is not None else None

    def links(self) -> list[RelayLink]:
        """All links, up or not."""
        return [entry.link for entry in self._entries.values() if entry.link is not None]

    @property
    def own(self) -> tuple[str, ...]:
        """Our own relays in the user's order."""
        return tuple(entry.url.text for entry in self._entries.values() if entry.own)

    # -- links

    def _open(self, entry: _Entry) -> None:
        if entry.link is not None or self._closed:
            return
        entry.link = RelayLink(
            entry.url,
            self._identity,
            self._config,
            self._received,
            self._state,
            self._on_gone,
            on_rtt=lambda: self._measured(entry),
            on_record=self.directory.heard,
            private_ok=lambda: entry.own or self._own_are_private(),
        )
        entry.link.start()

    def _shut(self, entry: _Entry) -> None:
        link, entry.link = entry.link, None
        if link is None:
            return
        self.directory.relay_down(entry.url.text, left=True)
        task = self._loop.create_task(link.close(), name=f"relay-close {entry.url}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        if not self._closed:  # in a turn of its own: who is told may ask for another relay while we go through ours
            self._loop.call_soon(self._left, entry.url.text)

    def _left(self, url: str) -> None:
        if not self._closed:
            self._on_state(url, False, NOT_NEEDED)
            self._tell()

    def _received(self, url: str, peer: PeerId, datagrams: list[bytes], disco: bool) -> None:
        entry = self._entries.get(url)
        if entry is not None:
            entry.used_at = self._loop.time()
        self._on_datagrams(url, peer, datagrams, disco)

    def _state(self, url: str, up: bool, reason: str) -> None:
        entry = self._entries.get(url)
        if not up:
            self.directory.relay_down(url, left=False)
        elif entry is not None:
            self._tell_directory(entry)
        self._update()  # first, so that whoever is told finds the new home
        self._on_state(url, up, reason)
        self._tell()

    def _tell_directory(self, entry: _Entry) -> None:
        """Of a relay of our own that has just come up, or that is up and has just become our own."""
        if entry.own and entry.link is not None and entry.link.has_directory:
            self.directory.relay_up(entry.url.text)

    def _send_record(self, url: str, message: bytes) -> bool:
        entry = self._entries.get(url)
        return entry is not None and entry.link is not None and entry.link.send_record(message)

    def _measured(self, entry: _Entry) -> None:
        if entry.link is not None:
            entry.rtt = entry.link.rtt
            entry.measured += 1
        self._update()
        self._tell()

    # -- who is home, and what is open

    def _survey(self, settle: bool) -> None:
        now = self._loop.time()
        self._surveyed_at = now + SURVEY_SECONDS
        self._next_survey = now + SURVEY_EVERY * random.uniform(0.8, 1.2)
        if settle:
            self._settled_at = now + SETTLE_SECONDS
        self._update()
        self._tick()

    def _tick(self) -> None:
        """Time has passed: a survey ends or begins, links are idle."""
        if self._timer is not None:
            self._timer.cancel()
        if self._closed:
            return
        now = self._loop.time()
        if now >= self._next_survey:
            self._survey(settle=False)
            return
        self._update()
        self._tell()
        soon = [at for at in (self._settled_at, self._surveyed_at) if at > now]
        self._timer = self._loop.call_at(min([*soon, now + TICK_SECONDS]) + 0.001, self._tick)

    def _update(self) -> None:
        """Choose the home anew, open what is wanted and shut what is not."""
        if not self._running:
            return
        now = self._loop.time()
        own = [entry for entry in self._entries.values() if entry.own]
        self._choice.update([entry.view for entry in own], settled=now >= self._settled_at)
        self._wanted = self._want(own, now)
        for entry in self._entries.values():
            if entry.url.text in self._wanted:
                self._open(entry)
            elif entry.link is not None and now - entry.used_at > IDLE_SECONDS:
                self._shut(entry)
        first = (self._choice.home, self._choice.second)
        found = [entry.url.text for entry in self._entries.values() if entry.up]
        self._up = tuple(sorted(found, key=lambda url: first.index(url) if url in first else len(first)))

    def _want(self, own: Sequence[_Entry], now: float) -> set[str]:
        home = self._entries.get(self._choice.home)
        second = self._entries.get(self._choice.second)
        wanted = {entry.url.text for entry in (home, second) if entry is not None}
        if now < self._surveyed_at or home is None or not home.up or (second is not None and not second.up):
            wanted.update(entry.url.text for entry in own[:MAX_SURVEYED])
        else:
            wanted.update(entry.url.text for entry in own if not entry.up and is_better(entry.view, home.view))
        if self.directory.in_use and len(own) > SHARED_ANYWAY:
            wanted.update(sorted(entry.url.text for entry in own)[:2])
        return wanted

    def _tell(self) -> None:
        told = (self._choice.home, self.up())
        if told != self._told and not self._closed:
            self._told = told
            self._on_change()

    def _room(self) -> bool:
        """Whether one more link on demand may be opened; shuts the one that was unused longest if that helps."""
        opened = [entry for entry in self._entries.values() if entry.link is not None]
        on_demand = [entry for entry in opened if entry.url.text not in self._wanted]
        if len(on_demand) < MAX_ON_DEMAND:
            return True
        oldest = min(on_demand, key=lambda entry: entry.used_at)
        if self._loop.time() - oldest.used_at <= BUSY_SECONDS:
            return False
        self._shut(oldest)
        return True

    def _own_are_private(self) -> bool:
        return any(
            entry.own and (entry.url.is_private or (entry.link is not None and _is_private(entry.link.host)))
            for entry in self._entries.values()
        )

    def _forget_strangers(self) -> None:
        strangers = [entry for entry in self._entries.values() if not entry.own]
        if len(strangers) >= MAX_STRANGERS:
            without = [entry for entry in strangers if entry.link is None]  # at most MAX_ON_DEMAND have one
            oldest = min(without, key=lambda entry: entry.used_at)
            del self._entries[oldest.url.text]


def _is_private(host: str) -> bool:
    return bool(host) and not is_global(host)
