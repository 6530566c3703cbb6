"""The addresses of this machine, and word when they change or the machine slept. SHELL.

`addresses` lists what psutil knows, with what only Linux says of IPv6 (temporary, deprecated, not yet checked), and
marks the addresses that the system itself would send from. `InterfaceWatch` calls back with a reason for people
("address 192.168.1.7 gone", "woke after 312 s"): at once by Linux' netlink, elsewhere by looking every few seconds.
What changes nothing for a peer (containers that come and go, lifetimes that are renewed, routes of others) is silent.

Called by surroundings and netcheck.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from transport.proto import netlink
from transport.proto.candidates import InterfaceAddress, is_container, parse_host
from transport.proto.wake import WakeDetector

logger = logging.getLogger(__name__)

DEBOUNCE_SECONDS = 0.2  # an address, its link and its routes come in several messages
MAX_DEBOUNCE_SECONDS = 1.0  # however long the messages go on
POLL_SECONDS = 3.0  # how often to look where nothing tells
WATCHED_POLL_SECONDS = 30.0  # and where something does: for what it missed
TICK_SECONDS = 2.0  # how often the clocks are compared

# Documentation addresses (RFC 5737, RFC 3849): in no routing table but by the default route. Nothing is sent there.
_ANYWHERE = (("192.0.2.1", 9), ("198.51.100.1", 9), ("203.0.113.1", 9), ("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", 9))

_TEMPORARY, _DEPRECATED, _DAD_FAILED, _TENTATIVE = 0x01, 0x20, 0x08, 0x40  # IFA_F_* of linux/if_addr.h

_NETLINK_BYTES = 65_536


def addresses() -> list[InterfaceAddress]:
    """All addresses of this machine, those of interfaces that are down included; empty only when it has none.

    Takes well under a millisecond; never raises.
    """
    try:
        by_name, stats = psutil.net_if_addrs(), psutil.net_if_stats()
    except (OSError, RuntimeError) as error:  # Android and some containers forbid it
        logger.debug("interfaces.unreadable %s", error)
        by_name, stats = {}, {}
    ipv6_flags = _ipv6_flags()
    preferred = outgoing_hosts()
    found = []
    for name, entries in by_name.items():
        state = stats.get(name)
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            host = parse_host(entry.address)
            if host is None:
                continue
            flags = ipv6_flags.get((name, str(host)), 0)
            found.append(
                InterfaceAddress(
                    name=name,
                    host=entry.address if host.is_link_local else str(host),
                    prefix=_prefix(entry.netmask, host.version),
                    is_up=state is None or state.isup,
                    mtu=state.mtu if state is not None else 0,
                    preferred=str(host) in preferred,
                    point_to_point=state is not None and "pointopoint" in getattr(state, "flags", ""),
                    tentative=bool(flags & (_TENTATIVE | _DAD_FAILED)),
                    temporary=bool(flags & _TEMPORARY),
                    deprecated=bool(flags & _DEPRECATED),
                )
            )
    known = {one.host for one in found}
    found += [InterfaceAddress("default", host, preferred=True) for host in preferred if host not in known]
    return found


def outgoing_hosts() -> tuple[str, ...]:
    """The addresses that the system sends from on its default routes, IPv4 and IPv6; nothing is sent to find out."""
    hosts: list[str] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for target in _ANYWHERE:
            if (":" in target[0]) != (family == socket.AF_INET6):
                continue
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                host = parse_host(probe.getsockname()[0])
                if host is not None and not host.is_unspecified and not host.is_loopback:
                    hosts.append(str(host))
                    break
    return tuple(hosts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What of a machine's network matters to a peer. addresses: (interface, host); routes: default routes as text."""

    addresses: frozenset[tuple[str, str]]
    routes: frozenset[str]

    @staticmethod
    def of(found: Sequence[InterfaceAddress], routes: Sequence[str]) -> Snapshot:
        """Without what a peer never sees: containers, loopback, link-local, what is down or not yet checked."""
        kept = set()
        for one in found:
            host = parse_host(one.host)
            if host is None or host.is_loopback or host.is_link_local or is_container(one.name):
                continue
            if one.is_up and not one.tentative:
                kept.add((one.name, str(host)))
        return Snapshot(frozenset(kept), frozenset(routes))

    def difference(self, later: Snapshot) -> str:
        """What changed until `later`, for people; empty when nothing did."""
        gone = [host for _, host in sorted(self.addresses - later.addresses)]
        new = [f"{host} on {name}" for name, host in sorted(later.addresses - self.addresses)]
        parts = []
        if gone:
            parts.append(f"address {_some(gone)} gone")
        if new:
            parts.append(f"address {_some(new)} new")
        if self.routes != later.routes:
            now = sorted(later.routes)
            parts.append(f"default route now {_some(now)}" if now else "no default route any more")
        return ", ".join(parts)


