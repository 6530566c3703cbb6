"""A real run through deploy/caddy/Caddyfile. That through nginx is tests/transport/test_relay_nginx.py."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from relay.config import parse_network
from tests.deploy.conftest import skip_or_fail
from tests.deploy.fronts import caddy
from tests.relay.client import Client
from tests.relay.conftest import StartRelay, start_relay
from tests.transport.test_relay_nginx import free_port, make_certificates
from transport.proto.relay_frames import Data

__all__ = ["start_relay"]


def get(url: str, tls: ssl.SSLContext) -> int:
    try:
        with urllib.request.urlopen(url, context=tls, timeout=10) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


async def test_two_clients_talk_through_caddy(start_relay: StartRelay, tmp_path: Path) -> None:
    if shutil.which("caddy") is None:
        skip_or_fail("caddy is not installed")
    port = free_port()
    relay = await start_relay(names=frozenset([f"127.0.0.1:{port}"]), trusted_proxies=(parse_network("127.0.0.1/32"),))
    make_certificates(tmp_path)
    command = caddy(tmp_path, "127.0.0.1", port, f"127.0.0.1:{relay.address[1]}")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(30):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except OSError:
                    assert process.returncode is None, (await process.communicate())[1].decode()
                    await asyncio.sleep(0.05)
            writer.close()
        tls = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        invented = {"X-Forwarded-For": "203.0.113.7"}
        settings: Any = {"authority": f"127.0.0.1:{port}", "tls": tls}
        async with Client(port, headers=invented, **settings) as one, Client(port, **settings) as two:
            assert one.welcome is not None
            assert "203.0.113.7" not in one.welcome.observed
            datagrams = tuple(bytes([number]) * 1400 for number in range(20))
            await one.data(two.key, *datagrams)
            assert await two.expect(Data) == Data(one.key, datagrams)
        for path, status in {"/": 200, "/healthz": 200, "/metrics": 404, "/other": 404}.items():
            assert (path, await asyncio.to_thread(get, f"https://127.0.0.1:{port}{path}", tls)) == (path, status)
    finally:
        process.kill()
        await process.communicate()
