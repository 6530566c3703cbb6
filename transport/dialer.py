"""The dialling side of an endpoint: running dials by (peer, lane), and what their attempts come to.

Owned by the endpoint, on its loop. The race of one dial is `dialing.py`'s. An attempt that reaches the right peer
proves who we are, once per dial; a dial returns after ACCEPT, or with the connection that the peer opened meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from transport.access import GATE_FAILED, AccessControl
from transport.connection import Connection
from transport.connection_setup import ConnectionSetup
from transport.connection_table import ConnectionTable
from transport.dialing import Dial, Early, Key, resolve
from transport.errors import (
    Address,
    ConfigError,
    ConnectionClosed,
    EndpointClosed,
    LocalFault,
    NotAdmitted,
    TransportError,
    Unreachable,
)
from transport.identity import Identity, PeerId
from transport.proto.control_frames import MAX_LANE_BYTES, CloseCode
from transport.proto.early import EARLY_BYTES
from transport.reach import Reach
from transport.stream import Stream


class Dialer:
    """See the module. `settle_parked` has the connection decided upon that waited for the end of our dial."""

    def __init__(
        self,
        identity: Identity,
        boot_id: bytes,
        setup: ConnectionSetup,
        table: ConnectionTable,
        access: AccessControl,
        reach: Reach,
        settle_parked: Callable[[Key], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._identity, self._boot_id, self._access = identity, boot_id, access
        self._setup, self._table, self._reach, self._settle_parked = setup, table, reach, settle_parked
        self.dials: dict[Key, Dial] = {}

    async def dial_with(
        self, peer: PeerId, addresses: Sequence[Address], lane: str, timeout: float, first: bytes
    ) -> tuple[Connection, Stream | None]:
        """See Endpoint.dial_with."""
        if len(first) > EARLY_BYTES:
            raise LocalFault(
                f"{len(first)} bytes cannot go with a proof, at most {EARLY_BYTES}; send them after a dial"
            )
        early = Early(first)
        stream: Stream | None = None
        try:
            connection, stream = await self.dial(peer, addresses, lane, timeout, early if first else None)
            return connection, stream
        finally:
            if early.stream is not None and early.stream is not stream:
                early.stream.reset(0)  # others may go on with the connection

    async def dial(
        self, peer: PeerId, addresses: Sequence[Address], lane: str, timeout: float, early: Early | None = None
    ) -> tuple[Connection, Stream | None]:
        """See Endpoint.dial and dial_with; the stream is where `early` has gone."""
        if self._table.closed:
            raise EndpointClosed
        if peer == self._identity.peer_id:
            raise Unreachable(peer, addresses, timeout, "that is this node itself")
        if not 1 <= len(lane.encode()) <= MAX_LANE_BYTES:
            raise ConfigError(f"a lane has 1 to {MAX_LANE_BYTES} bytes, {lane!r} has {len(lane.encode())}")
        key = (peer, lane)
        dial: Dial | None = None
        try:
            async with asyncio.timeout(timeout):
                resolved = await resolve(addresses, self._reach.socket.address)
                if self._table.closed:
                    raise EndpointClosed
                if key in self._table.live:
                    return self._table.live[key], None
                dial = self.dials.get(key)
                if dial is None:
                    dial = Dial(key, lambda target: self._setup.connect(peer, lane, target), self._dial_over)
                    self.dials[key] = dial
                dial.waiters += 1
                if early is not None:
                    dial.early.append(early)
                if self._reach.relays is not None or self._reach.paths.route(peer) is not None:
                    dial.hope()
                self._reach.paths.want(peer, resolved.usable if self._reach.relays is not None else ())
                if self._reach.paths.route(peer) is not None:
                    dial.add_path()
                dial.add(resolved.usable, resolved.skipped)
                connection = await asyncio.shield(dial.future)
                return connection, early.sent_on(connection) if early is not None else None
        except TimeoutError:
            if dial is None:
                raise Unreachable(peer, addresses, timeout, "the names were not looked up in time") from None
            raise dial.timed_out(timeout, self._reach.no_path_to(peer)) from None
        finally:
            if dial is not None:
                dial.waiters -= 1
                if early is not None:
                    dial.early.remove(early)
                if dial.waiters == 0:
                    dial.finish(Unreachable(peer, addresses, timeout, "nobody waits for it any more"))

    def handshake_done(self, connection: Connection) -> None:
        """See ConnectionOwner. An attempt has reached the peer: prove who we are, unless that is settled already."""
        key = (connection.peer, connection.lane)
        dial = self.dials.get(key)
        if dial is None or dial.proving is not None or key in self._table.live:
            connection.end(CloseCode.DUPLICATE, "another attempt won", ConnectionClosed(0, "dial over"))
            return
        shown = self._access.credentials(connection.lane)
        if shown is None:
            connection.end(CloseCode.NOT_ADMITTED, GATE_FAILED, NotAdmitted(f"refused here: {GATE_FAILED}"))
            return
        connection.prove(self._identity, self._boot_id, self._table.previous.get(key, 0), shown)
        dial.sent_proof(connection)

    def proof_accepted(self, connection: Connection, credentials: bytes) -> None:
        """See ConnectionOwner. The peer let us in; do we want it, too?"""
        objection = self._access.judge(connection.peer, connection.lane, credentials)
        if objection is not None:
            connection.end(CloseCode.NOT_ADMITTED, objection, NotAdmitted(f"refused here: {objection}"))
            return
        connection.open_after_proof()
        key = (connection.peer, connection.lane)
        restarted = self._table.retire_older_boot(connection, self._loop.time())
        self._setup.adopt_route(connection, restarted=restarted)
        self._table.register(connection)
        dial = self.dials.get(key)
        if dial is not None:
            dial.finish(connection)

    def attempt_ended(self, connection: Connection, error: TransportError) -> None:
        """A connection is over, perhaps an attempt."""
        for dial in list(self.dials.values()):
            if dial.owns(connection):
                dial.attempt_ended(connection, error)

    def path_found(self, peer: PeerId) -> None:
        """There is a path to a peer that had none: dials that hope for one use it."""
        for (dialled, _), dial in list(self.dials.items()):
            if dialled == peer:
                dial.add_path()

    def close(self) -> None:
        """End every dial."""
        for dial in list(self.dials.values()):
            dial.finish(EndpointClosed())

    def _dial_over(self, dial: Dial) -> Connection | None:
        """A dial has ended: settle the connection that the peer opened meanwhile, if one was parked; which one is it
        now?"""
        del self.dials[dial.key]
        self._settle_parked(dial.key)
        return None if self._table.closed else self._table.live.get(dial.key)
