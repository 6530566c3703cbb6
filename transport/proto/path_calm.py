"""Whether what QUIC reports as lost says anything of a path, or only of what happened to the paths. PURE.

    disturbed   a switch, a doubt, another network, a source never seen, a stall of our own: what was under way is lost,
                and QUIC finds that up to 1.5 s later, when the path is in order again or another one is used
    sample      counts when it began after all of that
    excuse      trouble that goes on for longer is no disturbance: the path is bad, and its losses count

Kept by paths.py for all paths to one peer.
"""

from __future__ import annotations

from transport.proto.path_config import PathConfig


class Calm:
    """Since when the paths to a peer are left in peace."""

    __slots__ = ("_at", "_config", "_sampled_at", "_since")

    def __init__(self, config: PathConfig, now: float) -> None:
        self._config = config
        self._since = self._at = self._sampled_at = now  # the first and the last disturbance of a row; the last sample

    def disturb(self, now: float) -> bool:
        """Something happens; whether it comes out of the blue."""
        begins = now - self._at >= self._config.settle
        if begins:
            self._since = now
        self._at = now
        return begins

    def sample(self, now: float) -> bool:
        """A sample of what was sent since the last one; whether it counts."""
        began, self._sampled_at = self._sampled_at, now
        return began >= min(self._at + self._config.settle, self._since + self._config.excuse)
