from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from transport.config import RECEIVE_BURST, TransportConfig
from transport.errors import Address, BindFailed
from transport.udp_socket import MAX_QUEUED, UdpSocket, is_loopback, path_mtu, why_unreachable


class Recorder:
    """Handlers that remember, and an event to wait on."""

    def __init__(self) -> None:
        self.quic: list[tuple[bytes, int, Address]] = []
        self.other: list[tuple[bytes, Address]] = []
        self.drained = 0
        self.writable = asyncio.Event()
        self._news = asyncio.Event()

    def on_quic(self, data: bytes, segment: int, address: Address) -> None:
        self.quic.append((data, segment, address))

    def on_other(self, data: bytes, address: Address) -> None:
        self.other.append((data, address))

    def on_drained(self) -> None:
        self.drained += 1
        self._news.set()

    @property
    def datagrams(self) -> list[bytes]:
        return [data[at : at + size] for data, size, _ in self.quic for at in range(0, len(data), size)]

    async def wait_for(self, quic: int = 0, other: int = 0) -> None:
        async with asyncio.timeout(5):
            while len(self.datagrams) < quic or len(self.other) < other:
                self._news.clear()
                await self._news.wait()


def open_socket(recorder: Recorder, host: str = "127.0.0.1", **settings: Any) -> UdpSocket:
    return UdpSocket(
        (host, 0),
        TransportConfig(**settings),
        on_quic=recorder.on_quic,
        on_other=recorder.on_other,
        on_drained=recorder.on_drained,
        on_writable=recorder.writable.set,
    )


@pytest.mark.parametrize("offload", [True, False], ids=["offload", "plain"])
async def test_a_batch_arrives_whole_and_in_order(offload: bool) -> None:
    one, two = Recorder(), Recorder()
    sender, receiver = open_socket(one, gso=offload, gro=offload), open_socket(two, gso=offload, gro=offload)
    batch = [bytes([0x40 | number % 64]) + bytes([number]) * 1199 for number in range(150)] + [b"\x40short"]
    sender.send(batch, receiver.address)
    await two.wait_for(quic=len(batch))
    assert two.datagrams == batch
    assert {address for _, _, address in two.quic} == {sender.address}
    assert sender.counters.sent == receiver.counters.received == len(batch)
    assert two.drained >= 1
    if offload and sender.gso:
        assert sender.counters.send_calls < len(batch) / 10
    sender.close()
    receiver.close()


async def test_other_protocols_are_told_apart_even_within_one_batch() -> None:
    one, two = Recorder(), Recorder()
    sender, receiver = open_socket(one), open_socket(two)
    batch = [bytes([first]) + b"x" * 99 for first in (0x40, 0x2A, 0xC0, 0x00, 0x7F, 0x80)]
    sender.send(batch, receiver.address)
    sender.send([b""], receiver.address)
    await two.wait_for(quic=3, other=3)
    assert two.datagrams == [batch[0], batch[2], batch[4]]
    assert [data for data, _ in two.other] == [batch[1], batch[3], batch[5]]
    sender.close()
    receiver.close()


