"""`bench bulk`: how fast experts get from one process to another over loopback, what that costs, and what limits it.

    python -m swarmnode.bench.bulk [--megabytes 794] [--rounds 3] [--way NAME]… [--quick] [--json]

The same random bytes (experts of 3072 × 1024 in Q4_K, in a GGUF file) go every way:

    bulk          lane "bulk" as members use it: file → BulkServer → QUIC → Fetcher → SHA-256 → SliceStore, flushed
    bulk-dropped  the same protocol, and what comes is dropped: nothing is hashed, nothing is written
    stream        one transport stream per connection, sent as it is read and counted; loopback's datagrams
    stream-1452   … with the datagrams of a network path
    tcp-tls       TLS 1.3 over TCP, asyncio streams

in each of LAYOUTS: so many pairs of processes, each with so many connections between its two. Every measurement starts
its processes anew; a round takes all ways in turn, so that a busy moment of the machine meets all alike; a row is the
median of its rounds. Time is from the first pair's start to the last one's end. CPU is user and system time: of the
processes per gigabyte, and of the threads that run their loops as a share of the time (`store`: of the thread that
hashes and writes, waiting for the disk included). `others` is how many cores the machine's other work took meanwhile;
a measurement that it disturbed is made again, up to TRIES times, and the least disturbed one counts. Where a row's
`others` is not near 0 all the same, its rate says little; CPU per gigabyte still does.

What the processes do is in bulk_processes.py. Run by hand, and in small by its test.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from swarmnode.bench.bulk_processes import CARRIERS, DROPPED, MANIFEST, MOVE_SECONDS, SOURCE, STORED, Part
from swarmnode.bench.command import Result, count, parser, positive, run_command
from swarmnode.bench.synthetic import SWIGLU_STEPS
from swarmnode.compute.recipe import Recipe, Site
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import build_manifest, digest_experts, save_manifest
from swarmnode.model.random_model import RandomModel, write_random_model

MB = 1_000_000
MEGABYTES, MOST_MEGABYTES = 794.0, 1e6
ROUNDS, TRIES = 3, 3
QUICK_DIVISOR = 10
QUIET = 0.2  # cores that other work may take of a measurement
FAR_GBPS = 200.0  # 794 MB in 32 ms
BUSY = 0.85  # a thread that computes for this share of the time is what limits
FULL = 0.93  # … and so are the cores, of which something is always lost between threads
D_MODEL, N_FF, N_USED = 3072, 1024, 8
EXPERT_BYTES = 3 * D_MODEL * N_FF * 144 // 256  # three matrices in Q4_K
WAYS = (STORED, DROPPED, *CARRIERS)
BASE = "tcp-tls"
NOTES = {
    STORED: "the product's way: hashed, stored, flushed",
    DROPPED: "its protocol alone: neither hashed nor stored",
    **{name: carrier.note for name, carrier in CARRIERS.items()},
}

Json = dict[str, Any]  # Any: JSON, strings and numbers


@dataclass(frozen=True, slots=True)
class Layout:
    """`processes` pairs of a sending and a receiving process; `connections` between the two of each."""

    connections: int
    processes: int


LAYOUTS = (Layout(1, 1), Layout(2, 1), Layout(4, 1), Layout(1, 2))


def run(
    quick: bool = False,
    megabytes: float = MEGABYTES,
    *,
    rounds: int = ROUNDS,
    ways: Sequence[str] = (),
    layouts: Sequence[Layout] = LAYOUTS,
) -> Json:
    """Measure; `{machine, megabytes, far_Gbps, far_ms, rows: [{way, connections, processes, MBps, …}]}`. Blocks.

    `ways`: out of WAYS, all if empty. `quick`: a tenth of the bytes, once. Needs twice the bytes on the disk of the
    temporary folder: UsageError where they are not free. SwarmnodeError where a process fails. `far_ms` is what 200
    Gb/s would take for the bytes, and a row's `of_far` its share of that rate.
    """
    if quick:
        megabytes, rounds = megabytes / QUICK_DIVISOR, 1
    tries = 1 if quick else TRIES
    cases = [(way, layout) for layout in layouts for way in WAYS if not ways or way in ways]
    if not megabytes <= MOST_MEGABYTES:
        raise UsageError(f"--megabytes {megabytes:g}: give {MOST_MEGABYTES:,.0f} at most")
    with tempfile.TemporaryDirectory(prefix="bench-bulk-") as name:
        folder = Path(name)
        if shutil.disk_usage(folder).free < 2 * megabytes * MB:
            raise UsageError(f"--megabytes {megabytes:g}: {folder.parent} has no room for twice as many; set TMPDIR")
        size = write_source(folder, megabytes)
        turns = [[_undisturbed(folder, way, layout, size, tries) for way, layout in cases] for _ in range(rounds)]
    rows = [_row(way, layout, figures) for (way, layout), figures in zip(cases, zip(*turns, strict=True), strict=True)]
    base = {(row["connections"], row["processes"]): row["MBps"] for row in rows if row["way"] == BASE}
    for row in rows:
        against = base.get((row["connections"], row["processes"]))
        row["vs_tls"] = None if against is None else round(row["MBps"] / against, 3)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.python_version()}, loopback",
        "megabytes": round(size / MB, 1),
        "far_Gbps": FAR_GBPS,
        "far_ms": round(size * 8 / FAR_GBPS / 1e6, 1),
        "rows": rows,
    }


def write_source(folder: Path, megabytes: float) -> int:
    """A GGUF with so many megabytes of random experts, and its manifest; returns how many bytes they have exactly."""
    count = max(N_USED, round(megabytes * MB / EXPERT_BYTES))
    types = dict.fromkeys(("gate", "up", "down"), "Q4_K")
    shape = RandomModel(
        d_model=D_MODEL, n_layers=1, n_ff_expert=N_FF, n_expert=count, n_used=N_USED, vocab=259, expert_types=types,
        dense_type="Q4_K",
    )  # fmt: skip
    [path] = write_random_model(shape, folder / SOURCE)
    gguf = GgufFile.open(path)
    tensors = tuple(f"blk.0.ffn_{name}_exps.weight" for name in ("up", "gate", "down"))
    site = Site(0, 0, D_MODEL, D_MODEL, count, N_USED, tensors, Recipe(SWIGLU_STEPS, "after"))
    manifest = build_manifest(gguf, [site], digest_experts(gguf, [site]))
    save_manifest(manifest, folder / MANIFEST)
    return count * manifest.expert_bytes(0)


# -- one measurement


def _undisturbed(folder: Path, way: str, layout: Layout, size: int, tries: int) -> Json:
    best = measure(folder, way, layout, size)
    while best["others"] > QUIET and (tries := tries - 1):
        best = min(best, measure(folder, way, layout, size), key=lambda one: float(one["others"]))
    return best


def measure(folder: Path, way: str, layout: Layout, size: int) -> Json:
    """Move everything in `folder`, `size` bytes, once; figures of all processes together."""
    parts = [Part(folder, way, layout.connections, n, layout.processes) for n in range(layout.processes)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_Child("serve", part)) for part in parts]
        movers = [stack.enter_context(_Child("move", part)) for part in parts]
        for server, mover in zip(servers, movers, strict=True):
            mover.write(server.read())
        for mover in movers:
            mover.read()  # it is connected
        machine_s, before = _machine_busy_s(), [server.usage() for server in servers]
        for mover in movers:
            mover.write()
        moved = [json.loads(mover.read()) for mover in movers]
        served = [_less(server.usage(), earlier) for server, earlier in zip(servers, before, strict=True)]
        machine_s = _machine_busy_s() - machine_s
    for part in parts:
        shutil.rmtree(part.store, ignore_errors=True)
    seconds = max(one["ended"] for one in moved) - min(one["began"] for one in moved)
    senders, receivers = (moved, served) if way in CARRIERS else (served, moved)
    own_s = sum(one["cpu_s"] for one in (*served, *moved))
    return {
        "seconds": seconds,
        "MBps": size / seconds / MB,
        "sender_s_per_GB": sum(one["cpu_s"] for one in senders) / size * 1e9,
        "receiver_s_per_GB": sum(one["cpu_s"] for one in receivers) / size * 1e9,
        "sender_loop": statistics.fmean(one["loop_s"] for one in senders) / seconds,
        "receiver_loop": statistics.fmean(one["loop_s"] for one in receivers) / seconds,
        "store": statistics.fmean(one["store_s"] for one in moved) / seconds,
        "cores": own_s / seconds,
        "others": max(0.0, machine_s - own_s) / seconds,
    }


class _Child:
    """A process of bulk_processes.py; a context manager."""

    def __init__(self, role: str, part: Part) -> None:
        self._command = [sys.executable, "-m", "swarmnode.bench.bulk_processes", role, *part.words]

    def __enter__(self) -> _Child:
        # In a session of its own: a terminal's Ctrl-C is this process's affair, and ends it by its input.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        self._process.communicate(timeout=MOVE_SECONDS)  # closes its input, with which it ends

    def read(self) -> str:
        """The next line that it prints. Raises SwarmnodeError where it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise self._failed()
        return line

    def write(self, line: str = "") -> None:
        """Tell it something. Raises SwarmnodeError where it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None

    def _failed(self) -> SwarmnodeError:
        return SwarmnodeError(f"a process of the benchmark failed: {' '.join(self._command)}")

    def usage(self) -> dict[str, float]:
        """Of a serving one: CPU seconds so far."""
        self.write()
        usage: dict[str, float] = json.loads(self.read())
        return usage


def _less(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in before}


def _machine_busy_s() -> float:
    """CPU seconds of everything on this machine, and what its host took from it."""
    idle = ("idle", "iowait", "guest", "guest_nice")  # guests are in user already
    return float(sum(value for name, value in psutil.cpu_times()._asdict().items() if name not in idle))


# -- what is made of it


def _row(way: str, layout: Layout, figures: Sequence[Json]) -> Json:
    """The medians of a case's measurements."""
    middle: dict[str, float] = {name: statistics.median(one[name] for one in figures) for name in figures[0]}
    rates = [one["MBps"] for one in figures]
    return {
        "way": way,
        "connections": layout.connections,
        "processes": layout.processes,
        **{name: float(f"{value:.4g}") for name, value in middle.items()},
        "MBps_low": round(min(rates), 1),
        "MBps_high": round(max(rates), 1),
        "of_far": float(f"{middle['MBps'] * MB * 8 / (FAR_GBPS * 1e9):.3g}"),
        "limit": limit(middle, os.cpu_count() or 1),
        "n": len(figures),
        "note": NOTES[way],
    }


