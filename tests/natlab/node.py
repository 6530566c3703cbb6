"""Machines of the lab: a namespace with an uplink, and hosts, which run processes and sockets. SHELL over netns.py.

Gateways are in nat.py. Made by lab.py and, behind a gateway, by nat.py.

Addresses: IPv4 of the public segment from 11.0.0.0/16, of a LAN as its gateway says (two homes share 192.168.1.0/24, as
they do). A link to the Internet has a /56 of IPv6: its own address is ::1 in subnet 0, LANs behind it have a /64 each.
Both look globally routable on purpose: nodes sort out what is private.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

from tests.natlab.nat_rules import DEAF, HOST_FIREWALL, NO_UDP
from tests.natlab.netns import Netns

if TYPE_CHECKING:
    from tests.natlab.lab import Lab


class LinkOptions(TypedDict, total=False):
    """An access link to the Internet; everything may change while traffic flows (Node.set).

    delay_ms, jitter_ms: each way. loss, udp_loss: probability each way. up_mbit, down_mbit: with a queue of queue_ms;
    udp_up_mbit, udp_down_mbit: UDP only, dropped above the rate. carry: larger UDP packets vanish without a word,
    bytes with IP header, 0 for no limit (TCP is spared, as by a gateway that clamps its segments). mtu: what the
    machine itself knows, fixed at the start. reorder: jitter may overtake. up: whether anything passes.
    """

    delay_ms: float
    jitter_ms: float
    loss: float
    udp_loss: float
    up_mbit: float
    down_mbit: float
    udp_up_mbit: float
    udp_down_mbit: float
    queue_ms: float
    carry: int
    mtu: int
    reorder: bool
    up: bool


@dataclass(frozen=True, slots=True)
class Uplink:
    """One way out of a machine. `ipv4`, `ipv6`: its addresses there, "" without. `lines`: for `ip`, to bring it up.
    `link`: the access link's name in the router, "" on a LAN."""

    parent: Parent
    device: str
    ipv4: str
    ipv6: str
    lines: tuple[str, ...]
    link: str = ""


class Parent(Protocol):
    """What an uplink leads to: the Internet, or a gateway's LAN."""

    def attach(self, node: Node, device: str, options: LinkOptions) -> Uplink:
        """Make the device in the node's namespace and say how it is brought up."""

    def wait_ready(self, node: Node) -> None:
        """Wait until the parent's end of the node's cables carries packets."""


class Node(Netns):
    """What hosts and gateways share."""

    def __init__(
        self, lab: Lab, parent: Parent, name: str, options: LinkOptions, *, ipv4: bool = True, ipv6: bool = False
    ) -> None:
        if name in lab.nodes:
            raise ValueError(f"name {name!r} is taken")
        super().__init__(ipv6=ipv6)
        self.has_ipv4, self.has_ipv6 = ipv4, ipv6
        self.lab, self.name = lab, name
        self.uplinks: list[Uplink] = []
        lab.nodes[name] = self
        self.uplink = self.plug(parent, **options)
        self._bring_up(self.uplink)

    @property
    def ipv4(self) -> str:
        """The machine's own address on its uplink; "" without one."""
        return self.uplink.ipv4

    @property
    def ipv6(self) -> str:
        """The machine's global IPv6 address; "" without one."""
        return self.uplink.ipv6

    @property
    def public_ipv4(self) -> str:
        """What the Internet sees of it."""
        parent = self.uplink.parent
        return parent.public_ipv4 if isinstance(parent, Node) else self.ipv4

    @property
    def seen_as(self) -> set[str]:
        """Every address from which its packets may seem to come."""
        parent = self.uplink.parent
        outer = parent.seen_as if isinstance(parent, Node) else set()
        return {self.ipv4, self.ipv6, *outer} - {""}

    def plug(self, parent: Parent, **options: Unpack[LinkOptions]) -> Uplink:
        """Another uplink, not used yet."""
        uplink = parent.attach(self, f"wan{len(self.uplinks)}", options)
        self.uplinks.append(uplink)
        return uplink

    def set(self, **options: Unpack[LinkOptions]) -> None:
        """Change the access link that the machine uses now."""
        if not self.uplink.link:
            raise ValueError(f"{self.name} has no link of its own to the Internet (set its outer gateway's)")
        if "mtu" in options:
            raise ValueError("the MTU of a device is fixed at the start; use carry for a path that carries less")
        self.lab.control(do="set", name=self.uplink.link, link=self.lab.checked(options))

    def set_udp(self, allowed: bool) -> None:
        """Let UDP to and through this machine vanish, or pass again."""
        self.nft("add table inet no_udp; delete table inet no_udp" + ("" if allowed else NO_UDP))

    def use(self, uplink: Uplink, *, keep: bool = False) -> None:
        """Move to another uplink: its addresses appear, the others' go and their devices are down.

        keep: the others keep their addresses and only lose the default route, as while a phone hands over.
        """
        for other in self.uplinks:
            if other is not uplink and not keep:
                self.ip(f"addr flush dev {other.device}", f"link set {other.device} down")
        self.uplink = uplink
        self._bring_up(uplink)

    def _bring_up(self, uplink: Uplink) -> None:
        self.ip(*uplink.lines)
        uplink.parent.wait_ready(self)
        if uplink.ipv6:
            self.wait_ipv6(uplink.ipv6)


