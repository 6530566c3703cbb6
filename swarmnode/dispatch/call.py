"""One layer's call to the experts, from the choice of workers to the last answer: a state machine.

Pure: no clock, no network. Events go in with `now`, actions come out. `client.py` owns one `Call` per call of
the decode thread, carries its actions out and keeps the rows; here a row is never looked at, only which pairs
are accounted for.

The pairs of a call are cut into slots. A slot is one attempt by one worker (or by the local engine) to
compute its pairs:

    RUNNING --answered--> ANSWERED
    RUNNING --failed, refused, worker lost--> FAILED      its pairs go to other workers at once
    RUNNING --late--> RUNNING, hedged                     its pairs go to other workers too; the first answer counts
    RUNNING --refused as overloaded, no other holder--> WAITING --time--> RUNNING      asks the same worker again
    VACANT --somebody holds its experts--> FAILED         its pairs go there
    RUNNING --answered, to be checked--> CHECKING --found right, or time--> ANSWERED

"Go to other workers" makes the slot's rescue: slots of their own which cover exactly its pairs, and never ask
a worker again that this line of slots has tried. So every line gets shorter by a worker at each step and must
end. A slot is settled when it is answered or all slots of its rescue are settled, dead when it failed and its
rescue is missing or dead. All slots settled finishes the call; a dead one fails it. The answers that make the
result are then exactly one set of slots that covers each pair once: a loser's answer is never added in.

A large call is cut (`cutting.py`), and one worker then has several of its slots at once, which it computes in turn.
What stands behind another slot there is not late before it could begin: its deadline runs from when the slots before
it were answered, or given up. Where the first is late, all behind it go to others with it: they wait for the same
silence. What has not left this node waits for what was sent before, of any call: it is not late, and the call is not
given up, while that worker answers.
Slots begin range by range, all workers' first pieces before any second one, and count in that order, so that the sum of
a token has the same order whatever comes first; `cells` tells which attempts make up a range of tokens.

Where nobody holds some of the experts the call fails, or, if the policy is `patient`, stands VACANT for those pairs
until somebody does: a member that restarts brings its experts back, and what is lost is given to others.

A worker found to answer wrongly is distrusted: whatever stands on an answer of it, or waits for one, is begun anew
without it, also where the worker is gone by then. An answer alone that was found wrong is rejected: the same for its
pairs, also where it had counted meanwhile because its check took long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from swarmnode.dispatch.cutting import Pairs, Shared, by_experts, cut_pairs
from swarmnode.dispatch.health import DECODE_PAIRS
from swarmnode.dispatch.hello import experts_of, mask_of
from swarmnode.dispatch.replicas import LOCAL, Candidate, Plan, plan
from swarmnode.errors import CallFailed, DispatchError, NobodyHolds


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """When to give up, and how to spread. Seconds."""

    # Without any answer: longer than a path change or a relay reconnect takes. Not while this node's own engine
    # computes for the call: it says itself when it fails, and nobody else is to blame for a slow disk.
    give_up_s: float = 30.0
    # In this node's own queue for a worker that answers nothing meanwhile, before another one is asked.
    queue_s: float = 1.0
    overloaded_retry_s: float = 0.02  # doubled each time; a queue of a few calls drains in this
    overloaded_retry_max_s: float = 1.0
    spread_pairs: int = 512  # from here on compute outweighs the bytes that fewer workers save
    local_first: bool = False
    pieces: bool = True  # large calls are cut so that sending, computing and returning overlap
    patient: bool = False  # experts that nobody holds are waited for: in a swarm somebody will, soon
    look_s: float = 0.1  # between two looks whether somebody holds what nobody else held, or what one who is late holds


@dataclass(frozen=True, slots=True)
class Send:
    """Have `worker` compute these pairs; report `sent` once they are on their way."""

    attempt: int
    worker: int
    pairs: Pairs


@dataclass(frozen=True, slots=True)
class RunLocal:
    """Have this node's own engine compute these pairs."""

    attempt: int
    pairs: Pairs


@dataclass(frozen=True, slots=True)
class Cancel:
    """The answer to this attempt is not needed any more."""

    attempt: int
    worker: int


