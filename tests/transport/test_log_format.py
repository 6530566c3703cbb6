"""Log records as text and as JSON: one line each, fields with their types, and nothing that lets somebody in."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.membership import Ticket
from swarmnode.membership.documents import NO_INVITATION, Invitation
from transport.identity import Identity
from transport.log_format import (
    MAX_TEXT,
    OURS,
    JsonFormatter,
    LogFormat,
    TextFormatter,
    hide_secrets,
    json_line,
    set_up,
)

Start = Callable[[LogFormat, str], io.StringIO]


@pytest.fixture
def start() -> Iterator[Start]:
    """set_up with a stream that can be read; everything is as before afterwards."""
    root = logging.getLogger()
    kept = root.level, list(root.handlers), sys.excepthook, threading.excepthook
    levels = {name: logging.getLogger(name).level for name in OURS}

    def begin(style: LogFormat, level: str) -> io.StringIO:
        stream = io.StringIO()
        set_up(style, level, stream)
        return stream

    yield begin
    root.setLevel(kept[0])
    root.handlers[:] = kept[1]
    sys.excepthook, threading.excepthook = kept[2], kept[3]
    for name, number in levels.items():
        logging.getLogger(name).setLevel(number)


def record(message: object, *arguments: object, **more: Any) -> logging.LogRecord:
    return logging.LogRecord("relay.session", logging.INFO, "x.py", 1, message, arguments, more.get("exc_info"))


def as_json(message: object, *arguments: object, **more: Any) -> dict[str, Any]:
    line = JsonFormatter().format(record(message, *arguments, **more))
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def ticket() -> str:
    secret = bytes(range(32))
    key = Identity.generate(secret).peer_id
    invitation = Invitation(Identity.generate().peer_id, NO_INVITATION, key.raw, 0, 0, "worker")
    return str(Ticket(invitation, secret))


def test_fields_keep_their_names_and_types() -> None:
    found = as_json(
        "login peer=%s ip=%s clients=%d share=%.1f names=%r left=%s", "abc", "::1", 3, 0.25, ("a", "b"), None
    )
    moment = datetime.fromisoformat(found.pop("time"))
    assert moment.tzinfo is not None
    assert found == {
        "level": "info",
        "logger": "relay.session",
        "event": "login",
        "peer": "abc",
        "ip": "::1",
        "clients": 3,
        "share": 0.25,
        "names": ["a", "b"],
        "left": None,
    }


@pytest.mark.parametrize(
    ("message", "arguments", "event", "text"),
    [
        ("paths.switch %s %s", ("a", "b"), "paths.switch", "paths.switch a b"),
        ("port mapping: %s", ("x",), "log", "port mapping: x"),
        ("port mapping ended", (), "log", "port mapping ended"),
        ("Task was destroyed but it is pending!", (), "log", "Task was destroyed but it is pending!"),
        ("login peer=%s", (), "login", "login peer=%s"),
        ("shown time=%s", ("now", "more"), "shown", "'shown time=%s' ('now', 'more') (TypeError)"),
    ],
)
def test_what_is_no_list_of_fields_is_a_message(
    message: str, arguments: tuple[str, ...], event: str, text: str
) -> None:
    found = as_json(message, *arguments)
    assert (found["event"], found["message"]) == (event, text)


def test_a_field_does_not_hide_what_every_record_has() -> None:
    found = as_json("seen time=%s level=%s event=%s", 1, 2, 3)
    assert (found["event"], found["level"]) == ("seen", "info")
    assert (found["time_"], found["level_"], found["event_"]) == (1, 2, 3)


def test_exceptions_are_part_of_the_line() -> None:
    try:
        raise ValueError("bad\nnews")
    except ValueError:
        found = as_json("dial_failed peer=%s", "p", exc_info=sys.exc_info())
    assert found["exception"] == "ValueError: bad\nnews"
    assert found["traceback"].startswith("Traceback")
    assert found["peer"] == "p"


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_values_that_are_no_json() -> None:
    found = as_json(
        "odd a=%r b=%r c=%s d=%s e=%d f=%s", b"\x00\xff", OSError("gone"), float("nan"), Broken(), 1 << 70, "x" * 9999
    )
    assert (found["a"], found["b"], found["c"]) == ("00ff", "OSError: gone", "nan")
    assert found["d"] == "(a Broken that has no text)"
    assert found["e"] == str(1 << 70)
    assert len(found["f"]) == MAX_TEXT + 1


@given(st.text(), st.lists(st.one_of(st.text(), st.integers(), st.floats(), st.binary(), st.none())))
def test_any_record_is_one_line_of_json_and_of_text(message: str, arguments: list[object]) -> None:
    found = as_json(message, *arguments)
    assert list(found)[:4] == ["time", "level", "logger", "event"]
    try:
        text = TextFormatter().format(record(message, *arguments))
    except (TypeError, ValueError):  # a log call that is wrong: logging itself says so
        return
    assert len(text.splitlines()) == 1
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", text)


def test_text_of_peers_cannot_make_lines_or_move_the_cursor() -> None:
    text = TextFormatter().format(record("refused reason=%s", "a\n2026-01-01 ERROR forged\x1b[2J"))
    assert text.endswith(r"refused reason=a\n2026-01-01 ERROR forged\x1b[2J")


@pytest.mark.parametrize("form", [JsonFormatter(), TextFormatter()])
def test_nothing_that_lets_somebody_in_is_written(form: logging.Formatter) -> None:
    pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2Vw\n-----END PRIVATE KEY-----"
    made = ticket()
    texts = [
        made,
        made.upper(),
        pem,
        "Bearer hf_abcdefghijkl",
        "https://me:pass@x.example/m",
        "https://x.example/m?sig=abcd",
    ]
    for secret in texts:
        try:
            raise ValueError(f"cannot use {secret}")
        except ValueError:
            line = form.format(record("trouble what=%s", f"see {secret} there", exc_info=sys.exc_info()))
        for piece in (made[8:60], made[8:60].upper(), "MC4CAQ", "hf_abc", "me:pass", "sig=abcd"):
            assert piece not in line
    assert (
        hide_secrets("swarm of 3; https://x.example/m; peer swarm1") == "swarm of 3; https://x.example/m; peer swarm1"
    )


def test_levels_are_for_ours_and_libraries_are_heard_from_warnings_on(start: Start) -> None:
    stream = start("json", "debug")
    logging.getLogger("transport.x").debug("ours a=%d", 1)
    logging.getLogger("httpx").info("HTTP Request: GET https://x")
    logging.getLogger("asyncio").warning("too slow")
    start("json", "debug")  # again: the first stream hears no more
    logging.getLogger("relay").error("later")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["ours", "log"]
    stream = start("text", "error")
    logging.getLogger("swarmnode.x").warning("no")
    logging.getLogger("swarmnode.x").error("yes a=%d", 1)
    assert re.fullmatch(r"\S+ \S+ ERROR swarmnode\.x yes a=1\n", stream.getvalue())


def test_what_ends_a_thread_or_the_process_is_a_record_too(start: Start) -> None:
    stream = start("json", "warning")
    error = ValueError("lost")
    sys.excepthook(ValueError, error, None)
    threading.excepthook(threading.ExceptHookArgs((ValueError, error, None, threading.current_thread())))
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["event"], first["level"], first["exception"]) == ("process_ended", "critical", "ValueError: lost")
    assert second["thread"] == threading.current_thread().name


def test_a_line_that_no_log_call_made() -> None:
    found = json.loads(json_line("info", "relay", "ready", {"address": "[::]:1", "ports": [1, 2]}, at=0.5))
    assert found == {
        "time": "1970-01-01T00:00:00.500000Z",
        "level": "info",
        "logger": "relay",
        "event": "ready",
        "address": "[::]:1",
        "ports": [1, 2],
    }
