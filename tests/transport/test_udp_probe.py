from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.transport.reflectors import reflector
from transport import udp_probe
from transport.udp_probe import UdpProbe


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp_probe, "WAIT", 0.5)


@pytest.fixture
async def probe() -> AsyncIterator[UdpProbe]:
    it = await UdpProbe.open(4)
    assert it is not None
    yield it
    it.close()


async def test_the_address_that_the_reflector_sees(probe: UdpProbe) -> None:
    async with reflector() as it:
        one, two = await asyncio.gather(probe.ask(it.at(0)), probe.ask(it.at(1)))
    assert one is not None
    assert two is not None
    assert one.address == two.address == ("127.0.0.1", probe.address[1])
    assert (one.source, two.source) == (it.at(0), it.at(1))
    assert one.sent <= one.at


async def test_over_ipv6() -> None:
    probe = await UdpProbe.open(6)
    if probe is None:
        pytest.skip("no IPv6 on this system")
    try:
        async with reflector("::1") as it:
            seen = await probe.ask(it.at(0))
        assert seen is not None
        assert seen.address == ("::1", probe.address[1])
    finally:
        probe.close()


async def test_a_lost_question_is_asked_again(probe: UdpProbe) -> None:
    async with reflector() as it:
        it.deaf = 1
        assert await probe.ask(it.at(0)) is not None


async def test_silence_and_foreign_answers(probe: UdpProbe) -> None:
    async with reflector() as it:
        it.wrong_transaction = True
        assert await probe.ask(it.at(0)) is None


async def test_an_answer_from_another_host_does_not_count(probe: UdpProbe) -> None:
    async with reflector() as it, reflector("127.0.0.2") as other:
        it.transports = other.transports
        assert await probe.ask(it.at(0)) is None


async def test_the_other_port_answers(probe: UdpProbe) -> None:
    async with reflector() as it:
        seen = await probe.ask(it.at(0), change_port=True)
    assert seen is not None
    assert seen.source == it.at(1)


async def test_sizes(probe: UdpProbe) -> None:
    whole = await UdpProbe.open(4, whole=True)
    assert whole is not None
    try:
        async with reflector() as it:
            it.limit = 1400
            small, large = await asyncio.gather(whole.ask(it.at(0), size=1400), whole.ask(it.at(0), size=1404))
    finally:
        whole.close()
    assert small is not None
    assert large is None


async def test_a_word_from_another_socket(probe: UdpProbe) -> None:
    sender = await UdpProbe.open(4)
    assert sender is not None
    try:
        assert await probe.hears(sender, ("127.0.0.1", probe.address[1]))
        assert not await probe.hears(sender, ("127.0.0.1", sender.address[1]))
    finally:
        sender.close()


async def test_garbage_changes_nothing(probe: UdpProbe) -> None:
    async with reflector() as it:
        for junk in (b"", b"\x01\x01", b"\x00" * 100, bytes(range(256)) * 20):
            it.transports[0].sendto(junk, ("127.0.0.1", probe.address[1]))
        assert await probe.ask(it.at(0)) is not None
