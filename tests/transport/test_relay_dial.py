from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from transport.errors import Address
from transport.proto.relay_url import parse_relay_url
from transport.relay_dial import MAX_ADDRESSES, DialFailed, Resolver, connect


@contextlib.contextmanager
def listening() -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


@contextlib.contextmanager
def silent() -> Iterator[Address]:
    """A port that answers no SYN: its queue of connections is full (Linux drops what comes then)."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()


def refused() -> Address:
    with listening() as address:
        return address


async def test_a_silent_address_costs_a_quarter_of_a_second() -> None:
    with silent() as dead, listening() as alive:
        began = asyncio.get_running_loop().time()
        with await connect([dead, alive]) as connection:
            assert connection.getpeername() == alive
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert asyncio.get_running_loop().time() - began < 5  # a SYN is given up after minutes


async def test_a_refused_address_costs_nothing_and_all_refusals_are_said() -> None:
    with listening() as alive:
        connection = await connect([refused(), refused(), alive])
        assert connection.getpeername() == alive
        connection.close()
    with pytest.raises(DialFailed, match=r"cannot connect to 127\.0\.0\.1:\d+, 127\.0\.0\.1:\d+: .*refused"):
        await connect([refused(), refused()])


async def test_giving_up_leaves_no_socket_and_no_task() -> None:
    with silent() as one, silent() as other:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connect([one, other]), 0.4)
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "relay-connect"]


async def test_a_literal_is_not_looked_up() -> None:
    assert await Resolver(parse_relay_url("http://[::1]:8080")).addresses() == (("::1", 8080),)


class Names:
    """A name service that a test controls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()
        self.result: list[str] | OSError = ["127.0.0.1"]
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, _host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        self.asked += 1
        self.answers.wait(10)
        if isinstance(self.result, OSError):
            raise self.result
        return [(None, None, 0, "", (host, port)) for host in self.result]


async def test_families_take_turns_and_the_systems_favourite_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    names.result = ["::1", "::2", "::3", "::1", "127.0.0.1", "127.0.0.2"]
    found = await Resolver(parse_relay_url("http://relay.test:1")).addresses()
    assert [host for host, _ in found] == ["::1", "127.0.0.1", "::2", "127.0.0.2", "::3"]
    names.result = ["127.0.0.1", "127.0.0.2", "::1"]
    found = await Resolver(parse_relay_url("http://relay.test:1")).addresses()
    assert [host for host, _ in found] == ["127.0.0.1", "::1", "127.0.0.2"]


async def test_a_name_with_thousands_of_addresses_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch).result = [f"10.0.{number // 256}.{number % 256}" for number in range(5000)]
    assert len(await Resolver(parse_relay_url("http://relay.test:1")).addresses()) == MAX_ADDRESSES


async def test_a_name_service_that_hangs_is_asked_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    names, resolver = Names(monkeypatch), Resolver(parse_relay_url("http://relay.test:1"))
    names.answers.clear()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(resolver.addresses(), 0.05)
    assert names.asked == 1
    names.answers.set()
    assert await asyncio.wait_for(resolver.addresses(), 5) == (("127.0.0.1", 1),)


async def test_the_addresses_of_the_last_success_serve_while_no_name_service_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, resolver = Names(monkeypatch), Resolver(parse_relay_url("http://relay.test:1"))
    assert await resolver.addresses() == (("127.0.0.1", 1),)
    names.result = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert await resolver.addresses() == (("127.0.0.1", 1),)
    names.answers.clear()
    assert await asyncio.wait_for(resolver.addresses(), 5) == (("127.0.0.1", 1),)
    names.answers.set()
    names.result = ["127.0.0.2"]
    for _ in range(3):  # the answer that hung may come first
        found = await resolver.addresses()
    assert found == (("127.0.0.2", 1),)


async def test_an_unknown_name_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    for problem in (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), OSError("boom")):
        names.result = problem
        with pytest.raises(DialFailed, match=r"relay\.test cannot be looked up: (Name or service not known|boom)"):
            await Resolver(parse_relay_url("http://relay.test:1")).addresses()
