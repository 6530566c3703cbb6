"""A port of the router that leads to our UDP port, kept as long as the node runs. SHELL.

PCP and NAT-PMP are asked at once (router_port), then UPnP (upnp). The mapping is renewed at half of its lease, watched
in between (a router that restarted or got another address), and removed at the end. IPv4 only. An external address
that the Internet cannot reach is reported as "mapped behind another NAT", never as an address.

Called by surroundings (a node) and netcheck (doctor).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from transport.errors import Address
from transport.gateway import Gateway, MappingFailed, default_gateway
from transport.proto.candidates import is_public
from transport.proto.port_mapping_frames import NONCE_BYTES
from transport.router_port import ANY_ADDRESS, PcpRouter, PmpRouter, RouterSocket
from transport.upnp import UpnpRouter

logger = logging.getLogger(__name__)

UPNP_SECONDS = 3.0  # search, description and request together
REQUEST_SECONDS = 3.0  # one exchange of any protocol
CLOSE_SECONDS = 1.0
LEASE_SECONDS = 7200  # what both RFCs recommend
MIN_LEASE_SECONDS = 120  # a router that gives less is renewed no more often than this / 2
CHECK_SECONDS = 60.0  # between looks at the router's epoch: one small datagram on the LAN
MAX_MISSED_CHECKS = 3  # a router that says nothing in three looks is asked from the start
REFRESH_SECONDS = 1.0  # refresh() many times in a row is once a second
RETRY_SECONDS = 600.0  # where nothing could be mapped: someone may switch it on

OnMapped = Callable[[Address | None, str], None]


class Method(Protocol):
    """One protocol's way of mapping one port."""

    name: str

    async def map(self, port: int, wanted: Address, lifetime: int) -> tuple[Address, float]:
        """Make or renew the mapping: external address, lease in seconds. Raises MappingFailed."""
        ...

    async def intact(self) -> bool:
        """Is the mapping still there, as far as the router tells? Raises MappingFailed when it tells nothing."""
        ...

    async def unmap(self) -> None:
        """Remove the mapping; never raises for the router's faults."""
        ...

    def close(self) -> None:
        """Give back sockets."""
        ...


@dataclass(frozen=True, slots=True)
class MappedPort:
    """What the router gave us. lease: seconds."""

    external: Address
    how: str
    lease: float


