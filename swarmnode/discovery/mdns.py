"""Members on this LAN by multicast DNS (RFC 6762, 6763). SHELL over zeroconf.

One instance of `_swarmnode._udp.local.` per node, named by its PeerId. TXT:

    v   "1"
    t   8 bytes, record.swarm_tag: whose it is; the first thing that is looked at
    o   "1": the swarm lets in whoever is on this LAN (`up --open`); left out otherwise
    r0, r1, …   the node's record (record.py), cut into pieces of at most PIECE_BYTES

A record changes here only when it says something else, not every few seconds, so it makes a candidate and keeps nobody
alive. Where it is told: every interface that is up and leads to a LAN, each by one socket of its own: no bridges of
containers, no VPNs, no loopback unless asked. When interfaces come and go everything begins anew: sockets, question
and registration. Where multicast is impossible the callback hears why, once, and it is tried again.

Owned by discovery.Discovery; `browse_open` is for a node that is not in a swarm yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from socket import if_nametoindex

from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from swarmnode.discovery.record import (
    MAX_RECORD,
    TAG_BYTES,
    PeerRecord,
    content,
    decode,
    peek,
    swarm_tag,
)
from swarmnode.discovery.source import Sink
from swarmnode.errors import BadRecord
from transport import interfaces
from transport.errors import IdentityError
from transport.identity import PeerId
from transport.proto.candidates import InterfaceAddress, is_container, is_tunnel, parse_host

logger = logging.getLogger(__name__)

SERVICE = "_swarmnode._udp.local."
TXT_VERSION = b"1"
PIECE_BYTES = 200  # "r0=" and this is one string of TXT, which has at most 255
MAX_PIECES = -(-MAX_RECORD // PIECE_BYTES)
MAX_PEERS = 1024
MAX_WAITING = 256  # instances without TXT that are asked for it: others on the LAN can make up any number
MAX_INTERFACES = 16
LOOK_S = 10.0  # how often interfaces are looked at, besides network_changed
RETRY_S = 30.0  # after multicast was impossible
UPDATE_S = 5.0  # between two changes of what is told, or two beginnings: each is sent to the whole LAN three times
QUESTION_S = 3.0  # for the TXT of an instance that came without it
QUESTIONS = 8  # at a time
CLOSE_S = 3.0  # for the goodbyes, which take 0.3 s
BROWSE_S = 3.0
MAX_OPEN_SWARMS, MAX_OPEN_MEMBERS = 64, 16
LOOPBACK = "127.0.0.1"
NOWHERE = "nobody on the local network can be found: no interface leads to one; a ticket or a relay works all the same"

Place = str | int  # as zeroconf names interfaces: by an IPv4 address, or by the index of one that has only IPv6


@dataclass(frozen=True, slots=True)
class Announced:
    """What an instance's TXT says. Nobody has checked the record."""

    tag: bytes
    is_open: bool
    blob: bytes


@dataclass(frozen=True, slots=True)
class OpenSwarm:
    """A swarm on this LAN that lets in whoever asks, and its members that were heard; their signatures are checked."""

    swarm: PeerId
    members: tuple[PeerRecord, ...]


def properties(blob: bytes, *, is_open: bool) -> dict[str | bytes, str | bytes | None]:
    """The TXT of a record."""
    pieces = [blob[at : at + PIECE_BYTES] for at in range(0, len(blob), PIECE_BYTES)]
    told: dict[str | bytes, str | bytes | None] = {b"v": TXT_VERSION, b"t": swarm_tag(PeerId(peek(blob).swarm))}
    if is_open:
        told[b"o"] = b"1"
    return told | {f"r{number}".encode(): piece for number, piece in enumerate(pieces)}


def read_properties(told: Mapping[bytes, bytes | None]) -> Announced | None:
    """What a TXT says; None when it is not one of this version."""
    tag = told.get(b"t")
    if told.get(b"v") != TXT_VERSION or tag is None or len(tag) != TAG_BYTES:
        return None
    pieces: list[bytes] = []
    while (piece := told.get(f"r{len(pieces)}".encode())) and len(pieces) < MAX_PIECES:
        pieces.append(piece)
    blob = b"".join(pieces)
    return Announced(tag, told.get(b"o") == b"1", blob) if 0 < len(blob) <= MAX_RECORD else None


