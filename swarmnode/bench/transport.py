"""`bench transport`: what a request costs and how much fits through, over loopback between two processes.

Measures our endpoint on both QUIC engines beside plain TLS 1.3 over TCP and aioquic.asyncio as it comes, all in one
run, so that the ratios hold on a busy machine. Not a test: nothing here asserts a time. Called by the command line,
or alone: `python -m swarmnode.bench.transport [--quick] [--json]`.

A case is a request and an answer of the same size, one after the other on one open stream, or `bulk`: one way, timed
until the receiver has answered. The server of every transport is a process of its own; the client is this one. A
session starts with a header: mode "R" (requests) or "B" (bulk), size u64; a server answers bulk with one byte.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from transport.config import TransportConfig
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.identity import Identity, PeerId
from transport.stream import Stream

HOST = "127.0.0.1"
HEADER = struct.Struct(">cQ")
CHUNK = 256 * 1024
REQUEST_SIZES = {"256B": 256, "12KB": 12 * 1024, "100KB": 100 * 1024}
MB = 1_000_000
ENGINE_NAMES = {"qh3": "quic-direct", "aioquic": "quic-direct-aioquic"}
NETWORK = "-1280"  # the same endpoint with the datagrams of a network path instead of loopback's
STOCK, TLS = "aioquic-stock", "tcp-tls"
# Enough requests that the 99th percentile is not one request, and enough bulk for a second or so per transport.
REQUESTS = {"256B": 2000, "12KB": 1500, "100KB": 300}
BULK_BYTES = {"quic-direct": 200 * MB, "quic-direct-aioquic": 40 * MB, STOCK: 8 * MB, TLS: 200 * MB}
SLOW_DIVISOR = 5  # aioquic.asyncio takes ten times as long per request
WARM_UP = 50
START_SECONDS = 30.0

Row = dict[str, Any]  # JSON: strings, numbers and null


class Session(Protocol):
    """One open stream of one transport, as the client drives it."""

    async def ask(self, request: bytes, size: int) -> None:
        """Send a request and wait for an answer of `size` bytes."""

    async def push(self, data: bytes) -> None:
        """Send with back-pressure."""

    async def answer(self) -> None:
        """Wait for one byte."""


def run(quick: bool = False, engines: Sequence[str] = ("qh3", "aioquic")) -> dict[str, Any]:
    """Measure everything; `{machine, rows: [{transport, case, p50_ms, p99_ms, MBps, n, note}]}`. Blocks for a while.

    `engines`: which QUIC engines of ours to measure. `quick` divides all amounts by twenty.
    """
    ours = [ENGINE_NAMES[engine] for engine in engines]
    cases = [(case, name) for case in [*REQUEST_SIZES, "bulk"] for name in [*ours, TLS, STOCK]]
    cases += [(case, name + NETWORK) for case in ("12KB", "bulk") for name in ours]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-transport-") as folder:
        identity = _write_certificate(Path(folder))
        with contextlib.ExitStack() as servers:
            names = dict.fromkeys(name for _, name in cases)
            ports = {name: servers.enter_context(_server(name, folder)) for name in names}
            for case, name in cases:
                rows.append(asyncio.run(_measure(name, ports[name], identity.peer_id, case, quick)))
    return {"machine": _machine(), "rows": rows}


async def _measure(name: str, port: int, peer: PeerId, case: str, quick: bool) -> Row:
    if case == "bulk":
        size = BULK_BYTES[name.removesuffix(NETWORK)] // (20 if quick else 1)
        async with _connect(name, port, peer, HEADER.pack(b"B", size)) as session:
            seconds = await _push_all(session, size)
        return _row(name, case, [seconds], size / seconds / MB, f"{size // MB} MB one way")
    size = REQUEST_SIZES[case]
    count = max(20, REQUESTS[case] // (SLOW_DIVISOR if name == STOCK else 1) // (20 if quick else 1))
    async with _connect(name, port, peer, HEADER.pack(b"R", size)) as session:
        times = await _ask_often(session, size, count)
    return _row(name, case, times, None, f"{size} bytes each way")


async def _ask_often(session: Session, size: int, count: int) -> list[float]:
    request = os.urandom(size)
    times = []
    for number in range(WARM_UP + count):
        start = perf_counter()
        await session.ask(request, size)
        if number >= WARM_UP:
            times.append(perf_counter() - start)
    return times


async def _push_all(session: Session, size: int) -> float:
    chunk = os.urandom(CHUNK)
    start, left = perf_counter(), size
    while left:
        part = chunk if left >= CHUNK else chunk[:left]
        await session.push(part)
        left -= len(part)
    await session.answer()
    return perf_counter() - start


def _row(name: str, case: str, times: list[float], rate: float | None, note: str) -> Row:
    ordered = sorted(times)
    plain = name.removesuffix(NETWORK)
    return {
        "transport": plain,
        "case": case + name[len(plain) :],
        "p50_ms": round(statistics.median(ordered) * 1e3, 3),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3, 3),
        "MBps": None if rate is None else round(rate, 1),
        "n": len(times),
        "note": note,
    }


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


# -- our endpoint


def _config(name: str) -> TransportConfig:
    """What a transport's name says: the engine, and datagrams as on a network where it ends in -1280."""
    plain = name.removesuffix(NETWORK)
    engine = next(engine for engine, label in ENGINE_NAMES.items() if label == plain)
    config = TransportConfig(engine=engine)
    return replace(config, loopback_datagram_size=config.datagram_size) if name != plain else config


