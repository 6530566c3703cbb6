"""A view of the node of this machine, through its control channel. A shell; called by `swarmnode dashboard`.

Or, with `peer`, of another member of its swarm: the node of this machine asks it (`swarmnode/member_view.py`).

A snapshot is asked for whenever the view wants one, each over a connection of its own: a view that is suspended, or
whose terminal stands still, asks for nothing. A node that ends and comes back is picked up again.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from swarmnode import control
from swarmnode.coordination.view_rules import LONGEST_S
from swarmnode.dashboard.cells import encoded
from swarmnode.dashboard.changes import changes
from swarmnode.dashboard.job_control import job_control
from swarmnode.dashboard.live import LiveView
from swarmnode.dashboard.look import clock
from swarmnode.dashboard.mode import Mode
from swarmnode.dashboard.model import Model
from swarmnode.dashboard.terminal import Terminal
from swarmnode.errors import ControlError, NodeSilent, NoNode, SwarmnodeError
from swarmnode.status import NodeStatus

APART_S = 1.0  # between two snapshots where figures per second are wanted of two alone


async def status_of(state_dir: Path, peer: str = "") -> NodeStatus:
    """One snapshot. Raises NoNode, NodeSilent, ControlError; UsageError where `peer` means several members."""
    if peer:
        answer = await control.request_one(state_dir, "member-status", within=LONGEST_S + control.ANSWER_S, peer=peer)
    else:
        answer = await control.request_one(state_dir, "status")
    return read_status(answer.get("status"))


def read_status(value: Any) -> NodeStatus:
    """A snapshot from JSON, of any version that has the same fields. Raises ControlError."""
    try:
        return msgspec.convert(value, NodeStatus)
    except msgspec.ValidationError as error:
        raise ControlError(f"the node's status is not understood: {error}; is it of another version?") from None


async def sampled(state_dir: Path, model: Model, apart_s: float = APART_S, *, peer: str = "") -> None:
    """Two snapshots, so that a still has figures per second too. Raises NoNode, ControlError, UsageError."""
    model.take(first := await status_of(state_dir, peer), time.monotonic())
    await asyncio.sleep(apart_s)
    model.take(second := await status_of(state_dir, first.peer if peer else ""), time.monotonic())
    model.set_trouble(_left_out(second))


def _left_out(status: NodeStatus) -> str:
    return f"too large to be told whole; left out: {status.left_out}" if status.left_out else ""


async def watch_plainly(state_dir: Path, interval: float, *, peer: str = "") -> None:
    """A line for each thing that changes, on standard output, until cancelled or the node ends.

    Raises NoNode where none runs at the beginning, NodeSilent where it does not answer then, ControlError,
    BrokenPipeError. Another member may go and come back.
    """
    before: NodeStatus | None = None
    offset = time.localtime().tm_gmtoff
    was_silent = False
    while True:
        try:
            now = await status_of(state_dir, before.peer if before is not None and peer else peer)
        except NoNode:
            if before is None:
                raise
            _say(f"{clock(time.time(), offset)} the node has ended")
            return
        except ControlError as error:
            if before is None or not (peer or isinstance(error, NodeSilent)):
                raise
            if not was_silent:
                _say(f"{clock(time.time(), offset)} {error}")
            was_silent = True
            if _nobody_reads():
                raise BrokenPipeError from None
            await asyncio.sleep(interval)
            continue
        if was_silent:
            _say(f"{clock(time.time(), offset)} the node answers again")
        was_silent = False
        for at, text in changes(before, now):
            _say(f"{clock(time.time() if at is None else at, offset)} {text}")
        before = now
        await asyncio.sleep(interval)
        if _nobody_reads():
            raise BrokenPipeError


def _nobody_reads() -> bool:
    """Has the other end of standard output been closed? A quiet node would not find out by writing."""
    if not hasattr(select, "poll"):
        return False
    asked = select.poll()
    asked.register(1, 0)  # errors alone
    return bool(asked.poll(0))


def _say(line: str) -> None:
    sys.stdout.buffer.write(encoded(line + "\n", sys.stdout.encoding or "utf-8"))
    sys.stdout.buffer.flush()


async def watch(state_dir: Path, interval: float, terminal: Terminal, *, peer: str = "") -> None:
    """The live view, until the person quits. Raises NoNode where none runs at the beginning, ControlError."""
    first: NodeStatus | None = None
    trouble = ""
    try:
        first = await status_of(state_dir, peer)
        trouble = _left_out(first)
        peer = first.peer if peer else ""  # the same one, whatever it will be called
    except NodeSilent as error:  # it may go on at any time
        trouble = str(error)
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    tickets: set[asyncio.Task[None]] = set()

    async def fetch_ticket() -> None:
        try:
            made: Mapping[str, Any] = await control.request_one(state_dir, "ticket")
            view.ticket(f"to let devices in, run there:\n  swarmnode up {made.get('ticket')}\ngood for 24 hours")
        except SwarmnodeError as error:
            view.no_ticket(str(error))

    def want_ticket() -> None:
        task = loop.create_task(fetch_ticket())
        tickets.add(task)
        task.add_done_callback(tickets.discard)

    view = LiveView(
        terminal,
        own=False,
        on_leave=lambda: loop.call_soon_threadsafe(over.set),
        on_ticket=lambda: loop.call_soon_threadsafe(want_ticket),
    )
    if first is not None:
        view.post(first)
    view.trouble(trouble)
    view.show(Mode.SCREEN)
    view.start()
    for name in ("SIGTERM", "SIGHUP"):
        with contextlib.suppress(NotImplementedError, AttributeError):  # Windows
            loop.add_signal_handler(getattr(signal, name), over.set)
    looking = asyncio.create_task(_keep_looking(state_dir, view, interval, peer))
    quitting = asyncio.create_task(over.wait())
    try:
        with job_control(loop, view):
            await asyncio.wait({looking, quitting}, return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            looking.result()
    finally:
        for task in (looking, quitting, *tickets):
            task.cancel()
        await asyncio.to_thread(view.finish)


async def _keep_looking(state_dir: Path, view: LiveView, interval: float, peer: str) -> None:
    """Until the view has ended by itself, as it does where its terminal is closed."""
    while not view.is_over:
        await asyncio.sleep(interval)
        if not view.wants_status:
            continue
        try:
            view.post(status := await status_of(state_dir, peer))
            view.trouble(_left_out(status))
        except NoNode:
            view.trouble("the node has ended; waiting for it to come back")
        except ControlError as error:
            view.trouble(str(error))
