"""Remembers a node's last events for its status, and hands each on. Made by `serve.py`, read by `node_status.py`.

Not a log file. Tickets are secrets and are not kept; neither is progress, which is old a moment later. Events are told
from the midst of what happens, such as a connection that comes up: telling them never ends it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from swarmnode.event_lines import STAGES, event_line
from swarmnode.parts import Report
from swarmnode.status import EventStatus

KEPT = 64
MAX_TEXT = 240  # characters: a line of the widest terminal
_NOT_KEPT = frozenset({"ticket", *STAGES})
log = logging.getLogger(__name__)


class EventLog:
    """A `parts.Report` that remembers. Any thread."""

    def __init__(self, then: Report) -> None:
        self._then = then
        self._latest: deque[EventStatus] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._count = 0
        self._holding = ""

    def __call__(self, event: str, **fields: Any) -> None:
        """Keep it, then pass it on. Raises nothing: who tells of something is not to fail because of who listens."""
        try:
            self._keep(event, fields)
            self._then(event, **fields)
        except Exception:
            log.exception("event_not_told name=%s", event)

    def _keep(self, event: str, fields: dict[str, Any]) -> None:
        if event not in _NOT_KEPT:
            text = " ".join(event_line(event, fields).split())[:MAX_TEXT]
            with self._lock:
                is_news = event != "holding" or text != self._holding  # carried out once more: nothing has changed
                if event == "holding":
                    self._holding = text
                if is_news:
                    self._count += 1
                    self._latest.append(EventStatus(self._count, round(time.time(), 3), event, text))

    def latest(self) -> list[EventStatus]:
        """The last events, oldest first."""
        with self._lock:
            return list(self._latest)
