"""`bench relay-front`: whether requests survive a front that cuts every connection again and again.

Two endpoints talk through a relay and nothing else (they listen on loopback addresses of different families, between
which no datagram goes). Before the relay stands a real nginx with TLS and the shipped configuration. Every 30 to 60
seconds its worker, and with it every connection, is ended: killed, or replaced by a reload. Requests of 12 KB go on
all the while, at random intervals and without waiting for answers; what is reported is whether each was answered, and
for how long the slowest near each cut had to wait. Not a test: nothing here asserts a time. Run as
`python -m swarmnode.bench.relay_front [--minutes 10] [--relays 1] [--json]`; exit code 1 when a request was not
answered, or nginx is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import ipaddress
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarmnode.bench.command import Result, parser, positive, run_command
from swarmnode.bench.relay_process import RelayProcess
from swarmnode.errors import SwarmnodeError
from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.identity import Identity

HOST, OTHER_FAMILY = "127.0.0.1", "::1"
REQUEST = 12 * 1024
INTERVAL = (0.02, 0.05)  # seconds between two requests
BETWEEN_CUTS = (30.0, 60.0)  # seconds, of one front
NEAR_CUT = 3.0  # a request that was open within so many seconds after a cut counts for its stall
LAST_ANSWERS = 15.0  # how long the last requests may wait for an answer
START_SECONDS = 30.0
LAG_INTERVAL = 0.02
CONF = Path(__file__).parents[2] / "deploy" / "nginx" / "relay.conf"

MAIN = """
daemon off;
{user}
worker_processes 1;
worker_shutdown_timeout 200ms;  # a reload must not wait for WebSockets, which never end
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/relay.conf;
}}
"""


class CannotRun(SwarmnodeError):
    """Something that this needs is missing; one line says what."""


@dataclass(frozen=True, slots=True)
class Front:
    """nginx before one relay."""

    url: str
    master: psutil.Process

    def cut(self, kind: str) -> None:
        """End every connection: "crash" kills the worker, "reload" has the master replace it."""
        if kind == "crash":
            for worker in self.master.children():
                worker.kill()
        else:
            self.master.send_signal(signal.SIGHUP)


@dataclass(slots=True)
class Figures:
    """What happened; times of perf_counter."""

    sent: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)  # in the order of `sent`: one stream
    cuts: list[tuple[float, int, str]] = field(default_factory=list)  # when, which front, how
    lags: list[tuple[float, float]] = field(default_factory=list)  # when this process ran late, and by how much
    wrong: int = 0  # answers that were not the request
    relays: set[str] = field(default_factory=set)  # paths that carried the connection


async def run(seconds: float, relays: int) -> dict[str, Any]:
    """Measure; `{machine, requests, latency, cuts, stalls}`, units in the names. Raises CannotRun."""
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="relay-front-") as text:
        folder = Path(text)
        make_certificate(folder)
        async with contextlib.AsyncExitStack() as stack:
            fronts = [await stack.enter_async_context(_front(folder / str(at), folder)) for at in range(relays)]
            config = TransportConfig(
                relays=tuple(front.url for front in fronts), relay_ca=folder / "certificate.pem", port_mapping=False
            )
            ours = await Endpoint.bind(Identity.generate(), config, listen=(HOST, 0))
            theirs = await stack.enter_async_context(
                await Endpoint.bind(Identity.generate(), config, listen=(OTHER_FAMILY, 0))
            )
            await stack.enter_async_context(ours)
            await _exchange(ours, theirs, fronts, seconds, figures)
    return _report(figures, seconds, relays)


async def _exchange(
    ours: Endpoint, theirs: Endpoint, fronts: Sequence[Front], seconds: float, figures: Figures
) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not all(view.up for one in (ours, theirs) for view in one.relays()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    connection, accepted = await asyncio.gather(ours.dial(theirs.peer_id), theirs.accept())
    stream = await connection.open_stream()
    pattern = random.randbytes(REQUEST - 8)
    arrived = bytearray()
    finished = asyncio.Event()
    over = False

    def received(data: bytes) -> None:
        arrived.extend(data)
        while len(arrived) >= REQUEST:
            expected = len(figures.answered).to_bytes(8) + pattern
            figures.wrong += arrived[:REQUEST] != expected
            del arrived[:REQUEST]
            figures.answered.append(perf_counter())
        if over and len(figures.answered) == len(figures.sent):
            finished.set()

    stream.set_receiver(received, lambda _: finished.set())

    async def serve() -> None:
        echo = await accepted.accept_stream()
        echo.set_receiver(echo.write_nowait, lambda _: None)

    server = asyncio.create_task(serve())
    beside = [asyncio.create_task(_cut(front, at, seconds, figures)) for at, front in enumerate(fronts)]
    beside.append(asyncio.create_task(_watch_lag(figures)))
    end = perf_counter() + seconds
    try:
        while perf_counter() < end and connection.close_reason is None:
            stream.write_nowait(len(figures.sent).to_bytes(8) + pattern)
            figures.sent.append(perf_counter())
            stats = connection.stats()
            figures.relays.add(stats.relay or f"{stats.path} {stats.path_address}")
            await asyncio.sleep(random.uniform(*INTERVAL))
        over = True
        if len(figures.answered) < len(figures.sent) and connection.close_reason is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(finished.wait(), LAST_ANSWERS)
    finally:
        for task in (*beside, server):
            task.cancel()
        await asyncio.gather(*beside, server, return_exceptions=True)


async def _cut(front: Front, number: int, seconds: float, figures: Figures) -> None:
    """Cut again and again, but not at the very end, where no request would feel it."""
    end = perf_counter() + seconds - NEAR_CUT
    low, high = BETWEEN_CUTS if seconds > sum(BETWEEN_CUTS) else (seconds / 3, seconds / 2)
    while True:
        await asyncio.sleep(random.uniform(low, high))
        if perf_counter() >= end:
            return
        kind = random.choice(("crash", "reload"))
        figures.cuts.append((perf_counter(), number, kind))
        front.cut(kind)


async def _watch_lag(figures: Figures) -> None:
    """Note how late this process runs: on a busy machine that is no fault of the relay's."""
    while True:
        due = perf_counter() + LAG_INTERVAL
        await asyncio.sleep(LAG_INTERVAL)
        late = perf_counter() - due
        if late > LAG_INTERVAL:
            figures.lags.append((due, late))


