"""What is new between two snapshots, one line each, for an output that is no terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from swarmnode.dashboard.cells import clean
from swarmnode.dashboard.look import size
from swarmnode.dashboard.model import SHORT_ID
from swarmnode.status import NodeStatus, PeerStatus

Change = tuple[float | None, str]  # when, in seconds since 1970 (None: now), and what


def changes(old: NodeStatus | None, new: NodeStatus) -> Iterator[Change]:
    """Lines, oldest first. Of the first snapshot what there is; of a node that was started anew the same."""
    if old is None or old.peer != new.peer or new.uptime_s < old.uptime_s:
        yield None, clean(f"{new.name} ({new.peer[:SHORT_ID]}): {new.role} of {new.model or 'no model yet'}")
        old = None
    before = {peer.peer: peer for peer in old.peers} if old is not None else {}
    last = old.events[-1].number if old is not None and old.events else 0
    for event in new.events:
        if event.number > last:
            yield event.at, clean(event.text)
    for peer in new.peers:
        if (text := _peer(before.pop(peer.peer, None), peer)) is not None:
            yield None, clean(f"{peer.name or 'peer'} ({peer.peer[:SHORT_ID]}): {text}")
    for peer in before.values():
        yield None, clean(f"{peer.name or 'peer'} ({peer.peer[:SHORT_ID]}): gone")
    if old is None:
        return
    for what in ("nat", "model"):
        was, now = getattr(old, what), getattr(new, what)
        if was != now:
            yield None, clean(f"{what}: {now} (was {was})")
    for url in [one for one in new.relays if one not in old.relays]:
        yield None, clean(f"relay {url} connected")
    if (yielded := _generation(old, new)) is not None:
        yield None, clean(yielded)
    if new.swarm is not None and old.swarm is not None and new.swarm.held_bytes != old.swarm.held_bytes:
        yield None, f"holding {size(new.swarm.held_bytes)} of {size(new.swarm.budget)}"


def _peer(old: PeerStatus | None, new: PeerStatus) -> str | None:
    held = f", {new.experts} experts" if new.experts else ""
    if old is None or old.path != new.path:
        came = "" if old is None or old.path == "none" else f" (was {old.path})"
        if new.path == "none":
            return f"not connected{came}; {new.reason}"
        return f"{new.role} on {new.path}{held}{came}; {new.reason}"
    if old.suspect != new.suspect:
        return "suspended: it failed lately" if new.suspect else "asked again"
    if old.experts != new.experts:
        return f"holds {new.experts} experts (was {old.experts})"
    return None


def _generation(old: NodeStatus, new: NodeStatus) -> str | None:
    was, now = old.generation, new.generation
    if now.running > was.running:
        return f"generating: {now.running} of {now.parallel} at once"
    if now.running < was.running:
        return f"generated: {now.tokens} tokens since the start, the last at {now.tokens_per_s:.1f}/s"
    return None
