"""Two engines on a simulated wire with virtual time: delay, rate, a queue, outages, and a change of path under them.

No socket and no clock: everything here happens in a few milliseconds of real time and always the same way. For
test_engine_paths.py, and for measuring what an engine does with a path.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.transport.engines import CLIENT, SERVER, Events
from transport.config import TransportConfig
from transport.quic_engine import INITIAL_WINDOW, QuicEngine, create_factory


@dataclass
class Path:
    """One way from end to end and back. Seconds, bytes per second, bytes; every `lose`th datagram of a side is lost,
    and those for which `chance` says so."""

    delay: float = 0.025
    rate: float = 12.5e6
    queue: int = 1_000_000
    up: bool = True
    lose: int = 0
    chance: Callable[[], bool] = lambda: False
    dropped: int = 0
    busy: dict[int, float] = field(default_factory=dict)
    count: list[int] = field(default_factory=lambda: [0, 0])

    def arrival(self, side: int, size: int, now: float) -> float | None:
        """When a datagram sent now by this side is there; None when it is lost."""
        start = max(now, self.busy.get(side, 0.0))
        self.count[side] += 1
        lost = (self.lose and self.count[side] % self.lose == 0) or self.chance()
        if lost or not self.up or (start - now) * self.rate > self.queue:
            self.dropped += 1
            return None
        self.busy[side] = start + size / self.rate
        return self.busy[side] + self.delay


class Recorder(Events):
    """Also knows when the bytes came."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire
        self.times: list[tuple[float, int]] = []
        self.received = 0

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        self.received += len(data)
        self.times.append((self.wire.now, self.received))
        if end:
            self.ended.add(stream_id)


class Wire:
    """A client (side 0) and a server (side 1), connected over `path`, which may be exchanged at any time."""

    def __init__(
        self,
        client: str,
        server: str,
        path: Path | None = None,
        *,
        size: int = 1452,
        window: int = INITIAL_WINDOW,
        connect: bool = True,
        **settings: Any,
    ) -> None:
        self.now = 1000.0
        self.path = path or Path()
        self.settings = settings
        self.size, self.window, self.server_name = size, window, server
        engine = create_factory(CLIENT, TransportConfig(engine=client, **settings)).client(size, window)
        self.engines: list[QuicEngine | None] = [engine, None]
        self.sinks = [Recorder(self), Recorder(self)]
        self.sent = [0, 0]
        self._heap: list[tuple[float, int, int, bytes]] = []
        self._sequence = 0
        engine.connect(self.now)
        self.transmit(0)
        if connect:
            self.run(until=lambda: self.sinks[0].done and self.sinks[1].done)
            self.run(0.2)

    @property
    def client(self) -> QuicEngine:
        """The dialling engine."""
        engine = self.engines[0]
        assert engine is not None
        return engine

    @property
    def server(self) -> QuicEngine:
        """The answering engine."""
        engine = self.engines[1]
        assert engine is not None
        return engine

    def transmit(self, side: int) -> None:
        """Put on the wire what an engine has to say now."""
        engine = self.engines[side]
        if engine is None:
            return
        while True:
            for data in engine.datagrams(self.now):
                self.sent[side] += 1
                at = self.path.arrival(side, len(data), self.now)
                if at is not None:
                    self._sequence += 1
                    heapq.heappush(self._heap, (at, self._sequence, 1 - side, data))
            if not engine.more:
                return

    def run(self, seconds: float = 60.0, until: Callable[[], bool] | None = None) -> float:
        """Let time pass until something holds, at most this long; how long it took. The time is `self.now` after."""
        start, end = self.now, self.now + seconds
        steps = 0
        while until is None or not until():
            steps += 1
            assert steps < 500_000, "the engines spin"
            dues = [engine.timer() if engine is not None else None for engine in self.engines]
            times = [due for due in dues if due is not None]
            if self._heap:
                times.append(self._heap[0][0])
            soonest = min(times, default=end)
            if soonest >= end:
                self.now = end
                break
            self.now = max(self.now, soonest)
            touched = set()
            while self._heap and self._heap[0][0] <= self.now:
                _, _, side, data = heapq.heappop(self._heap)
                self._deliver(side, data)
                touched.add(side)
            for side, due in enumerate(dues):
                engine = self.engines[side]
                if engine is not None and due is not None and due <= self.now and side not in touched:
                    engine.handle_timer(self.now)
                    engine.dispatch(self.sinks[side])
                    touched.add(side)
            for side in touched:
                self.transmit(side)
        return self.now - start

    def _deliver(self, side: int, data: bytes) -> None:
        engine = self.engines[side]
        if engine is None:
            factory = create_factory(SERVER, TransportConfig(engine=self.server_name, **self.settings))
            engine = self.engines[side] = factory.server(data[6 : 6 + data[5]], self.size, self.window)
        engine.receive(data, self.now)
        engine.dispatch(self.sinks[side])

    def wake(self) -> None:
        """What a node does on both ends when a path is new or back."""
        for side, engine in enumerate(self.engines):
            if engine is not None:
                engine.wake(self.now)
                self.transmit(side)

    def change(self, path: Path, *, told: bool = True) -> None:
        """Both ends take another path now; `told`: the engines know."""
        self.path = path
        for engine in self.engines:
            if engine is not None and told:
                engine.switch(self.now, 2 * path.delay)

    def drop_half(self) -> None:
        """Lose every other datagram that is under way."""
        self._heap = self._heap[::2]
        heapq.heapify(self._heap)

    def idle(self, seconds: float) -> None:
        """Nothing but keep-alive pings of the client, every three seconds."""
        end = self.now + seconds
        while self.now < end:
            self.run(min(3.0, end - self.now))
            self.client.ping()
            self.transmit(0)
        self.run(0.5)

    def send(self, side: int, stream: int, size: int, *, end: bool = False) -> None:
        """Write `size` bytes on a stream and transmit."""
        engine = self.engines[side]
        assert engine is not None
        engine.send(stream, bytes(size), end)
        self.transmit(side)

    def transfer(self, side: int, stream: int, size: int, seconds: float = 60.0) -> float:
        """Write `size` bytes and wait until the other side has them; seconds."""
        sink = self.sinks[1 - side]
        target = sink.received + size
        self.send(side, stream, size)
        return self.run(seconds, until=lambda: sink.received >= target)
