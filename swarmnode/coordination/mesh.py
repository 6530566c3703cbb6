"""Connections between members on the lane "swarm", and the messages that go over them. A shell.

Small swarms are whole meshes; in larger ones everybody keeps a link to those who generate and to a few others, so that
news reaches all in two or three steps. Who is linked follows from the peers' keys and is the same decision everywhere;
`wanted_links` is pure. Made by `member.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable

from swarmnode.coordination.message_link import MessageLink
from swarmnode.coordination.messages import Message
from swarmnode.errors import PeerFault
from swarmnode.peer_links import PeerLinks
from transport.connection import Connection
from transport.errors import TransportError
from transport.identity import PeerId

LANE = "swarm"
WHOLE_MESH = 12  # members up to which everybody is linked with everybody
OTHERS = 4  # links to others than backbones in a larger swarm
log = logging.getLogger(__name__)

OnMessage = Callable[[PeerId, Message], None]


def wanted_links(own: PeerId, members: Collection[PeerId], hubs: Iterable[PeerId]) -> set[PeerId]:
    """The members to be linked with: all in a small swarm; else the hubs, and the OTHERS nearest by a hash of both
    keys, which spreads them evenly and lets both ends agree without a word."""
    others = [peer for peer in members if peer != own]
    if len(others) <= WHOLE_MESH:
        return set(others)
    near = sorted(others, key=lambda peer: hashlib.sha256(min(own, peer).raw + max(own, peer).raw).digest())
    return {*near[:OTHERS], *(hub for hub in hubs if hub != own)}


class Mesh:
    """See the module. `on_message` may raise PeerFault, which ends that peer's link; `on_up` and `on_down` tell of
    links. Loop thread only."""

    def __init__(
        self,
        links: PeerLinks,
        on_message: OnMessage,
        on_up: Callable[[PeerId], None],
        on_down: Callable[[PeerId, Connection], None],
    ) -> None:
        self._links = links
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        self._open: dict[PeerId, MessageLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted: set[PeerId] = set()
        self._closing = False

    def target(self, peers: set[PeerId]) -> None:
        """Keep links to exactly these; a link that a peer opened stays."""
        for peer in peers - self._wanted:
            self._links.want(peer, LANE)
        for peer in self._wanted - peers:
            self._links.unwant(peer, LANE)
        self._wanted = set(peers)

    def visit(self, peer: PeerId) -> None:
        """Dial a peer that need not be linked, until `leave`; a link that came of it stays."""
        if peer not in self._wanted:
            self._links.want(peer, LANE)
            self._links.hurry(peer)

    def leave(self, peer: PeerId) -> None:
        """Dial it no more, unless it is to be linked anyway."""
        if peer not in self._wanted:
            self._links.unwant(peer, LANE)

    def problem(self, peer: PeerId) -> str:
        """Why there is no link to this peer, "" where nothing is known."""
        return self._links.problems.get(str(peer), "")

    def adopt(self, connection: Connection) -> None:
        """Use a connection of this lane, whoever dialled it; none once this closes, whose endpoint ends it then."""
        if self._closing:
            return
        task = asyncio.create_task(self._run(connection), name=f"swarm link {connection.peer.short}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def up(self) -> list[PeerId]:
        """Peers that are linked now."""
        return list(self._open)

    def connection(self, peer: PeerId) -> Connection | None:
        """The connection of a link, for its figures."""
        link = self._open.get(peer)
        return link.connection if link is not None else None

    async def link_ended(self, peer: PeerId) -> None:
        """Return when there is no link to this peer."""
        link = self._open.get(peer)
        if link is not None:
            await link.connection.wait_closed()

    def send(self, peer: PeerId, message: Message) -> bool:
        """Queue a message; False where there is no link."""
        link = self._open.get(peer)
        if link is not None:
            link.send(message)
        return link is not None

    def broadcast(self, message: Message, *, but: PeerId | None = None) -> None:
        """Queue a message to every linked peer except one."""
        for peer, link in list(self._open.items()):
            if peer != but:
                link.send(message)

    async def drop(self, peer: PeerId, why: str) -> None:
        """End the link to a peer that is no member any more."""
        self._links.unwant(peer, LANE)
        self._wanted.discard(peer)
        link = self._open.get(peer)
        if link is not None:
            await link.drain(1.0)  # it is told why
            await link.close(why)

    async def close(self) -> None:
        """Say what is queued, then end all links: also those that a newer one with the same peer has replaced."""
        self._closing = True
        await asyncio.gather(*(link.drain(1.0) for link in self._open.values()))
        await asyncio.gather(*(link.close("leaving") for link in list(self._open.values())))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, connection: Connection) -> None:
        peer = connection.peer
        older = self._open.get(peer)
        if older is not None and older.connection is connection:
            return
        link = self._open[peer] = MessageLink(connection)
        self._on_up(peer)
        try:
            async for message in link.messages():
                self._on_message(peer, message)
        except PeerFault as error:
            log.info("swarm_link_broken peer=%s why=%r", peer.short, str(error))
            await link.break_off(error)
        except TransportError as error:
            await link.close(str(error))
        except Exception:
            log.exception("swarm_message_failed peer=%s", peer.short)
            await link.close("internal error")
        finally:
            if self._open.get(peer) is link:
                del self._open[peer]
                self._on_down(peer, connection)
