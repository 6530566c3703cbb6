"""Which members are here, from records that anybody may have passed on. PURE: `now` and `unix` are arguments.

Two answers: `records`, the view: members that are alive; and `candidates`: members that are worth a dial, announced on
this LAN for example, of whom nobody knows whether they run. What keeps a member in the view is a record with a higher
number than any before, for its time to live from its receipt, or that something was heard from it (`sees`). A record
that is only repeated keeps nobody alive, and one that was once seen to end is remembered for as long as its date would
let it pass.

    now:  seconds of a steady clock; lives are counted by it
    unix: seconds since 1970; only the dates of records are compared with it, with MAX_SKEW_S of tolerance

Hostile: everything that comes from the network. Each source has budgets of signatures that it may make us check: of
strangers, and of records that turn out to be forged; genuine records of known members cost it nothing. Where a source
vouches for who published a record, every publisher has budgets of its own, those of strangers apart from those of
members and never more together than the source's: a stranger who knows the topic can mute itself, many can hold up who
comes anew, and none can mute a member. Nobody gets in whom `judge` does not let in, and nobody who is alive makes room
for somebody else.

Called by discovery.Discovery.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from swarmnode.discovery.record import MAX_TTL_S, RECORD_TTL_S, Head, PeerRecord, content, decode, peek
from swarmnode.errors import BadRecord
from transport.identity import PeerId

MAX_PEERS = 1024
MAX_SKEW_S = 300.0  # clocks of devices that ever met a time server agree better
SEEN_S = float(RECORD_TTL_S)  # what something heard from a peer is worth
REMEMBER_S = 2 * MAX_SKEW_S + MAX_TTL_S  # after that a record's own date refuses it
MIN_INTERVAL_S = 0.1  # between two records of one peer
STRANGERS_BURST, STRANGERS_PER_S = 512.0, 50.0  # signatures checked per source: 0.1 s at once, then 1 % of a core
FORGED_BURST, FORGED_PER_S = 64.0, 4.0  # no honest source has any
MAX_SOURCES = 4096  # budgets of members, as tellers and as publishers, and of what is no member's
MAX_STRANGERS = 512  # budgets of publishers that are not known; they cannot displace the others


class EventKind(StrEnum):
    """What a record, or a sign of life, has changed."""

    NEW = "new"  # in the view from now on
    CHANGED = "changed"  # in the view, and says something else of itself
    REFRESHED = "refreshed"  # a newer record that says the same
    CANDIDATE = "candidate"  # not in the view; worth a dial
    SAME = "same"  # known before
    LEFT = "left"  # it said goodbye


@dataclass(frozen=True, slots=True)
class Event:
    """What was learned; `blob` is the record as it is passed on."""

    kind: EventKind
    record: PeerRecord
    blob: bytes

    @property
    def is_news(self) -> bool:
        """Whether others should be told: the record is newer than any before."""
        return self.kind in (EventKind.NEW, EventKind.CHANGED, EventKind.REFRESHED, EventKind.LEFT)


@dataclass(slots=True)
class _Entry:
    record: PeerRecord
    blob: bytes
    received: float  # now, of the newest record
    until: float  # alive until then
    in_view: bool
    announced: set[str] = field(default_factory=set)  # by these lasting sources


@dataclass(frozen=True, slots=True)
class _Memory:
    seq: int
    until: float
    left: bool


@dataclass(slots=True)
class _Budget:
    """Signatures that one source may make us check. Strangers cannot use up what members need."""

    strangers: float  # of peers that are not known yet
    forged: float  # that turn out to be wrong
    at: float

    def may_check(self, *, known: bool) -> bool:
        """Whether one more is looked at; a stranger's is counted."""
        if self.forged < 1.0 or (not known and self.strangers < 1.0):
            return False
        if not known:
            self.strangers -= 1.0
        return True


