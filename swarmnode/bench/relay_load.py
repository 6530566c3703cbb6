"""`bench relay-load`: what many clients cost a relay, and what a relay adds to a datagram's way.

Starts `python -m relay` as a process of its own on loopback and is all of its clients itself. Some clients only stay
connected; pairs send each other datagrams of 1200 bytes a few times per second. UDP datagrams between two sockets of
this process, sent at the same times, show what the machine and this event loop alone take; the rest is the relay's.
Not a test: nothing here asserts a time. Run as
`python -m swarmnode.bench.relay_load [--idle 2000] [--pairs 200] [--seconds 120] [--json]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import platform
import statistics
import struct
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, cast

import psutil
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from swarmnode.bench.command import Result, parser, positive, run_command
from swarmnode.bench.command import count as at_least_one
from swarmnode.bench.relay_process import READY_SECONDS, RelayProcess
from swarmnode.errors import SwarmnodeError
from transport.identity import Identity
from transport.proto.relay_frames import (
    MAX_MESSAGE,
    PATH,
    PAYLOAD_AT,
    SUBPROTOCOL,
    VERSION,
    Challenge,
    FrameType,
    Login,
    Ping,
    Pong,
    Welcome,
    data_frame,
    datagrams,
    decode_server,
    login_message,
)

HOST = "127.0.0.1"
DATAGRAM = 1200
PER_SECOND = 4.0
CONNECTING_AT_ONCE = 32  # the relay holds 64 connections per address that have not logged in
PING_INTERVAL = 20.0
SETTLE = 8.0  # a relay gives memory back when it has been quiet for five seconds
FILES_BESIDE = 64
NO_LIMITS = ("--max-clients", "100000", "--max-clients-per-ip", "100000")  # that this load would meet
_STAMP = struct.Struct(">d")

_quiet = logging.getLogger(f"{__name__}.websocket")
_quiet.setLevel(logging.WARNING)


class Client(asyncio.Protocol):
    """One client, as small as it can be: a thousand of them must not be what is measured."""

    def __init__(self, port: int) -> None:
        self.identity = Identity.generate()
        self.key = self.identity.peer_id.raw
        self.latencies: list[float] = []
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.lost = False
        self._authority = f"{HOST}:{port}"
        self._websocket = ClientProtocol(
            parse_uri(f"ws://{self._authority}{PATH}"),
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            max_size=MAX_MESSAGE,
            logger=_quiet,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._websocket.send_request(self._websocket.connect())
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.welcome.done():
            self.welcome.set_exception(ConnectionError("the relay closed the connection before the login"))

    def data_received(self, data: bytes) -> None:
        self._websocket.receive_data(data)
        for event in self._websocket.events_received():
            if isinstance(event, Frame):
                self._message(bytes(event.data))
            elif isinstance(event, Response) and self._websocket.handshake_exc is not None:
                self._transport.abort()
        self._flush()

    def send(self, message: bytes) -> None:
        """One binary message."""
        self._websocket.send_binary(message)
        self._flush()

    def close(self) -> None:
        """Drop the connection."""
        self._transport.abort()

    def _message(self, message: bytes) -> None:
        if message[0] == FrameType.DATA:
            now = perf_counter()
            for datagram in datagrams(memoryview(message)[PAYLOAD_AT:]):
                self.latencies.append(now - _STAMP.unpack_from(datagram)[0])
            return
        frame = decode_server(message)
        if isinstance(frame, Challenge):
            signature = self.identity.sign(login_message(frame.nonce, self._authority))
            self.send(Login(VERSION, self.key, self._authority, signature).encode())
        elif isinstance(frame, Welcome):
            self.welcome.set_result(frame)
        elif not isinstance(frame, Pong):
            raise ConnectionError(f"the relay said {frame}")

    def _flush(self) -> None:
        for data in self._websocket.data_to_send():
            if data and not self._transport.is_closing():
                self._transport.write(data)


class Direct(asyncio.DatagramProtocol):
    """The receiving end of the way without a relay."""

    def __init__(self) -> None:
        self.latencies: list[float] = []

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:  # Any: asyncio's own signature
        self.latencies.append(perf_counter() - _STAMP.unpack_from(data)[0])


async def run(idle: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Measure; `{machine, clients, login, memory, cpu, latency, drops}`, units in the names."""
    async with RelayProcess(*NO_LIMITS) as running:
        relay, port = psutil.Process(running.pid), running.port
        warm = [await _client(port) for _ in range(4)]  # what the relay loads late is no client's memory
        before = relay.memory_info().rss
        cpu, started = _cpu(relay), perf_counter()
        idlers = await _clients(port, idle)
        login_seconds, login_cpu = perf_counter() - started, _cpu(relay) - cpu
        with_idle = relay.memory_info().rss
        senders, receivers = await _clients(port, pairs), await _clients(port, pairs)
        everybody = [*warm, *idlers, *senders, *receivers]
        pings = asyncio.ensure_future(_ping_all(everybody))
        cpu, started = _cpu(relay), perf_counter()
        sent, direct = await _exchange(senders, receivers, seconds)
        wall = perf_counter() - started
        busy = _cpu(relay) - cpu
        peak = relay.memory_info().rss
        pings.cancel()
        lost = sum(client.lost for client in everybody)
        for client in everybody:
            client.close()
        await asyncio.sleep(SETTLE)
        after = [relay.memory_info().rss]
        for _ in range(2):  # memory that was freed must do for as many again
            for client in await _clients(port, idle):
                client.close()
            await asyncio.sleep(SETTLE)
            after.append(relay.memory_info().rss)
    latencies = [latency for client in receivers for latency in client.latencies]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, loopback",
        "clients": {"idle": idle, "pairs": pairs, "lost": lost},
        "login": {
            "per_s": _rounded(idle / login_seconds),
            "relay_cpu_ms": _rounded(login_cpu / max(1, idle) * 1000),
        },
        "memory": {
            "start_mb": _mb(before),
            "idle_mb": _mb(with_idle),
            "load_mb": _mb(peak),
            "after_mb": _mb(after[0]),
            "after_twice_mb": _mb(after[1]),
            "after_thrice_mb": _mb(after[2]),
            "per_idle_client_kb": _rounded((with_idle - before) / max(1, idle) / 1000),
        },
        "cpu": {
            "relay_percent": _rounded(busy / wall * 100),
            "us_per_datagram": _rounded(busy / max(1, sent) * 1e6),
        },
        "latency": {
            "relay_p50_ms": _percentile(latencies, 50),
            "relay_p99_ms": _percentile(latencies, 99),
            "direct_p50_ms": _percentile(direct, 50),
            "direct_p99_ms": _percentile(direct, 99),
            "added_p50_ms": _rounded(_percentile(latencies, 50) - _percentile(direct, 50)),
            "added_p99_ms": _rounded(_percentile(latencies, 99) - _percentile(direct, 99)),
        },
        "datagrams": {"sent": sent, "received": len(latencies), "dropped": sent - len(latencies)},
    }


