"""Whether a worker that is at a large call is still there: a failure detector by pings. Pure.

A large call may rightly take seconds, and a process that was killed says nothing. So while a worker has one and nothing
has come from it for QUIET_S, its connection is pinged: a living node acknowledges that, whatever its engine is doing.
Where nothing comes back in time, what the worker was sent goes to others, as if it were late. The deadlines of
`health.py` are for workers that live and are slow. Calls of decode size need no ping: their deadlines are near enough.

Owned by `watch.py`, one per worker that had a large call.

`unheard` is another question, which concerns who plans: whether a worker is so long silent that nothing should count on
it. A connection ends by itself only after the idle time-out, and what others gave up meanwhile, because the dead one
holds it too, is then with nobody. Asked by `remote_worker.py`.
"""

from __future__ import annotations

import math
from enum import Enum, auto

from swarmnode.dispatch.health import FAR_FACTOR

QUIET_S = 0.1
MOST_PATIENT = 8  # times as long at most, for a worker that has lived after all
FORGIVEN = 16  # pings answered in time, after which it is given half of that
GONE_S = 1.0  # after a ping: a machine that swaps or collects its garbage stands still for less
IDLE_GONE_S = 4.5  # one and a half of the transport's keep-alive intervals: one of its pings has brought nothing


def unheard(now: float, heard_at: float, pinged_at: float, rtt_s: float) -> bool:
    """Say whether a worker acknowledges no ping, so that it is most likely gone. Seconds of one clock.

    `heard_at`: when anything last came from it. `pinged_at`: when it was pinged for a deadline that it let pass; inf
    where it has let none pass. The transport pings all that are quiet.
    """
    if heard_at <= pinged_at < math.inf:
        return now - pinged_at > GONE_S + 3 * rtt_s
    return now - heard_at > IDLE_GONE_S + 3 * rtt_s


class Sign(Enum):
    """What to make of a worker that is waited for."""

    NONE_NEEDED = auto()
    ASK = auto()  # ping it
    SILENT = auto()  # once, until it is heard again


class FailureDetector:
    """Judges one worker. Pure: times in seconds of one clock.

    A ping may take FAR_FACTOR × the round trip + `slack_s`: so much that one which is lost can be sent again. A worker
    that was called silent and is heard again was only busy: it is given twice as long, up to MOST_PATIENT times, until
    it has answered FORGIVEN pings in time.
    """

    def __init__(self, slack_s: float) -> None:
        self._slack_s = slack_s
        self._asked_at = math.inf
        self._silent = False
        self._patience = 1
        self._in_time = 0

    def look(self, now: float, heard_at: float, rtt_s: float) -> Sign:
        """Say what to make of it; `heard_at`: when anything last came from the worker. For ASK it is pinged now."""
        if heard_at >= self._asked_at:
            self._asked_at = math.inf
            if self._silent:
                self._silent, self._patience, self._in_time = False, min(2 * self._patience, MOST_PATIENT), 0
            else:
                self._in_time += 1
                if self._in_time == FORGIVEN:
                    self._patience, self._in_time = max(1, self._patience // 2), 0
        if self._asked_at == math.inf:
            if now - heard_at < QUIET_S:
                return Sign.NONE_NEEDED
            self._asked_at = now
            return Sign.ASK
        if self._silent or now - self._asked_at < FAR_FACTOR * rtt_s + self._slack_s * self._patience:
            return Sign.NONE_NEEDED
        self._silent = True
        return Sign.SILENT

    def rest(self) -> None:
        """Nothing is waited for: what was asked before says nothing when something is again."""
        if not self._silent:
            self._asked_at = math.inf
