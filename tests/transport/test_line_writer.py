"""Lines for streams that stand still, are slow or fail: order, what is lost and how it is said, and nobody waits."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from tests.full_pipe import fill, narrow
from transport import line_writer
from transport.line_writer import LineWriter

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes and terminals of POSIX")
PATIENCE_S = 30.0
Pipe = Callable[[], tuple[int, TextIO]]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """pipe() → the end that is read, and a stream that writes to a pipe with little room."""
    opened: list[tuple[int, TextIO]] = []

    def make() -> tuple[int, TextIO]:
        read, write = os.pipe()
        narrow(write)
        opened.append((read, os.fdopen(write, "w", encoding="utf-8")))
        return opened[-1]

    yield make
    for read, stream in opened:
        os.close(read)  # which ends a write that waits
        stream.close()


def missing(lines: int) -> str:
    return f"{lines} missing"


def read_lines(fd: int, last: str) -> list[str]:
    """All lines up to `last`."""
    seen, end = b"", time.monotonic() + PATIENCE_S
    while not seen.decode("utf-8").endswith(last + "\n"):
        assert time.monotonic() < end
        seen += os.read(fd, 1 << 16)
    return seen.decode("utf-8").splitlines()


def test_lines_keep_their_order(pipe: Pipe) -> None:
    read, stream = pipe()
    writer = LineWriter(stream, missing)
    wanted = [f"line {number} é" for number in range(5000)]
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(read_lines(read, wanted[-1])))
    reader.start()
    for line in wanted:
        writer.write(line + "\n")
    assert writer.flush(PATIENCE_S)
    reader.join(PATIENCE_S)
    assert seen == wanted


def test_where_nobody_reads_the_oldest_go_and_their_number_is_said(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_writer, "MAX_LINES", 100)
    read, stream = pipe()
    fill(stream.fileno())
    writer = LineWriter(stream, missing)
    begun = time.monotonic()
    for number in range(20_000):
        writer.write(f"line {number:05}\n")
    assert not writer.flush(0.2)
    assert time.monotonic() - begun < PATIENCE_S  # nothing has waited for the pipe
    assert len(writer._lines) <= 100
    lines = read_lines(read, "line 19999")
    while lines[0] == "":
        del lines[0]
    number = 0
    for line in lines:  # in order, and where some are missing it says how many
        if line.endswith(" missing"):
            number += int(line.split()[0])
        else:
            assert line == f"line {number:05}"
            number += 1
    assert number == 20_000
    assert lines[-100:] == [f"line {number:05}" for number in range(19_900, 20_000)]
    assert len(lines) < 1000


def test_the_bytes_that_wait_are_bounded_too(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_writer, "MAX_BYTES", 10_000)
    _, stream = pipe()
    writer = LineWriter(stream, missing)
    for _ in range(100):
        writer.write("x" * 999 + "\n")
    assert writer._size <= 10_000
    writer.write("y" * 20_000 + "\n")  # longer than all that may wait: it alone does
    assert len(writer._lines) == 1


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: Pipe) -> None:
    read, stream = pipe()
    os.set_blocking(stream.fileno(), False)
    writer = LineWriter(stream, missing)
    wanted = [f"line {number}" for number in range(2000)]
    for line in wanted:
        writer.write(line + "\n")
    assert read_lines(read, wanted[-1]) == wanted


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full disk to be had")
def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        writer = LineWriter(full, missing)
        for _ in range(10):
            writer.write("lost\n")
            assert writer.flush(PATIENCE_S)
        there = tmp_path / "log"  # room again
        assert writer._fd is not None
        with there.open("wb") as file:
            os.dup2(file.fileno(), writer._fd)
        writer.write("kept\n")
        assert writer.flush(PATIENCE_S)
        assert there.read_text() == "10 missing\nkept\n"


class Faulty(LineWriter):
    """Takes so many bytes, then fails once."""

    room = 0
    out = b""

    def _write_some(self, data: bytes) -> int:
        if not self.room:
            self.room = 1 << 20
            raise OSError
        taken = data[: self.room]
        self.out += taken
        self.room -= len(taken)
        return len(taken)


def test_a_line_of_which_half_was_written_is_ended(pipe: Pipe) -> None:
    _, stream = pipe()
    writer = Faulty(stream, missing)
    writer.room = 7
    writer.write("one\n")
    assert writer.flush(PATIENCE_S)
    writer.write("two two\n")
    assert writer.flush(PATIENCE_S)
    for line in ("three\n", "four\n"):
        writer.write(line)
        assert writer.flush(PATIENCE_S)
    assert writer.out == b"one\ntwo\n1 missing\nthree\nfour\n"


def test_a_stream_that_is_closed_or_gone_raises_nothing(pipe: Pipe) -> None:
    _, stream = pipe()
    writer = LineWriter(stream, missing)
    assert writer._fd is not None
    os.close(writer._fd)  # EBADF
    writer.write("lost\n")
    assert writer.flush(PATIENCE_S)
    closed = io.StringIO()
    closed.close()
    LineWriter(closed, missing).write("lost\n")


def test_what_is_no_file_is_written_to_at_once() -> None:
    stream = io.StringIO()
    writer = LineWriter(stream, missing)
    writer.write("one\n")
    assert stream.getvalue() == "one\n"
    assert writer.flush(0)


def test_text_that_the_encoding_does_not_know(pipe: Pipe) -> None:
    read, stream = pipe()
    stream.reconfigure(encoding="ascii")  # type: ignore[attr-defined]
    writer = LineWriter(stream, missing)
    writer.write("é \udc80\n")
    assert os.read(read, 100) == b"? ?\n"


def test_the_thread_ends_when_it_is_closed(pipe: Pipe) -> None:
    read, stream = pipe()
    writer = LineWriter(stream, missing)
    writer.write("one\n")
    writer.close()
    writer.write("two\n")
    assert writer._thread is not None
    writer._thread.join(PATIENCE_S)
    assert not writer._thread.is_alive()
    assert os.read(read, 100) == b"one\n"
