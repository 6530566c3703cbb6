"""llama.cpp itself: the bindings, imported late and initialised once, and what it has logged of errors.

It has one log for the whole process. Callers: `llama.py`, and whoever calls the library beside it.
"""

from __future__ import annotations

from typing import Any

from swarmnode.compute import ggml

MAX_REASON = 160  # characters of llama.cpp's words in an error of ours
_log_lines: list[str] = []
_log_callback: Any = None


def library() -> Any:
    """The bindings, imported late (0.3 s) and initialised once, with llama.cpp's own log kept for error messages."""
    global _log_callback  # noqa: PLW0603  (llama.cpp has one process-wide log)
    from llama_cpp import llama_cpp as lib  # noqa: PLC0415

    if _log_callback is None:
        ggml.check_layout()

        def keep(level: int, text: bytes, _user_data: Any) -> None:
            if level >= 4:  # GGML_LOG_LEVEL_ERROR
                _log_lines.append(text.decode("utf-8", "replace").strip())
                del _log_lines[:-20]

        _log_callback = lib.llama_log_callback(keep)
        lib.llama_log_set(_log_callback, None)
        lib.llama_backend_init()
    return lib


def clear_errors() -> None:
    """Forget llama.cpp's error lines so far: before a call whose own are wanted."""
    _log_lines.clear()


def last_error() -> str:
    """The first of llama.cpp's error lines since they were cleared: those after it only pass it on.

    One short line: what it says may repeat the file's own strings, whatever they are.
    """
    if not _log_lines:
        return "llama.cpp gave no reason"
    said = " ".join(_log_lines[0].rpartition("error loading model: ")[2].split())
    return "".join(c if c.isprintable() else "?" for c in said[:MAX_REASON])
