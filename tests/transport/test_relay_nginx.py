"""The shipped nginx configuration in front of a relay, with a certificate that the test makes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.transport.fake_relay import FakeRelay
from tests.transport.relay_process import RelayProcess
from transport.identity import Identity, PeerId
from transport.proto import relay_frames as frames
from transport.proto.relay_url import parse_relay_url
from transport.relay_link import RelayLink
from transport.relay_session import RelayLinkConfig

MakeFront = Callable[..., Awaitable["Front"]]

CONF = Path(__file__).parents[2] / "deploy" / "nginx" / "relay.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
NGINX_HOST = "127.0.0.5"  # nginx' own address towards the relay: the clients' is not that of a trusted front
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)

pytestmark = pytest.mark.skipif(
    NGINX is None and os.environ.get("NATLAB_REQUIRE") != "1", reason="nginx is not installed"
)

MAIN = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/relay.conf;
}}
"""


@dataclass
class Front:
    """nginx before a relay."""

    folder: Path
    port: int
    relay: FakeRelay
    ca_file: Path
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def start(self) -> None:
        assert NGINX is not None, "NATLAB_REQUIRE=1, but nginx is not installed"
        self.process = await asyncio.create_subprocess_exec(
            NGINX, "-p", str(self.folder), "-e", str(self.folder / "error.log"), "-c", str(self.folder / "nginx.conf")
        )
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                assert self.process.returncode is None, (self.folder / "error.log").read_text()
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


