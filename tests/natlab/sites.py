"""How a device may be connected, one word each, and what two such devices can hope for: rows and columns of the matrix.

| site          | IPv4                                                       | IPv6                     |
|---------------|------------------------------------------------------------|--------------------------|
| public        | its own public address                                     | its own public address   |
| fullcone      | NAT, anybody comes in by the mapping                       | none                     |
| restricted    | NAT, who was sent to comes in, from any port               | none                     |
| easy          | NAT, one external port, comes in who was sent to           | none                     |
| easy-random   | the same, the external port is another than the internal   | none                     |
| easy-cgn      | the same, behind a carrier's NAT                           | none                     |
| symmetric     | NAT, another random port for every destination             | none                     |
| symmetric-seq | the same, the next port in turn: it can be predicted       | none                     |
| udp-blocked   | NAT, TCP to 80 and 443 only                                | none                     |
| ipv6          | none                                                       | public, behind a firewall|
| dual          | symmetric                                                  | public, behind a firewall|
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Unpack

from tests.natlab.lab import Lab
from tests.natlab.nat import CARRIER
from tests.natlab.node import Host, LinkOptions

OPEN = frozenset({"public", "fullcone", "restricted"})
EASY = frozenset({"easy", "easy-random", "easy-cgn"})
HARD = frozenset({"symmetric", "symmetric-seq", "dual"})
IPV6 = frozenset({"public", "ipv6", "dual"})


class Hope(StrEnum):
    """What two devices can reach."""

    DIRECT = "direct"  # by sending to each other at the same time
    LUCK = "luck"  # only by predicting ports, or by trying many
    RELAY = "relay"


def hope(one: str, other: str) -> Hope:
    """What a pair of sites can reach, as two careful people would find by hand."""
    sites = {one, other}
    if sites <= IPV6:
        return Hope.DIRECT
    if sites & {"udp-blocked", "ipv6"}:
        return Hope.RELAY
    if sites & OPEN or sites <= EASY:
        return Hope.DIRECT
    return Hope.LUCK if sites & EASY else Hope.RELAY


def build(lab: Lab, site: str, name: str, **link: Unpack[LinkOptions]) -> Host:
    """A host called `name` that is connected in this way; `link` is its (outermost) access link."""
    return SITES[site](lab, name, link)


SITES: dict[str, Callable[[Lab, str, LinkOptions], Host]] = {
    "public": lambda lab, name, link: lab.host(name, ipv6=True, **link),
    "fullcone": lambda lab, name, link: lab.nat(f"{name}/gw", "fullcone", **link).host(name),
    "restricted": lambda lab, name, link: lab.nat(f"{name}/gw", "restricted", **link).host(name),
    "easy": lambda lab, name, link: lab.nat(f"{name}/gw", "easy", **link).host(name),
    "easy-random": lambda lab, name, link: lab.nat(f"{name}/gw", "easy", ports="random", **link).host(name),
    "easy-cgn": lambda lab, name, link: (
        lab.nat(f"{name}/cgn", "easy", lan=CARRIER, **link).nat(f"{name}/gw", "easy").host(name)
    ),
    "symmetric": lambda lab, name, link: lab.nat(f"{name}/gw", "symmetric", **link).host(name),
    "symmetric-seq": lambda lab, name, link: lab.nat(f"{name}/gw", "symmetric", ports="sequential", **link).host(name),
    "udp-blocked": lambda lab, name, link: lab.nat(f"{name}/gw", "udp-blocked", **link).host(name),
    "ipv6": lambda lab, name, link: lab.nat(f"{name}/gw", None, firewall="stateful", **link).host(name, ipv4=False),
    "dual": lambda lab, name, link: lab.nat(f"{name}/gw", "symmetric", firewall="stateful", **link).host(name),
}
