"""The one frozen configuration of an endpoint, and the constants behind its defaults with their reasons.

Built once at the edge (command line, file) and handed down; nothing here reads the environment. Called by
whoever binds an endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transport.emulation import LinkEmulation
from transport.errors import Address, ConfigError, format_addresses
from transport.proto.candidates import why_not_told
from transport.proto.path_config import UNPROBED_SIZE

MIB = 1 << 20

# RFC 9000, 14: every path carries 1200 bytes of UDP payload. Nothing larger goes out on a path that was not probed.
MIN_DATAGRAM_SIZE = UNPROBED_SIZE
# What fills a link of 1500 bytes, with IPv6's header: QUIC's datagram size on all connections, for their whole life (no
# engine can change it safely). Where a path carries less, datagrams travel in pieces.
DEFAULT_DATAGRAM_SIZE = 1452
# Loopback carries 64 KiB: large datagrams cost a seventh of the per-packet work. 8900 (a jumbo frame) is well
# under 16 KiB, above which aioquic writes corrupt frames, and lets seven of them share one GSO send of 64 KiB.
LOOPBACK_DATAGRAM_SIZE = 8900
MAX_DATAGRAM_SIZE = 16_000

# One send burst before the loop reads acknowledgements again; also the kernel's limit of segments in one GSO send.
BURST = 64
# Datagrams read in one wake-up before their acknowledgements and answers go out.
RECEIVE_BURST = 128
# Below this, the kernel dropped bursts: Linux' default of 208 KiB holds about 90 datagrams.
SOCKET_BUFFER = 4 * MIB

# Both libraries allow 100 concurrent streams (128 in aioquic), and qh3 raises on the one after; every open stream
# costs aioquic a microsecond per packet.
MAX_STREAMS = 64
# What a receiver tolerates: a peer may open the next stream before we have seen the end of the last one.
STREAM_TOLERANCE = 2

MAX_ADVERTISED = 8  # half of what one call carries


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Settings of one endpoint. Times in seconds, sizes in bytes.

    engine: "qh3" (fast) or "aioquic" (pure Python); both speak the same wire.
    handshake_timeout: how long an unauthenticated connection may exist.
    keep_alive: a ping after this much silence. idle_timeout: a silent peer is lost after it.
    stream_window, connection_window: what a peer may send ahead of the reader (memory bound per stream/connection).
    max_send_buffer: what write_nowait may queue on one stream while it waits for credit.
    send_backlog: what may wait inside the QUIC library per connection before write() waits.
    max_connections: authenticated connections held; max_pending: handshakes of unknown peers at one time.
    datagram_size: QUIC's datagrams; where a path carries less, they travel in pieces.
    loopback_datagram_size: … between processes of one machine (checked against the interface's MTU).
    gso, gro: use segmentation offload where the system has it.
    relays: URLs of the relays that this node connects to. relay_ca: a PEM file with further certificate authorities
    for them.
    port_mapping: ask the router for a port when this node is behind one.
    advertise: IP addresses and ports at which the user says that peers reach this node, such as a forwarded port.
    """

    engine: str = "qh3"
    handshake_timeout: float = 5.0
    keep_alive: float = 3.0
    idle_timeout: float = 10.0
    stream_window: int = 8 * MIB
    connection_window: int = 16 * MIB
    max_send_buffer: int = 8 * MIB
    send_backlog: int = 2 * MIB
    max_streams: int = MAX_STREAMS
    max_connections: int = 1024
    max_pending: int = 64
    datagram_size: int = DEFAULT_DATAGRAM_SIZE
    loopback_datagram_size: int = LOOPBACK_DATAGRAM_SIZE
    socket_buffer: int = SOCKET_BUFFER
    gso: bool = True
    gro: bool = True
    emulation: LinkEmulation | None = None
    relays: tuple[str, ...] = ()
    relay_ca: Path | None = None
    port_mapping: bool = True
    advertise: tuple[Address, ...] = ()

    def __post_init__(self) -> None:
        if self.engine not in ("qh3", "aioquic"):
            raise ConfigError(f"engine {self.engine!r} is unknown; use qh3 or aioquic")
        for name in ("handshake_timeout", "keep_alive", "idle_timeout"):
            if not 0 < getattr(self, name) <= 3600:
                raise ConfigError(f"{name} must be above 0 and at most 3600 seconds, not {getattr(self, name)}")
        if self.keep_alive * 2 > self.idle_timeout:
            raise ConfigError(
                f"keep_alive {self.keep_alive:g} s must be at most half of idle_timeout {self.idle_timeout:g} s"
            )
        for name in ("stream_window", "connection_window", "max_send_buffer", "send_backlog"):
            if not 16 * 1024 <= getattr(self, name) <= 1 << 32:
                raise ConfigError(f"{name} must be between 16 KiB and 4 GiB, not {getattr(self, name)}")
        if self.stream_window > self.connection_window:
            raise ConfigError("stream_window must not exceed connection_window")
        for name in ("datagram_size", "loopback_datagram_size"):
            if not MIN_DATAGRAM_SIZE <= getattr(self, name) <= MAX_DATAGRAM_SIZE:
                raise ConfigError(
                    f"{name} must be between {MIN_DATAGRAM_SIZE} and {MAX_DATAGRAM_SIZE}, not {getattr(self, name)}"
                )
        if not 1 <= self.max_streams < 100:
            raise ConfigError(f"max_streams must be between 1 and 99, not {self.max_streams}")
        if self.max_connections < 1 or self.max_pending < 1:
            raise ConfigError("max_connections and max_pending must be at least 1")
        if len(self.advertise) > MAX_ADVERTISED:
            raise ConfigError(f"advertise: at most {MAX_ADVERTISED} addresses, not {len(self.advertise)}")
        for address in self.advertise:
            if problem := why_not_told(address):
                raise ConfigError(f"advertise {format_addresses([address])}: {problem}")
