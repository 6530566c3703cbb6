"""This node among the members of its swarm: who is in, who is here, what is told to whom. A shell.

    discovery   my record in front of the others, theirs in one book: mDNS, relays' directories, members' links
    mesh        links on the lane "swarm"; records, revocations and the swarm's work go over them
    bulk        manifest, backbone file and slices, given to members and taken from them

Who does what with the model is decided above: `node.py` hears of messages and of members that come and go. Made by it
once the endpoint is bound; `start`, then `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from swarmnode.authority import SwarmAuthority
from swarmnode.bulk.frames import LANE as BULK_LANE
from swarmnode.bulk.server import BulkServer
from swarmnode.bulk.source import PeerSource
from swarmnode.bulk.turns import Turns
from swarmnode.coordination.mesh import LANE as SWARM_LANE
from swarmnode.coordination.mesh import WHOLE_MESH, Mesh, wanted_links
from swarmnode.coordination.messages import MAX_RECORDS, Message, Records, Revoked
from swarmnode.discovery.discovery import Discovery
from swarmnode.discovery.peer_book import Event, EventKind, PeerBook
from swarmnode.discovery.record import PeerRecord
from swarmnode.discovery.relay_directory import RelayDirectory
from swarmnode.discovery.source import Source as DiscoverySource
from swarmnode.errors import BadDocument, BadMessage, SourceFailed, SwarmFilesDamaged
from swarmnode.membership import JOIN_LANE, BootstrapPeer, Revocations
from swarmnode.membership.documents import NO_INVITATION
from swarmnode.model.manifest import Manifest
from swarmnode.peer_links import PeerLinks
from swarmnode.swarm_entry import Entry, admit_newcomer, remember
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import KEY_CONNECTED_ANEW, Address, ConnectionReplaced, TransportError
from transport.identity import Identity, PeerId

TELL_S = 1.0  # how often news of peers is passed on
REMEMBER_S = 5.0  # how soon the addresses of members that have changed are written down
EXPELLED = "this node was expelled from the swarm: ask its founder"
KEY_IN_USE = (
    "another node uses this node's key, so members take the two for one: start each with a --state of its own "
    "instead of a copy"
)
log = logging.getLogger(__name__)


class Member:
    """See the module. `describe` is what this node says of itself; `on_message` hears what is not about members.

    `on_members` is called when members came, changed or went; `on_link(peer, up)` when a link did;
    `on_over(why)` when this node cannot be a member any longer.
    """

    def __init__(
        self,
        identity: Identity,
        endpoint: Endpoint,
        entry: Entry,
        *,
        bulk: BulkServer,
        links: PeerLinks,
        is_open: bool,
        mdns: bool,
        describe: Callable[[PeerRecord], PeerRecord],
        on_message: Callable[[PeerId, Message], None],
        on_members: Callable[[], None],
        on_link: Callable[[PeerId, bool], None],
        on_over: Callable[[str], None],
        emit: Callable[..., None],
    ) -> None:
        self.membership, self._entry = entry.membership, entry
        self._endpoint, self._bulk, self._links = endpoint, bulk, links
        self._describe, self._on_message, self._on_members = describe, on_message, on_members
        self._on_link, self._on_over, self._emit = on_link, on_over, emit
        book = PeerBook(self.membership.swarm, self.membership.own, judge=self._judge_record)
        sources: list[DiscoverySource] = [RelayDirectory(endpoint.reach.directory, self.membership.swarm)]
        if mdns:
            from swarmnode.discovery.mdns import Mdns  # noqa: PLC0415  zeroconf, where it is used only

            sources.append(
                Mdns(
                    self.membership.swarm,
                    self.membership.own,
                    port=endpoint.address[1],
                    is_open=is_open,
                    on_problem=lambda why: emit("discovery-problem", error=why),
                )
            )
        self.discovery = Discovery(
            identity,
            book,
            sources,
            describe=self._own_record,
            on_event=self._heard,
            on_gone=self._gone,
            on_twin=self._twin,
        )
        self.mesh = Mesh(links, self._message, self._link_up, self._link_down)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sources: dict[PeerId, PeerSource] = {}
        self._turns = Turns(self.membership.own)
        self._asking: set[PeerId] = set()
        self._giving: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._arrived: dict[PeerId, int] = {}  # datagrams, when it was looked at last
        self._serial = -1
        self._hubs: set[PeerId] = set()  # members that everybody has a link to
        self._met_news = False  # since addresses were written down
        self._taken: dict[PeerId, int] = {}  # bytes, over connections that have ended
        self._closing = False
        self._has_twin = False

    async def start(self) -> None:
        """Be seen, and look for the others."""
        await self.discovery.start()
        self._retarget()
        self._spawn(self._tell_often())
        if self._entry.authority is not None:
            self._spawn(self._follow(self._entry.authority))

    async def close(self) -> None:
        """Say goodbye to everybody."""
        self._closing = True
        self.mesh.broadcast(Records([self.discovery.leave()]))
        for source in list(self._sources.values()):
            await source.close()
        await self.mesh.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.discovery.close()

    # ---- who is here

    def records(self) -> list[PeerRecord]:
        """Members that are alive, without this node."""
        return self.discovery.book.records(asyncio.get_running_loop().time())

    def record(self, peer: PeerId) -> PeerRecord | None:
        """What a member says of itself."""
        return self.discovery.book.get(peer)

    def addresses_of(self, peer: PeerId) -> list[Address]:
        """Where a member may be, as it says and as the ticket said."""
        record = self.discovery.book.get(peer)
        told = list(record.addresses) if record is not None else []
        for known in self._entry.bootstrap:
            if known.peer == peer:
                told += known.addresses
        return list(dict.fromkeys(told))

    def adopt(self, connection: Connection) -> bool:
        """Use a connection, if its lane is one of this room."""
        match connection.lane:
            case lane if lane == SWARM_LANE:
                self.mesh.adopt(connection)
            case lane if lane == BULK_LANE:
                self._spawn(self._give(connection))
            case lane if lane == JOIN_LANE:
                self._spawn(self._let_in(connection))
            case _:
                return False
        return True

    def generates(self, record: PeerRecord) -> bool:
        """Whether a member generates: it says so, and the swarm has certified it for that."""
        certificate = self.membership.certificate_of(record.peer)
        return record.role != "worker" and certificate is not None and certificate.role != "worker"

    # ---- taking slices

    def sources(self, manifest: Manifest) -> list[PeerSource]:
        """Members that have slices of this model and are connected for it; others are being connected."""
        model = bytes.fromhex(manifest.model_hash)[:8]
        holders = {record.peer: self.generates(record) for record in self.records() if record.model == model}
        received = {peer: source.received_bytes for peer, source in self._sources.items()}
        for peer in self._turns.ended(holders, received, asyncio.get_running_loop().time()):
            self._spawn(self._end_source(self._sources.pop(peer), peer))
        for peer in self._turns.choose(holders, self._sources.keys() | self._asking):
            if peer not in self._sources and peer not in self._asking:
                self._asking.add(peer)
                self._spawn(self._open_source(peer, manifest))
        return list(self._sources.values())

    def taken(self) -> dict[PeerId, int]:
        """Bytes of slices that came from each member since the start."""
        sums = dict(self._taken)
        for peer, source in self._sources.items():
            sums[peer] = sums.get(peer, 0) + source.received_bytes
        return sums

    async def bulk_connection(self, peer: PeerId) -> Connection:
        """A connection for the lane "bulk". Raises TransportError."""
        return await self._endpoint.dial(peer, self.addresses_of(peer), lane=BULK_LANE)

    # ---- inside: members

    def _own_record(self) -> PeerRecord:
        certificate = self.membership.certificate
        return self._describe(
            PeerRecord(
                swarm=self.membership.swarm,
                peer=self.membership.own,
                seq=0,
                ttl_s=0,
                relays=tuple(view.url for view in self._endpoint.relays() if view.own and view.up)[:3],
                certificate=certificate.encode() if certificate is not None else b"",
            )
        )

    def _judge_record(self, record: PeerRecord) -> str | None:
        return self.membership.judge_certificate(record.peer, record.certificate, time.time())

    def _heard(self, event: Event) -> None:
        peer = event.record.peer
        if event.kind is EventKind.LEFT:
            self._gone(peer)
            return
        if event.kind in (EventKind.NEW, EventKind.CHANGED, EventKind.CANDIDATE):
            self._retarget()
            self._links.hurry(peer)
        if event.kind is EventKind.NEW:
            self._emit("member", peer=str(peer), name=event.record.name, role=event.record.role)
        if event.kind in (EventKind.NEW, EventKind.CHANGED):
            self._met_news = True
            self._on_members()

    def _gone(self, peer: PeerId) -> None:
        if self._closing:
            return
        self._emit("member-gone", peer=str(peer))
        self._retarget()
        self._on_members()

    def _twin(self, teller: PeerId | None = None) -> None:
        """Another node has this node's key: a record signed with it says so, or `teller` does. The later one stays."""
        if not self._has_twin and not self._closing:
            self._has_twin = True
            self._emit("key-in-use", error=KEY_IN_USE)
        certificate = self.membership.certificate_of(teller) if teller is not None else None
        if certificate is not None and certificate.invitation == NO_INVITATION and not self._closing:
            self._on_over(KEY_IN_USE)  # the founder is believed: it could expel this node as well

    def _retarget(self) -> None:
        here = {record.peer: record for record in self.records()}
        self._hubs = {peer for peer, record in here.items() if self.generates(record)}
        known = {*here, *(record.peer for record in self.discovery.book.candidates())}
        known |= {one.peer for one in self._entry.bootstrap} if not here else set()
        self.mesh.target(wanted_links(self.membership.own, known, self._hubs))

    async def _tell_often(self) -> None:
        remembered = -REMEMBER_S
        while True:
            await asyncio.sleep(TELL_S)
            for peer in self.mesh.up():
                connection = self.mesh.connection(peer)
                arrived = connection.stats().datagrams_in if connection is not None else 0
                if arrived != self._arrived.get(peer, 0):
                    self.discovery.sees(peer)
                self._arrived[peer] = arrived
            members = len(self.discovery.book)
            hubs = self._hubs if members > WHOLE_MESH else ()
            for peer, blobs in self.discovery.news(self.mesh.up(), hubs, members).items():
                self._tell(blobs, peer)
            if self._met_news and time.monotonic() - remembered > REMEMBER_S:
                remembered, self._met_news = time.monotonic(), False
                await self._remember()

    async def _remember(self) -> None:
        met = tuple(BootstrapPeer(record.peer, tuple(record.addresses)) for record in self.records())
        try:
            await asyncio.to_thread(remember, self._entry, met)
        except Exception as error:  # a disk that is full must not end the node
            self._emit("discovery-problem", error=str(error))

    def _tell(self, blobs: Sequence[bytes], peer: PeerId) -> None:
        for at in range(0, len(blobs), MAX_RECORDS):
            self.mesh.send(peer, Records(list(blobs[at : at + MAX_RECORDS])))

    async def _follow(self, authority: SwarmAuthority) -> None:
        """Hear what commands have written into the founder's files: whom it has put out."""
        told = ""
        while True:
            try:
                await asyncio.to_thread(authority.refresh)
                told = ""
            except SwarmFilesDamaged as error:  # what was known is good; the person at this node can mend it
                if told != str(error):
                    told = str(error)
                    self._emit("discovery-problem", error=told)
            self._apply(authority.revocations)
            await asyncio.sleep(TELL_S)

    # ---- inside: links

    def _link_up(self, peer: PeerId) -> None:
        self._tell(self.discovery.everything(peer), peer)
        if self.membership.revocations.serial:
            self.mesh.send(peer, Revoked(self.membership.revocations.encode()))
        self._on_link(peer, True)

    def _link_down(self, peer: PeerId, connection: Connection) -> None:
        why = connection.close_reason
        if isinstance(why, ConnectionReplaced) and why.by == "peer" and why.reason == KEY_CONNECTED_ANEW:
            self._twin(peer)
        if not self._closing:
            self._on_link(peer, False)

    def _message(self, peer: PeerId, message: Message) -> None:
        match message:
            case Records(blobs):
                self.discovery.told(blobs, peer)
            case Revoked(blob):
                try:
                    self._apply(Revocations.decode(blob), but=peer)
                except BadDocument as error:
                    raise BadMessage(str(error)) from None
            case _:
                self._on_message(peer, message)

    def _apply(self, revocations: Revocations, but: PeerId | None = None) -> None:
        if revocations.serial <= self._serial:
            return
        out = self.membership.apply(revocations)
        self._serial = self.membership.revocations.serial
        self.mesh.broadcast(Revoked(self.membership.revocations.encode()), but=but)
        for peer in out:
            if peer == self.membership.own:
                self._spawn(self._end_membership())
                continue
            self._emit("member-expelled", peer=str(peer))
            self.discovery.book.forget(peer)
            self._spawn(self._drop(peer))
        if out:
            self._spawn(self._remember())
            self._on_members()

    async def _end_membership(self) -> None:
        await self._remember()  # the next start need not ask
        self._on_over(EXPELLED)

    async def _drop(self, peer: PeerId) -> None:
        await self.mesh.drop(peer, "expelled from the swarm")
        for connection in self._endpoint.connections():
            if connection.peer == peer:
                await connection.close(1, "expelled from the swarm")

    # ---- inside: bulk and newcomers

    async def _let_in(self, connection: Connection) -> None:
        name = await admit_newcomer(self._entry, connection)
        if name:
            self._emit("joined", peer=str(connection.peer), name=name)

    async def _give(self, connection: Connection) -> None:
        if connection in self._giving:  # both sides dialled it
            return
        self._giving.add(connection)
        with contextlib.suppress(TransportError):
            await self._bulk.serve(connection)

    async def _end_source(self, source: PeerSource, peer: PeerId) -> None:
        """Take no more from a member; the connection stays, as it may take slices from us."""
        self._taken[peer] = self._taken.get(peer, 0) + source.received_bytes
        await source.close()

    async def _open_source(self, peer: PeerId, manifest: Manifest) -> None:
        try:
            connection = await self.bulk_connection(peer)
            self._spawn(self._give(connection))  # the other side may ask over the same connection
            source = await PeerSource.open(connection, manifest, str(peer))
            self._sources[peer] = source
            self._asking.discard(peer)
            await connection.wait_closed()
            if self._sources.get(peer) is source:
                await self._end_source(self._sources.pop(peer), peer)
        except (TransportError, SourceFailed) as error:
            log.info("bulk_source_failed peer=%s why=%r", peer.short, str(error))
            self._turns.failed(peer)
            await asyncio.sleep(TELL_S)  # not at once again
        finally:
            self._asking.discard(peer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._emit("task-failed", task=task.get_name(), error=f"{type(error).__name__}: {error}")