def places(found: Sequence[InterfaceAddress], *, loopback: bool = False) -> dict[Place, str]:
    """Where to speak → the interface's name: one per interface that leads to a LAN, the system's preferred one first.

    An interface that has IPv4 is named by that: everybody on its LAN has it too. Otherwise by its index, for IPv6.
    """
    if loopback:
        return {LOOPBACK: "loopback"}
    own: dict[str, list[str]] = {}
    for one in sorted(found, key=lambda one: (not one.preferred, one.deprecated, one.temporary)):
        host = parse_host(one.host)
        if host is not None and _leads_to_a_lan(one) and not (host.is_unspecified or host.is_multicast):
            own.setdefault(one.name, []).append(str(host))
    picked: dict[Place, str] = {}
    for name, hosts in own.items():
        v4 = next((host for host in hosts if ":" not in host), None)
        place = v4 if v4 is not None else _index(name)
        if place:
            picked.setdefault(place, name)
    return dict(list(picked.items())[:MAX_INTERFACES])


class Mdns:
    """A Source. See the module."""

    name = "mdns"

    def __init__(
        self,
        swarm: PeerId,
        own: PeerId,
        *,
        port: int,
        is_open: bool = False,
        loopback: bool = False,
        on_problem: Callable[[str], None] = lambda _: None,
        addresses: Callable[[], Sequence[InterfaceAddress]] = interfaces.addresses,
    ) -> None:
        """port: the node's UDP port, for other tools that look. loopback: this machine only.

        on_problem: why nobody on the LAN is found, one line; once until it works again.
        """
        self._own, self._port, self._is_open, self._loopback = own, port, is_open, loopback
        self._tag = swarm_tag(swarm)
        self._on_problem, self._addresses = on_problem, addresses
        self._sink: Sink | None = None
        self._blob = b""  # to be told
        self._told: tuple[bytes, tuple[str, ...]] | None = None  # what is told: of the record, and the host's addresses
        self._where: dict[Place, tuple[str, int]] = {}  # and where: the interfaces and their numbers
        self._began = self._updated = float("-inf")
        self._again = False  # this may be another network behind the same address
        self._responder: AsyncZeroconf | None = None
        self._listener: _Listener | None = None
        self._peers: set[PeerId] = set()  # that were announced here, to be taken back when everything begins anew
        self._look = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._problem = ""
        self._closing = False

    @property
    def works(self) -> bool:
        """Whether it speaks on some interface now."""
        return self._responder is not None

    async def start(self, sink: Sink) -> None:
        self._sink = sink
        self._task = asyncio.create_task(self._run(), name="mdns")

    def announce(self, blob: bytes) -> None:
        if peek(blob).ttl_s == 0:
            return  # the goodbye of mDNS is said by `close`
        news = not self._blob or content(blob) != content(self._blob)
        self._blob = blob
        if news:
            self._look.set()

    def network_changed(self) -> None:
        self._again = True
        self._look.set()

    async def close(self) -> None:
        self._closing = True
        if self._task is None:
            return
        self._look.set()
        await asyncio.gather(self._task, return_exceptions=True)

    # -- one task does everything in turn, so that a registration and a change of interfaces never meet

    async def _run(self) -> None:
        try:
            while not self._closing:
                pause = LOOK_S
                try:
                    pause = await self._bring_about()
                except (OSError, RuntimeError, ValueError, ZeroconfError, AssertionError) as error:
                    await self._end()
                    self._tell(_why(error))
                    pause = RETRY_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._look.wait()
        finally:
            await self._end()

    async def _bring_about(self) -> float:
        """What should be told, where it should be told. Returns after how many seconds to look again."""
        self._look.clear()
        found = self._addresses()
        wanted = places(found, loopback=self._loopback)
        if not wanted:
            await self._end()
            self._tell(NOWHERE)
            return LOOK_S
        # An interface that was made anew has another number, and the old one's memberships are gone with it.
        where = {place: (name, _index(name)) for place, name in wanted.items()}
        if self._responder is None or where != self._where or self._again:
            if (wait := self._began + UPDATE_S - self._now()) > 0:
                return wait
            self._again = False
            await self._begin(where)
        self._problem = ""
        return await self._register(_hosts(found, loopback=self._loopback)) if self._blob else LOOK_S

    async def _begin(self, where: dict[Place, tuple[str, int]]) -> None:
        await self._end()
        self._began = self._now()
        self._responder = _open(where)
        await self._responder.zeroconf.async_wait_for_start()
        if not self._responder.zeroconf.engine.senders:
            raise OSError(errno.ENODEV, "no interface lets multicast pass")
        self._listener = _Listener(self._responder.zeroconf, self._instance, self._gone)
        self._where = where
        logger.info("mdns.began places=%s", list(where))

    async def _register(self, hosts: list[str]) -> float:
        told = (content(self._blob), tuple(hosts))
        if self._responder is None or told == self._told:
            return LOOK_S
        if self._told is not None and (wait := self._updated + UPDATE_S - self._now()) > 0:
            return wait
        service = AsyncServiceInfo(
            SERVICE,
            f"{self._own}.{SERVICE}",
            port=self._port,
            properties=properties(self._blob, is_open=self._is_open),
            server=f"{self._own}.local.",
            parsed_addresses=hosts,
        )
        self._updated = self._now()
        if self._told is None:
            # Its name is a key: whoever else tells it is this node's earlier run, or not honest.
            sent = await self._responder.async_register_service(service, cooperating_responders=True)
        else:
            sent = await self._responder.async_update_service(service)
        self._told = told
        await sent
        return LOOK_S

    async def _end(self) -> None:
        responder, self._responder = self._responder, None
        listener, self._listener = self._listener, None
        self._told, self._where = None, {}
        if listener is not None:
            await listener.close()
        if responder is not None:
            await _close(responder)
        gone, self._peers = self._peers, set()
        for peer in gone:
            self._lost(peer)

    def _instance(self, name: str, announced: Announced) -> None:
        if announced.tag != self._tag or self._sink is None or self._closing:
            return
        try:
            peer = PeerId(peek(announced.blob).peer)
        except BadRecord:
            return
        if peer == self._own:
            return
        if name != f"{peer}.{SERVICE}":
            return
        if len(self._peers) < MAX_PEERS:
            self._peers.add(peer)
        self._sink.heard(announced.blob, self.name, lasting=True)

    def _gone(self, name: str) -> None:
        """An instance said goodbye, or its time is over."""
        try:
            peer = PeerId.parse(name.removesuffix(f".{SERVICE}"))
        except IdentityError:
            return
        self._peers.discard(peer)
        self._lost(peer)

    def _lost(self, peer: PeerId) -> None:
        if self._sink is not None and not self._closing:
            self._sink.lost(peer, self.name)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tell(self, problem: str) -> None:
        if problem == self._problem:
            return
        self._problem = problem
        logger.info("mdns.impossible %s", problem)
        self._on_problem(problem)


