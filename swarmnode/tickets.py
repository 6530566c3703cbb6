"""Tickets as commands see them: durations, rows to show, and revoking from beside a running node.

The files below STATE/swarm are shared with the node (`authority.py` locks them), which notices changes in a second.
New tickets come from the node itself, which knows where it can be reached.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from swarmnode.authority import SwarmAuthority
from swarmnode.errors import UsageError
from swarmnode.swarm_entry import FOLDER


class TicketTerms(msgspec.Struct, frozen=True):
    """What a new ticket is good for: seconds (0: for ever), devices (0: any number), what they may be."""

    expires_s: float = 86400.0
    uses: int = 0
    role: Literal["worker", "backbone", "any"] = "worker"


_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([smhd])", re.ASCII)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_ROLES = ("worker", "backbone", "any")


def parse_duration(text: str) -> float:
    """Seconds from 90s, 30m, 24h, 7d; 0 for never. UsageError with examples."""
    clean = text.strip().lower()
    if clean == "never":
        return 0.0
    match = _DURATION.fullmatch(clean)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= 100 * 365 * _UNITS["d"]:
        raise UsageError(f"--expires {text[:40]}: give a time such as 30m, 24h or 7d, or never")
    return seconds


def checked_role(text: str) -> str:
    """UsageError for what is no role."""
    if text not in _ROLES:
        raise UsageError(f"--role {text[:40]}: say worker, backbone or any")
    return text


def ticket_rows(state_dir: Path) -> list[dict[str, Any]]:
    """All tickets given out, the oldest first. UsageError where no swarm was founded here."""
    now = time.time()
    return [
        {
            "id": one.invitation.label,
            "role": one.invitation.role,
            "created": one.created,
            "expires": one.invitation.expires,
            "uses": one.invitation.uses,
            "joined": [str(peer) for peer in one.joined],
            "open": one.invitation.open,
            "state": one.objection(now) or "good",
        }
        for one in _authority(state_dir).list()
    ]


def revoke(state_dir: Path, named: str, *, expel: bool) -> dict[str, Any]:
    """Revoke a ticket. UsageError where none or several are meant."""
    authority = _authority(state_dir)
    before = {one.invitation.id: one.revoked for one in authority.list()}
    authority.revoke(named, expel)
    changed = [one for one in authority.list() if one.revoked and not before.get(one.invitation.id)]
    joined = sum(len(one.joined) for one in changed)
    label = changed[0].invitation.label if changed else named[:16]
    stays = f"; {joined} that joined with it stay (--expel puts them out)" if joined and not expel else ""
    return {"id": label, "expelled": joined if expel else 0, "message": f"revoked {label}{stays}"}


def expel(state_dir: Path, named: str) -> dict[str, Any]:
    """Put a member out. UsageError where none or several are meant."""
    authority = _authority(state_dir)
    before = authority.revocations.peers
    gone = sorted(str(peer) for peer in authority.expel(named).peers - before)
    return {"peers": gone, "message": f"expelled {gone[0]}" if gone else f"{named[:16]} was out already"}


def _authority(state_dir: Path) -> SwarmAuthority:
    folder = state_dir / FOLDER
    if not SwarmAuthority.exists(folder):
        raise UsageError(f"no swarm was founded in {state_dir}: swarmnode up --model FILE founds one")
    return SwarmAuthority(folder)
