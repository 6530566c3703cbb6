"""reflector: every good request is answered from the right port; nothing is amplified."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest

from relay.metrics import Counts, Metrics, Unreflected
from relay.reflector import Reflector
from transport.errors import Address, BindFailed
from transport.proto.stun import binding_request, parse_binding_response

PATIENCE = 10.0


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
async def reflector(counts: Counts) -> AsyncIterator[Reflector]:
    made = Reflector(counts)
    await made.start("::", (0, 0))
    yield made
    made.close()


async def ask(sock: socket.socket, request: bytes, address: Address) -> tuple[bytes, Address]:
    """Send a request; the answer and where it comes from."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendto(sock, request, address)
    data, source = await asyncio.wait_for(loop.sock_recvfrom(sock, 2000), PATIENCE)
    return data, source[:2]


def udp(host: str) -> socket.socket:
    """A bound socket."""
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((host, 0))
    except OSError:
        pytest.skip(f"this machine has no {host}")
    sock.setblocking(False)
    return sock


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_both_ports_tell_the_address_and_answer_from_the_other_port_when_asked(
    reflector: Reflector, host: str
) -> None:
    first, second = reflector.ports
    assert first != second
    with udp(host) as sock:
        for port, other in ((first, second), (second, first)):
            for change in (False, True):
                transaction = os.urandom(12)
                answer, source = await ask(sock, binding_request(transaction, change_port=change), (host, port))
                assert parse_binding_response(answer) == (transaction, sock.getsockname()[:2])
                assert source == (host, other if change else port)


async def test_long_requests_are_answered_and_short_or_broken_ones_are_not(reflector: Reflector) -> None:
    good = os.urandom(12)
    with udp("127.0.0.1") as sock:
        target = ("127.0.0.1", reflector.ports[0])
        loop = asyncio.get_running_loop()
        short = b"\0\1\0\0\x21\x12\xa4\x42" + bytes(12)
        for ignored in (short, b"", b"\0" * 1200, binding_request(bytes(12))[:-1], b"\x40" + bytes(100)):
            await loop.sock_sendto(sock, ignored, target)
        answer, _ = await ask(sock, binding_request(good, 9000), target)
        parsed = parse_binding_response(answer)
        assert parsed is not None
        assert parsed[0] == good  # the first answer at all


async def test_answers_are_bounded_per_second(reflector: Reflector, counts: Counts) -> None:
    request = binding_request(bytes(12))
    source = ("192.0.2.1", 1234)
    answered = sum(reflector.answer(request, source) is not None for _ in range(20_000))
    assert 5_000 <= answered < 15_000
    assert reflector.answer(request, ("192.0.2.1", 0)) is None
    assert (counts.reflected, counts.unreflected[Unreflected.RATE], counts.unreflected[Unreflected.BAD]) == (
        answered,
        20_000 - answered,
        1,
    )


async def test_what_gets_no_answer_is_counted(reflector: Reflector, counts: Counts) -> None:
    short = b"\0\1\0\0\x21\x12\xa4\x42" + bytes(12)
    for number, data in enumerate((short, b"", bytes(1200)), 1):
        assert reflector.answer(data, ("192.0.2.1", 1234)) is None
        assert counts.unreflected[Unreflected.BAD] == number
    page = Metrics(counts, dict).render().decode()
    assert 'relay_reflector_drops_total{reason="bad"} 3.0' in page
    assert 'relay_reflector_drops_total{reason="rate"} 0.0' in page


async def test_a_port_in_use_is_one_line(reflector: Reflector) -> None:
    with pytest.raises(BindFailed, match=f"UDP port {reflector.ports[0]} on"):
        await Reflector(Counts()).start("127.0.0.1", (reflector.ports[0], 0))
