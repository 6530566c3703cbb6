"""deploy/relay/Dockerfile: its steps work, what it makes is small, and it serves as an account that owns nothing."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path

import pytest

from tests.deploy.dockerfile import Image
from tests.relay.client import Client
from transport.proto.relay_frames import Data

MOST_BYTES = 60_000_000  # of 150 MB in all; python:3.11-slim takes the rest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("deploy images")]


def port_8080_is_free() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", 8080)) != 0


def test_it_has_what_the_relay_needs_and_nothing_else(relay_image: Image) -> None:
    assert relay_image.installed_bytes < MOST_BYTES
    print(f"the relay's image adds {relay_image.installed_bytes / 1e6:.1f} MB to its base")
    site = relay_image.upper / "opt/relay/lib/python3.11/site-packages"
    there = {path.name for path in site.iterdir() if path.is_dir() and not path.name.endswith(".dist-info")}
    assert {"relay", "transport", "websockets", "prometheus_client", "cryptography"} <= there
    assert not {"swarmnode", "numpy", "gguf", "llama_cpp", "pip", "qh3", "aioquic"} & there
    assert sorted(relay_image.exposed) == ["3478/udp", "3479/udp", "8080/tcp"]


async def test_it_serves_as_nobody_and_says_when_it_is_well(relay_image: Image) -> None:
    if not port_8080_is_free():
        pytest.skip("port 8080 of this machine is in use")
    health = relay_image.starting(relay_image.healthcheck)
    command = relay_image.starting([*relay_image.entrypoint, "--reflector", "0,0"])
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        line = await asyncio.wait_for(process.stderr.readline(), 60)
        assert line.startswith(b"relay ready on "), line
        status = await asyncio.to_thread(Path(f"/proc/{process.pid}/status").read_text)
        assert "Uid:\t10001\t10001\t10001\t10001" in status
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        well = await asyncio.to_thread(subprocess.run, health, capture_output=True, check=False)
        assert well.returncode == 0, well.stderr
        async with Client(8080) as one, Client(8080) as two:
            await one.data(two.key, b"through the container")
            assert await two.expect(Data) == Data(one.key, (b"through the container",))
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    gone = await asyncio.to_thread(subprocess.run, health, capture_output=True, check=False)
    assert gone.returncode == 1
