"""What the live view costs: seconds of CPU per frame, at several sizes, with a swarm that does not exist.

    lines   what the view does: a snapshot into the model, the panels, the bytes of the lines that differ
    decode  a snapshot off the control channel, which an attached view does besides
    rich    the same rows as a table of rich, drawn whole each time: what was not chosen
    thread  the thread itself at four frames a second, on a pseudo terminal that somebody reads: all that it takes

Every figure moves from one frame to the next, which is the worst that can happen. `core` is the share of one core at
four frames a second. Not the cost of the snapshot itself, which the node makes.

Called by `python -m swarmnode.bench.dashboard [--peers N] [--frames N] [--json]` and by the tests.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmnode.bench.command import parser, run_command
from swarmnode.dashboard.attached import read_status
from swarmnode.dashboard.fake import fake_status
from swarmnode.dashboard.layout import compose
from swarmnode.dashboard.live import FRAME_S, LiveView
from swarmnode.dashboard.look import UNICODE, amount, millis, spark
from swarmnode.dashboard.mode import Mode
from swarmnode.dashboard.model import Model
from swarmnode.dashboard.screen import Screen
from swarmnode.dashboard.terminal import Ready
from swarmnode.dashboard.ui import Ui
from swarmnode.status import NodeStatus

SIZES = ((80, 24), (120, 40), (200, 50))
WARM = 40  # frames before the measuring: histories are filled


def measure(n_peers: int, frames: int) -> dict[str, Any]:
    """All cases. JSON: {peers, frames, rows: [{case, size, cpu_ms_per_frame, bytes_per_frame, core}]}."""
    statuses = [fake_status(step, n_peers) for step in range(WARM + frames)]
    rows = []
    for size in SIZES:
        rows.append(_row("lines", size, *_lines(statuses, size)))
    encoded = [msgspec.json.encode(status) for status in statuses[WARM:]]
    begun = time.process_time()
    for data in encoded:
        read_status(msgspec.json.decode(data))
    rows.append(_row("decode", None, (time.process_time() - begun) / frames, sum(map(len, encoded)) / frames))
    for size in SIZES:
        rows.append(_row("rich", size, *_rich(statuses, size)))
    if sys.platform != "win32":
        rows += [_row("thread", size, *_thread(statuses, size)) for size in SIZES]
    return {"peers": n_peers, "frames": frames, "rows": rows}


def _row(case: str, size: tuple[int, int] | None, seconds: float, sent: float) -> dict[str, Any]:
    return {
        "case": case,
        "size": f"{size[0]}x{size[1]}" if size is not None else "",
        "cpu_ms_per_frame": round(seconds * 1e3, 3),
        "bytes_per_frame": round(sent),
        "core": f"{100 * seconds / FRAME_S:.2f} %",
    }


def _measured(statuses: Sequence[NodeStatus], draw: Callable[[NodeStatus, float], int]) -> tuple[float, float]:
    """CPU seconds and bytes per frame after the warm ones."""
    begun, sent = 0.0, 0
    for step, status in enumerate(statuses):
        if step == WARM:
            begun, sent = time.process_time(), 0
        sent += draw(status, step * FRAME_S)
    frames = len(statuses) - WARM
    return (time.process_time() - begun) / frames, sent / frames


def _lines(statuses: Sequence[NodeStatus], size: tuple[int, int]) -> tuple[float, float]:
    model, ui, screen = Model(), Ui(), Screen()

    def draw(status: NodeStatus, now: float) -> int:
        model.take(status, now)
        return len(screen.update(compose(model, ui, *size), size[0]))

    return _measured(statuses, draw)


def _rich(statuses: Sequence[NodeStatus], size: tuple[int, int]) -> tuple[float, float]:
    model, ui, out = Model(), Ui(), io.StringIO()
    console = Console(file=out, width=size[0], height=size[1], force_terminal=True, color_system="standard")

    def draw(status: NodeStatus, now: float) -> int:
        model.take(status, now)
        table = Table(box=None, pad_edge=False)
        for title in ("name", "id", "role", "path", "RTT", "", "loss", "up", "down", "why"):
            table.add_column(title, no_wrap=True)
        for row in model.shown(ui)[: size[1] - 2]:
            one = row.status
            table.add_row(
                Text(row.name), one.peer[:8], one.role, Text(row.path, "green"), millis(one.rtt_ms),
                Text(spark(row.spark, 8, UNICODE), "cyan"), f"{100 * one.loss:.1f}%", amount(one.up_Bps),
                amount(one.down_Bps), Text(row.reason, "dim"),
            )  # fmt: skip
        out.seek(0)
        out.truncate()
        console.print(table)
        return len(out.getvalue().encode())

    return _measured(statuses, draw)


def _thread(statuses: Sequence[NodeStatus], size: tuple[int, int]) -> tuple[float, float]:
    """The real thread; its own CPU time and what it takes from the interpreter's other thread."""
    terminal = _Counting(size)
    view = LiveView(terminal, own=False, on_leave=lambda: None)
    view.post(statuses[0])
    view.show(Mode.SCREEN)
    shown = statuses[WARM:][: max(4, min(20, len(statuses) - WARM))]
    view.start()
    begun = time.process_time()
    for status in shown:
        view.post(status)
        time.sleep(FRAME_S)
    took, sent = time.process_time() - begun, terminal.sent
    view.finish()
    return took / len(shown), sent / len(shown)


class _Counting:
    """A terminal of a fixed size behind a pipe that is read by a thread."""

    encoding = "utf-8"

    def __init__(self, size: tuple[int, int]) -> None:
        self._size = size
        self.sent = 0
        self._read, self._write = os.pipe()
        self._woken = threading.Event()
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        while os.read(self._read, 1 << 16):
            pass
        os.close(self._read)

    def size(self) -> tuple[int, int]:
        return self._size

    def is_ours(self) -> bool:
        return True

    def take_keys(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def write(self, data: bytes | bytearray) -> int:
        self.sent += len(data)
        return os.write(self._write, data)

    def wait(self, timeout: float, *, writing: bool, reading: bool) -> Ready:
        if not writing:
            self._woken.wait(timeout)
            self._woken.clear()
        return Ready(writable=writing)

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        os.close(self._write)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    made = parser("python -m swarmnode.bench.dashboard", __doc__)
    made.add_argument("--peers", type=int, default=200, help="how many peers the swarm has")
    made.add_argument("--frames", type=int, default=200, help="frames of each case")

    def run(given: argparse.Namespace) -> dict[str, Any]:
        return measure(max(0, given.peers), max(4, given.frames))

    return run_command(made, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
