"""A process inside a host of the lab: one endpoint that does what it is told. JSON lines on stdin and stdout.

    python -m tests.natlab.agent --name ada --relay http://relay1.natlab --listen [::]:4433

First line out: {"event": "ready", "peer", "port"}. Each line in is a command {"id", "do", …}, answered in any order by
{"id", "ok": true, …} or {"id", "ok": false, "error"}. Times in milliseconds, sizes in bytes:

    dial {peer, addresses?, timeout?}           → dial_ms, first_byte_ms (since the command, of an echo), path, reason
    ping {peer, size?}                          → rtt_ms: one echo over the connection
    stream {peer, size?, every_ms?, seconds?}   → sent, answered, lost, p50_ms, p99_ms, max_ms, gap_ms, switches
    bulk {peer, size}                           → seconds, MBps: one way
    wait {peer, direct?, kind?, via?, timeout?} → waited_ms, path, reason: until datagrams take such a path
    status {}                                   → relays, peers: path, reason, paths, how it came to be
    hangup {peer}, quit {}

`stream` asks on a schedule, whether or not what came before was answered; `gap_ms` is the longest time without any
answer. Every request is echoed, so that a lost one is one that was not answered within ANSWER_SECONDS of the end.
The key follows from the name (`peer_of`), so that tests know everybody's PeerId beforehand. Called by swarm.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import math
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from transport.config import TransportConfig
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import Address, TransportError
from transport.identity import Identity, PeerId
from transport.proto.addresses import PathId, PathKind
from transport.stream import Stream
from transport.udp_socket import any_host

Json = dict[str, Any]  # Any: JSON

HEADER = struct.Struct(">cI")  # mode, size of what follows
ECHO, SINK = b"E", b"S"
MAX_SIZE = 1 << 30
LOOK_EVERY = 0.01  # seconds between looks at the decision, of which nobody tells
ANSWER_SECONDS = 5.0


def identity_of(name: str) -> Identity:
    """The key pair of an agent."""
    return Identity.generate(hashlib.sha256(name.encode()).digest())


def peer_of(name: str) -> str:
    """The PeerId of an agent, as text."""
    return str(identity_of(name).peer_id)


@dataclass
class Watch:
    """One peer since it was dialled: its connection, and which paths its datagrams took."""

    began: float
    connection: Connection | None = None
    stream: Stream | None = None
    history: list[Json] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    last: PathId | None = None


class Agent:
    """The commands, over one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._watches: dict[PeerId, Watch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = asyncio.Event()

    # -- commands

    async def dial(self, peer: str, addresses: list[Address] | None = None, timeout: float = 20.0) -> Json:
        who = PeerId.parse(peer)
        watch = self._watch(who)
        start = time.monotonic()
        given = [(host, port) for host, port in addresses or ()]
        watch.connection, stream = await self._endpoint.dial_with(who, given, first=_request(1), timeout=timeout)
        dialled = time.monotonic()
        async with asyncio.timeout(timeout):
            if stream is None:  # the peer had dialled too, or was connected already
                stream = await watch.connection.open_stream()
                await stream.write(_request(1))
            await stream.readexactly(1)
        watch.stream = stream
        first = time.monotonic() - start
        return {"dial_ms": _ms(dialled - start), "first_byte_ms": _ms(first), **self._path(who)}

    async def ping(self, peer: str, size: int = 64) -> Json:
        stream = await self._stream(PeerId.parse(peer))
        start = time.monotonic()
        async with asyncio.timeout(ANSWER_SECONDS * 2):
            await self._echo(stream, size)
        return {"rtt_ms": _ms(time.monotonic() - start), **self._path(PeerId.parse(peer))}

    async def stream(self, peer: str, size: int = 12_288, every_ms: float = 20.0, seconds: float = 5.0) -> Json:
        who = PeerId.parse(peer)
        stream = await self._connection(who).open_stream()
        before = len(self._watches[who].history)
        count = max(1, round(seconds * 1000 / every_ms))
        start = time.monotonic()
        answers: list[float] = []  # when
        latencies: list[float] = []

        async def receive() -> None:
            for number in range(count):
                await stream.readexactly(size)
                now = time.monotonic()
                latencies.append(now - (start + number * every_ms / 1000))
                answers.append(now - start)

        receiving = asyncio.create_task(receive())
        sent = 0
        failure = ""
        try:
            for number in range(count):
                await asyncio.sleep(start + number * every_ms / 1000 - time.monotonic())
                stream.write_nowait(_request(size))
                sent += 1
            async with asyncio.timeout(ANSWER_SECONDS):
                await asyncio.shield(receiving)
        except (TransportError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            receiving.cancel()
            with contextlib.suppress(TransportError, asyncio.CancelledError):
                await receiving
            with contextlib.suppress(TransportError):
                stream.reset(0)
        gaps = [after - ahead for ahead, after in zip([0.0, *answers], answers, strict=False)]
        return {
            "sent": sent,
            "answered": len(answers),
            "lost": sent - len(answers),
            "p50_ms": _ms(_share(latencies, 0.5)),
            "p99_ms": _ms(_share(latencies, 0.99)),
            "max_ms": _ms(_share(latencies, 1.0)),
            "gap_ms": _ms(max(gaps, default=math.inf)),
            "latencies_ms": [_ms(one) for one in latencies],
            "switches": self._watches[who].history[before:],
            "failure": failure,
            **self._path(who),
        }

    async def bulk(self, peer: str, size: int) -> Json:
        who = PeerId.parse(peer)
        stream = await self._connection(who).open_stream()
        start = time.monotonic()
        await stream.write(HEADER.pack(SINK, size))
        chunk = bytes(min(size, 256 * 1024))
        left = size
        while left:
            left -= len(part := chunk[:left])
            await stream.write(part)
        await stream.readexactly(1)
        seconds = time.monotonic() - start
        await stream.finish()
        return {"seconds": round(seconds, 3), "MBps": round(size / seconds / 1e6, 3), **self._path(who)}

    async def wait(
        self, peer: str, direct: bool | None = None, kind: str = "", via: str = "", timeout: float = 10.0
    ) -> Json:
        who = PeerId.parse(peer)
        start = time.monotonic()

        def there(path: Json) -> bool:
            is_direct = path["path"] not in ("", PathKind.RELAY)
            return (
                bool(path["path"])
                and (direct is None or is_direct is direct)
                and kind in ("", path["path"])
                and via in path["via"]
            )

        while not there(path := self._path(who)):
            if time.monotonic() - start > timeout:
                raise TimeoutError(f"still {path['path'] or 'no path'} {path['via']} ({path['reason']})")
            await asyncio.sleep(LOOK_EVERY)
        return {"waited_ms": _ms(time.monotonic() - start), **path}

    async def status(self) -> Json:
        relays = [
            {"url": view.url, "up": view.up, "home": view.home, "rtt_ms": _ms(view.rtt), "error": view.error}
            for view in self._endpoint.relays()
        ]
        peers = [
            {
                "peer": str(peer),
                **self._path(peer),
                "paths": [
                    {
                        "via": str(view.path),
                        "kind": str(view.kind),
                        "state": view.state.name.lower(),
                        "rtt_ms": _ms(view.rtt),
                        "loss": round(view.loss, 3),
                        "size": view.size,
                        "reason": view.demoted or view.reason,
                    }
                    for view in self._endpoint.paths(peer)
                ],
                "history": watch.history,
            }
            for peer, watch in self._watches.items()
        ]
        around = self._endpoint.reach.surroundings
        own = {"nat": around.nat.kind.name.lower(), "nat_reason": around.nat.reason} if around is not None else {}
        candidates = [[*one.address] for one in around.candidates] if around is not None else []
        return {"relays": relays, "peers": peers, "candidates": candidates, **own}

    async def hangup(self, peer: str) -> Json:
        watch = self._watches.pop(PeerId.parse(peer), None)
        if watch is not None:
            if watch.task is not None:
                watch.task.cancel()
            if watch.connection is not None:
                await watch.connection.close()
        return {}

    async def quit(self) -> Json:
        self.stopped.set()
        return {}

    # -- the other side

    async def serve(self) -> None:
        """Echo for everybody, until the endpoint closes."""
        with contextlib.suppress(TransportError):
            while True:
                self._spawn(self._serve_connection(await self._endpoint.accept()))

    async def _serve_connection(self, connection: Connection) -> None:
        self._watch(connection.peer).connection = connection
        with contextlib.suppress(TransportError):
            while True:
                self._spawn(_serve_stream(await connection.accept_stream()))

    # -- inside

    def command(self, line: bytes, answer: Callable[[Json], None]) -> None:
        """Obey one line; the answer may come later."""
        message: Json = json.loads(line)
        number, do = message.pop("id"), message.pop("do")
        commands: dict[str, Callable[..., Awaitable[Json]]] = {
            "dial": self.dial,
            "ping": self.ping,
            "stream": self.stream,
            "bulk": self.bulk,
            "wait": self.wait,
            "status": self.status,
            "hangup": self.hangup,
            "quit": self.quit,
        }

        async def run() -> None:
            try:
                answer({"id": number, "ok": True, **await commands[do](**message)})
            except Exception as error:  # whatever it was, the test wants to read it
                answer({"id": number, "ok": False, "error": f"{type(error).__name__}: {error}"})

        self._spawn(run())

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch(self, peer: PeerId) -> Watch:
        if peer not in self._watches:
            watch = self._watches[peer] = Watch(time.monotonic())
            watch.task = asyncio.create_task(self._look(peer, watch))
        return self._watches[peer]

    async def _look(self, peer: PeerId, watch: Watch) -> None:
        while True:
            decision = self._endpoint.decision(peer)
            primary = None if decision is None else decision.primary
            if primary != watch.last:
                watch.last = primary
                watch.history.append({"at_ms": _ms(time.monotonic() - watch.began), **self._path(peer)})
            await asyncio.sleep(LOOK_EVERY)

    def _path(self, peer: PeerId) -> Json:
        """Which path the peer's datagrams take now."""
        decision = self._endpoint.decision(peer)
        if decision is None or decision.primary is None:
            return {"path": "", "via": "", "reason": "" if decision is None else decision.reason, "doubled": False}
        views = self._endpoint.paths(peer)
        kinds = {view.path: str(view.kind) for view in views}
        relayed = [view.rtt for view in views if view.path.relay and view.rtt is not None]
        cost = self._endpoint.reach.paths.punching(peer)
        return {
            "path": kinds.get(decision.primary, "unknown"),
            "via": str(decision.primary),
            "reason": decision.reason,
            "doubled": decision.duplicate is not None,
            "relay_rtt_ms": _ms(min(relayed, default=None)),
            "call_bytes": 0 if cost is None else cost.relay_bytes,
        }

    def _connection(self, peer: PeerId) -> Connection:
        watch = self._watches.get(peer)
        if watch is None or watch.connection is None:
            raise LookupError(f"no connection to {peer.short}: dial first")
        return watch.connection

    async def _stream(self, peer: PeerId) -> Stream:
        connection, watch = self._connection(peer), self._watches[peer]
        if watch.stream is None:
            watch.stream = await connection.open_stream()
        return watch.stream

    @staticmethod
    async def _echo(stream: Stream, size: int) -> None:
        await stream.write(_request(size))
        await stream.readexactly(size)


def _request(size: int) -> bytes:
    return HEADER.pack(ECHO, size) + bytes(size)


async def _serve_stream(stream: Stream) -> None:
    with contextlib.suppress(TransportError):
        while True:
            mode, size = HEADER.unpack(await stream.readexactly(HEADER.size))
            if size > MAX_SIZE:
                stream.reset(1)
                return
            if mode == ECHO:
                await stream.write(await stream.readexactly(size))
                continue
            while size:
                if not (part := await stream.read(min(size, 1 << 20))):
                    return
                size -= len(part)
            await stream.write(b"!")


def _share(values: list[float], share: float) -> float:
    """The value below which this share of the values lies; infinite without any."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else math.inf


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds * 1e3, 2)


def _write(message: Json) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def run(arguments: argparse.Namespace) -> None:
    """One endpoint, until `quit` or the end of stdin."""
    host, _, port = (arguments.listen or f"{any_host()}:0").rpartition(":")
    config = TransportConfig(
        engine=arguments.engine, relays=tuple(arguments.relay or ()), port_mapping=not arguments.no_port_mapping
    )
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with await Endpoint.bind(identity_of(arguments.name), config, listen=(host.strip("[]"), int(port))) as own:
        agent = Agent(own)
        serving = asyncio.create_task(agent.serve())
        _write({"event": "ready", "peer": str(own.peer_id), "port": own.address[1]})
        stopped = asyncio.create_task(agent.stopped.wait())
        while True:
            reading = asyncio.create_task(reader.readline())
            await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() or not reading.result():
                reading.cancel()
                break
            agent.command(reading.result(), _write)
        stopped.cancel()
    await serving


def main() -> None:
    """Run with the flags from the command line."""
    parser = argparse.ArgumentParser(description="An endpoint that does what it is told, in JSON lines.")
    parser.add_argument("--name", required=True, help="its key follows from this")
    parser.add_argument("--relay", action="append", metavar="URL")
    parser.add_argument("--listen", metavar="HOST:PORT", help="default: all addresses, any port")
    parser.add_argument("--engine", default="qh3")
    parser.add_argument("--no-port-mapping", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="log to stderr")
    arguments = parser.parse_args()
    if arguments.verbose:
        logging.basicConfig(level=logging.DEBUG, format="%(relativeCreated)8.0f %(name)s %(message)s")
        logging.getLogger("transport.relay_session").setLevel(logging.INFO)  # every frame in hexadecimal otherwise
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
