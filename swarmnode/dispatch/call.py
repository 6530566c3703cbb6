"""One layer's call to the experts, from the choice of workers to the last answer: a state machine.

Pure: no clock, no network. Events go in with `now`, actions come out (`call_actions.py`). `call_runner.py` owns one
`Call` per call of the decode thread, carries its actions out and keeps the rows; here a row is never looked at, only
which pairs are accounted for.

The pairs of a call are cut into slots (`call_slot.py`); who gets which says `assignment.py`. A slot is one attempt by
one worker (or by the local engine) to compute its pairs:

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

A large call is cut (`cutting.py`), and one worker then has several of its slots at once, which it computes in turn
(`pipeline.py`). What has not left this node waits for what was sent before, of any call: it is not late, and the call
is not given up, while that worker answers.
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
from collections.abc import Callable, Sequence

from swarmnode.dispatch.assignment import Assignment
from swarmnode.dispatch.call_actions import (
    Action,
    CallPolicy,
    Cancel,
    Fail,
    Finish,
    Late,
    RunLocal,
    Send,
    Swarm,
)
from swarmnode.dispatch.call_slot import Slot, SlotState, cells_of
from swarmnode.dispatch.cutting import Pairs
from swarmnode.dispatch.health import DECODE_PAIRS
from swarmnode.dispatch.hello import experts_of
from swarmnode.dispatch.pipeline import Pipelines
from swarmnode.dispatch.replicas import LOCAL, Candidate, Plan
from swarmnode.errors import CallFailed, DispatchError, NobodyHolds

_NOBODY = Candidate(-2, "this swarm", 0)


class Call:
    """See the module. `experts[i]` is the expert of pair i; `next_attempt` gives numbers that are never reused.

    `kept` is the bitmap of the experts that this node's own engine computes before anybody is asked. `per_token` is how
    many pairs a token has, where each worker adds up its own and a call may be cut between tokens; else 0. `cells` are
    the attempts that make up each range of tokens, in the order in which they are added; only where start has cut.
    """

    def __init__(
        self,
        layer: int,
        experts: Sequence[int],
        n_expert: int,
        swarm: Swarm,
        next_attempt: Callable[[], int],
        policy: CallPolicy = CallPolicy(),  # noqa: B008 - frozen
        kept: int = 0,
        per_token: int = 0,
    ) -> None:
        self.layer = layer
        self._experts, self._swarm, self._policy, self._next_attempt = experts, swarm, policy, next_attempt
        self.done = False
        self.cells: list[tuple[int, ...]] = []
        self._assignment = Assignment(experts, n_expert, swarm, policy, kept, per_token)
        self._pipelines = Pipelines(swarm, policy.queue_s) if len(experts) > DECODE_PAIRS else None
        self._slots: list[Slot] = []  # those that together cover every pair once
        self._by_attempt: dict[int, Slot] = {}
        self._reasons: dict[str, None] = {}  # an ordered set
        self._progress_at = 0.0

    def start(self, now: float) -> list[Action]:
        """Choose the workers for all pairs."""
        self._progress_at = now
        everything = self._assignment.everything()
        choice = self._assignment.plan(everything, frozenset())
        actions: list[Action] = []
        if choice.uncovered:
            if not self._policy.patient:
                self.done = True
                return [Fail(NobodyHolds(self.layer, experts_of(choice.uncovered)))]
            missing = [pair for pair in everything if choice.uncovered >> self._experts[pair] & 1]
            everything = [pair for pair in everything if not choice.uncovered >> self._experts[pair] & 1]
        self._slots = self._open(choice, everything, frozenset(), now, actions)
        if len(everything) > DECODE_PAIRS:
            self.cells = cells_of(self._slots)
        if choice.uncovered:
            self._slots.append(self._vacancy(missing, now))
        if not self._slots:
            self.done = True
            actions.append(Finish(()))
        return actions

    def sent(self, attempt: int, now: float) -> None:
        """Note that the pairs of an attempt left for their worker: its deadline runs from here."""
        slot = self._by_attempt.get(attempt)
        if slot is None or slot.state is not SlotState.RUNNING or slot.cancelled:
            return
        slot.was_sent = True
        if slot.waits_in_line:
            slot.due = math.inf
        elif slot.rescue is None:
            slot.due = now + self._swarm.late_after(slot.candidate.worker, len(slot.pairs), attempt)

    def wants(self, attempt: int) -> bool:
        """Whether an attempt is still to be sent."""
        slot = self._open_slot(attempt)
        return slot is not None and slot.state is SlotState.RUNNING and not slot.cancelled

    def answered(self, attempt: int, now: float) -> list[Action]:
        """Take a good answer; the caller keeps its rows until Finish says whether they count."""
        slot = self._open_slot(attempt)
        if slot is None or slot.state not in (SlotState.RUNNING, SlotState.CHECKING) or slot.cancelled:
            return []
        self._progress_at = now
        slot.state, slot.due = SlotState.ANSWERED, math.inf
        self._moved_on(slot, now)
        return self._settle([], now)

    def checking(self, attempt: int, now: float, until: float) -> list[Action]:
        """Take an answer that does not count before `answered` is called for it again, or `until` has come."""
        slot = self._open_slot(attempt)
        if slot is not None and slot.state in (SlotState.RUNNING, SlotState.CHECKING) and not slot.cancelled:
            self._progress_at = now
            slot.state, slot.due = SlotState.CHECKING, until
            self._moved_on(slot, now)
        return []

    def distrust(self, worker: int, why: str, now: float) -> list[Action]:
        """Do without a worker whose answers are wrong: also without those that it has given to this call."""
        return self._begin_anew(lambda slot: slot.rests_on(worker), frozenset({worker}), why, now)

    def reject(self, attempt: int, why: str, now: float) -> list[Action]:
        """Do without one answer, whether it counts by now or not."""
        slot = self._open_slot(attempt)
        if slot is None or slot.state is not SlotState.ANSWERED:
            return self.failed(attempt, why, now)
        return self._begin_anew(lambda other: other is slot, slot.tried, why, now)

    def _begin_anew(self, is_out: Callable[[Slot], bool], tried: frozenset[int], why: str, now: float) -> list[Action]:
        """Give the pairs of those slots that contain one which `is_out` to others than `tried`."""
        if self.done:
            return []
        actions: list[Action] = []
        slots: list[Slot] = []
        for root in self._slots:
            if not any(is_out(slot) for slot in root.walk()):
                slots.append(root)
                continue
            for slot in root.walk():
                if is_out(slot):
                    self._note(slot, why)
                self._cancel(slot, now, actions)
            choice = self._assignment.plan(root.pairs, tried)
            if not choice.uncovered:
                slots += self._open(choice, root.pairs, tried, now, actions)
            elif self._policy.patient:
                slots.append(self._vacancy(root.pairs, now))
            else:
                return self._end(actions, self._call_failed([root]))
        self._slots = slots
        return self._settle(actions, now)

    def failed(self, attempt: int, why: str, now: float, *, overloaded: bool = False) -> list[Action]:
        """Note that an attempt will have no answer; `overloaded` says that asking later may help."""
        slot = self._open_slot(attempt)
        if slot is None or slot.state not in (SlotState.RUNNING, SlotState.CHECKING):
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
            if slot.candidate.worker == worker and slot.state in (SlotState.RUNNING, SlotState.WAITING):
                self._fail(slot, why, now, actions)
        return self._settle(actions, now)

    def silent(self, worker: int, now: float) -> list[Action]:
        """Note that a worker gives no sign of life: what it was sent is late now."""
        for slot in self._by_attempt.values():
            runs = slot.state is SlotState.RUNNING and not slot.cancelled
            if slot.candidate.worker == worker and runs and slot.was_sent and not (slot.was_late or slot.waits_in_line):
                slot.due = now
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Let time pass: late attempts are hedged, overloaded workers asked again, silence ends the call."""
        actions: list[Action] = []
        if now >= self._give_up_at():
            self._progress_at = max(self._progress_at, self._heard())
        if now >= self._give_up_at():
            for slot in list(self._by_attempt.values()):
                if slot.state in (SlotState.RUNNING, SlotState.WAITING):
                    self._note(slot, f"no answer in {self._policy.give_up_s:g} s")
                elif slot.state is SlotState.VACANT and not slot.cancelled:
                    self._note(slot, f"nobody holds what is wanted for {self._policy.give_up_s:g} s")
            unsettled = [slot for slot in self._slots if not slot.settled]
            return self._end(actions, self._call_failed(unsettled))
        for slot in list(self._by_attempt.values()):
            if now < slot.due or slot.cancelled:
                continue
            slot.due = math.inf
            if slot.state is SlotState.WAITING:
                self._renew(slot, now, actions)
            elif slot.state is SlotState.VACANT:
                self._fill(slot, now, actions)
            elif slot.state is SlotState.CHECKING:
                slot.state = SlotState.ANSWERED
            elif slot.state is SlotState.RUNNING:
                if not slot.was_sent and (until := self._swarm.answering_until(slot.candidate.worker)) > now:
                    slot.due = until
                    continue
                if slot.was_sent and not slot.was_late:  # what waits in this node's queue is not the worker's fault
                    slot.was_late = True
                    actions.append(Late(slot.attempt, slot.candidate.worker))
                for late in slot.line():
                    late.was_late, late.due = late.was_late or late.was_sent, math.inf
                    if not self._rescue(late, now, actions):
                        late.due = now + self._policy.look_s  # somebody who holds them may have come by then
        return self._settle(actions, now)

    def next_due(self) -> float:
        """Return the time of the next tick that can change anything."""
        if self.done:
            return math.inf
        first = self._give_up_at()
        for slot in self._by_attempt.values():
            first = min(first, slot.due)
        return first

    def cancel(self) -> list[Action]:
        """End the call without a result."""
        return self._end([], None)

    # How slots come and go.

    def _give_up_at(self) -> float:
        for slot in self._by_attempt.values():
            if slot.computes_here:
                return math.inf
        return self._progress_at + self._policy.give_up_s

    def _heard(self) -> float:
        """When a worker last answered anything for which some of this call still waits here, unsent.

        Not one that is late with what it has of this call: others' answers do not excuse that.
        """
        running = [s for s in self._by_attempt.values() if s.state is SlotState.RUNNING and not s.cancelled]
        late = {slot.candidate.worker for slot in running if slot.was_late}
        waited_for = {slot.candidate.worker for slot in running if not slot.was_sent} - late - {LOCAL}
        return max(map(self._swarm.heard, waited_for), default=-math.inf)

    def _open_slot(self, attempt: int) -> Slot | None:
        return None if self.done else self._by_attempt.get(attempt)

    def _open(self, choice: Plan, pairs: Pairs, tried: frozenset[int], now: float, actions: list[Action]) -> list[Slot]:
        """Make the slots of a plan, cut to what suits each worker, and the actions that begin them."""
        slots = []
        for candidate, part, cell in self._assignment.parts(choice, pairs):
            slot = Slot(self._next_attempt(), candidate, part, tried | {candidate.worker}, cell=cell)
            slots.append(slot)
            self._begin(slot, now, actions)
        return slots

    def _begin(self, slot: Slot, now: float, actions: list[Action]) -> None:
        self._by_attempt[slot.attempt] = slot
        slot.state = SlotState.RUNNING
        if slot.candidate.worker == LOCAL:
            actions.append(RunLocal(slot.attempt, slot.pairs))
        else:
            if self._pipelines is not None:
                self._pipelines.enter(slot)
            slot.due = math.inf if slot.waits_in_line else now + self._policy.queue_s
            actions.append(Send(slot.attempt, slot.candidate.worker, slot.pairs))

    def _renew(self, slot: Slot, now: float, actions: list[Action]) -> None:
        """Ask an overloaded worker again, if it is there and still holds what is wanted."""
        if not self._assignment.holds(slot.candidate, slot.pairs):
            self._fail(slot, "does not hold these experts any more", now, actions)
            return
        del self._by_attempt[slot.attempt]
        slot.attempt, slot.was_sent, slot.was_late = self._next_attempt(), False, False
        self._begin(slot, now, actions)

    def _rescue(self, slot: Slot, now: float, actions: list[Action]) -> bool:
        """Give the pairs of a slot to workers that its line has not tried, if they hold all of them."""
        if slot.rescue is None:
            choice = self._assignment.plan(slot.pairs, slot.tried)
            if choice.uncovered:
                return False
            slot.rescue = self._open(choice, slot.pairs, slot.tried, now, actions)
        return True

    def _fail(self, slot: Slot, why: str, now: float, actions: list[Action], *, overloaded: bool = False) -> None:
        if slot.cancelled or self.done:
            slot.state = SlotState.FAILED
            return
        self._note(slot, why)
        slot.state, slot.due = SlotState.FAILED, math.inf
        self._moved_on(slot, now)
        if self._rescue(slot, now, actions) or not overloaded:
            return
        slot.retry_s = min(slot.retry_s * 2 or self._policy.overloaded_retry_s, self._policy.overloaded_retry_max_s)
        slot.state, slot.due = SlotState.WAITING, now + slot.retry_s

    def _moved_on(self, slot: Slot, now: float) -> None:
        if self._pipelines is not None:
            self._pipelines.leave(slot, now)

    def _note(self, slot: Slot, why: str) -> None:
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

    def _vacancy(self, pairs: Pairs, now: float) -> Slot:
        """Make a slot that waits for somebody who holds its experts."""
        slot = Slot(self._next_attempt(), _NOBODY, pairs, frozenset(), SlotState.VACANT, now + self._policy.look_s)
        self._by_attempt[slot.attempt] = slot
        return slot

    def _fill(self, slot: Slot, now: float, actions: list[Action]) -> None:
        """Ask those who hold the experts of a vacancy, once there are such."""
        slot.due = now + self._policy.look_s
        if self._rescue(slot, now, actions):
            slot.state, slot.due = SlotState.FAILED, math.inf

    def _vacated(self, root: Slot, now: float, actions: list[Action]) -> bool:
        """Put a vacancy in the place of a dead slot, where it may help: its experts are with nobody at the moment."""
        if not self._policy.patient or not self._assignment.plan(root.pairs, frozenset()).uncovered:
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

    def _cancel(self, slot: Slot, now: float, actions: list[Action]) -> None:
        if slot.cancelled or slot.state in (SlotState.ANSWERED, SlotState.FAILED):
            return
        slot.cancelled, slot.due = True, math.inf
        if slot.state is SlotState.RUNNING and slot.candidate.worker != LOCAL:
            actions.append(Cancel(slot.attempt, slot.candidate.worker))
        if not self.done:
            self._moved_on(slot, now)

    def _call_failed(self, slots: list[Slot]) -> CallFailed:
        experts = sorted({self._experts[pair] for slot in slots for pair in slot.pairs})
        ids, reasons = ", ".join(map(str, experts)), "; ".join(self._reasons)
        return CallFailed(f"layer {self.layer}: no answer for expert{'s'[: len(experts) > 1]} {ids} ({reasons})")
