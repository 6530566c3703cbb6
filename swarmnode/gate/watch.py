"""Looks at a model's files whenever progress is made, so that a change of them is an error of one line.

Called by `wires.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarmnode.errors import ModelError
from swarmnode.model.stamps import Stamps

Progress = Callable[[str, int, int], None]  # (stage, done, of how many): positions


@dataclass(frozen=True, slots=True)
class Watch:
    """Hands progress on. Raises ModelError where the files of `source` are no longer as they were."""

    source: Path
    before: Stamps
    progress: Progress

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Look, and report."""
        self.look()
        self.progress(stage, done, total)

    def look(self) -> None:
        """Size and time of every file."""
        if not self.before.unchanged():
            raise ModelError(f"{self.source}: changed while it was measured; leave it alone and gate it again")
