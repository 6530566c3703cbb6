"""An anonymous Linux network namespace: made, entered, configured and dropped by one process. SHELL over `ip`, `nft`.

It is held by a file descriptor only, so nothing is left on the file system, and the kernel frees everything when the
process dies, SIGKILL included. No `ip` or `nft` ever runs in the namespace that the caller came from. Called by lab.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CLONE_NEWNET = 0x40000000
OWN = Path("/proc/thread-self/ns/net")
RTF_LOCAL = 0x80000000
UP_SECONDS = 5.0  # a veth or a bridge port needs milliseconds; a loaded machine some more
# Addresses are given, so nobody is asked for them; detecting duplicates would keep them unusable for a second.
QUIET_IPV6 = {"accept_ra": 0, "accept_dad": 0, "router_solicitations": 0}

_libc = ctypes.CDLL(None, use_errno=True)


class LabError(Exception):
    """The lab could not do what was asked; the text is the tool's."""


class Netns:
    """A network namespace with its loopback up."""

    def __init__(self, *, ipv6: bool = False) -> None:
        """ipv6=False: the kernel has it, but disabled, as on a machine whose owner did that."""
        before = _open_own()
        self._origin = os.fstat(before).st_ino
        try:
            _check(_libc.unshare(CLONE_NEWNET))
            self._descriptor = _open_own()
        finally:
            _check(_libc.setns(before, CLONE_NEWNET))
            os.close(before)
        for scope in ("all", "default"):
            self.sysctl({f"ipv4/conf/{scope}/rp_filter": 0, f"ipv6/conf/{scope}/disable_ipv6": int(not ipv6)})
            if ipv6:
                self.sysctl({f"ipv6/conf/{scope}/{name}": value for name, value in QUIET_IPV6.items()})
        self.ip("link set lo up")

    @property
    def path(self) -> str:
        """For `nsenter --net=PATH` by hand, and for `ip … netns PATH`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is in the namespace: sockets and processes made here stay there. Never await inside."""
        before = _open_own()
        try:
            _check(_libc.setns(self._descriptor, CLONE_NEWNET))
            if OWN.stat().st_ino == self._origin:
                raise LabError("refusing to work in the caller's own network namespace")
            yield
        finally:
            _check(_libc.setns(before, CLONE_NEWNET))
            os.close(before)

    def ip(self, *lines: str) -> str:
        """Run these lines as one `ip -batch`; returns its output. Raises LabError."""
        return self._feed(("ip", "-d", "-o", "-batch", "-"), "\n".join(lines) + "\n")

    def nft(self, rules: str) -> str:
        """Run an nft script; it is applied whole or not at all. Raises LabError."""
        return self._feed(("nft", "-f", "-"), rules)

    def sysctl(self, values: Mapping[str, int]) -> None:
        """Set these below /proc/sys/net; what this kernel does not have is left out."""
        with self.inside():
            for key, value in values.items():
                with contextlib.suppress(FileNotFoundError):
                    Path("/proc/sys/net", key).write_text(str(value))

    def wait_up(self, *devices: str) -> None:
        """Wait until these carry packets. Raises LabError after UP_SECONDS.

        The kernel activates the end of a veth that came up first, a bridge port and a bridge later, from a work queue;
        until then packets vanish and ARP costs a second. (From Linux 6.8 on, asking is enough to do it.)
        """
        deadline = time.monotonic() + UP_SECONDS
        for device in devices:
            while not _carries(shown := self.ip(f"link show dev {device}")):
                if time.monotonic() > deadline:
                    raise LabError(f"{device} does not come up: {shown}")
                time.sleep(0.005)

    def wait_ipv6(self, address: str) -> None:
        """Wait until packets to this address are taken as our own. Raises LabError after UP_SECONDS.

        An address gets its local route from a work queue too, even without duplicate address detection.
        """
        deadline = time.monotonic() + UP_SECONDS
        while not self._is_local(ipaddress.IPv6Address(address)):
            if time.monotonic() > deadline:
                raise LabError(f"the address {address} does not come up")
            time.sleep(0.005)

    def close(self) -> None:
        """Let go; the kernel frees it with its last process and socket."""
        os.close(self._descriptor)

    def _is_local(self, address: ipaddress.IPv6Address) -> bool:
        with self.inside():
            routes = Path("/proc/thread-self/net/ipv6_route").read_text().splitlines()
        # destination, its length, source, its length, next hop, metric, references, uses, flags, device
        fields = [route.split() for route in routes]
        return any(one[0] == address.packed.hex() and int(one[8], 16) & RTF_LOCAL for one in fields)

    def _feed(self, command: Sequence[str], text: str) -> str:
        with self.inside():
            done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        if done.returncode:
            raise LabError(f"{command[0]}: {done.stderr.strip()}\n{text}")
        return done.stdout


def _carries(shown: str) -> bool:
    return "LOWER_UP" in shown and "state UP" in shown and ("bridge_slave" not in shown or "state forwarding" in shown)


def _open_own() -> int:
    return os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)


def _check(code: int) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
