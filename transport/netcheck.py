"""Measures this machine's network: what `swarmnode doctor` shows. SHELL.

Its own sockets and a key of its own, so that a node that runs here meanwhile is not disturbed. Everything at once:
all relays are dialled, each one's reflectors asked as soon as it has let us in, a port is mapped (and given back);
then filtering, hairpin and packet sizes against the first reflector that answered. Nothing is waited for longer than
LOGIN_SECONDS + 2 × udp_probe.WAIT + 1.

Called by the command line. What is found becomes proto/net_report; the kind of NAT is proto/nat_report's judgement.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from transport import interfaces
from transport.clock_check import clock_offset
from transport.errors import Address, format_addresses
from transport.gateway import Gateway, default_gateway
from transport.identity import Identity
from transport.port_mapping import PortMapper
from transport.proto.candidates import InterfaceAddress, choose, is_public, parse_host
from transport.proto.nat_report import NatObserver
from transport.proto.net_report import NAT_WORDS, PORT_FILTERED, PORT_OPEN, NetReport, RelayCheck, advise
from transport.proto.relay_url import RelayUrl, is_global, parse_relay_url
from transport.relay_link import RelayLink
from transport.relay_session import RelayLinkConfig
from transport.udp_probe import Seen, UdpProbe

LOGIN_SECONDS = 5.0
RTT_SAMPLES, RTT_SECONDS = 3, 1.0
MAPPING_SECONDS = 4.5  # PCP, NAT-PMP and UPnP one after the other, and a margin
HEADERS = {4: 28, 6: 48}  # IP and UDP, bytes
# IP packets to try, bytes: QUIC's minimum, IPv6's, VPNs' and PPPoE's usual ones, Ethernet, jumbo frames.
SIZES = (576, 1228, 1280, 1380, 1420, 1440, 1460, 1480, 1492, 1500, 4096, 8928)

FindGateway = Callable[[], Awaitable[Gateway | None]]


class _Relay:
    """The check of one relay; its link stays up until close(), its callbacks are not used beyond on_state."""

    def __init__(self, url: RelayUrl, identity: Identity, ca_file: Path | None) -> None:
        self.url = url
        self.error = ""
        self.rtt: float | None = None
        self.udp: bool | None = None
        self._settled = asyncio.Event()
        self._measured = asyncio.Event()
        self.link = RelayLink(
            url,
            identity,
            RelayLinkConfig(connect_timeout=LOGIN_SECONDS, ca_file=ca_file),
            lambda *_: None,
            self._on_state,
            lambda *_: None,
            on_rtt=self._measured.set,
        )

    def _on_state(self, _url: str, up: bool, reason: str) -> None:
        if not self._settled.is_set():
            self.error = "" if up else reason
            self._settled.set()

    async def log_in(self) -> bool:
        """Connect once; True when the relay let us in."""
        self.link.start()
        try:
            async with asyncio.timeout(LOGIN_SECONDS + 0.5):
                await self._settled.wait()
        except TimeoutError:
            self.error = f"no answer within {LOGIN_SECONDS:.0f} s"
        return not self.error

    async def measure_rtt(self) -> None:
        """The best of a few round trips."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RTT_SECONDS):
                for _ in range(RTT_SAMPLES):
                    self._measured.clear()
                    self.link.kick()
                    await self._measured.wait()
                    if self.link.rtt is not None:
                        self.rtt = min(self.rtt or self.link.rtt, self.link.rtt)

    def result(self) -> RelayCheck:
        """What there is to say."""
        return RelayCheck(self.url.text, None if self.rtt is None else round(self.rtt * 1000, 2), self.error, self.udp)


