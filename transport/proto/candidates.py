"""Which of my addresses are worth telling, and which of a peer's are worth trying. PURE.

A candidate that cannot work costs the peer a ping and both of us a moment, so what is known to be dead is never told:
bridges of containers and virtual machines (every machine has the same 172.17.0.1), link-local addresses, interfaces
that are down, all but one IPv6 address of a network. What may be dead but need not be (a VPN that the peer is perhaps
not in) goes last. A peer's candidates come from the network: `usable` drops what could only reach the wrong machine.

Called by surroundings (choose), path_keeper and reflector_checks (usable), peer_socket (kind_of) and netcheck;
interfaces makes the InterfaceAddress.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from transport.errors import Address
from transport.proto.addresses import Candidate, CandidateSource, PathKind
from transport.proto.disco_frames import MAX_CANDIDATES

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_PORT = 65_535

# Bridges and virtual links of containers and virtual machines, by the names that their makers give: Docker, its user
# networks (br- and twelve hex digits; a plain br0 is often the machine's real interface), libvirt, CNI, flannel,
# Calico, Cilium, Podman, LXC, Incus, Kubernetes' proxies, VMware, VirtualBox, Hyper-V's inner switches, macOS' bridges
# for virtual machines.
_CONTAINER = re.compile(
    r"docker\d*$|docker_gwbridge$|br-[0-9a-f]{12}$|veth(?!ernet)|virbr|vnet\d|cni|cbr\d|flannel|cali|cilium|lxc|lxd|incusbr|"
    r"podman|kube|nodelocaldns|vmnet|vmware network adapter|vboxnet|virtualbox host-only|bridge1\d\d$|weave|"
    r"ovs-system$|vethernet \((wsl|default switch)",
    re.IGNORECASE,
)
# Tunnels: OpenVPN, WireGuard, macOS' utun, Tailscale, ZeroTier, Nebula, Cloudflare WARP, IPsec, PPP.
_TUNNEL = re.compile(
    r"tun\d*|tap\d*|wg\d*|wg-|utun|tailscale|ts\d+$|zt|nebula|warp|cloudflarewarp|nordlynx|proton|mullvad|ipsec|ppp\d|vti|"
    r"gpd\d|gre|sit\d|ip6tnl|wireguard|openvpn|netbird|wt\d",
    re.IGNORECASE,
)

_CGN = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598; Tailscale uses it too
# Not is_private of the standard library, whose meaning moves between versions and takes in documentation ranges.
_PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10", "100.64.0.0/10")
)
# Addresses of dead transition mechanisms: Teredo, 6to4.
_TRANSITION = tuple(ipaddress.ip_network(text) for text in ("2001::/32", "2002::/16"))
_FUTURE = ipaddress.ip_network("240.0.0.0/4")  # RFC 1112, and the broadcast address
_THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """One address of this machine.

    host: the address, with a zone only where it is link-local. prefix: bits of its network. mtu: bytes, 0 unknown.
    is_up: the interface is up and has a carrier. preferred: the system's own choice for the default route.
    tentative, temporary, deprecated: of IPv6, where the system says so (RFC 4862, RFC 8981).
    """

    name: str
    host: str
    prefix: int = 0
    is_up: bool = True
    mtu: int = 0
    preferred: bool = False
    point_to_point: bool = False
    tentative: bool = False
    temporary: bool = False
    deprecated: bool = False


class _Rank(IntEnum):
    """Order of trying: what works at once first, what may lead nowhere last."""

    LAN = 0
    LAN_V6 = 1
    LAN_CGN = 2
    PUBLIC = 3
    GIVEN = 4
    MAPPED = 5
    REFLECTED = 6
    OBSERVED = 7
    TUNNEL = 8


# How many of a rank are told for certain when there are more than MAX_CANDIDATES: together they are that many.
_SHARE = {
    _Rank.LAN: 3,
    _Rank.LAN_V6: 1,
    _Rank.LAN_CGN: 1,
    _Rank.PUBLIC: 3,
    _Rank.GIVEN: 2,
    _Rank.MAPPED: 1,
    _Rank.REFLECTED: 3,
    _Rank.OBSERVED: 1,
    _Rank.TUNNEL: 1,
}


@lru_cache(maxsize=1024)  # the same few hosts again and again, for every ping
def parse_host(host: str) -> IPAddress | None:
    """The IP address in `host` without its zone, IPv4 also where it is mapped into IPv6; None when it is none."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_private(host: str) -> bool:
    """Whether a host is of a private network (RFC 1918, RFC 4193, RFC 6598, link-local): not of the Internet."""
    address = parse_host(host)
    return address is not None and (address.is_link_local or _in(address, _PRIVATE))


