"""Port mappings through a UPnP Internet gateway device (WANIPConnection / WANPPPConnection AddPortMapping). SHELL.

The protocol's XML and SOAP are async-upnp-client's, imported when a router has answered the search; without that
package there is no UPnP. What is ours is the caution: only the default router is listened to, every URL must stay on
it, redirects are not followed, bodies and their number are bounded. Called by port_mapping.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transport.errors import Address
from transport.gateway import Gateway, MappingFailed
from transport.proto.port_mapping_frames import parse_ssdp_location, ssdp_search

if TYPE_CHECKING:
    from async_upnp_client.client import UpnpService
    from async_upnp_client.client_factory import UpnpFactory
    from async_upnp_client.const import HttpRequest, HttpResponse

logger = logging.getLogger(__name__)

SSDP_GROUP = "239.255.255.250"
DEVICES = tuple(f"urn:schemas-upnp-org:device:InternetGatewayDevice:{version}" for version in (1, 2))
SERVICES = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)
SEARCH_AGAIN_SECONDS = 0.4  # SSDP is UDP: ask once more
MAX_BODY = 512 * 1024  # the longest description seen in the wild is below 100 KiB
MAX_CHOICES = 4  # external ports (and kinds of lease) tried
MAX_REQUESTS = 24  # one per service of the device, and ours
DESCRIPTION = "swarmnode"

# Error codes of WANIPConnection:1, 2.4.16.
CONFLICT, ONLY_PERMANENT, NO_SUCH_ENTRY = 718, 725, 714


class UpnpRouter:
    """A router that was found and described; maps one UDP port."""

    name = "upnp"

    def __init__(self, service: UpnpService, own_host: str) -> None:
        self._service, self._own_host = service, own_host
        self._external: Address | None = None
        self._asked = 0  # the external port of a request in flight

    @classmethod
    async def find(cls, gateway: Gateway) -> UpnpRouter:
        """Search, fetch the description and pick the service. Raises MappingFailed; the caller bounds the time."""
        location = await _search(gateway)
        try:
            factory = await asyncio.to_thread(_factory, gateway.host)  # half a second of imports
        except ImportError:
            raise MappingFailed("the package async-upnp-client is not installed") from None
        try:
            device = await factory.async_create_device(location)
            services = {service.service_type: service for service in device.all_services}
        except Exception as error:  # a hostile description makes the library fail in any way it likes
            raise MappingFailed(f"its description cannot be read: {_one_line(error)}") from error
        for kind in SERVICES:
            if kind in services and services[kind].has_action("AddPortMapping"):
                return cls(services[kind], gateway.own_host)
        raise MappingFailed("it has no service that maps ports")

    async def map(self, port: int, wanted: Address, lifetime: int) -> tuple[Address, float]:
        """Map UDP `port`, at best to the same port outside. The external address and the lease in seconds.

        Raises MappingFailed.
        """
        host = await self._external_host()
        choice, lease = wanted[1] or port, lifetime
        for _ in range(MAX_CHOICES):
            self._asked = choice
            error = await self._add(port, choice, lease)
            if error == 0:
                self._external, self._asked = (host, choice), 0
                return self._external, float(lease or lifetime)
            self._asked = 0
            if error == ONLY_PERMANENT and lease:
                lease = 0
            elif error == CONFLICT:  # another machine's; where we go then is fixed, so that a restart finds its own
                choice = 49152 + choice * 7919 % 16384
            else:
                raise MappingFailed(f"refused with error {error}" if error else "refused")
        raise MappingFailed("its ports are taken by other machines")

    async def intact(self) -> bool:
        """Does the router still have the mapping and its external address?"""
        if self._external is None:
            return False
        if await self._external_host() != self._external[0]:
            return False
        if not self._service.has_action("GetSpecificPortMappingEntry"):
            return True
        try:
            entry = await self._call("GetSpecificPortMappingEntry", **_entry(self._external[1]))
        except _Failed as failed:
            return failed.code != NO_SUCH_ENTRY
        return str(entry.get("NewInternalClient", self._own_host)) == self._own_host

    async def unmap(self) -> None:
        """Remove the mapping; failures are the router's to live with (the lease ends).

        A request that was interrupted may have made one: that is removed only if the router says that it is ours.
        """
        external, self._external = self._external, None
        with contextlib.suppress(_Failed):
            if self._asked and not external:
                entry = await self._call("GetSpecificPortMappingEntry", **_entry(self._asked))
                if str(entry.get("NewInternalClient")) == self._own_host:
                    external = ("", self._asked)
            if external is not None:
                await self._call("DeletePortMapping", **_entry(external[1]))

    def close(self) -> None:
        """Nothing stays open between requests."""

    async def _external_host(self) -> str:
        try:
            answer = await self._call("GetExternalIPAddress")
            return str(ipaddress.IPv4Address(str(answer.get("NewExternalIPAddress"))[:64]))
        except (_Failed, ValueError) as error:
            raise MappingFailed(f"it does not tell its external address: {_one_line(error)}") from error

    async def _add(self, port: int, external: int, lease: int) -> int | None:
        """0 when it was mapped, else the router's error code (None when it gave none)."""
        try:
            await self._call(
                "AddPortMapping",
                **_entry(external),
                NewInternalPort=port,
                NewInternalClient=self._own_host,
                NewEnabled=True,
                NewPortMappingDescription=DESCRIPTION,
                NewLeaseDuration=lease,
            )
        except _Failed as failed:
            return failed.code
        return 0

    async def _call(self, action: str, **arguments: Any) -> Mapping[str, Any]:
        """Call an action of the service. Any: values as the library codes them. Raises _Failed."""
        try:
            return await self._service.action(action).async_call(**arguments)
        except Exception as error:  # see find()
            code = getattr(error, "error_code", None)
            raise _Failed(code if isinstance(code, int) else None, _one_line(error)) from error