class _Check:
    """One run: the sockets, and what was found so far."""

    def __init__(self, probes: dict[int, UdpProbe], hosts: Sequence[InterfaceAddress]) -> None:
        self._probes, self._hosts = probes, hosts
        self.observer = NatObserver()
        self.answered: dict[Address, Seen] = {}
        self.ipv6_asked = False

    async def relay(self, relay: _Relay) -> None:
        """Everything about one relay."""
        if not await relay.log_in():
            return
        reflectors = [address for address in relay.link.reflectors if _version(address) in self._probes]
        self.ipv6_asked |= any(_version(address) == 6 for address in reflectors)
        answers, _ = await asyncio.gather(
            asyncio.gather(*(self._ask(address) for address in reflectors)), relay.measure_rtt()
        )
        if reflectors:
            relay.udp = any(answers)

    async def _ask(self, reflector: Address) -> bool:
        probe = self._probes[_version(reflector)]
        seen = await probe.ask(reflector)
        now = asyncio.get_running_loop().time()
        if seen is None or seen.source[1] != reflector[1]:
            self.observer.no_answer(reflector, now)
            return False
        self.answered[reflector] = seen
        self.observer.observe(reflector, probe.address[1], seen.address, seen.at, seen.sent)
        return True

    def seen_address(self, version: int) -> str | None:
        """Our own address of this IP version from outside."""
        for reflector, seen in self.answered.items():
            if _version(reflector) == version:
                return format_addresses([seen.address])
        return None

    async def filtering(self) -> str:
        """Does an answer come in from a port that was never written to? Another socket, so that no port is known."""
        reflector = self._first()
        if reflector is None or sum(address[0] == reflector[0] for address in self.answered) < 2:
            return "unknown"
        probe = await UdpProbe.open(_version(reflector))
        if probe is None:
            return "unknown"
        try:
            # A question without the wish goes along: without its answer, silence would mean nothing.
            plain, other = await asyncio.gather(probe.ask(reflector), probe.ask(reflector, change_port=True))
        finally:
            probe.close()
        if plain is None or (other is not None and other.source[1] == reflector[1]):
            return "unknown"
        return PORT_FILTERED if other is None else PORT_OPEN

    async def hairpin(self) -> bool | None:
        """Does a datagram to our own outside address come back in?"""
        seen = next((seen for reflector, seen in self.answered.items() if _version(reflector) == 4), None)
        if seen is None or seen.address[0] in {host.host for host in self._hosts}:
            return None
        sender = await UdpProbe.open(4)
        if sender is None:
            return None
        try:
            return await self._probes[4].hears(sender, seen.address)
        finally:
            sender.close()

    async def mtu(self, interface_mtu: int | None) -> int | None:
        """The largest IP packet that reaches a reflector."""
        reflector = self._first()
        if reflector is None:
            return None
        version = _version(reflector)
        probe = await UdpProbe.open(version, whole=True)
        if probe is None:
            return None
        limit = interface_mtu or 1500
        sizes = sorted({size for size in (*SIZES, limit) if HEADERS[version] + 64 <= size <= min(limit, 9000)})
        try:
            payloads = [size - HEADERS[version] for size in sizes]
            answers = await asyncio.gather(*(probe.ask(reflector, size=size & ~3) for size in payloads))
        finally:
            probe.close()
        through = [size for size, seen in zip(sizes, answers, strict=True) if seen is not None]
        return max(through, default=None)

    def _first(self) -> Address | None:
        return min(self.answered, key=_version, default=None)


async def netcheck(
    relays: Sequence[str],
    *,
    identity: Identity | None = None,
    ca_file: Path | None = None,
    find_gateway: FindGateway | None = None,
) -> NetReport:
    """Check this machine's network by means of these relays. Takes 2–6 s, at most 10 s with dead relays.

    identity: another key than a new one, for relays that let in only members; never that of a running node, which the
    relay would put out. ca_file: authorities for relays' certificates beside the system's. find_gateway: other than
    the system's way to the router.
    Raises BadRelayUrl (transport.proto.relay_url).
    """
    began = time.monotonic()
    urls = list(dict.fromkeys(parse_relay_url(text) for text in relays))
    hosts = interfaces.addresses()
    opened = {version: await UdpProbe.open(version) for version in (4, 6)}
    probes = {version: probe for version, probe in opened.items() if probe is not None}
    who = identity or Identity.generate()
    links = [_Relay(url, who, ca_file) for url in urls]
    mapper = _Mapping(probes[4].address[1], find_gateway or default_gateway) if 4 in probes else None
    try:
        return await _run(began, links, probes, hosts, mapper)
    finally:
        for probe in probes.values():
            probe.close()
        await asyncio.gather(*(link.link.close() for link in links), *([mapper.close()] if mapper else []))


