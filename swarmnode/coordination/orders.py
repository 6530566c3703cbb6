"""What the coordinator is told of workers, and what it wants done. Pure.

`coordinator.py` takes the one and makes the other; `lead.py` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.placement.request import Holdings, Placement


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker as its last report and our own measurements show it.

    `rtt_s` is what an answer of decode size takes beyond its rows' computing: the path, its bandwidth, queues.
    """

    peer: str
    budget: int
    held: Holdings
    row_s: float = 0.0
    rtt_s: float = 0.0
    assignment: int = 0
    pinned: bool = False
    trouble: str = ""
    fetched: int = 0  # bytes so far: that it gets on


@dataclass(frozen=True, slots=True)
class Order:
    """Tell `peer` to hold exactly `hold`; the number grows with every order."""

    peer: str
    number: int
    hold: Holdings


@dataclass(frozen=True, slots=True)
class Release:
    """Tell `peer` that it may go."""

    peer: str


@dataclass(frozen=True, slots=True)
class KeepLocal:
    """Compute these experts on this node from now on."""

    masks: Holdings


@dataclass(frozen=True, slots=True)
class Planned:
    """For people: a new plan is being carried out."""

    placement: Placement
    why: str


Outcome = Order | Release | KeepLocal | Planned
