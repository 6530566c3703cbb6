"""Who a client is by address: through trusted fronts, for bounds per address, and as told to the client. PURE."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from relay.config import Network

IPAddress = IPv4Address | IPv6Address

MAX_FORWARDED_FOR = 1024


def forwarded_for(values: list[str], trusted: tuple[Network, ...]) -> IPAddress | None:
    """The client behind a trusted front: the last address in its X-Forwarded-For that is not itself trusted.

    None when there is none, or when garbage stands before it: what is left of that is anybody's claim.
    """
    text = ",".join(values)
    if len(text) > MAX_FORWARDED_FOR:
        return None
    for part in reversed(text.split(",")):
        address = parse_address(part.strip())
        if address is None or not is_in(address, trusted):
            return address
    return None


def parse_address(text: str) -> IPAddress | None:
    """An address without its port, brackets or zone; IPv4 as such where IPv6 only wraps it."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def one_subscriber(address: IPAddress | None) -> object:
    """What counts as one address in bounds: an IPv4 address, or an IPv6 /64, which one subscriber has whole."""
    return ip_network((int(address) >> 64 << 64, 64)) if isinstance(address, IPv6Address) else address


def address_text(address: IPAddress | None, port: int) -> str:
    """`192.0.2.7:4433`, `[2001:db8::7]:4433`, or nothing."""
    if address is None:
        return ""
    return f"[{address}]:{port}" if isinstance(address, IPv6Address) else f"{address}:{port}"


def is_in(address: IPAddress, networks: tuple[Network, ...]) -> bool:
    """Whether an address is in one of the networks."""
    return any(address.version == network.version and address in network for network in networks)
