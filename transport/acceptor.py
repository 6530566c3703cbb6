"""The accepting side of an endpoint: who of those that dial us is let in, and which of two connections stays.

Owned by the endpoint, on its loop. It bounds handshakes in progress, verifies proofs, asks `access.py`, and settles
dials that cross (`proto/dedup.py`): a peer's connection is parked while our own dial to it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping

from transport.access import GATE_FAILED, AccessControl
from transport.config import TransportConfig
from transport.connection import Connection, State
from transport.connection_setup import ConnectionSetup
from transport.connection_table import ConnectionTable
from transport.dialing import Dial, Key
from transport.errors import ConnectionClosed, ConnectionLost, ConnectionReplaced, EndpointClosed, NotAdmitted
from transport.identity import PeerId
from transport.proto.addresses import PathId
from transport.proto.control_frames import VERSION, Authenticate, CloseCode
from transport.proto.dedup import PARK_GRACE, Existing, Verdict, decide
from transport.quic_driver import Link
from transport.waiters import Waiters, wait, wake

MAX_ACCEPT_QUEUE = 256  # authenticated connections that nobody has accepted yet


class Acceptor:
    """See the module. `dials` are the endpoint's own that run."""

    def __init__(
        self,
        peer_id: PeerId,
        boot_id: bytes,
        config: TransportConfig,
        setup: ConnectionSetup,
        table: ConnectionTable,
        access: AccessControl,
        dials: Mapping[Key, Dial],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer_id, self._boot_id, self._config = peer_id, boot_id, config
        self._setup, self._table, self._access, self._dials = setup, table, access, dials
        self.deadlines: dict[Connection, asyncio.TimerHandle] = {}  # incoming, not yet authenticated
        self._parked: dict[Key, tuple[Connection, Authenticate]] = {}
        self._accepted: deque[Connection] = deque()
        self._acceptors: Waiters = []

    async def accept(self) -> Connection:
        """See Endpoint.accept."""
        while not self._accepted:  # connections that end before they are accepted leave it
            if self._table.closed:
                raise EndpointClosed
            await wait(self._acceptors)
        return self._accepted.popleft()

    def close(self) -> None:
        """Wake whoever waits in accept()."""
        wake(self._acceptors)

    def forget(self, connection: Connection) -> None:
        """A connection is over."""
        with contextlib.suppress(ValueError):
            self._accepted.remove(connection)
        deadline = self.deadlines.pop(connection, None)
        if deadline is not None:
            deadline.cancel()
        if connection.is_identified:
            key = (connection.peer, connection.lane)
            if key in self._parked and self._parked[key][0] is connection:
                del self._parked[key]

    def settle_parked(self, key: Key) -> None:
        """Our own dial has ended: decide upon the connection that the peer opened meanwhile, if one is parked."""
        parked = self._parked.pop(key, None)
        if parked is not None and not self._table.closed:
            self._decide(*parked)

    def incoming(self, original_cid: bytes, source: PathId, sender: PeerId | None) -> Link | None:
        """The first datagram of an unknown connection; a relay names the `sender`. None where there is no room."""
        if self._table.closed or not self._has_place():
            return None
        connection = self._setup.serve(original_cid, source, sender)
        self.deadlines[connection] = self._loop.call_later(
            self._config.handshake_timeout, self._handshake_timed_out, connection
        )
        return connection.link

    def _has_place(self) -> bool:
        """Whether one more handshake may begin. When too many run, the oldest whose address may be forged gives way;
        a peer that is really there dials again after this code."""
        if len(self.deadlines) < self._config.max_pending:
            return True
        unproven = next((pending for pending in self.deadlines if not pending.link.validated), None)
        if unproven is None:
            return False
        reason = "too many handshakes at one time"
        unproven.end(0, reason, ConnectionClosed(0, reason))
        return True

    def _handshake_timed_out(self, connection: Connection) -> None:
        error = ConnectionLost("the peer did not authenticate in time")
        connection.end(CloseCode.TIMED_OUT, "no authentication in time", error)

    def proof_received(self, connection: Connection, proof: Authenticate) -> None:
        """See ConnectionOwner. Verify a proof, ask `admit`, and decide between connections."""
        refusal = self._objection(connection, proof)
        if refusal is not None:
            code, reason = refusal
            connection.end(code, reason, NotAdmitted(f"refused here: {reason}"))
            return
        connection.identify(proof)
        self._decide(connection, proof)

    def _objection(self, connection: Connection, proof: Authenticate) -> tuple[CloseCode, str] | None:
        if proof.version != VERSION:
            return CloseCode.VERSION_MISMATCH, f"protocol version {proof.version} there, {VERSION} here"
        if proof.server != self._peer_id.raw or not proof.lane or proof.client == self._peer_id.raw:
            return CloseCode.BAD_SIGNATURE, "the proof is not for this node"
        if not connection.verify(proof):
            return CloseCode.BAD_SIGNATURE, "the proof's signature does not verify"
        peer = PeerId(proof.client)
        if connection.link.route.peer not in (None, peer):
            return CloseCode.BAD_SIGNATURE, "the relay named another sender"
        objection = self._access.judge(peer, proof.lane, proof.credentials)
        if objection is not None:
            return CloseCode.NOT_ADMITTED, objection
        if self._table.is_replaced_twin(peer, proof.boot_id, self._loop.time()):
            reason = "another node uses this node's key and took its place; give each its own --state"
            return CloseCode.NOT_ADMITTED, reason
        if len(self._table.live) >= self._config.max_connections or len(self._accepted) >= MAX_ACCEPT_QUEUE:
            return CloseCode.OVERLOADED, f"{len(self._table.live)} connections are open here"
        return None

    def _decide(self, connection: Connection, proof: Authenticate) -> None:
        if connection.state is State.CLOSED:
            return
        key = (connection.peer, connection.lane)
        live = self._table.live.get(key)
        existing = None if live is None else Existing(live.boot_id, live.connection_id, live.is_client)
        verdict = decide(
            ours=self._peer_id.raw,
            theirs=proof.client,
            boot_id=proof.boot_id,
            previous=proof.previous,
            existing=existing,
            dialling=key in self._dials,
        )
        if verdict is Verdict.PARK:
            self._replace_parked(key, connection, proof)
        elif verdict is Verdict.REFUSE:
            self._refuse_duplicate(connection)
        else:
            self._let_in(connection, replaced=live)

    def _replace_parked(self, key: Key, connection: Connection, proof: Authenticate) -> None:
        earlier = self._parked.get(key)
        self._parked[key] = (connection, proof)
        if earlier is not None:
            self._refuse_duplicate(earlier[0])
        self._loop.call_later(PARK_GRACE, self._parked_long_enough, key, connection)

    def _parked_long_enough(self, key: Key, connection: Connection) -> None:
        """Our own dial has had its time: when it has not even reached the peer, the peer's connection is taken."""
        parked, dial = self._parked.get(key), self._dials.get(key)
        if parked is None or parked[0] is not connection or dial is None or dial.reached:
            return
        del self._parked[key]
        self._let_in(connection, replaced=None)

    def _refuse_duplicate(self, connection: Connection) -> None:
        reason = "another connection for this lane exists"
        connection.end(CloseCode.DUPLICATE, reason, ConnectionReplaced(reason))

    def _let_in(self, connection: Connection, replaced: Connection | None) -> None:
        key = (connection.peer, connection.lane)
        shown = self._access.credentials(connection.lane)  # first: where it fails, nothing has happened
        if shown is None:
            connection.end(CloseCode.NOT_ADMITTED, GATE_FAILED, NotAdmitted(f"refused here: {GATE_FAILED}"))
            return
        restarted = self._table.retire_older_boot(connection, self._loop.time())
        if replaced is not None:
            reason = "the peer opened a new connection"
            replaced.end(CloseCode.REPLACED, reason, ConnectionReplaced(reason))
        self.deadlines.pop(connection).cancel()
        self._setup.adopt_route(connection, restarted=restarted)
        connection.accept_proof(self._boot_id, shown)
        self._table.register(connection)
        self._accepted.append(connection)
        wake(self._acceptors)
        dial = self._dials.get(key)
        if dial is not None:
            dial.finish(connection)
