"""`python -m relay` as a process: its ready line, signals, exit codes, TLS, and the connections it can hold."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from transport.identity import Identity
from transport.proto.relay_frames import Data, RefusalCode, Restarting
from transport.proto.stun import binding_request, parse_binding_response

from .client import PATIENCE, Client

Start = Callable[..., Awaitable[tuple[asyncio.subprocess.Process, int]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """start(flags…) → (process, port), once it says that it is ready."""
    started: list[asyncio.subprocess.Process] = []

    async def run(*flags: str) -> tuple[asyncio.subprocess.Process, int]:
        command = [sys.executable, "-m", "relay", "--listen", "127.0.0.1:0", "--reflector", "0,0", *flags]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        started.append(process)
        assert process.stderr is not None
        line = (await asyncio.wait_for(process.stderr.readline(), PATIENCE * 3)).decode()
        found = re.fullmatch(r"relay ready on 127\.0\.0\.1:(\d+) \(reflector UDP \d+, \d+\)\n", line)
        assert found, line
        return process, int(found[1])

    yield run
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, bytes]:
    """Exit code and what was left to say."""
    _, rest = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode is not None
    return process.returncode, rest


async def test_sigterm_tells_the_clients_and_exits_with_0(start: Start) -> None:
    process, port = await start()
    async with Client(port) as client:
        process.send_signal(signal.SIGTERM)
        await client.expect(Restarting)
        assert await client.closed() == 1012
        assert await ended(process) == (0, b"")


async def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    process, port = await start()
    stuck = socket.create_connection(("127.0.0.1", port))
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert (await ended(process))[0] == 0
    stuck.close()


async def test_sighup_reads_the_access_list_again(start: Start, tmp_path: Path) -> None:
    identity = Identity.generate()
    file = tmp_path / "access"
    file.write_text(f"{identity.peer_id}\n")
    process, port = await start("--access", str(file))
    async with Client(port, identity) as client:
        file.write_text("nonsense\n")
        process.send_signal(signal.SIGHUP)  # says what is wrong, and keeps the old list
        assert process.stderr is not None
        assert b"access_list_unusable" in await asyncio.wait_for(process.stderr.readline(), PATIENCE)
        file.write_text("")
        process.send_signal(signal.SIGHUP)
        assert (await client.refused()).code is RefusalCode.NOT_ON_LIST


async def test_tls_without_a_front(start: Start, tmp_path: Path) -> None:
    identity = Identity.generate()
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(identity.certificate_pem)
    key.write_bytes(identity.private_key_pem)
    process, port = await start("--tls-cert", str(certificate), "--tls-key", str(key))
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with Client(port, tls=context) as one, Client(port, tls=context) as two:
        datagrams = [bytes([number]) * 60_000 for number in range(4)]
        for _ in range(20):  # one at a time: a queue that is full drops its oldest
            await one.data(two.key, *datagrams)
            assert await two.expect(Data) == Data(one.key, tuple(datagrams))
        async with Client(port, one.identity, tls=context):
            assert (await one.refused()).code is RefusalCode.REPLACED
    plain = socket.create_connection(("127.0.0.1", port))
    plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
    plain.close()
    process.send_signal(signal.SIGTERM)
    assert await ended(process) == (0, b"")


async def test_behind_a_front_the_reflector_is_at_an_address_of_its_own(start: Start) -> None:
    _, port = await start("--reflector-host", "127.0.0.9")
    loop = asyncio.get_running_loop()
    async with Client(port) as client:
        assert client.welcome is not None
        for number in client.welcome.reflectors:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.bind(("127.0.0.1", number))  # free: it is not where the WebSocket is
                await loop.sock_sendto(sock, binding_request(bytes(12)), ("127.0.0.9", number))
                answer = await asyncio.wait_for(loop.sock_recv(sock, 2000), PATIENCE)
            assert parse_binding_response(answer) == (bytes(12), ("127.0.0.1", number))


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The relay with flags with which it does not stay."""
    return subprocess.run(
        [sys.executable, "-m", "relay", *flags], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        (["--listen", "nonsense"], 2, "no address to listen on"),
        (["--listen", "\u202e:80", "--reflector", "off"], 1, "no host name"),
        (["--listen", "127.0.0.1:0", "--reflector-host", "\u202e"], 1, "no host name"),
        (["--listen", "127.0.0.1:0", "--reflector-host", "192.0.2.1"], 1, "--reflector-host"),
        (["--unknown"], 2, "unrecognized"),
        (["--tls-cert", "x"], 2, "belong together"),
        (["--client-rate", "-1"], 2, "client_rate"),
        (["--trusted-proxy", "x"], 2, "no address or network"),
        (["--listen", "127.0.0.1:0", "--reflector", "off", "--access", "/nonexistent"], 1, "access list"),
        (["--listen", "192.0.2.1:0", "--reflector", "off"], 1, "choose another --listen"),
    ],
)
def test_what_cannot_be_is_one_line(flags: list[str], code: int, part: str) -> None:
    done = run(*flags)
    assert (done.returncode, done.stdout) == (code, "")
    assert part in done.stderr
    assert done.stderr.count("\n") == 1


async def test_a_port_in_use_is_one_line(start: Start) -> None:
    _, port = await start()
    done = await asyncio.to_thread(run, "--listen", f"127.0.0.1:{port}", "--reflector", "off")
    assert done.returncode == 1
    assert f"TCP port {port}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_and_defaults() -> None:
    done = run("--help")
    assert done.returncode == 0
    for flag in ("--listen", "--reflector", "--name", "--access", "--trusted-proxy", "--client-rate", "--global-rate"):
        assert flag in done.stdout
