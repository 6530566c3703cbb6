"""Why a process died, in one line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.process_end import process_end

ASSERT = "/build/vendor/llama.cpp/ggml/src/ggml.c:7: GGML_ASSERT(%s) failed"


def test_the_last_assertion_counts() -> None:
    log = "\n".join([ASSERT % "one", "loading", ASSERT % "two", "", "Aborted"]).encode()
    end = process_end(-6, log)
    assert (end.how, end.said) == ("killed by SIGABRT", "ggml/src/ggml.c:7: GGML_ASSERT(two) failed")
    assert (end.aborted, end.traceback) == (True, False)


def test_the_last_line_where_nothing_was_asserted() -> None:
    end = process_end(1, b"Traceback (most recent call last):\n  File\nValueError: no\x1b[0m such \xff\n\n")
    assert (end.how, end.said) == ("exit code 1", "ValueError: no [0m such \N{REPLACEMENT CHARACTER}")
    assert (end.aborted, end.traceback) == (False, True)


def test_who_was_killed_from_outside_was_not_ended_by_an_assertion() -> None:
    assert process_end(-6, ASSERT.encode()).aborted
    assert not process_end(-9, ASSERT.encode()).aborted


def test_what_faulthandler_says_is_not_its_stack() -> None:
    log = b"loading\nFatal Python error: Bus error\n\nThread 0x01 (most recent call first):\n  File x, line 3 in y\n"
    assert process_end(-7, log).said == "Fatal Python error: Bus error"


def test_nothing_was_said() -> None:
    end = process_end(-9, b"")
    assert (end.how, end.said, end.aborted) == ("killed by SIGKILL", "", False)
    assert process_end(-123, b"\n").how == "killed by signal 123"


@given(st.integers(-200, 300), st.binary(max_size=600))
def test_always_one_line(status: int, log: bytes) -> None:
    end = process_end(status, log)
    assert (end.how + end.said).isprintable()
    assert len(end.said) <= 300
