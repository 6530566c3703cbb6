"""What an endpoint tells those who watch it, as it happens. A leaf.

Not a log and not needed for anything to work: made by reach and path_keeper, handed on by `Endpoint.on_news`, shown to
people by nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from transport.identity import PeerId
from transport.route import Path

NOT_NEEDED = "not needed any more"  # the reason of a relay that was not lost but left


@dataclass(frozen=True, slots=True)
class RelayNews:
    """A relay connected (`up`), was lost or left, or could not be reached; the last is told after every try.

    own: the user named it, not a peer, who may name whatever it likes.
    """

    url: str
    up: bool
    reason: str
    own: bool


@dataclass(frozen=True, slots=True)
class PathNews:
    """A peer's datagrams take another path; None: there is none. `rtt` in seconds, None where it does not
    answer now."""

    peer: PeerId
    path: Path | None
    rtt: float | None
    reason: str


News: TypeAlias = RelayNews | PathNews
OnNews: TypeAlias = Callable[[News], None]


def nobody_listens(_news: News) -> None:
    """What is told where nobody watches."""
