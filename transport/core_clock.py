"""The time that a QUIC library is told, which is not quite the loop's. Pure; called by qh3_engine.py alone.

qh3's core knows time only from the `now` of every call, and some of what it does with it cannot be set: it forgets
its congestion window after two seconds without an acknowledgement, takes an outage that several probes fell into for
persistent congestion (two packets per round trip after), and measures round trips across all that. So this clock

- hardly moves while nothing is in flight: an idle connection is as good as it was (`LULL`);
- hardly moves while a path is silent: from the first probe that went unanswered (`stall`) to whatever comes next
  (`receive`), when it makes up for the time since the last probe, so that its round trip is measured as it was, but
  for no more than an answer takes: what comes may be no answer.

For a path that begins anew its two seconds are made to pass (`leap`). Between those it runs as the loop's clock does,
and it never goes back. Seconds everywhere.
"""

from __future__ import annotations

# With nothing in flight no time passes beyond this, from one call to the next: long enough for the pacer to refill.
LULL = 0.1
# How much of an outage the core sees. Persistent congestion are losses sent further apart than three probe intervals;
# the patience before a stall takes all of that but one round trip and 28 ms, so ten seconds must be less.
STALL_RATE = 1 / 1024


class CoreClock:
    """Maps the loop's monotonic time to the core's, which starts as the same."""

    __slots__ = ("_core", "_probe_core", "_probe_real", "_real", "stalled")

    def __init__(self) -> None:
        self._real = self._core = self._probe_real = self._probe_core = -1.0
        self.stalled = False

    def tick(self, now: float, in_flight: int) -> float:
        """The core's time at a send or a timer. `in_flight`: bytes not yet acknowledged."""
        gap = now - self._real
        if gap > 0:
            if self._real < 0:
                self._core, gap = now, 0.0
            elif self.stalled:
                gap *= STALL_RATE
            elif gap > LULL and not in_flight:
                gap = LULL
            self._real = now
            self._core += gap
        return self._core

    def receive(self, now: float, in_flight: int, patience: float) -> float:
        """The core's time as something comes in. `patience`: seconds in which a probe is answered, if it is."""
        time = self.tick(now, in_flight)
        if self.stalled:
            self._core = time = max(time, self._probe_core + min(now - self._probe_real, patience))
        return time

    def leap(self, seconds: float) -> None:
        """So much time passes at once."""
        self._core += seconds

    def skip(self, now: float) -> None:
        """The time until now did not happen: nothing but the first flight was sent, and it is sent again."""
        self._real = max(self._real, now)

    def stall(self) -> None:
        """A probe goes out now, and what is in flight has gone unanswered for longer than it should have."""
        self.stalled = True
        self._probe_real, self._probe_core = self._real, self._core

    def resume(self) -> None:
        """An answer came."""
        self.stalled = False

    def when(self, deadline: float, *, paced: bool = False) -> float:
        """The loop's time of a deadline of the core. `paced`: the pacer waits for it, which sees the clock move."""
        wait = max(0.0, deadline - self._core)
        return self._real + (wait / STALL_RATE if paced and self.stalled else wait)
