"""One attempt at some pairs of a call, and the attempts that were made in its place.

Pure. The states and how they follow from each other are told in `call.py`, which alone makes slots and changes them
(their places in a pipeline: `pipeline.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from swarmnode.dispatch.cutting import Pairs
from swarmnode.dispatch.replicas import LOCAL, Candidate


class SlotState(Enum):
    """What has become of an attempt."""

    RUNNING = auto()
    WAITING = auto()
    VACANT = auto()
    CHECKING = auto()
    ANSWERED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class Slot:
    """See the module. `rescue` covers exactly the same pairs, by workers that are not among `tried`."""

    attempt: int
    candidate: Candidate
    pairs: Pairs
    tried: frozenset[int]  # the workers of this line of slots, its own included
    state: SlotState = SlotState.RUNNING
    due: float = math.inf  # RUNNING: it is late; WAITING, VACANT: asks again; CHECKING: counts anyway
    retry_s: float = 0.0
    rescue: list[Slot] | None = None
    cancelled: bool = False
    was_sent: bool = False
    was_late: bool = False
    cell: int = -1  # the range of tokens that it is a part of
    ahead: Slot | None = field(default=None, repr=False)  # of the same worker, runs too, to be computed first
    behind: Slot | None = field(default=None, repr=False)

    @property
    def waits_in_line(self) -> bool:
        """Whether a slot of the same worker comes first, so that this one cannot have begun."""
        return self.ahead is not None and not self.ahead.was_late

    @property
    def computes_here(self) -> bool:
        """Whether this node's own engine is at it."""
        return self.candidate.worker == LOCAL and self.state is SlotState.RUNNING and not self.cancelled

    def rests_on(self, worker: int) -> bool:
        """Whether it stands on an answer of this worker, or waits for one."""
        return self.candidate.worker == worker and self.state is not SlotState.FAILED and not self.cancelled

    @property
    def settled(self) -> bool:
        """Whether each of its pairs is answered, here or in its rescue."""
        if self.state is SlotState.ANSWERED:
            return True
        return self.rescue is not None and all(slot.settled for slot in self.rescue)

    @property
    def dead(self) -> bool:
        """Whether some of its pairs will have no answer."""
        if self.state is not SlotState.FAILED:
            return False
        return self.rescue is None or any(slot.dead for slot in self.rescue)

    def walk(self) -> Iterator[Slot]:
        """This slot and all that were made in its place."""
        yield self
        for slot in self.rescue or ():
            yield from slot.walk()

    def line(self) -> Iterator[Slot]:
        """This slot, and those behind it: all of them run."""
        slot: Slot | None = self
        while slot is not None:
            yield slot
            slot = slot.behind

    def winners(self) -> Iterator[int]:
        """The attempts whose answers cover each of its pairs once; of a settled slot."""
        if self.state is SlotState.ANSWERED:
            yield self.attempt
        else:
            for slot in self.rescue or ():
                yield from slot.winners()


def cells_of(slots: Iterable[Slot]) -> list[tuple[int, ...]]:
    """Return the attempts that make up each range of tokens, in the order in which they begin."""
    cells: dict[int, tuple[int, ...]] = {}
    for slot in slots:
        if slot.cell >= 0:
            cells[slot.cell] = (*cells.get(slot.cell, ()), slot.attempt)
    return list(cells.values())
