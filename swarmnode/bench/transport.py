"""`bench transport`: what a request costs and how much fits through, over loopback between two processes.

Measures our endpoint on both QUIC engines, directly and through a relay, beside plain WebSocket messages through the
same relay, TLS 1.3 over TCP, aioquic.asyncio as it comes and the iroh package, all in one run and in turns, so that
the ratios hold on a busy machine. Not a test: nothing here asserts a time. Called by the command line, or alone:
`python -m swarmnode.bench.transport [--quick] [--json] [--transport NAME]…`.

A case is a request and an answer of the same size, one after the other on one open stream, or `bulk`: one way, timed
until the receiver has answered. The server of every carrier is a process of its own, the relay another one; the client
is this one. A run has rounds; each round asks every carrier in turn, on a connection of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from swarmnode.bench.carriers.base import BULK, CHUNK, HEADER, HOST, REQUESTS, Carrier, Place, Session
from swarmnode.bench.carriers.iroh_package import Iroh
from swarmnode.bench.carriers.quic import Quic
from swarmnode.bench.carriers.relay_messages import RelayMessages
from swarmnode.bench.carriers.streams import StockAioquic, Tls
from swarmnode.bench.command import Result, parser, run_command
from swarmnode.errors import SwarmnodeError

MB = 1_000_000
NETWORK = "-1452"  # our endpoint with the datagrams of a network path instead of loopback's
ROUNDS = 3
REQUEST_SIZES = {"256B": 256, "12KB": 12 * 1024, "100KB": 100 * 1024}
CASES = (*REQUEST_SIZES, "bulk")
NETWORK_CASES = ("12KB", "100KB", "bulk")
# Requests of one round: enough in all that the 99th percentile is not one request.
COUNTS = {"256B": 700, "12KB": 500, "100KB": 100}
SLOW_DIVISOR = 5  # where a request takes ten times as long
QUICK_DIVISOR = 10
WARM_UP = 50
MEASURE_SECONDS = 120.0  # nothing takes as long; a carrier that is stuck must not hold up the rest for ever
START_SECONDS = 30.0
MASK_BYTES, MASK_COUNT = 12 * 1024, 200

CARRIERS: dict[str, Carrier] = {
    carrier.name: carrier
    for carrier in (
        Quic("quic-direct", "qh3"),
        Quic("quic-direct-aioquic", "aioquic"),
        Quic("quic-direct" + NETWORK, "qh3", network=True),
        Quic("quic-direct-aioquic" + NETWORK, "aioquic", network=True),
        Quic("quic-relay", "qh3", relayed=True),
        Quic("quic-relay-aioquic", "aioquic", relayed=True),
        RelayMessages(),
        Tls(),
        StockAioquic(),
        Iroh(copy_replaced=False),
        Iroh(copy_replaced=True),
    )
}
BASE = Tls.name

Row = dict[str, Any]  # JSON: strings, numbers and null


def run(quick: bool = False, transports: Sequence[str] = ()) -> dict[str, Any]:
    """Measure; `{machine, rows: [{transport, case, p50_ms, p99_ms, MBps, n, note}]}`. Blocks for a while.

    `transports`: names out of CARRIERS, all if empty. `quick` measures one round with a tenth of everything. A row that
    could not be measured has null figures, and its note says why.
    """
    chosen = [carrier for name, carrier in CARRIERS.items() if not transports or name in transports]
    with tempfile.TemporaryDirectory(prefix="bench-transport-") as folder, contextlib.ExitStack() as processes:
        place = Place(Path(folder), processes.enter_context(_relay()))
        where = {
            carrier.name: processes.enter_context(_server(carrier.name, place))
            for carrier in chosen
            if not carrier.missing
        }
        rows: list[Row] = []
        for case in CASES:
            measured: dict[str, list[float]] = {name: [] for name in where}
            for _ in range(1 if quick else ROUNDS):
                for name, line in where.items():
                    if case in _cases(name):
                        measured[name] += asyncio.run(_measure(CARRIERS[name], place, line, case, quick))
            rows += [
                _row(carrier, case, measured.get(carrier.name, []), quick)
                for carrier in chosen
                if case in _cases(carrier.name)
            ]
    if not transports:
        rows += _mask_rows()
    return {"machine": _machine(), "rows": rows}


def _cases(name: str) -> Sequence[str]:
    return NETWORK_CASES if name.endswith(NETWORK) else CASES


async def _measure(carrier: Carrier, place: Place, where: str, case: str, quick: bool) -> list[float]:
    """Seconds of each request, or of the bulk."""
    async with asyncio.timeout(MEASURE_SECONDS), carrier.connect(place, where) as session:
        if case == "bulk":
            size = _bulk_bytes(carrier, quick)
            await session.push(HEADER.pack(BULK, size))
            return [await _push_all(session, size)]
        size = REQUEST_SIZES[case]
        count = COUNTS[case] // (1 if carrier.quick else SLOW_DIVISOR) // (QUICK_DIVISOR if quick else 1)
        await session.push(HEADER.pack(REQUESTS, size))
        return await _ask_often(session, size, max(20, count))


def _bulk_bytes(carrier: Carrier, quick: bool) -> int:
    return carrier.bulk_megabytes * MB // (QUICK_DIVISOR if quick else 1)


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


def _row(carrier: Carrier, case: str, times: list[float], quick: bool) -> Row:
    name = carrier.name.removesuffix(NETWORK)
    size = _bulk_bytes(carrier, quick) if case == "bulk" else 0
    case += carrier.name[len(name) :]
    return _figures(name, case, times, carrier.missing or carrier.note, size)


def _figures(name: str, case: str, times: list[float], note: str, bulk: int = 0) -> Row:
    """`bulk`: how many bytes each of the times took; 0 where the rate says nothing."""
    ordered = sorted(times)
    p50 = statistics.median(ordered) if ordered else None
    return {
        "transport": name,
        "case": case,
        "p50_ms": _rounded(p50, 1e3),
        "p99_ms": _rounded(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] if ordered else None, 1e3),
        "MBps": _rounded(bulk / p50 / MB, 1) if bulk and p50 else None,
        "n": len(times),
        "note": note,
    }


def _rounded(value: float | None, factor: float) -> float | None:
    return None if value is None else float(f"{value * factor:.4g}")


def _mask_rows() -> list[Row]:
    """What a client pays to mask a message (RFC 6455, 5.3), alone: it is part of every row with a WebSocket."""
    from websockets.frames import apply_mask  # type: ignore[attr-defined]  # noqa: PLC0415 - the one that is in use
    from websockets.utils import apply_mask as in_python  # noqa: PLC0415

    used = "in Python: websockets was installed without its C part" if apply_mask is in_python else "in C, as used"
    rows = []
    for name, mask, how in (
        ("websocket-mask", apply_mask, used),
        ("websocket-mask-python", in_python, "in Python, as without websockets' C part"),
    ):
        times = _mask_times(mask)
        note = f"masking alone, {statistics.median(times) * 1e6:.2g} µs per 12 KB, {how}"
        rows.append(_figures(name, "12KB", times, note))
    return rows


def _mask_times(mask: Callable[[bytes, bytes], bytes]) -> list[float]:
    data, key, together = os.urandom(MASK_BYTES), os.urandom(4), 10  # a single call is near the clock's own cost
    times = []
    for _ in range(MASK_COUNT):
        start = perf_counter()
        for _ in range(together):
            mask(data, key)
        times.append((perf_counter() - start) / together)
    return times


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


# -- processes


@contextlib.contextmanager
def _relay() -> Iterator[str]:
    """A relay that limits no rate; yields its URL."""
    flags = ["--listen", f"{HOST}:0", "--reflector", "off", "--client-rate", "0", "--global-rate", "0"]
    command = [sys.executable, "-m", "relay", *flags, "--log-level", "error"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            found = re.match(r"relay ready on (\S+:\d+) ", line)
            if found is None:
                raise SwarmnodeError(f"the relay did not start: {line.strip()}")
            yield f"http://{found[1]}"
        finally:
            process.terminate()
            _wait_for(process)


@contextlib.contextmanager
def _server(name: str, place: Place) -> Iterator[str]:
    """A server process; yields where it is, ends it afterwards."""
    shared = ["--folder", str(place.folder), "--relay", place.relay]
    command = [sys.executable, "-m", "swarmnode.bench.transport", "--serve", name, *shared]
    # In a session of its own: a terminal's Ctrl-C is this process's affair, and ends it by its input.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline().strip()
            if not line:
                raise SwarmnodeError(f"the {name} server did not start; run it alone to see why: {' '.join(command)}")
            yield line
        finally:
            process.stdin.close()  # it ends with its standard input
            _wait_for(process)


def _wait_for(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(START_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


async def _serve(carrier: Carrier, place: Place) -> None:
    """A server process: print where it is, serve until standard input ends."""
    serving = carrier.serve(place)
    print(await anext(serving), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    with contextlib.suppress(StopAsyncIteration):
        await anext(serving)


# -- output


def table(result: Mapping[str, Any]) -> str:
    """The rows as text, each with its ratio to TLS over TCP in the same run."""
    lines = [f"{'transport':<22}{'case':<11}{'p50 ms':>10}{'p99 ms':>10}{'MB/s':>8}{'n':>6}{'vs tcp-tls':>12}  note"]
    base = {row["case"] + tail: row for row in result["rows"] if row["transport"] == BASE for tail in ("", NETWORK)}
    for row in result["rows"]:
        unit = "p50_ms" if row["MBps"] is None else "MBps"
        against, ratio = base.get(row["case"]), ""
        if against is not None and row[unit] is not None and not row["transport"].startswith("websocket-mask"):
            ratio = f"{row[unit] / against[unit]:.2f}×"
        p50, p99, rate = ("" if row[key] is None else f"{row[key]:.4g}" for key in ("p50_ms", "p99_ms", "MBps"))
        figures = f"{p50:>10}{p99:>10}{rate:>8}{row['n']:>6}{ratio:>12}"
        lines.append(f"{row['transport']:<22}{row['case']:<11}{figures}  {row['note']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or with --json the data."""
    made = parser("bench transport", __doc__)
    made.add_argument("--quick", action="store_true", help="a tenth of the work, once: shape, not figures")
    made.add_argument("--transport", action="append", choices=CARRIERS, help="only this one (may be repeated)")
    made.add_argument("--serve", choices=CARRIERS, help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--relay", help=argparse.SUPPRESS)
    given = made.parse_args(argv)
    if given.serve:
        asyncio.run(_serve(CARRIERS[given.serve], Place(given.folder, given.relay)))
        return 0

    def measure(chosen: argparse.Namespace) -> Result:
        return run(chosen.quick, chosen.transport or ())

    return run_command(made, argv, measure, lambda result, _given: print(table(result)))


if __name__ == "__main__":
    raise SystemExit(main())