def is_public(host: str) -> bool:
    """Whether a host is an address of the Internet that a datagram may be sent to."""
    address = parse_host(host)
    return address is not None and _is_sane(address) and not address.is_loopback and not is_private(host)


def why_not_told(address: Address) -> str:
    """Why an address that a user gives cannot be told to peers, for people; empty when it can."""
    text, port = address
    host = parse_host(text)
    if host is None:
        return "not an IP address; names are not looked up"
    if not 0 < port <= MAX_PORT:
        return f"a port is 1 to {MAX_PORT}"
    if not _is_sane(host):
        return "no datagram for one machine can go there"
    return "link-local addresses are of this network only" if host.is_link_local else ""


def is_container(name: str) -> bool:
    """Whether an interface is a bridge or a link of containers or virtual machines."""
    return _CONTAINER.match(name) is not None


def is_tunnel(interface: InterfaceAddress) -> bool:
    """Whether an interface leads into a VPN, as far as one can see."""
    if _TUNNEL.match(interface.name) is not None:
        return True
    return interface.point_to_point and is_private(interface.host) and not interface.preferred


def choose(
    interfaces: Sequence[InterfaceAddress],
    *,
    reflected: Sequence[Address] = (),
    mapped: Sequence[Address] = (),
    observed: Sequence[Address] = (),
    given: Sequence[Address] = (),
    listen_host: str,
    port: int,
) -> tuple[Candidate, ...]:
    """What to tell a peer: at most MAX_CANDIDATES, no address twice, in the order in which they should be tried.

    `listen_host` and `port` are what the socket is bound to: only addresses that it hears are told. A node that
    listens on loopback tells nothing but that, and what the user gave.
    """
    ranked: list[tuple[_Rank, Candidate]] = []
    for interface in _own(interfaces, listen_host):
        candidate = Candidate((interface.host, port), CandidateSource.INTERFACE)
        ranked.append((_rank(interface), candidate))
    ranked += _learned(_Rank.GIVEN, CandidateSource.GIVEN, given)
    if not _is_loopback(listen_host):
        v4_only = _family(listen_host) == 4
        v6_only = _family(listen_host) == 6 and not _is_wildcard(listen_host)
        for rank, source, addresses in (
            (_Rank.MAPPED, CandidateSource.MAPPED, mapped),
            (_Rank.REFLECTED, CandidateSource.REFLECTED, reflected),
            (_Rank.OBSERVED, CandidateSource.OBSERVED, observed),
        ):
            heard = [a for a in addresses if not (v4_only and ":" in a[0]) and not (v6_only and ":" not in a[0])]
            ranked += _learned(rank, source, heard)
    ranked.sort(key=lambda entry: entry[0])  # stable: the caller's order within a rank
    unique: dict[Address, tuple[_Rank, Candidate]] = {}
    for rank, candidate in ranked:
        unique.setdefault(candidate.address, (rank, candidate))
    return tuple(candidate for _, candidate in _share_out(list(unique.values())))


def kind_of(address: Address, interfaces: Sequence[InterfaceAddress]) -> PathKind:
    """What kind of path leads to a peer's address.

    LOOPBACK: it is this machine. LAN: it is in a network of one of our interfaces, or private; not when only a VPN
    leads there, which takes the same Internet as everything else and must not be preferred to it.
    """
    host = parse_host(address[0])
    if host is None:
        return PathKind.PUBLIC
    if host.is_loopback:
        return PathKind.LOOPBACK
    through_tunnel = False
    on_link = False
    for interface in interfaces:
        own = parse_host(interface.host)
        if own is None or own.version != host.version or not interface.is_up:
            continue
        if own == host:
            return PathKind.LOOPBACK
        if own.is_loopback or not 0 < interface.prefix < own.max_prefixlen:
            continue
        if not (int(own) ^ int(host)) >> (own.max_prefixlen - interface.prefix):  # the same network
            if is_tunnel(interface):
                through_tunnel = True
            else:
                on_link = True
    if on_link:
        return PathKind.LAN
    if through_tunnel or host in _CGN:  # a carrier's network is no neighbourhood
        return PathKind.PUBLIC
    return PathKind.LAN if is_private(str(host)) else PathKind.PUBLIC


