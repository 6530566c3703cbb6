"""What a relay is told at its start: one frozen RelayConfig. Built by __main__ from flags, by tests directly.

Every number has its reason beside it. Texts are parsed here, so that a mistake is one line before anything is opened.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path

from relay.limits import QueueBounds
from transport.errors import Address, ConfigError, IdentityError
from transport.identity import PeerId

Network = IPv4Network | IPv6Network

DEFAULT_PORT = 8080
DEFAULT_REFLECTOR_PORTS = (3478, 3479)  # 3478 is STUN's (RFC 8489, 9)
MAX_ACCESS_FILE = 16 * 1024 * 1024  # 280,000 PeerIds


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """Sizes in bytes, times in seconds, rates per second; a rate of 0 is no limit.

    listen: "::" is IPv6 and IPv4 on one socket. reflector_ports: two UDP ports that answer STUN, or none, at
    reflector_host, "" for listen's: behind a front, clients reach them at another address than the WebSocket.
    names: the authorities ("host" or "host:port") by which clients reach this relay; empty: any.
    """

    listen: Address = ("::", DEFAULT_PORT)
    reflector_ports: tuple[int, int] | None = DEFAULT_REFLECTOR_PORTS
    reflector_host: str = ""
    names: frozenset[str] = frozenset()
    access_file: Path | None = None
    trusted_proxies: tuple[Network, ...] = ()
    tls: tuple[Path, Path] | None = None  # certificate chain and key, PEM

    client_rate: int = 12_500_000  # 100 Mbit/s
    global_rate: int = 125_000_000  # 1 Gbit/s
    client_frames: int = 4_000  # a frame costs about 0.1 ms: one client can keep two fifths of a core busy
    client_disco_rate: int = 64_000  # a punch is ≤ 4 KB, a ping 0.2 KB; some dozen peers after a change of network
    global_disco_rate: int = 8_000_000
    client_control_frames: int = 20  # a client pings every 20 s, and some more when it doubts

    max_clients: int = 4_096  # × (9 KB idle, at most 1.5 MB when it floods and reads nothing)
    max_clients_per_ip: int = 1_024
    max_pending: int = 1_024  # connections that have not logged in
    max_pending_per_ip: int = 64  # an office behind one address comes back at once after a restart
    queue: QueueBounds = field(default_factory=QueueBounds)
    max_queued: int = 512_000_000  # in all queues together
    max_directory: int = 32_000_000  # 4,096 clients with 1,400 bytes each take a quarter
    record_rate: int = 12_500_000  # to all watchers together: a swarm of 200 needs 9 MB/s at 700 bytes every 3 s

    login_timeout: float = 10.0
    ping_interval: float = 20.0  # below the 30 s for which hasty middleboxes keep a TCP mapping, and CDNs' 100 s
    idle_timeout: float = 60.0  # three pings
    write_timeout: float = 15.0
    linger: float = 2.0  # how long last words may take
    drain_timeout: float = 2.0
    restart_min: float = 1.0  # how long a restart takes
    list_retry_after: float = 20.0  # whoever runs the relay may add the key at any moment
    replaced_retry_after: float = 300.0  # the key is in use; whoever asks sooner only replaces its twin
    overloaded_retry_after: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_clients", "max_clients_per_ip", "max_pending", "max_pending_per_ip"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("client_rate", "global_rate"):
            if not 0 <= getattr(self, name) < 2**32:
                raise ConfigError(f"{name} is {getattr(self, name)} bytes/s; 0 (no limit) to {2**32 - 1} are possible")


def parse_listen(text: str) -> Address:
    """`HOST:PORT`, `[IPV6]:PORT` or `:PORT` (all addresses). Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r} is no address to listen on; write IPv6 as [::1]:{DEFAULT_PORT}")
    if not colon or not _is_port(port):
        raise ConfigError(f"{text!r} is no address to listen on; write HOST:PORT, like 0.0.0.0:{DEFAULT_PORT}")
    return host or "::", int(port)


def parse_reflector(text: str) -> tuple[int, int] | None:
    """`PORT,PORT`, or `off` for None. Raises ConfigError."""
    if text == "off":
        return None
    first, comma, second = text.partition(",")
    if not comma or not _is_port(first) or not _is_port(second) or (first == second and int(first)):
        raise ConfigError(f"{text!r} are no two UDP ports; write PORT,PORT, like 3478,3479, or off")
    return int(first), int(second)


def parse_network(text: str) -> Network:
    """An address or CIDR network. Raises ConfigError."""
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise ConfigError(f"{text!r} is no address or network; write it like 10.0.0.0/8") from None


def parse_names(texts: list[str]) -> frozenset[str]:
    """Public names as they are compared: lower case. Raises ConfigError."""
    for text in texts:
        if not text or "/" in text or len(text) > 300:
            raise ConfigError(f"{text[:80]!r} is no name of this relay; write HOST or HOST:PORT, without https://")
    return frozenset(text.lower() for text in texts)


def is_our_name(authority: str, names: frozenset[str]) -> bool:
    """Whether a client that dialled `authority` dialled us; a name without a port stands for every port."""
    text = authority.lower()
    host, colon, port = text.rpartition(":")
    if text in names:
        return True
    return bool(colon) and _is_port(port) and (":" not in host or host.endswith("]")) and host in names


def read_access_file(path: Path) -> frozenset[bytes]:
    """The keys that may log in: one PeerId per line, `#` begins a comment. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ACCESS_FILE + 1)
    except OSError as error:
        raise ConfigError(f"access list {path}: {error.strerror or error}") from error
    if len(data) > MAX_ACCESS_FILE:
        raise ConfigError(f"access list {path} is larger than {MAX_ACCESS_FILE} bytes; is it the right file?")
    keys = set()
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                keys.add(PeerId.parse(text).raw)
            except IdentityError as error:
                raise ConfigError(f"access list {path}, line {number}: {error}") from error
    return frozenset(keys)


def tls_context(config: RelayConfig) -> ssl.SSLContext | None:
    """The context for config.tls. Raises ConfigError when the files cannot be used."""
    if config.tls is None:
        return None
    certificate, key = config.tls
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"TLS certificate {certificate} with key {key}: {error.strerror or error}") from error
    return context


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text[:6]) <= 65535