class _Failed(Exception):
    def __init__(self, code: int | None, detail: str) -> None:
        self.code = code
        super().__init__(detail)


def _entry(external_port: int) -> dict[str, object]:
    return {"NewRemoteHost": "", "NewExternalPort": external_port, "NewProtocol": "UDP"}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:120]


class _SearchProtocol(asyncio.DatagramProtocol):
    """Takes the first good answer of the router."""

    def __init__(self, router: str) -> None:
        self._router = router
        self.location: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, source: Any) -> None:  # Any: asyncio's address tuples
        if source[0] != self._router or self.location.done():
            return
        location = parse_ssdp_location(data)
        if location is not None and _is_on(location, self._router):
            self.location.set_result(location)

    def error_received(self, _error: Exception) -> None:
        """The router refuses, or there is no multicast here: the caller's time-out ends it."""


async def _search(gateway: Gateway) -> str:
    """The description's URL of the router's Internet gateway device."""
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.create_datagram_endpoint(
            lambda: _SearchProtocol(gateway.host), local_addr=(gateway.own_host, 0)
        )
    except OSError as error:
        raise MappingFailed(f"no socket: {error.strerror or error}") from error
    try:
        with contextlib.suppress(OSError):  # several interfaces: the one towards the router
            udp: socket.socket = transport.get_extra_info("socket")
            udp.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(gateway.own_host))
        while True:
            for kind in DEVICES:
                for host in (SSDP_GROUP, gateway.host):
                    transport.sendto(ssdp_search(kind), (host, gateway.ssdp_port))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEARCH_AGAIN_SECONDS):
                    return await asyncio.shield(protocol.location)
    finally:
        protocol.location.cancel()
        transport.close()


def _is_on(url: str, router: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme == "http" and parts.hostname == router and parts.port != 0
    except ValueError:
        return False


def _factory(router: str) -> UpnpFactory:
    """The library, with a way to the network that is bounded and bound to the router. Raises ImportError."""
    import aiohttp  # noqa: PLC0415
    from async_upnp_client.client import UpnpRequester  # noqa: PLC0415
    from async_upnp_client.client_factory import UpnpFactory  # noqa: PLC0415
    from async_upnp_client.const import HttpResponse as Response  # noqa: PLC0415
    from async_upnp_client.exceptions import UpnpConnectionError  # noqa: PLC0415

    class RouterRequester(UpnpRequester):
        """One connection per request; at most MAX_REQUESTS for the description."""

        def __init__(self) -> None:
            self.requests = 0

        async def async_http_request(self, http_request: HttpRequest) -> HttpResponse:
            self.requests += http_request.method == "GET"
            if self.requests > MAX_REQUESTS or not _is_on(http_request.url, router):
                raise UpnpConnectionError("the description leads elsewhere or is endless")
            try:
                async with (
                    aiohttp.ClientSession(auto_decompress=False) as session,
                    session.request(
                        http_request.method,
                        http_request.url,
                        headers=http_request.headers,
                        data=http_request.body,
                        allow_redirects=False,
                    ) as answer,
                ):
                    body = bytearray()
                    async for part in answer.content.iter_chunked(64 * 1024):
                        body += part
                        if len(body) > MAX_BODY:
                            raise UpnpConnectionError("the answer is too long")
                    return Response(answer.status, dict(answer.headers), body.decode("utf-8", "replace"))
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise UpnpConnectionError(_one_line(error)) from error

    return UpnpFactory(RouterRequester(), non_strict=True)
