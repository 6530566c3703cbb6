"""Notes of files whose content was verified: while size and modification time stay, nothing is hashed again.

Only for this machine: a copy has other times and is verified anew. Not a protection against somebody who wants to
deceive, who could set the times too. Callers: `onboard.py`, `store.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec


class Stamps(msgspec.Struct, frozen=True):
    """(absolute path, bytes, modification time in ns) of each file."""

    files: list[tuple[str, int, int]]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Stamps:
        """The files as they are now. OSError where one cannot be looked at."""
        return cls([(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths])

    def unchanged(self) -> bool:
        """Are they all there, and as they were?"""
        try:
            return Stamps.of(Path(path) for path, _, _ in self.files) == self
        except OSError:
            return False
