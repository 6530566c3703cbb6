"""What a node does as a member of a swarm, beside serving and generating. A shell, composed and owned by `node.py`.

enter     which swarm this is (files)                 the endpoint is bound with `gate`
begin     become a member, find the others
find_model   what the swarm runs: manifest, and for one that generates the backbone file, from members
serve     a worker: carry out what the founder assigns, report, hand over before leaving
lead      the founder: plan who holds what
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from swarmnode.bulk.download import fetch_backbone, fetch_manifest
from swarmnode.bulk.provider import PackProvider, SliceProvider, SourceProvider, StoreProvider
from swarmnode.bulk.server import BulkServer
from swarmnode.bulk.source import Source
from swarmnode.config import NodeConfig, format_address
from swarmnode.coordination.agent import HoldingsAgent
from swarmnode.coordination.founder_verdict import FounderVerdict
from swarmnode.coordination.lead import Lead
from swarmnode.coordination.messages import (
    Assign,
    Gated,
    Leaving,
    Message,
    Released,
    Report,
    Serves,
    StatusRefused,
    StatusTold,
    StatusWanted,
    pack_masks,
    unpack_masks,
)
from swarmnode.discovery.record import PeerRecord, shown_name
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.worker import ExpertWorker
from swarmnode.errors import BadMessage, DispatchError, ModelError, SourceFailed, SwarmnodeError, UsageError
from swarmnode.gate import gate_failure
from swarmnode.gate.told_verdict import told_file
from swarmnode.member import Member
from swarmnode.member_view import MemberView
from swarmnode.membership import BootstrapPeer, Invitation, Role, Ticket
from swarmnode.membership.documents import NO_INVITATION
from swarmnode.membership.ticket import MAX_ADDRESSES, MAX_RELAYS
from swarmnode.model.atomic_file import write_atomically
from swarmnode.model.http_url import url_of
from swarmnode.model.manifest import Manifest, decode_manifest, is_hashed
from swarmnode.model.store import SliceStore
from swarmnode.onboard import ModelPack
from swarmnode.parts import http_source
from swarmnode.peer_links import PeerLinks
from swarmnode.status import NodeStatus
from swarmnode.swarm_entry import Entry, enter, join
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import TransportError
from transport.identity import Identity, PeerId

if TYPE_CHECKING:
    from swarmnode.model.http_source import HttpSource

REPORT_S = 3.0
NOBODY_S = 15.0  # until a newcomer says that it waits in vain
FOUNDER_S = 5.0  # how long a newcomer waits for the founder's word about the model
YIELD_S = 0.002  # 64 KiB per 2 ms are 30 MB/s, while dispatch has the link and the core in between
HAND_OVER_S = 60.0  # others fetch what only this node holds; a second Ctrl-C does not wait
MEMORY_SHARE = 0.5  # of what is free, where the user says nothing: other programs, caches, the backbone's context
STANDING_S = 24 * 3600.0  # how long the ticket is good that a founder prints when it starts

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class SwarmPart:
    """See the module. Everything on the loop's thread."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        emit: Callable[..., None],
        spawn: Spawn,
        status: Callable[[], NodeStatus],
    ) -> None:
        self._config, self._identity, self._emit, self._spawn = config, identity, emit, spawn
        self._status = status
        self.entry: Entry
        self.member: Member
        self.view: MemberView
        self.agent: HoldingsAgent | None = None
        self.lead: Lead | None = None
        self._early: dict[PeerId, Report] = {}  # that came before there was a lead
        self.bulk = BulkServer(self._provider, self._pause)
        self.client: ExpertClient | None = None
        self.on_members: Callable[[], None] = lambda: None  # members came, changed or went
        self.on_over: Callable[[str], None] = lambda _why: None  # this node cannot be a member any longer
        self._providers: dict[bytes, SliceProvider] = {}
        self._tellers: dict[PeerId, Serves] = {}  # who says what this swarm runs
        self._told = asyncio.Event()
        self._serves: Serves | None = None  # what we generate with
        self._gated: Gated | None = None  # what our gate says of it, if we founded the swarm
        self._verdict = FounderVerdict(lambda note: emit("note", note=note), spawn)
        self._manifest: Manifest | None = None
        self._worker: ExpertWorker | None = None
        self._released = asyncio.Event()
        self._serving: list[asyncio.Task[None]] = []
        self._server: HttpSource | None = None
        self.budget_bytes = 0

    # ---- coming in

    async def enter(self) -> None:
        """See swarm_entry.enter."""
        self.entry = await enter(
            self._config, self._identity.peer_id, lambda why: self._emit("discovery-problem", error=why)
        )
        if self._config.open and self.entry.authority is not None:
            await asyncio.to_thread(self.entry.authority.open_door)

    def judge(self, peer: PeerId, lane: str, credentials: bytes) -> str | None:
        """For the endpoint: why `peer` may not connect, None where it may."""
        return self.entry.membership.judge(peer, lane, credentials, time.time())

    def knows(self, peer: PeerId) -> bool:
        """For the endpoint: a member that was met, or one that the ticket names."""
        return self.entry.membership.knows(peer) or any(one.peer == peer for one in self.entry.bootstrap)

    def credentials(self, lane: str) -> bytes:
        """For the endpoint: what to show."""
        return self.entry.membership.credentials(lane)

    async def begin(self, endpoint: Endpoint, links: PeerLinks) -> None:
        """Become a member, be seen, find the others. Raises JoinRefused."""
        config = self._config
        await join(self.entry, endpoint, config.name, config.role)
        self._endpoint = endpoint
        self.member = Member(
            self._identity,
            endpoint,
            self.entry,
            bulk=self.bulk,
            links=links,
            is_open=config.open and config.founds_swarm,
            mdns=config.lan,
            describe=self._describe,
            on_message=self._message,
            on_members=self._members_changed,
            on_link=self._link,
            on_over=self.on_over,
            emit=self._emit,
        )
        private = [Path.home(), config.state_dir, config.model, config.source, config.speculate]
        self.view = MemberView(
            self.member,
            config.name,
            config.allow_view,
            self._is_founder,
            self._status,
            [str(one) for path in private if isinstance(path, Path) for one in (path, path.absolute())],
        )
        await self.member.start()

    async def find_model(self) -> ModelPack:
        """The model that this swarm runs, as a pack below the state folder; waits for somebody who generates.

        The founder's word counts; another's where the founder says nothing for some seconds.
        """
        self._emit("waiting-for-model")
        try:
            async with asyncio.timeout(NOBODY_S):
                await self._told.wait()
        except TimeoutError:
            asked = ", ".join(sorted({format_address(at) for one in self.entry.bootstrap for at in one.addresses}))
            self._emit(
                "discovery-problem",
                error=f"no member that generates answers yet (asked {asked or 'the relays'}): is the founder running? "
                "If it is elsewhere now, give this node a new ticket: swarmnode up TICKET",
            )
            await self._told.wait()
        if not any(self._is_founder(peer) for peer in self._tellers):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FOUNDER_S):
                    while not any(self._is_founder(peer) for peer in self._tellers):
                        self._told.clear()
                        await self._told.wait()
        while True:
            for teller, serves in sorted(self._tellers.items(), key=lambda one: not self._is_founder(one[0])):
                try:
                    pack = await self._take_model(teller, serves)
                except (SourceFailed, TransportError) as error:
                    self._emit("discovery-problem", error=f"the model did not come from {teller.short}: {error}")
                    continue
                self._manifest = pack.manifest
                self._emit("model", name=shown_name(pack.manifest.name or serves.name))
                return pack
            await asyncio.sleep(1.0)

    async def _take_model(self, teller: PeerId, serves: Serves) -> ModelPack:
        folder = self._config.state_dir / "models" / serves.model.hex()[:16]
        manifest = _kept(folder / "manifest.json", serves.model)
        if manifest is None:
            data = await fetch_manifest(await self.member.bulk_connection(teller), serves.model)
            manifest = decode_manifest(data)
            folder.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(write_atomically, folder / "manifest.json", data)
        pack = ModelPack(folder, manifest, None)
        if self._config.is_backbone:
            pack = replace(pack, told_verdict=told_file(folder, str(self.entry.membership.swarm)))
            await self._verdict.settle(pack)
            await asyncio.to_thread(gate_failure, pack, force=self._config.force)  # before the backbone is fetched
        if self._config.is_backbone and not pack.backbone.exists():

            def progress(done: int, total: int) -> None:
                self._emit("backbone", done=done, total=total)

            await fetch_backbone(await self.member.bulk_connection(teller), manifest, pack.backbone, progress)
        return pack

    # ---- being a worker

    def budget(self, manifest: Manifest, held_bytes: int) -> int:
        """Bytes that this node gives to experts. UsageError where not one fits."""
        given = self._config.memory
        free = int(psutil.virtual_memory().available * MEMORY_SHARE) + held_bytes
        budget = given if given is not None else free
        disk = shutil.disk_usage(self._config.state_dir).free + held_bytes
        largest = max(manifest.expert_bytes(site.index) for site in manifest.sites)
        if budget < largest:
            raise UsageError(
                f"--memory {_size(budget)} holds no expert of {manifest.name}: the largest takes {_size(largest)}; "
                f"give --memory {_size(largest)} or more"
                if given is not None
                else f"no memory for one expert of {manifest.name} ({_size(largest)}) is free on this machine"
            )
        if disk < largest:
            raise ModelError(f"{self._config.state_dir}: no room on the disk for one expert ({_size(largest)})")
        return min(budget, disk)

    async def serve(self, worker: ExpertWorker, store: SliceStore, pack: ModelPack) -> None:
        """Carry out assignments from now on, give slices to members, and report."""
        manifest, given = pack.manifest, self._config.source
        self._server = http_source(pack, given)
        self.budget_bytes = self.budget(manifest, store_bytes(store, manifest))
        self._worker, self._manifest = worker, manifest
        self._providers[bytes.fromhex(manifest.model_hash)] = StoreProvider(store)
        self.agent = HoldingsAgent(
            store,
            manifest,
            worker,
            budget=self.budget_bytes,
            local_file=given if given is not None and url_of(given) is None else None,
            sources=self._sources,
            emit=self._emit,
            changed=self._report,
        )
        self._serving = [self._spawn(self.agent.run(), "assignments"), self._spawn(self._report_often(), "reports")]
        self.member.discovery.refresh()

    async def end_serving(self) -> None:
        """Let the store go: nothing is fetched, dropped or given any more."""
        self._providers.clear()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if self._server is not None:
            await self._server.close()

    async def hand_over(self, hurry: asyncio.Event | None) -> None:
        """Tell the founder that this worker leaves, and wait until nothing is lost by it, or nobody answers; then say
        goodbye to those that call."""
        await self._wait_for_release(hurry)
        if self._worker is not None:
            with contextlib.suppress(DispatchError):
                await self._worker.leave()

    async def _wait_for_release(self, hurry: asyncio.Event | None) -> None:
        self._released.clear()
        founder = next((peer for peer in self.member.mesh.up() if self._is_founder(peer)), None)
        if self.agent is None or founder is None or not any(self.agent.held.values()):
            return
        self._serving[1].cancel()  # a report would say that it stays
        self._emit("handing-over", experts=sum(mask.bit_count() for mask in self.agent.held.values()))
        self.member.mesh.send(founder, Leaving())
        waits: set[asyncio.Task[Any]] = {
            asyncio.create_task(event.wait()) for event in (self._released, hurry) if event is not None
        }
        waits.add(asyncio.create_task(self.member.mesh.link_ended(founder)))
        _, pending = await asyncio.wait(waits, timeout=HAND_OVER_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()

    def adopt(self, connection: Connection) -> bool:
        """Use a connection, if its lane is one of this room."""
        return hasattr(self, "member") and self.member.adopt(connection)

    async def close(self) -> None:
        """Say goodbye to everybody."""
        await self.view.close()
        await self.member.close()

    # ---- bringing the model

    def local_budget(self, manifest: Manifest) -> int:
        """Bytes of experts that this node computes itself."""
        given = self._config.memory
        self.budget_bytes = given if given is not None else int(psutil.virtual_memory().available * MEMORY_SHARE)
        return self.budget_bytes

    async def standing_ticket(self) -> Ticket:
        """A ticket for workers that is good for some hours yet: the last one where there is such, else a new one."""
        authority = self.entry.authority
        assert authority is not None
        now = time.time()
        for one in reversed(await asyncio.to_thread(authority.list)):
            terms = one.invitation
            lasts = not terms.expires or terms.expires - now > STANDING_S / 2
            if one.objection(now) is None and terms.role == "worker" and not terms.uses and not terms.open and lasts:
                return self._written(terms, one.secret)
        return await self.ticket(STANDING_S, 0, "worker")

    async def generates(self, pack: ModelPack) -> None:
        """This node generates with this model: tell everybody, and give what it has of it."""
        if self.entry.authority is not None:
            self._gated = await self._verdict.message(pack)
        manifest = pack.manifest
        self._manifest = manifest
        model = bytes.fromhex(manifest.model_hash)
        self._providers[model] = (
            SourceProvider(manifest, pack.source, pack.backbone)
            if pack.source is not None
            else PackProvider(manifest, pack.backbone)
        )
        self._serves = Serves(model, manifest.name)
        for peer in self.member.mesh.up():
            self._tell_model(peer)
        self.member.discovery.refresh()

    def leads(self, lead: Lead) -> None:
        """Plan from now on."""
        self.lead = lead
        for peer in self.member.mesh.up():
            if peer in self._early:
                with contextlib.suppress(BadMessage):  # its next report ends its link
                    lead.reported(peer, self._early[peer])
        self._early.clear()
        self._spawn(lead.run(), "plans")

    async def ticket(self, expires_s: float, uses: int, role: Role) -> Ticket:
        """A new ticket. UsageError on a node that did not found the swarm."""
        if self.entry.authority is None:
            raise UsageError("only the node that founded the swarm gives tickets; ask there: swarmnode ticket")
        return self._written(*await asyncio.to_thread(self.entry.authority.invite, expires_s, uses, role))

    def _written(self, invitation: Invitation, secret: bytes) -> Ticket:
        record = self._describe(PeerRecord(self.entry.membership.swarm, self._identity.peer_id, 0, 0))
        own = BootstrapPeer(self._identity.peer_id, tuple(record.addresses[:MAX_ADDRESSES]))
        return Ticket(invitation, secret, self.entry.relays[:MAX_RELAYS], (own,))

    # ---- inside

    def _sources(self) -> Iterable[Source]:
        """Members; and the web server where the user named it, or where members do not have everything."""
        assert self._manifest is not None
        peers: list[Source] = list(self.member.sources(self._manifest))
        if self._server is None:
            return peers
        for site in self._manifest.sites if self._config.source is None else ():
            held = 0
            for peer in peers:
                mask = peer.held(site.index)
                held |= (1 << site.n_expert) - 1 if mask is None else mask
            if held != (1 << site.n_expert) - 1:
                break
        else:
            if self._config.source is None and is_hashed(self._manifest):
                return peers
        return [*peers, self._server]

    def _pause(self) -> float:
        """Seconds between two pieces of a slice: what is called by a token that somebody waits for goes first."""
        calls = (self._worker is not None and self._worker.busy) or (self.client is not None and self.client.busy)
        return YIELD_S if calls else 0.0

    def _provider(self, model: bytes) -> SliceProvider | None:
        return self._providers.get(model)

    def _describe(self, record: PeerRecord) -> PeerRecord:
        around = self._endpoint.reach.surroundings
        told = [candidate.address for candidate in around.candidates] if around is not None else []
        if not told:
            told = [self._endpoint.address]
        return replace(
            record,
            name=self._config.name,
            role=self._config.role,
            addresses=tuple(told),
            model=bytes.fromhex(self._manifest.model_hash)[:8] if self._manifest is not None else b"",
            memory=self.budget_bytes,
        )

    def _is_founder(self, peer: PeerId) -> bool:
        certificate = self.entry.membership.members.get(peer)
        return certificate is not None and certificate.invitation == NO_INVITATION

    def _members_changed(self) -> None:
        if self.lead is not None:
            records = self.member.records()
            here = {record.peer for record in records}
            self.lead.others_generate(any(self.member.generates(record) for record in records))
            for peer in [peer for peer in self.lead.reports if peer not in here]:
                self.lead.gone(peer)
        self.on_members()

    def _link(self, peer: PeerId, up: bool) -> None:
        self.view.link(peer, up)
        if up:
            if self.lead is not None:
                self.lead.linked(peer)
            self._tell_model(peer)
            self._report(peer)

    def _tell_model(self, peer: PeerId) -> None:
        """What this node generates with; before it, of the founder to who may generate too, what its gate says."""
        if self._serves is None:
            return
        certificate = self.entry.membership.certificate_of(peer)
        if self._gated is not None and certificate is not None and certificate.role != "worker":
            self.member.mesh.send(peer, self._gated)
        self.member.mesh.send(peer, self._serves)

    def _message(self, peer: PeerId, message: Message) -> None:
        match message:
            case Serves():
                self._serves_now(peer, message)
            case Gated() if self._config.is_backbone and self.entry.authority is None:
                if self._is_founder(peer):
                    self._verdict.heard(message)
                else:
                    self._verdict.from_another(peer.short)
            case Report() if self.lead is not None:
                self.lead.reported(peer, message)
            case Report() if self.entry.authority is not None:
                self._early[peer] = message
            case Leaving() if self.lead is not None:
                self.lead.leaving(peer)
            case Assign(number, model, hold) if self._is_founder(peer):
                self._assigned(number, model, hold)
            case Released() if self._is_founder(peer):
                self._released.set()
            case StatusWanted() | StatusTold() | StatusRefused():
                self.view.message(peer, message)

    def _serves_now(self, peer: PeerId, serves: Serves) -> None:
        certificate = self.entry.membership.members.get(peer)
        if self.entry.authority is not None or certificate is None or certificate.role == "worker":
            return
        self._tellers[peer] = serves
        self._told.set()
        runs = self._manifest
        if runs is not None and serves.model != bytes.fromhex(runs.model_hash) and self._is_founder(peer):
            name = shown_name(serves.name)
            self._emit("discovery-problem", error=f"the swarm runs another model now ({name}): start this node again")

    def _assigned(self, number: int, model: bytes, hold: dict[int, bytes]) -> None:
        manifest = self._manifest
        if self.agent is None or manifest is None or model != bytes.fromhex(manifest.model_hash):
            return
        self.agent.order(number, unpack_masks(hold, [site.n_expert for site in manifest.sites]))

    def _report(self, to: PeerId | None = None) -> None:
        if self.agent is None or self._worker is None or self._manifest is None:
            return
        stats = self._worker.stats()
        report = Report(
            model=bytes.fromhex(self._manifest.model_hash),
            budget=self.budget_bytes,
            held=pack_masks(self.agent.held),
            assignment=self.agent.carried_out,
            row_s=sum(stats.row_s.values()) / len(stats.row_s) if stats.row_s else 0.0,
            waiting=stats.load,
            trouble=self.agent.trouble[:500],
            fetched=self.agent.fetched,
        )
        for peer in [to] if to is not None else self.member.mesh.up():
            if self._is_founder(peer):
                self.member.mesh.send(peer, report)

    async def _report_often(self) -> None:
        while True:
            if self._worker is not None:
                self._worker.test_speed()
            self._report()
            await asyncio.sleep(REPORT_S)


def store_bytes(store: SliceStore, manifest: Manifest) -> int:
    """Bytes of the slices that a store holds."""
    return sum(manifest.expert_bytes(site) * len(experts) for site, experts in store.holdings().items())


def _kept(path: Path, model: bytes) -> Manifest | None:
    """The manifest from an earlier start, if it is whole."""
    try:
        manifest = decode_manifest(path.read_bytes())
    except (OSError, SwarmnodeError):
        return None
    return manifest if bytes.fromhex(manifest.model_hash) == model else None


def _size(size: int) -> str:
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.4g}{unit}"
    return f"{size}"