class QuicSession:
    """Our stream, on the hot path: answers come by set_receiver, requests go by write_nowait."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._missing = 0
        self._done: asyncio.Future[None] | None = None
        stream.set_receiver(self._received, lambda _: None)

    def _received(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._missing <= 0 and self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def _wait(self, size: int) -> None:
        self._missing += size
        self._done = asyncio.get_running_loop().create_future()
        if self._missing > 0:
            await self._done

    async def ask(self, request: bytes, size: int) -> None:
        """See Session."""
        self._stream.write_nowait(request)
        await self._wait(size)

    async def push(self, data: bytes) -> None:
        """See Session."""
        await self._stream.write(data)

    async def answer(self) -> None:
        """See Session."""
        await self._wait(1)


def _serve_stream(stream: Stream) -> None:
    """Answer on our stream, from the receive path."""
    answer = _Answers(stream.write_nowait)
    stream.set_receiver(answer.received, lambda _: None)


class _Answers:
    """A server's side of a session, whatever carries it."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write
        self._header = b""
        self._got = 0
        self._size = 0
        self._answer = b""

    def received(self, data: bytes) -> None:
        """Bytes from the client."""
        if len(self._header) < HEADER.size:
            missing = HEADER.size - len(self._header)
            self._header, data = self._header + data[:missing], data[missing:]
            if len(self._header) < HEADER.size:
                return
            mode, self._size = HEADER.unpack(self._header)
            self._answer = bytes(self._size) if mode == b"R" else b"\x01"
        self._got += len(data)
        while self._size and self._got >= self._size:
            self._got -= self._size
            self._write(self._answer)


async def _serve_quic(name: str, identity: Identity) -> AsyncIterator[int]:
    async def connection_streams(connection: Connection) -> None:
        while True:
            _serve_stream(await connection.accept_stream())

    async def connections(endpoint: Endpoint, tasks: asyncio.TaskGroup) -> None:
        while True:
            connection = await endpoint.accept()
            tasks.create_task(_until_closed(connection_streams(connection)))

    endpoint = await Endpoint.bind(identity, _config(name), listen=(HOST, 0))
    async with endpoint, asyncio.TaskGroup() as tasks:
        accepting = tasks.create_task(connections(endpoint, tasks))
        yield endpoint.address[1]
        accepting.cancel()
        for connection in endpoint.connections():
            await connection.close()


async def _until_closed(work: Any) -> None:
    with contextlib.suppress(Exception):  # the client has gone
        await work


# -- TLS over TCP, and aioquic.asyncio as it comes: asyncio streams


