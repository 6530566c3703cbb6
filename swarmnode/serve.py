"""Runs a node in the foreground until Ctrl-C, SIGTERM or a closed terminal. Called by `up`.

In a terminal: plain lines while it starts, then the live view (`dashboard/`), then plain lines again. Elsewhere, with
--headless or --json: its events, one line each.

Nothing that is said holds the node up or ends it, whatever becomes of the output (transport/line_writer.py). Where
lines could not be written one says how many; with --json it is {"event": "lines-missing", "lines": N}.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

from swarmnode.config import NodeConfig
from swarmnode.dashboard.mode import Mode
from swarmnode.event_lines import STAGES, event_line, stage_name
from swarmnode.event_log import MAX_TEXT, EventLog
from swarmnode.node import Node
from transport.line_writer import LineWriter
from transport.log_format import LogOutput, hide_secrets

if TYPE_CHECKING:
    from swarmnode.dashboard.live import LiveView
    from swarmnode.dashboard.progress import Stages
    from swarmnode.dashboard.terminal import Terminal

LOOK_S = 0.25  # seconds between two snapshots for the live view
LOOK_SHARE = 0.01  # of the loop's time that snapshots may take
log = logging.getLogger(__name__)


def run_node(
    config: NodeConfig, *, as_json: bool, headless: bool, stop_on_eof: bool = False, logs: LogOutput | None = None
) -> None:
    """Start a node and wait. Raises what `Node.start` raises.

    `stop_on_eof`: closing standard input ends it too. `logs`, of this process: while the live view has the terminal
    that they go to, the view shows them.
    """
    with contextlib.suppress(OSError, ValueError):  # standard error is no file
        faulthandler.enable()  # a mapped file that is cut under us kills the process: say so at least
    terminal = None
    if not (as_json or headless or stop_on_eof):
        from swarmnode.dashboard.terminal import open_terminal  # noqa: PLC0415

        terminal = open_terminal()
    if terminal is None:
        printer = EventPrinter(as_json=as_json, progress=sys.stdout.isatty() and not headless and not as_json)
        try:
            asyncio.run(_run(config, printer, stop_on_eof))
        finally:
            printer.close()
        return
    try:
        asyncio.run(_run_in_terminal(config, terminal, logs if _errors_go_to_the_terminal() else None))
    finally:
        terminal.close()


def _errors_go_to_the_terminal() -> bool:
    """Is standard error the terminal that standard output is?"""
    try:
        return os.isatty(2) and os.fstat(1).st_rdev == os.fstat(2).st_rdev
    except OSError:
        return False


async def _run_in_terminal(config: NodeConfig, terminal: Terminal, logs: LogOutput | None) -> None:
    from swarmnode.dashboard.job_control import job_control  # noqa: PLC0415
    from swarmnode.dashboard.live import LiveView  # noqa: PLC0415
    from swarmnode.dashboard.progress import Stages  # noqa: PLC0415

    loop = asyncio.get_running_loop()
    leave = asyncio.Event()
    stages = Stages()
    view = LiveView(terminal, own=True, stages=stages, on_leave=lambda: loop.call_soon_threadsafe(leave.set))
    view.start()
    if logs is not None:
        logs.diverted = lambda record, line: view.record(record.created, _in_short(record), line)
    try:
        with job_control(loop, view):
            await _run(config, ViewPrinter(view, stages), False, view, leave)
    finally:
        await asyncio.to_thread(view.finish)
        if logs is not None:
            logs.diverted = None


def _in_short(record: logging.LogRecord) -> str:
    """A record as one line beside events, which have the time already."""
    error = record.exc_info[1] if record.exc_info else None
    text = f"{record.levelname.lower()} {record.name}: {record.getMessage()}"
    return hide_secrets(text if error is None else f"{text} ({type(error).__name__}: {error})")[:MAX_TEXT]


async def _run(
    config: NodeConfig,
    printer: EventPrinter | ViewPrinter,
    stop_on_eof: bool,
    view: LiveView | None = None,
    leave: asyncio.Event | None = None,
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        if stop.is_set():
            hurry.set()  # the second time: do not wait for others
        stop.set()

    if stop_on_eof:
        threading.Thread(target=_wait_for_eof, args=(loop, stop), daemon=True).start()
    ending = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        ending.append(signal.SIGHUP)
    for number in ending:
        try:
            loop.add_signal_handler(number, end)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(end))
    node = Node(config, EventLog(printer))
    starting = asyncio.ensure_future(node.start())
    stopping = asyncio.ensure_future(stop.wait())
    over = asyncio.ensure_future(node.over.wait())
    leaving = asyncio.ensure_future(leave.wait() if leave is not None else asyncio.Event().wait())
    showing: asyncio.Task[None] | None = None
    try:
        await asyncio.wait({starting, stopping, over}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
        else:
            starting.result()
            if view is not None:
                showing = asyncio.create_task(_show(node, view))
            await asyncio.wait({stopping, over, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                stop.set()  # as Ctrl-C does: the next one is the second
            if view is not None:
                view.show(Mode.LINES)
            printer("stopping")
        if node.why_over is not None:
            raise node.why_over
    finally:
        for waiting in (stopping, over, leaving, *([showing] if showing is not None else [])):
            waiting.cancel()
        await node.close(hurry)
        printer.finish()


async def _show(node: Node, view: LiveView) -> None:
    """Give the live view a snapshot whenever it wants one, for a small share of the loop's time. Until cancelled."""
    view.show(Mode.SCREEN)
    while not view.is_over:
        took = 0.0
        if view.wants_status:
            begun = time.perf_counter()
            try:
                view.post(node.status())
            except Exception as error:  # what cannot be shown must not end what can be served
                log.exception("snapshot_failed")
                view.trouble(f"no snapshot of this node: {type(error).__name__}: {error}")
            took = time.perf_counter() - begun
        await asyncio.sleep(max(LOOK_S, took / LOOK_SHARE))


