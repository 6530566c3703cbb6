from __future__ import annotations

import re
from itertools import product

import pytest

from transport.proto import path as path_module
from transport.proto.addresses import PathId, PathKind
from transport.proto.path import TRANSITIONS, Event, Path
from transport.proto.path_config import PathConfig
from transport.proto.path_policy import PathState

CONFIG = PathConfig()


def live(rtt: float = 0.02, now: float = 100.0) -> Path:
    path = Path(PathId(("8.1.1.1", 1)), PathKind.PUBLIC, now, CONFIG)
    path.ask(now)
    path.sent_ping(b"0", 0, False, now)
    assert path.pong(b"0", now + rtt)
    return path


def test_the_table_in_the_docstring_is_the_one_in_the_code() -> None:
    assert path_module.__doc__ is not None
    for state, event in product(PathState, Event):
        row = re.search(rf"^  {state.value} +(\S.*)$", path_module.__doc__.partition("TRANSITIONS")[2], re.MULTILINE)
        assert row is not None
        text = row[1].split()[list(Event).index(event)].rstrip("*")
        assert text == TRANSITIONS.get((state, event), "."), (state, event)


def test_a_path_is_live_only_after_an_answer() -> None:
    path = Path(PathId(("8.1.1.1", 1)), PathKind.PUBLIC, 0.0, CONFIG)
    path.ask(0.0)
    assert not path.pong(b"other", 0.1)
    assert path.view(0.1, False).state is PathState.PROBING
    path.sent_ping(b"0", 0, False, 0.0)
    assert path.pong(b"0", 0.1)
    assert path.state is PathState.LIVE
    assert path.rtt == 0.1
    assert not path.pong(b"0", 0.2)  # once


def test_the_tries_of_a_new_path() -> None:
    path = Path(PathId(("8.1.1.1", 1)), PathKind.PUBLIC, 0.0, CONFIG)
    path.ask(0.0, delay=0.5)
    sent, number = [], 0
    while (now := path.due(0.0, False, True)) < 10:
        for _ in path.poll(now, False, True):
            sent.append(round(now, 3))
            path.sent_ping(str(number).encode(), 0, False, now)
            number += 1
        if path.state is PathState.DEAD:
            break
    assert sent == [0.5, 0.56, 0.65, 0.9]
    assert path.since == 1.9


def test_a_dead_path_needs_three_pongs_in_a_row() -> None:
    path = live()
    path.doubt(100.0, "test")
    path.unanswered = 5
    path.poll(100.0, False, True)
    assert path.state is PathState.DEAD
    for number, state in enumerate((PathState.DEAD, PathState.DEAD, PathState.LIVE)):
        now = 101.0 + number
        tx = bytes([number])
        path.sent_ping(tx, 0, False, now)
        path.pong(tx, now + 0.02)
        assert path.state is state


def test_rtt_is_smoothed() -> None:
    path = live(0.02)
    for number in range(100):
        now = 200.0 + number
        path.sent_ping(b"%d" % number, 0, False, now)
        path.pong(b"%d" % number, now + (0.016 if number % 2 else 0.024))
    assert path.rtt is not None
    assert abs(path.rtt - 0.02) < 0.001


def test_the_limit_of_silence() -> None:
    assert CONFIG.silence(0.001) == 0.25
    assert CONFIG.silence(0.1) == pytest.approx(0.35)
    assert CONFIG.silence(None) == pytest.approx(0.5)
