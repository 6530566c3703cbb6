from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import pytest

from swarmnode.cli import main
from tests.transport.fake_relay import FakeRelay
from transport.gateway import Gateway


@pytest.fixture(autouse=True)
def _no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of this machine's own router."""

    async def nothing() -> Gateway | None:
        return None

    monkeypatch.setattr("transport.netcheck.default_gateway", nothing)
    monkeypatch.delenv("SWARMNODE_RELAY", raising=False)


@pytest.fixture
def relay() -> Iterator[str]:
    """A relay in a thread of its own: the command runs its own loop."""
    ready, loop, urls = threading.Event(), asyncio.new_event_loop(), list[str]()

    async def serve() -> None:
        async with FakeRelay(reflectors=(0, 0)) as it:
            urls.append(it.url)
            ready.set()
            await asyncio.Event().wait()

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    task = loop.create_task(serve())
    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    yield urls[0]
    loop.call_soon_threadsafe(task.cancel)
    thread.join(10)


def test_a_table_with_advice(capsys: pytest.CaptureFixture[str], relay: str) -> None:
    assert main(["doctor", "--relay", relay]) == 0
    out = capsys.readouterr().out
    assert "UDP" in out
    assert "NAT" in out
    assert relay in out
    assert "• No relay here has a UDP reflector" in out


def test_data_for_machines(capsys: pytest.CaptureFixture[str], relay: str) -> None:
    assert main(["doctor", "--relay", relay, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["relays"][0]["url"] == relay
    assert report["relays"][0]["rtt_ms"] > 0
    assert isinstance(report["advice"], list)


def test_nothing_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--relay", "http://127.0.0.1:9"]) == 1
    assert "cannot be used" in capsys.readouterr().out


def test_the_relay_of_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNODE_RELAY", "http://127.0.0.1:9 http://127.0.0.1:10")
    assert main(["doctor", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["relays"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--relay", "relay.example"], "write https://relay.example"), (["--relay", "http://a:99999"], "port 99999")],
)
def test_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["doctor", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("swarmnode: --relay: ")
    assert message in err
    assert err.count("\n") == 1
