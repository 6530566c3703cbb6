"""From token pieces to text that is safe to show: whole UTF-8 characters, held back where a stop string may begin.

Pure. Called by `session.py`, one object per generation.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Feed token pieces, get text. Nothing of a stop string, nor anything after it, ever comes out.

    Bytes that are no UTF-8 come out as U+FFFD, as the Unicode standard recommends for interchange.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, piece: bytes) -> str:
        """Text that the piece makes certain; `stopped_by` is set once a stop string is complete."""
        return self._release(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was still held back when the generation ended without a stop string."""
        text = self._release(self._decoder.decode(b"", True))
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + new
        hits = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if hits:
            at, self.stopped_by = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