async def _exchange(senders: list[Client], receivers: list[Client], seconds: float) -> tuple[int, list[float]]:
    """Every pair sends PER_SECOND datagrams, spread evenly over time. (sent, latencies of UDP beside it)"""
    loop = asyncio.get_running_loop()
    receiver, direct = await loop.create_datagram_endpoint(Direct, local_addr=(HOST, 0))
    address = receiver.get_extra_info("sockname")
    sender, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=(HOST, 0))
    padding = bytes(DATAGRAM - _STAMP.size)
    sent, turn = 0, 0
    interval = 1 / (PER_SECOND * max(1, len(senders)))
    start = perf_counter()
    while (due := start + turn * interval) < start + seconds:
        wait = due - perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        if senders:
            at = turn % len(senders)
            if not senders[at].lost:
                message = data_frame(receivers[at].key, [_STAMP.pack(perf_counter()) + padding])
                senders[at].send(message)
                sent += 1
        sender.sendto(_STAMP.pack(perf_counter()) + padding, address)
        turn += 1
    await asyncio.sleep(1.0)
    sender.close()
    receiver.close()
    return sent, direct.latencies


async def _ping_all(clients: list[Client]) -> None:
    """Keep every client alive, one after the other."""
    while True:
        for client in clients:
            if not client.lost:
                client.send(Ping(bytes(8)).encode())
            await asyncio.sleep(PING_INTERVAL / len(clients))


async def _client(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(port), HOST, port)
    await asyncio.wait_for(client.welcome, READY_SECONDS)
    return client


async def _clients(port: int, count: int) -> list[Client]:
    slots = asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def one() -> Client:
        async with slots:
            return await _client(port)

    return list(await asyncio.gather(*(one() for _ in range(count))))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _percentile(values: list[float], percent: int) -> float:
    """In milliseconds; 0 without values."""
    if len(values) < 2:
        return 0.0
    return _rounded(statistics.quantiles(values, n=100)[percent - 1] * 1000)


def _mb(size: int) -> float:
    return _rounded(size / 1e6)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _files_missing(clients: int) -> int:
    """How many files too few this process may open for so many clients, after asking for all it can get."""
    try:
        import resource  # noqa: PLC0415  not on Windows
    except ImportError:
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if allowed == resource.RLIM_INFINITY else max(0, clients + FILES_BESIDE - allowed)


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    lines = [result["machine"]]
    for name, values in result.items():
        if isinstance(values, dict):
            lines.append(f"{name:10}" + "  ".join(f"{key} {value:g}" for key, value in values.items()))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Load a relay and measure it."""
    made = parser("python -m swarmnode.bench.relay_load", main.__doc__)
    made.add_argument("--idle", type=int, default=2000, help="clients that only stay connected (default %(default)s)")
    made.add_argument("--pairs", type=at_least_one, default=200, help="pairs that talk (default %(default)s)")
    made.add_argument("--seconds", type=positive, default=120.0, help="for how long (default %(default)s)")

    def measure(given: argparse.Namespace) -> Result:
        if missing := _files_missing(given.idle + 2 * given.pairs):
            raise SwarmnodeError(f"this process may open {missing} files too few; raise it with: ulimit -n")
        return asyncio.run(run(given.idle, given.pairs, given.seconds))

    return run_command(made, argv, measure, lambda result, _given: print(table(result)))


if __name__ == "__main__":
    raise SystemExit(main())
