"""Two PeerPaths against each other over simulated links: delay, jitter, loss, size limits, NATs, relays. Virtual time.

Not a model of QUIC: node A asks every 20 ms and B answers at once, each by what its decision says; nothing is
retransmitted except by a Replay. What the tests measure is which requests were answered, when, and by which path.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

from transport.errors import Address
from transport.proto.addresses import Candidate, CandidateSource, NatKind, PathId, PathKind
from transport.proto.disco_frames import Call
from transport.proto.paths import (
    Action,
    CloseSockets,
    OpenSockets,
    PathConfig,
    PeerPaths,
    Replay,
    SendCall,
    SendPing,
    kind_of,
)

RELAY = "https://relay.example"


@dataclass(frozen=True)
class Packet:
    what: str  # ping, pong, call, request, answer, bulk
    size: int = 64
    tx: bytes = b""
    number: int = 0
    call: Call | None = None
    left: bool = False


class Nat:
    """Mapping per inside socket (EASY) or per destination (HARD); filter by address and port, address, or none."""

    def __init__(self, kind: NatKind, host: str, seed: int, step: int = 0, filters: str = "port") -> None:
        self.kind, self.host, self.step, self.filters = kind, host, step, filters
        self._random = Random(seed)
        self._ports: dict[tuple[object, ...], int] = {}
        self._inside: dict[int, tuple[Address, set[Address]]] = {}
        self._next = 40_000

    def out(self, inside: Address, to: Address) -> Address:
        key = (inside, to) if self.kind is NatKind.HARD else (inside,)
        port = self._ports.get(key)
        if port is None:
            port = self._free_port()
            self._ports[key] = port
            self._inside[port] = (inside, set())
        self._inside[port][1].add(to)
        return (self.host, port)

    def back(self, port: int, source: Address) -> Address | None:
        inside, called = self._inside.get(port, (None, set()))
        if inside is None or self.kind is NatKind.BLOCKED:
            return None
        allowed = {
            "port": source in called,
            "address": source[0] in {host for host, _ in called},
            "open": True,
        }[self.filters]
        return inside if allowed else None

    def renumber(self) -> None:
        """A rebinding: all mappings are forgotten."""
        self._ports.clear()
        self._inside.clear()
        self._next += 777

    def _free_port(self) -> int:
        if self.step:
            self._next += self.step
            return self._next
        while (port := self._random.randrange(1024, 65536)) in self._inside:
            pass
        return port


@dataclass
class Link:
    """One direction between two nodes. delay in seconds one way."""

    delay: float
    jitter: float = 0.0  # share of the delay, uniform ±
    loss: float = 0.0
    mtu: int = 1500
    up: bool = True


@dataclass
class Node:
    """One side: its addresses, its machine, what it has seen."""

    name: str
    host: str
    nat: Nat | None = None
    lan: str = ""
    port: int = 4433
    paths: PeerPaths = field(init=False)
    relays: set[str] = field(default_factory=set)
    sockets: set[int] = field(default_factory=set)
    recent: deque[tuple[float, Packet]] = field(default_factory=deque)
    log: list[tuple[float, str]] = field(default_factory=list)
    count: Counter[str] = field(default_factory=Counter)
    by_path: Counter[str] = field(default_factory=Counter)
    switched_at: list[float] = field(default_factory=list)
    primary: PathId | None = None
    paused: bool = False  # its process does not run; what arrives waits
    waiting: list[tuple[PathId, Packet]] = field(default_factory=list)

    @property
    def key(self) -> bytes:
        return self.name.encode().ljust(32, b"\0")

    def inside(self, socket: int) -> Address:
        return (self.host, self.port + socket)


class Simulation:
    """Nodes a and b, direct links both ways, relays. `run(seconds)` lets virtual time pass."""

    def __init__(
        self,
        a: Node,
        b: Node,
        *,
        delay: float = 0.01,
        relay_delay: float = 0.025,
        relays: Sequence[str] = (RELAY,),
        seed: int = 1,
        config: PathConfig | None = None,
    ) -> None:
        """delay: one way, direct; relay_delay: one way, a to b through a relay."""
        self.now = 100.0
        self.random = Random(seed)
        self.a, self.b = a, b
        self.links = {(a.name, b.name): Link(delay), (b.name, a.name): Link(delay)}
        self.lanes: dict[int, Link] = {}  # other links for other ports of node a, so that there are several paths
        self.lan_delay = 0.0005
        self.relay_links = {url: Link(relay_delay) for url in relays}
        self.config = config or PathConfig()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._asked: dict[int, float] = {}
        self.answered: dict[int, float] = {}  # number of the request → seconds to its first answer
        self.asked_at: dict[int, float] = {}
        self._served: set[int] = set()
        self._numbers = itertools.count()
        for node, other in ((a, b), (b, a)):
            source = Random(f"{seed} {node.name}")
            node.paths = PeerPaths(node.key, other.key, self.config, source.randbytes, self.now, kind_of)

    # What happens in the world.

    def attach(self, node: Node, *relays: str) -> None:
        for url in relays or tuple(self.relay_links):
            node.relays.add(url)
            node.paths.relay_up(url, self.now)

    def detach(self, node: Node, *relays: str) -> None:
        for url in relays:
            node.relays.discard(url)
            node.paths.relay_down(url, self.now)

    def tell(self, node: Node, *more: Candidate) -> None:
        """Give the node the candidates that its interfaces and two reflectors would tell."""
        candidates = [Candidate(node.inside(0), CandidateSource.INTERFACE), *more]
        kind, step = NatKind.NONE, 0
        if node.nat is not None:
            kind, step = node.nat.kind, node.nat.step
            if kind is not NatKind.BLOCKED:
                for reflector in (("192.0.9.1", 3478), ("192.0.9.2", 3478)):
                    seen = Candidate(node.nat.out(node.inside(0), reflector), CandidateSource.REFLECTED)
                    if seen not in candidates:
                        candidates.append(seen)
        node.paths.local(candidates, kind, step, sorted(node.relays), self.now)

    def start(self) -> None:
        """Both attached to all relays, both know themselves, both want each other."""
        for node in (self.a, self.b):
            self.attach(node)
            self.tell(node)
        self.a.paths.want(self.now)

    def at(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), what))

    def traffic(self, seconds: float, gap: float = 0.02, size: int = 1200, start: float = 0.0) -> None:
        """A asks every `gap` seconds."""
        for number in range(round(seconds / gap)):
            self.at(start + number * gap, lambda: self._request(size))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            for node in (self.a, self.b):
                self._serve(node)
            timers = [time for node in (self.a, self.b) if (time := node.paths.timer()) is not None and not node.paused]
            wakes = min((self._queue[0][0] if self._queue else inf, *timers))
            if wakes > end:
                break
            self.now = max(self.now, wakes)
            if self._queue and self._queue[0][0] <= self.now:
                heapq.heappop(self._queue)[2]()
        self.now = end

    def pause(self, node: Node, seconds: float) -> None:
        """Its process is stopped for so long; then it reads its socket first, as an event loop does."""
        node.paused = True

        def resume() -> None:
            node.paused = False
            waiting, node.waiting = node.waiting, []
            for path, packet in waiting:
                self._arrive(node, path, packet)

        self.at(seconds, resume)

    def link(self, source: Node, to: Node) -> Link:
        return self.links[source.name, to.name]

    def black_hole(self, up: bool = False) -> None:
        for link in self.links.values():
            link.up = up

    def late(self, start: float, end: float, limit: float) -> list[int]:
        """Requests asked in [start, end) without an answer within `limit` seconds."""
        return [
            number
            for number, at in self.asked_at.items()
            if start <= at < end and self.answered.get(number, 1e9) > limit
        ]

    # The shell around each machine.

    def _serve(self, node: Node) -> None:
        for _ in range(100):
            due = node.paths.timer()
            if due is None or due > self.now or node.paused:
                break
            for action in node.paths.poll(self.now):
                self._act(node, action)
        else:
            raise AssertionError(f"{node.name} is busy for ever at {self.now}")
        if node.paths.decision.primary != node.primary:
            node.primary = node.paths.decision.primary
            node.switched_at.append(self.now)
        text = node.paths.decision.reason
        if not node.log or node.log[-1][1] != text:
            node.log.append((self.now, text))

    def _act(self, node: Node, action: Action) -> None:
        node.count[type(action).__name__] += 1
        match action:
            case SendPing(path, tx, size, left):
                self._send(node, path, Packet("ping", max(size, 110), tx, left=left))
            case SendCall(relay, call):
                self._send(node, PathId(relay=relay), Packet("call", 300, call=call))
            case OpenSockets(count):
                node.sockets = set(range(1, count + 1))
                node.paths.sockets_ready(count, self.now)
            case CloseSockets(keep):
                node.sockets &= keep
            case Replay(path, since):
                for at, packet in list(node.recent):
                    if at >= since:
                        self._send(node, path, packet)

    def _request(self, size: int) -> None:
        if self.a.paused:
            return
        number = next(self._numbers)
        self.asked_at[number] = self.now
        self._data(self.a, Packet("request", size, number=number))

    def _data(self, node: Node, packet: Packet) -> None:
        node.recent.append((self.now, packet))
        while node.recent[0][0] < self.now - 2.0:
            node.recent.popleft()
        decision = node.paths.decision
        for path in (decision.primary, decision.duplicate):
            if path is not None:
                size = min(packet.size, node.paths.size(path))  # cut in segments
                node.paths.sent(path, size, self.now)
                node.by_path[str(path)] += 1
                self._send(node, path, replace(packet, size=size))

    def _send(self, node: Node, path: PathId, packet: Packet) -> None:
        other = self.b if node is self.a else self.a
        if path.relay:
            link = self.relay_links[path.relay]
            if path.relay in node.relays and link.up and self.random.random() >= link.loss:
                if path.relay in other.relays:
                    self.at(self._delay(link), lambda: self._arrive(other, path, packet))
                else:
                    self.at(link.delay, lambda: node.paths.relay_gone(path.relay, self.now))
            return
        if path.socket and path.socket not in node.sockets:
            return
        inside = node.inside(path.socket)
        if node.lan and node.lan == other.lan and path.address == other.inside(0):
            self.at(self.lan_delay, lambda: self._arrive(other, PathId(inside), packet))
            return
        if node.nat is not None and node.nat.kind is NatKind.BLOCKED:
            return
        source = inside if node.nat is None else node.nat.out(inside, path.address)
        port = source[1] if node is self.a else path.address[1]
        link = self.lanes.get(port) or self.link(node, other)
        if not link.up or packet.size + 28 > link.mtu or self.random.random() < link.loss:
            return
        self.at(self._delay(link), lambda: self._enter(other, source, path.address, packet))

    def _enter(self, node: Node, source: Address, to: Address, packet: Packet) -> None:
        inside: Address | None = to
        if node.nat is not None:
            inside = node.nat.back(to[1], source) if to[0] == node.nat.host else None
        if inside is None or inside[0] != node.host:
            return
        socket = inside[1] - node.port
        if socket == 0 or socket in node.sockets:
            self._arrive(node, PathId(source, socket=socket), packet)

    def _arrive(self, node: Node, path: PathId, packet: Packet) -> None:
        if node.paused:
            node.waiting.append((path, packet))
            return
        paths, now = node.paths, self.now
        kind = PathKind.RELAY if path.relay else kind_of(path.address)
        assert kind is not None
        node.count["got " + packet.what] += 1
        match packet.what:
            case "ping":
                self._send(node, path, Packet("pong", 110, packet.tx))
                paths.on_ping(path, kind, now, left=packet.left)
            case "pong":
                paths.on_pong(path, packet.tx, None, now)
            case "call":
                assert packet.call is not None
                paths.on_call(packet.call, path.relay, now)
            case "request" if packet.number not in self._served:  # QUIC does not tell a second copy from a forgery
                self._hear(node, path, kind)
                self._served.add(packet.number)
                self._data(node, Packet("answer", packet.size, number=packet.number))
            case "answer" if packet.number not in self.answered:
                self._hear(node, path, kind)
                self.answered[packet.number] = now - self.asked_at[packet.number]

    def _hear(self, node: Node, path: PathId, kind: PathKind) -> None:
        if any(view.path == path for view in node.paths.views(self.now)):
            node.paths.heard(path, self.now)
        else:
            node.paths.hint(path, kind, self.now)

    def _delay(self, link: Link) -> float:
        return link.delay * (1 + link.jitter * self.random.uniform(-1, 1))


def public(name: str, host: str) -> Node:
    return Node(name, host)


def behind(name: str, kind: NatKind, host: str, *, step: int = 0, filters: str = "port", lan: str = "") -> Node:
    """A node behind its own NAT with this outside address."""
    nat = Nat(kind, host, seed=int.from_bytes(name.encode(), "big"), step=step, filters=filters)
    return Node(name, f"192.168.{len(lan) + 1}.{ord(name[0])}", nat, lan)