def usable(candidate: Candidate, interfaces: Sequence[InterfaceAddress], *, listen_host: str, port: int) -> bool:
    """Whether a peer's candidate may lead to it from here; no such datagram is sent otherwise.

    Dropped: no port, no unicast address, link-local, broadcast, our own address and port, IPv6 where we have none (and
    IPv4 likewise), loopback unless we listen there, and all but this machine when we do.
    """
    text, to_port = candidate.address
    host = parse_host(text)
    if host is None or not 0 < to_port <= MAX_PORT or not _is_sane(host) or host.is_link_local:
        return False
    version = host.version
    if version == 6 and _family(listen_host) == 4:
        return False
    if version == 4 and _family(listen_host) == 6 and not _is_wildcard(listen_host):
        return False
    own = [(parse_host(interface.host), interface) for interface in interfaces if interface.is_up]
    mine = host.is_loopback or any(address == host for address, _ in own)
    if mine and to_port == port:
        return False
    if _is_loopback(listen_host):
        return mine
    if host.is_loopback:
        return False  # of the machine that named it
    reachable = False
    for address, interface in own:
        if address is None or address.version != version or address.is_loopback or address.is_link_local:
            continue
        reachable = True
        if version == 4 and 0 < interface.prefix < 31:
            network = _network(address, interface.prefix)
            if host in (network.broadcast_address, network.network_address):
                return False
    return reachable


def _own(interfaces: Sequence[InterfaceAddress], listen_host: str) -> list[InterfaceAddress]:
    """Addresses of interfaces that a peer may reach this socket by; the system's preferred ones first."""
    bound = parse_host(listen_host)
    if bound is None:
        return []
    if bound.is_loopback:
        return [InterfaceAddress("lo", str(bound))]
    picked: dict[object, InterfaceAddress] = {}
    for interface in sorted(interfaces, key=lambda i: (not i.preferred, i.deprecated, i.temporary, not i.is_up)):
        host = parse_host(interface.host)
        if host is None or not interface.is_up or interface.tentative or is_container(interface.name):
            continue
        if host.is_loopback or host.is_link_local or not _is_sane(host) or _in(host, _TRANSITION):
            continue
        if not bound.is_unspecified and host != bound:
            continue
        if bound.is_unspecified and host.version == 6 and bound.version == 4:
            continue
        key: object = host
        if host.version == 6:
            # One address of a network is enough: the system's choice, since a firewall on the way lets in only what
            # answers the address that we send from.
            key = (interface.name, _network(host, 64))  # RFC 4291, 2.5.1
        picked.setdefault(
            key,
            InterfaceAddress(
                interface.name,
                str(host),
                interface.prefix,
                True,
                interface.mtu,
                interface.preferred,
                interface.point_to_point,
            ),
        )
    return list(picked.values())


def _rank(interface: InterfaceAddress) -> _Rank:
    host = parse_host(interface.host)
    if is_tunnel(interface):
        return _Rank.TUNNEL
    if host is None or not (is_private(interface.host) or host.is_loopback):
        return _Rank.PUBLIC
    if host.version == 6:
        return _Rank.LAN_V6
    return _Rank.LAN_CGN if host in _CGN else _Rank.LAN


def _learned(rank: _Rank, source: CandidateSource, addresses: Iterable[Address]) -> list[tuple[_Rank, Candidate]]:
    kept = []
    for text, port in addresses:
        host = parse_host(text)
        if host is None or not 0 < port <= MAX_PORT or not _is_sane(host) or host.is_link_local:
            continue
        if host.is_loopback and source != CandidateSource.GIVEN:
            continue
        kept.append((rank, Candidate((str(host), port), source)))
    return kept


def _share_out(ranked: list[tuple[_Rank, Candidate]]) -> list[tuple[_Rank, Candidate]]:
    if len(ranked) <= MAX_CANDIDATES:
        return ranked
    left = dict(_SHARE)
    first: list[int] = []
    rest: list[int] = []
    for at, (rank, _) in enumerate(ranked):
        left[rank] -= 1
        (first if left[rank] >= 0 else rest).append(at)
    return [ranked[at] for at in sorted((first + rest)[:MAX_CANDIDATES])]


def _is_sane(host: IPAddress) -> bool:
    """Whether a datagram to it goes to one machine."""
    if host.is_unspecified or host.is_multicast:
        return False
    return not (host.version == 4 and (host in _FUTURE or host in _THIS_NETWORK))


def _network(host: IPAddress, prefix: int) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network((int(host).to_bytes(host.max_prefixlen // 8, "big"), prefix), strict=False)


def _in(host: IPAddress, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    return any(host in network for network in networks)


def _family(host: str) -> int:
    return 6 if ":" in host else 4


def _is_wildcard(host: str) -> bool:
    address = parse_host(host)
    return address is not None and address.is_unspecified


def _is_loopback(host: str) -> bool:
    address = parse_host(host)
    return address is not None and address.is_loopback
