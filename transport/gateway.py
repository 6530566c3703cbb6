"""Which router stands between this machine and the Internet. SHELL.

IPv4 only: NAT is an affair of IPv4. Reads the routing table where Linux shows it, otherwise asks the system's own
tool, bounded in time and size. Called by port_mapping and netcheck.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transport.errors import TransportError
from transport.proto.port_mapping_frames import ROUTER_PORT

ROUTES = Path("/proc/net/route")
SSDP_PORT = 1900
TOOL_SECONDS = 3.0  # PowerShell starts slowly
MAX_TEXT = 256 * 1024
_UP_GATEWAY = 0x3  # RTF_UP | RTF_GATEWAY

_LINUX_TOOL = ("ip", "-4", "route", "show", "default")
_BSD_TOOL = ("route", "-n", "get", "default")
_WINDOWS_TOOL = (
    "powershell",
    "-NoProfile",
    "-Command",
    "(Get-NetRoute -DestinationPrefix 0.0.0.0/0 | Sort-Object RouteMetric | Select-Object -First 1).NextHop",
)


class MappingFailed(TransportError):
    """No port could be mapped; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """The router of the default route, our own address towards it, and the UDP ports it is asked at."""

    host: str
    own_host: str
    router_port: int = ROUTER_PORT
    ssdp_port: int = SSDP_PORT


async def default_gateway() -> Gateway | None:
    """The router of the IPv4 default route; None when there is none or the system does not tell."""
    if sys.platform == "linux":
        host = gateway_in_table(_routes()) or address_in(await _output_of(_LINUX_TOOL))
    else:
        host = address_in(await _output_of(_WINDOWS_TOOL if sys.platform == "win32" else _BSD_TOOL))
    if host is None:
        return None
    own = own_address_towards(host)
    return Gateway(host, own) if own else None


def gateway_in_table(text: str) -> str | None:
    """The default route's router in the text of /proc/net/route: the lowest metric wins.

    Columns: interface, destination, gateway, flags, references, use, metric, mask …; addresses as 8 hexadecimal digits
    of a number in the machine's byte order.
    """
    found: list[tuple[int, str]] = []
    for line in text.splitlines()[1:]:
        columns = line.split()
        try:
            destination, router, flags = (int(column, 16) for column in columns[1:4])
            metric, mask = int(columns[6]), int(columns[7], 16)
            host = str(ipaddress.IPv4Address(router.to_bytes(4, sys.byteorder)))
        except (ValueError, IndexError, OverflowError):
            continue
        if destination == 0 and mask == 0 and router and flags & _UP_GATEWAY == _UP_GATEWAY:
            found.append((metric, host))
    return min(found)[1] if found else None


def address_in(text: str) -> str | None:
    """The first IPv4 address of a router in the output of a routing tool."""
    for word in re.findall(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d./])", text):
        with contextlib.suppress(ValueError):
            address = ipaddress.IPv4Address(word)
            if not address.is_unspecified and not address.is_multicast:
                return str(address)
    return None


def own_address_towards(host: str) -> str | None:
    """The address that this machine sends from towards `host`. Nothing is sent: only the routing table is asked."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        found: str = probe.getsockname()[0]
        return found
    return None


def _routes() -> str:
    """Linux' routing table; "" where there is none to read."""
    with contextlib.suppress(OSError), ROUTES.open(encoding="ascii", errors="replace") as file:
        return file.read(MAX_TEXT)
    return ""


async def _output_of(command: Sequence[str]) -> str:
    """What a tool prints; "" when it is missing, fails or takes too long."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except (OSError, NotImplementedError, ValueError):
        return ""
    try:
        async with asyncio.timeout(TOOL_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return output[:MAX_TEXT].decode("ascii", "replace")