class InterfaceWatch:
    """Calls `on_change(reason)` on the loop when this machine's network changed, or when it woke."""

    def __init__(self, on_change: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
        """Start watching. The first snapshot is taken now."""
        self._on_change, self._loop = on_change, loop
        self.addresses: list[InterfaceAddress] = []
        self._snapshot = self._look()
        self._flapped: set[str] = set()
        self._due: asyncio.TimerHandle | None = None
        self._first_message = 0.0
        self._closed = False
        self._wake = WakeDetector(TICK_SECONDS)
        self._netlink = _open_netlink(loop, self._readable)
        self._next_poll = loop.time() + self._poll_seconds
        self._tick_timer: asyncio.TimerHandle | None = None
        self._tick()

    @property
    def watches(self) -> bool:
        """Whether the system tells of changes; else they are found by looking every POLL_SECONDS."""
        return self._netlink is not None

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        for timer in (self._due, self._tick_timer):
            if timer is not None:
                timer.cancel()
        self._close_netlink()

    def look(self) -> str:
        """Look now; calls back and returns the reason when something changed, else returns an empty text."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        flapped, self._flapped = self._flapped, set()
        before, self._snapshot = self._snapshot, self._look()
        reason = before.difference(self._snapshot)
        if not reason and flapped:  # the same address again, but perhaps another network
            reason = f"{_some(sorted(flapped))} was away for a moment"
        if reason:
            logger.info("interfaces.changed %s", reason)
            self._on_change(reason)
        return reason

    def _look(self) -> Snapshot:
        self.addresses = addresses()
        routes = default_routes()
        if routes is None:
            routes = [f"from {one.host}" for one in self.addresses if one.preferred]
        return Snapshot.of(self.addresses, routes)

    @property
    def _poll_seconds(self) -> float:
        return POLL_SECONDS if self._netlink is None else WATCHED_POLL_SECONDS

    def _tick(self) -> None:
        if self._closed:
            return
        interval = TICK_SECONDS if self._netlink is not None else min(TICK_SECONDS, POLL_SECONDS)
        self._tick_timer = self._loop.call_later(interval, self._tick)
        slept = self._wake.tick(time.time(), time.monotonic(), _boot_time())
        if slept:
            self._snapshot = self._look()
            reason = f"woke after {slept:.0f} s"
            logger.info("interfaces.woke seconds=%.0f", slept)
            self._on_change(reason)
        elif self._loop.time() >= self._next_poll:
            self.look()
        else:
            return
        self._next_poll = self._loop.time() + self._poll_seconds

    def _readable(self) -> None:
        if self._netlink is None:
            return
        interesting = False
        try:
            for _ in range(64):
                for kind, payload in netlink.messages(self._netlink.recv(_NETLINK_BYTES)):
                    interesting = interesting or kind in netlink.CHANGES
                    self._note_flap(kind, payload)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:  # ENOBUFS: more changed than the kernel could queue
            logger.debug("interfaces.netlink_error %s", error)
            interesting = True
            if self._netlink.fileno() < 0:
                self._close_netlink()
        if interesting and not self._closed:
            self._schedule()

    def _note_flap(self, kind: int, payload: bytes) -> None:
        """Remember what was lost, even when it is back before we look."""
        if kind == netlink.DELADDR:
            host = netlink.host_of(payload)
            if host and any(host == known for _, known in self._snapshot.addresses):
                self._flapped.add(f"address {host}")
        elif kind == netlink.NEWLINK:
            name = netlink.stopped_link(payload)
            if name and any(name == known for known, _ in self._snapshot.addresses):
                self._flapped.add(f"interface {name}")

    def _schedule(self) -> None:
        now = self._loop.time()
        if self._due is None:
            self._first_message = now
        else:
            self._due.cancel()
        at = min(now + DEBOUNCE_SECONDS, self._first_message + MAX_DEBOUNCE_SECONDS)
        self._due = self._loop.call_at(at, self._fire)

    def _fire(self) -> None:
        self._due = None
        if not self._closed:
            self.look()

    def _close_netlink(self) -> None:
        if self._netlink is None:
            return
        if self._netlink.fileno() >= 0:
            self._loop.remove_reader(self._netlink.fileno())
        self._netlink.close()
        self._netlink = None


def default_routes() -> list[str] | None:
    """The default routes ("eth0 by 192.168.1.1"); None where the system does not show them."""
    if not sys.platform.startswith("linux"):
        return None
    routes = []
    for line in _lines("/proc/net/route")[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[1] != "00000000" or fields[7] != "00000000":
            continue
        with contextlib.suppress(ValueError):
            gateway = ipaddress.ip_address(int(fields[2], 16).to_bytes(4, sys.byteorder))
            routes.append(_route(fields[0], gateway))
    for line in _lines("/proc/net/ipv6_route"):
        fields = line.split()
        if len(fields) < 10 or fields[0].strip("0") or fields[1] != "00" or fields[9] == "lo":
            continue
        with contextlib.suppress(ValueError):
            routes.append(_route(fields[9], ipaddress.ip_address(bytes.fromhex(fields[4]))))
    return routes


def _route(name: str, gateway: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    return name if gateway.is_unspecified else f"{name} by {gateway}"


def _ipv6_flags() -> dict[tuple[str, str], int]:
    """IFA_F_* of each IPv6 address, by (interface, host); empty where the system is not Linux."""
    flags = {}
    for line in _lines("/proc/net/if_inet6"):
        fields = line.split()
        if len(fields) == 6:
            with contextlib.suppress(ValueError):
                host = str(ipaddress.ip_address(bytes.fromhex(fields[0])))
                flags[fields[5], host] = int(fields[4], 16)
    return flags


def _lines(path: str) -> list[str]:
    if not sys.platform.startswith("linux"):
        return []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _prefix(netmask: str | None, version: int) -> int:
    """Bits of a netmask as psutil writes it: dotted, as an IPv6 address, or (Windows' IPv6) missing."""
    if not netmask:
        return 64 if version == 6 else 0
    mask = parse_host(netmask)
    return int(mask).bit_count() if mask is not None else 0


def _boot_time() -> float | None:
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return None
    try:
        return time.clock_gettime(clock)
    except OSError:
        return None


def _open_netlink(loop: asyncio.AbstractEventLoop, readable: Callable[[], None]) -> socket.socket | None:
    if not sys.platform.startswith("linux"):
        return None
    handle = None
    try:
        handle = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        handle.setblocking(False)
        handle.bind((0, netlink.GROUPS))
        loop.add_reader(handle.fileno(), readable)
    except (OSError, AttributeError, NotImplementedError) as error:
        logger.info("interfaces.no_netlink %s; looking every %g s", error, POLL_SECONDS)
        if handle is not None:
            handle.close()
        return None
    return handle


def _some(texts: Sequence[str]) -> str:
    """At most three of them: a machine may have dozens of addresses."""
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