async def browse_open(
    seconds: float = BROWSE_S,
    *,
    loopback: bool = False,
    on_problem: Callable[[str], None] = lambda _: None,
    enough: Callable[[Sequence[OpenSwarm]], bool] = lambda _: False,
    addresses: Callable[[], Sequence[InterfaceAddress]] = interfaces.addresses,
) -> list[OpenSwarm]:
    """The open swarms that answer on this LAN within `seconds`, the one with most members first.

    enough: ends the search early. Never raises for the network's sake: on_problem says why nothing can be found.
    """
    found: dict[PeerId, dict[PeerId, PeerRecord]] = {}
    done = asyncio.Event()

    def swarms() -> list[OpenSwarm]:
        made = [OpenSwarm(swarm, tuple(members.values())) for swarm, members in found.items()]
        return sorted(made, key=lambda one: (-len(one.members), one.swarm))

    def instance(_: str, announced: Announced) -> None:
        if not announced.is_open:
            return
        try:
            record = decode(announced.blob)
        except BadRecord:
            return
        if announced.tag != swarm_tag(record.swarm):
            return
        if record.swarm not in found and len(found) >= MAX_OPEN_SWARMS:
            return
        members = found.setdefault(record.swarm, {})
        known = members.get(record.peer)
        if (known is None and len(members) < MAX_OPEN_MEMBERS) or (known is not None and known.seq < record.seq):
            members[record.peer] = record
        if enough(swarms()):
            done.set()

    wanted = places(addresses(), loopback=loopback)
    if not wanted:
        on_problem(NOWHERE)
        return []
    responder = None
    try:
        responder = _open(wanted)
        await responder.zeroconf.async_wait_for_start()
        if not responder.zeroconf.engine.senders:
            raise OSError(errno.ENODEV, "no interface lets multicast pass")
        listener = _Listener(responder.zeroconf, instance, lambda _: None)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await done.wait()
        finally:
            await listener.close()
    except (OSError, RuntimeError, ValueError, ZeroconfError, AssertionError) as error:
        on_problem(_why(error))
    finally:
        if responder is not None:
            await _close(responder)
    return swarms()


