"""What is wanted of the thread that draws. A leaf, so that `up` without a terminal imports nothing of it."""

from __future__ import annotations

import enum


class Mode(enum.Enum):
    """What is wanted of the thread."""

    LINES = "lines"
    SCREEN = "screen"
    APART = "apart"
    END = "end"