@dataclass(frozen=True, slots=True)
class Late:
    """`worker` let its deadline pass."""

    attempt: int
    worker: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Everything is there: the rows of these attempts, in this order, make the result."""

    attempts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """The call cannot be completed."""

    error: DispatchError


Action = Send | RunLocal | Cancel | Late | Finish | Fail


class Swarm(Protocol):
    """What a call may ask about the workers at the moment it chooses among them."""

    def candidates(self) -> Sequence[Candidate]:
        """Return the workers that can be called now."""

    def local(self) -> Candidate | None:
        """Return this node's own engine, if it has one for this site."""

    def late_after(self, worker: int, n_pairs: int, attempt: int) -> float:
        """Return how many seconds the answer to an attempt may take from now before it counts as late."""

    def heard(self, worker: int) -> float:
        """Return when a worker last gave a good answer, to whatever call; -inf before it did."""

    def answering_until(self, worker: int) -> float:
        """Return until when a worker is not late with what it has been sent, so that the rest waits rightly."""

    def cut(self, loads: Sequence[Shared], units: int, most: int) -> Sequence[int]:
        """Return the units of each piece of a large call, in order: none more than `most`, in all `units`.

        Units are tokens where a worker adds up its rows (see `Call.per_token`), else pairs. `loads` is who gets what.
        """


class _State(Enum):
    RUNNING = auto()
    WAITING = auto()
    VACANT = auto()
    CHECKING = auto()
    ANSWERED = auto()
    FAILED = auto()


_NOBODY = Candidate(-2, "this swarm", 0)


@dataclass(slots=True, eq=False)
class _Slot:
    attempt: int
    candidate: Candidate
    pairs: Pairs
    tried: frozenset[int]  # the workers of this line of slots, its own included
    state: _State = _State.RUNNING
    due: float = math.inf  # RUNNING: it is late; WAITING, VACANT: asks again; CHECKING: counts anyway
    retry_s: float = 0.0
    rescue: list[_Slot] | None = None
    cancelled: bool = False
    was_sent: bool = False
    was_late: bool = False
    cell: int = -1  # the range of tokens that it is a part of
    ahead: _Slot | None = field(default=None, repr=False)  # of the same worker, runs too, to be computed first
    behind: _Slot | None = field(default=None, repr=False)

    @property
    def waits_in_line(self) -> bool:
        """Whether a slot of the same worker comes first, so that this one cannot have begun."""
        return self.ahead is not None and not self.ahead.was_late

    @property
    def computes_here(self) -> bool:
        return self.state is _State.RUNNING and self.candidate.worker == LOCAL and not self.cancelled

    def rests_on(self, worker: int) -> bool:
        return self.candidate.worker == worker and self.state is not _State.FAILED and not self.cancelled

    @property
    def settled(self) -> bool:
        if self.state is _State.ANSWERED:
            return True
        return self.rescue is not None and all(slot.settled for slot in self.rescue)

    @property
    def dead(self) -> bool:
        if self.state is not _State.FAILED:
            return False
        return self.rescue is None or any(slot.dead for slot in self.rescue)

    def walk(self) -> Iterator[_Slot]:
        yield self
        for slot in self.rescue or ():
            yield from slot.walk()

    def line(self) -> Iterator[_Slot]:
        """This slot, and those behind it: all of them run."""
        slot: _Slot | None = self
        while slot is not None:
            yield slot
            slot = slot.behind

    def winners(self) -> Iterator[int]:
        if self.state is _State.ANSWERED:
            yield self.attempt
        else:
            for slot in self.rescue or ():
                yield from slot.winners()


