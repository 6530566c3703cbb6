"""The drawing thread on a terminal that is made up."""

from __future__ import annotations

import threading
import time

from swarmnode.dashboard.fake import fake_status
from swarmnode.dashboard.live import FRAME_S, MAX_LINES, LiveView
from swarmnode.dashboard.mode import Mode
from swarmnode.dashboard.terminal import Ready

PATIENCE_S = 20.0


class Scripted:
    """Takes `room` bytes in all, then stands still; every wait is written down."""

    encoding = "utf-8"

    def __init__(self, room: int) -> None:
        self.room, self.sent = room, b""
        self.stuck_waits: list[float] = []
        self.keys = b""
        self._woken = threading.Event()

    def size(self) -> tuple[int, int]:
        return (80, 24)

    def is_ours(self) -> bool:
        return True

    def take_keys(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def write(self, data: bytes | bytearray) -> int:
        taken = bytes(data[: self.room])
        self.room -= len(taken)
        self.sent += taken
        return len(taken)

    def wait(self, timeout: float, *, writing: bool, reading: bool) -> Ready:
        if writing and self.room:
            return Ready(writable=True)
        if writing:
            self.stuck_waits.append(timeout)
        self._woken.wait(timeout)
        self._woken.clear()
        keys, self.keys = (self.keys, b"") if reading else (b"", self.keys)
        return Ready(keys)

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        pass

    def press(self, keys: bytes) -> None:
        """One read, and what follows comes later."""
        self.keys = keys
        self.wake()
        until(lambda: not self.keys)


def until(check: object) -> None:
    assert callable(check)
    end = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_terminal_that_stands_still_is_waited_for_and_then_gets_the_newest() -> None:
    terminal = Scripted(room=100)
    view = LiveView(terminal, own=False, on_leave=lambda: None)
    view.show(Mode.SCREEN)
    view.post(fake_status(0, 3))
    view.start()
    until(lambda: len(terminal.stuck_waits) >= 4)
    assert min(terminal.stuck_waits) >= FRAME_S  # it sleeps, it does not try again and again
    assert not view.wants_status
    view.post(fake_status(100, 3))
    view.post(fake_status(200, 3))
    assert len(terminal.sent) == 100
    terminal.room = 1 << 20
    until(lambda: b"600" in terminal.sent)  # tokens at step 200
    assert b"tokens \x1b[0m300" not in terminal.sent
    view.finish()
    assert terminal.sent.endswith(b"\x1b[?1049l")
    assert view.is_over


def test_what_has_not_changed_is_not_sent_again() -> None:
    terminal = Scripted(room=1 << 20)
    view = LiveView(terminal, own=False, on_leave=lambda: None)
    view.show(Mode.SCREEN)
    view.start()
    view.post(fake_status(5, 3))
    until(lambda: b"q quit" in terminal.sent and view.wants_status)
    time.sleep(2 * FRAME_S)
    sent = len(terminal.sent)
    for _ in range(3):
        view.post(fake_status(5, 3))
        until(lambda: view.wants_status)
    again = terminal.sent[sent:]  # a sparkline has moved perhaps: it has a cell for each second
    assert b"study" not in again
    assert b"q quit" not in again
    view.finish()


def test_lines_and_the_ticket_are_said_again_around_the_screen_and_cannot_move_the_cursor() -> None:
    terminal = Scripted(room=1 << 20)
    left = threading.Event()
    view = LiveView(terminal, own=True, on_leave=left.set)
    view.start()
    view.line("ready \x1b[2J")
    view.ticket("swarmnode up swarm1abc")
    until(lambda: b"ready" in terminal.sent)
    assert b"ready \xc2\xb7[2J\n" in terminal.sent
    view.show(Mode.SCREEN)
    view.post(fake_status(1, 3))
    until(lambda: b"q quit" in terminal.sent)
    terminal.keys = b"q"
    terminal.wake()
    until(lambda: b"y stops it" in terminal.sent)
    assert not left.is_set()
    terminal.keys = b"y"
    terminal.wake()
    assert left.wait(PATIENCE_S)
    view.show(Mode.LINES)
    view.line("stopping")
    view.finish()
    assert terminal.sent.endswith(b"swarmnode up swarm1abc\nstopping\n")


def test_what_is_pasted_does_not_stop_the_node() -> None:
    terminal = Scripted(room=1 << 20)
    left = threading.Event()
    view = LiveView(terminal, own=True, on_leave=left.set)
    view.start()
    view.show(Mode.SCREEN)
    view.post(fake_status(1, 3))
    until(lambda: b"q quit" in terminal.sent)
    assert b"\x1b[?2004h" in terminal.sent
    terminal.press(b"\x1b[200~sq")
    terminal.press(b"y\x1b[201~")
    terminal.press(b"qy")  # as from a terminal that does not mark what is pasted
    until(lambda: b"y stops it" in terminal.sent)
    assert not left.is_set()
    terminal.press(b"n")
    terminal.press(b"t")  # on the normal screen
    until(lambda: b"any key goes back" in terminal.sent)
    terminal.press(b"\x1b[200~q\x1b[201~")
    view.finish()
    assert not left.is_set()
    assert terminal.sent.rindex(b"\x1b[?2004l") > terminal.sent.rindex(b"\x1b[?2004h")


def test_records_of_the_log_are_events_on_the_screen_and_lines_elsewhere() -> None:
    terminal = Scripted(room=1 << 20)
    view = LiveView(terminal, own=True, on_leave=lambda: None)
    assert not view.record(0.0, "early", "early")  # whoever logs writes it
    view.start()
    assert view.record(4e9 + 1, "warning x: one", "WARNING x one")
    until(lambda: b"WARNING x one\n" in terminal.sent)
    view.show(Mode.SCREEN)
    until(lambda: view.wants_status)
    terminal.press(b"\t\t\t")  # the page of events
    assert view.record(4e9 + 2, "warning x: \x1btwo", "WARNING x two")
    view.post(fake_status(1, 3))
    until(lambda: b"warning x: \xc2\xb7two" in terminal.sent)
    assert b"warning x: one" in terminal.sent
    view.show(Mode.LINES)
    assert view.record(4e9 + 3, "warning x: three", "WARNING x three")
    until(lambda: b"WARNING x three\n" in terminal.sent)
    view.finish()
    assert b"WARNING x two" not in terminal.sent
    assert not view.record(4.0, "late", "late")


def test_lines_that_a_terminal_never_took_are_counted() -> None:
    terminal = Scripted(room=0)
    view = LiveView(terminal, own=True, on_leave=lambda: None)
    for number in range(MAX_LINES + 7):
        view.line(f"line {number}")
    view.start()
    terminal.room = 1 << 20
    until(lambda: b"line %d\n" % (MAX_LINES + 6) in terminal.sent)
    assert terminal.sent.startswith(b"(here 7 lines are missing: the terminal stood still)\nline 7\n")
    view.finish()


def test_finishing_does_not_wait_for_a_terminal_that_stands_still() -> None:
    terminal = Scripted(room=10)
    view = LiveView(terminal, own=True, on_leave=lambda: None)
    view.show(Mode.SCREEN)
    view.post(fake_status(1, 3))
    view.start()
    until(lambda: len(terminal.stuck_waits) > 0)
    view.finish()
    assert view.is_over