def _wait_for_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop has ended before
        loop.call_soon_threadsafe(stop.set)


class ViewPrinter:
    """Hands a node's events to the live view, which shows them as lines while it is not on the screen. Any thread."""

    def __init__(self, view: LiveView, stages: Stages) -> None:
        self._view, self._stages = view, stages
        self._holding = ""

    def __call__(self, event: str, **fields: Any) -> None:
        """Show one event."""
        if event in STAGES:
            self._stages.update(event, fields)
            return
        line = event_line(event, fields)
        if event == "ticket":
            self._view.ticket(line)
        if event == "holding":
            if line == self._holding:
                return
            self._holding = line
        self._view.line(line)

    def finish(self) -> None:
        """Nothing: the view is finished by whoever made it."""


class EventPrinter:
    """Prints a node's events: JSON lines, or one plain line each. Any thread; returns at once, except `close`.

    `stream`: other than standard output.
    """

    def __init__(self, *, as_json: bool, progress: bool, stream: TextIO | None = None) -> None:
        self._out = LineWriter(stream or sys.stdout, _lines_missing_json if as_json else _lines_missing)
        self._json, self._progress = as_json, progress
        self._on_progress_line = False
        self._holding = ""

    def __call__(self, event: str, **fields: Any) -> None:
        """Print one event."""
        if self._json:
            self._out.write(json.dumps({"event": event, **fields}) + "\n")
            return
        if event in STAGES:
            if self._progress:
                self._out.write("\r\x1b[K" + _progress(event, fields))
                self._on_progress_line = True
            return
        line = event_line(event, fields)
        if event == "holding":  # carried out once more, and the same as before: nothing that people need to hear
            if line == self._holding:
                return
            self._holding = line
        self._out.write(("\n" if self._on_progress_line else "") + line + "\n")
        self._on_progress_line = False

    def finish(self) -> None:
        """End a progress line that stands alone."""
        if self._on_progress_line:
            self._out.write("\n")

    def close(self) -> None:
        """Have the last words written, within a second."""
        self._out.flush()


def _lines_missing(lines: int) -> str:
    return f"({lines} line{'s' if lines > 1 else ''} could not be written and are missing here)"


def _lines_missing_json(lines: int) -> str:
    return json.dumps({"event": "lines-missing", "lines": lines})


def _progress(event: str, fields: dict[str, Any]) -> str:
    done, total = fields.get("done", 0), fields.get("total", 1) or 1
    return f"{stage_name(event, fields)} {100 * done / total:.0f} %"