def _report(figures: Figures, seconds: float, relays: int) -> dict[str, Any]:
    sent, answered = figures.sent, figures.answered
    latencies = [until - since for since, until in zip(sent, answered, strict=False)]
    stalls: list[dict[str, Any]] = []
    waits: list[float] = []
    ends = [at for at, _, _ in figures.cuts[1:]] + [float("inf")]
    for (at, number, kind), following in zip(figures.cuts, ends, strict=True):
        end = min(at + NEAR_CUT, following)
        near = [
            until - max(since, at) for since, until in zip(sent, answered, strict=False) if until > at and since < end
        ]
        lag = sum(late for due, late in figures.lags if at <= due < end)
        waits.append(max(near, default=0.0))
        stalls.append(
            {
                "at_s": _rounded(at - sent[0]),
                "front": number,
                "kind": kind,
                "stall_ms": _ms(waits[-1]),
                "machine_late_ms": _ms(lag),
            }
        )
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, loopback",
        "seconds": seconds,
        "relays": relays,
        "requests": {
            "sent": len(sent),
            "unanswered": len(sent) - len(answered),
            "wrong": figures.wrong,
            "only_by_relay": all(url.startswith("https://") for url in figures.relays),
        },
        "latency": {
            "p50_ms": _percentile(latencies, 50),
            "p99_ms": _percentile(latencies, 99),
            "max_ms": _ms(max(latencies, default=0.0)),
        },
        "cuts": {
            "count": len(stalls),
            "stall_p50_ms": _percentile(waits, 50),
            "stall_p95_ms": _percentile(waits, 95),
            "stall_max_ms": _ms(max(waits, default=0.0)),
            "above_1_s": sum(wait > 1 for wait in waits),
        },
        "stalls": stalls,
    }


