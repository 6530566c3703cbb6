"""Everything below QUIC that reaches a peer, put together: socket, paths, relays, surroundings. SHELL.

    surroundings (own addresses, NAT) ─┐                        ┌─ peer_socket (UDP, segments, emulation)
    relay_pool (home, second, others) ─┴─ path_keeper (paths) ──┘

Carries news between them and owns their tasks; decides nothing. Made and closed by endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from transport.config import TransportConfig
from transport.errors import Address
from transport.identity import Identity, PeerId
from transport.news import OnNews, RelayNews
from transport.path_keeper import DiscoCounters, PathKeeper, Switch
from transport.peer_socket import PeerSocket, SocketCounters, SocketHandlers
from transport.proto.path_config import PathConfig
from transport.proto.relay_frames import GoneReason
from transport.reflector_checks import StunCounters
from transport.relay_directory import NoDirectory
from transport.relay_pool import RelayPool
from transport.relay_session import RelayCounters, RelayLinkConfig
from transport.surroundings import Surroundings
from transport.udp_socket import is_loopback


@dataclass(frozen=True, slots=True)
class RelayView:
    """One relay as this node sees it. `rtt` in seconds, None before it was measured.

    own: the user named it; else a peer did, and its URL may be anything.
    """

    url: str
    up: bool
    home: bool
    own: bool
    rtt: float | None
    error: str


@dataclass(frozen=True, slots=True)
class ReachCounters:
    """What was sent, came and was refused since the start, as copies. `relays`: by URL, of the links there are now."""

    disco: DiscoCounters
    socket: SocketCounters
    stun: StunCounters
    relays: Mapping[str, RelayCounters]


class Reach:
    """How this node reaches peers, and is reached."""

    def __init__(
        self,
        identity: Identity,
        listen: Address,
        config: TransportConfig,
        handlers: SocketHandlers,
        *,
        admits: Callable[[PeerId], bool],
        on_switch: Callable[[PeerId, Switch], None],
        on_path: Callable[[PeerId], None],
        on_news: OnNews,
    ) -> None:
        """Open the socket on the running loop; nothing is sent before `start`. Raises BindFailed, BadRelayUrl."""
        self.socket = PeerSocket(listen, config, handlers)
        self.paths = PathKeeper(
            identity, self.socket, PathConfig(), admits=admits, on_switch=on_switch, on_path=on_path
        )
        self.paths.on_news = self._on_news = on_news
        handlers.on_disco = self.paths.on_disco
        self._no_directory = NoDirectory()
        self.relays: RelayPool | None = None
        if config.relays:
            self.relays = RelayPool(
                config.relays,
                identity,
                RelayLinkConfig(ca_file=config.relay_ca),
                self.socket.on_relayed,
                self._relay_state,
                self._relay_gone,
                on_change=self._relays_changed,
            )
            self.socket.relays = self.relays
            self.paths.on_relay_wanted = self.relays.need
        host, port = self.socket.address
        # A node that listens on loopback alone and has no relay has nothing to find out about itself.
        self.surroundings: Surroundings | None = None
        if config.relays or not is_loopback(self.socket.address):
            self.surroundings = Surroundings(
                config, port, host, self.socket.send_udp, self._tell, self._network_changed
            )
            handlers.on_stun = self.surroundings.on_stun
            self.paths.on_observed = self.surroundings.observed_by_peer

    @property
    def directory(self) -> NoDirectory:
        """Where to publish records for, and to hear of, whoever knows a topic: our relays' directories. Without relays
        it does nothing.
        """
        return self._no_directory if self.relays is None else self.relays.directory

    async def start(self) -> None:
        """Begin to look around and to connect to relays."""
        if self.surroundings is not None:
            await self.surroundings.start()
            self._tell()
        if self.relays is not None:
            self.relays.start()

    async def close(self) -> None:
        """Withdraw port mappings, leave relays, close the sockets."""
        self.paths.close()
        try:
            if self.surroundings is not None:
                await self.surroundings.close()
        finally:
            try:
                if self.relays is not None:
                    await self.relays.close()
            finally:
                self.socket.close()

    def relay_views(self) -> list[RelayView]:
        """Every relay that this node knows, home first."""
        if self.relays is None:
            return []
        home, own = self.relays.home, self.relays.own
        views = [
            RelayView(link.url.text, link.up, link.url.text == home, link.url.text in own, link.rtt, link.error)
            for link in self.relays.links()
        ]
        return sorted(views, key=lambda view: (not view.home, not view.up, view.url))

    def relay_problems(self) -> str:
        """Why none of our own relays can carry a first datagram; empty when one is up, or none was configured."""
        views = [view for view in self.relay_views() if view.own]
        if not views or any(view.up for view in views):
            return ""
        return "; ".join(f"relay {view.url}: {view.error or 'not connected yet'}" for view in views)

    def no_path_to(self, peer: PeerId) -> str:
        """Why a peer has no path, for people; empty where nothing is known of it."""
        problems = self.relay_problems()
        if problems or self.relays is None:
            return problems
        relayed = [view for view in self.paths.views(peer) if view.path.relay]
        silent = [view.path.relay for view in relayed if not view.down]
        if silent:
            return f"no answer through {', '.join(silent)}: it may not know this node, or be too slow"
        return f"it is not connected to {', '.join(view.path.relay for view in relayed)}" if relayed else ""

    def counters(self) -> ReachCounters:
        """What was counted until now."""
        stun = self.surroundings.stun if self.surroundings is not None else StunCounters()
        links = self.relays.links() if self.relays is not None else []
        return ReachCounters(
            disco=replace(self.paths.counters),
            socket=replace(self.socket.counters),
            stun=replace(stun),
            relays={link.url.text: replace(link.counters) for link in links},
        )

    # -- news

    def _tell(self) -> None:
        around = self.surroundings
        if around is None:
            return
        self.socket.set_interfaces(around.interfaces)
        self.paths.set_local(around.candidates, around.nat.kind, around.nat.port_delta, self._own_up())

    def _own_up(self) -> tuple[str, ...]:
        """Our own relays that are up, home first. A stranger's is for reaching the peer that named it, nothing else."""
        if self.relays is None:
            return ()
        own = self.relays.own
        return tuple(url for url in self.relays.up() if url in own)

    def _network_changed(self, _why: str) -> None:
        if self.relays is not None:
            self.relays.kick()
        self.paths.network_changed()

    def _relay_state(self, url: str, up: bool, reason: str) -> None:
        assert self.relays is not None
        own = url in self.relays.own
        self.paths.relay_changed(url, up, own=own)
        self._on_news(RelayNews(url, up, reason, own))

    def _relays_changed(self) -> None:
        """The home is another one, or a relay came or went."""
        self._tell()
        if self.surroundings is not None and self.relays is not None:
            links = [link for url in self._own_up() if (link := self.relays.link(url)) is not None]
            self.surroundings.set_reflectors([address for link in links for address in link.reflectors])

    def _relay_gone(self, url: str, peer: PeerId, why: GoneReason) -> None:
        if why is GoneReason.NOT_CONNECTED:  # a full queue is a loss like any other, and QUIC's business
            self.paths.relay_gone(url, peer)