@dataclass(slots=True, eq=False)
class Call:
    """See the module. `experts[i]` is the expert of pair i; `next_attempt` gives numbers that are never reused.

    `kept` is the bitmap of the experts that this node's own engine computes before anybody is asked. `per_token` is how
    many pairs a token has, where each worker adds up its own and a call may be cut between tokens; else 0. `cells` are
    the attempts that make up each range of tokens, in the order in which they are added; only where start has cut.
    """

    layer: int
    experts: Sequence[int]
    n_expert: int
    swarm: Swarm
    next_attempt: Callable[[], int]
    policy: CallPolicy = field(default_factory=CallPolicy)
    kept: int = 0
    per_token: int = 0
    done: bool = False
    cells: list[tuple[int, ...]] = field(default_factory=list)
    _slots: list[_Slot] = field(default_factory=list)  # those that together cover every pair once
    _by_attempt: dict[int, _Slot] = field(default_factory=dict)
    _reasons: dict[str, None] = field(default_factory=dict)  # an ordered set
    _last: dict[int, _Slot] = field(default_factory=dict)  # of each worker's line, where the call is large
    _progress_at: float = 0.0
    _experts: NDArray[np.int32] | None = None

    def start(self, now: float) -> list[Action]:
        """Choose the workers for all pairs."""
        self._progress_at = now
        everything: Pairs = range(len(self.experts))
        if len(everything) > DECODE_PAIRS:
            everything = np.arange(len(self.experts))
        choice = self._plan(everything, frozenset())
        actions: list[Action] = []
        if choice.uncovered:
            if not self.policy.patient:
                self.done = True
                return [Fail(NobodyHolds(self.layer, experts_of(choice.uncovered)))]
            missing = [pair for pair in everything if choice.uncovered >> self.experts[pair] & 1]
            everything = [pair for pair in everything if not choice.uncovered >> self.experts[pair] & 1]
        self._slots = self._open(choice, everything, frozenset(), now, actions)
        if len(everything) > DECODE_PAIRS:
            self.cells = self._cells_of(self._slots)
        if choice.uncovered:
            self._slots.append(self._vacancy(missing, now))
        if not self._slots:
            self.done = True
            actions.append(Finish(()))
        return actions

    def sent(self, attempt: int, now: float) -> None:
        """Note that the pairs of an attempt left for their worker: its deadline runs from here."""
        slot = self._by_attempt.get(attempt)
        if slot is None or slot.state is not _State.RUNNING or slot.cancelled:
            return
        slot.was_sent = True
        if slot.waits_in_line:
            slot.due = math.inf
        elif slot.rescue is None:
            slot.due = now + self.swarm.late_after(slot.candidate.worker, len(slot.pairs), attempt)

    def wants(self, attempt: int) -> bool:
        """Whether an attempt is still to be sent."""
        slot = self._open_slot(attempt)
        return slot is not None and slot.state is _State.RUNNING and not slot.cancelled

    def answered(self, attempt: int, now: float) -> list[Action]:
        """Take a good answer; the caller keeps its rows until Finish says whether they count."""
        slot = self._open_slot(attempt)
        if slot is None or slot.state not in (_State.RUNNING, _State.CHECKING) or slot.cancelled:
            return []
        self._progress_at = now
        slot.state, slot.due = _State.ANSWERED, math.inf
        self._moved_on(slot, now)
        return self._settle([], now)

    def checking(self, attempt: int, now: float, until: float) -> list[Action]:
        """Take an answer that does not count before `answered` is called for it again, or `until` has come."""
        slot = self._open_slot(attempt)
        if slot is not None and slot.state in (_State.RUNNING, _State.CHECKING) and not slot.cancelled:
            self._progress_at = now
            slot.state, slot.due = _State.CHECKING, until
            self._moved_on(slot, now)
        return []

    def distrust(self, worker: int, why: str, now: float) -> list[Action]:
        """Do without a worker whose answers are wrong: also without those that it has given to this call."""
        return self._begin_anew(lambda slot: slot.rests_on(worker), frozenset({worker}), why, now)

    def reject(self, attempt: int, why: str, now: float) -> list[Action]:
        """Do without one answer, whether it counts by now or not."""
        slot = self._open_slot(attempt)
        if slot is None or slot.state is not _State.ANSWERED:
            return self.failed(attempt, why, now)
        return self._begin_anew(lambda other: other is slot, slot.tried, why, now)

    def _begin_anew(self, is_out: Callable[[_Slot], bool], tried: frozenset[int], why: str, now: float) -> list[Action]:
        """Give the pairs of those slots that contain one which `is_out` to others than `tried`."""
        if self.done:
            return []
        actions: list[Action] = []
        slots: list[_Slot] = []
        for root in self._slots:
            if not any(is_out(slot) for slot in root.walk()):
                slots.append(root)
                continue
            for slot in root.walk():
                if is_out(slot):
                    self._note(slot, why)
                self._cancel(slot, now, actions)
            choice = self._plan(root.pairs, tried)
            if not choice.uncovered:
                slots += self._open(choice, root.pairs, tried, now, actions)
            elif self.policy.patient:
                slots.append(self._vacancy(root.pairs, now))
            else:
                return self._end(actions, self._call_failed([root]))
        self._slots = slots
        return self._settle(actions, now)

    def failed(self, attempt: int, why: str, now: float, *, overloaded: bool = False) -> list[Action]:
        """Note that an attempt will have no answer; `overloaded` says that asking later may help."""
        slot = self._open_slot(attempt)
        if slot is None or slot.state not in (_State.RUNNING, _State.CHECKING):
            return []
        if slot.candidate.worker == LOCAL:
            self._progress_at = now  # nobody was waited for in vain meanwhile
        actions: list[Action] = []
        self._fail(slot, why, now, actions, overloaded=overloaded)
        return self._settle(actions, now)

    def worker_lost(self, worker: int, why: str, now: float) -> list[Action]:
        """Note that a worker is gone with all that it was asked. What it has answered, checked or not, stays."""
        actions: list[Action] = []
        for slot in list(self._by_attempt.values()):
            if slot.candidate.worker == worker and slot.state in (_State.RUNNING, _State.WAITING):
                self._fail(slot, why, now, actions)
        return self._settle(actions, now)

    def tick(self, now: float) -> list[Action]:
        """Let time pass: late attempts are hedged, overloaded workers asked again, silence ends the call."""
        actions: list[Action] = []
        if now >= self._give_up_at():
            self._progress_at = max(self._progress_at, self._heard())
        if now >= self._give_up_at():
            for slot in list(self._by_attempt.values()):
                if slot.state in (_State.RUNNING, _State.WAITING):
                    self._note(slot, f"no answer in {self.policy.give_up_s:g} s")
                elif slot.state is _State.VACANT and not slot.cancelled:
                    self._note(slot, f"nobody holds what is wanted for {self.policy.give_up_s:g} s")
            unsettled = [slot for slot in self._slots if not slot.settled]
            return self._end(actions, self._call_failed(unsettled))
        for slot in list(self._by_attempt.values()):
            if now < slot.due or slot.cancelled:
                continue
            slot.due = math.inf
            if slot.state is _State.WAITING:
                self._renew(slot, now, actions)
            elif slot.state is _State.VACANT:
                self._fill(slot, now, actions)
            elif slot.state is _State.CHECKING:
                slot.state = _State.ANSWERED
            elif slot.state is _State.RUNNING:
                if not slot.was_sent and (until := self.swarm.answering_until(slot.candidate.worker)) > now:
                    slot.due = until
                    continue
                if slot.was_sent and not slot.was_late:  # what waits in this node's queue is not the worker's fault
                    slot.was_late = True
                    actions.append(Late(slot.attempt, slot.candidate.worker))
                for late in slot.line():
                    late.was_late, late.due = late.was_late or late.was_sent, math.inf
                    if not self._rescue(late, now, actions):
                        late.due = now + self.policy.look_s  # somebody who holds them may have come by then
        return self._settle(actions, now)

    def next_due(self) -> float:
        """Return the time of the next tick that can change anything."""
        if self.done:
            return math.inf
        first = min((slot.due for slot in self._by_attempt.values()), default=math.inf)
        return min(first, self._give_up_at())

    def cancel(self) -> list[Action]:
        """End the call without a result."""
        return self._end([], None)

    # How slots come and go.

    def _give_up_at(self) -> float:
        if any(slot.computes_here for slot in self._by_attempt.values()):
            return math.inf
        return self._progress_at + self.policy.give_up_s

    def _heard(self) -> float:
        """When a worker last answered anything for which some of this call still waits here, unsent.

        Not one that is late with what it has of this call: others' answers do not excuse that.
        """
        running = [s for s in self._by_attempt.values() if s.state is _State.RUNNING and not s.cancelled]
        late = {slot.candidate.worker for slot in running if slot.was_late}
        waited_for = {slot.candidate.worker for slot in running if not slot.was_sent} - late - {LOCAL}
        return max(map(self.swarm.heard, waited_for), default=-math.inf)

    def _open_slot(self, attempt: int) -> _Slot | None:
        return None if self.done else self._by_attempt.get(attempt)

    def _plan(self, pairs: Pairs, tried: frozenset[int]) -> Plan:
        counts = None
        if len(pairs) > DECODE_PAIRS:
            number = np.bincount(self._array[pairs], minlength=self.n_expert)
            need = mask_of(np.flatnonzero(number).tolist())
            if len(pairs) >= self.policy.spread_pairs:
                counts = number.tolist()
        else:
            need = mask_of({self.experts[pair] for pair in pairs})
        return plan(
            need,
            [c for c in self.swarm.candidates() if c.worker not in tried],
            local=self.swarm.local() if LOCAL not in tried else None,
            local_first=self.policy.local_first,
            kept=self.kept,
            pairs_per_expert=counts,
        )

    def _open(
        self, choice: Plan, pairs: Pairs, tried: frozenset[int], now: float, actions: list[Action]
    ) -> list[_Slot]:
        """Make the slots of a plan, cut to what suits each worker, and the actions that begin them."""
        slots = []
        if len(pairs) > DECODE_PAIRS:
            every = np.asarray(pairs, np.intp)
            pieces = cut_pairs(choice, every, self._array, self.n_expert, self.per_token, self.swarm.cut)
            for candidate, part, cell in pieces:
                slot = _Slot(self.next_attempt(), candidate, part, tried | {candidate.worker})
                slot.cell = cell
                slots.append(slot)
                self._begin(slot, now, actions)
            return slots
        shares: list[list[int]] = [[] for _ in choice.shares]
        share_of = {e: share for (_, mask), share in zip(choice.shares, shares, strict=True) for e in experts_of(mask)}
        for pair in pairs:
            share_of[self.experts[pair]].append(pair)
        for (candidate, _), mine in zip(choice.shares, shares, strict=True):
            fits = len(mine) <= candidate.max_pairs
            for part in [mine] if fits else by_experts(mine, self._array, candidate.max_pairs):
                slot = _Slot(self.next_attempt(), candidate, part, tried | {candidate.worker})
                slots.append(slot)
                self._begin(slot, now, actions)
        return slots

    @staticmethod
    def _cells_of(slots: list[_Slot]) -> list[tuple[int, ...]]:
        cells: dict[int, tuple[int, ...]] = {}
        for slot in slots:
            if slot.cell >= 0:
                cells[slot.cell] = (*cells.get(slot.cell, ()), slot.attempt)
        return list(cells.values())

    @property
    def _array(self) -> NDArray[np.int32]:
        """The experts as an array: for calls that are cut only."""
        if self._experts is None:
            self._experts = np.asarray(self.experts, np.int32)
        return self._experts

    def _begin(self, slot: _Slot, now: float, actions: list[Action]) -> None:
        self._by_attempt[slot.attempt] = slot
        slot.state = _State.RUNNING
        if slot.candidate.worker == LOCAL:
            actions.append(RunLocal(slot.attempt, slot.pairs))
        else:
            if len(self.experts) > DECODE_PAIRS:
                slot.ahead = self._last.get(slot.candidate.worker)
                if slot.ahead is not None:
                    slot.ahead.behind = slot
                self._last[slot.candidate.worker] = slot
            slot.due = math.inf if slot.waits_in_line else now + self.policy.queue_s
            actions.append(Send(slot.attempt, slot.candidate.worker, slot.pairs))

    def _renew(self, slot: _Slot, now: float, actions: list[Action]) -> None:
        """Ask an overloaded worker again, if it is there and still holds what is wanted."""
        wanted = mask_of({self.experts[pair] for pair in slot.pairs})
        held = next((c.held for c in self.swarm.candidates() if c.worker == slot.candidate.worker), 0)
        if wanted & ~held:
            self._fail(slot, "does not hold these experts any more", now, actions)
            return
        del self._by_attempt[slot.attempt]
        slot.attempt, slot.was_sent, slot.was_late = self.next_attempt(), False, False
        self._begin(slot, now, actions)

    def _rescue(self, slot: _Slot, now: float, actions: list[Action]) -> bool:
        """Give the pairs of a slot to workers that its line has not tried, if they hold all of them."""
        if slot.rescue is None:
            choice = self._plan(slot.pairs, slot.tried)
            if choice.uncovered:
                return False
            slot.rescue = self._open(choice, slot.pairs, slot.tried, now, actions)
        return True

    def _fail(self, slot: _Slot, why: str, now: float, actions: list[Action], *, overloaded: bool = False) -> None:
        if slot.cancelled or self.done:
            slot.state = _State.FAILED
            return
        self._note(slot, why)
        slot.state, slot.due = _State.FAILED, math.inf
        self._moved_on(slot, now)
        if self._rescue(slot, now, actions) or not overloaded:
            return
        slot.retry_s = min(slot.retry_s * 2 or self.policy.overloaded_retry_s, self.policy.overloaded_retry_max_s)
        slot.state, slot.due = _State.WAITING, now + slot.retry_s

    def _moved_on(self, slot: _Slot, now: float) -> None:
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
            behind.due = now + self.swarm.late_after(behind.candidate.worker, len(behind.pairs), behind.attempt)
        else:
            behind.due = now + self.policy.queue_s

    def _note(self, slot: _Slot, why: str) -> None:
        self._reasons[f"{slot.candidate.name}: {why}"] = None

    def _settle(self, actions: list[Action], now: float) -> list[Action]:
        """End what has been decided, in whichever direction."""
        if self.done:
            return actions
        if all(slot.settled for slot in self._slots):
            winners = tuple(attempt for slot in self._slots for attempt in slot.winners())
            self._end(actions, None)
            actions.append(Finish(winners))
            return actions
        if dead := [slot for slot in self._slots if slot.dead and not self._vacated(slot, now, actions)]:
            return self._end(actions, self._call_failed(dead))
        for root in self._slots:
            for slot in root.walk():
                if slot.settled:
                    for loser in slot.walk():
                        self._cancel(loser, now, actions)
        return actions

    def _vacancy(self, pairs: Pairs, now: float) -> _Slot:
        """Make a slot that waits for somebody who holds its experts."""
        slot = _Slot(self.next_attempt(), _NOBODY, pairs, frozenset(), _State.VACANT, now + self.policy.look_s)
        self._by_attempt[slot.attempt] = slot
        return slot

    def _fill(self, slot: _Slot, now: float, actions: list[Action]) -> None:
        """Ask those who hold the experts of a vacancy, once there are such."""
        slot.due = now + self.policy.look_s
        if self._rescue(slot, now, actions):
            slot.state, slot.due = _State.FAILED, math.inf

    def _vacated(self, root: _Slot, now: float, actions: list[Action]) -> bool:
        """Put a vacancy in the place of a dead slot, where it may help: its experts are with nobody at the moment."""
        if not self.policy.patient or not self._plan(root.pairs, frozenset()).uncovered:
            return False
        for slot in root.walk():
            self._cancel(slot, now, actions)
        self._slots[self._slots.index(root)] = self._vacancy(root.pairs, now)
        return True

    def _end(self, actions: list[Action], error: DispatchError | None) -> list[Action]:
        if self.done:
            return actions
        self.done = True
        for slot in self._by_attempt.values():
            self._cancel(slot, math.inf, actions)
        if error is not None:
            actions.append(Fail(error))
        return actions

    def _cancel(self, slot: _Slot, now: float, actions: list[Action]) -> None:
        if slot.cancelled or slot.state in (_State.ANSWERED, _State.FAILED):
            return
        slot.cancelled, slot.due = True, math.inf
        if slot.state is _State.RUNNING and slot.candidate.worker != LOCAL:
            actions.append(Cancel(slot.attempt, slot.candidate.worker))
        if not self.done:
            self._moved_on(slot, now)

    def _call_failed(self, slots: list[_Slot]) -> CallFailed:
        experts = sorted({self.experts[pair] for slot in slots for pair in slot.pairs})
        ids, reasons = ", ".join(map(str, experts)), "; ".join(self._reasons)
        return CallFailed(f"layer {self.layer}: no answer for expert{'s'[: len(experts) > 1]} {ids} ({reasons})")
