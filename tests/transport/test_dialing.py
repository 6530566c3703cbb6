"""What a dial tries, what it says about the rest, and what it tries again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from transport.connection import Connection
from transport.dialing import APPLICATION_ERROR, Dial, resolve
from transport.errors import Address, HandshakeFailed, TransportError, Unreachable, WrongPeer
from transport.identity import PeerId

PEER = PeerId(b"\x01" * 32)
LOCAL = ("127.0.0.1", 4433)


async def test_addresses_that_cannot_be_tried_are_kept_with_their_reasons() -> None:
    given = [("no-such-name.invalid", 9), ("::1", 9), ("127.0.0.1", 0), ("198.51.100.1", 9), ("127.0.0.1", 9)]
    resolved = await resolve(given, LOCAL)
    assert resolved.usable == [("127.0.0.1", 9)]
    assert list(resolved.skipped) == given[:-1]
    for address, words in zip(given, ["not found", "no IPv6", "1 to 65535", "127.0.0.1 only"], strict=False):
        assert words in resolved.skipped[address]


async def test_a_name_counts_when_one_of_its_addresses_does() -> None:
    resolved = await resolve([("localhost", 9)], LOCAL)
    assert ("127.0.0.1", 9) in resolved.usable
    assert resolved.skipped == {}


def test_unreachable_says_what_was_tried_and_what_was_not() -> None:
    skipped = {("::1", 5): "no IPv6", ("nowhere", 6): "not found"}
    nothing_tried = str(Unreachable(PEER, (), 0.0, skipped=skipped))
    assert "cannot be dialled; not tried: [::1]:5 (no IPv6), nowhere:6 (not found)" in nothing_tried
    assert "no address" not in nothing_tried
    assert "did not answer" not in nothing_tried
    some_tried = str(Unreachable(PEER, [("127.0.0.1", 4)], 3.0, "silence", skipped))
    assert "did not answer at 127.0.0.1:4 within 3 s (silence); not tried: [::1]:5 (no IPv6)" in some_tried
    assert "no address is known" in str(Unreachable(PEER, (), 0.0))


async def test_another_node_at_an_address_is_not_all_where_there_are_relays() -> None:
    """A private address in a ticket is somebody else's at home."""
    attempts = Attempts()
    dial = Dial((PEER, "dispatch"), attempts.connect, lambda _: None)
    dial.hope()
    dial.add([("192.168.1.2", 4433)], {})
    async with asyncio.timeout(5):
        dial.attempt_ended(await attempts.made.get(), WrongPeer(PEER, "another", [("192.168.1.2", 4433)]))
    assert isinstance(dial.timed_out(10.0), WrongPeer)
    error = dial.timed_out(10.0, "it is not connected to http://relay.example")
    assert str(error) == (
        f"peer {PEER} cannot be dialled "
        "(another node is at 192.168.1.2:4433; it is not connected to http://relay.example)"
    )
    dial.finish(error)


class Attempts:
    """Stands in for the endpoint: hands out attempts that do nothing, and says when."""

    def __init__(self) -> None:
        self.made: asyncio.Queue[Any] = asyncio.Queue()  # stand-ins for connections

    def connect(self, _: Address | None) -> Connection:
        attempt: Any = object()
        self.made.put_nowait(attempt)
        return attempt  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "again"),
    [(HandshakeFailed(APPLICATION_ERROR, ""), True), (HandshakeFailed(0x128, "no common protocol"), False)],
    ids=["closed-there", "tls"],
)
async def test_a_node_that_ended_the_handshake_itself_is_tried_again(error: TransportError, again: bool) -> None:
    attempts = Attempts()
    dial = Dial((PEER, "dispatch"), attempts.connect, lambda _: None)
    dial.add([("127.0.0.1", 9)], {})
    async with asyncio.timeout(5):
        dial.attempt_ended(await attempts.made.get(), error)
        if again:
            dial._attempts.pop(await attempts.made.get())
            dial.finish(Unreachable(PEER, (), 0.0))
        with pytest.raises(Unreachable if again else HandshakeFailed):
            await dial.future
