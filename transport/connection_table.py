"""The connections of an endpoint: all there are, which one is live for a (peer, lane), and of which run of a peer.

It remembers what proto/dedup.py and the refusal of twins need of connections that are over. Decides nothing but that.
Owned by the endpoint; read and written by its dialer and acceptor, on its loop.
"""

from __future__ import annotations

from collections import OrderedDict

from transport.connection import Connection, State
from transport.dialing import Key
from transport.errors import KEY_CONNECTED_ANEW, ConnectionReplaced
from transport.identity import PeerId
from transport.proto.control_frames import CloseCode

TWIN_MEMORY = 20.0  # seconds that a replaced run of a peer is refused, and for as long as the later one is here
MAX_REMEMBERED = 4096  # (peer, lane) pairs whose last connection is remembered, see proto/dedup.py


class ConnectionTable:
    """See the module. `now` is the loop's time."""

    def __init__(self) -> None:
        self.all: set[Connection] = set()
        self.by_peer: dict[PeerId, set[Connection]] = {}  # those on the peer's own route
        self.live: dict[Key, Connection] = {}
        self.previous: OrderedDict[Key, int] = OrderedDict()
        self.left: OrderedDict[tuple[PeerId, bytes], float] = OrderedDict()  # runs of peers that a later run replaced
        self.closed = False  # the endpoint is: nothing is let in any more
        self._boots: OrderedDict[PeerId, bytes] = OrderedDict()  # the run of each peer that was met last

    def place(self, connection: Connection, peer: PeerId) -> None:
        """Note that a connection goes by the peer's own route."""
        self.by_peer.setdefault(peer, set()).add(connection)

    def register(self, connection: Connection) -> None:
        """A connection is the live one of its peer and lane from now on."""
        key = (connection.peer, connection.lane)
        self.live[key] = connection
        self.previous[key] = connection.connection_id
        self.previous.move_to_end(key)
        if len(self.previous) > MAX_REMEMBERED:
            self.previous.popitem(last=False)

    def forget(self, connection: Connection) -> None:
        """A connection is over."""
        self.all.discard(connection)
        if not connection.is_identified:
            return
        key = (connection.peer, connection.lane)
        if self.live.get(key) is connection:
            del self.live[key]
        siblings = self.by_peer.get(connection.peer, set())
        siblings.discard(connection)
        if not siblings:
            self.by_peer.pop(connection.peer, None)

    def retire_older_boot(self, connection: Connection, now: float) -> bool:
        """End what is left of an earlier run of this peer; whether there was one: its paths may lead nowhere now."""
        siblings = [one for one in self.by_peer.get(connection.peer, ()) if one is not connection]
        stale = [one for one in siblings if one.state is State.OPEN and one.boot_id != connection.boot_id]
        for live in stale:
            self.left[live.peer, live.boot_id] = now
            self.left.move_to_end((live.peer, live.boot_id))
            if len(self.left) > MAX_REMEMBERED:
                self.left.popitem(last=False)
            live.end(CloseCode.REPLACED, KEY_CONNECTED_ANEW, ConnectionReplaced("the peer has restarted"))
        known = self._boots.get(connection.peer)
        self._boots[connection.peer] = connection.boot_id
        self._boots.move_to_end(connection.peer)
        if len(self._boots) > MAX_REMEMBERED:
            self._boots.popitem(last=False)
        return known not in (None, connection.boot_id)

    def is_replaced_twin(self, peer: PeerId, boot_id: bytes, now: float) -> bool:
        """Whether this run of a peer was replaced by another one, that is here or was a moment ago.

        A node that restarts never comes back as the run that it was before: two nodes have one key.
        """
        left_at = self.left.get((peer, boot_id))
        if left_at is None:
            return False
        others = any(one.state is State.OPEN and one.boot_id != boot_id for one in self.by_peer.get(peer, ()))
        return others or now - left_at < TWIN_MEMORY
