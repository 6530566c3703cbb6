"""What a node's events are called in front of people: one plain line each. Pure.

Used by `serve.py`, which prints them, and by `event_log.py`, which keeps the last ones for the dashboard. What is in
the fields may be chosen by peers: whoever shows a line on a terminal makes it harmless first (`dashboard/cells.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]

STAGES = {
    "onboard": "onboarding",
    "slices": "slices",
    "backbone": "fetching the backbone file",
    "verify": "verifying",
    "load": "loading",
}  # events that tell how far something is, with `done` and `total` and perhaps a `stage` of it
COUNTED = frozenset({"trace", "check", "values"})  # stages of `onboard` whose figures are steps, not bytes
TROUBLE = frozenset(
    {
        "not-attached", "damaged", "lost", "relay-lost", "relay-failed", "member-expelled", "key-in-use",
        "holding-trouble", "discovery-problem", "plan-problem", "quarantined", "task-failed", "close-problem",
    }
)  # fmt: skip
"""Events that a person may have to do something about."""

_LINES = {
    "ready": "ready: {role} of {model}\n  {address}",
    "connected": "connected to {peer} ({path})",
    "attached": "worker {name} attached ({peer})",
    "not-attached": "peer {peer} not attached: {error}",
    "damaged": "{error}; taking it from the source again",
    "lost": "lost {peer}: {reason}",
    "relay-connected": "relay {url} connected",
    "relay-lost": "relay {url} lost: {reason}",
    "relay-left": "relay {url} left: {reason}",
    "relay-failed": "relay {url} not connected: {reason}; trying on",
    "stopping": "stopping",
    "ticket": "to let devices in, run there:\n  swarmnode up {ticket}",
    "waiting-for-model": "a member of the swarm; waiting for its model",
    "model": "the swarm runs {name}",
    "member": "{role} {name} is here ({peer:.8})",
    "member-gone": "{peer:.8} is gone",
    "member-expelled": "{peer:.8} was expelled",
    "key-in-use": "{error}",
    "joined": "{name} joined ({peer:.8})",
    "holding": "holding {experts} experts",
    "holding-trouble": "cannot hold what was assigned: {error}; trying again",
    "handing-over": "handing over {experts} experts; Ctrl-C again to leave at once",
    "discovery-problem": "{error}",
    "plan-problem": "no new plan: {error}",
    "wire": "{note}",
    "note": "{note}",
    "quarantined": "worker {peer:.8} is not asked any more: {why}",
    "task-failed": "task {task} failed: {error}",
    "close-problem": "while closing: {error}",
}


def event_line(event: str, fields: Fields) -> str:
    """An event as people read it; of a few, two lines."""
    if event == "path":
        return _path_line(fields)
    if event == "plan":
        return _plan_line(fields)
    return _LINES[event].format(**fields) if event in _LINES else f"{event} {dict(fields)}"


def stage_name(event: str, fields: Fields) -> str:
    """What a progress event is about, as in "onboarding: digests"."""
    return STAGES[event] + (f": {fields['stage']}" if "stage" in fields else "")


def _plan_line(fields: Fields) -> str:
    """As in "plan (a worker came): 9 experts here, 33 on 2 workers, 22 only in this node's file"."""
    parts = [
        f"{fields['local']} experts here",
        f"{sum(fields['workers'].values())} on {len(fields['workers'])} workers",
    ]
    if fields["uncovered"]:
        where = "only in this node's file" if fields["has_file"] else "with nobody: give more --memory or devices"
        parts.append(f"{fields['uncovered']} {where}")
    return f"plan ({fields['why']}): {', '.join(parts)}"


def _path_line(fields: Fields) -> str:
    """As in "peer abcd1234: direct-lan 192.168.1.7:5000, 12 ms (was relay)"."""
    rtt, where = fields["rtt_ms"], fields["relay"] or fields["address"]
    detail = fields["reason"] if rtt is None else f"{rtt:.0f} ms" if rtt >= 1 else "< 1 ms"
    there = f"{fields['path']} {where}, {detail}" if where else detail
    return f"peer {fields['peer']:.8}: {there} (was {fields['was']})"