class Host(Node):
    """A machine that runs processes."""

    def __init__(
        self,
        lab: Lab,
        parent: Parent,
        name: str,
        options: LinkOptions,
        *,
        ipv4: bool = True,
        ipv6: bool = False,
        firewall: bool = False,
    ) -> None:
        self._deaf = False
        self._processes: list[subprocess.Popen[Any]] = []  # Any: text or bytes, as the caller opens it
        super().__init__(lab, parent, name, options, ipv4=ipv4, ipv6=ipv6)
        if firewall:
            self.nft(HOST_FIREWALL)

    def socket(self, kind: int = socket.SOCK_DGRAM, port: int = 0, *, ipv6: bool = False) -> socket.socket:
        """A bound socket of one family that lives in this host."""
        with self.inside():
            made = socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, kind)
        if ipv6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(("::" if ipv6 else "0.0.0.0", port))
        return made

    def popen(
        self,
        command: Sequence[str],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        env: dict[str, str] | None = None,
        text: bool = False,
    ) -> subprocess.Popen[Any]:
        """A process in this host. It ends with the lab, and also when this process is killed."""
        with self.inside():
            process: subprocess.Popen[Any] = subprocess.Popen(
                self._with_names(command), stdin=stdin, stdout=stdout, stderr=stderr, env=env, text=text
            )
        self._processes.append(process)
        self.watch(process.pid)
        return process

    def entering(self, command: Sequence[str]) -> list[str]:
        """The command as it is to be started from outside, by who cannot use popen; the process keeps its id."""
        return ["nsenter", f"--net={self.path}", *self._with_names(command)]

    def watch(self, pid: int) -> None:
        """Have a process that the caller started end when this process is killed."""
        watched = os.pidfd_open(pid)
        try:
            self.lab.control(watched, do="child")
        finally:
            os.close(watched)

    def _with_names(self, command: Sequence[str]) -> list[str]:
        """With the lab's /etc/hosts, in a mount namespace of its own."""
        if self.lab.names is None:
            return [*command]
        mount = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(self.lab.names))
        return ["unshare", "--mount", *mount, *command]

    def deafen(self, source: Node) -> None:
        """From now on, UDP that comes from `source` (or any gateway above it) vanishes here; TCP passes."""
        if not self._deaf:
            self.nft(DEAF)
            self._deaf = True
        self._sources("add", source)

    def hear(self, source: Node) -> None:
        """Undo deafen; harmless without it."""
        if self._deaf:
            self._sources("add", source)  # what is not there cannot be deleted
            self._sources("delete", source)

    def _sources(self, verb: str, source: Node) -> None:
        v6 = {address for address in source.seen_as if ":" in address}
        for family, addresses in (("6", v6), ("4", source.seen_as - v6)):
            if addresses:
                self.nft(f"{verb} element inet deaf sources{family} {{ {', '.join(sorted(addresses))} }}")

    def unheard(self) -> int:
        """Packets that deafen has let vanish."""
        words = self.nft("list table inet deaf").replace("\n", " ").split("counter packets ")[1:]
        return sum(int(rest.split()[0]) for rest in words)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        super().close()
