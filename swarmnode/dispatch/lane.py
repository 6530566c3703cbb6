"""The lanes of dispatch: which connection carries whose calls. Pure."""

from __future__ import annotations

from transport.identity import PeerId

PREFIX = "dispatch:"


def dispatch_lane(caller: PeerId) -> str:
    """The lane on which `caller` calls experts of the other node. The same whoever dials, so that two nodes that serve
    each other have one connection per direction."""
    return f"{PREFIX}{caller.short}"
