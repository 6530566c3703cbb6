"""When to try again to reach a relay. PURE: the caller tells what happened and `now`; `due` is the next try.

Not the connecting itself. Called by relay_link.

what happened            next try
first start              now
a session was lost       after a random part of the spread that the relay told (a thousand clients of a crashed relay
                         must not come back in the same second), or at once if the loss is ours alone (`own`)
a try failed             after a random half to whole of a back-off that doubles from 0.1 s to 16 s
RESTARTING               at a random time between the two that the relay named
REFUSED                  not before the time that the relay named, and not before the back-off
the network changed      now, and the back-off starts anew; only what the relay asked for (REFUSED, RESTARTING) holds

A session that ended within STABLE_SECONDS does not reset the back-off: a relay that takes logins and closes at once
is not asked ten times a second. But one that stood for SHORT_SECONDS bounds it to a share of its life: a front that
cuts every few seconds must not keep us away for longer and longer. Times that a relay names are bounded here, since it
may be hostile or wrong.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_DELAY = 0.1
MAX_DELAY = 16.0
STABLE_SECONDS = 10.0
SHORT_SECONDS = 2.0
LIFE_SHARE = 0.1  # of the time that a session stood: the most that is lost by backing off after it
MAX_SPREAD = 60.0  # what a relay with thousands of clients needs to come back from a crash
MAX_RESTART = 120.0
MAX_REFUSAL = 3600.0

_RANDOM_BYTES = 8


class Reconnect:
    """The schedule of one relay link. Times in seconds; `now` is monotonic."""

    def __init__(self, random_bytes: Callable[[int], bytes], now: float) -> None:
        self._random_bytes = random_bytes
        self._backoff = FIRST_DELAY
        self._connected_at = now
        self._not_before = now  # what the relay asked for; a change of network does not move it
        self.due = now

    def connected(self, now: float) -> None:
        """A login succeeded."""
        self._connected_at = self._not_before = now

    def lost(self, spread: float, now: float, own: bool = False) -> None:
        """A session ended without a word. `own`: our network changed, the relay's other clients are still there."""
        stood = now - self._connected_at
        if stood < STABLE_SECONDS:
            if stood >= SHORT_SECONDS:
                self._backoff = min(self._backoff, stood * LIFE_SHARE)
            self.failed(now)
        else:
            self._backoff = FIRST_DELAY
            self.due = now
        if not own:
            self.due = max(self.due, now + self._uniform(0.0, min(spread, MAX_SPREAD)))

    def failed(self, now: float) -> None:
        """A try to connect or to log in failed."""
        self.due = max(now + self._uniform(self._backoff / 2, self._backoff), self._not_before)
        self._backoff = min(self._backoff * 2, MAX_DELAY)

    def restarting(self, shortest: float, longest: float, now: float) -> None:
        """The relay goes away and named when to come back, in seconds from now."""
        shortest = min(max(shortest, 0.0), MAX_RESTART)
        self._backoff = FIRST_DELAY
        self._not_before = self.due = now + self._uniform(shortest, min(max(longest, shortest), MAX_RESTART))

    def refused(self, retry_after: float, now: float) -> None:
        """The relay said no and how long it wants to be left alone, in seconds."""
        self._not_before = now + min(retry_after, MAX_REFUSAL)
        self.failed(now)

    def network_changed(self, now: float) -> None:
        """What failed before says nothing about the network we have now."""
        self._backoff = FIRST_DELAY
        self.due = max(now, self._not_before)

    def _uniform(self, low: float, high: float) -> float:
        share = int.from_bytes(self._random_bytes(_RANDOM_BYTES)) / (1 << 8 * _RANDOM_BYTES)
        return low + (high - low) * share