class StreamsSession:
    """asyncio's StreamReader and StreamWriter."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, request: bytes, size: int) -> None:
        """See Session."""
        self._writer.write(request)
        await self._reader.readexactly(size)

    async def push(self, data: bytes) -> None:
        """See Session."""
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> None:
        """See Session."""
        await self._reader.readexactly(1)


async def _serve_streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    answer = _Answers(writer.write)
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            answer.received(data)
            await writer.drain()
    writer.close()


async def _serve_tls(folder: str) -> AsyncIterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(f"{folder}/cert.pem", f"{folder}/key.pem")
    server = await asyncio.start_server(_serve_streams, HOST, 0, ssl=context, limit=4 * CHUNK)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def _serve_stock(folder: str) -> AsyncIterator[int]:
    from aioquic.asyncio import serve  # noqa: PLC0415 - only this server needs it
    from aioquic.quic.configuration import QuicConfiguration  # noqa: PLC0415

    configuration = QuicConfiguration(is_client=False, alpn_protocols=["bench"])
    configuration.load_cert_chain(f"{folder}/cert.pem", f"{folder}/key.pem")
    tasks: set[asyncio.Future[None]] = set()

    def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(_serve_streams(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await serve(HOST, 0, configuration=configuration, stream_handler=handle)
    yield server._transport.get_extra_info("sockname")[1]
    server.close()


# -- client side


@contextlib.asynccontextmanager
async def _connect(name: str, port: int, peer: PeerId, header: bytes) -> AsyncIterator[Session]:
    session: Session
    if name == TLS:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context, limit=4 * CHUNK)
        session = StreamsSession(reader, writer)
        await session.push(header)
        yield session
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
    elif name == STOCK:
        from aioquic.asyncio import connect  # noqa: PLC0415
        from aioquic.quic.configuration import QuicConfiguration  # noqa: PLC0415

        configuration = QuicConfiguration(alpn_protocols=["bench"], verify_mode=ssl.CERT_NONE)
        async with connect(HOST, port, configuration=configuration) as client:
            session = StreamsSession(*await client.create_stream())
            await session.push(header)
            yield session
    else:
        async with await Endpoint.bind(Identity.generate(), _config(name), listen=(HOST, 0)) as endpoint:
            connection = await endpoint.dial(peer, [(HOST, port)])
            session = QuicSession(await connection.open_stream())
            await session.push(header)
            yield session


# -- processes


def _write_certificate(folder: Path) -> Identity:
    """One identity for all servers of a run: key and certificate as files, which ssl wants."""
    identity = Identity.load_or_create(folder / "key.pem")
    (folder / "cert.pem").write_bytes(identity.certificate_pem)
    return identity


@contextlib.contextmanager
def _server(name: str, folder: str) -> Iterator[int]:
    """A server process; yields its port, ends it afterwards."""
    command = [sys.executable, "-m", "swarmnode.bench.transport", "--serve", name, "--folder", folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.strip().isdecimal():
                raise RuntimeError(f"the {name} server did not start; run it alone to see why: {' '.join(command)}")
            yield int(line)
        finally:
            process.stdin.close()  # it ends with its standard input
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


async def _serve(name: str, folder: str) -> None:
    """A server process: print the port, serve until standard input ends."""
    if name == TLS:
        serving = _serve_tls(folder)
    elif name == STOCK:
        serving = _serve_stock(folder)
    else:
        serving = _serve_quic(name, Identity.load_or_create(Path(folder) / "key.pem"))
    print(await anext(serving), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    with contextlib.suppress(StopAsyncIteration):
        await anext(serving)


def table(result: dict[str, Any]) -> str:
    """The rows as text, each with its ratio to TLS over TCP in the same run."""
    lines = [f"{'transport':<21}{'case':<10}{'p50 ms':>9}{'p99 ms':>9}{'MB/s':>8}{'n':>6}{'vs tcp-tls':>12}"]
    base = {row["case"] + tail: row for row in result["rows"] if row["transport"] == TLS for tail in ("", NETWORK)}
    for row in result["rows"]:
        rate = "" if row["MBps"] is None else f"{row['MBps']:.1f}"
        against = base.get(row["case"])
        ratio = ""
        if against is not None:
            bulk = row["MBps"] is not None
            ratio = f"{row['MBps'] / against['MBps'] if bulk else row['p50_ms'] / against['p50_ms']:.2f}×"
        lines.append(
            f"{row['transport']:<21}{row['case']:<10}{row['p50_ms']:>9.3f}{row['p99_ms']:>9.3f}{rate:>8}"
            f"{row['n']:>6}{ratio:>12}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or with --json the data."""
    parser = argparse.ArgumentParser(prog="bench transport", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the work: shape, not figures")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--engine", action="append", choices=sorted(ENGINE_NAMES), help="only this engine of ours")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        asyncio.run(_serve(arguments.serve, arguments.folder))
        return 0
    result = run(arguments.quick, arguments.engine or tuple(ENGINE_NAMES))
    print(json.dumps(result) if arguments.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
