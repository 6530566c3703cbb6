"""Routers to test port mapping against: PCP and NAT-PMP on one UDP port, and a UPnP Internet gateway device."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from transport.gateway import Gateway

DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"


@dataclass
class FakeRouter(asyncio.DatagramProtocol):
    """Answers PCP and NAT-PMP as told; counts what it was asked."""

    pcp: bool = True
    pmp: bool = True
    result: int = 0
    external_host: str = "203.0.113.7"
    lease: int = 7200
    epoch: int = 1000
    port: int = 0
    ignore: int = 0  # questions to leave unanswered
    mappings: dict[int, int] = field(default_factory=dict)  # internal → external
    nonces: dict[int, bytes] = field(default_factory=dict)  # PCP's, by internal port
    asked: list[bytes] = field(default_factory=list)
    garbage: list[bytes] = field(default_factory=list)  # sent before each answer
    news: asyncio.Event = field(default_factory=asyncio.Event)
    transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, source: Any) -> None:
        self.asked.append(data)
        self.news.set()
        if self.ignore > 0:
            self.ignore -= 1
            return
        for junk in self.garbage:
            self.transport.sendto(junk, source)
        answer = self._pcp(data) if data[0] == 2 else self._pmp(data)
        if answer:
            self.transport.sendto(answer, source)

    def _pcp(self, data: bytes) -> bytes:
        if not self.pcp:
            return struct.pack(">BBHI", 0, data[1] | 0x80, 1, self.epoch) if self.pmp else b""
        opcode, lifetime = data[1], int.from_bytes(data[4:8], "big")
        head = struct.pack(">BBBBII12x", 2, opcode | 0x80, 0, self.result, lifetime and self.lease, self.epoch)
        if opcode == 0:
            return head
        internal = int.from_bytes(data[40:42], "big")
        if self.nonces.setdefault(internal, data[24:36]) != data[24:36]:
            return struct.pack(">BBBBII12x", 2, opcode | 0x80, 0, 2, 1800, self.epoch) + data[24:]
        external = self._map(internal, int.from_bytes(data[42:44], "big"), lifetime)
        host = bytes(10) + b"\xff\xff" + bytes(map(int, self.external_host.split(".")))
        return head + data[24:42] + external.to_bytes(2, "big") + host

    def _pmp(self, data: bytes) -> bytes:
        if not self.pmp:
            return struct.pack(">BBBBII12x", 2, data[1] | 0x80, 0, 1, 0, self.epoch) if self.pcp else b""
        if data[1] == 0:
            head = struct.pack(">BBHI", 0, 128, self.result, self.epoch)
            return head + bytes(map(int, self.external_host.split(".")))
        internal, wanted, lifetime = struct.unpack_from(">HHI", data, 4)
        external = self._map(internal, wanted, lifetime)
        lease = lifetime and self.lease
        return struct.pack(">BBHIHHI", 0, 129, self.result, self.epoch, internal, external, lease)

    def _map(self, internal: int, wanted: int, lifetime: int) -> int:
        if self.result:
            return 0
        if not lifetime:
            self.mappings.pop(internal, None)
            return 0
        return self.mappings.setdefault(internal, wanted or 50000)

    def gateway(self, ssdp_port: int = 9) -> Gateway:
        return Gateway("127.0.0.1", "127.0.0.1", self.port, ssdp_port)


@asynccontextmanager
async def router(**settings: Any) -> AsyncIterator[FakeRouter]:
    transport, protocol = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: FakeRouter(**settings), local_addr=("127.0.0.1", 0)
    )
    try:
        yield protocol
    finally:
        transport.close()


@dataclass
class FakeIgd(asyncio.DatagramProtocol):
    """An Internet gateway device: SSDP by UDP, description and SOAP by HTTP."""

    external_host: str = "203.0.113.7"
    taken: tuple[int, ...] = ()  # external ports that another machine has
    only_permanent: bool = False
    location: str = ""  # instead of the right one
    control_url: str = "/control"
    description: bytes = b""  # instead of the right one
    hang: bool = False
    actions: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    mappings: dict[int, dict[str, str]] = field(default_factory=dict)  # by external port
    mapped: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    ssdp_port: int = 0
    transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ssdp_port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, source: Any) -> None:
        location = self.location or f"http://127.0.0.1:{self.port}/root.xml"
        answer = f"HTTP/1.1 200 OK\r\nST: {DEVICE}\r\nLOCATION: {location}\r\nUSN: uuid:1::{DEVICE}\r\n\r\n"
        self.transport.sendto(answer.encode(), source)

    def gateway(self) -> Gateway:
        return Gateway("127.0.0.1", "127.0.0.1", 9, self.ssdp_port)

    async def root(self, _request: web.Request) -> web.Response:
        if self.hang:
            await asyncio.sleep(60)
        text = f"""<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0">
            <specVersion><major>1</major><minor>0</minor></specVersion><device><deviceType>{DEVICE}</deviceType>
            <friendlyName>router</friendlyName><manufacturer>m</manufacturer><modelName>m</modelName><UDN>uuid:1</UDN>
            <serviceList><service><serviceType>{SERVICE}</serviceType>
            <serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId><SCPDURL>/scpd.xml</SCPDURL>
            <controlURL>{self.control_url}</controlURL><eventSubURL>/event</eventSubURL></service></serviceList>
            </device></root>"""
        return web.Response(body=self.description or text.encode(), content_type="text/xml")

    async def scpd(self, _request: web.Request) -> web.Response:
        entry = [("NewRemoteHost", "in"), ("NewExternalPort", "in"), ("NewProtocol", "in")]
        target = [("NewInternalPort", "%"), ("NewInternalClient", "%"), ("NewEnabled", "%")]
        target += [("NewPortMappingDescription", "%"), ("NewLeaseDuration", "%")]
        actions = {
            "GetExternalIPAddress": [("NewExternalIPAddress", "out")],
            "AddPortMapping": entry + [(name, "in") for name, _ in target],
            "GetSpecificPortMappingEntry": entry + [(name, "out") for name, _ in target],
            "DeletePortMapping": entry,
        }
        types = {"NewExternalPort": "ui2", "NewInternalPort": "ui2", "NewEnabled": "boolean", "NewLeaseDuration": "ui4"}
        names = sorted({name for arguments in actions.values() for name, _ in arguments})
        listed = "".join(
            f"<action><name>{action}</name><argumentList>"
            + "".join(
                f"<argument><name>{name}</name><direction>{direction}</direction>"
                f"<relatedStateVariable>{name}</relatedStateVariable></argument>"
                for name, direction in arguments
            )
            + "</argumentList></action>"
            for action, arguments in actions.items()
        )
        variables = "".join(
            f'<stateVariable sendEvents="no"><name>{name}</name><dataType>{types.get(name, "string")}</dataType>'
            "</stateVariable>"
            for name in names
        )
        text = (
            '<?xml version="1.0"?><scpd xmlns="urn:schemas-upnp-org:service-1-0"><specVersion><major>1</major>'
            f"<minor>0</minor></specVersion><actionList>{listed}</actionList>"
            f"<serviceStateTable>{variables}</serviceStateTable></scpd>"
        )
        return web.Response(text=text, content_type="text/xml")

    async def control(self, request: web.Request) -> web.Response:
        action = request.headers["SOAPAction"].strip('"').partition("#")[2]
        given = dict(re.findall(r"<(New\w+)>([^<]*)</", await request.text()))
        self.actions.append((action, given))
        code, answer = self._act(action, given)
        if code:
            fault = (
                "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
                f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode>'
                "<errorDescription>no</errorDescription></UPnPError></detail></s:Fault>"
            )
        else:
            values = "".join(f"<{name}>{value}</{name}>" for name, value in answer.items())
            fault = f'<u:{action}Response xmlns:u="{SERVICE}">{values}</u:{action}Response>'
        envelope = (
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
            f's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>{fault}</s:Body></s:Envelope>'
        )
        return web.Response(text=envelope, status=500 if code else 200, content_type="text/xml")

    def _act(self, action: str, given: dict[str, str]) -> tuple[int, dict[str, str]]:
        port = int(given.get("NewExternalPort", "0"))
        match action:
            case "GetExternalIPAddress":
                return 0, {"NewExternalIPAddress": self.external_host}
            case "AddPortMapping":
                if self.only_permanent and given["NewLeaseDuration"] != "0":
                    return 725, {}
                if port in self.taken:
                    return 718, {}
                self.mappings[port] = given
                self.mapped.set()
                return 0, {}
            case "GetSpecificPortMappingEntry" if port in self.mappings:
                wanted = ("InternalPort", "InternalClient", "Enabled", "PortMappingDescription", "LeaseDuration")
                return 0, {f"New{name}": self.mappings[port][f"New{name}"] for name in wanted}
            case "DeletePortMapping" if port in self.mappings:
                del self.mappings[port]
                return 0, {}
        return 714, {}


@asynccontextmanager
async def igd(**settings: Any) -> AsyncIterator[FakeIgd]:
    transport, device = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: FakeIgd(**settings), local_addr=("127.0.0.1", 0)
    )
    app = web.Application()
    app.add_routes(
        [web.get("/root.xml", device.root), web.get("/scpd.xml", device.scpd), web.post("/control", device.control)]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    device.port = runner.addresses[0][1]
    try:
        yield device
    finally:
        transport.close()
        await runner.cleanup()
