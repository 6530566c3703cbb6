"""What a node tells people of its relays and its peers' paths, and how it reads."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest

from swarmnode import network_events
from swarmnode.network_events import MAX_RELAYS, NetworkEvents
from swarmnode.serve import EventPrinter
from transport.connection import ConnectionStats
from transport.identity import Identity
from transport.news import NOT_NEEDED, PathNews, RelayNews
from transport.proto.addresses import PathId, PathKind
from transport.route import Path

PEER = Identity.generate(bytes(32)).peer_id
URL = "https://relay.example"
LAN = Path(PathKind.LAN, PathId(("192.168.1.7", 5000)), 1200)
ELSEWHERE = Path(PathKind.LAN, PathId(("192.168.1.8", 5000)), 1200)
RELAYED = Path(PathKind.RELAY, PathId(relay=URL), 65_535)


class Emitted:
    """What was emitted, and the plain lines of it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._printed = io.StringIO()
        self._plain = EventPrinter(as_json=False, progress=False, stream=self._printed)

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))
        self._plain(event, **fields)

    def lines(self) -> list[str]:
        return self._printed.getvalue().splitlines()


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> Emitted:
    monkeypatch.setattr(network_events, "SETTLED", 0.001)
    return Emitted()


@pytest.fixture
def network(emitted: Emitted) -> NetworkEvents:
    return NetworkEvents(emitted)


def stats(path: Path) -> ConnectionStats:
    return ConnectionStats(None, None, 0, 0, 0, 0, 0, 0, path.kind, path.id.address, path.id.relay)


async def settle() -> None:
    await asyncio.sleep(0.02)


async def test_a_relay_is_told_once_per_change(network: NetworkEvents, emitted: Emitted) -> None:
    for up, reason in [(False, "refused"), (False, "refused"), (False, "no answer"), (True, ""), (True, "")]:
        network(RelayNews(URL, up, reason, own=True))
    for up, reason in [(False, "it closed"), (False, "refused"), (False, "refused"), (True, "")]:
        network(RelayNews(URL, up, reason, own=True))
    assert emitted.lines() == [
        f"relay {URL} not connected: refused; trying on",
        f"relay {URL} not connected: no answer; trying on",
        f"relay {URL} connected",
        f"relay {URL} lost: it closed",
        f"relay {URL} not connected: refused; trying on",
        f"relay {URL} connected",
    ]


async def test_a_relay_that_is_not_needed_any_more_is_not_lost(network: NetworkEvents, emitted: Emitted) -> None:
    for up, reason in [(True, ""), (False, NOT_NEEDED), (True, ""), (False, "it closed"), (False, NOT_NEEDED)]:
        network(RelayNews(URL, up, reason, own=True))
    assert emitted.lines() == [
        f"relay {URL} connected",
        f"relay {URL} left: not needed any more",
        f"relay {URL} connected",
        f"relay {URL} lost: it closed",
        f"relay {URL} left: not needed any more",
    ]


async def test_relays_that_peers_name_are_not_told_and_nothing_grows(network: NetworkEvents, emitted: Emitted) -> None:
    for number in range(1000):
        network(RelayNews(f"https://stranger.example/{number}", False, "refused", own=False))
        network(RelayNews(f"https://stranger.example/{number}", True, "", own=False))
    assert emitted.events == []
    assert not network._relays
    for number in range(1000):
        network(RelayNews(f"https://own.example/{number}", True, "", own=True))
    assert len(network._relays) == MAX_RELAYS


async def test_a_peer_that_changes_its_path(network: NetworkEvents, emitted: Emitted) -> None:
    network.connected(PEER, stats(RELAYED))
    for news in [
        PathNews(PEER, LAN, 0.0124, "lan: 12 ms, relay 40 ms"),
        PathNews(PEER, ELSEWHERE, 0.0004, "lan: < 1 ms"),
        PathNews(PEER, LAN, None, "lan: the only path, silent for 2.0 s"),
        PathNews(PEER, None, None, "no path: no relay is up and no address is known"),
        PathNews(PEER, RELAYED, 0.04, "relay: 40 ms"),
    ]:
        network(news)
        await settle()
    assert emitted.lines() == [
        f"connected to {PEER} (relay)",
        f"peer {PEER.short}: direct-lan 192.168.1.7:5000, 12 ms (was relay)",
        f"peer {PEER.short}: direct-lan 192.168.1.8:5000, < 1 ms (was direct-lan 192.168.1.7:5000)",
        f"peer {PEER.short}: direct-lan 192.168.1.7:5000, lan: the only path, silent for 2.0 s"
        " (was direct-lan 192.168.1.8:5000)",
        f"peer {PEER.short}: no path: no relay is up and no address is known (was direct-lan)",
        f"peer {PEER.short}: relay {URL}, 40 ms (was none)",
    ]
    assert emitted.events[1] == (
        "path",
        {
            "peer": str(PEER),
            "path": "direct-lan",
            "address": "192.168.1.7:5000",
            "relay": "",
            "rtt_ms": 12.4,
            "was": "relay",
            "reason": "lan: 12 ms, relay 40 ms",
        },
    )


async def test_a_path_that_is_left_at_once_is_not_told(network: NetworkEvents, emitted: Emitted) -> None:
    network.connected(PEER, stats(LAN))
    network(PathNews(PEER, RELAYED, 0.04, "relay: 40 ms"))
    network(PathNews(PEER, LAN, 0.01, "lan: 10 ms"))
    await settle()
    assert emitted.lines() == [f"connected to {PEER} (direct-lan)"]


async def test_nothing_is_told_of_peers_without_a_connection(network: NetworkEvents, emitted: Emitted) -> None:
    network(PathNews(PEER, RELAYED, None, "relay: no answer yet"))
    network.connected(PEER, stats(RELAYED))
    network(PathNews(PEER, LAN, 0.01, "lan: 10 ms"))
    network.forget(PEER)
    network(PathNews(PEER, RELAYED, 0.04, "relay: 40 ms"))
    await settle()
    network.connected(PEER, stats(RELAYED))
    network(PathNews(PEER, LAN, 0.01, "lan: 10 ms"))
    network.close()
    await settle()
    assert emitted.lines() == [f"connected to {PEER} (relay)"] * 2
