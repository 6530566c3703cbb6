"""What one layer's call says to its owner, what it asks of the swarm, and when it gives up.

Pure. The vocabulary between `call.py`, which decides, and `call_runner.py`, which carries out and answers; nothing is
decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.dispatch.cutting import Pairs, Shared
from swarmnode.dispatch.replicas import Candidate
from swarmnode.errors import DispatchError


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
