"""When a worker that became slow in use is believed to be fast again: the first time soon, later ever more seldom.

A worker shows another speed idle than in use: it gets hot, something else runs on its machine whenever ours does, or it
says what is not so. Given work for what it showed idle it would drag the swarm each time until the next plan. So one
that was planned with, became slow and was left out is taken for that slow for a while, whatever it shows: FIRST_S, then
60 s and twice as long each time, an hour at most. Serving well for GOOD_S, or as long as it had to wait, makes good for
everything before. Slow is what takes clearly longer than when it was given its part, and than the others' calls: one
machine that is busy with all of them puts nobody in doubt.

Pure. Owned by `coordinator.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FIRST_S = 5.0  # a passing trouble of a link or a machine, most often
WAIT_S = 60.0
MAX_WAIT_S = 3600.0
GOOD_S = 300.0
SHARE = 0.5  # left with less than this of what it had, it counts as left out
MAX_PEERS = 4096


@dataclass(slots=True)
class _Peer:
    share: int = 0  # experts, the most since it is used
    call_s: float = 0.0  # what a call took when it was given those, or the last time that this was known; 0: never
    since: float = 0.0
    wait_s: float = 0.0  # the last one
    until: float = 0.0
    slow: tuple[float, float] = (0.0, 0.0)


class SecondChances:
    """See the module. `slower(then, now)` says whether a call takes clearly longer now. All times in seconds."""

    def __init__(self, slower: Callable[[float, float], bool]) -> None:
        self._slower = slower
        self._peers: dict[str, _Peer] = {}

    def believed(self, peer: str, rtt_s: float, row_s: float, now: float) -> tuple[float, float]:
        """What to plan with, (rtt_s, row_s), where a worker shows these now."""
        known = self._peers.get(peer)
        if known is None or now >= known.until:
            return rtt_s, row_s
        return max(rtt_s, known.slow[0]), max(row_s, known.slow[1])

    def planned(
        self, peer: str, share: int, call_s: float, others_s: float, speed: tuple[float, float], now: float
    ) -> None:
        """Hear that a new plan gives a worker `share` experts.

        `call_s` is what a call takes, 0 where not all of it is known: then nothing is learnt of its speed. `others_s`
        is the same for most others; `speed` is its (rtt_s, row_s) as it shows them.
        """
        known = self._peers.get(peer)
        if known is None:
            if not share or len(self._peers) >= MAX_PEERS:
                return
            known = self._peers[peer] = _Peer()
        if known.share < SHARE * share:
            known.share, known.call_s, known.since = share, call_s, now
            return
        if share >= SHARE * known.share:
            known.share = max(share, known.share)
            known.call_s = min(call_s or known.call_s, known.call_s or call_s)
            return
        if known.call_s and self._slower(known.call_s, call_s) and self._slower(others_s, call_s):
            if not known.wait_s or now - known.since >= max(GOOD_S, known.wait_s):
                known.wait_s = FIRST_S
            else:
                known.wait_s = min(MAX_WAIT_S, max(WAIT_S, 2 * known.wait_s))
            known.until, known.slow = now + known.wait_s, speed
        known.share, known.call_s, known.since = share, call_s or known.call_s, now

    def gone(self, peer: str) -> None:
        """A worker has nothing any more, for a reason that is not its speed."""
        known = self._peers.get(peer)
        if known is not None:
            known.share = 0
            if not known.wait_s:
                del self._peers[peer]
