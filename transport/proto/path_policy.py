"""Which path datagrams take, and why. PURE, and without memory: what it must remember stands in the `Decision`.

Not the state of paths (path.py), and not when they are asked (paths.py). Called by paths.py after everything that
happened; the reasons are read by people.

Tiers      SAME MACHINE OR LAN > DIRECT (public or punched) > RELAY > DEMOTED (a direct path that loses or is slow)
           The tier goes before RTT. Among relays the peer's home goes first.
Standing   answered > unproven (a relay before its first pong) > doubted > silent (dead, but it has worked once)

Rules, the first that applies (`RULES`):
  gone       no primary, or it is dead: the best one there is
  unproven   something answers, and the primary has not yet: the best one
  doubted    another path of its tier is heard right now (a NAT gave the peer a new port): that one
             otherwise it stays, and everything is duplicated on a path that works
  better     a path of a better tier answers: that one, at once
  faster     a path of the same tier is faster by ≥ 5 ms or ≥ 20 %, in ≥ 3 samples, and no such switch for 60 s
  stay
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

from transport.proto.addresses import PathId, PathKind
from transport.proto.path_config import UNPROBED_SIZE, PathConfig


class PathState(StrEnum):
    """Where a path stands; the transitions are in path.py."""

    CANDIDATE = "candidate"
    PROBING = "probing"
    LIVE = "live"
    DOUBTED = "doubted"
    DEAD = "dead"


class Tier(IntEnum):
    """Smaller is better."""

    LAN = 0
    DIRECT = 1
    RELAY = 2
    DEMOTED = 3
    NONE = 9


NO_PATH = "no path: no relay is up and no address is known"
TIERS: Mapping[PathKind, Tier] = {
    PathKind.LOOPBACK: Tier.LAN,
    PathKind.LAN: Tier.LAN,
    PathKind.PUBLIC: Tier.DIRECT,
    PathKind.PUNCHED: Tier.DIRECT,
    PathKind.RELAY: Tier.RELAY,
}
NAMES: Mapping[PathKind, str] = {
    PathKind.LOOPBACK: "loopback",
    PathKind.LAN: "lan",
    PathKind.PUBLIC: "direct",
    PathKind.PUNCHED: "punched",
    PathKind.RELAY: "relay",
}


@dataclass(frozen=True, slots=True)
class PathView:
    """One path as the policy and people see it.

    rtt: seconds, smoothed, None before the first pong. samples: pongs so far. loss: share 0–1 of the last packets.
    size: UDP payload in bytes that it is known to carry. demoted: why it lost its tier, "" when it did not.
    home: the relay that the peer calls its home. proven: the peer has answered on it at least once.
    down: a relay that cannot be used now: our link is down, or it said that the peer is not there.
    """

    path: PathId
    kind: PathKind
    state: PathState
    rtt: float | None = None
    samples: int = 0
    loss: float = 0.0
    size: int = UNPROBED_SIZE
    last_heard: float | None = None
    reason: str = ""
    demoted: str = ""
    home: bool = False
    proven: bool = True
    down: bool = False

    @property
    def direct(self) -> bool:
        """Whether no relay is involved."""
        return self.kind is not PathKind.RELAY

    @property
    def tier(self) -> Tier:
        """Its tier now."""
        return Tier.DEMOTED if self.demoted else TIERS[self.kind]

    @property
    def standing(self) -> int | None:
        """0 the best; None: not to be used."""
        if self.down:
            return None
        match self.state:
            case PathState.LIVE:
                return 0
            case PathState.PROBING | PathState.CANDIDATE:
                return None if self.direct else 1
            case PathState.DOUBTED:
                return 2
            case PathState.DEAD:
                return 3 if self.proven else None

    @property
    def preference(self) -> tuple[int, int]:
        """What goes before RTT: the tier, then the peer's home relay."""
        return self.tier, 0 if self.home else 1


@dataclass(frozen=True, slots=True)
class Decision:
    """Where datagrams go now. `since`: when the primary became it; `reason`: a sentence for people.

    The fields after `tier` are the policy's memory: which path is faster than the primary, since when, how many
    samples it had then, and when RTT last was the reason for a switch.
    """

    primary: PathId | None = None
    duplicate: PathId | None = None
    reason: str = NO_PATH
    since: float = 0.0
    tier: Tier = Tier.NONE
    faster: PathId | None = None
    faster_since: float = 0.0
    faster_samples: int = 0
    gained_at: float = float("-inf")


def choose(
    views: Sequence[PathView], current: Decision, now: float, config: PathConfig, why_relay: str = ""
) -> Decision:
    """The decision that follows `current`. `why_relay` says for people why there is no direct path."""
    situation = _Situation(views, current, now, config)
    chosen = situation.held
    for rule in RULES:
        found = rule(situation)
        if found is not None:
            chosen = found
            break
    if chosen is None:
        waiting = any(view.state is PathState.PROBING for view in views)
        reason = "no path yet: waiting for an answer" if waiting else NO_PATH
        return Decision(reason=reason, since=_since(current, None, now))
    duplicate = _duplicate(situation, chosen)
    memory = situation.memory if chosen is situation.held else situation.forgotten
    return replace(
        memory,
        primary=chosen.path,
        duplicate=None if duplicate is None else duplicate.path,
        reason=_reason(situation, chosen, duplicate, why_relay),
        since=_since(current, chosen.path, now),
        tier=chosen.tier,
    )


