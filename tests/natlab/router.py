"""The lab's Internet: one process that carries packets between access links. Standard library only, run by lab.py as

    python -I -S router.py CONTROL_FD SEED

Each access link is a TUN device in some namespace. A packet pays its sender's link, then what lies between the two
links, then its receiver's link: delay, jitter, loss, rate, queue, size. IPv4 goes by destination address, IPv6 by the
first 56 bits of it (a link has a prefix). There is no netem in many kernels; this one needs none.

Control: JSON messages on a SOCK_SEQPACKET socket, one answer each; TUN descriptors and pidfds come along.
  add {name, routes, link} + TUN descriptor     set {name, link}      routes {name, routes}
  between {source, target, delay_ms, udp_loss}  child {} + pidfd      stats {}
When the socket closes, every child is killed and the process ends: nothing outlives the lab, however it died.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import heapq
import ipaddress
import json
import os
import random
import select
import signal
import socket
import sys
import time
from typing import Any

Message = dict[str, Any]  # JSON

PREFIX_BYTES = 7  # an IPv6 link has a /56
MAX_PACKET = 9216  # no device of the lab is told a larger MTU
READ_BURST = 64
UDP = 17
POLICER_BURST = 32_768  # bytes that pass a policer at once, as on real access links
# Woken more often than 5,000 times a second, it pauses, so that packets come in batches.
BUSY_SECONDS, PAUSE_SECONDS = 2e-4, 1e-4
PR_SET_TIMERSLACK = 29
COUNTERS = ("rx", "tx", "lost", "queue", "toobig", "policed", "noroute", "werr", "udp_bytes", "other_bytes")


class Policer:
    """A rate that drops what exceeds it, without a queue."""

    __slots__ = ("_at", "_rate", "_tokens")

    def __init__(self, mbit: float) -> None:
        self._rate = mbit * 125_000
        self._tokens, self._at = float(POLICER_BURST), 0.0

    def passes(self, size: int, now: float) -> bool:
        """Whether a packet of `size` bytes may go on at `now`."""
        self._tokens = min(POLICER_BURST, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < size:
            return False
        self._tokens -= size
        return True


class Link:
    """One access link. Options are lab.LinkOptions, with times in seconds and rates in seconds per byte."""

    __slots__ = (
        "carry",
        "count",
        "delay",
        "descriptor",
        "down_cost",
        "down_free",
        "down_policer",
        "jitter",
        "knot",
        "loss",
        "name",
        "queue",
        "reorder",
        "routes",
        "udp_loss",
        "up",
        "up_cost",
        "up_free",
        "up_policer",
    )

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor, self.name = descriptor, name
        self.routes: list[bytes] = []
        self.up, self.reorder = True, False
        self.delay = self.jitter = self.loss = self.udp_loss = self.queue = 0.0
        self.carry = MAX_PACKET
        self.up_cost = self.down_cost = 0.0
        self.up_free = self.down_free = 0.0  # when the last packet has left
        self.up_policer: Policer | None = None
        self.down_policer: Policer | None = None
        self.knot = (0.0, 0.0, 0.0, 0.0)
        self.count = dict.fromkeys(COUNTERS, 0)

    def set(self, options: Message) -> None:
        """Take these options; what is not named stays."""
        for key, value in options.items():
            match key:
                case "delay_ms" | "jitter_ms" | "queue_ms":
                    setattr(self, key[:-3], value / 1e3)
                case "up_mbit" | "down_mbit":
                    setattr(self, key[:-5] + "_cost", 8 / (value * 1e6) if value else 0.0)
                case "udp_up_mbit" | "udp_down_mbit":
                    setattr(self, key[4:-5] + "_policer", Policer(value) if value else None)
                case "carry":
                    self.carry = value or MAX_PACKET
                case "mtu":
                    pass  # the device's, set by lab.py
                case _:
                    setattr(self, key, value)

    def wobble(self, now: float, chance: random.Random) -> float:
        """Jitter in seconds: ± jitter, never below zero delay.

        Without `reorder` it is a line between random knots, 4 × jitter apart: its slope stays within ± 0.5, so no
        packet overtakes another, not even with jitter at both ends.
        """
        jitter = self.jitter
        if self.reorder:
            return max(-self.delay, chance.uniform(-jitter, jitter))
        t0, v0, t1, v1 = self.knot
        while now >= t1:
            t0, v0 = max(t1, now - 4 * jitter), v1
            t1, v1 = t0 + 4 * jitter, chance.uniform(-jitter, jitter)
            self.knot = t0, v0, t1, v1
        return max(-self.delay, v0 + (v1 - v0) * (now - t0) / (t1 - t0))


class Router:
    """All links, the packets that are on their way, and the control socket."""

    def __init__(self, control: socket.socket, seed: int) -> None:
        self._control = control
        self._chance = random.Random(seed)
        self._links: dict[int, Link] = {}
        self._routes: dict[bytes, Link] = {}
        self._between: dict[tuple[Link, Link], tuple[float, float]] = {}  # extra delay, loss of UDP
        self._heap: list[tuple[float, int, Link, bytes, bool]] = []  # when, order, target, packet, through
        self._sequence = 0
        self._children: list[int] = []

    def run(self) -> None:
        """Carry packets until the control socket closes."""
        heap, clock = self._heap, time.monotonic
        control = self._control.fileno()
        woke = 0.0
        while True:
            now = clock()
            while heap and heap[0][0] <= now:
                at, _, target, packet, through = heapq.heappop(heap)
                self._onwards(target, packet, at, now, through)
            pause = max(0.0, heap[0][0] - clock()) if heap else None
            ready = select.select([control, *self._links], (), (), pause)[0]
            if clock() - woke < BUSY_SECONDS:
                time.sleep(PAUSE_SECONDS)
            woke = clock()
            for descriptor in ready:
                if descriptor != control:
                    self._drain(self._links[descriptor])
                elif not self._command():
                    return

    def kill_children(self) -> None:
        """End every process that was started inside the lab."""
        for child in self._children:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(child, signal.SIGKILL)

    # -- packets

    def _drain(self, source: Link) -> None:
        for _ in range(READ_BURST):
            try:
                packet = os.read(source.descriptor, MAX_PACKET)
            except OSError:  # EAGAIN: drained. EIO, EBADFD: the device is down
                return
            if packet:
                self._enter(source, packet)

    def _enter(self, source: Link, packet: bytes) -> None:
        """A packet leaves a namespace."""
        count, size = source.count, len(packet)
        count["rx"] += 1
        if packet[0] >> 4 == 4:
            target, is_udp = self._routes.get(packet[16:20]), packet[9] == UDP
        else:
            target, is_udp = self._routes.get(packet[24 : 24 + PREFIX_BYTES]), packet[6] == UDP
        if target is None:
            count["noroute"] += 1
            return
        count["udp_bytes" if is_udp else "other_bytes"] += size
        now = time.monotonic()
        chance = self._chance
        if not source.up or (source.loss and chance.random() < source.loss):
            count["lost"] += 1
            return
        if is_udp and not self._udp_passes(source, target, size, now):
            return
        at = now
        if source.up_cost:
            if source.up_free - at > source.queue:
                count["queue"] += 1
                return
            source.up_free = at = max(at, source.up_free) + size * source.up_cost
        at += source.delay
        if source.jitter:
            at += source.wobble(now, chance)
        if self._between:
            at += self._between.get((source, target), (0.0, 0.0))[0]
        if target.down_cost and at > now:  # its queue must be served in the order of arrival
            self._push(at, target, packet, False)
        else:
            self._onwards(target, packet, at, now, False)

    def _udp_passes(self, source: Link, target: Link, size: int, now: float) -> bool:
        chance = self._chance
        if size > source.carry or size > target.carry:  # a black hole: no ICMP
            target.count["toobig"] += 1
            return False
        for policer in (source.up_policer, target.down_policer):
            if policer is not None and not policer.passes(size, now):
                target.count["policed"] += 1
                return False
        losses = [source.udp_loss, target.udp_loss]
        if self._between:
            losses.append(self._between.get((source, target), (0.0, 0.0))[1])
        for loss in losses:
            if loss and chance.random() < loss:
                target.count["lost"] += 1
                return False
        return True

    def _onwards(self, target: Link, packet: bytes, at: float, now: float, through: bool) -> None:
        """The packet has reached its receiver's access link at `at`, or has come `through` it."""
        if not through:
            leaves = self._through(target, packet, at, now)
            if leaves is None:
                return
            if leaves > now:
                self._push(leaves, target, packet, True)
                return
        size, is_udp = len(packet), packet[9 if packet[0] >> 4 == 4 else 6] == UDP
        try:
            os.write(target.descriptor, packet)
        except OSError:
            target.count["werr"] += 1
            return
        target.count["tx"] += 1
        target.count["udp_bytes" if is_udp else "other_bytes"] += size

    def _through(self, target: Link, packet: bytes, at: float, now: float) -> float | None:
        """When a packet that reaches the receiver's access link at `at` comes out of it; None: never."""
        if not target.up or (target.loss and self._chance.random() < target.loss):
            target.count["lost"] += 1
            return None
        if target.down_cost:
            if target.down_free - at > target.queue:
                target.count["queue"] += 1
                return None
            target.down_free = at = max(at, target.down_free) + len(packet) * target.down_cost
        at += target.delay
        return at + target.wobble(now, self._chance) if target.jitter else at

    def _push(self, at: float, target: Link, packet: bytes, through: bool) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, target, packet, through))

    # -- control

    def _command(self) -> bool:
        """Obey one message; False at the end."""
        data, descriptors, _, _ = socket.recv_fds(self._control, 65_536, 4)
        if not data:
            return False
        message: Message = json.loads(data)
        try:
            answer = self._obey(message, descriptors)
        except (KeyError, ValueError, TypeError) as error:
            answer = {"error": f"{message.get('do')}: {error!r}"}
        self._control.send(json.dumps(answer).encode())
        return True

    def _obey(self, message: Message, descriptors: list[int]) -> Message:
        match message["do"]:
            case "add":
                link = self._links[descriptors[0]] = Link(descriptors[0], message["name"])
                link.set(message["link"])
                self._route(link, message["routes"])
            case "set":
                self._named(message["name"]).set(message["link"])
            case "routes":
                self._route(self._named(message["name"]), message["routes"])
            case "between":
                pair = self._named(message["source"]), self._named(message["target"])
                self._between[pair] = message["delay_ms"] / 1e3, message["udp_loss"]
            case "child":
                self._children += descriptors
            case "stats":
                links = {link.name: link.count for link in self._links.values()}
                return {"cpu_s": time.process_time(), "queued": len(self._heap), "links": links}
            case unknown:
                raise ValueError(unknown)
        return {}

    def _named(self, name: str) -> Link:
        for link in self._links.values():
            if link.name == name:
                return link
        raise ValueError(f"no link is called {name}")

    def _route(self, link: Link, routes: list[str]) -> None:
        for old in link.routes:
            del self._routes[old]
        addresses = [ipaddress.ip_address(route) for route in routes]
        link.routes = [one.packed if one.version == 4 else one.packed[:PREFIX_BYTES] for one in addresses]
        self._routes.update(dict.fromkeys(link.routes, link))


def main() -> None:
    """Run with the descriptor and the seed from the command line."""
    control, seed = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    gc.disable()  # no cycles here; a collection would be jitter
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)  # 1 ns instead of 50 µs
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the test run
    router = Router(control, seed)
    try:
        router.run()
    finally:
        router.kill_children()


if __name__ == "__main__":
    main()
