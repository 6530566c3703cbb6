"""Two engines in memory for the engine tests: no socket, time is an argument."""

from __future__ import annotations

from typing import Any

from transport.config import TransportConfig
from transport.identity import Identity
from transport.quic_engine import Termination, create_factory

CLIENT, SERVER = Identity.generate(b"c" * 32), Identity.generate(b"s" * 32)


class Events:
    """Records everything an engine reports."""

    def __init__(self) -> None:
        self.done = False
        self.data: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.resets: list[tuple[int, int]] = []
        self.stops: list[tuple[int, int]] = []
        self.cids: set[bytes] = set()
        self.end: Termination | None = None

    def handshake_completed(self) -> None:
        self.done = True

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        self.data[stream_id] = self.data.get(stream_id, b"") + data
        if end:
            self.ended.add(stream_id)

    def stream_reset(self, stream_id: int, code: int) -> None:
        self.resets.append((stream_id, code))

    def stop_sending(self, stream_id: int, code: int) -> None:
        self.stops.append((stream_id, code))

    def cid_issued(self, cid: bytes) -> None:
        self.cids.add(cid)

    def cid_retired(self, cid: bytes) -> None:
        self.cids.discard(cid)

    def terminated(self, end: Termination) -> None:
        self.end = end


class Pair:
    """A client and a server engine on a perfect link without delay."""

    def __init__(self, client: str, server: str, size: int = 1280, **settings: Any) -> None:
        self.now = 100.0
        self.client = create_factory(CLIENT, TransportConfig(engine=client, **settings)).client(size)
        self.client.connect(self.now)
        first = self.client.datagrams(self.now)
        original = first[0][6 : 6 + first[0][5]]
        self.server = create_factory(SERVER, TransportConfig(engine=server, **settings)).server(original, size)
        self.at_client, self.at_server = Events(), Events()
        for datagram in first:
            self.server.receive(datagram, self.now)
        self.run()

    def run(self) -> None:
        """Exchange datagrams until both are quiet, letting 2 ms pass in every round."""
        for _ in range(400):
            self.now += 0.002
            moved = 0
            for source, target in ((self.client, self.server), (self.server, self.client)):
                due = source.timer()
                if due is not None and due <= self.now:
                    source.handle_timer(self.now)
                datagrams = source.datagrams(self.now)
                moved += len(datagrams)
                for datagram in datagrams:
                    target.receive(datagram, self.now)
            self.client.dispatch(self.at_client)
            self.server.dispatch(self.at_server)
            soon = [due for due in (self.client.timer(), self.server.timer()) if due and due < self.now + 0.05]
            if not moved and not soon:
                return
        raise AssertionError("the engines never became quiet")
