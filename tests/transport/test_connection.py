"""Authentication, credits against hostile peers, close and liveness of one connection."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.transport.conftest import Bind
from tests.transport.test_endpoint import connect
from transport import connection as connection_module
from transport import errors
from transport.connection import Connection
from transport.identity import Identity
from transport.proto.control_frames import Accept, Authenticate, CloseCode, ConnectionCredit, Reset
from transport.quic_driver import MAX_STRANGER_DATAGRAMS


def tamper(monkeypatch: pytest.MonkeyPatch, change: dict[str, object]) -> None:
    """Have every client alter its signed proof."""
    original = Authenticate.encode

    def encode(proof: Authenticate) -> bytes:
        return original(replace(proof, **change))  # type: ignore[arg-type]

    monkeypatch.setattr(Authenticate, "encode", encode)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"signature": b"\x00" * 64}, errors.BadSignature),
        ({"client": Identity.generate(b"m" * 32).peer_id.raw}, errors.BadSignature),
        ({"server": Identity.generate(b"n" * 32).peer_id.raw}, errors.BadSignature),
        ({"lane": "bulk"}, errors.BadSignature),
        ({"boot_id": b"z" * 16}, errors.BadSignature),
        ({"version": 2}, errors.VersionMismatch),
        ({"lane": ""}, errors.BadSignature),
    ],
    ids=["signature", "client", "server", "lane", "boot", "version", "no-lane"],
)
async def test_a_proof_that_does_not_hold_is_refused_with_its_reason(
    bind: Bind, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], error: type[errors.Refused]
) -> None:
    client, server = await bind(), await bind()
    tamper(monkeypatch, change)
    with pytest.raises(error):
        await client.dial(server.peer_id, [server.address])
    assert server.connections() == []


async def test_a_proof_of_another_connection_does_not_hold(
    bind: Bind, engines: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])
    original = Connection.prove

    def prove(self: Connection, *arguments: object) -> None:
        self._binding = b"\x07" * 32
        original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "prove", prove)
    with pytest.raises(errors.BadSignature):
        await client.dial(server.peer_id, [server.address])


async def test_nothing_passes_before_authentication(
    bind: Bind, engines: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])

    def prove(self: Connection, *_: object) -> None:
        engine = self.link.engine
        engine.open_stream()
        engine.send(engine.open_stream(), b"let me in")
        self.state = connection_module.State.PROVING

    monkeypatch.setattr(Connection, "prove", prove)
    ended = asyncio.Event()
    monkeypatch.setattr(server, "connection_ended", lambda *_: ended.set())
    with pytest.raises(errors.Unreachable):
        await client.dial(server.peer_id, [server.address], timeout=0.3)
    assert server.connections() == []
    async with asyncio.timeout(5):
        await ended.wait()
    assert server.quic_counters.early_dropped == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await server.accept()


@pytest.mark.parametrize("engine", ["qh3", "aioquic"])
async def test_bytes_behind_a_hole_are_bounded_before_authentication(
    bind: Bind, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither library reports stream data while its first byte is missing; both would buffer megabytes of it."""
    client, server = await bind("aioquic"), await bind(engine)

    def prove(self: Connection, *_: object) -> None:
        library: Any = self.link.engine
        self.state = connection_module.State.PROVING
        library.send(library.open_stream(), bytes(4 << 20))
        library._quic._streams[0].sender._pending.subtract(0, 1)
        self._mark()

    ended: list[tuple[Connection, errors.TransportError]] = []
    original = server.connection_ended

    def remember(connection: Connection, error: errors.TransportError) -> None:
        ended.append((connection, error))
        original(connection, error)

    monkeypatch.setattr(server, "connection_ended", remember)
    monkeypatch.setattr(Connection, "prove", prove)
    with pytest.raises(errors.ConnectionClosed) as caught:
        await client.dial(server.peer_id, [server.address])
    assert caught.value.code == CloseCode.PROTOCOL_VIOLATION
    [(theirs, error)] = ended
    assert isinstance(error, errors.ProtocolViolation)
    assert "before it was authenticated" in str(error)
    most = MAX_STRANGER_DATAGRAMS * theirs.link.engine.datagram_size
    assert most < theirs.link.bytes_in <= most + 65_536  # what the kernel joined into the last read


