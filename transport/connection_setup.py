"""What every connection of an endpoint is made of, whichever side began it: engine, route, and its place in the table.

Made by the endpoint; used by its dialer and acceptor. Not when one is made, nor whether it may stay.
"""

from __future__ import annotations

import asyncio

from transport.config import TransportConfig
from transport.connection import Connection, ConnectionOwner
from transport.connection_table import ConnectionTable
from transport.errors import Address, EngineFault, Unreachable
from transport.identity import PeerId
from transport.proto.addresses import PathId
from transport.proto.control_frames import CloseCode
from transport.quic_driver import Link, QuicDriver
from transport.quic_engine import EngineFactory
from transport.reach import Reach
from transport.route import Route


class ConnectionSetup:
    """See the module. `owner` is told what becomes of each connection."""

    def __init__(
        self,
        owner: ConnectionOwner,
        config: TransportConfig,
        factory: EngineFactory,
        driver: QuicDriver,
        reach: Reach,
        table: ConnectionTable,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner, self._config, self._factory, self._driver = owner, config, factory, driver
        self._socket, self._paths, self._table = reach.socket, reach.paths, table

    def connect(self, peer: PeerId, lane: str, target: Address | None) -> Connection:
        """Start an attempt over an address, or over the path that is known to the peer (None).

        Raises Unreachable, EngineFault.
        """
        if target is None:
            route = self._paths.route(peer)
            if route is None:
                raise Unreachable(peer, (), 0.0, "there is no path any more")
        else:
            route = Route(self._socket.direct(target))
        link = Link(self._factory.client(self._socket.quic_size(route.path)), route, validated=True)
        connection = Connection(self._driver, link, self._owner, self._config, expected=peer, lane=lane)
        self._table.all.add(connection)
        if target is None:
            self._table.place(connection, peer)
        self._driver.add_cid(link, link.engine.host_cid)
        try:
            link.engine.connect(self._loop.time())
        except Exception as error:
            fault = EngineFault(f"the QUIC library failed to dial: {error!r}")
            connection.end(CloseCode.INTERNAL, "internal error", fault)
            raise fault from error
        self._driver.mark(link)
        return connection

    def serve(self, original_cid: bytes, source: PathId, sender: PeerId | None) -> Connection:
        """Begin the server's side of a connection; a relay names the `sender`."""
        route = Route(self._socket.path_of(source), sender)
        link = Link(self._factory.server(original_cid, self._socket.quic_size(route.path)), route, validated=False)
        connection = Connection(self._driver, link, self._owner, self._config, expected=None)
        self._table.all.add(connection)
        self._driver.add(link, original_cid, link.engine.host_cid)
        return connection

    def adopt_route(self, connection: Connection, *, restarted: bool) -> None:
        """Put a connection whose peer is proven on the peer's own route; `restarted`: it is another run of the peer."""
        link = connection.link
        link.route = self._paths.adopt(connection.peer, link.route, restarted=restarted)
        self._table.place(connection, connection.peer)
