from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.transport.routers import FakeRouter, igd, router
from transport import port_mapping, router_port
from transport.errors import Address
from transport.gateway import Gateway
from transport.port_mapping import PortMapper


class Outcomes:
    """What a mapper told, and a way to wait for the next."""

    def __init__(self) -> None:
        self.all: list[tuple[Address | None, str]] = []
        self._news = asyncio.Event()

    def add(self, external: Address | None, how: str) -> None:
        self.all.append((external, how))
        self._news.set()

    async def next(self, count: int = 1) -> tuple[Address | None, str]:
        async with asyncio.timeout(10):
            while len(self.all) < count:
                self._news.clear()
                await self._news.wait()
        return self.all[count - 1]


@contextlib.asynccontextmanager
async def mapper(gateway: Gateway | None, port: int = 4433) -> AsyncIterator[tuple[PortMapper, Outcomes]]:
    outcomes = Outcomes()

    async def find() -> Gateway | None:
        return gateway

    it = PortMapper(port, outcomes.add, find_gateway=find)
    it.start()
    try:
        yield it, outcomes
    finally:
        await it.close()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No UPnP search on this machine's own network, and refresh() at once."""
    monkeypatch.setattr("transport.upnp.SSDP_GROUP", "127.0.0.1")
    monkeypatch.setattr(port_mapping, "UPNP_SECONDS", 0.2)
    monkeypatch.setattr(port_mapping, "REFRESH_SECONDS", 0.0)


async def until(router: FakeRouter, count: int) -> None:
    """Until the router was asked `count` times."""
    async with asyncio.timeout(10):
        while len(router.asked) < count:
            router.news.clear()
            await router.news.wait()


