"""Who may see a member's status, how often, and which member is meant by a name. Pure.

One file of policy: `swarmnode/member_view.py` asks it and moves the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from swarmnode.errors import ControlError, UsageError
from transport.identity import PeerId

AllowView = Literal["members", "founder", "nobody"]
ALLOW_VIEW: tuple[AllowView, ...] = ("members", "founder", "nobody")

PAUSE_S = 1.0  # between two answers to one member: as often as a view draws a new value
ASKER_BPS = 128 << 10  # bytes per second to one member: a large status comes less often
TOTAL_BPS = 512 << 10  # to all members together: half of a home's uplink of 10 Mbit/s, for seconds only
TOTAL_AHEAD_S = 2.0  # what may be told at once, in seconds of TOTAL_BPS
MAX_ASKERS = 4096  # remembered; who has waited long enough is forgotten
NAMES = 8  # told in an error

LINK_S = 5.0  # until there is a link to a member that we had none to
ANSWER_S = 5.0  # until a member that does not answer is said not to
MAX_PAUSE_S = 5.0  # however long a member wants us to wait: it is asked then, and may refuse
TRIES = 2  # an answer of "too soon" is waited for; a second one is told
LONGEST_S = TRIES * (MAX_PAUSE_S + ANSWER_S) + LINK_S  # that asking may take, links and pauses with it


def why_not_shown(allow: AllowView, is_founder: bool) -> str | None:
    """Why a member may not see this node, None where it may. `is_founder`: the one who asks founded the swarm."""
    if allow == "members" or (allow == "founder" and is_founder):
        return None
    return f"it runs with --allow-view {allow}"


class Pace:
    """How often questions are answered. `now` is in seconds of a clock that only runs forwards."""

    def __init__(self) -> None:
        self._next: dict[PeerId, float] = {}
        self._warned: set[PeerId] = set()
        self._busy_until = 0.0

    def wait_s(self, asker: PeerId, now: float) -> float:
        """Seconds until a question of this member is answered; 0 where it is answered now."""
        return max(0.0, self._next.get(asker, 0.0) - now, self._busy_until - now - TOTAL_AHEAD_S)

    def warns(self, asker: PeerId) -> bool:
        """Is a question that came too early refused in words? One is, until the next answer; others are not heard."""
        if asker in self._warned or len(self._warned) >= MAX_ASKERS:
            return False
        self._warned.add(asker)
        return True

    def answered(self, asker: PeerId, size: int, now: float) -> float:
        """An answer of `size` bytes goes out. Returns when the member may ask again, in seconds."""
        self._warned.discard(asker)
        if len(self._next) >= MAX_ASKERS:
            self._next = {peer: at for peer, at in self._next.items() if at > now}
        self._next[asker] = now + max(PAUSE_S, size / ASKER_BPS)
        self._busy_until = max(self._busy_until, now) + size / TOTAL_BPS
        return self.wait_s(asker, now)


def chosen_member(wanted: str, members: Sequence[tuple[PeerId, str]], own: PeerId, own_name: str) -> PeerId:
    """The member that a user means: by its whole id, its name, or the beginning of its id.

    `members` are ids and names, this node not among them. Raises UsageError where several are meant or this node
    itself, ControlError where none is here.
    """
    text = wanted.strip()
    everybody = [(own, own_name), *((peer, name) for peer, name in members if peer != own)]
    found = [peer for peer, _ in everybody if text.lower() == str(peer)]
    if not found and text:
        found = [
            peer for peer, name in everybody if name.casefold() == text.casefold() or str(peer).startswith(text.lower())
        ]
    if len(found) > 1:
        which = ", ".join(f"{peer.short} (this node)" if peer == own else peer.short for peer in found[:NAMES])
        raise UsageError(f"--peer {text[:64]} may be {len(found)} members: give the id of one: {which}")
    if found and found[0] == own:
        raise UsageError(f"--peer {text[:64]} is this node itself: leave it out")
    if not found:
        names = ", ".join(f"{name or 'without a name'} ({peer.short})" for peer, name in members[:NAMES])
        more = f" and {len(members) - NAMES} more" if len(members) > NAMES else ""
        raise ControlError(f"no member {text[:64]!r} is here: {f'there are {names}{more}' if names else 'nobody is'}")
    return found[0]