class _Listener:
    """Follows the instances of SERVICE; asks for the TXT of those that came without it. Ends with `close`."""

    def __init__(
        self, zeroconf: Zeroconf, on_instance: Callable[[str, Announced], None], on_gone: Callable[[str], None]
    ) -> None:
        self._zeroconf, self._on_instance, self._on_gone = zeroconf, on_instance, on_gone
        self._waiting: dict[str, None] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._browser = AsyncServiceBrowser(zeroconf, SERVICE, handlers=[self._changed])

    async def close(self) -> None:
        self._waiting.clear()
        with contextlib.suppress(ZeroconfError, OSError, RuntimeError):
            await self._browser.async_cancel()
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def _changed(
        self,
        zeroconf: Zeroconf,  # zeroconf calls handlers by these names
        service_type: str,
        name: str,
        state_change: ServiceStateChange,
    ) -> None:
        if state_change is ServiceStateChange.Removed:
            self._waiting.pop(name, None)
            self._on_gone(name)
            return
        if not self._read(name) and len(self._waiting) < MAX_WAITING:
            self._waiting[name] = None
            if len(self._asking) < QUESTIONS:
                task = asyncio.get_running_loop().create_task(self._ask(), name="mdns question")
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    def _read(self, name: str) -> bool:
        """Use what is known of an instance; False when its TXT is not."""
        service = self._service(name)
        if service is None:
            return True  # nothing that could be asked for
        service.load_from_cache(self._zeroconf)
        return self._use(name, service)

    async def _ask(self) -> None:
        while self._waiting:
            name = next(iter(self._waiting))
            del self._waiting[name]
            service = self._service(name)
            if service is None:
                continue
            with contextlib.suppress(ZeroconfError, OSError, RuntimeError):
                await service.async_request(self._zeroconf, QUESTION_S * 1000)
            self._use(name, service)

    def _service(self, name: str) -> AsyncServiceInfo | None:
        try:
            return AsyncServiceInfo(SERVICE, name)
        except ZeroconfError:
            return None

    def _use(self, name: str, service: AsyncServiceInfo) -> bool:
        if not service.text:
            return False
        announced = read_properties(service.properties)
        if announced is not None:
            self._on_instance(name, announced)
        return True


def _open(wanted: Iterable[Place]) -> AsyncZeroconf:
    """Raises OSError, RuntimeError (an interface that has just gone)."""
    chosen = list(wanted)
    by_index = {isinstance(place, int) for place in chosen}
    version = IPVersion.All if len(by_index) == 2 else IPVersion.V6Only if True in by_index else IPVersion.V4Only
    return AsyncZeroconf(interfaces=chosen, ip_version=version)


async def _close(responder: AsyncZeroconf) -> None:
    """Goodbyes, then the end; whatever the network is like by now."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await responder.async_close()
    except (OSError, RuntimeError, TimeoutError, ZeroconfError, AssertionError) as error:
        logger.debug("mdns.close %r", error)


def _leads_to_a_lan(one: InterfaceAddress) -> bool:
    host = parse_host(one.host)
    usable = one.is_up and not one.tentative and host is not None and not host.is_loopback
    return usable and not is_container(one.name) and not is_tunnel(one)


def _index(name: str) -> int:
    """The system's number of an interface; 0 when there is none."""
    try:
        return if_nametoindex(name)
    except OSError:
        return 0


def _hosts(found: Sequence[InterfaceAddress], *, loopback: bool) -> list[str]:
    """Addresses for A and AAAA; nobody here needs them, other tools show them."""
    if loopback:
        return [LOOPBACK]
    hosts = {str(parse_host(one.host)) for one in found if _leads_to_a_lan(one) and not one.temporary}
    return sorted(host for host in hosts if not host.startswith("fe80"))[:MAX_INTERFACES]


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        reason = "UDP port 5353 belongs to a program that does not share it"
    elif isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES):
        reason = "the system does not allow multicast"
    else:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0][:160]
    return f"nobody on the local network can be found: {reason}; a ticket or a relay works all the same"
