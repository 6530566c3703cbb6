"""What this node knows of its own addresses and of the NAT around it, kept up to date. SHELL.

Puts together four sources: interfaces (at once), reflectors (reflector_checks), peers' observations, and the port
mapping that a router may grant while private addresses are all we have. It works, with less to tell, without any
reflector. `on_change` is called when candidates, interfaces or the NAT report are really others; `on_network`, after
it, with the reason when interfaces or default routes changed or the machine woke: then every path is in doubt.

Called by reach, which hands over STUN datagrams of the main socket. One loop; owns timers and a port mapper.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from transport.config import TransportConfig
from transport.errors import Address, format_addresses
from transport.interfaces import InterfaceWatch
from transport.proto.addresses import Candidate, NatKind
from transport.proto.candidates import InterfaceAddress, choose, is_public, parse_host
from transport.proto.nat_report import NatReport
from transport.reflector_checks import ReflectorChecks, StunCounters

logger = logging.getLogger(__name__)

MAX_PEERS = 64  # whose observations are kept
OBSERVED_SECONDS = 600.0  # a peer's observation is forgotten
OBSERVED_MINIMUM = 60.0  # … and stands at least so long: what a peer tells may make us call all others again
MAX_OBSERVED = 2


class Mapper(Protocol):
    """What port_mapping.PortMapper offers."""

    def start(self) -> None: ...
    def refresh(self) -> None: ...
    async def close(self) -> None: ...


OnMapped = Callable[[Address | None, str], None]
MakeMapper = Callable[[int, OnMapped], Mapper]


@dataclass(slots=True)
class _Observation:
    """Where a peer sees us. `since`: when it said so first, `at`: last."""

    address: Address
    since: float
    at: float


class Surroundings:
    """This node's own addresses and NAT.

    interfaces: all addresses of this machine. candidates: what to tell peers, in order. nat: the kind of NAT.
    mapped: the address of a port mapping; mapping: how it came about, or why there is none. last_change: what
    happened to the network last. network_changes: how often.
    """

    def __init__(
        self,
        config: TransportConfig,
        port: int,
        listen_host: str,
        send_udp: Callable[[bytes, Address], None],
        on_change: Callable[[], None],
        on_network: Callable[[str], None] | None = None,
        *,
        make_mapper: MakeMapper | None = None,
    ) -> None:
        """`port`, `listen_host`: what the main socket is bound to.

        `send_udp` sends from the main socket, never waits and never raises. Nothing is sent before `start`.
        """
        self._config, self._port, self._listen_host = config, port, listen_host
        self._on_change, self._on_network = on_change, on_network
        self._make_mapper = make_mapper or _port_mapper
        self._checks = ReflectorChecks(port, listen_host, send_udp, lambda: self._publish("reflectors"))
        self._observed: dict[Hashable, _Observation] = {}  # by peer, the latest observation last
        self._watch: InterfaceWatch | None = None
        self._mapper: Mapper | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.interfaces: tuple[InterfaceAddress, ...] = ()
        self.candidates: tuple[Candidate, ...] = ()
        self.nat = NatReport()
        self.mapped: Address | None = None
        self.mapping = ""
        self.last_change = ""
        self.network_changes = 0

    @property
    def stun(self) -> StunCounters:
        """What was asked and answered."""
        return self._checks.counters

    async def start(self) -> None:
        """Look at the interfaces and begin to ask; candidates are there when it returns, no callback came by then."""
        self._watch = InterfaceWatch(self._network_changed, asyncio.get_running_loop())
        self.interfaces = tuple(self._watch.addresses)
        self.candidates = self._choose()
        logger.info("surroundings.start candidates=%s", _texts(self.candidates))
        self._checks.start(self.interfaces)
        self._mind_mapper()

    async def close(self) -> None:
        """Stop, and remove the port mapping (about a second at most)."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self._checks.close()
        mapper, self._mapper = self._mapper, None
        if mapper is not None:
            await mapper.close()
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    # -- news from others

    def set_reflectors(self, reflectors: Iterable[Address]) -> None:
        """Who to ask for our address: IP addresses and ports, best first. The same ones again change nothing."""
        self._checks.set_reflectors(reflectors)

    def on_stun(self, data: bytes, source: Address) -> None:
        """A STUN datagram came in on the main socket."""
        self._checks.on_stun(data, source)

    def observed_by_peer(self, peer: Hashable, address: Address) -> None:
        """An authenticated peer says that our datagrams come from `address`; it may lie."""
        host = parse_host(address[0])
        if self._watch is None or host is None or not 0 < address[1] < 65536 or not is_public(address[0]):
            return
        now = asyncio.get_running_loop().time()
        seen = (str(host), address[1])
        known = self._observed.get(peer)
        same = known is not None and known.address == seen
        if known is not None and not same and now - known.since < OBSERVED_MINIMUM:
            return
        if not same and host.version not in {_version(candidate) for candidate in self._own()}:
            return  # no datagram of ours comes from there
        self._checks.heard_directly()
        self._observed.pop(peer, None)
        self._observed[peer] = _Observation(seen, known.since if known is not None and same else now, now)
        while len(self._observed) > MAX_PEERS:
            del self._observed[next(iter(self._observed))]
        if not same or self.nat.kind == NatKind.BLOCKED:
            self._publish("a peer's observation")

    # -- the network and the router

    def _network_changed(self, reason: str) -> None:
        if self._watch is None:
            return
        self.network_changes += 1
        self.last_change = reason
        self._observed.clear()
        self._checks.network_changed(tuple(self._watch.addresses))
        mapper = self._mapper
        self._mind_mapper()
        if mapper is not None and mapper is self._mapper:
            mapper.refresh()
        self._publish(reason)
        if self._on_network is not None:
            self._on_network(reason)

    def _mind_mapper(self) -> None:
        """Run a port mapper exactly while private IPv4 addresses are all we have."""
        wanted = self._config.port_mapping and self._needs_mapping()
        if wanted and self._mapper is None:
            self._mapper = self._make_mapper(self._port, self._port_mapped)
            self._mapper.start()
        elif not wanted and self._mapper is not None:
            mapper, self._mapper = self._mapper, None
            self.mapped, self.mapping = None, ""
            task = asyncio.get_running_loop().create_task(mapper.close(), name="close-port-mapper")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _needs_mapping(self) -> bool:
        hosts = [host for host in (parse_host(candidate.address[0]) for candidate in self._own()) if host is not None]
        v4 = [str(host) for host in hosts if host.version == 4 and not host.is_loopback]
        return bool(v4) and not any(is_public(host) for host in v4)

    def _port_mapped(self, address: Address | None, how: str) -> None:
        if self._mapper is None:
            return
        self.mapped, self.mapping = address, how
        self._publish(f"port mapping: {how}")

    # -- telling

    def _publish(self, reason: str) -> None:
        """Make what we know public; calls back when it is something else than before."""
        if self._watch is None:
            return
        before = (self.interfaces, self.candidates, self.nat)
        self.interfaces, self.nat = tuple(self._watch.addresses), self._checks.report()
        self.candidates = self._choose()
        if before == (self.interfaces, self.candidates, self.nat):
            return
        if before[2].kind != self.nat.kind:
            logger.info("surroundings.nat kind=%s why=%r", self.nat.kind.name, self.nat.reason)
        if before[1] != self.candidates:
            logger.info("surroundings.changed why=%r candidates=%s", reason, _texts(self.candidates))
        self._on_change()

    def _choose(self) -> tuple[Candidate, ...]:
        return self._candidates(self._believed(self._candidates()))

    def _candidates(self, observed: Sequence[Address] = ()) -> tuple[Candidate, ...]:
        assert self._watch is not None
        return choose(
            self._watch.addresses,
            reflected=self.nat.reflected,
            mapped=(self.mapped,) if self.mapped is not None else (),
            observed=observed,
            given=self._config.advertise,
            listen_host=self._listen_host,
            port=self._port,
        )

    def _own(self) -> tuple[Candidate, ...]:
        """Addresses of this machine that a peer may reach."""
        assert self._watch is not None
        return choose(self._watch.addresses, listen_host=self._listen_host, port=self._port)

    def _believed(self, candidates: Sequence[Candidate]) -> list[Address]:
        """Peers' observations worth telling beside these candidates.

        Behind a symmetric NAT every peer sees another port, of no use to a third. Two peers must agree, since an
        address that a liar names would be pinged by others; one alone is believed where nobody else can say which
        address we have on the Internet: no reflector, no other peer, no router, and not the user.
        """
        if self.nat.kind == NatKind.HARD:
            return []
        oldest = asyncio.get_running_loop().time() - OBSERVED_SECONDS
        fresh = [one.address for one in self._observed.values() if one.at >= oldest]
        known = {_version(candidate) for candidate in candidates if is_public(candidate.address[0])}
        believed = []
        for address, count in Counter(fresh).most_common():
            version = 6 if ":" in address[0] else 4
            others = [other for other in fresh if (":" in other[0]) == (version == 6)]
            alone = len(others) == 1 and version not in known and not self._checks.can_ask
            if count >= 2 or alone:
                believed.append(address)
        return believed[:MAX_OBSERVED]


def _version(candidate: Candidate) -> int:
    return 6 if ":" in candidate.address[0] else 4


def _port_mapper(port: int, on_mapped: OnMapped) -> Mapper:
    from transport.port_mapping import PortMapper  # noqa: PLC0415 - most nodes never need a router's protocols

    return PortMapper(port, on_mapped)


def _texts(candidates: Sequence[Candidate]) -> str:
    return format_addresses([candidate.address for candidate in candidates])