@pytest.mark.parametrize(
    "first",
    [ConnectionCredit(1).encode(), Accept(1, bytes(16), 1, 1).encode(), b"\x01\xff\xff", b"\x01\x00\x01\x01"],
    ids=["credit", "accept", "length", "short"],
)
async def test_a_first_frame_that_is_no_proof_ends_the_connection(
    bind: Bind, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    client, server = await bind(), await bind()
    monkeypatch.setattr(Authenticate, "encode", lambda _: first)
    with pytest.raises(errors.TransportError, match="code 16391"):  # PROTOCOL_VIOLATION
        await client.dial(server.peer_id, [server.address], timeout=1.0)
    assert server.connections() == []


async def test_who_never_proves_itself_is_cut_off_and_their_number_is_bounded(
    bind: Bind, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await bind(handshake_timeout=0.3, max_pending=2)
    original = Connection.prove
    monkeypatch.setattr(Connection, "prove", lambda *_: None)
    silent = [await bind() for _ in range(3)]
    dials = [asyncio.ensure_future(node.dial(server.peer_id, [server.address], timeout=0.25)) for node in silent]
    outcomes = await asyncio.gather(*dials, return_exceptions=True)
    assert all(isinstance(outcome, errors.Unreachable) for outcome in outcomes)
    assert len(server._acceptor.deadlines) <= 2
    monkeypatch.setattr(Connection, "prove", original)
    ours, _ = await connect(await bind(), server)  # there is room again once the silent ones are gone
    assert ours.close_reason is None


@pytest.mark.parametrize("closer", ["client", "server"])
async def test_a_close_delivers_code_and_reason(bind: Bind, engines: tuple[str, str], closer: str) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])
    ours, theirs = await connect(client, server)
    left, right = (ours, theirs) if closer == "client" else (theirs, ours)
    stream = await right.open_stream()
    reading = asyncio.ensure_future(stream.read(1))
    accepting = asyncio.ensure_future(right.accept_stream())
    await asyncio.sleep(0)
    await left.close(42, "enough")
    async with asyncio.timeout(5):
        reason = await right.wait_closed()
    assert isinstance(reason, errors.ConnectionClosed)
    assert (reason.code, reason.reason, reason.by) == (42, "enough", "peer")
    for task in (reading, accepting):
        with pytest.raises(errors.ConnectionClosed):
            await task
    with pytest.raises(errors.ConnectionClosed):
        await left.open_stream()
    with pytest.raises(errors.ConnectionClosed):
        await stream.write(b"x")
    assert isinstance(left.close_reason, errors.ConnectionClosed)
    assert left.close_reason.by == "local"
    await left.close()


async def test_close_codes_are_bounded_and_long_reasons_cut(bind: Bind) -> None:
    ours, theirs = await connect(await bind(), await bind())
    with pytest.raises(errors.LocalFault, match="0 to 16383"):
        await ours.close(0x4000)
    await ours.close(1, "ü" * 5000)
    reason = await theirs.wait_closed()
    assert isinstance(reason, errors.ConnectionClosed)
    assert reason.reason == "ü" * 128


async def test_a_reason_cannot_control_the_terminal_it_is_shown_on(bind: Bind, engines: tuple[str, str]) -> None:
    ours, theirs = await connect(await bind(engines[0]), await bind(engines[1]))
    await ours.close(1, "\x1b[2J\nall is well")
    async with asyncio.timeout(5):
        reason = await theirs.wait_closed()
    assert str(reason).isprintable()
    assert "all is well" in str(reason)


async def test_a_close_that_was_lost_is_said_again(bind: Bind) -> None:
    client, server = await bind(keep_alive=0.1, idle_timeout=5.0), await bind()
    ours, theirs = await connect(client, server)
    send = server.socket.send
    server.socket.send = lambda *_: None  # type: ignore[method-assign]
    await theirs.close(9, "did you hear")
    server.socket.send = send  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        reason = await ours.wait_closed()  # the client's keep-alive asks, the server repeats its last word
    assert isinstance(reason, errors.ConnectionClosed)
    assert (reason.code, reason.reason) == (9, "did you hear")


