"""What a check of this machine's network found, and what to do about it. PURE.

`NetReport` is the JSON shape of `swarmnode doctor` (fields may be added, never renamed); `advise` is the whole policy
of its advice: one plain sentence for everything that is not as good as it could be, the worst first. Measured by
netcheck, shown by the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from transport.proto.addresses import NatKind

FAR_RELAY_MS = 150.0  # beyond it, a nearer relay is worth looking for: a layer's answer waits for it
# A QUIC datagram is 1452 bytes on most paths; on a smaller one each is sent in pieces. IPv4 and UDP add 28.
WHOLE_DATAGRAM_MTU = 1480
MIN_MTU = 1228  # RFC 9000, 14: QUIC needs 1200 bytes of UDP payload
MAX_CLOCK_OFFSET_S = 30.0  # the clock is read to a second; certificates and tickets are fine with less

NAT_WORDS = {
    NatKind.UNKNOWN: "unknown",
    NatKind.NONE: "none",
    NatKind.EASY: "easy",
    NatKind.HARD: "hard",
    NatKind.BLOCKED: "blocked",
}
PORT_OPEN, PORT_FILTERED = "address-dependent or none", "address-and-port-dependent"


@dataclass(frozen=True, slots=True)
class RelayCheck:
    """One relay. rtt_ms: best round trip over its WebSocket. udp: did its reflector answer? None without one."""

    url: str
    rtt_ms: float | None = None
    error: str = ""
    udp: bool | None = None


@dataclass(frozen=True, slots=True)
class NetReport:
    """What was found; None and "unknown" where it could not be measured.

    ipv4, ipv6: this machine's address as reflectors see it ("host:port"), None when nothing came back.
    nat: none, easy, hard, blocked, unknown. mapping, filtering: words of RFC 5780, 4.3 and 4.4; only the filtering by
    port is tested. hairpin: does the router lead its own outside address back inside? None behind no NAT.
    port_mapping: "pcp", "nat-pmp", "upnp" or None, with the address or the reason in port_mapping_detail.
    mtu: the largest IP packet that reached a reflector, bytes; interface_mtu: of the interface of the default route.
    clock_offset_s: this machine's clock minus the relays', to about a second.
    addresses: what a node here would tell its peers. local_ipv6: a global IPv6 address of an interface, "" without.
    """

    udp: bool | None = None
    ipv4: str | None = None
    ipv6: str | None = None
    nat: str = "unknown"
    mapping: str = "unknown"
    filtering: str = "unknown"
    hairpin: bool | None = None
    port_mapping: str | None = None
    relays: tuple[RelayCheck, ...] = ()
    mtu: int | None = None
    clock_offset_s: float | None = None
    advice: tuple[str, ...] = ()
    nat_reason: str = ""
    port_delta: int = 0
    port_mapping_detail: str = ""
    interface_mtu: int | None = None
    addresses: tuple[str, ...] = ()
    local_ipv6: str = ""
    ipv6_relay: bool = False
    took_s: float = 0.0

    @property
    def works(self) -> bool:
        """Can a node here reach anyone beyond itself?"""
        if self.udp or any(not relay.error for relay in self.relays):
            return True
        return not self.relays and bool(self.addresses)

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON's types."""
        return asdict(self)


def advise(report: NetReport) -> NetReport:
    """The report with its advice."""
    return replace(report, advice=tuple(sentence for rule in _RULES for sentence in rule(report)))


Rule = Callable[[NetReport], Iterator[str]]


def _nothing(r: NetReport) -> Iterator[str]:
    if not r.addresses:
        yield "This machine has no address that another one could reach: connect it to a network."


def _relays(r: NetReport) -> Iterator[str]:
    if not r.relays:
        yield (
            "No relay was checked: give --relay URL; without one, only peers in the same network or with an open "
            "address are reached, and nothing can be said about the NAT."
        )
    elif all(relay.error for relay in r.relays):
        yield "No relay can be used, so peers behind other NATs are out of reach: check the URL and the firewall."
    for relay in r.relays:
        if relay.error:
            own = " (the check has a key of its own, which a relay for members does not know)"
            yield f"The relay {relay.url} cannot be used: {relay.error}{own if 'refused:' in relay.error else ''}."
        elif relay.rtt_ms is not None and relay.rtt_ms > FAR_RELAY_MS:
            yield f"The relay {relay.url} is {relay.rtt_ms:.0f} ms away: one that is nearer makes relayed paths faster."