async def _run(
    began: float,
    relays: Sequence[_Relay],
    probes: dict[int, UdpProbe],
    hosts: Sequence[InterfaceAddress],
    mapper: _Mapping | None,
) -> NetReport:
    check = _Check(probes, hosts)
    interface_mtu = next((host.mtu for host in hosts if host.preferred and host.mtu), None)

    async def by_relays() -> tuple[str, bool | None, int | None]:
        await asyncio.gather(*map(check.relay, relays))
        return await asyncio.gather(check.filtering(), check.hairpin(), check.mtu(interface_mtu))

    (filtering, hairpin, mtu), (mapped, how), clock = await asyncio.gather(
        by_relays(), mapper.outcome(hosts) if mapper else _no_mapping(), clock_offset([relay.url for relay in relays])
    )
    nat = check.observer.report(asyncio.get_running_loop().time(), [host.host for host in hosts])
    checked = tuple(relay.result() for relay in relays)
    told = [relay.udp for relay in checked if relay.udp is not None]
    candidates = choose(
        hosts,
        reflected=nat.reflected,
        mapped=[mapped] if mapped else [],
        listen_host="::" if 6 in probes else "0.0.0.0",
        port=probes[4].address[1] if 4 in probes else 0,
    )
    return advise(
        NetReport(
            udp=any(told) if told else None,
            ipv4=check.seen_address(4),
            ipv6=check.seen_address(6),
            nat=NAT_WORDS[nat.kind],
            mapping=nat.mapping,
            filtering=filtering,
            hairpin=hairpin,
            port_mapping=how if mapped else None,
            relays=checked,
            mtu=mtu,
            clock_offset_s=clock,
            nat_reason=nat.reason,
            port_delta=nat.port_delta,
            port_mapping_detail=format_addresses([mapped]) if mapped else how,
            interface_mtu=interface_mtu,
            addresses=tuple(candidate.address[0] for candidate in candidates),
            local_ipv6=next((host.host for host in hosts if host.is_up and _is_global_v6(host.host)), ""),
            ipv6_relay=check.ipv6_asked,
            took_s=round(time.monotonic() - began, 2),
        )
    )


class _Mapping:
    """A port mapped for the check and given back."""

    def __init__(self, port: int, find_gateway: FindGateway) -> None:
        self._outcome: asyncio.Future[tuple[Address | None, str]] = asyncio.get_running_loop().create_future()
        self._mapper = PortMapper(port, self._on_mapped, find_gateway=find_gateway)

    def _on_mapped(self, external: Address | None, how: str) -> None:
        if not self._outcome.done():
            self._outcome.set_result((external, how))

    async def outcome(self, hosts: Sequence[InterfaceAddress]) -> tuple[Address | None, str]:
        """The external address or None, and how or why not."""
        if any(host.preferred and ":" not in host.host and is_global(host.host) for host in hosts):
            return None, "not needed: this machine has a public address"
        self._mapper.start()
        try:
            async with asyncio.timeout(MAPPING_SECONDS):
                return await self._outcome
        except TimeoutError:
            return None, "the router took too long"

    async def close(self) -> None:
        """Give the port back."""
        await self._mapper.close()


async def _no_mapping() -> tuple[Address | None, str]:
    return None, "there is no IPv4 here"


def _version(address: Address) -> int:
    return 6 if ":" in address[0] else 4


def _is_global_v6(host: str) -> bool:
    parsed = parse_host(host)
    return parsed is not None and parsed.version == 6 and is_public(host)