class _Situation:
    def __init__(self, views: Sequence[PathView], current: Decision, now: float, config: PathConfig) -> None:
        self.views, self.current, self.now, self.config = views, current, now, config
        self.usable = sorted((view for view in views if view.standing is not None), key=_order)
        self.best = self.usable[0] if self.usable else None
        self.held = next((view for view in self.usable if view.path == current.primary), None)
        self.forgotten = replace(current, faster=None)
        self.memory = self.forgotten


def _order(view: PathView) -> tuple[int, int, int, float]:
    assert view.standing is not None
    if view.state is PathState.DEAD:  # the one that answered last: the others' addresses may be somebody else's by now
        return view.standing, 0, 0, 0.0 if view.last_heard is None else -view.last_heard
    return view.standing, *view.preference, 9.0 if view.rtt is None else view.rtt


def _gone(at: _Situation) -> PathView | None:
    return at.best if at.held is None or at.held.state is PathState.DEAD else None


def _unproven(at: _Situation) -> PathView | None:
    held, best = at.held, at.best
    if held is None or best is None or held.standing != 1:
        return None
    return best if best.standing == 0 or best.preference < held.preference else held


def _doubted(at: _Situation) -> PathView | None:
    held = at.held
    if held is None or held.state is not PathState.DOUBTED:
        return None
    for view in at.usable:
        heard = view.last_heard
        is_fresh = heard is not None and at.now - heard < at.config.fresh and heard > (held.last_heard or 0.0)
        if view.state is PathState.LIVE and view.preference <= held.preference and is_fresh:
            return view
    return held


def _better(at: _Situation) -> PathView | None:
    held, best = at.held, at.best
    if held is None or best is None or best.state is not PathState.LIVE:
        return None
    return best if best.preference < held.preference else None


def _faster(at: _Situation) -> PathView | None:
    held, config, current = at.held, at.config, at.current
    if held is None or held.rtt is None:
        return None
    for view in at.usable:  # in order of RTT: the first is the fastest
        if view.state is not PathState.LIVE or view.preference != held.preference or view.rtt is None:
            continue
        gain = held.rtt - view.rtt
        if gain < min(config.gain_absolute, max(config.gain_floor, config.gain_share * held.rtt)):
            return None
        if current.faster != view.path:
            at.memory = replace(current, faster=view.path, faster_since=at.now, faster_samples=view.samples)
            return None
        at.memory = current
        held_long = at.now - current.faster_since >= config.gain_hold
        held_often = view.samples - current.faster_samples >= config.gain_samples
        if held_long and held_often and at.now - current.gained_at >= config.gain_dwell:
            at.forgotten = replace(at.forgotten, gained_at=at.now)
            return view
        return None
    return None


RULES: tuple[Callable[[_Situation], PathView | None], ...] = (_gone, _unproven, _doubted, _better, _faster)


def _duplicate(at: _Situation, chosen: PathView) -> PathView | None:
    # A path in doubt is backed by the one that fails for other reasons: a relay, unless the doubted one is a relay.
    if chosen.state not in (PathState.DOUBTED, PathState.DEAD):
        return None
    others = [view for view in at.usable if view.path != chosen.path and view.standing in (0, 1)]
    return min(others, key=lambda view: (view.direct == chosen.direct, _order(view)), default=None)


def _since(current: Decision, primary: PathId | None, now: float) -> float:
    return current.since if current.primary == primary else now


def _reason(at: _Situation, chosen: PathView, duplicate: PathView | None, why_relay: str) -> str:
    name = NAMES[chosen.kind]
    if duplicate is not None:
        return f"duplicated: {name} {_silence(chosen, at.now)}, also by {NAMES[duplicate.kind]}"
    if chosen.standing in (2, 3):
        others = any(view.path != chosen.path for view in at.usable)
        return f"{name}: {'nothing answers' if others else 'the only path'}, {_silence(chosen, at.now)}"
    if chosen.demoted:
        return f"{name}: it {chosen.demoted}, but there is no other path"
    relay = next((view for view in at.usable if not view.direct and view.path != chosen.path), None)
    if chosen.direct:
        rtt = "a handshake came through" if chosen.rtt is None else _milliseconds(chosen.rtt)
        return f"{name}: {rtt}" + (f", relay {_milliseconds(relay.rtt)}" if relay and relay.rtt is not None else "")
    rtt = "no answer yet" if chosen.rtt is None else _milliseconds(chosen.rtt)
    if chosen.standing != 0:
        return f"relay: {rtt}" + (f"; {why_relay}" if why_relay else "")
    for view in at.views:
        if view.direct and view.demoted:
            return f"relay: direct path {view.demoted}"
    for view in at.views:
        if view.direct and view.proven and view.state is PathState.DEAD:
            return "relay: the direct path does not answer"
    if why_relay:
        return why_relay
    return f"relay: {rtt}, no direct path is known"


def _silence(view: PathView, now: float) -> str:
    if view.last_heard is None:
        return "silent"
    silence = max(0.0, now - view.last_heard)
    return f"silent for {silence:.1f} s" if silence < 10 else f"silent for {silence:.0f} s"


def _milliseconds(rtt: float | None) -> str:
    return "?" if rtt is None else f"{rtt * 1000:.0f} ms" if rtt >= 0.001 else "< 1 ms"