def _clock(r: NetReport) -> Iterator[str]:
    if r.clock_offset_s is not None and abs(r.clock_offset_s) > MAX_CLOCK_OFFSET_S:
        way = "ahead" if r.clock_offset_s > 0 else "behind"
        yield (
            f"This machine's clock is {abs(r.clock_offset_s):.0f} s {way}: set it (time service), because certificates "
            "and tickets have dates."
        )


def _udp(r: NetReport) -> Iterator[str]:
    if r.udp is False:
        yield (
            "UDP is blocked (or the relay's UDP ports 3478 and 3479 are): traffic goes through the relay; open UDP in "
            "the firewall for a direct path."
        )
    elif r.udp is None and any(not relay.error for relay in r.relays):
        yield (
            "No relay here has a UDP reflector, so the kind of NAT is unknown: start the relay with --reflector and "
            "open its UDP ports."
        )


def _nat(r: NetReport) -> Iterator[str]:
    if r.nat == "hard":
        guess = " Its ports follow each other, which helps to guess them." if r.port_delta else ""
        yield (
            "The NAT gives every destination another port (symmetric): peers behind such a NAT are reached through the "
            f"relay only. Forward a UDP port in the router, switch on UPnP or NAT-PMP, or use IPv6.{guess}"
        )


def _filtering(r: NetReport) -> Iterator[str]:
    if r.nat == "none" and r.filtering == PORT_FILTERED:
        yield (
            "A firewall lets in only answers: peers reach this machine by hole punching, which works; open the node's "
            "UDP port to be reached at once."
        )


def _port_mapping(r: NetReport) -> Iterator[str]:
    if r.port_mapping or r.nat not in ("easy", "hard"):
        return
    if "behind another NAT" in r.port_mapping_detail:
        yield (
            f"The router is behind another NAT ({r.port_mapping_detail.rpartition(' ')[2]}): a mapped port does not "
            "help; ask the provider for an address of your own, or use IPv6."
        )
    elif r.port_mapping_detail:
        yield (
            "The router maps no port: switch on UPnP, NAT-PMP or PCP in it, or forward the node's UDP port by hand, so "
            "that peers with difficult NATs get direct paths too."
        )


def _hairpin(r: NetReport) -> Iterator[str]:
    if r.hairpin is False and r.nat in ("easy", "hard"):
        yield (
            "The router does not lead its own outside address back inside (no hairpin): peers in this network meet by "
            "their local addresses, so let the firewall pass UDP between them."
        )


def _mtu(r: NetReport) -> Iterator[str]:
    if r.mtu is None:
        return
    if r.mtu < MIN_MTU:
        yield (
            f"Packets above {r.mtu} bytes are lost, QUIC needs {MIN_MTU}: direct paths will fail and the relay carries "
            "the traffic; look for a VPN or tunnel with a small MTU."
        )
    elif r.interface_mtu is not None and r.mtu < min(r.interface_mtu, WHOLE_DATAGRAM_MTU) - 3:
        yield (
            f"The interface takes packets of {r.interface_mtu} bytes but only {r.mtu} get through: set its MTU to "
            f"{r.mtu}, or datagrams are lost or cut on the way."
        )
    elif r.mtu < WHOLE_DATAGRAM_MTU - 3:
        yield (
            f"Packets of at most {r.mtu} bytes get through (VPN, tunnel or PPPoE): datagrams travel in two pieces, "
            "which costs a little speed."
        )


def _ip_versions(r: NetReport) -> Iterator[str]:
    if r.udp and not r.ipv4:
        yield "IPv4 does not reach the relay over UDP: peers that have only IPv4 are reached through the relay."
    if not r.local_ipv6:
        if r.nat in ("easy", "hard", "blocked"):
            yield "There is no IPv6 here: it is not needed, but it gives direct paths without NAT; ask the provider."
    elif r.ipv6_relay and not r.ipv6:
        yield (
            f"This machine has the IPv6 address {r.local_ipv6}, but nothing comes back over it: check the router's and "
            "the firewall's IPv6."
        )


_RULES: tuple[Rule, ...] = (
    _nothing,
    _relays,
    _clock,
    _udp,
    _nat,
    _filtering,
    _port_mapping,
    _hairpin,
    _mtu,
    _ip_versions,
)
