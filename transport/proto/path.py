"""One path to one peer: its state, its pings, its RTT. PURE.

Not which path is used (path_policy.py) and not whom to call (punch.py). Owned and driven by paths.py.

  candidate   known, not asked yet
  probing     a few pings are under way
  live        a pong, or a QUIC handshake, has authenticated the peer over it
  doubted     silent after a send, silent for long, or deaf: asked every 175 ms, used together with another path
  dead        asked with growing gaps while it has ever been live; three pongs in a row bring it back

  TRANSITIONS (what is not in the table changes nothing)
              ask        answer     doubt      give up    lose (the relay is down, or says that the peer is gone)
  candidate   probing    live       .          .          dead
  probing     .          live       .          dead       dead
  live        .          .          doubted    .          dead
  doubted     .          live       .          dead       dead
  dead        probing*   live**     .          .          .
  * never live before; otherwise it is pinged and stays dead.  ** the third pong in a row, when it was live before;
     the sixth, twelfth, … of a direct path that came back a short time ago and died again

What counts as an answer to a send: data of a connection, and pongs. The peer's own pings only show that the peer is
heard: a path on which nothing but they arrive is one-way. A lost pong alone changes nothing; three in a row do, even
while data arrives (we hear, but are we heard?), and five end it.

Question  what makes us wonder (half the silence that is allowed; the peer sends by another path; big pings vanish) is
          settled quickly: pings every 80 ms; a pong ends it, the limit of silence without one is doubt.
RTT       path_rtt.py. Pings that were under way while we stood still say nothing of it, they only show life.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from transport.proto.addresses import PathId, PathKind
from transport.proto.path_config import DEFAULT_MAX_SIZE, RELAY_SIZE, PathConfig
from transport.proto.path_policy import PathState, PathView
from transport.proto.path_quality import Quality
from transport.proto.path_rtt import RttEstimate
from transport.proto.path_size import SizeSearch

CANDIDATE, PROBING, LIVE, DOUBTED, DEAD = PathState


class Event(StrEnum):
    """What moves a path from state to state."""

    ASK = "ask"
    ANSWER = "answer"
    DOUBT = "doubt"
    GIVE_UP = "give up"
    LOSE = "lose"


TRANSITIONS: Mapping[tuple[PathState, Event], PathState] = {
    (CANDIDATE, Event.ASK): PROBING,
    (CANDIDATE, Event.ANSWER): LIVE,
    (CANDIDATE, Event.LOSE): DEAD,
    (PROBING, Event.ANSWER): LIVE,
    (PROBING, Event.GIVE_UP): DEAD,
    (PROBING, Event.LOSE): DEAD,
    (LIVE, Event.DOUBT): DOUBTED,
    (LIVE, Event.LOSE): DEAD,
    (DOUBTED, Event.ANSWER): LIVE,
    (DOUBTED, Event.GIVE_UP): DEAD,
    (DOUBTED, Event.LOSE): DEAD,
    (DEAD, Event.ASK): PROBING,
    (DEAD, Event.ANSWER): LIVE,
}


class Use(StrEnum):
    """What a ping is for: life and RTT, or size; the quality of a demoted path; to tell the peer that we left it."""

    LIFE = "life"
    TRAIN = "train"
    FAREWELL = "farewell"


@dataclass(slots=True)
class Ping:
    """One ping under way. size: bytes it was padded to, 0 for a small one. stalled: we stood still meanwhile."""

    sent_at: float
    deadline: float
    size: int = 0
    use: Use = Use.LIFE
    missed: bool = False
    stalled: bool = False


class Path:
    """One path. Times in seconds, monotonic; `waiting_since` is the first send that nothing has answered."""

    __slots__ = (
        "_ask_gap",
        "_asked_at",
        "_back_off",
        "_calm_since",
        "_config",
        "_failures",
        "_gone",
        "_proof",
        "_return_pongs",
        "_returned_at",
        "_rtt",
        "_tries",
        "_tries_end",
        "down_until",
        "keep",
        "kind",
        "last_big",
        "last_heard",
        "last_ping",
        "one_way",
        "path",
        "pings",
        "proven",
        "quality",
        "questioned",
        "reason",
        "row",
        "since",
        "sizes",
        "state",
        "unanswered",
        "unheard_since",
        "waiting_since",
    )

    def __init__(
        self, path: PathId, kind: PathKind, now: float, config: PathConfig, max_size: int = DEFAULT_MAX_SIZE
    ) -> None:
        self.path, self.kind, self._config = path, kind, config
        self.state, self.since, self.reason = CANDIDATE, now, "not tried yet"
        self.proven = False
        self.keep = False  # an address that the owner gave us: it is not forgotten
        self._rtt = RttEstimate(config)
        self._calm_since = now  # pings sent before were lost, if they were, to what disturbed the path then
        self.last_heard = -inf
        self.last_ping = -inf
        self.last_big = -inf
        self.waiting_since = inf
        self.unheard_since = now  # when in doubt: the peer may have heard nothing that was sent since
        self._proof = -inf  # the last ping that was answered was sent then
        self._asked_at, self._ask_gap = -inf, config.ask_again
        self.unanswered = 0  # pings in a row without a pong
        self.row = 0  # pongs in a row
        self.one_way = 0  # pongs in a row without data, though we send
        self.questioned = inf  # since then: a ping every 80 ms, until one of them is answered
        self.pings: dict[bytes, Ping] = {}
        self.down_until = -inf  # relays: inf while our link is down
        self._gone = config.gone
        self.quality = Quality(config)
        self.sizes = SizeSearch(0 if kind is PathKind.RELAY else max_size, config)
        self._tries: list[float] = []
        self._tries_end = inf
        self._back_off = config.back_off
        self._return_pongs, self._returned_at = config.return_pongs, -inf
        self._failures = 0  # times in a row that asking brought nothing

    @property
    def direct(self) -> bool:
        """Whether no relay is involved."""
        return self.kind is not PathKind.RELAY

    @property
    def rtt(self) -> float | None:
        """Seconds, smoothed; None before the first pong."""
        return self._rtt.value

    @property
    def in_question(self) -> bool:
        """Whether there is a reason to wonder if it works."""
        return self.state is DOUBTED or self.questioned < inf

    @property
    def size(self) -> int:
        """UDP payload in bytes that it is known to carry."""
        return self.sizes.size if self.direct else RELAY_SIZE

    def view(self, now: float, home: bool) -> PathView:
        """What the policy and people see."""
        return PathView(
            self.path,
            self.kind,
            self.state,
            self.rtt,
            self._rtt.samples,
            self.quality.loss,
            self.size,
            None if self.last_heard == -inf else self.last_heard,
            self.reason,
            self.quality.demoted,
            home,
            self.proven,
            now < self.down_until,
        )

    def patience(self) -> float:
        """How long nothing may be heard after a send."""
        limit = self._config.silence(self.rtt)
        return limit * self._config.one_way_patience if self.one_way >= self._config.one_way_after else limit

    # Inputs.

    def ask(self, now: float, delay: float = 0.0, *, once: bool = False) -> None:
        """Find out whether it works: a few well-timed pings from `now + delay`, or one: whoever is pinged unproven may
        be a third party."""
        returning = self.state is DEAD and self.proven and not self._tries
        if now < self.down_until or not (returning or self._go(Event.ASK, now, "asked")):
            return
        start = now + delay
        self._tries = [start + offset for offset in self._config.tries[: 1 if once else None]]
        self._tries_end = self._tries[-1] + self._config.tries_end

    def rested(self, now: float) -> bool:
        """Whether someone's wish is a reason to ask. Not a path that has ever been live: that is asked anyway."""
        gap = min(self._config.session_gap * 2**self._failures, self._config.retry_session)
        return self.state is CANDIDATE or (self.state is DEAD and not self.proven and now >= self.since + gap)

    def ask_again(self, now: float) -> bool:
        """Put the question whether it works, unless that was done a moment ago; whether it will be."""
        config = self._config
        if self.state is LIVE:
            if now - self._asked_at > 2 * config.selected_gap:
                self._ask_gap = config.ask_again
            elif now - self._asked_at < self._ask_gap:
                return False
            if self.questioned < inf:
                return False
            self._asked_at = now
            self._ask_gap = min(2 * self._ask_gap, config.selected_gap)
            self._question(now)
            return True
        if self.last_ping == -inf or now - self.last_ping < config.ask_again:
            return False
        if self.state is PROBING:
            if self._tries:
                return False
            self._tries, self._tries_end = [now], now + config.tries_end
        self.last_ping = -inf
        return True

    def confirmed(self, now: float) -> None:
        """A QUIC handshake has authenticated the peer over it."""
        self.last_heard, self.waiting_since = now, inf
        self.unanswered = 0
        self._alive(now, "a handshake came through")

    def doubt(self, now: float, why: str, deaf: bool = False) -> None:
        """Something speaks against it: ask at once, and let the policy back it with another path."""
        if self._go(Event.DOUBT, now, why):
            self.last_ping, self._ask_gap = -inf, self._config.ask_again
            self.questioned = inf
            # What was heard last answers what was sent a round trip before; when we are not heard, only a pong counts.
            round_trip = self._config.first_rtt if self.rtt is None else 1.25 * self.rtt
            since = self._proof if deaf else min(self.waiting_since, self.last_heard) - round_trip
            self.unheard_since = max(since, now - self._config.replay)
            for ping in self.pings.values():  # padded ones that are lost now say nothing about size
                ping.missed |= ping.size > 0
            self.sizes.pause()

    def lose(self, now: float, why: str, until: float = inf) -> None:
        """The relay is down, or the peer is not there, until `until`."""
        self.down_until = until
        self.unheard_since = now - self._config.replay
        self.pings.clear()
        if not self._go(Event.LOSE, now, why):
            self.reason = why
        self._fell()

    def gone(self, now: float) -> None:
        """The relay says that the peer is not there: it is asked again after a pause, which doubles."""
        self.lose(now, "the peer is not at this relay", now + self._gone)
        self._gone = min(2 * self._gone, self._config.back_off_cap)

    def restore(self, now: float) -> None:
        """The relay is up again, the peer may be there."""
        self.down_until = -inf
        self.proven = False
        self.unanswered = self.row = 0
        self.waiting_since = inf
        self._rtt.restart()
        self.state, self.since, self.reason = CANDIDATE, now, "the relay is up"

    def network_changed(self, now: float) -> None:
        """Interfaces changed: nothing that was measured holds."""
        self.unanswered = self.row = self.one_way = self._failures = 0
        self.waiting_since = inf
        self._rtt.restart()
        self.pings.clear()
        self._back_off = self._config.back_off
        self._return_pongs, self._returned_at = self._config.return_pongs, -inf
        self.quality.forget()
        self.doubt(now, "the network changed")
        self.last_ping = -inf
        self.sizes.search(now)
        self.sizes.pause()

    def pong(self, tx: bytes, now: float) -> bool:
        """A pong came by this path; False when no ping of it asked for that."""
        ping = self.pings.pop(tx, None)
        if ping is None:
            return False
        self.last_heard = now
        if ping.size:
            self.sizes.answered(ping.size, now)
            return True
        if ping.use is Use.FAREWELL:
            self.quality.told()
        if ping.use is Use.TRAIN:
            if not ping.missed:
                self.quality.trained(True, now)
        elif not ping.missed and self._counts(ping):
            self.quality.count(1, 0, now)
        self._proof = max(self._proof, ping.sent_at)
        if not ping.stalled:
            self._rtt.add(now - ping.sent_at, ping.sent_at >= self._calm_since)
        if self.waiting_since != inf:
            self.one_way += 1
            self.waiting_since = inf
        self.unanswered = 0
        self.row += 1
        if ping.sent_at >= self.questioned:
            self.questioned = inf
        if self.direct and self.sizes.small_answered(ping.sent_at, now):
            self.reason = "datagrams beyond 1200 bytes are lost"
        if self.state is not DEAD or not self.proven or self.row >= self._return_pongs:
            self._alive(now, "answers")
        return True

    def sent_ping(self, tx: bytes, size: int, use: Use, now: float) -> None:
        """A ping goes out."""
        self.pings[tx] = Ping(now, now + self._config.silence(self.rtt), size, use)
        if size == 0:
            self.last_ping = now
            if self.state is DEAD and not self._tries:
                self._back_off = min(2 * self._back_off, self._config.back_off_cap)

    def shift(self, late: float, now: float) -> None:
        """We stood still for `late` seconds until now: silence in them was ours."""
        self.waiting_since = min(self.waiting_since + late, now) if self.waiting_since != inf else inf
        self._calm_since = now
        if self.questioned < inf:
            self._question(now)
        for ping in self.pings.values():
            ping.stalled = True
            if not ping.missed:
                ping.deadline += late

    # Time.

    def due(self, now: float, selected: bool, active: bool) -> float:
        """When `poll` has something to do."""
        config = self._config
        times = [self._next_ping(selected, active)]
        for ping in self.pings.values():
            end = ping.sent_at + config.ping_life
            times.append(end if ping.missed else min(ping.deadline, end))
        if self.state is LIVE:
            times += [self.sizes.due, self.quality.farewell_due, self.quality.due if active else inf]
            questioned = self.questioned < inf
            times.append(self.waiting_since + self.patience() * (1.0 if questioned else 0.5))
            times.append(self.questioned + config.silence(self.rtt))
            if selected and active and self.direct:
                times.append(self.last_heard + config.stale_after)
        elif self.state is PROBING:
            times.append(self._tries_end)
        elif self.state is DOUBTED and self.unanswered >= config.dead_after:
            times.append(self.since + config.dead_time)
        if now < self.down_until:
            times.append(self.down_until)
        return min(times)

    def poll(self, now: float, selected: bool, active: bool) -> list[tuple[int, Use]]:
        """Let time pass. The pings to send now: (size, what for)."""
        self._expire(now)
        self._judge(now, selected, active)
        pings: list[tuple[int, Use]] = []
        if now >= self._next_ping(selected, active):
            pings.append((0, Use.LIFE))
            self._tries = [at for at in self._tries if at > now]
        if self.state is LIVE:
            if active and self.quality.poll(now):
                pings.append((0, Use.TRAIN))
            if self.quality.poll_farewell(now):
                pings.append((0, Use.FAREWELL))
            big_lately = now - self.last_big < self._config.size_check_gap
            pings += [(size, Use.LIFE) for size in self.sizes.poll(now, big_lately)]
        return pings

    def _next_ping(self, selected: bool, active: bool) -> float:
        config = self._config
        match self.state:
            case PathState.PROBING:
                return self._tries[0] if self._tries else inf
            case PathState.DOUBTED:
                return self.last_ping + config.suspect_gap
            case PathState.LIVE:
                if self.questioned < inf:
                    return self.last_ping + config.question_gap
                if not active:
                    return inf
                if self._rtt.wanted:
                    return self.last_ping + config.burst_gap
                if self.unanswered:
                    return self.last_ping + config.retry_gap
                return self.last_ping + (config.selected_gap if selected and self.direct else config.other_gap)
            case PathState.DEAD if active and self.down_until == -inf:
                if self.row:
                    return self.last_ping + config.return_gap
                if self._tries:
                    return self._tries[0]
                if self.proven or not self.direct:
                    return self.last_ping + self._back_off
        return inf

    def _judge(self, now: float, selected: bool, active: bool) -> None:
        config = self._config
        if self.state is LIVE:
            patience, stale_at = self.patience(), self.last_heard + config.stale_after
            if self.unanswered >= config.deaf_after:
                self.doubt(now, f"{self.unanswered} pings were not answered", deaf=True)
            elif now >= self.waiting_since + patience:
                self.doubt(now, f"silent for {now - self.waiting_since:.1f} s after a datagram")
            elif selected and active and self.direct and now >= stale_at:
                self.doubt(now, f"silent for {now - self.last_heard:.0f} s")
            elif now >= self.questioned + config.silence(self.rtt):
                self.doubt(now, f"{self._asked(now)} pings were not answered", deaf=True)
            elif self.questioned == inf and (now >= self.waiting_since + 0.5 * patience or self.sizes.wants_small):
                self.sizes.wants_small = False
                self._question(now)
        elif self.state is DOUBTED and self.unanswered >= config.dead_after and now >= self.since + config.dead_time:
            self._go(Event.GIVE_UP, now, f"{self.unanswered} pings were not answered")
            self._fell()
            relapsed = self.direct and now - self._returned_at < config.relapse
            pongs = 2 * self._return_pongs if relapsed else config.return_pongs
            self._return_pongs = min(pongs, config.return_cap)
        elif self.state is PROBING and now >= self._tries_end:
            self._go(Event.GIVE_UP, now, "no answer")
            self._failures = min(self._failures + 1, 10)
            self._fell()

    def _expire(self, now: float) -> None:
        for tx, ping in list(self.pings.items()):
            over = now >= ping.sent_at + self._config.ping_life
            if not ping.missed and (over or now >= ping.deadline):
                ping.missed = True
                self._missed(ping, now)
            if over:
                del self.pings[tx]

    def _missed(self, ping: Ping, now: float) -> None:
        if ping.size:
            self.sizes.missed(ping.size, ping.sent_at, now)
            return
        self.row = 0
        self.unanswered += 1
        if ping.use is Use.TRAIN:
            self.quality.trained(False, now)
        elif self._counts(ping):
            self.quality.count(1, 1, now)

    def _counts(self, ping: Ping) -> bool:
        """Whether the fate of this small ping says something of the path's quality."""
        return self.direct and self.state is LIVE and ping.sent_at >= self._calm_since

    # Changes.

    def _question(self, now: float) -> None:
        self.questioned, self.last_ping = now, -inf

    def _asked(self, now: float) -> int:
        return sum(ping.size == 0 and ping.sent_at >= self.questioned for ping in self.pings.values())

    def _alive(self, now: float, why: str) -> None:
        was = self.state
        if not self._go(Event.ANSWER, now, why):
            return
        if was is DEAD and self.proven:
            self._returned_at = now
        self.proven = True
        self.questioned = inf
        self._calm_since = now
        self._rtt.look_again()
        self._failures = 0
        self._tries, self._tries_end = [], inf
        self._back_off = self._config.back_off
        self._gone = self._config.gone
        if not self.direct:
            return
        if was is DOUBTED:
            self.sizes.resume(now)
        else:
            self.quality.forget()
            self.sizes.search(now)

    def _fell(self) -> None:
        self.quality.forget()
        self.sizes.pause()
        self.questioned = inf
        self.waiting_since = inf
        self.row = self.one_way = 0
        self._tries, self._tries_end = [], inf
        self._back_off = self._config.back_off

    def _go(self, event: Event, now: float, why: str) -> bool:
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            return False
        self.state, self.since, self.reason = state, now, why
        return True