class PeerBook:
    """See the module. Not for several threads."""

    def __init__(
        self,
        swarm: PeerId,
        own: PeerId,
        *,
        judge: Callable[[PeerRecord], str | None],
        max_peers: int = MAX_PEERS,
    ) -> None:
        """judge: why a record's peer is no member, None when it is one. It sees signed records of this swarm."""
        self.swarm, self.own = swarm, own
        self._judge, self._max_peers = judge, max_peers
        self._entries: dict[PeerId, _Entry] = {}
        self._memory: OrderedDict[PeerId, _Memory] = OrderedDict()
        self._budgets: OrderedDict[str, _Budget] = OrderedDict()
        self._strangers: OrderedDict[str, _Budget] = OrderedDict()
        self.refused: Counter[str] = Counter()  # by a few fixed words
        self.last_refusal = ""  # one line, for people

    # -- learning

    def offer(
        self,
        blob: bytes,
        source: str,
        now: float,
        unix: float,
        *,
        lasting: bool = False,
        publisher: PeerId | None = None,
    ) -> Event | None:
        """Look at a record that `source` passed on; None when it taught nothing. Never raises for what is in it.

        lasting, publisher: see source.Sink; a lasting record makes a candidate and keeps nobody alive.
        """
        try:
            head = peek(blob)
        except BadRecord as error:
            return self._refuse("malformed", str(error))
        if head.swarm != self.swarm.raw:
            return self._refuse("other swarm", f"{source} passed on a record of another swarm")
        if head.peer == self.own.raw:
            return None
        peer = PeerId(head.peer)
        entry = self._entries.get(peer)
        if entry is not None and blob == entry.blob:
            if lasting:
                entry.announced.add(source)
            return Event(EventKind.SAME, entry.record, entry.blob)
        if why := self._too_old_or_new(peer, entry, head, unix, lasting=lasting):
            return self._refuse(*why)
        if entry is not None and head.ttl_s and now - entry.received < MIN_INTERVAL_S:
            return self._refuse("too often", f"{peer.short} issues records faster than every {MIN_INTERVAL_S:g} s")
        budget = self._may_check(source, publisher, now, known=entry is not None)
        if budget is None:
            return self._refuse("rate", f"{source} passes on more records than are looked at")
        try:
            record = decode(blob)
        except BadRecord as error:
            budget.forged -= 1
            return self._refuse("malformed", str(error))
        if entry is not None and record.seq <= entry.record.seq:  # of a lasting source: genuine, and outdated
            entry.announced.add(source)
            return Event(EventKind.SAME, entry.record, entry.blob)
        if not (record.leaves and entry is not None):
            reason = self._judge(record)
            if reason is not None:
                return self._refuse("judged", f"{peer.short}: {reason}")
        if record.leaves:
            return self._left(record, bytes(blob), now)
        return self._take(entry, record, bytes(blob), source, now, unix, lasting=lasting)

    def is_of_twin(self, blob: bytes, issued: int, source: str, now: float, *, publisher: PeerId | None = None) -> bool:
        """Is it a genuine record of this node that is newer than `issued`, the newest that it has issued itself?

        It is looked at on the budget of `source`, as a stranger's.
        """
        try:
            head = peek(blob)
        except BadRecord:
            return False
        if head.peer != self.own.raw or head.swarm != self.swarm.raw or head.seq <= issued:
            return False
        budget = self._may_check(source, publisher, now, known=False)
        if budget is None:
            self._refuse("rate", f"{source} passes on more records than are looked at")
            return False
        try:
            decode(blob)
        except BadRecord as error:
            budget.forged -= 1
            self._refuse("malformed", str(error))
            return False
        return True

    def sees(self, peer: PeerId, now: float) -> Event | None:
        """Something was heard from this peer itself just now: a member that is known stays (or gets) in the view.

        Call it for what has arrived, not for a connection that is merely open: a killed peer's is open for a while.
        """
        entry = self._entries.get(peer)
        if entry is None:
            return None
        entry.until = max(entry.until, now + SEEN_S)
        if entry.in_view:
            return None
        entry.in_view = True
        return Event(EventKind.NEW, entry.record, entry.blob)

    def lost(self, peer: PeerId, source: str) -> None:
        """A lasting source does not announce this peer any more. It stays in the view for as long as it is alive."""
        entry = self._entries.get(peer)
        if entry is None:
            return
        entry.announced.discard(source)
        if not entry.in_view and not entry.announced:
            del self._entries[peer]

    def leave(self, peer: PeerId, seq: int, now: float) -> bool:
        """The peer said goodbye with number `seq`; no older record brings it back. False when that is outdated."""
        entry = self._entries.get(peer)
        if entry is not None and seq <= entry.record.seq:
            return False
        known = self._memory.get(peer)
        if known is not None and seq <= known.seq:
            return False
        self._entries.pop(peer, None)
        self._remember(peer, _Memory(seq, now + REMEMBER_S, left=True))
        return True

    def forget(self, peer: PeerId) -> bool:
        """Drop a peer at once, one that was expelled for example. Whether it was in the view."""
        entry = self._entries.pop(peer, None)
        return entry is not None and entry.in_view

    def expire(self, now: float) -> list[PeerId]:
        """Take out of the view whose time is over, and return them. Those still announced become candidates again."""
        gone = []
        for peer, entry in list(self._entries.items()):
            if not entry.in_view or entry.until > now:
                continue
            gone.append(peer)
            entry.in_view = False
            if not entry.announced:
                del self._entries[peer]
                self._remember(peer, _Memory(entry.record.seq, now + REMEMBER_S, left=False))
        while self._memory and next(iter(self._memory.values())).until <= now:
            self._memory.popitem(last=False)
        return gone

    # -- looking

    @property
    def next_expiry(self) -> float | None:
        """When `expire` is due next; None when nobody is in the view."""
        return min((entry.until for entry in self._entries.values() if entry.in_view), default=None)

    def until(self, peer: PeerId) -> float | None:
        """When a peer is taken out of the view if nothing more is heard; None when it is not there."""
        entry = self._entries.get(peer)
        return entry.until if entry is not None and entry.in_view else None

    def records(self, now: float) -> list[PeerRecord]:
        """The view: members that are alive, in a steady order."""
        return [entry.record for entry in self._sorted() if entry.in_view and entry.until > now]

    def candidates(self) -> list[PeerRecord]:
        """Members that are announced and not known to be alive: worth a dial now and then."""
        return [entry.record for entry in self._sorted() if not entry.in_view]

    def get(self, peer: PeerId) -> PeerRecord | None:
        """The newest record of a peer in the view or among the candidates."""
        entry = self._entries.get(peer)
        return entry.record if entry is not None else None

    def is_alive(self, peer: PeerId, now: float) -> bool:
        """Whether the peer is in the view."""
        entry = self._entries.get(peer)
        return entry is not None and entry.in_view and entry.until > now

    def all_blobs(self, now: float) -> list[bytes]:
        """Records of the whole view, for somebody who knows nobody yet."""
        return [entry.blob for entry in self._sorted() if entry.in_view and entry.until > now]

    def __len__(self) -> int:
        return len(self._entries)

    # -- rules

    def _sorted(self) -> list[_Entry]:
        return sorted(self._entries.values(), key=lambda entry: entry.record.peer.raw)

    def _too_old_or_new(
        self, peer: PeerId, entry: _Entry | None, head: Head, unix: float, *, lasting: bool
    ) -> tuple[str, str] | None:
        """Why a record's number rules it out, as (word, line); the line is empty where that is nothing unusual."""
        if head.seq > (unix + MAX_SKEW_S) * 1000:
            ahead = head.seq / 1000 - unix
            return "future", f"the record of {peer.short} is {ahead:.0f} s in the future: check the clocks"
        if entry is not None and head.seq <= entry.record.seq and not lasting:
            return "old", ""
        known = self._memory.get(peer) if entry is None else None
        if known is not None and head.seq <= known.seq and (known.left or not lasting):
            return "old", ""
        if entry is None and not lasting and head.seq < (unix - MAX_SKEW_S - head.ttl_s) * 1000:
            return "old", f"the record of {peer.short} is {unix - head.seq / 1000:.0f} s old: check the clocks"
        return None

    def _take(
        self,
        entry: _Entry | None,
        record: PeerRecord,
        blob: bytes,
        source: str,
        now: float,
        unix: float,
        *,
        lasting: bool,
    ) -> Event | None:
        fresh = not lasting and record.seq >= (unix - MAX_SKEW_S - record.ttl_s) * 1000
        if entry is None:
            if not self._make_room(for_candidate=not fresh):
                return self._refuse("full", f"more than {self._max_peers} members; {record.peer.short} is left out")
            entry = self._entries[record.peer] = _Entry(record, blob, now, now, in_view=False)
            self._memory.pop(record.peer, None)
            changed = False
        else:
            changed = content(blob) != content(entry.blob)
            entry.record, entry.blob, entry.received = record, blob, now
        if lasting:
            entry.announced.add(source)
        if fresh:
            entry.until = max(entry.until, now + record.ttl_s)
        if not entry.in_view:
            entry.in_view = fresh
            return Event(EventKind.NEW if fresh else EventKind.CANDIDATE, record, blob)
        return Event(EventKind.CHANGED if changed else EventKind.REFRESHED, record, blob)

    def _left(self, record: PeerRecord, blob: bytes, now: float) -> Event | None:
        was = self._entries.get(record.peer)
        if not self.leave(record.peer, record.seq, now) or was is None:
            return None
        return Event(EventKind.LEFT, record, blob)

    def _make_room(self, *, for_candidate: bool) -> bool:
        if len(self._entries) < self._max_peers:
            return True
        if for_candidate:
            return False
        idle = next((peer for peer, entry in self._entries.items() if not entry.in_view), None)
        if idle is None:
            return False
        del self._entries[idle]
        return True

    def _remember(self, peer: PeerId, memory: _Memory) -> None:
        self._memory.pop(peer, None)
        self._memory[peer] = memory
        while len(self._memory) > 4 * self._max_peers:
            self._memory.popitem(last=False)

    def _may_check(self, source: str, publisher: PeerId | None, now: float, *, known: bool) -> _Budget | None:
        """The budget on which one more signature is checked, None when it is used up. Counts a stranger's."""
        if publisher is None:
            budget = _budget(self._budgets, MAX_SOURCES, source, now)
            return budget if budget.may_check(known=known) else None
        is_member = publisher in self._entries
        budgets, most = (self._budgets, MAX_SOURCES) if is_member else (self._strangers, MAX_STRANGERS)
        budget = _budget(budgets, most, f"{source} {publisher}", now)
        if not budget.may_check(known=known):
            return None
        if not is_member and not _budget(self._budgets, MAX_SOURCES, source, now).may_check(known=False):
            return None
        return budget

    def _refuse(self, word: str, line: str) -> Event | None:
        self.refused[word] += 1
        self.last_refusal = line or self.last_refusal
        return None


def _budget(budgets: OrderedDict[str, _Budget], most: int, source: str, now: float) -> _Budget:
    """A source's budgets, as they are now. Those of `most` are kept; the one that was used longest ago goes first."""
    budget = budgets.get(source)
    if budget is None:
        budget = budgets[source] = _Budget(STRANGERS_BURST, FORGED_BURST, now)
        if len(budgets) > most:
            budgets.popitem(last=False)
    budgets.move_to_end(source)
    passed, budget.at = max(0.0, now - budget.at), now
    budget.strangers = min(STRANGERS_BURST, budget.strangers + passed * STRANGERS_PER_S)
    budget.forged = min(FORGED_BURST, budget.forged + passed * FORGED_PER_S)
    return budget