class FailingSocket:
    """A socket whose sends fail as told; everything else is the real one's."""

    def __init__(self, real: socket.socket, batch_error: int | None, single_errors: Sequence[int | None]) -> None:
        self._real = real
        self._batch_error = batch_error
        self._single_errors = list(single_errors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def sendmsg(self, *arguments: Any) -> int:
        if self._batch_error is not None:
            raise OSError(self._batch_error, "refused by the test")
        return self._real.sendmsg(*arguments)

    def sendto(self, data: bytes, address: Address) -> int:
        error = self._single_errors.pop(0) if self._single_errors else None
        if error is not None:
            raise OSError(error, "refused by the test")
        return self._real.sendto(data, address)


class EmptySocket:
    """A socket from which empty datagrams never stop coming."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def recvfrom(self, _: int) -> tuple[bytes, Address]:
        self.calls += 1
        return b"", ("127.0.0.1", 9)


async def test_a_flood_of_empty_datagrams_does_not_hold_the_loop() -> None:
    recorder = Recorder()
    receiver = open_socket(recorder, gro=False)
    receiver._socket = flood = EmptySocket(receiver._socket)  # type: ignore[assignment]
    receiver._readable()
    assert flood.calls == RECEIVE_BURST
    assert recorder.drained == 1
    receiver.close()


async def test_what_was_read_is_answered_although_a_handler_raised() -> None:
    one, two = Recorder(), Recorder()
    sender, receiver = open_socket(one), open_socket(two)
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    receiver._on_other = broken
    sender.send([b"\x40good", b"\x00bad"], receiver.address)
    async with asyncio.timeout(5):
        await two._news.wait()
        while not reported:
            two._news.clear()
            await two._news.wait()
    assert two.datagrams == [b"\x40good"]
    assert two.drained >= 1
    sender.close()
    receiver.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
async def test_without_gso_the_batch_goes_out_one_by_one(code: int) -> None:
    one, two = Recorder(), Recorder()
    sender, receiver = open_socket(one), open_socket(two)
    sender.gso = True
    sender._socket = FailingSocket(sender._socket, code, [])  # type: ignore[assignment]
    batch = [b"\x40" + bytes([number]) * 500 for number in range(10)]
    sender.send(batch, receiver.address)
    await two.wait_for(quic=10)
    assert two.datagrams == batch
    assert not sender.gso
    sender.close()
    receiver.close()


@pytest.mark.parametrize("code", [errno.ENETUNREACH, errno.EMSGSIZE, errno.ECONNREFUSED, errno.EPERM])
async def test_the_network_losing_a_datagram_is_no_error(code: int) -> None:
    one, two = Recorder(), Recorder()
    sender, receiver = open_socket(one, gso=False), open_socket(two)
    sender._socket = FailingSocket(sender._socket, None, [code, None])  # type: ignore[assignment]
    sender.send([b"\x40lost", b"\x40kept"], receiver.address)
    await two.wait_for(quic=1)
    assert two.datagrams == [b"\x40kept"]
    assert sender.counters.dropped == 1
    sender.close()
    receiver.close()


async def test_unreachable_and_oversized_datagrams_do_not_end_the_socket() -> None:
    one, two = Recorder(), Recorder()
    sender, receiver = open_socket(one), open_socket(two)
    sender.send([b"\x40" * 70_000], receiver.address)
    sender.send([b"\x40hello"], ("240.0.0.1", 9))
    sender.send([b"\x40hello"], ("127.0.0.1", 1))
    sender.send([b"\x40still here"], receiver.address)
    await two.wait_for(quic=1)
    assert two.datagrams == [b"\x40still here"]
    sender.close()
    receiver.close()


async def test_a_full_socket_queues_a_bounded_number_and_says_when_it_is_free() -> None:
    one, two = Recorder(), Recorder()
    sender, receiver = open_socket(one, gso=False), open_socket(two)
    sender._socket = FailingSocket(sender._socket, None, [errno.EAGAIN])  # type: ignore[assignment]
    batch = [b"\x40" + bytes([number % 256]) for number in range(MAX_QUEUED + 10)]
    sender.send(batch, receiver.address)
    assert sender.blocked
    assert sender.counters.dropped == 10
    async with asyncio.timeout(5):
        await one.writable.wait()
    assert not sender.blocked
    await two.wait_for(quic=MAX_QUEUED)
    assert two.datagrams == batch[:MAX_QUEUED]
    sender.close()
    receiver.close()


async def test_a_loop_that_cannot_watch_sockets_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise NotImplementedError

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "add_reader", unsupported)
    monkeypatch.setattr(loop, "add_writer", unsupported)
    one, two = Recorder(), Recorder()
    sender, receiver = open_socket(one, gso=False), open_socket(two)
    sender._socket = FailingSocket(sender._socket, None, [errno.EAGAIN])  # type: ignore[assignment]
    sender.send([b"\x40one", b"\x40two"], receiver.address)
    await two.wait_for(quic=2)
    assert two.datagrams == [b"\x40one", b"\x40two"]
    assert one.writable.is_set()
    sender.close()
    receiver.close()
    await asyncio.sleep(0)


async def test_an_ipv6_socket_talks_to_both_families() -> None:
    one, two, three = Recorder(), Recorder(), Recorder()
    try:
        dual = open_socket(one, "::")
    except BindFailed:
        pytest.skip("no IPv6 here")
    four, six = open_socket(two), open_socket(three, "::1")
    dual.send([b"\x40to four"], four.address)
    dual.send([b"\x40to six"], six.address)
    four.send([b"\x40from four"], ("127.0.0.1", dual.address[1]))
    await two.wait_for(quic=1)
    await three.wait_for(quic=1)
    await one.wait_for(quic=1)
    assert one.quic[0][2] == four.address
    for handle in (dual, four, six):
        handle.close()


async def test_a_port_that_is_taken_is_named() -> None:
    recorder = Recorder()
    first = open_socket(recorder)
    with pytest.raises(BindFailed, match=str(first.address[1])):
        UdpSocket(
            first.address,
            TransportConfig(),
            on_quic=recorder.on_quic,
            on_other=recorder.on_other,
            on_drained=recorder.on_drained,
            on_writable=recorder.writable.set,
        )
    first.close()
    first.close()


def test_loopback_is_known_and_so_is_its_mtu() -> None:
    assert is_loopback(("127.0.0.5", 1))
    assert is_loopback(("::1", 1))
    assert not is_loopback(("192.0.2.1", 1))
    assert not is_loopback(("example.org", 1))
    mtu = path_mtu(("127.0.0.1", 9))
    assert mtu is None or mtu >= 1280


@pytest.mark.parametrize(
    ("local", "address", "words"),
    [
        ("0.0.0.0", "127.0.0.1", ""),
        ("0.0.0.0", "198.51.100.1", ""),
        ("127.0.0.1", "127.0.0.5", ""),
        ("127.0.0.1", "198.51.100.1", "listens on 127.0.0.1 only and cannot reach other machines; listen on 0.0.0.0"),
        ("127.0.0.1", "::1", "no IPv6; listen on ::"),
        ("0.0.0.0", "2001:db8::1", "no IPv6; listen on ::"),
        ("::", "127.0.0.1", ""),
        ("::", "2001:db8::1", ""),
        ("::1", "::1", ""),
        ("::1", "198.51.100.1", "listens on ::1 only"),
    ],
)
def test_what_a_socket_can_never_reach_is_known_with_the_reason(local: str, address: str, words: str) -> None:
    reason = why_unreachable((local, 4433), (address, 9))
    assert words in reason
    assert bool(reason) == bool(words)
