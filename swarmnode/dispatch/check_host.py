"""The calls in progress as their spot checks see them: carries out what `checks.py` decides.

Loop thread only. Made by `client.py`, called by `checks.py`.
"""

from __future__ import annotations

from swarmnode.dispatch.call_runner import CallRunner
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.replicas import LOCAL, Candidate
from swarmnode.dispatch.request import Request, Share


class RunnerCheckHost:
    """See checks.CheckHost."""

    def __init__(self, calls: CallRunner, options: DispatchOptions) -> None:
        self._calls, self._options = calls, options
        self._roster, self._swarm = calls.roster, calls.swarm

    def next_attempt(self) -> int:
        """See CheckHost."""
        return self._calls.next_attempt()

    def own_held(self, request: Request) -> int:
        """See CheckHost."""
        own = self._swarm.local(request.site)
        return 0 if own is None else own.held

    def candidates(self, request: Request) -> list[Candidate]:
        """See CheckHost."""
        return self._swarm.candidates(request)

    def compute_again(self, attempt: int, by: int, share: Share, subject: int) -> bool:
        """See CheckHost. The share's rows are counted as checked."""
        pending, worker = self._calls.pending(subject), self._roster.attached.get(by)
        if worker is not None:
            worker.ask(attempt, share)
        elif by != LOCAL or not self._calls.compute_here(attempt, share):
            return False
        if pending is not None:
            pending.stats.checked_rows += len(share.pairs)
            checked = self._roster.attached.get(pending.asked.get(subject, LOCAL))
            if checked is not None:
                checked.checked_rows += len(share.pairs)
        return True

    def withdraw(self, attempt: int, by: int) -> None:
        """See CheckHost."""
        if (worker := self._roster.attached.get(by)) is not None:
            worker.cancel(attempt)

    def patience(self, by: int, n_pairs: int) -> float:
        """See CheckHost."""
        return self._options.check.patience_s if by == LOCAL else self._swarm.late_after(by, n_pairs)

    def release(self, attempt: int) -> None:
        """See CheckHost."""
        if (pending := self._calls.pending(attempt)) is not None:
            pending.counts(attempt)
            self._calls.advance(pending, lambda call, now: call.answered(attempt, now))

    def hold(self, attempt: int, seconds: float) -> None:
        """See CheckHost."""
        if (pending := self._calls.pending(attempt)) is not None:
            self._calls.advance(pending, lambda call, now: call.checking(attempt, now, now + seconds))

    def reject(self, attempt: int, why: str) -> None:
        """See CheckHost."""
        if (pending := self._calls.pending(attempt)) is not None:
            pending.stats.mismatches += 1
            self._calls.advance(pending, lambda call, now: call.reject(attempt, why, now))

    def convict(self, worker: int, why: str, subject: int) -> None:
        """See CheckHost: the peer is put in quarantine, as far as it is still known."""
        pending, guilty = self._calls.pending(subject), self._roster.worker(worker)
        if pending is not None:
            pending.stats.mismatches += 1
        if guilty is not None:
            self._calls.quarantine.add(guilty, why)
        else:
            self._calls.distrust(worker, why)

    def suspect(self, worker: int, why: str) -> None:
        """See CheckHost."""
        if (known := self._roster.worker(worker)) is not None:
            self._calls.quarantine.suspect(known, why)

    def name(self, worker: int) -> str:
        """See CheckHost."""
        known = self._roster.worker(worker)
        return f"worker {worker}" if known is None else known.label

    def peer(self, worker: int) -> str:
        """See CheckHost."""
        known = self._roster.worker(worker)
        return f"worker {worker}" if known is None else known.peer
