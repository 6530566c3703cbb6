"""What the URL of a relay may look like. PURE.

https://relay.example          WebSocket over TLS, port 443
http://127.0.0.1:8080          WebSocket without TLS (the datagrams inside are sealed in any case), port 80
https://cdn.example/some/path  behind a prefix: the relay is asked for at /some/path/relay

The canonical text is what names a relay everywhere (paths, calls, tickets): lower case host, no default port, no
trailing slash. URLs also come from peers: they are bounded, and nothing but http and https is one. Called by
relay_link, relay_pool and whoever reads a configuration or a ticket.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from transport.errors import LocalFault
from transport.proto.relay_frames import PATH

MAX_URL = 256  # characters; one fits in a call with two others
DEFAULT_PORTS = {"https": 443, "http": 80}

# RFC 3986, reduced to what a relay needs: no user, no query, no fragment, no escapes.
_URL = re.compile(
    r"(?P<scheme>https?)://(?:\[(?P<v6>[0-9a-f:.]{2,45})\]|(?P<host>[a-z0-9._-]{1,253}))"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<path>(?:/[A-Za-z0-9._~-]+)*)/?",
    re.ASCII,
)
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.ASCII)


class BadRelayUrl(LocalFault):
    """A text that cannot be the URL of a relay."""


@dataclass(frozen=True, slots=True)
class RelayUrl:
    """A relay's place. `text` is canonical; `host` is a name or an IP literal without brackets."""

    text: str
    secure: bool
    host: str
    port: int
    prefix: str

    @property
    def authority(self) -> str:
        """`host` or `host:port` as in the Host header; what a login is signed for."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self._scheme] else f"{host}:{self.port}"

    @property
    def websocket(self) -> str:
        """The ws: or wss: URL that is dialled."""
        return f"{'wss' if self.secure else 'ws'}://{self.authority}{self.prefix}{PATH}"

    @property
    def is_private(self) -> bool:
        """Whether the host is a literal of an address that only this machine or its neighbours can reach.

        A name is looked up later, and its addresses are looked at then.
        """
        return self.host == "localhost" or self.host.endswith(".localhost") or not is_global(self.host, True)

    @property
    def _scheme(self) -> str:
        return "https" if self.secure else "http"

    def __str__(self) -> str:
        return self.text


def parse_relay_url(text: str) -> RelayUrl:
    """The relay that `text` names. Raises BadRelayUrl with one line that says what to write."""
    if len(text) > MAX_URL:
        raise BadRelayUrl(f"a relay URL of {len(text)} characters, at most {MAX_URL} are allowed")
    scheme, separator, rest = text.strip().partition("://")
    authority, slash, path = rest.partition("/")
    match = _URL.fullmatch(f"{scheme.lower()}{separator}{authority.lower()}{slash}{path}")
    if match is None:
        raise BadRelayUrl(f"{_shown(text)} is no relay URL; write https://relay.example or http://HOST:PORT")
    scheme, host, prefix = match["scheme"], match["v6"] or match["host"].rstrip("."), match["path"]
    port = int(match["port"] or DEFAULT_PORTS[scheme])
    if not 0 < port < 1 << 16:
        raise BadRelayUrl(f"{_shown(text)}: port {port} is not between 1 and 65535")
    if any(part in (".", "..") for part in prefix.split("/")):
        raise BadRelayUrl(f"{_shown(text)}: the path must not contain dots alone")
    try:
        host = str(ipaddress.ip_address(host))
    except ValueError:
        numeric = host.replace(".", "").isdigit()  # 127.1 and 2130706433 are addresses to some resolvers
        if match["v6"] or numeric or not all(_LABEL.fullmatch(label) for label in host.split(".")):
            raise BadRelayUrl(f"{_shown(text)}: {host[:80]!r} is neither a host name nor an IP address") from None
    url = RelayUrl("", scheme == "https", host, port, prefix)
    canonical = f"{scheme}://{url.authority}{prefix}"
    return RelayUrl(canonical, url.secure, host, port, prefix)


def is_address(host: str) -> bool:
    """Whether a host is an IP literal."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_global(host: str, names: bool = False) -> bool:
    """Whether an IP literal is reachable from everywhere; `names` is the answer for what is no literal."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return names
    if isinstance(address, ipaddress.IPv6Address):  # RFC 6052 and 3056: an IPv4 address in disguise
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return inner.is_global and not inner.is_multicast
    return address.is_global and not address.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _shown(text: str) -> str:
    return repr(text[:80] + "…" if len(text) > 80 else text)