async def test_an_idle_connection_is_kept_alive(bind: Bind, engines: tuple[str, str]) -> None:
    settings = {"keep_alive": 0.1, "idle_timeout": 0.4}
    client, server = await bind(engines[0], **settings), await bind(engines[1], **settings)
    ours, theirs = await connect(client, server)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await asyncio.wait([ours.closed, theirs.closed], return_when=asyncio.FIRST_COMPLETED)
    assert ours.close_reason is None


async def test_a_peer_that_vanishes_is_lost_after_the_idle_time_out(bind: Bind, engines: tuple[str, str]) -> None:
    settings = {"keep_alive": 0.1, "idle_timeout": 0.4}
    client, server = await bind(engines[0], **settings), await bind(engines[1], **settings)
    ours, _ = await connect(client, server)
    server.socket.udp.close()
    async with asyncio.timeout(5):
        assert isinstance(await ours.wait_closed(), errors.ConnectionLost)


async def test_a_peer_that_ignores_its_credit_is_disconnected(bind: Bind, engines: tuple[str, str]) -> None:
    window = 64 * 1024
    client = await bind(engines[0])
    server = await bind(engines[1], stream_window=window, connection_window=2 * window)
    ours, theirs = await connect(client, server)
    stream = await ours.open_stream()
    stream.send_credit.limit = ours._streams._send_credit.limit = 1 << 40
    await stream.write(bytes(window + 1))
    async with asyncio.timeout(5):
        reason, said = await theirs.wait_closed(), await ours.wait_closed()
    assert isinstance(reason, errors.CreditExceeded)
    assert (reason.limit, reason.received > window) == (window, True)
    assert isinstance(said, errors.ConnectionClosed)
    assert said.code == CloseCode.CREDIT_EXCEEDED


async def test_the_credit_of_all_streams_together_is_enforced(bind: Bind) -> None:
    window = 64 * 1024
    client, server = await bind(), await bind(stream_window=window, connection_window=window)
    ours, theirs = await connect(client, server)
    ours._streams._send_credit.limit = 1 << 40
    for _ in range(2):
        await (await ours.open_stream()).write(bytes(40 * 1024))
    async with asyncio.timeout(5):
        reason = await theirs.wait_closed()
    assert isinstance(reason, errors.CreditExceeded)
    assert reason.what == "all streams"


@pytest.mark.parametrize(
    "bytes_on_control",
    [
        b"\x03\x00\x01\x00",
        Reset(4, 0, 1 << 60).encode(),
        Accept(1, bytes(16), 0, 0).encode(),
        b"".join(Reset(stream * 4 + 400, 0, 0).encode() for stream in range(1100)),
    ],
    ids=["short", "huge-reset", "second-accept", "reset-flood"],
)
async def test_control_frames_that_break_the_rules_end_the_connection(bind: Bind, bytes_on_control: bytes) -> None:
    ours, theirs = await connect(await bind(), await bind())
    ours.link.engine.send(0, bytes_on_control)
    ours._mark()
    async with asyncio.timeout(5):
        reason = await theirs.wait_closed()
    assert isinstance(reason, errors.ProtocolViolation)
    assert isinstance(reason, errors.PeerFault)
    assert "\n" not in str(reason)


async def test_the_control_stream_must_not_end(bind: Bind) -> None:
    ours, theirs = await connect(await bind(), await bind())
    ours.link.engine.send(0, b"", True)
    ours._mark()
    async with asyncio.timeout(5):
        assert isinstance(await theirs.wait_closed(), errors.ProtocolViolation)


async def test_a_library_that_fails_ends_its_connection_only(bind: Bind) -> None:
    client, server = await bind(), await bind()
    ours, _ = await connect(client, server)
    bulk, _ = await connect(client, server, "bulk")

    def broken(now: float) -> list[bytes]:
        raise RuntimeError("a bug")

    ours.link.engine.datagrams = broken  # type: ignore[method-assign]
    ours._mark()
    async with asyncio.timeout(5):
        assert isinstance(await ours.wait_closed(), errors.EngineFault)
    assert bulk.close_reason is None
    assert client.connections() == [bulk]
