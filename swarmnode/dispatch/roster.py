"""The workers of one client by number: those that are attached, and what stays known of those that are gone.

Owned by `client.py`, loop thread only but for reads of `attached`. Not who of them is trusted (`quarantine.py`), nor
who is asked (`call.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from swarmnode.dispatch.remote_worker import RemoteWorker

MAX_FORMER = 4096  # workers that are gone and may be named yet: their answers may be under check


@dataclass(frozen=True, slots=True)
class FormerWorker:
    """What stays known of a worker whose connection has ended; see RemoteWorker."""

    number: int
    peer: str
    name: str
    label: str


class Roster:
    """See the module. A peer that reconnects has a new number."""

    def __init__(self) -> None:
        self.attached: dict[int, RemoteWorker] = {}
        self._former: OrderedDict[int, FormerWorker] = OrderedDict()

    def add(self, worker: RemoteWorker) -> None:
        """Know a worker. An older connection of its peer gets no new calls."""
        for older in self.attached.values():
            if older.peer == worker.peer:
                older.retire()  # the peer came back on a new connection; the old one may answer what it has
        self.attached[worker.number] = worker

    def lost(self, worker: RemoteWorker) -> None:
        """Note that a worker is gone."""
        self.attached.pop(worker.number, None)
        self._former[worker.number] = FormerWorker(worker.number, worker.peer, worker.name, worker.label)
        while len(self._former) > MAX_FORMER:
            self._former.popitem(last=False)

    def worker(self, number: int) -> RemoteWorker | FormerWorker | None:
        """Return a worker, also one that is gone."""
        return self.attached.get(number) or self._former.get(number)

    def connections_of(self, peer: str) -> list[RemoteWorker]:
        """Return the attached workers that are this peer."""
        return [one for one in self.attached.values() if one.peer == peer]

    def numbers_of(self, peer: str) -> set[int]:
        """Return all numbers that this peer has or had."""
        gone = {former.number for former in self._former.values() if former.peer == peer}
        return gone | {one.number for one in self.connections_of(peer)}
