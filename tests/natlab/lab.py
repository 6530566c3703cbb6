"""A small Internet with real Linux NATs inside one machine: for tests that must not trust an emulation.

    with Lab(seed=1) as lab:
        stun = lab.host("stun")                                     # a public host, no delay
        home = lab.nat("home", "easy", firewall="stateful", delay_ms=20, up_mbit=20)  # IPv4 NAT, IPv6 firewall
        a = home.host("a")                                          # 192.168.1.2 and 2606:1100:…, behind `home`
        cgn = lab.nat("cgn", "fullcone", lan=CARRIER)
        b = cgn.nat("box", "easy").host("b")                        # double NAT
        socket = a.socket(port=4433)                                # a Python socket that lives in a
        process = a.popen(["./node", "--listen", "4433"])           # a process that lives in a
        home.set(delay_ms=200); home.set_udp(False); home.flush(); home.renumber()
        lab.black_hole(a, b); lab.heal(a, b)                        # UDP between two hosts, nothing else
        a.use(a.plug(lab, delay_ms=30))                             # from home to a public link: address changes

Needs root (or `unshare -Urn`), `ip`, `nft` and /dev/net/tun; `why_not()` says what is missing. Everything lives in
anonymous namespaces: nothing is left behind, however the process ends (but the file of names, under /tmp, after a
SIGKILL). The public segment is router.py.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import ipaddress
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, cast

from tests.natlab.nat import LinkedNat, Nat, NatSettings
from tests.natlab.nat_rules import Kind
from tests.natlab.netns import LabError
from tests.natlab.node import Host, LinkOptions, Node, Uplink

ROUTER = Path(__file__).with_name("router.py")
PUBLIC4 = ipaddress.IPv4Network("11.0.0.0/16")
PUBLIC6 = ipaddress.IPv6Network("2606:1100::/32")
TUN = Path(os.environ.get("NATLAB_TUN", "/dev/net/tun"))
TUNSETIFF, IFF_TUN_NO_PI = 0x400454CA, 0x1001
CONTROL_SECONDS = 10.0
DEFAULTS: LinkOptions = {"queue_ms": 100.0, "mtu": 1500}
LINK_KEYS = frozenset(LinkOptions.__annotations__)
DROPPED_COLUMN = 11  # transmit drops in /proc/net/dev: packets that the router did not read in time


class Lab:
    """The public segment, and the owner of every machine on it."""

    def __init__(self, seed: int = 0) -> None:
        """seed: of all chance in the router (loss, jitter)."""
        self.nodes: dict[str, Node] = {}
        self._links: dict[str, tuple[Node, str]] = {}  # access links by name: machine and device
        self._addresses4 = PUBLIC4.hosts()
        self._prefixes6 = iter(range(1, 1 << 24))
        self._names: Path | None = None
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(CONTROL_SECONDS)
        with theirs:
            command = [sys.executable, "-I", "-S", str(ROUTER), str(theirs.fileno()), str(seed)]
            self._router = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- building

    def host(
        self,
        name: str,
        *,
        ipv4: bool = True,
        ipv6: bool = False,
        firewall: bool = False,
        **options: Unpack[LinkOptions],
    ) -> Host:
        """A host with public addresses."""
        return Host(self, self, name, options, ipv4=ipv4, ipv6=ipv6, firewall=firewall)

    def nat(self, name: str, kind: Kind | None = "easy", **settings: Unpack[LinkedNat]) -> Nat:
        """A gateway with public addresses."""
        options = cast(LinkOptions, {key: value for key, value in settings.items() if key in LINK_KEYS})
        rest = cast(NatSettings, {key: value for key, value in settings.items() if key not in LINK_KEYS})
        return Nat(self, self, name, kind, options, **rest)

    def name(self, host: Host) -> str:
        """A DNS name for a public host, which processes that start after this in any host can look up."""
        name = f"{host.name}.natlab"
        if self._names is None:
            self._names = Path(tempfile.mkdtemp(prefix="natlab-"), "hosts")
            self._names.write_text("127.0.0.1 localhost\n::1 localhost\n")
        with self._names.open("a") as file:
            file.writelines(f"{address} {name}\n" for address in (host.ipv4, host.ipv6) if address)
        return name

    @property
    def names(self) -> Path | None:
        """What is /etc/hosts to processes in the lab; None: the machine's own."""
        return self._names

    # -- changing

    def between(self, one: Node, other: Node, *, delay_ms: float = 0.0, udp_loss: float = 0.0) -> None:
        """What lies between two access links, each way, on top of the links: as a bad route between two providers."""
        for source, target in ((one, other), (other, one)):
            names = {"source": self.access(source), "target": self.access(target)}
            self.control(do="between", **names, delay_ms=delay_ms, udp_loss=udp_loss)

    def black_hole(self, one: Host, other: Host, *, both: bool = True) -> None:
        """UDP from `one` to `other` vanishes, and with `both` the other way too; a relay is not touched."""
        other.deafen(one)
        if both:
            one.deafen(other)

    def heal(self, one: Host, other: Host) -> None:
        """Undo black_hole."""
        one.hear(other)
        other.hear(one)

    def renumbered(self, uplink: Uplink) -> tuple[Uplink, list[str]]:
        """The access link with a new public IPv4 address, and the lines for `ip` that add it. For Nat.renumber."""
        if not uplink.link:
            raise ValueError("only a link to the Internet can be renumbered")
        fresh = str(next(self._addresses4))
        lines = [line.replace(f"{uplink.ipv4}/", f"{fresh}/") for line in uplink.lines]
        self.control(do="routes", name=uplink.link, routes=[one for one in (fresh, uplink.ipv6) if one])
        return dataclasses.replace(uplink, ipv4=fresh, lines=tuple(lines)), [f"addr add {fresh}/32 dev {uplink.device}"]

    # -- looking

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters per access link: rx, tx, lost (on purpose), queue, toobig, policed, noroute, werr, udp_bytes and
        other_bytes (both ways, with headers), and `ring`: packets that the kernel dropped because the router fell
        behind. Not zero there means that the lab was overloaded and results are void."""
        links: dict[str, dict[str, int]] = self.control(do="stats")["links"]
        for name, (node, device) in self._links.items():
            with node.inside():
                table = Path("/proc/thread-self/net/dev").read_text().splitlines()
            line = next(line for line in table if line.strip().startswith(device + ":"))
            links[name]["ring"] = int(line.split(":")[1].split()[DROPPED_COLUMN])
        return links

    def access(self, node: Node) -> str:
        """The name, as in stats, of the access link over which a machine reaches the Internet now."""
        parent = node.uplink.parent
        return self.access(parent) if isinstance(parent, Node) else node.uplink.link

    def ring_drops(self) -> dict[str, int]:
        """Access links where the lab itself lost packets."""
        return {name: counters["ring"] for name, counters in self.stats().items() if counters["ring"]}

    # -- for node.py and nat.py

    def attach(self, node: Node, device: str, options: LinkOptions) -> Uplink:
        """A new access link: a TUN device in the node's namespace, its other end in the router."""
        link: LinkOptions = {**DEFAULTS, **self.checked(options)}
        ipv4 = str(next(self._addresses4)) if node.has_ipv4 else ""
        ipv6 = str(PUBLIC6.network_address + (next(self._prefixes6) << 72) + 1) if node.has_ipv6 else ""
        name = node.name if device == "wan0" else f"{node.name}.{device}"
        with node.inside():  # opened inside, so the device is born in the namespace
            descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN_NO_PI))
        try:
            routes = [address for address in (ipv4, ipv6) if address]
            self.control(descriptor, do="add", name=name, routes=routes, link=link)
        finally:
            os.close(descriptor)
        self._links[name] = (node, device)
        lines = [f"link set {device} up mtu {link['mtu']} txqueuelen 10000"]
        if ipv4:
            lines += [f"addr replace {ipv4}/32 dev {device}", f"route replace default dev {device}"]
        if ipv6:
            lines += [f"addr replace {ipv6}/128 dev {device} nodad", f"route replace ::/0 dev {device}"]
        return Uplink(self, device, ipv4, ipv6, tuple(lines), name)

    def wait_ready(self, node: Node) -> None:
        """A TUN device carries packets at once."""

    def subnets(self, ipv6: str) -> Iterator[ipaddress.IPv6Network]:
        """The /64s of the /56 in which this address is, without its own."""
        own = ipaddress.IPv6Network(f"{ipv6}/56", strict=False)
        subnets = own.subnets(new_prefix=64)
        next(subnets)
        return subnets

    def checked(self, options: LinkOptions) -> LinkOptions:
        """The options; raises ValueError when one is unknown."""
        if unknown := set(options) - LINK_KEYS:
            raise ValueError(f"unknown link option {sorted(unknown)}")
        return options

    def control(self, *descriptors: int, **message: Any) -> dict[str, Any]:  # Any: JSON
        """Tell the router something; returns its answer. Raises LabError."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(descriptors))
            answer: dict[str, Any] = json.loads(self._socket.recv(1 << 18) or b'{"error": "the router is gone"}')
        if "error" in answer:
            raise LabError(answer["error"])
        return answer

    def close(self) -> None:
        """End every process, drop every namespace, end the router."""
        for node in self.nodes.values():
            node.close()
        self.nodes.clear()
        self._links.clear()
        if self._names is not None:
            shutil.rmtree(self._names.parent, ignore_errors=True)
        self._socket.close()  # the router sees the end and leaves; its TUN devices go with it
        try:
            self._router.wait(3)
        except subprocess.TimeoutExpired:
            self._router.kill()
            self._router.wait()


@functools.lru_cache(1)
def why_not() -> str | None:
    """None if a lab can be built here, else one line that says what is missing. Builds and drops one to know."""
    if not sys.platform.startswith("linux"):
        return "natlab needs Linux network namespaces"
    for tool in ("ip", "nft", "unshare", "mount"):
        if not shutil.which(tool):
            return f"natlab needs the `{tool}` command (apt install iproute2 nftables util-linux mount)"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"natlab needs {TUN} read-write (docker: --device /dev/net/tun)"
    try:
        with Lab() as lab:
            lab.nat("probe", "fullcone", ports="random", firewall="stateful").host("inside")
    except PermissionError:
        return "natlab needs to be root (docker: --cap-add SYS_ADMIN --cap-add NET_ADMIN), or `unshare -Urn`"
    except (OSError, LabError) as error:
        return f"natlab cannot build a lab here: {str(error).splitlines()[0]}"
    return None


if __name__ == "__main__":
    print(why_not() or "natlab works here")