def make_certificates(
    folder: Path, name: str = "127.0.0.1", start: datetime.datetime = NOW - DAY, end: datetime.datetime = NOW + DAY
) -> None:
    """An authority in ca.pem, and chain.pem and key.pem for `name`."""

    def subject(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def write(path: Path, *parts: bytes) -> None:
        path.write_bytes(b"".join(parts))

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = (
        x509.CertificateBuilder(subject("ca"), subject("ca"), ca_key.public_key(), x509.random_serial_number())
        .not_valid_before(NOW - 10 * DAY)
        .not_valid_after(NOW + 10 * DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(False, False, False, False, False, True, True, False, False),  # key and CRL signing
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        alternative = x509.DNSName(name)
    leaf = (
        x509.CertificateBuilder(subject("ca"), subject("relay"), key.public_key(), x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    write(folder / "ca.pem", ca.public_bytes(pem))
    write(folder / "chain.pem", leaf.public_bytes(pem), ca.public_bytes(pem))
    write(
        folder / "key.pem",
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
async def make_front(tmp_path: Path) -> AsyncIterator[MakeFront]:
    """Call it with what make_certificates takes: nginx with the shipped configuration, before a relay.

    relay_port: before the relay on this port of 127.0.0.1, instead of the fake one.
    """
    async with FakeRelay() as relay:
        fronts: list[Front] = []

        async def make(relay_port: int = 0, **certificate: object) -> Front:
            make_certificates(tmp_path, **certificate)  # type: ignore[arg-type]
            front = Front(tmp_path, free_port(), relay, tmp_path / "ca.pem")
            text = CONF.read_text()
            for shipped, here in {
                "listen 443 ssl;": f"listen 127.0.0.1:{front.port} ssl;",
                "listen [::]:443 ssl;": "",
                "/etc/letsencrypt/live/relay.example/fullchain.pem": str(tmp_path / "chain.pem"),
                "/etc/letsencrypt/live/relay.example/privkey.pem": str(tmp_path / "key.pem"),
                "proxy_http_version 1.1;": f"proxy_http_version 1.1; proxy_bind {NGINX_HOST};",
                "http://127.0.0.1:8080;": f"http://127.0.0.1:{relay_port or relay.port};",
            }.items():
                assert shipped in text
                text = text.replace(shipped, here)
            (tmp_path / "relay.conf").write_text(text)
            (tmp_path / "nginx.conf").write_text(MAIN.format(folder=tmp_path))
            relay.authority = f"127.0.0.1:{front.port}"
            fronts.append(front)
            await front.start()
            return front

        yield make
        for front in fronts:
            await front.stop()


class Node:
    """A link and what it told."""

    def __init__(self, url: str, ca_file: Path | None, identity: Identity | None = None) -> None:
        self.identity = identity or Identity.generate()
        self.states: asyncio.Queue[tuple[bool, str]] = asyncio.Queue()
        self.received: asyncio.Queue[bytes] = asyncio.Queue()
        self.link = RelayLink(
            parse_relay_url(url),
            self.identity,
            replace(RelayLinkConfig(), ca_file=ca_file),
            self._on_datagrams,
            lambda _url, up, reason: self.states.put_nowait((up, reason)),
            lambda _url, _peer, _why: None,
        )
        self.link.start()

    def _on_datagrams(self, _url: str, _peer: PeerId, datagrams: list[bytes], _disco: bool) -> None:
        for datagram in datagrams:
            self.received.put_nowait(datagram)

    async def is_up(self) -> None:
        async with asyncio.timeout(15):
            while not (await self.states.get())[0]:
                pass

    async def is_down(self) -> str:
        async with asyncio.timeout(15):
            while True:
                up, reason = await self.states.get()
                if not up:
                    return reason


async def get(front: Front, path: str) -> int:
    """The HTTP status of a page."""
    context = ssl.create_default_context(cafile=str(front.ca_file))
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port, ssl=context)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make_one(url: str, ca_file: Path | None, identity: Identity | None = None) -> Node:
        nodes.append(Node(url, ca_file, identity))
        return nodes[-1]

    yield make_one
    await asyncio.gather(*(node.link.close() for node in nodes))


async def test_two_nodes_talk_through_nginx(make_front: MakeFront, make: Callable[..., Node]) -> None:
    front = await make_front()
    a, b = make(front.url, front.ca_file), make(front.url, front.ca_file)
    await a.is_up()
    await b.is_up()
    datagrams = [number.to_bytes(4) + bytes(1448) for number in range(2000)]
    for at in range(0, len(datagrams), 50):
        assert a.link.send(b.identity.peer_id, datagrams[at : at + 50])
        await asyncio.sleep(0.001)
    a.link.send(b.identity.peer_id, [b"disco"], disco=True)
    async with asyncio.timeout(15):
        found = [await b.received.get() for _ in range(2001 - a.link.counters.dropped_frames)]
    assert b"disco" in found
    numbers = [int.from_bytes(datagram[:4]) for datagram in found if datagram != b"disco"]
    assert numbers == sorted(numbers)


async def test_the_relay_learns_the_name_that_was_dialled_and_the_clients_address(
    make_front: MakeFront, make: Callable[..., Node]
) -> None:
    front = await make_front()
    node = make(front.url, front.ca_file)
    await node.is_up()
    request = front.relay.sessions[node.identity.peer_id.raw].request
    assert request is not None
    assert request.headers["Host"] == f"127.0.0.1:{front.port}"
    assert request.headers["X-Forwarded-For"] == "127.0.0.1"


async def test_the_real_relay_behind_nginx_believes_its_header_and_serves_people(
    make_front: MakeFront, make: Callable[..., Node]
) -> None:
    relay = RelayProcess("--trusted-proxy", f"{NGINX_HOST}/32")
    await relay.start()
    try:
        front = await make_front(relay_port=relay.port)
        a, b = make(front.url, front.ca_file), make(front.url, front.ca_file)
        await a.is_up()
        await b.is_up()
        assert a.link.observed.startswith("127.0.0.1:")
        a.link.send(b.identity.peer_id, [b"through both"])
        async with asyncio.timeout(10):
            assert await b.received.get() == b"through both"
        assert await get(front, "/healthz") == 200
        assert await get(front, "/") == 200
        assert await get(front, "/metrics") == 404
    finally:
        await relay.end()


async def test_a_fight_for_one_key_is_ended_behind_nginx_too(make_front: MakeFront, make: Callable[..., Node]) -> None:
    relay = RelayProcess("--trusted-proxy", NGINX_HOST)
    await relay.start()
    try:
        front = await make_front(relay_port=relay.port)
        identity = Identity.generate()
        node = make(front.url, front.ca_file, identity)
        for _ in range(2):  # who is replaced obeys, but others with its key come
            await node.is_up()
            newer = make(front.url, front.ca_file, identity)
            assert "another session" in await node.is_down()
            node = newer
        await node.is_up()
        last = make(front.url, front.ca_file, identity)
        reasons = {await node.is_down(), await last.is_down()}
        assert all("give one of them another key" in reason for reason in reasons), reasons
    finally:
        await relay.end()


async def test_a_relay_that_is_down_behind_nginx_is_named_and_come_back_to(
    make_front: MakeFront, make: Callable[..., Node]
) -> None:
    front = await make_front()
    node = make(front.url, front.ca_file)
    await node.is_up()
    await front.relay.stop()
    await node.is_down()
    assert "HTTP 502" in await node.is_down()
    await front.relay.listen()
    await node.is_up()


async def test_a_front_that_crashed_is_come_back_to(make_front: MakeFront, make: Callable[..., Node]) -> None:
    front = await make_front()
    node = make(front.url, front.ca_file)
    await node.is_up()
    await front.stop()
    await node.is_down()
    await front.start()
    await node.is_up()


@pytest.mark.parametrize(
    ("certificate", "trusted", "words"),
    [
        ({}, False, "signed by nobody known here; give its authority's file"),
        ({"name": "other.example"}, True, "is for another name"),
        ({"start": NOW - 3 * DAY, "end": NOW - 2 * DAY}, True, "expired; this machine's clock says"),
        ({"start": NOW + 2 * DAY, "end": NOW + 3 * DAY}, True, "not valid yet; this machine's clock says"),
    ],
)
async def test_a_certificate_that_does_not_verify_is_explained(
    make_front: MakeFront,
    make: Callable[..., Node],
    certificate: dict[str, object],
    trusted: bool,
    words: str,
) -> None:
    front = await make_front(**certificate)
    node = make(front.url, front.ca_file if trusted else None)
    assert words in await node.is_down()


async def test_tls_where_none_is_and_none_where_it_is(make_front: MakeFront, make: Callable[..., Node]) -> None:
    front = await make_front()
    plain = make(f"http://127.0.0.1:{front.port}", None)
    assert "HTTP 400" in await plain.is_down()
    secure = make(f"https://127.0.0.1:{front.relay.port}", front.ca_file)
    assert "TLS" in await secure.is_down()


async def test_a_file_of_authorities_that_is_missing_is_named(make: Callable[..., Node], tmp_path: Path) -> None:
    node = make("https://127.0.0.1:1", tmp_path / "missing.pem")
    assert "missing.pem" in await node.is_down()


async def test_only_what_nodes_and_people_need_is_open(make_front: MakeFront) -> None:
    front = await make_front()
    for path, status in (("/metrics", 404), ("/anything", 404), ("/healthz", 426), ("/", 426)):
        assert await get(front, path) == status, path  # 426 is the fake relay's own answer to plain HTTP


def test_the_frames_path_is_the_one_that_nginx_passes() -> None:
    assert f"location = {frames.PATH} {{" in CONF.read_text()