def limit(figures: Mapping[str, float], cpus: int) -> str:
    """What is busy nearly all the time, in words."""
    threads = {
        "the sender's loop": figures["sender_loop"],
        "the receiver's loop": figures["receiver_loop"],
        "hashing and writing": figures["store"],
    }
    busy = [name for name, share in threads.items() if share >= BUSY]
    if figures["cores"] >= FULL * cpus:
        busy.append("all cores")
    elif figures["cores"] + figures["others"] >= FULL * cpus:
        busy.append("other work on the cores")
    return ", ".join(busy) or "nothing alone: they wait for each other"


def table(result: Mapping[str, Any]) -> str:
    """The rows as text."""
    far = f"{result['far_Gbps']:g} Gb/s would take {result['far_ms']:g} ms"
    head = f"{'MB/s':>7}{'(low–high)':>14}{'vs tls':>8}{'s/GB out':>10}{'in':>7}{'loop out':>10}{'in':>6}{'store':>7}"
    lines = [
        f"{result['megabytes']:g} MB; {result['machine']}; {far}",
        f"{'way':<14}{'conn':>5}{'pairs':>6}{head}{'cores':>7}{'others':>8}  limit",
    ]
    for row in result["rows"]:
        ratio = "" if row["vs_tls"] is None else f"{row['vs_tls']:.2f}×"
        spread = f"({row['MBps_low']:.0f}–{row['MBps_high']:.0f})"
        lines.append(
            f"{row['way']:<14}{row['connections']:>5}{row['processes']:>6}{row['MBps']:>7.0f}{spread:>14}{ratio:>8}"
            f"{row['sender_s_per_GB']:>10.2f}{row['receiver_s_per_GB']:>7.2f}{row['sender_loop']:>10.0%}"
            f"{row['receiver_loop']:>6.0%}{row['store']:>7.0%}{row['cores']:>7.2f}{row['others']:>8.2f}  {row['limit']}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or with --json the data."""
    made = parser("bench bulk", __doc__)
    made.add_argument("--megabytes", type=positive, default=MEGABYTES)
    made.add_argument("--rounds", type=count, default=ROUNDS)
    made.add_argument("--way", action="append", choices=WAYS, help="only this one (may be repeated)")
    made.add_argument("--quick", action="store_true", help="a tenth of the bytes, once: shape, not figures")

    def measure(given: argparse.Namespace) -> Result:
        return run(given.quick, given.megabytes, rounds=given.rounds, ways=given.way or ())

    return run_command(made, arguments, measure, lambda result, _given: print(table(result)))


if __name__ == "__main__":
    raise SystemExit(main())
