"""The settings of both ends of dispatch, frozen and built once at the edge.

Defaults carry their reasons. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from swarmnode.dispatch.call_actions import CallPolicy
from swarmnode.dispatch.codec import WireName, WireType
from swarmnode.dispatch.health import Deadlines
from swarmnode.dispatch.spot_check import CheckPolicy
from swarmnode.errors import UsageError


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """How a client calls its workers.

    mode: "exact" brings back the raw row of every pair and adds them up in the local run's order; "partial" lets each
      worker add up its own: fewer bytes, and the same value up to float rounding.
    wire_out, wire_back: how x and the answers travel. site_wires: other types (out, back) for single sites.
    late_*: an answer later than its deadline is asked of another replica too: late_factor × the worker's own p95, at
      least the floor (a busy machine's scheduler), at most 1.6 × the p95 + the slack; while nothing is known of the
      worker, 1.6 × the path's round trip + late_unknown_s. Never more than the ceiling, which also holds for large
      calls of unknown cost.
    near_s: workers that answer faster than this are equally near; from there on each doubling is a class of its own.
    probe_s: a worker that was asked nothing for so long gets a copy of a small call, for which nobody waits: a slow
      worker that has become fast is found so, and one that is new shows its speed before anything depends on it.
    faults_allowed: faults in a row before a worker is suspended, for suspension_s, then twice that, up to the maximum.
    check: how many answers are computed once more to be compared.
    hello_timeout_s: for a worker to answer HELLO. stall_s: a worker that reads nothing for so long is given up.
    """

    mode: Literal["exact", "partial"] = "exact"
    wire_out: WireName = "f32"
    wire_back: WireName = "f32"
    site_wires: Mapping[int, tuple[WireName, WireName]] = field(default_factory=dict, hash=False)
    late_factor: float = 2.5
    late_floor_s: float = 0.1
    late_slack_s: float = 0.25
    late_unknown_s: float = 0.4
    late_ceiling_s: float = 5.0
    near_s: float = 0.002
    probe_s: float = 10.0
    faults_allowed: int = 3
    suspension_s: float = 1.0
    max_suspension_s: float = 60.0
    hello_timeout_s: float = 10.0
    stall_s: float = 30.0
    call: CallPolicy = field(default_factory=CallPolicy)
    check: CheckPolicy = field(default_factory=CheckPolicy)

    def __post_init__(self) -> None:
        if self.mode not in ("exact", "partial"):
            raise UsageError(f"dispatch mode {self.mode!r} is unknown; use exact or partial")
        for name in self._names():
            if name.upper() not in WireType.__members__:
                known = ", ".join(wire.name.lower() for wire in WireType)
                raise UsageError(f"wire type {name!r} is unknown; use {known}")
        if not 0 < self.late_floor_s <= self.late_ceiling_s:
            raise UsageError(f"late_floor_s {self.late_floor_s:g} must be in 0…late_ceiling_s {self.late_ceiling_s:g}")

    def wires(self, site: int) -> tuple[WireType, WireType]:
        """Return how x goes out to a site, and how its answers come back."""
        out, back = self.site_wires.get(site, (self.wire_out, self.wire_back))
        return WireType.of(out), WireType.of(back)

    def coarsest_wire(self, site: int) -> WireType:
        """Return the coarser of a site's types: what a comparison of its rows has to allow for."""
        return max(self.wires(site))

    def _names(self) -> tuple[WireName, ...]:
        return (self.wire_out, self.wire_back, *(name for pair in self.site_wires.values() for name in pair))

    @property
    def deadlines(self) -> Deadlines:
        """When an answer counts as late."""
        return Deadlines(
            self.late_factor, self.late_floor_s, self.late_slack_s, self.late_unknown_s, self.late_ceiling_s
        )


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker serves its clients.

    hello_timeout_s: a connection that says nothing is closed after it. stall_s: so is a client that does not
    read. drain_s: how long close() waits for calls that are already admitted.
    """

    hello_timeout_s: float = 10.0
    stall_s: float = 15.0
    drain_s: float = 30.0
