from __future__ import annotations

import re
from itertools import product
from random import Random

import pytest

from transport.proto import path as path_module
from transport.proto.addresses import PathId, PathKind
from transport.proto.path import TRANSITIONS, Event, Path, Use
from transport.proto.path_config import PathConfig
from transport.proto.path_policy import PathState

CONFIG = PathConfig()


def live(rtt: float = 0.02, now: float = 100.0) -> Path:
    path = Path(PathId(("8.1.1.1", 1)), PathKind.PUBLIC, now, CONFIG)
    path.ask(now)
    path.sent_ping(b"0", 0, Use.LIFE, now)
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
    path.sent_ping(b"0", 0, Use.LIFE, 0.0)
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
            path.sent_ping(str(number).encode(), 0, Use.LIFE, now)
            number += 1
        if path.state is PathState.DEAD:
            break
    assert sent == [0.5, 0.56, 0.65, 0.9]
    assert path.since == 1.9


def test_a_dead_path_needs_three_pongs_in_a_row() -> None:
    path = live()
    path.doubt(100.0, "test")
    path.unanswered = 5
    path.poll(100.6, False, True)
    assert path.view(100.6, False).state is PathState.DOUBTED  # not before it had some time
    path.poll(100.7, False, True)
    assert path.state is PathState.DEAD
    for number, state in enumerate((PathState.DEAD, PathState.DEAD, PathState.LIVE)):
        now = 101.0 + number
        tx = bytes([number])
        path.sent_ping(tx, 0, Use.LIFE, now)
        path.pong(tx, now + 0.02)
        assert path.state is state


def test_rtt_is_smoothed_and_at_the_lower_end_of_jitter() -> None:
    path, seen, random = live(0.02), [], Random(1)
    for number in range(200):
        now = 200.0 + number
        path.sent_ping(b"%d" % number, 0, Use.LIFE, now)
        path.pong(b"%d" % number, now + 0.02 * random.uniform(0.8, 1.2))
        seen.append(path.rtt or 0.0)
    assert 0.016 <= min(seen[20:]) <= max(seen[20:]) <= 0.02
    assert max(seen[20:]) - min(seen[20:]) < 0.0025


def test_one_wild_sample_changes_nothing_and_a_farther_path_is_believed() -> None:
    path = live(0.02)
    late = [3.0, 0.02, 0.02, 0.02, 2.0, 0.021, 0.02]
    for number, rtt in enumerate([*late, *[0.3] * 5]):
        tx, now = b"n%d" % number, 200.0 + 5 * number
        path.sent_ping(tx, 0, Use.LIFE, now)
        path.pong(tx, now + rtt)
        assert path.rtt is not None
        if number < len(late):
            assert abs(path.rtt - 0.02) < 0.002
    assert path.rtt == pytest.approx(0.3, rel=0.1)


def test_a_nearer_path_is_believed_at_once() -> None:
    path = live(2.0)
    path.sent_ping(b"1", 0, Use.LIFE, 200.0)
    path.pong(b"1", 200.04)
    assert path.rtt == pytest.approx(0.04)


def test_pings_that_were_under_way_while_we_stood_still_only_show_life() -> None:
    path = live(0.02)
    path.sent_ping(b"1", 0, Use.LIFE, 200.0)
    path.shift(3.0, 203.0)
    assert path.pong(b"1", 203.0)
    assert path.rtt == pytest.approx(0.02)
    assert path.last_heard == 203.0
    assert path.unanswered == 0


def test_a_question_is_put_three_times_and_then_doubted() -> None:
    path = live(0.02)
    assert path.ask_again(200.0)
    sent, now = [], 200.0
    while path.state is PathState.LIVE:
        path.last_heard = now  # data keeps coming
        for size, use in path.poll(now, True, True):
            if not size:
                sent.append(round(now - 200.0, 3))
            path.sent_ping(b"%d %d" % (len(sent), size), size, use, now)
        now = path.due(now, True, True)
    assert sent[:3] == [0.0, 0.08, 0.16]
    assert path.since == pytest.approx(200.25)
    assert path.reason.endswith("pings were not answered")


def test_the_limit_of_silence() -> None:
    assert CONFIG.silence(0.001) == 0.25
    assert CONFIG.silence(0.1) == pytest.approx(0.35)
    assert CONFIG.silence(None) == pytest.approx(0.5)
