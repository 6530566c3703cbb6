"""Gateways of the lab: a kind of NAT for IPv4, a kind of firewall for IPv6, and a LAN behind them. SHELL.

Hosts and further gateways hang on the LAN, which is a bridge. What the kernel is told is in nat_rules.py. Made by
lab.py and, behind another gateway, by this file.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import struct
from typing import TYPE_CHECKING, TypedDict, Unpack

from tests.natlab.nat_rules import Firewall, Kind, Ports, firewall_rules, nat_rules
from tests.natlab.node import Host, LinkOptions, Node, Parent, Uplink

if TYPE_CHECKING:
    from tests.natlab.lab import Lab

HOME = "192.168.1.0/24"
CARRIER = "100.64.0.0/24"  # RFC 6598, between a home gateway and the carrier's
NETLINK_NETFILTER = 12
CONNTRACK_DELETE = 1 << 8 | 2  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_DELETE
REQUEST_ACK = 5


class NatSettings(TypedDict, total=False):
    """A gateway. `udp_timeout`: seconds that a mapping lives while only one side has spoken, and after an answer."""

    lan: str
    hairpin: bool
    ports: Ports
    firewall: Firewall | None
    udp_timeout: tuple[int, int]


class LinkedNat(LinkOptions, NatSettings, total=False):
    """A gateway with its access link."""


class Nat(Node):
    """A gateway: a kind of NAT for IPv4 (None: no IPv4), a kind of firewall for IPv6 (None: no IPv6)."""

    def __init__(
        self,
        lab: Lab,
        parent: Parent,
        name: str,
        kind: Kind | None,
        options: LinkOptions,
        *,
        lan: str = HOME,
        hairpin: bool = False,
        ports: Ports = "preserve",
        firewall: Firewall | None = None,
        udp_timeout: tuple[int, int] = (30, 120),
    ) -> None:
        super().__init__(lab, parent, name, options, ipv4=kind is not None, ipv6=firewall is not None)
        self.kind = kind
        self._count = 0
        self._lan4 = ipaddress.IPv4Network(lan)
        self.lan_ipv4 = str(self._lan4[1]) if kind else ""
        self.ip("link add lan0 type bridge mcast_snooping 0", "link set lan0 up")
        if kind is not None:
            self.ip(f"addr add {self.lan_ipv4}/{self._lan4.prefixlen} dev lan0")
            self._rules = functools.partial(nat_rules, kind, hairpin=hairpin, ports=ports, timeout_s=udp_timeout[1])
            self.nft(self._rules(self.ipv4))
        if firewall is not None:
            self._subnets = lab.subnets(self.ipv6) if self.uplink.link else iter(())
            self._lan6 = self._delegate()
            self.ip(f"addr add {self._lan6[1]}/64 dev lan0 nodad")
            self.wait_ipv6(str(self._lan6[1]))
            self.nft(firewall_rules(firewall))
        self.sysctl(
            {
                "ipv4/ip_forward": 1,
                "ipv4/conf/all/send_redirects": 0,
                "ipv4/conf/lan0/send_redirects": 0,
                "ipv6/conf/all/forwarding": int(firewall is not None),
                "bridge/bridge-nf-call-iptables": 0,
                "bridge/bridge-nf-call-ip6tables": 0,
                "netfilter/nf_conntrack_udp_timeout": udp_timeout[0],
                "netfilter/nf_conntrack_udp_timeout_stream": udp_timeout[1],
            }
        )

    def attach(self, node: Node, device: str, options: LinkOptions) -> Uplink:
        if options:
            raise ValueError("a LAN has no impairments: they belong to the access link of the outermost gateway")
        self._count += 1
        port = f"p{self._count}"
        self.ip(f"link add {port} type veth peer name {device} netns {node.path}", f"link set {port} master lan0 up")
        lines = [f"link set {device} up"]
        ipv4 = ipv6 = ""
        if self.has_ipv4 and node.has_ipv4:
            ipv4 = str(self._lan4[self._count + 1])
            lines += [
                f"addr replace {ipv4}/{self._lan4.prefixlen} dev {device}",
                f"route replace default via {self.lan_ipv4} dev {device}",
            ]
        if self.has_ipv6 and node.has_ipv6:
            ipv6 = str(self._lan6[self._count + 1])
            lines += [
                f"addr replace {ipv6}/64 dev {device} nodad",
                f"route replace ::/0 via {self._lan6[1]} dev {device}",
            ]
        return Uplink(self, device, ipv4, ipv6, tuple(lines))

    def wait_ready(self, node: Node) -> None:
        self.wait_up(f"p{self._count}" if node.uplinks[-1] is node.uplink else "lan0", "lan0")

    def host(self, name: str, *, ipv4: bool = True, ipv6: bool | None = None, firewall: bool = False) -> Host:
        """A host on this LAN; it has IPv6 where the gateway has it, unless told otherwise."""
        v6 = self.has_ipv6 if ipv6 is None else ipv6
        return Host(self.lab, self, name, LinkOptions(), ipv4=ipv4, ipv6=v6, firewall=firewall)

    def nat(self, name: str, kind: Kind | None = "easy", **settings: Unpack[NatSettings]) -> Nat:
        """A gateway behind this gateway."""
        return Nat(self.lab, self, name, kind, LinkOptions(), **settings)

    def forward(self, port: int, host: Host, to_port: int | None = None) -> None:
        """A static UDP port forward, as UPnP or PCP would make."""
        self.nft(f'insert rule ip nat pre iifname "wan0" udp dport {port} dnat to {host.ipv4}:{to_port or port}')

    def flush(self) -> None:
        """Forget all mappings, as a rebooting or overloaded gateway does."""
        self.nft("flush map ip nat eim; flush map ip nat out; flush set ip nat perm")
        with self.inside(), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
            # struct nlmsghdr, struct nfgenmsg: delete, and no tuple means all
            netlink.send(struct.pack("=IHHIIBBH", 20, CONNTRACK_DELETE, REQUEST_ACK, 1, 0, socket.AF_UNSPEC, 0, 0))
            code = struct.unpack_from("=i", netlink.recv(4096), 16)[0]
        if code:
            raise OSError(-code, os.strerror(-code))

    def renumber(self) -> str:
        """The provider assigns a new public IPv4 address, and every old mapping dies; returns the address."""
        old, (fresh, lines) = self.uplink, self.lab.renumbered(self.uplink)
        self.ip(*lines, f"addr del {old.ipv4}/32 dev {old.device}", f"route replace default dev {old.device}")
        self.uplinks[self.uplinks.index(old)] = self.uplink = fresh
        self.nft(self._rules(self.ipv4))
        self.flush()
        return self.ipv4

    def _delegate(self) -> ipaddress.IPv6Network:
        """A /64 of the outermost link's prefix, routed here."""
        parent = self.uplink.parent
        if not isinstance(parent, Nat):
            return next(self._subnets)
        network = parent._delegate()
        parent.ip(f"route add {network} via {self.ipv6} dev lan0")
        return network
