"""The thread that reads keys and draws. Everything else hands it things and never waits for it.

    lines    what is said goes on the normal screen, with a line that moves for what is under way
    screen   the live view, on the alternate screen, at most four frames a second
    ticket   the normal screen again, with nothing but the ticket, so that it can be copied; a key goes back
    apart    another program has the terminal (Ctrl-Z, `bg`): nothing is drawn, nothing is read

A frame is made only when the last one has gone out whole and something has changed. A terminal that stands still costs
a select per quarter of a second; when it moves again it gets the newest frame, not those between.

What is pasted counts as no key. A question is answered by a key that comes after it was seen: not by one that was read
together with the key that brought it up.

Used by `serve.py` for a node's own view and by `attached.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from swarmnode.dashboard.cells import clean, encoded, fit, width_of
from swarmnode.dashboard.keys import KeyReader, press
from swarmnode.dashboard.layout import compose
from swarmnode.dashboard.look import ASCII, UNICODE, Look
from swarmnode.dashboard.mode import Mode
from swarmnode.dashboard.model import Model
from swarmnode.dashboard.progress import Stages
from swarmnode.dashboard.screen import ENTER, LEAVE, LEAVE_PASTES, MARK_PASTES, Screen
from swarmnode.dashboard.terminal import Terminal, TerminalGone
from swarmnode.dashboard.ui import Overlay, Ui
from swarmnode.status import EventStatus, NodeStatus

FRAME_S = 0.25
MAX_LINES = 1000  # that wait for a terminal that stands still; the oldest go
MAX_RECORDS = 200  # of this process's log, beside the node's events
MAX_BUFFERED = 1 << 16  # bytes of lines handed to the terminal
ESCAPE_S = 0.05  # an ESC after which nothing comes for so long was the key
PASTE_S = 2.0  # a paste that stands still for so long is over
FLUSH_S = 1.0  # how long the last words may take
_CLEAR_LINE = b"\r\x1b[K"
_NO_TICKET = "there is no ticket here: only the node that founded the swarm gives them (swarmnode ticket)"
log = logging.getLogger(__name__)


class LiveView:
    """See the module. All methods may be called from any thread and return at once, except `apart` and `finish`.

    `own`: it is the node's own view, whose end is the node's. `on_leave` is called on the drawing thread when the
    person quits, `on_ticket` when a ticket is wanted and none is known: `ticket` brings it.
    """

    def __init__(
        self,
        terminal: Terminal,
        *,
        own: bool,
        on_leave: Callable[[], object],
        on_ticket: Callable[[], object] | None = None,
        stages: Stages | None = None,
    ) -> None:
        self._terminal = terminal
        self._on_leave, self._on_ticket = on_leave, on_ticket
        self._own = own
        self.look: Look = UNICODE if "utf" in terminal.encoding.lower() else ASCII
        self._screen = Screen(colour=not os.environ.get("NO_COLOR"), encoding=terminal.encoding)
        self._model = Model(utc_offset_s=time.localtime().tm_gmtoff)
        self._ui = Ui(asks_to_leave=own)
        self._keys = KeyReader()
        self._stages = stages if stages is not None else Stages()
        # handed over
        self._wanted = self._after = Mode.LINES  # `_after` it was apart
        self._status: NodeStatus | None = None
        self._ticket = self._no_ticket = ""
        self._lines: deque[tuple[Mode, str]] = deque(maxlen=MAX_LINES)  # and when they were said
        self._missed = 0  # lines that went
        self._records: deque[EventStatus] = deque(maxlen=MAX_RECORDS)
        self._takes_records = False
        self._records_lock = threading.Lock()
        self._trouble = ""
        self._is_apart = threading.Event()
        self._again = False  # others may have used the terminal
        # the thread's own
        self._on_screen = False
        self._marks_pastes = False
        self._keys_at = 0.0  # when the last ones came
        self._shows_ticket = ""
        self._pending = bytearray()
        self._drawn: tuple[object, ...] = ()
        self._next_frame = 0.0
        self._moving = ""  # the line that moves, as it is shown
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)

    # ---- from any thread

    def start(self) -> None:
        """Begin, with lines."""
        self._takes_records = True
        self._thread.start()

    @property
    def wants_status(self) -> bool:
        """Would a snapshot be looked at? Not while the terminal stands still, or the last one was not taken."""
        return self._status is None and self._wanted is Mode.SCREEN and not self._ui.paused and not self._pending

    @property
    def is_over(self) -> bool:
        """Has the thread ended?"""
        return not self._thread.is_alive()

    def post(self, status: NodeStatus) -> None:
        """The newest snapshot."""
        self._status = status

    def line(self, text: str) -> None:
        """Something to say; in the live view the event log says it."""
        if len(self._lines) == MAX_LINES:
            self._missed += 1
        self._lines.append((self._wanted, text))
        self._terminal.wake()

    def record(self, at: float, text: str, line: str) -> bool:
        """A record of this process's log, `at` seconds since 1970: `text` for the event log, else `line`.

        False where it has not been taken, because the terminal is not the view's any more.
        """
        if not self._takes_records:
            return False
        with self._records_lock:
            self._records.append(EventStatus(0, at, "log", text))
        self.line(line)
        return True

    def ticket(self, text: str) -> None:
        """What `t` shows, and what is said again at the end of a node's own view."""
        self._ticket = text
        self._terminal.wake()

    def no_ticket(self, why: str) -> None:
        """None could be had this time."""
        self._no_ticket = why
        self._terminal.wake()

    def trouble(self, text: str) -> None:
        """What keeps the view from being fresh, "" for nothing."""
        self._trouble = text

    def show(self, mode: Mode) -> None:
        """Lines or screen from now on."""
        self._wanted = mode
        self._terminal.wake()

    def apart(self) -> None:
        """Leave the terminal as it was found, because this process is about to be suspended."""
        if self._wanted is Mode.APART:
            return
        self._is_apart.clear()
        self._after = self._wanted
        self._wanted = Mode.APART
        self._terminal.wake()
        self._is_apart.wait(FLUSH_S)

    def resume(self) -> None:
        """This process goes on: the terminal may look like anything now."""
        self._again = True
        if self._wanted is Mode.APART:
            self._wanted = self._after
        self._terminal.wake()

    def finish(self) -> None:
        """Say what is left to say and give the terminal back; at most about a second."""
        self._wanted = Mode.END
        self._terminal.wake()
        if self._thread.is_alive():
            self._thread.join(FLUSH_S + 0.5)

    # ---- the thread

    def _run(self) -> None:
        if sys.platform != "win32":  # nothing that this thread does with the terminal may stop the node
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU, signal.SIGTTIN})
        try:
            self._loop()
        except TerminalGone:
            pass
        except Exception:  # a view must never take the node with it
            self._takes_records = False
            log.exception("dashboard_failed")
        finally:
            self._takes_records = False
            self._terminal.give_back()
            self._is_apart.set()

    def _loop(self) -> None:
        end = 0.0
        while True:
            now = time.monotonic()
            self._follow(now)
            if self._wanted is Mode.END:
                end = end or now + FLUSH_S
                if (not self._pending and not self._lines) or now > end:
                    return
            if self._pending:
                written = self._terminal.write(self._pending)
                del self._pending[:written]
            due = FRAME_S if self._pending else max(0.0, self._next_frame - now)  # nothing is due before it is out
            wait = min(due, self._patience()) if self._keys.waits else due
            reading = self._wanted is Mode.SCREEN and self._terminal.is_ours()
            ready = self._terminal.wait(min(wait, FRAME_S), writing=bool(self._pending), reading=reading)
            keys: list[str] = []
            if ready.keys:
                self._keys_at = time.monotonic()
                keys = self._keys.feed(ready.keys)
            elif self._keys.waits and time.monotonic() - self._keys_at >= self._patience():
                keys = self._keys.pause()
            if keys and self._wanted is Mode.SCREEN:
                self._pressed(keys)

    def _patience(self) -> float:
        return PASTE_S if self._keys.is_pasting else ESCAPE_S

    def _follow(self, now: float) -> None:
        """Do what is due in the mode that is wanted."""
        wanted = self._wanted
        if self._again:
            self._again = False
            self._on_screen = False
            self._screen.forget()
            self._moving = ""
            self._pending.clear()
            self._drawn = ()
        if not self._terminal.is_ours():
            self._on_screen = self._marks_pastes = False  # whoever has the terminal now has changed it
        elif wanted is Mode.SCREEN:
            self._follow_screen(now)
            return
        if self._on_screen:
            self._leave_screen()
        elif self._marks_pastes:  # the ticket was shown
            self._pending += LEAVE_PASTES
        self._marks_pastes = False
        self._terminal.give_back()
        if wanted is Mode.APART:
            if not self._pending:
                self._is_apart.set()
            self._next_frame = now + FRAME_S
            return
        self._say(now)

    def _follow_screen(self, now: float) -> None:
        if self._ui.overlay is Overlay.TICKET:
            self._follow_ticket(now)
            return
        if not self._on_screen:
            self._enter_screen()
        while self._lines and self._lines[0][0] is Mode.SCREEN:
            self._lines.popleft()  # the event log has them
            self._missed = 0
        if self._pending or now < self._next_frame:
            return
        self._next_frame = now + FRAME_S
        status, self._status = self._status, None
        if status is not None and not self._ui.paused:
            self._model.take(self._with_records(status), now)
        self._model.set_progress(self._stages.lines(self.look))
        self._model.set_trouble(self._trouble)
        size = self._terminal.size()
        drawn = (self._model.version, self._ui, size)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self._pending += self._screen.update(compose(self._model, self._ui, *size, self.look), size[0])

    def _with_records(self, status: NodeStatus) -> NodeStatus:
        """With what was logged among the events."""
        with self._records_lock:
            records = list(self._records)
        if not records:
            return status
        return structs.replace(status, events=sorted([*status.events, *records], key=lambda one: one.at))

    def _follow_ticket(self, now: float) -> None:
        """On the normal screen the ticket is one line to the terminal, however wide: it is copied whole."""
        self._next_frame = now + FRAME_S
        if self._on_screen:
            self._no_ticket = ""
            self._pending.clear()
            self._pending += LEAVE
            self._on_screen = False
            self._screen.forget()
            if not self._ticket and self._on_ticket is not None:
                self._on_ticket()
        asking = "asking the node for a ticket" if self._on_ticket is not None else _NO_TICKET
        text = self._ticket or clean(self._no_ticket) or asking
        if text != self._shows_ticket:
            self._shows_ticket = text
            self._pending += self._bytes(f"\n{text}\n\n(any key goes back)\n")

    def _pressed(self, keys: list[str]) -> None:
        self._next_frame = 0.0  # at once
        if self._ui.overlay is Overlay.TICKET:
            self._ui = replace(self._ui, overlay=Overlay.NONE)
            self._shows_ticket = ""
            return
        for key in keys:
            if key == "\x0c":
                self._screen.forget()
                self._drawn = ()
            order = [row.status.peer for row in self._model.shown(self._ui)]
            self._ui = press(self._ui, key, order)
            if self._ui.has_left:
                self._ui = replace(self._ui, has_left=False)
                self._on_leave()
                return
            if self._ui.overlay in (Overlay.TICKET, Overlay.LEAVE):  # what came with this key is no answer
                return

    def _enter_screen(self) -> None:
        if self._moving:
            self._pending += _CLEAR_LINE
            self._moving = ""
        self._terminal.take_keys()
        self._pending += ENTER + MARK_PASTES
        self._marks_pastes = True
        self._screen.forget()
        self._drawn = ()
        self._on_screen = True

    def _leave_screen(self) -> None:
        self._pending.clear()  # half a frame means nothing any more
        self._pending += LEAVE_PASTES + LEAVE
        self._on_screen = False
        self._screen.forget()
        if self._own and self._ticket and self._wanted is not Mode.APART:
            self._pending += self._bytes(self._ticket + "\n")

    def _say(self, now: float) -> None:
        if self._missed and self._lines and len(self._pending) < MAX_BUFFERED:
            missed, self._missed = self._missed, 0
            self._say_line(f"(here {missed} lines are missing: the terminal stood still)")
        while self._lines and len(self._pending) < MAX_BUFFERED:
            self._say_line("\n".join(clean(piece) for piece in self._lines.popleft()[1].split("\n")))
        if now < self._next_frame or self._pending:
            return
        self._next_frame = now + FRAME_S
        has_place = self._wanted is Mode.LINES and self._terminal.is_ours()
        under_way = self._stages.lines(self.look) if has_place else []
        columns = self._terminal.size()[0] - 1
        moving = under_way[-1] if under_way else ""
        moving = fit(moving, columns) if width_of(moving) > columns else moving
        if moving != self._moving:
            self._moving = moving
            self._pending += _CLEAR_LINE + self._bytes(moving)

    def _say_line(self, text: str) -> None:
        if self._moving:
            self._pending += _CLEAR_LINE
            self._moving = ""
        self._pending += self._bytes(text + "\n")

    def _bytes(self, text: str) -> bytes:
        return encoded(text, self._terminal.encoding)
