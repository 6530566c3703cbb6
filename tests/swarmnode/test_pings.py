"""Pings to a peer: which one is meant, who sends them, and what people see."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from swarmnode.config import PeerAddress
from swarmnode.control import ControlServer
from swarmnode.errors import UsageError
from swarmnode.onboard import ModelPack
from swarmnode.pings import PingLines, checked_numbers, chosen_peer, ping_peer, run_pings
from tests.transport.relay_process import RelayProcess
from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.identity import Identity

from .helpers import free_udp_port, start_node

PEERS = sorted((Identity.generate(bytes([n]) * 32).peer_id for n in range(40)), key=str)
OWN, KNOWN = PEERS[0], [PeerAddress(peer) for peer in PEERS[1:]]

OpenEndpoint = Callable[..., Awaitable[Endpoint]]
Json = dict[str, Any]


@pytest.fixture
async def relay() -> AsyncIterator[RelayProcess]:
    relay = RelayProcess()
    await relay.start()
    yield relay
    await relay.end()


@pytest.fixture
async def open_endpoint() -> AsyncIterator[OpenEndpoint]:
    """open_endpoint(relays…, identity=…): an endpoint on loopback that lets everybody in."""
    async with contextlib.AsyncExitStack() as opened:

        async def open_one(*relays: str, identity: Identity | None = None) -> Endpoint:
            config = TransportConfig(relays=relays, port_mapping=False)
            own = identity or Identity.generate()
            return await opened.enter_async_context(await Endpoint.bind(own, config, listen=("127.0.0.1", 0)))

        yield open_one


class TestWhichPeer:
    def test_the_beginning_of_its_id(self) -> None:
        wanted = KNOWN[3]
        assert chosen_peer(wanted.peer.short, KNOWN, OWN) == wanted
        assert chosen_peer(str(wanted.peer), KNOWN, OWN) == wanted

    def test_a_whole_id_need_not_be_known_and_an_address_wins(self) -> None:
        other = Identity.generate(b"x" * 32).peer_id
        assert chosen_peer(str(other), KNOWN, OWN) == PeerAddress(other)
        known = PeerAddress(other, ("127.0.0.1", 9))
        assert chosen_peer(str(other), [known], OWN) == known
        assert chosen_peer(f"{other}@127.0.0.1:8", [known], OWN) == PeerAddress(other, ("127.0.0.1", 8))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "no peer of this node begins with ''"),
            ("zzzzzzzz", "no peer of this node begins with 'zzzzzzzz' \\(it knows "),
            ("@127.0.0.1:9", "a peer id has 56 characters, this has 0"),
            (f"{OWN}", "that is this node itself"),
            (f"{OWN}@127.0.0.1:9", "that is this node itself"),
            (f"{PEERS[1]}@host", "write HOST:PORT"),
            ("x" * 100_000, "a peer id has 56 characters, this has 100000"),
        ],
    )
    def test_none(self, text: str, message: str) -> None:
        with pytest.raises(UsageError, match=message) as error:
            chosen_peer(text, KNOWN, OWN)
        assert len(str(error.value)) < 400
        assert "\n" not in str(error.value)

    def test_several(self) -> None:
        with pytest.raises(UsageError, match="is the beginning of 2 peer ids"):
            chosen_peer(str(PEERS[1])[:3], [PeerAddress(PEERS[1]), PeerAddress(PEERS[1], ("::1", 9))], OWN)


@pytest.mark.parametrize(
    ("count", "interval"),
    [(-1, 1.0), (1 << 70, 1.0), (None, 1.0), (True, 1.0), (1.5, 1.0)]
    + [(1, bad) for bad in (0, 0.01, float("nan"), float("inf"), None, "1")],
)
def test_numbers_that_cannot_be_meant(count: object, interval: object) -> None:
    with pytest.raises(UsageError, match="give"):
        checked_numbers(count, interval)


def test_lines_tell_of_a_switch_and_sum_up() -> None:
    def result(path: str, rtt: float | None, reason: str) -> Json:
        relay = "https://relay.example" if path == "relay" else ""
        address = "192.168.1.7:5000" if path == "direct-lan" else ""
        return {"peer": "p", "path": path, "address": address, "relay": relay, "rtt_ms": rtt, "reason": reason}

    lines = PingLines()
    shown = [
        line
        for one in [
            result("relay", 40.0, "relay: looking for a direct path"),
            result("direct-lan", 12.34, "lan: 12 ms, relay 40 ms"),
            result("direct-lan", 11.0, "lan: 12 ms, relay 40 ms"),
            result("direct-lan", None, "no answer within 5 s"),
            result("none", None, "cannot be dialled"),
        ]
        for line in lines.of(one)
    ]
    assert shown == [
        "→ relay https://relay.example (relay: looking for a direct path)",
        "    40.0 ms  relay https://relay.example",
        "→ direct-lan 192.168.1.7:5000 (lan: 12 ms, relay 40 ms)",
        "    12.3 ms  direct-lan 192.168.1.7:5000",
        "    11.0 ms  direct-lan 192.168.1.7:5000",
        "    lost     direct-lan 192.168.1.7:5000 (no answer within 5 s)",
        "no path: cannot be dialled",
    ]
    assert lines.summary() == (
        "3 of 5 pings answered, 1 lost, 1 without a path: 11.0 / 12.3 / 40.0 ms (least/median/most)"
    )
    assert PingLines().summary() == "0 of 0 pings answered"


async def test_from_the_relay_to_a_direct_path(relay: RelayProcess, open_endpoint: OpenEndpoint) -> None:
    ours, theirs = await open_endpoint(relay.url), await open_endpoint(relay.url)
    paths = []
    async for result in ping_peer(ours, PeerAddress(theirs.peer_id), 100, 0.05):
        paths.append(result.path)
        if result.path == "loopback":
            break
        assert result.relay == relay.url or result.rtt_ms is None
    assert result.address == f"127.0.0.1:{theirs.address[1]}"
    assert result.relay == ""
    assert result.rtt_ms is not None
    assert result.reason.startswith("loopback: ")


async def test_a_ping_that_is_lost_names_the_path_that_lost_it(
    open_endpoint: OpenEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = await open_endpoint(), await open_endpoint()
    target = PeerAddress(theirs.peer_id, theirs.address)
    (answered,) = [result async for result in ping_peer(ours, target, 1, 0.05)]
    assert answered.path == "loopback"
    monkeypatch.setattr("swarmnode.pings.TIMEOUT", 0.2)
    monkeypatch.setattr(theirs.socket.udp, "send", lambda *_: None)
    (lost,) = [result async for result in ping_peer(ours, target, 1, 0.05)]
    assert (lost.path, lost.address, lost.rtt_ms) == ("loopback", answered.address, None)
    assert lost.reason == "no answer within 0.2 s"


async def test_nobody_there(open_endpoint: OpenEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.pings.TIMEOUT", 0.1)
    ours = await open_endpoint()
    target = PeerAddress(Identity.generate().peer_id, ("127.0.0.1", free_udp_port()))
    results = [result async for result in ping_peer(ours, target, 2, 0.05)]
    assert [result.rtt_ms for result in results] == [None, None]
    assert results[0].reason.startswith("did not answer at 127.0.0.1:")


class TestWithoutANode:
    """`run_pings` where no node runs with the state folder."""

    async def test_by_address(self, tmp_path: Path, open_endpoint: OpenEndpoint) -> None:
        theirs = await open_endpoint()
        shown: list[Json] = []
        peer = f"{theirs.peer_id}@127.0.0.1:{theirs.address[1]}"
        await run_pings(tmp_path, peer, 2, 0.05, (), None, shown.append)
        assert [(one["path"], one["rtt_ms"] > 0) for one in shown] == [("loopback", True)] * 2
        assert Identity.load_or_create(tmp_path / "identity.key").peer_id != theirs.peer_id

    async def test_by_a_relay(self, tmp_path: Path, relay: RelayProcess, open_endpoint: OpenEndpoint) -> None:
        theirs = await open_endpoint(relay.url)
        shown: list[Json] = []
        await run_pings(tmp_path, str(theirs.peer_id), 1, 1.0, (f"{relay.url}/",), None, shown.append)
        assert shown[0]["rtt_ms"] > 0

    @pytest.mark.parametrize(
        ("peer", "relays", "message"),
        [
            (str(PEERS[1]), (), r"no node runs here to ask .*: give PEERID@HOST:PORT, or PEERID with --relay URL"),
            (PEERS[1].short, (), "no node runs here to ask .* and peer .* a peer id has 56 characters, this has 8"),
            (str(PEERS[1]), ("relay.example",), "--relay: .* is no relay URL"),
        ],
    )
    async def test_what_is_missing_is_said(
        self, peer: str, relays: tuple[str, ...], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(UsageError, match=message):
            await run_pings(tmp_path, peer, 1, 1.0, relays, None, print)

    async def test_oneself(self, tmp_path: Path) -> None:
        own = Identity.load_or_create(tmp_path / "identity.key").peer_id
        with pytest.raises(UsageError, match="that is this node itself"):
            await run_pings(tmp_path, f"{own}@127.0.0.1:9", 1, 1.0, (), None, print)

    async def test_a_file_without_authorities(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"--relay-ca .*: no certificate in PEM form"):
            await run_pings(tmp_path, str(PEERS[1]), 1, 1.0, ("http://127.0.0.1:9",), Path(__file__), print)


async def test_a_running_node_is_asked_and_keeps_its_relay(
    tmp_path: Path, demo_pack: ModelPack, relay: RelayProcess, open_endpoint: OpenEndpoint
) -> None:
    """A second session with the node's key would take the relay away from it."""
    theirs = await open_endpoint(relay.url)
    node, events = await start_node(tmp_path, demo_pack, experts="0", peers=[str(theirs.peer_id)], relays=[relay.url])
    try:
        await events.wait("relay-connected")
        shown: list[Json] = []
        await run_pings(tmp_path, theirs.peer_id.short, 2, 0.05, (relay.url,), None, shown.append)
        assert [one["peer"] for one in shown] == [str(theirs.peer_id)] * 2
        assert all(one["rtt_ms"] > 0 for one in shown)
        with pytest.raises(UsageError, match=r"no peer of this node begins with .nobody. \(it knows "):
            await run_pings(tmp_path, "nobody", 1, 1.0, (), None, print)
        with pytest.raises(UsageError, match="that is this node itself"):
            await run_pings(tmp_path, str(node.endpoint.peer_id), 1, 1.0, (), None, print)
        status = node.status()
        assert status.relays == [relay.url]
        assert status.transport.disco["pings_out"] >= 2
        assert set(status.transport.relays) == {relay.url}
        assert not [event for event in events.seen if event["event"] == "relay-lost"]
    finally:
        await node.close()


async def test_events_of_the_control_channel_are_results(tmp_path: Path) -> None:
    async def answer(op: str, arguments: Json, send: Callable[[Json], Awaitable[None]]) -> None:
        assert (op, arguments) == ("ping", {"peer": "abc", "count": 3, "interval": 0.5})
        await send({"event": "ping", "peer": "abcdef", "rtt_ms": 1.0})

    server = ControlServer(tmp_path, answer)
    await server.start()
    try:
        shown: list[Json] = []
        await run_pings(tmp_path, "abc", 3, 0.5, (), None, shown.append)
        assert shown == [{"peer": "abcdef", "rtt_ms": 1.0}]
    finally:
        await server.close()
