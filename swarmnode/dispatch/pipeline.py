"""The slots of a large call that one worker has at once and computes in turn: whose deadline runs.

Pure. What stands behind another slot there is not late before it could begin: its deadline runs from when the slots
before it were answered, or given up. Where the first is late, all behind it go to others with it: they wait for the
same silence. Owned by `call.py`, one per call; calls of decode size never enter.
"""

from __future__ import annotations

import math

from swarmnode.dispatch.call_actions import Swarm
from swarmnode.dispatch.call_slot import Slot


class Pipelines:
    """See the module. `queue_s` is CallPolicy's: what has not left this node may wait for so long."""

    def __init__(self, swarm: Swarm, queue_s: float) -> None:
        self._swarm, self._queue_s = swarm, queue_s
        self._last: dict[int, Slot] = {}  # of each worker's line

    def enter(self, slot: Slot) -> None:
        """Put a slot behind all that its worker has of this call."""
        slot.ahead = self._last.get(slot.candidate.worker)
        if slot.ahead is not None:
            slot.ahead.behind = slot
        self._last[slot.candidate.worker] = slot

    def leave(self, slot: Slot, now: float) -> None:
        """Take a slot out of its line. If it was the first there, the deadline of the one behind it begins."""
        ahead, behind = slot.ahead, slot.behind
        slot.ahead = slot.behind = None
        if ahead is not None:
            ahead.behind = behind
        if behind is not None:
            behind.ahead = ahead
        elif self._last.get(slot.candidate.worker) is slot:
            del self._last[slot.candidate.worker]
            if ahead is not None:
                self._last[slot.candidate.worker] = ahead
        if behind is None or ahead is not None or behind.rescue is not None:
            return
        behind.was_late = False
        for other in behind.line():
            if other.rescue is None and other.waits_in_line:  # again, where the one before them was late
                other.was_late, other.due = False, math.inf
        if behind.was_sent:
            behind.due = now + self._swarm.late_after(behind.candidate.worker, len(behind.pairs), behind.attempt)
        else:
            behind.due = now + self._queue_s
