"""Runs a node in the foreground: prints its events, ends it on Ctrl-C, SIGTERM or a closed terminal. Called by `up`."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from typing import Any

from swarmnode.config import NodeConfig
from swarmnode.network_events import path_text
from swarmnode.node import Node


def run_node(config: NodeConfig, *, as_json: bool, headless: bool, stop_on_eof: bool = False) -> None:
    """Start a node and wait. Raises what `Node.start` raises. `stop_on_eof`: closing standard input ends it too."""
    with contextlib.suppress(OSError, ValueError):  # standard error is no file
        faulthandler.enable()  # a mapped file that is cut under us kills the process: say so at least
    printer = EventPrinter(as_json=as_json, progress=sys.stdout.isatty() and not headless and not as_json)
    asyncio.run(_run(config, printer, stop_on_eof))


async def _run(config: NodeConfig, printer: EventPrinter, stop_on_eof: bool) -> None:
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
    node = Node(config, printer)
    starting = asyncio.ensure_future(node.start())
    stopping = asyncio.ensure_future(stop.wait())
    over = asyncio.ensure_future(node.over.wait())
    try:
        await asyncio.wait({starting, stopping, over}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
        else:
            starting.result()
            await asyncio.wait({stopping, over}, return_when=asyncio.FIRST_COMPLETED)
            printer("stopping")
        if node.why_over is not None:
            raise node.why_over
    finally:
        stopping.cancel()
        over.cancel()
        await node.close(hurry)
        printer.finish()


def _wait_for_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop has ended before
        loop.call_soon_threadsafe(stop.set)


class EventPrinter:
    """Prints a node's events: JSON lines, or one plain line each. Safe from any thread (one write per line)."""

    def __init__(self, *, as_json: bool, progress: bool) -> None:
        self._json, self._progress = as_json, progress
        self._on_progress_line = False
        self._holding = ""

    def __call__(self, event: str, **fields: Any) -> None:
        """Print one event."""
        if self._json:
            self._write(json.dumps({"event": event, **fields}) + "\n")
            return
        if event in _STAGES:
            if self._progress:
                self._write("\r\x1b[K" + _progress(event, fields))
                self._on_progress_line = True
            return
        line = _line(event, fields)
        if event == "holding":  # carried out once more, and the same as before: nothing that people need to hear
            if line == self._holding:
                return
            self._holding = line
        self._write(("\n" if self._on_progress_line else "") + line + "\n")
        self._on_progress_line = False

    def finish(self) -> None:
        """End a progress line that stands alone."""
        if self._on_progress_line:
            self._write("\n")

    @staticmethod
    def _write(text: str) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            sys.stdout.write(text)
            sys.stdout.flush()


_STAGES = {
    "onboard": "onboarding",
    "slices": "slices",
    "backbone": "fetching the backbone file",
    "verify": "verifying",
    "load": "loading",
}
_LINES = {
    "ready": "ready: {role} of {model}\n  {address}",
    "connected": "connected to {peer} ({path})",
    "attached": "worker {name} attached ({peer})",
    "not-attached": "peer {peer} not attached: {error}",
    "damaged": "{error}; taking it from the source again",
    "lost": "lost {peer}: {reason}",
    "relay-connected": "relay {url} connected",
    "relay-lost": "relay {url} lost: {reason}",
    "relay-left": "relay {url} left: {reason}",
    "relay-failed": "relay {url} not connected: {reason}; trying on",
    "stopping": "stopping",
    "ticket": "to let devices in, run there:\n  swarmnode up {ticket}",
    "waiting-for-model": "a member of the swarm; waiting for its model",
    "model": "the swarm runs {name}",
    "member": "{role} {name} is here ({peer:.8})",
    "member-gone": "{peer:.8} is gone",
    "member-expelled": "{peer:.8} was expelled",
    "key-in-use": "{error}",
    "joined": "{name} joined ({peer:.8})",
    "holding": "holding {experts} experts",
    "holding-trouble": "cannot hold what was assigned: {error}; trying again",
    "handing-over": "handing over {experts} experts; Ctrl-C again to leave at once",
    "discovery-problem": "{error}",
    "plan-problem": "no new plan: {error}",
    "wire": "{note}",
    "note": "{note}",
    "quarantined": "worker {peer:.8} is not asked any more: {why}",
    "task-failed": "task {task} failed: {error}",
    "close-problem": "while closing: {error}",
}


def _line(event: str, fields: dict[str, Any]) -> str:
    if event == "path":
        return _path_line(fields)
    if event == "plan":
        return _plan_line(fields)
    return _LINES[event].format(**fields) if event in _LINES else f"{event} {fields}"


def _plan_line(fields: dict[str, Any]) -> str:
    """As in "plan (a worker came): 9 experts here, 33 on 2 workers, 22 only in this node's file"."""
    parts = [
        f"{fields['local']} experts here",
        f"{sum(fields['workers'].values())} on {len(fields['workers'])} workers",
    ]
    if fields["uncovered"]:
        where = "only in this node's file" if fields["has_file"] else "with nobody: give more --memory or devices"
        parts.append(f"{fields['uncovered']} {where}")
    return f"plan ({fields['why']}): {', '.join(parts)}"


def _path_line(fields: dict[str, Any]) -> str:
    """As in "peer abcd1234: direct-lan 192.168.1.7:5000, 12 ms (was relay)"."""
    rtt, where = fields["rtt_ms"], fields["relay"] or fields["address"]
    detail = fields["reason"] if rtt is None else f"{rtt:.0f} ms" if rtt >= 1 else "< 1 ms"
    there = f"{path_text(fields['path'], where)}, {detail}" if where else detail
    return f"peer {fields['peer']:.8}: {there} (was {fields['was']})"


def _progress(event: str, fields: dict[str, Any]) -> str:
    done, total = fields.get("done", 0), fields.get("total", 1) or 1
    what = _STAGES[event] + (f": {fields['stage']}" if "stage" in fields else "")
    return f"{what} {100 * done / total:.0f} %"
