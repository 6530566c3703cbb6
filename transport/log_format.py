"""How log records are written: as text for people, or as one JSON object per line.

Called by the relay and by `swarmnode up`, once per process.

Log calls everywhere are an event name and fields, `log.info("login peer=%s clients=%d", …)`. As text a record is that
line after time, level and logger. As JSON the fields keep their types:

    {"time": "2026-01-31T12:00:00.123456Z", "level": "info", "logger": "relay.session", "event": "login",
     "peer": "…", "clients": 3}

A record that is not of this form has its text as "message", and "log" as event where no name leads it; a field called
as one of the first four gets a "_" after its name. An exception is in "exception" (type and text) and "traceback".

Both forms keep a record to one line, tracebacks in text aside: control characters are escaped, for much in a record is
chosen by peers. What lets somebody in is not written, wherever it comes from: tickets, private keys, credentials and
queries of URLs.

Whoever logs never waits for the stream, and is not told that it fails (line_writer.py): where it stands still for long
the oldest lines go, and one, the event "lines_missing", says how many.

This module keeps no state of its own; `set_up` changes that of `logging`, as a process does once. Not here: what is
logged, and files (whoever runs the process has the standard error stream kept).
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal, TextIO

from transport.line_writer import LineWriter

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
OURS = ("swarmnode", "transport", "relay")  # the loggers that `level` is for; libraries are heard from "warning" on
_NOISY = ("quic",)  # of the QUIC libraries: it warns of every connection that ends in order

MAX_TEXT = 4000  # characters of one field; a reason or an error of a peer's making is bounded far below
MAX_ITEMS, MAX_ITEM = 64, 200  # of a list, and characters of one of them
MAX_TRACEBACK = 32_000

_SPEC = r"%[-#0 +]*(?:\d+)?(?:\.\d+)?[diouxXeEfFgGrsac]"
_FIELDS = re.compile(rf"(?P<event>[a-z][a-z0-9_.]*)(?P<fields>(?: [a-z_][a-z0-9_]*={_SPEC})*)", re.ASCII)
_FIELD = re.compile(r" ([a-z_][a-z0-9_]*)=")
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[_.][a-z0-9]+)+(?= |$)", re.ASCII)
_FIRST = ("time", "level", "logger", "event")

_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\bswarm[0-9][a-z2-7]{24,}", re.IGNORECASE | re.ASCII), "swarm…(ticket)"),
    (
        re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        "(private key)",
    ),
    (re.compile(r"\b(bearer|basic) [a-z0-9._~+/=-]{8,}", re.IGNORECASE | re.ASCII), r"\1 …"),
    (re.compile(r"\b(https?|wss?)://[^\s/@\"'?#]{1,400}@", re.IGNORECASE), r"\1://…@"),
    (re.compile(r"\b((?:https?|wss?)://[^\s?\"'<>]{1,2000})\?[^\s\"'<>]+", re.IGNORECASE), r"\1?…"),
)
_CONTROLS = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)]}
_CONTROLS |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t", 0x2028: "\\u2028", 0x2029: "\\u2029"}
_CONTROLS_OF_TRACE = {code: text for code, text in _CONTROLS.items() if code not in (ord("\n"), ord("\t"))}


class LogOutput(logging.Handler):
    """Where a process's records go. What is printed on the same stream goes through `writer` too, in its order.

    `diverted`, while it is set, gets each record and its line first, on the thread that logs; True: it has taken it.
    """

    def __init__(self, style: LogFormat, stream: TextIO) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
        self.writer = LineWriter(stream, _lines_missing_json if style == "json" else _lines_missing_text)
        self.diverted: Callable[[logging.LogRecord, str], bool] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one record on."""
        try:
            line = self.format(record)
            if self.diverted is None or not self.diverted(record, line):
                self.writer.write(line + "\n")
        except Exception as error:  # a log call that is wrong must not cost what it tells of
            self.writer.write(f"{_shown(record.msg, MAX_ITEM)!r} cannot be logged: {type(error).__name__}\n")

    def flush(self) -> None:
        """Have all written, within a second. `logging` does this when the process ends."""
        self.writer.flush()

    def close(self) -> None:
        """Take nothing more."""
        self.writer.close()
        super().close()


