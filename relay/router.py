"""Which session speaks for which key, and the end of eviction wars. PURE.

One live session per key: the newest login counts, because after a change of network the old one is dead and does not
know it. Two nodes with a copy of the same key would replace each other for ever; that is told from one node that
comes back often by whether the replaced sessions were still alive (`was_alive`). The third replacement within
FIGHT_WINDOW of sessions that were alive ends the matter: nobody has the key for FIGHT_PAUSE. Used by the server's
sessions; `now` is monotonic, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

FIGHT_REPLACEMENTS = 3
FIGHT_WINDOW = 60.0
FIGHT_PAUSE = 60.0
MAX_REMEMBERED = 4096  # keys with a replacement or a pause that is remembered

Session = TypeVar("Session")


@dataclass(frozen=True, slots=True)
class LoginOutcome(Generic[Session]):
    """What a login means. `fight_pause`: seconds that the key is refused, 0 when the new session is in."""

    replaced: Session | None
    fight_pause: float = 0.0


class Router(Generic[Session]):
    """Sessions by key (32 bytes)."""

    def __init__(self) -> None:
        self.sessions: dict[bytes, Session] = {}
        self._alive_when_replaced: dict[bytes, deque[float]] = {}
        self._paused_until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self.sessions)

    def login(self, key: bytes, session: Session, now: float) -> LoginOutcome[Session]:
        """Let `session` speak for `key`, or end a fight: then neither it nor the one `replaced` does."""
        pause = self._paused_until.get(key, 0.0) - now
        if pause > 0:
            return LoginOutcome(None, pause)
        self._paused_until.pop(key, None)
        replaced = self.sessions.pop(key, None)
        if replaced is not None and self._alive_within(key, now) >= FIGHT_REPLACEMENTS - 1:
            del self._alive_when_replaced[key]
            _remember(self._paused_until, key, now + FIGHT_PAUSE)
            return LoginOutcome(replaced, FIGHT_PAUSE)
        self.sessions[key] = session
        return LoginOutcome(replaced)

    def was_alive(self, key: bytes, now: float) -> None:
        """A session of `key` that was replaced has just shown that somebody is still behind it."""
        times = self._alive_when_replaced.get(key)
        if times is None:
            times = deque(maxlen=FIGHT_REPLACEMENTS)
            _remember(self._alive_when_replaced, key, times)
        times.append(now)

    def logout(self, key: bytes, session: Session) -> bool:
        """Forget `session`; False when another one speaks for the key already."""
        if self.sessions.get(key) is not session:
            return False
        del self.sessions[key]
        return True

    def _alive_within(self, key: bytes, now: float) -> int:
        return sum(now - at < FIGHT_WINDOW for at in self._alive_when_replaced.get(key, ()))


Value = TypeVar("Value")


def _remember(memory: dict[bytes, Value], key: bytes, value: Value) -> None:
    memory.pop(key, None)
    if len(memory) >= MAX_REMEMBERED:
        del memory[next(iter(memory))]  # the oldest
    memory[key] = value
