from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.transport.fake_relay import FakeRelay
from tests.transport.reflectors import Reflector, reflector
from tests.transport.routers import router
from transport import netcheck as netcheck_module
from transport import udp_probe
from transport.gateway import Gateway
from transport.netcheck import netcheck
from transport.proto.net_report import PORT_FILTERED, PORT_OPEN, NetReport
from transport.proto.relay_frames import RefusalCode, Refused
from transport.proto.relay_url import BadRelayUrl


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp_probe, "WAIT", 0.5)
    monkeypatch.setattr(netcheck_module, "LOGIN_SECONDS", 3.0)


async def no_gateway() -> Gateway | None:
    return None


async def check(*relays: str, **settings: Any) -> NetReport:
    return await netcheck(relays, **{"find_gateway": no_gateway, **settings})


@contextlib.asynccontextmanager
async def relay_with_reflector() -> AsyncIterator[tuple[FakeRelay, Reflector]]:
    async with reflector() as it, FakeRelay(reflectors=(it.ports[0], it.ports[1])) as relay:
        yield relay, it


async def test_a_good_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netcheck_module, "is_global", lambda _: False)  # else no router is asked on a public machine
    async with relay_with_reflector() as (relay, _), router() as fake:

        async def gateway() -> Gateway:
            return fake.gateway()

        report = await check(relay.url, find_gateway=gateway)
        assert fake.mappings == {}  # given back
    assert report.udp is True
    assert report.ipv4 is not None
    assert report.ipv4.startswith("127.0.0.1:")
    assert (report.nat, report.mapping, report.filtering) == ("none", "none", PORT_OPEN)
    assert report.hairpin is None
    assert report.port_mapping == "pcp"
    assert report.port_mapping_detail.startswith("203.0.113.7:")
    assert report.mtu is not None
    assert report.mtu >= 1228
    assert report.clock_offset_s is not None
    assert abs(report.clock_offset_s) < 2
    (checked,) = report.relays
    assert (checked.url, checked.error, checked.udp) == (relay.url, "", True)
    assert checked.rtt_ms is not None
    assert report.works


async def test_udp_blocked() -> None:
    async with relay_with_reflector() as (relay, it):
        it.deaf = 1000
        report = await check(relay.url)
    assert report.udp is False
    assert report.nat == "blocked"
    assert any("UDP is blocked" in sentence for sentence in report.advice)
    assert report.works  # through the relay


async def test_a_relay_without_reflector() -> None:
    async with FakeRelay(reflectors=(0, 0)) as relay:
        report = await check(relay.url)
    assert (report.udp, report.nat, report.filtering, report.mtu) == (None, "unknown", "unknown", None)
    assert any("no" in sentence and "reflector" in sentence for sentence in report.advice)


async def test_a_symmetric_nat_is_called_hard() -> None:
    async with relay_with_reflector() as (relay, it):
        it.port_step = 1
        report = await check(relay.url)
    assert (report.nat, report.mapping) == ("hard", "address-and-port-dependent")


async def test_a_port_filter() -> None:
    async with relay_with_reflector() as (relay, it):
        it.filtered = True
        assert (await check(relay.url)).filtering == PORT_FILTERED
        it.filtered, it.other_port = False, False  # a reflector that does not know the wish proves nothing
        assert (await check(relay.url)).filtering == "unknown"


async def test_packets_above_a_size_are_lost() -> None:
    async with relay_with_reflector() as (relay, it):
        it.limit = 1252
        report = await check(relay.url)
    assert report.mtu == 1280
    assert any("1280" in sentence for sentence in report.advice)


async def test_a_dead_relay_beside_a_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netcheck_module, "LOGIN_SECONDS", 1.0)
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    dead = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with silent, relay_with_reflector() as (relay, _):
        report = await check(dead, relay.url, "http://127.0.0.1:9")
    assert [bool(one.error) for one in report.relays] == [True, False, True]
    assert report.udp is True
    assert report.works
    assert report.took_s < 8


async def test_a_relay_that_lets_in_only_members() -> None:
    async with FakeRelay() as relay:
        relay.refuse_with = Refused(RefusalCode.NOT_ON_LIST, 1000, "members only")
        report = await check(relay.url)
    assert "members only" in report.relays[0].error
    assert any("a key of its own" in sentence for sentence in report.advice)
    assert not report.works


async def test_nothing_there() -> None:
    report = await check("http://127.0.0.1:9")
    assert not report.works
    assert report.relays[0].rtt_ms is None
    assert report.advice[0].startswith("No relay can be used")


async def test_no_relay_at_all() -> None:
    report = await check()
    assert report.relays == ()
    assert "No relay was checked" in " ".join(report.advice)


async def test_the_same_relay_twice_is_checked_once() -> None:
    async with FakeRelay(reflectors=(0, 0)) as relay:
        assert len((await check(relay.url, relay.url + "/")).relays) == 1


async def test_what_is_no_url() -> None:
    with pytest.raises(BadRelayUrl):
        await check("ftp://relay")
