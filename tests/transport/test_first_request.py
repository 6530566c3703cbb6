"""A first request that travels with the proof: who sees it, who never does, and that nobody sees it twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from tests.transport.conftest import Bind
from tests.transport.test_endpoint import HIGH, LOW, connect
from transport import errors
from transport.connection import Connection, State
from transport.endpoint import Endpoint
from transport.identity import Identity, PeerId
from transport.proto.control_frames import Authenticate, CloseCode
from transport.proto.early import EARLY_BYTES, EARLY_STREAMS
from transport.stream import Buffer, Stream

REQUEST = b"what is it?"


async def until(there: Callable[[], bool]) -> None:
    """Wait for something of which nobody tells."""
    async with asyncio.timeout(5):
        while True:
            if there():
                return
            await asyncio.sleep(0.005)


class Server:
    """Carries out what comes on any stream of an endpoint, and keeps it; the answer is the request."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.carried_out: list[bytes] = []
        self.connections: list[Connection] = []
        self._endpoint = endpoint
        self._tasks = [asyncio.create_task(self._serve())]

    async def _serve(self) -> None:
        with contextlib.suppress(errors.TransportError):
            while True:
                connection = await self._endpoint.accept()
                self.connections.append(connection)
                self._tasks.append(asyncio.create_task(self.serve(connection)))

    async def serve(self, connection: Connection) -> None:
        with contextlib.suppress(errors.TransportError):
            while True:
                self._tasks.append(asyncio.create_task(self._answer(await connection.accept_stream())))

    async def _answer(self, stream: Stream) -> None:
        with contextlib.suppress(errors.TransportError):
            request = await stream.readexactly(len(REQUEST))
            self.carried_out.append(request)
            await stream.write(request)


async def ask(client: Endpoint, server: Endpoint) -> tuple[Connection, bool, bytes]:
    """Dial with REQUEST, send it when it was not sent, and return the answer; and whether it went with the dial."""
    async with asyncio.timeout(10):
        connection, stream = await client.dial_with(server.peer_id, [server.address], first=REQUEST)
        early = stream is not None
        if stream is None:
            stream = await connection.open_stream()
            await stream.write(REQUEST)
        return connection, early, await stream.readexactly(len(REQUEST))


async def test_it_is_answered_on_the_stream_that_the_dial_returns(bind: Bind, engines: tuple[str, str]) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])
    served = Server(server)
    connection, early, answer = await ask(client, server)
    assert (early, answer, served.carried_out) == (True, REQUEST, [REQUEST])
    stream = await connection.open_stream()  # and the connection is like any other
    await stream.write(REQUEST)
    assert await stream.readexactly(len(REQUEST)) == REQUEST
    again, early, _ = await ask(client, server)
    assert (again, early) == (connection, False)
    assert served.carried_out == [REQUEST] * 3
    assert server.quic_counters.early_dropped == server.quic_counters.early_excess == 0


async def test_it_comes_without_a_round_trip_after_the_proof(bind: Bind, engines: tuple[str, str]) -> None:
    """The server falls silent as it reads the proof, and its application has the request all the same."""
    client = await bind(engines[0])

    def mute(_: PeerId) -> bool:
        server.socket.send = lambda *_: None  # type: ignore[method-assign]
        return True

    server = await bind(engines[1], admit=mute)
    served = Server(server)
    dialling = asyncio.ensure_future(ask(client, server))
    await until(lambda: served.carried_out == [REQUEST])
    assert not dialling.done()
    assert client.connections() == []
    dialling.cancel()


