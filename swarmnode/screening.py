"""Prepares a backbone's screen for wrong rows beside its work, on a fraction of a core. A shell around `RowScreen`.

Each expert takes milliseconds to a fraction of a second; until one is prepared, its rows are checked by chance alone.
Made by `node.py` on a backbone that has the model's own file, in exact mode: the sums that partial mode brings
back cannot be screened.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from swarmnode.dispatch.row_screen import RowScreen
from swarmnode.model.last_matrix import LastMatrices
from swarmnode.model.manifest import Manifest
from swarmnode.model.source_bank import SourceBank

SHARE = 0.25  # of one core's time, as long as it lasts
log = logging.getLogger(__name__)


class Screening:
    """`screen` may be used at once; `close` ends the thread that prepares it."""

    def __init__(self, manifest: Manifest, source: Path) -> None:
        """Raises ModelError where the file is not the manifest's."""
        self._bank = SourceBank(source, manifest)
        self._sites = {site.index: site for site in manifest.sites}
        self.screen = RowScreen(LastMatrices(self._sites, self._bank.stacked))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._prepare, name="row-screen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop preparing, and let the file go."""
        self._ended.set()
        self._thread.join()
        self._bank.close()

    def _prepare(self) -> None:
        most = max(site.n_expert for site in self._sites.values())
        for expert in range(most):  # a few of every site first
            for site in self._sites.values():
                if expert >= site.n_expert:
                    continue
                began = time.monotonic()
                try:
                    self.screen.prepare(site.index, expert)
                except Exception:  # a screen less is no reason to stop a node
                    log.exception("row_screen_failed site=%d expert=%d", site.index, expert)
                    return
                if self._ended.wait((time.monotonic() - began) * (1 / SHARE - 1)):
                    return
