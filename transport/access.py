"""Who may connect, and be connected to: the node's `admit`, or its `Gate`, asked so that its faults refuse.

Owned by the endpoint; asked by its dialer and acceptor, and by reach before a disco message is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from transport.errors import LocalFault
from transport.identity import PeerId
from transport.proto.control_frames import MAX_CREDENTIALS

Admit = Callable[[PeerId], bool]
GATE_FAILED = "internal error at the gate"  # what a peer is told whom it would have had to judge, or to be shown to


class Gate(Protocol):
    """Who may connect, by more than its key: both ends show credentials that only the gates understand."""

    def knows(self, peer: PeerId) -> bool:
        """Whether this peer's disco messages are answered: it was let in before, or we look for it."""

    def judge(self, peer: PeerId, lane: str, credentials: bytes) -> str | None:
        """None where `peer`, whose key is proven, may connect for `lane`, or be connected to; else why not."""

    def credentials(self, lane: str) -> bytes:
        """What to show on a connection for `lane`, at most MAX_CREDENTIALS bytes."""


class AccessControl:
    """See the module. Everybody may connect where neither is given; the gate alone is asked where it is."""

    def __init__(self, admit: Admit | None, gate: Gate | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._admit, self._gate = admit, gate

    def judge(self, peer: PeerId, lane: str, credentials: bytes) -> str | None:
        """Why a peer may not connect for a lane, or not be connected to; None where it may."""
        if self._gate is None:
            return None if self.admits(peer) else f"peer {peer.short} is not admitted"
        try:
            return self._gate.judge(peer, lane, credentials)
        except Exception as error:
            context = {"message": f"the gate raised for peer {peer.short}; refused", "exception": error}
            self._loop.call_exception_handler(context)
            return GATE_FAILED

    def credentials(self, lane: str) -> bytes | None:
        """What to show on a connection for a lane; None where the gate cannot say: the connection must end then."""
        if self._gate is None:
            return b""
        try:
            shown = self._gate.credentials(lane)
            if len(shown) > MAX_CREDENTIALS:
                raise LocalFault(f"credentials of {len(shown)} bytes, at most {MAX_CREDENTIALS} are allowed")
            return shown
        except Exception as error:
            context = {"message": f"the gate raised for lane {lane}; refused", "exception": error}
            self._loop.call_exception_handler(context)
            return None

    def admits(self, peer: PeerId) -> bool:
        """Whether a peer's disco messages are answered; it is not yet said that it may connect."""
        try:
            if self._gate is not None:
                return self._gate.knows(peer)
            return self._admit is None or self._admit(peer)
        except Exception as error:
            context = {"message": f"admit raised for peer {peer.short}; refused", "exception": error}
            self._loop.call_exception_handler(context)
            return False