class PortMapper:
    """Keeps one UDP port mapped. Its one task ends with close()."""

    def __init__(
        self,
        local_port: int,
        on_mapped: OnMapped,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        find_gateway: Callable[[], Awaitable[Gateway | None]] = default_gateway,
    ) -> None:
        """`on_mapped(address, how)` is called when the outcome changes.

        address: the external address, None without one. how: "pcp", "nat-pmp" or "upnp"; without an address the
        reason for people ("no router answers …", "mapped behind another NAT …").
        """
        self._local_port, self._on_mapped, self._find_gateway = local_port, on_mapped, find_gateway
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._refresh = asyncio.Event()
        self._gateway: Gateway | None = None
        self._method: Method | None = None
        self._told: tuple[Address | None, str] | None = None
        self._wanted = ANY_ADDRESS
        self._nonce = secrets.token_bytes(NONCE_BYTES)  # kept: a router takes no other for a port it has mapped
        self._began = float("-inf")

    @property
    def mapped(self) -> Address | None:
        """The external address, when there is one that the Internet can reach."""
        return self._told[0] if self._told else None

    @property
    def how(self) -> str:
        """As in `on_mapped`; "" before the first outcome."""
        return self._told[1] if self._told else ""

    def start(self) -> None:
        """Begin; the outcome comes through `on_mapped` within about four seconds."""
        loop = self._loop or asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), name="port-mapper")
        self._task.add_done_callback(_log_end)

    def refresh(self) -> None:
        """The network changed: look for the router again and renew now."""
        self._refresh.set()

    async def close(self) -> None:
        """Remove the mapping (at most CLOSE_SECONDS) and end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._remove()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._began + REFRESH_SECONDS - asyncio.get_running_loop().time()))
            self._began = asyncio.get_running_loop().time()
            self._refresh.clear()
            try:
                mapped = await self._obtain()
            except MappingFailed as error:
                self._tell(None, str(error))
                await self._pause(RETRY_SECONDS)
                continue
            if is_public(mapped.external[0]):
                self._tell(mapped.external, mapped.how)
            else:
                self._tell(None, f"mapped behind another NAT: {mapped.how} gave {mapped.external[0][:64]}")
            self._wanted = mapped.external
            await self._watch(mapped.lease)

    async def _obtain(self) -> MappedPort:
        """Renew what there is, or go through all methods. Raises MappingFailed."""
        gateway = await self._find_gateway()
        if self._method is not None:
            if gateway == self._gateway:
                with contextlib.suppress(MappingFailed, TimeoutError):
                    return await self._map(self._method)
            self._drop()  # not removed: another network, or a router that knows nothing of it any more
            self._wanted = ANY_ADDRESS
        if gateway is None:
            raise MappingFailed("there is no router with a default route")
        self._gateway = gateway
        why: list[str] = []
        for attempt in (self._by_router_port, self._by_upnp):
            try:
                return await attempt(gateway)
            except MappingFailed as error:
                why.append(str(error))
            except TimeoutError:
                why.append("UPnP: no answer")
            self._drop()
        raise MappingFailed(f"the router {gateway.host} maps no port ({'; '.join(why)})")

    async def _by_router_port(self, gateway: Gateway) -> MappedPort:
        """PCP and NAT-PMP at once. NAT-PMP maps only when PCP has failed, so that there are never two mappings."""
        link = await RouterSocket.open(gateway)
        pmp = PmpRouter(link)
        asking = asyncio.create_task(pmp.ask_address())
        try:
            try:
                self._method = PcpRouter(link, gateway.own_host, self._nonce)
                return await self._map(self._method)
            except MappingFailed as error:
                why = f"PCP: {error}"
            try:
                await asking
                self._method = pmp
                return await self._map(pmp)
            except MappingFailed as error:
                raise MappingFailed(f"{why}; NAT-PMP: {error}") from None
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _by_upnp(self, gateway: Gateway) -> MappedPort:
        async with asyncio.timeout(UPNP_SECONDS):
            try:
                self._method = await UpnpRouter.find(gateway)
                return await self._map(self._method)
            except MappingFailed as error:
                raise MappingFailed(f"UPnP: {error}") from None

    async def _map(self, method: Method) -> MappedPort:
        async with asyncio.timeout(REQUEST_SECONDS):
            external, lease = await method.map(self._local_port, self._wanted, LEASE_SECONDS)
        return MappedPort(external, method.name, min(max(lease, MIN_LEASE_SECONDS), LEASE_SECONDS))

    async def _watch(self, lease: float) -> None:
        """Until it is time to renew, the router lost the mapping, or refresh()."""
        assert self._method is not None
        loop = asyncio.get_running_loop()
        renew, missed = loop.time() + lease / 2, 0
        while (left := renew - loop.time()) > 0:
            if await self._pause(min(left, CHECK_SECONDS)) or loop.time() >= renew:
                return
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    if not await self._method.intact():
                        return
                missed = 0
            except (MappingFailed, TimeoutError):
                missed += 1
                if missed >= MAX_MISSED_CHECKS:
                    return

    async def _pause(self, seconds: float) -> bool:
        """Wait; True when refresh() ended it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._refresh.wait()
                return True
        return False

    def _tell(self, external: Address | None, how: str) -> None:
        if (external, how) != self._told:
            self._told = (external, how)
            logger.info("port mapping: %s %s", external, how)
            self._on_mapped(external, how)

    def _drop(self) -> None:
        if self._method is not None:
            self._method.close()
            self._method = None

    async def _remove(self) -> None:
        if self._method is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._method.unmap()
            self._drop()


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("port mapping ended", exc_info=error)
