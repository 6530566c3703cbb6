"""What both ends show beside their keys, and the gates that judge it."""

from __future__ import annotations

import asyncio

import pytest

from transport.config import TransportConfig
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import NotAdmitted, Refused, TransportError
from transport.identity import Identity, PeerId
from transport.proto.control_frames import MAX_CREDENTIALS

HOST = "127.0.0.1"


class Card:
    """A gate that wants to see one word, and shows one."""

    def __init__(self, shows: bytes, wants: bytes) -> None:
        self.shows, self.wants = shows, wants
        self.seen: list[tuple[str, bytes]] = []

    def knows(self, peer: PeerId) -> bool:
        return True

    def judge(self, peer: PeerId, lane: str, credentials: bytes) -> str | None:
        self.seen.append((lane, credentials))
        return None if credentials == self.wants else f"{credentials!r} lets nobody in"

    def credentials(self, lane: str) -> bytes:
        return self.shows + (b" for " + lane.encode() if lane == "join" else b"")


async def test_both_sides_see_what_the_other_shows(engines: tuple[str, str]) -> None:
    ours, theirs = Card(b"ours for join", b"theirs for join"), Card(b"theirs", b"ours for join")
    ours.shows = b"ours"
    async with (
        asyncio.timeout(10),
        await Endpoint.bind(
            Identity.generate(), TransportConfig(engine=engines[0]), listen=(HOST, 0), gate=ours
        ) as one,
        await Endpoint.bind(
            Identity.generate(), TransportConfig(engine=engines[1]), listen=(HOST, 0), gate=theirs
        ) as other,
    ):
        connection = await one.dial(other.peer_id, [other.address], lane="join")
        accepted = await other.accept()
        assert ours.seen == [("join", b"theirs for join")]
        assert theirs.seen == [("join", b"ours for join")]
        assert connection.lane == accepted.lane == "join"


async def test_who_shows_the_wrong_thing_is_told_why() -> None:
    async with (
        asyncio.timeout(10),
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0), gate=Card(b"x", b"y")) as one,
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0), gate=Card(b"y", b"secret")) as other,
    ):
        with pytest.raises(Refused, match="b'x' lets nobody in"):
            await one.dial(other.peer_id, [other.address])
        assert other.connections() == []


async def test_a_server_that_shows_the_wrong_thing_is_left_and_never_used() -> None:
    async with (
        asyncio.timeout(10),
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0), gate=Card(b"x", b"y")) as one,
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0), gate=Card(b"z", b"x")) as other,
    ):
        with pytest.raises(NotAdmitted, match="refused here: b'z' lets nobody in"):
            await one.dial(other.peer_id, [other.address])
        assert one.connections() == []


async def test_a_stranger_without_anything_to_show_is_refused_on_every_lane() -> None:
    async with (
        asyncio.timeout(20),
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0)) as stranger,
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0), gate=Card(b"", b"member")) as other,
    ):
        for lane in ("swarm", "bulk", "dispatch:abcdefgh", "join"):
            with pytest.raises(Refused, match="b'' lets nobody in"):
                await stranger.dial(other.peer_id, [other.address], lane=lane)


async def test_a_gate_that_fails_lets_nobody_in() -> None:
    class Broken(Card):
        def judge(self, peer: PeerId, lane: str, credentials: bytes) -> str | None:
            raise RuntimeError("broken")

    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))
    async with (
        asyncio.timeout(10),
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0)) as one,
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0), gate=Broken(b"", b"")) as other,
    ):
        with pytest.raises(Refused, match="internal error at the gate"):
            await one.dial(other.peer_id, [other.address])
    assert [str(problem) for problem in problems] == ["broken"]


class Speechless(Card):
    """One that cannot say what it shows, or says too much."""

    is_broken, is_long = True, False

    def credentials(self, lane: str) -> bytes:
        if self.is_long:
            return bytes(MAX_CREDENTIALS + 1)
        if self.is_broken:
            raise RuntimeError("broken")
        return super().credentials(lane)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("is_dialler", [False, True])
async def test_a_gate_that_cannot_show_anything_is_refused_at_once(is_dialler: bool, is_long: bool) -> None:
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["message"]))
    broken = Speechless(b"x", b"x")
    broken.is_long = is_long
    async with (
        asyncio.timeout(10),
        await Endpoint.bind(
            Identity.generate(), listen=(HOST, 0), gate=broken if is_dialler else Card(b"x", b"x")
        ) as one,
        await Endpoint.bind(
            Identity.generate(), listen=(HOST, 0), gate=Card(b"x", b"x") if is_dialler else broken
        ) as other,
    ):
        with pytest.raises(TransportError, match="internal error at the gate"):
            await one.dial(other.peer_id, [other.address], timeout=5)
        assert one.connections() == other.connections() == []
        assert is_dialler or not other._acceptor.deadlines
        broken.is_broken = broken.is_long = False
        await one.dial(other.peer_id, [other.address])
    assert problems == ["the gate raised for lane dispatch; refused"]


async def test_a_gate_that_fails_ends_no_connection_that_there_is() -> None:
    """The same node dials anew, as after a restart that was not noticed here."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    identity, gate = Identity.generate(), Speechless(b"x", b"x")
    gate.is_broken = False
    async with (
        asyncio.timeout(20),
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0), gate=gate) as other,
        await Endpoint.bind(identity, listen=(HOST, 0), gate=Card(b"x", b"x")) as before,
        await Endpoint.bind(identity, listen=(HOST, 0), gate=Card(b"x", b"x")) as after,
    ):
        await before.dial(other.peer_id, [other.address])
        accepted: Connection = await other.accept()
        gate.is_broken = True
        with pytest.raises(Refused, match="internal error at the gate"):
            await after.dial(other.peer_id, [other.address])
        assert other.connections() == [accepted]
        gate.is_broken = False
        await after.dial(other.peer_id, [other.address])
        assert accepted not in other.connections()
