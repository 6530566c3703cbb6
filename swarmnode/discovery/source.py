"""What every way of hearing of peers has in common: mDNS (mdns), the relays' directories (relay_directory).

Peers told by peers need no Source: whoever has the connections offers what it is told (discovery.Discovery.told).
Nothing that a source hears is checked by it beyond whose it claims to be; peer_book does that.
"""

from __future__ import annotations

from typing import Protocol

from transport.identity import PeerId


class Sink(Protocol):
    """What a source tells; discovery.Discovery is one. Called on the loop."""

    def heard(self, blob: bytes, source: str, *, lasting: bool, publisher: PeerId | None = None) -> None:
        """A record, as bytes that nobody has checked.

        publisher: whose session it came from, where the source vouches for that: what one publisher does is then not
        held against the others of the source.

        lasting: the source keeps announcing what it was told once, so that a record says where a peer may be found and
        nothing of whether it is alive; `lost` is told when it ends.
        """

    def lost(self, peer: PeerId, source: str) -> None:
        """The source does not announce this peer any more: a hint, no proof."""


class Source(Protocol):
    """One way of hearing of peers, and of being heard of."""

    name: str

    async def start(self, sink: Sink) -> None:
        """Listen from now on. What cannot work is told by the source's own callback; nothing is raised."""

    def announce(self, blob: bytes) -> None:
        """Our own record, issued again every few seconds; with a life of 0 the last one."""

    def network_changed(self) -> None:
        """This machine's addresses may have changed."""

    async def close(self) -> None:
        """Say goodbye where that is possible, and end."""
