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

from swarmnode.compute.chunks import plan_chunks
from swarmnode.dispatch.hello import experts_of, mask_of
from swarmnode.dispatch.replicas import LOCAL, Candidate, Plan, plan
from swarmnode.errors import CallFailed, DispatchError, NobodyHolds

Pairs = Sequence[int]  # ascending


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """When to give up, and how to spread. Seconds."""

    # Without any answer: longer than a path change or a relay reconnect takes. Not while this node's own engine
    # computes for the call: it says itself when it fails, and nobody else is to blame for a slow disk.
    give_up_s: float = 30.0
    queue_s: float = 1.0  # in this node's own queue for a worker, before another one is asked
    overloaded_retry_s: float = 0.02  # doubled each time; a queue of a few calls drains in this
    overloaded_retry_max_s: float = 1.0
    spread_pairs: int = 512  # from here on compute outweighs the bytes that fewer workers save
    local_first: bool = False
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

    def late_after(self, worker: int, n_pairs: int) -> float:
        """Return how many seconds an answer may take before it counts as late."""


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

    def winners(self) -> Iterator[int]:
        if self.state is _State.ANSWERED:
            yield self.attempt
        else:
            for slot in self.rescue or ():
                yield from slot.winners()


@dataclass(slots=True, eq=False)
class Call:
    """See the module. `experts[i]` is the expert of pair i; `next_attempt` gives numbers that are never reused.

    `kept` is the bitmap of the experts that this node's own engine computes before anybody is asked.
    """

    layer: int
    experts: Sequence[int]
    n_expert: int
    swarm: Swarm
    next_attempt: Callable[[], int]
    policy: CallPolicy = field(default_factory=CallPolicy)
    kept: int = 0
    done: bool = False
    _slots: list[_Slot] = field(default_factory=list)  # those that together cover every pair once
    _by_attempt: dict[int, _Slot] = field(default_factory=dict)
    _reasons: dict[str, None] = field(default_factory=dict)  # an ordered set
    _progress_at: float = 0.0

    def start(self, now: float) -> list[Action]:
        """Choose the workers for all pairs."""
        self._progress_at = now
        everything: Pairs = range(len(self.experts))
        choice = self._plan(everything, frozenset())
        actions: list[Action] = []
        if choice.uncovered:
            if not self.policy.patient:
                self.done = True
                return [Fail(NobodyHolds(self.layer, experts_of(choice.uncovered)))]
            missing = [pair for pair in everything if choice.uncovered >> self.experts[pair] & 1]
            everything = [pair for pair in everything if not choice.uncovered >> self.experts[pair] & 1]
            self._slots = [self._vacancy(missing, now)]
        self._slots += self._open(choice, everything, frozenset(), now, actions)
        if not self._slots:
            self.done = True
            actions.append(Finish(()))
        return actions

    def sent(self, attempt: int, now: float) -> None:
        """Note that the pairs of an attempt left for their worker: its deadline runs from here."""
        slot = self._by_attempt.get(attempt)
        if slot is not None and slot.state is _State.RUNNING and slot.rescue is None:
            slot.was_sent = True
            slot.due = now + self.swarm.late_after(slot.candidate.worker, len(slot.pairs))

    def answered(self, attempt: int, now: float) -> list[Action]:
        """Take a good answer; the caller keeps its rows until Finish says whether they count."""
        slot = self._open_slot(attempt)
        if slot is None or slot.state not in (_State.RUNNING, _State.CHECKING) or slot.cancelled:
            return []
        self._progress_at = now
        slot.state, slot.due = _State.ANSWERED, math.inf
        return self._settle([], now)

    def checking(self, attempt: int, now: float, until: float) -> list[Action]:
        """Take an answer that does not count before `answered` is called for it again, or `until` has come."""
        slot = self._open_slot(attempt)
        if slot is not None and slot.state in (_State.RUNNING, _State.CHECKING) and not slot.cancelled:
            self._progress_at = now
            slot.state, slot.due = _State.CHECKING, until
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
                self._cancel(slot, actions)
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
                if slot.was_sent and not slot.was_late:  # what waits in this node's queue is not the worker's fault
                    slot.was_late = True
                    actions.append(Late(slot.attempt, slot.candidate.worker))
                if not self._rescue(slot, now, actions):
                    slot.due = now + self.policy.look_s  # somebody who holds them may have come by then
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

    def _open_slot(self, attempt: int) -> _Slot | None:
        return None if self.done else self._by_attempt.get(attempt)

    def _plan(self, pairs: Pairs, tried: frozenset[int]) -> Plan:
        experts = [self.experts[pair] for pair in pairs]
        counts = None
        if len(pairs) >= self.policy.spread_pairs:
            counts = [0] * self.n_expert
            for expert in experts:
                counts[expert] += 1
        return plan(
            mask_of(set(experts)),
            [c for c in self.swarm.candidates() if c.worker not in tried],
            local=self.swarm.local() if LOCAL not in tried else None,
            local_first=self.policy.local_first,
            kept=self.kept,
            pairs_per_expert=counts,
        )

    def _open(
        self, choice: Plan, pairs: Pairs, tried: frozenset[int], now: float, actions: list[Action]
    ) -> list[_Slot]:
        """Make the slots of a plan, cut to the size each worker takes, and the actions that begin them."""
        shares: list[list[int]] = [[] for _ in choice.shares]
        share_of = {e: share for (_, mask), share in zip(choice.shares, shares, strict=True) for e in experts_of(mask)}
        for pair in pairs:
            share_of[self.experts[pair]].append(pair)
        slots = []
        for (candidate, _), mine in zip(choice.shares, shares, strict=True):
            for part in self._cut(mine, candidate.max_pairs):
                slot = _Slot(self.next_attempt(), candidate, part, tried | {candidate.worker})
                slots.append(slot)
                self._begin(slot, now, actions)
        return slots

    def _cut(self, pairs: Pairs, limit: int) -> list[Pairs]:
        """Cut pairs to the size of a call, so that the engine there adds in the same order as for all at once."""
        if len(pairs) <= limit:
            return [pairs]
        chunks = plan_chunks(np.array([self.experts[pair] for pair in pairs], np.int32), limit)
        return [sorted(pairs[i] for i in chunk.tolist()) for chunk in chunks]

    def _begin(self, slot: _Slot, now: float, actions: list[Action]) -> None:
        self._by_attempt[slot.attempt] = slot
        slot.state = _State.RUNNING
        if slot.candidate.worker == LOCAL:
            actions.append(RunLocal(slot.attempt, slot.pairs))
        else:
            slot.due = now + self.policy.queue_s
            actions.append(Send(slot.attempt, slot.candidate.worker, slot.pairs))

    def _renew(self, slot: _Slot, now: float, actions: list[Action]) -> None:
        """Ask an overloaded worker again, if it is there and still holds what is wanted."""
        wanted = mask_of({self.experts[pair] for pair in slot.pairs})
        held = next((c.held for c in self.swarm.candidates() if c.worker == slot.candidate.worker), 0)
        if wanted & ~held:
            self._fail(slot, "does not hold these experts any more", now, actions)
            return
        del self._by_attempt[slot.attempt]
        slot.attempt, slot.was_sent = self.next_attempt(), False
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
        if self._rescue(slot, now, actions) or not overloaded:
            return
        slot.retry_s = min(slot.retry_s * 2 or self.policy.overloaded_retry_s, self.policy.overloaded_retry_max_s)
        slot.state, slot.due = _State.WAITING, now + slot.retry_s

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
                        self._cancel(loser, actions)
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
            self._cancel(slot, actions)
        self._slots[self._slots.index(root)] = self._vacancy(root.pairs, now)
        return True

    def _end(self, actions: list[Action], error: DispatchError | None) -> list[Action]:
        if self.done:
            return actions
        self.done = True
        for slot in self._by_attempt.values():
            self._cancel(slot, actions)
        if error is not None:
            actions.append(Fail(error))
        return actions

    def _cancel(self, slot: _Slot, actions: list[Action]) -> None:
        if slot.cancelled or slot.state in (_State.ANSWERED, _State.FAILED):
            return
        slot.cancelled, slot.due = True, math.inf
        if slot.state is _State.RUNNING and slot.candidate.worker != LOCAL:
            actions.append(Cancel(slot.attempt, slot.candidate.worker))

    def _call_failed(self, slots: list[_Slot]) -> CallFailed:
        experts = sorted({self.experts[pair] for slot in slots for pair in slot.pairs})
        ids, reasons = ", ".join(map(str, experts)), "; ".join(self._reasons)
        return CallFailed(f"layer {self.layer}: no answer for expert{'s'[: len(experts) > 1]} {ids} ({reasons})")