# nginx, the relay, a certificate


@contextlib.asynccontextmanager
async def _front(folder: Path, certificates: Path) -> AsyncIterator[Front]:
    """A relay, and nginx before it."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if nginx is None:
        raise CannotRun("nginx is not installed")
    async with RelayProcess("--trusted-proxy", f"{HOST}/32") as relay:  # it believes its front
        port = _free_port()
        _configure(folder, port, relay.port, certificates)
        process = await asyncio.create_subprocess_exec(
            nginx, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")
        )
        try:
            await _listens(port, process)
            yield Front(f"https://{HOST}:{port}", psutil.Process(process.pid))
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


def _configure(folder: Path, port: int, relay_port: int, certificates: Path) -> None:
    """The shipped configuration, on other ports and with our certificate. Raises CannotRun when it has changed."""
    if not CONF.exists():
        raise CannotRun(f"{CONF} is missing; this runs from a source tree")
    text = CONF.read_text()
    for shipped, here in {
        "listen 443 ssl;": f"listen {HOST}:{port} ssl;",
        "listen [::]:443 ssl;": "",
        "/etc/letsencrypt/live/relay.example/fullchain.pem": str(certificates / "certificate.pem"),
        "/etc/letsencrypt/live/relay.example/privkey.pem": str(certificates / "key.pem"),
        "http://127.0.0.1:8080;": f"http://{HOST}:{relay_port};",
    }.items():
        if shipped not in text:
            raise CannotRun(f"{CONF} does not say {shipped!r} any more")
        text = text.replace(shipped, here)
    folder.mkdir()
    user = "user root;" if hasattr(os, "geteuid") and os.geteuid() == 0 else ""
    (folder / "relay.conf").write_text(text)
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, user=user))


async def _listens(port: int, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, port)
                writer.close()
                return
            if process.returncode is not None:
                raise CannotRun(f"nginx ended with {process.returncode}, see its own words above")
            await asyncio.sleep(0.02)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def make_certificate(folder: Path) -> None:
    """certificate.pem, which is its own authority, and key.pem, for HOST."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "relay")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    usage = x509.KeyUsage(True, False, False, False, False, True, False, False, False)  # signatures, certificates
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


# figures


def _percentile(values: list[float], percent: int) -> float:
    """In milliseconds; 0 without values."""
    if len(values) < 2:
        return _ms(values[0]) if values else 0.0
    return _ms(min(statistics.quantiles(values, n=100)[percent - 1], max(values)))


def _ms(seconds: float) -> float:
    return _rounded(seconds * 1000)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    lines = [f"{result['machine']}; {result['seconds']:g} s, {result['relays']} relay(s) behind nginx with TLS"]
    for name in ("requests", "latency", "cuts"):
        lines.append(f"{name:10}" + "  ".join(f"{key} {value}" for key, value in result[name].items()))
    lines += [
        f"cut at {stall['at_s']:6g} s  front {stall['front']}  {stall['kind']:6}  stall {stall['stall_ms']:g} ms"
        + (f"  (this machine ran {stall['machine_late_ms']:g} ms late)" if stall["machine_late_ms"] > 50 else "")
        for stall in result["stalls"]
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Send requests through a relay behind nginx, whose connections are cut again and again."""
    made = parser("python -m swarmnode.bench.relay_front", main.__doc__)
    made.add_argument("--minutes", type=positive, default=10.0, help="for how long (default %(default)s)")
    made.add_argument("--relays", type=int, choices=(1, 2), default=1, help="how many (default %(default)s)")

    def measure(given: argparse.Namespace) -> Result:
        return asyncio.run(run(given.minutes * 60, given.relays))

    def failed(result: Result) -> bool:
        return bool(result["requests"]["unanswered"] or result["requests"]["wrong"])

    return run_command(made, argv, measure, lambda result, _given: print(table(result)), failed)


if __name__ == "__main__":
    raise SystemExit(main())
