"""Whether a relay is still there: when to ping it, and when it is dead. PURE: times are arguments, pings are returned.

TCP says nothing for hours when packets go nowhere. What counts here:

ping                 when                                               an answer is due within
regular              twice soon after the login, then every `ping`      pong_timeout
urgent               something was sent, nothing heard for `silence`    urgent_timeout
kick                 our network changed                                kick_timeout

Any bytes that come, and any that the socket takes after it was full, are a sign of life and move the deadline, but an
answer is never later than MAX_FACTOR pong_timeouts. A socket that is full and takes nothing for write_timeout is dead
too. An urgent ping tightens a regular one that is out; what is out and tighter stays. Called by relay_session.
"""

from __future__ import annotations

from dataclasses import dataclass

from transport.proto.relay_frames import ECHO_BYTES

PING_SECONDS = (5.0, 60.0)  # what a relay may ask for: beyond it, NATs and CDNs (100 s) forget the connection
FIRST_PINGS = (1.0, 2.0)  # seconds after login, and after that one: a round trip needs more than one sample
MAX_FACTOR = 3
RTT_GAIN = 1 / 4  # one sample in 20 s: heavier than TCP's 1/8


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Seconds; see the table."""

    pong_timeout: float = 5.0
    silence: float = 1.0
    urgent_timeout: float = 1.5
    kick_timeout: float = 2.0
    write_timeout: float = 10.0


class RelayWatch:
    """Of one session, from its welcome on. `look` at `due`; later is allowed, earlier does nothing.

    rtt: seconds, smoothed; None before the first answer. own: a ping is out because our network changed.
    """

    def __init__(self, times: WatchTimes, now: float) -> None:
        self._times = times
        self._interval = PING_SECONDS[1]
        self._first = list(FIRST_PINGS)
        self._next_ping = now
        self._pings: dict[bytes, float] = {}  # echo → sent at; not empty: an answer is due
        self._number = 0
        self._allowance = 0.0
        self._moved_at = now  # the last sign of life, or the last ping
        self._full = False
        self._unheard_since: float | None = None  # the first send after which nothing was heard
        self.rtt: float | None = None
        self.own = False

    def welcomed(self, ping_seconds: float, now: float) -> bytes:
        """The relay let us in and wants a ping so often; returns the echo of the first."""
        low, high = PING_SECONDS
        self._interval = min(max(ping_seconds, low), high)
        return self._ping(self._times.pong_timeout, now)

    def heard(self, now: float) -> None:
        """Bytes came."""
        self._moved_at = now
        self._unheard_since = None

    def sent(self, now: float) -> bool:
        """Something went out that is answered as a rule. True when `due` may be earlier now."""
        if self._unheard_since is not None:
            return False
        self._unheard_since = now
        return True

    def full(self, now: float) -> None:
        """The socket takes no more."""
        self._full, self._moved_at = True, now

    def took(self, now: float) -> None:
        """The socket that was full took everything."""
        self._full, self._moved_at = False, now

    def kick(self, now: float) -> bytes | None:
        """Our network changed: the echo of a ping to send, None when an answer is due as soon already."""
        self.own, self.rtt = True, None
        return self._tighter(self._times.kick_timeout, now)

    def answered(self, echo: bytes, now: float) -> bool:
        """A pong came; False when it answers nothing, or something that a later pong has answered."""
        sent_at = self._pings.get(echo)
        if sent_at is None:
            return False
        self._pings.clear()
        self.own = False
        sample = now - sent_at
        self.rtt = sample if self.rtt is None else self.rtt + RTT_GAIN * (sample - self.rtt)
        return True

    def verdict(self, now: float) -> str:
        """Why the relay is dead; "" while it is not."""
        if self._full and now >= self._moved_at + self._times.write_timeout:
            return f"the relay took nothing for {self._times.write_timeout:g} s"
        if self._pings and now >= self._answer_due:
            return f"the relay did not answer within {now - self._first_sent:.1f} s"
        return ""

    def look(self, now: float) -> bytes | None:
        """The echo of a ping that is to be sent now."""
        if self._unheard_since is not None and now >= self._unheard_since + self._times.silence:
            return self._tighter(self._times.urgent_timeout, now)
        if not self._pings and now >= self._next_ping:
            return self._ping(self._times.pong_timeout, now)
        return None

    @property
    def due(self) -> float:
        """When `verdict` and `look` may have something to say."""
        due = self._answer_due if self._pings else self._next_ping
        urgent = self._times.urgent_timeout
        if self._unheard_since is not None and not (self._pings and self._allowance <= urgent):
            due = min(due, self._unheard_since + self._times.silence)
        if self._full:
            due = min(due, self._moved_at + self._times.write_timeout)
        return due

    @property
    def _first_sent(self) -> float:
        return next(iter(self._pings.values()))

    @property
    def _answer_due(self) -> float:
        latest = self._first_sent + MAX_FACTOR * self._times.pong_timeout
        return min(self._moved_at + self._allowance, latest)

    def _tighter(self, allowance: float, now: float) -> bytes | None:
        if self._pings and self._allowance <= allowance:
            return None
        return self._ping(allowance, now)

    def _ping(self, allowance: float, now: float) -> bytes:
        self._allowance = allowance
        self._number += 1
        echo = self._number.to_bytes(ECHO_BYTES)
        self._pings[echo] = self._moved_at = now
        self._next_ping = now + (self._first.pop(0) if self._first else self._interval)
        return echo