class TestRouterPort:
    @pytest.mark.parametrize(
        ("pcp", "pmp", "how"), [(True, True, "pcp"), (True, False, "pcp"), (False, True, "nat-pmp")]
    )
    async def test_mapped_and_removed_at_the_end(self, pcp: bool, pmp: bool, how: str) -> None:
        async with router(pcp=pcp, pmp=pmp) as fake:
            async with mapper(fake.gateway()) as (it, outcomes):
                external, by = await outcomes.next()
                assert (by, it.how) == (how, how)
                assert external == it.mapped == ("203.0.113.7", fake.mappings[4433])
            assert fake.mappings == {}

    async def test_a_lost_question_is_asked_again(self) -> None:
        async with router(ignore=2) as fake, mapper(fake.gateway()) as (_, outcomes):
            assert (await outcomes.next())[1] == "pcp"

    async def test_garbage_and_answers_to_others_change_nothing(self) -> None:
        foreign = bytes.fromhex(
            "0281000000001c2000000e10000000000000000000000000"
            "ffffffffffffffffffffffff110000001151c35000000000000000000000ffff01020304"
        )
        garbage = [b"", b"\xff" * 60, b"\x02\x81", foreign, bytes(1500)]
        async with router(garbage=garbage) as fake, mapper(fake.gateway()) as (_, outcomes):
            assert (await outcomes.next())[0] == ("203.0.113.7", fake.mappings[4433])

    async def test_only_the_router_is_heard(self) -> None:
        """A mapping "made" by another machine of the LAN, with everything else right."""
        async with router(pmp=False) as fake, router(pmp=False, external_host="198.51.100.66") as liar:
            real = fake.transport
            fake.transport = liar.transport  # the answer comes from another port
            async with mapper(fake.gateway()) as (_, outcomes):
                external, why = await outcomes.next()
                assert external is None
                assert "PCP: no answer" in why
            fake.transport = real

    async def test_a_router_that_refuses_says_why(self) -> None:
        async with router(result=2) as fake, mapper(fake.gateway()) as (_, outcomes):
            external, why = await outcomes.next()
            assert external is None
            assert "PCP: switched off in the router" in why

    @pytest.mark.parametrize("host", ["192.168.0.9", "100.64.3.4", "127.0.0.1", "0.0.0.0", "224.0.0.1"])
    async def test_behind_another_nat(self, host: str) -> None:
        async with router(external_host=host) as fake, mapper(fake.gateway()) as (it, outcomes):
            assert await outcomes.next() == (None, f"mapped behind another NAT: pcp gave {host}")
            assert it.mapped is None

    async def test_no_router(self) -> None:
        async with mapper(None) as (_, outcomes):
            assert await outcomes.next() == (None, "there is no router with a default route")

    async def test_refresh_renews_and_tells_only_changes(self) -> None:
        async with router() as fake, mapper(fake.gateway()) as (it, outcomes):
            await outcomes.next()
            seen = len(fake.asked)
            it.refresh()
            await until(fake, seen + 1)
            fake.external_host = "203.0.113.99"
            it.refresh()
            assert (await outcomes.next(2))[0] == ("203.0.113.99", fake.mappings[4433])
            nonces = {data[24:36] for data in fake.asked if data[:2] == b"\x02\x01"}
            assert len(nonces) == 1  # a renewal, not a second mapping

    async def test_another_router_is_asked_anew(self) -> None:
        async with router() as one, router(pcp=False, external_host="198.51.100.1") as two:
            here, outcomes = [one.gateway()], Outcomes()

            async def find() -> Gateway:
                return here[0]

            it = PortMapper(4433, outcomes.add, find_gateway=find)
            it.start()
            assert (await outcomes.next())[1] == "pcp"
            here[0] = two.gateway()
            it.refresh()
            assert await outcomes.next(2) == (("198.51.100.1", two.mappings[4433]), "nat-pmp")
            await it.close()
            assert two.mappings == {}

    @pytest.mark.parametrize("pcp", [True, False])
    async def test_a_router_that_restarted_is_noticed(self, pcp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(port_mapping, "CHECK_SECONDS", 0.05)
        async with router(pcp=pcp, pmp=not pcp) as fake, mapper(fake.gateway()) as (_, outcomes):
            await outcomes.next()
            fake.mappings, fake.epoch, fake.external_host = {}, 3, "203.0.113.50"
            assert (await outcomes.next(2))[0] == ("203.0.113.50", fake.mappings[4433])

    async def test_a_router_that_fell_silent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(port_mapping, "CHECK_SECONDS", 0.02)
        monkeypatch.setattr(router_port, "TRY_SECONDS", 0.02)
        async with router() as fake, mapper(fake.gateway()) as (it, outcomes):
            await outcomes.next()
            fake.ignore = 10**6
            assert (await outcomes.next(2))[0] is None
            assert it.mapped is None
            fake.ignore = 0  # back, with the mapping: only the old nonce is taken
            it.refresh()
            assert await outcomes.next(3) == (("203.0.113.7", fake.mappings[4433]), "pcp")

    async def test_renewed_at_half_of_the_lease(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(port_mapping, "MIN_LEASE_SECONDS", 0.2)
        async with router(lease=1) as fake, mapper(fake.gateway()) as (_, outcomes):
            await outcomes.next()
            fake.asked.clear()
            await until(fake, 1)
            assert fake.asked[0][:2] == b"\x02\x01"

    async def test_close_takes_a_second_at_most_with_a_dead_router(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(port_mapping, "CLOSE_SECONDS", 0.1)
        monkeypatch.setattr(router_port, "TRY_SECONDS", 5.0)
        async with router() as fake:
            async with mapper(fake.gateway()) as (_, outcomes):
                await outcomes.next()
                fake.ignore = 100
                started = asyncio.get_running_loop().time()
            assert asyncio.get_running_loop().time() - started < 4

    async def test_close_while_asking_removes_what_may_have_been_made(self) -> None:
        async with router(pmp=False) as fake:
            outcomes = Outcomes()

            async def find() -> Gateway:
                return fake.gateway()

            it = PortMapper(4433, outcomes.add, find_gateway=find)
            fake.ignore = 2  # the PCP and the NAT-PMP question
            it.start()
            await until(fake, 2)
            fake.mappings[4433] = 4433
            await it.close()
            assert fake.mappings == {}
            assert outcomes.all == []

    async def test_close_before_start_and_twice(self) -> None:
        it = PortMapper(4433, lambda *_: None)
        await it.close()
        await it.close()


class TestUpnp:
    @pytest.fixture(autouse=True)
    def _patient(self, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        """Time for a device that does its best on a busy machine; less for those that never will."""
        never = "location" in request.node.name or "hang" in request.node.name
        monkeypatch.setattr(port_mapping, "UPNP_SECONDS", 0.3 if never else 5.0)

    async def test_mapped_and_removed_at_the_end(self) -> None:
        async with igd() as device:
            async with mapper(device.gateway()) as (_, outcomes):
                assert await outcomes.next() == (("203.0.113.7", 4433), "upnp")
                entry = device.mappings[4433]
                assert entry["NewInternalClient"] == "127.0.0.1"
                assert entry["NewInternalPort"] == "4433"
                assert entry["NewProtocol"] == "UDP"
                assert entry["NewLeaseDuration"] == "7200"
            assert device.mappings == {}

    async def test_a_taken_port_leads_to_another(self) -> None:
        async with igd(taken=(4433,)) as device, mapper(device.gateway()) as (_, outcomes):
            external, how = await outcomes.next()
            assert how == "upnp"
            assert external is not None
            assert external[1] in device.mappings
            assert external[1] != 4433

    async def test_all_ports_taken(self) -> None:
        async with igd(taken=tuple(range(65536))) as device:
            async with mapper(device.gateway()) as (_, outcomes):
                assert "its ports are taken" in (await outcomes.next())[1]
            assert not any(action == "DeletePortMapping" for action, _ in device.actions)  # they are not ours

    async def test_a_router_that_knows_only_permanent_leases(self) -> None:
        async with igd(only_permanent=True) as device:
            async with mapper(device.gateway()) as (_, outcomes):
                assert (await outcomes.next())[0] == ("203.0.113.7", 4433)
                assert device.mappings[4433]["NewLeaseDuration"] == "0"
            assert device.mappings == {}

    async def test_behind_another_nat(self) -> None:
        async with igd(external_host="10.1.2.3") as device, mapper(device.gateway()) as (_, outcomes):
            assert await outcomes.next() == (None, "mapped behind another NAT: upnp gave 10.1.2.3")

    @pytest.mark.parametrize("change", ["address", "entry"])
    async def test_what_the_router_forgot_is_noticed(self, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(port_mapping, "CHECK_SECONDS", 0.05)
        async with igd() as device, mapper(device.gateway()) as (_, outcomes):
            await outcomes.next()
            device.mapped.clear()
            if change == "address":
                device.external_host = "203.0.113.50"
                assert (await outcomes.next(2))[0] == ("203.0.113.50", 4433)
            else:
                device.mappings.clear()
                async with asyncio.timeout(10):
                    await device.mapped.wait()
                assert 4433 in device.mappings

    @pytest.mark.parametrize(
        "settings",
        [
            {"location": "http://127.0.0.2:80/root.xml"},
            {"location": "http://127.0.0.1@evil.example/root.xml"},
            {"location": "file:///etc/passwd"},
            {"control_url": "http://127.0.0.2:1/control"},
            {"control_url": "http://[::1/control"},
            {"description": b"no XML"},
            {"description": b"<a>" * 50_000},
            {"description": b'<!DOCTYPE x [<!ENTITY a "b"><!ENTITY c "&a;&a;">]><root>&c;</root>'},
            {"description": b"x" * 2_000_000},
            {
                "description": b'<root xmlns="urn:schemas-upnp-org:device-1-0">'
                + b"<device><deviceList>" * 5000
                + b"</deviceList></device>" * 5000
                + b"</root>"
            },
            {"external_host": "not an address"},
            {"external_host": "::1"},
            {"hang": True},
        ],
        ids=lambda settings: " ".join(
            f"{key}={value[:40]!r}" if key != "hang" else key for key, value in settings.items()
        ),
    )
    async def test_hostile_devices(self, settings: dict[str, Any]) -> None:
        async with igd(**settings) as device, mapper(device.gateway()) as (_, outcomes):
            external, why = await outcomes.next()
            assert external is None
            assert "UPnP: " in why
            assert "\n" not in why

    async def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "async_upnp_client.client_factory", None)
        async with igd() as device, mapper(device.gateway()) as (_, outcomes):
            assert "async-upnp-client is not installed" in (await outcomes.next())[1]
