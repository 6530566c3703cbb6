"""Runs a model whose experts do not fit into memory together: a few layers at a time, the others from what they said.

Layers before the group at hand answer with the rows that they gave in an earlier pass over the same text, from a file;
those behind it with zeros, since nobody looks at what comes of that. So every layer has its exact inputs, and each
layer's experts are read from disk once per pass. Called by `wires.py`; not thread safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swarmnode.backbone.hook import F32, I32, Experts, PendingRows
from swarmnode.compute.recipe import Site
from swarmnode.errors import ModelError
from swarmnode.gate.experts import Ready


class Recording:
    """What the sites of one run answered, a file per site, in the order in which they were asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[int, int] = {}  # site -> rows read or written since the start of the pass
        folder.mkdir(parents=True, exist_ok=True)

    def rewind(self) -> None:
        """The text begins anew."""
        self._rows.clear()

    def write(self, site: int, rows: F32) -> None:
        """Add to what a site answered. Raises ModelError where the disk has no room."""
        try:
            with self._file(site).open("ab") as file:
                file.write(np.ascontiguousarray(rows, np.float32).tobytes())
        except OSError as error:
            raise ModelError(f"{self._folder}: what a layer answered cannot be kept there ({error.strerror})") from None

    def read(self, site: int, n: int, d: int) -> F32:
        """The next [n, d] of what a site answered. Raises ModelError where that can no longer be read."""
        at = self._rows.get(site, 0)
        self._rows[site] = at + n
        try:
            rows = np.fromfile(self._file(site), np.float32, n * d, offset=at * d * 4)
        except OSError as error:
            raise ModelError(
                f"{self._file(site)}: what a layer answered cannot be read again ({error.strerror or error})"
            ) from None
        if len(rows) != n * d:
            raise ModelError(f"{self._file(site)}: is shorter than what was written to it")
        return rows.reshape(n, d)

    def _file(self, site: int) -> Path:
        return self._folder / f"{site}.f32"


class Staged:
    """`inner` has the experts of `group` alone. `keep`: whether what they answer is recorded too."""

    def __init__(
        self, inner: Experts, sites: Sequence[Site], group: range, recording: Recording, *, keep: bool
    ) -> None:
        self._inner, self._group, self.keep = inner, group, keep
        self._d_out = {site.index: site.d_out for site in sites}
        self.recording = recording

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> PendingRows:
        """See `hook.Experts`."""
        if site < self._group.start:
            return Ready(self.recording.read(site, len(ids), self._d_out[site]))
        if site >= self._group.stop:
            return Ready(np.zeros((len(ids), self._d_out[site]), np.float32))
        pending = self._inner.submit(site, x, ids, weights)
        return _Kept(pending, self.recording, site) if self.keep else pending


class _Kept:
    """An answer that is written down when it is there."""

    def __init__(self, pending: PendingRows, recording: Recording, site: int) -> None:
        self._pending, self._recording, self._site = pending, recording, site

    def fail(self, error: BaseException) -> None:
        """See `hook.PendingRows`."""
        fail = getattr(self._pending, "fail", None)
        if fail is not None:
            fail(error)

    def result(self) -> F32:
        """See `hook.PendingRows`."""
        rows = self._pending.result()
        self._recording.write(self._site, rows)
        return rows