def set_up(style: LogFormat, level: str, stream: TextIO | None = None) -> LogOutput:
    """Have this process log to `stream` (standard error) from now on; `level` as in LEVELS. Undoes an earlier call.

    As JSON, exceptions that end the process or a thread are records too.
    """
    output = LogOutput(style, stream if stream is not None else sys.stderr)
    output.set_name(__name__)
    root = logging.getLogger()
    for old in [one for one in root.handlers if one.get_name() == __name__]:
        root.removeHandler(old)
        old.close()
    root.addHandler(output)
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, logging.WARNING))
    for name in OURS:
        logging.getLogger(name).setLevel(number)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(number, logging.ERROR))
    sys.excepthook = _log_exception if style == "json" else sys.__excepthook__
    threading.excepthook = _log_thread_exception if style == "json" else threading.__excepthook__
    return output


def _lines_missing_text(lines: int) -> str:
    return f"({lines} line{'s' if lines > 1 else ''} of this log could not be written and are missing here)"


def _lines_missing_json(lines: int) -> str:
    return json_line("warning", __name__, "lines_missing", {"lines": lines})


def hide_secrets(text: str) -> str:
    """`text` without tickets, private keys, and credentials and queries of URLs."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def json_line(level: str, logger: str, event: str, fields: Mapping[str, Any], *, at: float | None = None) -> str:
    """One record as JSON, without the line's end. `at`: seconds since 1970, now without it."""
    moment = datetime.fromtimestamp(time.time() if at is None else at, UTC)
    record: dict[str, Any] = {
        "time": moment.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "level": level,
        "logger": logger,
        "event": event,
    }
    for name, value in fields.items():
        most = MAX_TRACEBACK if name == "traceback" else MAX_TEXT
        record[f"{name}_" if name in _FIRST else name] = _value(value, most)
    return json.dumps(record, ensure_ascii=True, allow_nan=False)


class TextFormatter(logging.Formatter):
    """For people: `2026-01-31 12:00:00,123 INFO relay.session login peer=… clients=3`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line; a traceback comes behind it."""
        record.message = hide_secrets(record.message).translate(_CONTROLS)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # logging.Formatter's own type is not public
        """The traceback, of several lines."""
        return _bounded(hide_secrets(super().formatException(ei)).translate(_CONTROLS_OF_TRACE), MAX_TRACEBACK)


class JsonFormatter(logging.Formatter):
    """For machines; see the module."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object."""
        event, fields = _parts(record)
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = record.exc_info[1]
            fields["traceback"] = self.formatException(record.exc_info)
        return json_line(record.levelname.lower(), record.name, event, fields, at=record.created)


@lru_cache(maxsize=1024)
def _template(text: str) -> tuple[str, tuple[str, ...] | None]:
    """Event name and names of the fields of a log call's first argument; None: the rest is a sentence."""
    whole = _FIELDS.fullmatch(text)
    if whole is not None:
        return whole["event"], tuple(_FIELD.findall(whole["fields"]))
    name = _NAME.match(text)
    return (name[0] if name is not None else "log"), None


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """Event and fields of a record."""
    event, names = _template(record.msg) if isinstance(record.msg, str) else ("log", None)
    arguments = record.args if isinstance(record.args, tuple) else ()
    if names is not None and len(names) == len(arguments):
        return event, dict(zip(names, arguments, strict=True))
    try:
        text = record.getMessage()
    except Exception as error:  # a log call that is wrong must not cost what it tells of
        text = f"{record.msg!r} {record.args!r} ({type(error).__name__})"
    return event, {"message": text}


def _value(value: Any, most: int) -> Any:
    """`value` as JSON has it: numbers stay numbers, everything unknown becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_value(one, MAX_ITEM) for one in list(value)[:MAX_ITEMS]]
    return _shown(value, most)


def _shown(value: Any, most: int) -> str:
    """As text: an exception with its type, bytes in hex."""
    try:
        if isinstance(value, bytes):
            text = value[:most].hex()
        elif isinstance(value, BaseException):
            text = f"{type(value).__name__}: {value}"
        else:
            text = str(value)
    except Exception:
        text = f"(a {type(value).__name__} that has no text)"
    return _bounded(hide_secrets(text), most)


def _bounded(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("swarmnode").critical("process_ended", exc_info=(kind, error, trace))


def _log_thread_exception(told: threading.ExceptHookArgs) -> None:
    if told.exc_type is SystemExit or told.exc_value is None:
        return
    name = told.thread.name if told.thread is not None else ""
    found = (told.exc_type, told.exc_value, told.exc_traceback)
    logging.getLogger("swarmnode").critical("thread_ended thread=%s", name, exc_info=found)