@pytest.mark.parametrize("first", ["proof", "request"])
async def test_a_refused_peers_request_reaches_nobody(
    bind: Bind, engines: tuple[str, str], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if first == "request":
        overtake(monkeypatch)
    client, server = await bind(engines[0]), await bind(engines[1], admit=lambda _: False)
    served = Server(server)
    with pytest.raises(errors.NotAdmitted, match="not admitted"):
        await ask(client, server)
    assert served.connections == []
    assert served.carried_out == []
    assert server.quic_counters.early_dropped == (first == "request")  # behind the verdict, it was not even read
    assert client.connections() == server.connections() == []


def overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every client send its proof a moment after what goes with it, as a network may deliver them."""
    original, send_early = Connection.prove, Connection.send_early
    late: list[Callable[[], None]] = []

    def prove(self: Connection, *arguments: object) -> None:
        engine = self.link.engine
        send = engine.send

        def hold(stream_id: int, data: Buffer, end: bool = False) -> None:
            def deliver() -> None:
                send(stream_id, data, end)
                self._mark()

            late.append(deliver)

        engine.send = hold  # type: ignore[method-assign]
        original(self, *arguments)  # type: ignore[arg-type]
        engine.send = send  # type: ignore[method-assign]

    def early(self: Connection, data: bytes) -> Stream | None:
        stream = send_early(self, data)
        asyncio.get_running_loop().call_later(0.05, late.pop())
        return stream

    monkeypatch.setattr(Connection, "prove", prove)
    monkeypatch.setattr(Connection, "send_early", early)


async def test_it_is_held_when_it_overtakes_the_proof(
    bind: Bind, engines: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overtake(monkeypatch)
    client = await bind(engines[0])
    held: list[int] = []

    def admit(_: PeerId) -> bool:
        held.extend(connection._early.size for connection in server._table.all)
        assert served.carried_out == []
        return True

    server = await bind(engines[1], admit=admit)
    served = Server(server)
    _, early, answer = await ask(client, server)
    assert (early, answer, served.carried_out, held) == (True, REQUEST, [REQUEST], [len(REQUEST)])


@pytest.mark.parametrize("kind", ["bytes", "streams"])
async def test_too_much_before_the_proof_ends_the_connection(
    bind: Bind, engines: tuple[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])

    def prove(self: Connection, *_: object) -> None:
        engine = self.link.engine
        self.state = State.PROVING
        engine.open_stream()
        if kind == "bytes":
            engine.send(engine.open_stream(), bytes(EARLY_BYTES + 1))
        else:
            for _number in range(EARLY_STREAMS + 1):
                engine.send(engine.open_stream(), b"x")

    ended: list[errors.TransportError] = []
    original = server.connection_ended

    def remember(connection: Connection, error: errors.TransportError) -> None:
        ended.append(error)
        assert sum(stream.buffered for stream in connection._streams._streams.values()) == 0
        original(connection, error)

    monkeypatch.setattr(server, "connection_ended", remember)
    monkeypatch.setattr(Connection, "prove", prove)
    served = Server(server)
    with pytest.raises(errors.ConnectionClosed, match="before it was let in") as caught:
        await client.dial(server.peer_id, [server.address])
    assert caught.value.code == CloseCode.PROTOCOL_VIOLATION
    (error,) = ended
    assert isinstance(error, errors.TooMuchEarly)
    assert (server.quic_counters.early_excess, server.quic_counters.early_dropped) == (1, 0)
    assert served.connections == []


async def test_what_does_not_fit_is_refused_here(bind: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = await bind(), await bind()
    with pytest.raises(errors.LocalFault, match="at most 16384"):
        await client.dial_with(server.peer_id, [server.address], first=bytes(EARLY_BYTES + 1))
    served = Server(server)
    results = await asyncio.gather(*(ask(client, server) for _ in range(EARLY_STREAMS + 2)))
    assert [early for _, early, _ in results] == [True] * EARLY_STREAMS + [False] * 2
    assert {answer for _, _, answer in results} == {REQUEST}
    assert len({connection for connection, _, _ in results}) == 1
    assert served.carried_out == [REQUEST] * len(results)


async def test_the_largest_goes_in_one_piece_and_more_follows_after_the_acceptance(
    bind: Bind, engines: tuple[str, str]
) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])
    async with asyncio.timeout(10):
        _, stream = await client.dial_with(server.peer_id, [server.address], first=bytes(EARLY_BYTES))
        theirs = await (await server.accept()).accept_stream()
        assert stream is not None
        await stream.write(bytes(1 << 20))
        await stream.finish()
        assert len(await theirs.readexactly(EARLY_BYTES + (1 << 20))) == EARLY_BYTES + (1 << 20)
        assert await theirs.read(1) == b""


async def test_nothing_is_sent_to_another_peer_than_the_one_that_was_dialled(
    bind: Bind, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(Connection, "send_early", lambda _, data: sent.append(data))
    client, stranger = await bind(), await bind()
    with pytest.raises(errors.WrongPeer):
        await client.dial_with(Identity.generate().peer_id, [stranger.address], first=REQUEST)
    assert sent == []


@pytest.mark.parametrize("attempt", range(6))
async def test_dials_from_both_sides_carry_each_request_out_once(
    bind: Bind, engines: tuple[str, str], attempt: int
) -> None:
    """One of two connections stays; what came on the other one is dropped unseen, and sent again by its caller."""
    low, high = await bind(engines[0], identity=LOW), await bind(engines[1], identity=HIGH)
    served = {low: Server(low), high: Server(high)}

    async def both(one: Endpoint, other: Endpoint) -> tuple[Connection, bool, bytes]:
        async with asyncio.timeout(10):
            connection, stream = await one.dial_with(other.peer_id, [other.address], first=REQUEST)
            if not connection.is_client:
                assert stream is None
            early = stream is not None
            if stream is None:
                stream = await connection.open_stream()
                await stream.write(REQUEST)
            elif connection.is_client:  # the peer asks on the same connection
                served[one]._tasks.append(asyncio.create_task(served[one].serve(connection)))
            return connection, early, await stream.readexactly(len(REQUEST))

    first, second = (low, high) if attempt % 2 else (high, low)
    one = asyncio.ensure_future(both(first, second))
    for _ in range(attempt):  # let one be ahead by a moment
        await asyncio.sleep(0)
    other = asyncio.ensure_future(both(second, first))
    results = await asyncio.gather(one, other)
    assert results[0][0].connection_id == results[1][0].connection_id
    assert served[low].carried_out == served[high].carried_out == [REQUEST]
    assert len(low.connections()) == len(high.connections()) == 1


async def test_a_duplicates_request_is_dropped_and_sent_again_with_the_connection_that_is_let_in(
    bind: Bind, engines: tuple[str, str]
) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])
    gone, kept = await connect(server, client)  # the server dialled; the client loses it without a word
    kept.link.engine.datagrams = lambda now: []  # type: ignore[method-assign]
    await kept.close()
    client._table.previous.clear()  # … and forgets it, so that the server takes the client's dial for one that crossed
    served = Server(server)
    asking = asyncio.ensure_future(ask(client, server))
    refused: list[errors.TransportError] = []
    original = server.connection_ended

    def remember(connection: Connection, error: errors.TransportError) -> None:
        if connection is not gone:
            refused.append(error)
        original(connection, error)

    server.connection_ended = remember  # type: ignore[method-assign]
    await until(lambda: bool(refused))
    assert served.carried_out == []
    await gone.close()
    _, early, answer = await asking
    assert (early, answer, served.carried_out) == (True, REQUEST, [REQUEST])


async def test_where_the_connection_is_lost_it_is_not_sent_again(bind: Bind, engines: tuple[str, str]) -> None:
    """The server carries it out, says so to nobody, and shuts down: a dial without a request would be tried again."""
    client = await bind(engines[0])

    def mute(_: PeerId) -> bool:
        server.socket.send = lambda *_: None  # type: ignore[method-assign]
        return True

    server = await bind(engines[1], admit=mute)
    send = server.socket.send
    served = Server(server)
    asking = asyncio.ensure_future(ask(client, server))
    await until(lambda: bool(served.carried_out))
    server.socket.send = send  # type: ignore[method-assign]
    await served.connections[0].close(0, "shutting down")
    with pytest.raises(errors.ConnectionClosed, match="shutting down"):
        await asking
    assert served.carried_out == [REQUEST]
    assert client._dialer.dials == {}


async def test_who_gives_up_a_shared_dial_takes_the_request_back(bind: Bind, engines: tuple[str, str]) -> None:
    """The stream is aborted before the acceptance came; the connection goes on for the others."""
    low, high = await bind(engines[0], identity=LOW, admit=lambda _: True), await bind(engines[1], identity=HIGH)
    served = Server(low)
    # The smaller side dials somebody who answers nothing, so that it parks what comes from the larger one.
    with contextlib.closing(Silent()) as nobody:
        await nobody.start()
        blind = asyncio.ensure_future(low.dial(HIGH.peer_id, [nobody.address]))
        await asyncio.sleep(0)
        hasty = asyncio.ensure_future(ask(high, low))
        patient = asyncio.ensure_future(ask(high, low))
        await until(lambda: any(connection._early.size == 2 * len(REQUEST) for connection in low._table.all))
        assert served.connections == []
        hasty.cancel()
        _, early, answer = await patient
        assert (early, answer) == (True, REQUEST)
        await blind
        await until(lambda: len(served.connections[0]._streams._streams) == 1)
        assert served.connections[0].close_reason is None


class Silent(asyncio.DatagramProtocol):
    """A UDP socket that hears everything and says nothing."""

    address: tuple[str, int]

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self.address = self._transport.get_extra_info("sockname")

    def close(self) -> None:
        self._transport.close()


async def test_a_parked_request_waits_for_the_verdict(
    bind: Bind, engines: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parked: the proof has verified, and the server has not decided. What comes then is bounded as before."""
    low, high = await bind(engines[0], identity=LOW), await bind(engines[1], identity=HIGH)
    served = Server(low)
    original = Connection.send_early

    def greedy(self: Connection, data: bytes) -> Stream | None:
        stream = original(self, data)
        self.link.engine.send(self.link.engine.open_stream(), bytes(EARLY_BYTES))
        return stream

    monkeypatch.setattr(Connection, "send_early", greedy)
    with contextlib.closing(Silent()) as nobody:
        await nobody.start()
        blind = asyncio.ensure_future(low.dial(HIGH.peer_id, [nobody.address]))
        await asyncio.sleep(0)
        with pytest.raises(errors.ConnectionClosed, match="before it was let in"):
            await ask(high, low)
        blind.cancel()
    assert low.quic_counters.early_excess == 1
    assert served.connections == []


async def test_a_proof_that_does_not_hold_takes_its_request_with_it(
    bind: Bind, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtake(monkeypatch)
    client, server = await bind(), await bind()
    served = Server(server)
    encode = Authenticate.encode
    monkeypatch.setattr(Authenticate, "encode", lambda self: encode(self)[:-64] + bytes(64))
    with pytest.raises(errors.BadSignature):
        await ask(client, server)
    assert (served.carried_out, server.quic_counters.early_dropped) == ([], 1)
