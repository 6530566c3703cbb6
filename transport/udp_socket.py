"""The one UDP socket of a node: batches in, batches out. SHELL.

Knows nothing of peers or QUIC beyond one bit: QUIC sets bit 0x40 of a datagram's first byte (RFC 9000, 17.2 and
17.3), every other protocol on this socket clears it. Reads at most RECEIVE_BURST datagrams per wake-up and then
says `drained`, so that the owner answers once per batch. Sends runs of equal size in one system call (UDP_SEGMENT)
and reads what the kernel joined (UDP_GRO), where the system has them. Called by peer_socket; one loop only.

Socket errors never end it: an unreachable network, a datagram that is too large or an ICMP refusal are the network
losing a datagram, which QUIC repairs. A full socket buffer queues what is left (bounded) until it is writable.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transport.config import BURST, RECEIVE_BURST, TransportConfig
from transport.errors import Address, BindFailed

logger = logging.getLogger(__name__)

# Linux' numbers; Python's socket module does not name them all.
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE, IP_MTU = 10, 3, 14
IPV6_MTU_DISCOVER, IPV6_MTU = 23, 24
MAX_GSO_BYTES = 65_000  # one send is one IP packet to the stack: below 65,535 with headers
MAX_QUEUED = 4 * BURST  # datagrams that wait for a writable socket; the owner stops producing at `blocked`
RETRY_SECONDS = 0.001  # on loops that cannot watch for writability
NOT_SUPPORTED = {errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOPROTOOPT}

_SEGMENT_SIZE = struct.Struct("=H")
_GRO_SIZE = struct.Struct("@i")

QuicHandler = Callable[[bytes, int, Address], None]  # data, size of each datagram in it, source
OtherHandler = Callable[[bytes, Address], None]


@dataclass(slots=True)
class UdpCounters:
    """What the socket has done since it was opened."""

    received: int = 0
    receive_calls: int = 0
    sent: int = 0
    send_calls: int = 0
    dropped: int = 0  # given up: no room in the queue, or the system refused the datagram


class UdpSocket:
    """One non-blocking UDP socket on one asyncio loop."""

    def __init__(
        self,
        listen: Address,
        config: TransportConfig,
        *,
        on_quic: QuicHandler,
        on_other: OtherHandler,
        on_drained: Callable[[], None],
        on_writable: Callable[[], None],
    ) -> None:
        """Open and bind. Handlers are called on the running loop. Raises BindFailed."""
        self._loop = asyncio.get_running_loop()
        self._on_quic, self._on_other = on_quic, on_other
        self._on_drained, self._on_writable = on_drained, on_writable
        self.counters = UdpCounters()
        self._v6 = ":" in listen[0]
        self._socket = _open(listen, self._v6, config.socket_buffer)
        name = self._socket.getsockname()
        self.address: Address = (name[0], name[1])
        self.gso = config.gso and _has_gso(self._socket)
        self.gro = config.gro and _enable_gro(self._socket)
        self._queue: deque[tuple[bytes, Address]] = deque()
        self._watching_writes = False
        self._retry: asyncio.TimerHandle | None = None
        self._reader: asyncio.Task[None] | None = None
        try:
            self._loop.add_reader(self._socket.fileno(), self._readable)
        except NotImplementedError:  # Windows' proactor loop
            self._reader = self._loop.create_task(self._read_forever(), name="udp-reader")

    @property
    def blocked(self) -> bool:
        """Whether datagrams wait for room in the socket; produce no more until `on_writable`."""
        return bool(self._queue)

    def close(self) -> None:
        """Close the socket; datagrams that still wait are dropped."""
        if self._socket.fileno() < 0:
            return
        self._queue.clear()
        if self._retry is not None:
            self._retry.cancel()
        if self._reader is not None:
            self._reader.cancel()
        else:
            self._loop.remove_reader(self._socket.fileno())
        if self._watching_writes:
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()

    # -- receiving

    def _readable(self) -> None:
        counters = self.counters
        stop_at = counters.received + RECEIVE_BURST
        try:
            for _ in range(RECEIVE_BURST):  # calls, since empty datagrams cost one too
                if counters.received >= stop_at:
                    break
                segment = 0
                if self.gro:
                    data, ancillary, _, source = self._socket.recvmsg(65536, 64)
                    for level, kind, value in ancillary:
                        if level == SOL_UDP and kind == UDP_GRO:
                            segment = _GRO_SIZE.unpack_from(value)[0]
                else:
                    data, source = self._socket.recvfrom(65536)
                self._received(data, segment or len(data), source)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:  # an ICMP answer to something sent earlier; the next wake-up reads on
            logger.debug("udp.receive_error %s", error)
        finally:
            self._on_drained()

    def _received(self, data: bytes, segment: int, source: tuple[str, int] | tuple[str, int, int, int]) -> None:
        if not data:
            return
        counters = self.counters
        counters.receive_calls += 1
        counters.received += -(-len(data) // segment)
        address = self._plain(source)
        if segment >= len(data):
            if data[0] & 0x40:
                self._on_quic(data, segment, address)
            else:
                self._on_other(data, address)
        elif all(first & 0x40 for first in data[::segment]):
            self._on_quic(data, segment, address)
        else:  # the kernel joins whatever has one source and one size
            for at in range(0, len(data), segment):
                self._received(data[at : at + segment], segment, source)
                counters.received -= 1

    async def _read_forever(self) -> None:
        while True:
            try:
                data, source = await self._loop.sock_recvfrom(self._socket, 65536)
                self._received(data, len(data), source)
            except OSError as error:
                logger.debug("udp.receive_error %s", error)
                if self._socket.fileno() < 0:
                    return
                await asyncio.sleep(RETRY_SECONDS)
            self._on_drained()

    def _plain(self, source: tuple[str, int] | tuple[str, int, int, int]) -> Address:
        host = source[0]
        if self._v6 and host.startswith("::ffff:"):
            host = host[7:]
        return (host, source[1])

    # -- sending

    def send(self, datagrams: Sequence[bytes], destination: Address) -> None:
        """Send in order, never waits. What the socket cannot take now is queued up to MAX_QUEUED, then dropped."""
        if self._v6 and ":" not in destination[0]:
            destination = ("::ffff:" + destination[0], destination[1])
        if self._queue:
            self._enqueue(datagrams, destination)
            return
        start, count = 0, len(datagrams)
        while start < count:
            end = _run_end(datagrams, start) if self.gso else start + 1
            try:
                self._send_run(datagrams[start:end], destination)
            except (BlockingIOError, InterruptedError):
                self._enqueue(datagrams[start:], destination)
                return
            except OSError as error:
                if end - start > 1:  # the system refused the batch, not necessarily its datagrams
                    if error.errno in NOT_SUPPORTED:
                        self.gso = False
                        logger.info("udp.gso_off %s", error)
                    end = start + 1
                    if not self._send_one(datagrams[start], destination):
                        self._enqueue(datagrams[start:], destination)
                        return
                else:
                    self.counters.dropped += 1
                    logger.debug("udp.send_error %s %s", destination, error)
            start = end

    def _send_run(self, run: Sequence[bytes], destination: Address) -> None:
        counters = self.counters
        if len(run) == 1:
            self._socket.sendto(run[0], destination)
        else:
            size = _SEGMENT_SIZE.pack(len(run[0]))
            self._socket.sendmsg(run, [(SOL_UDP, UDP_SEGMENT, size)], 0, destination)
        counters.send_calls += 1
        counters.sent += len(run)

    def _send_one(self, datagram: bytes, destination: Address) -> bool:
        """Send one datagram; False when the socket is full. An error drops it."""
        try:
            self._socket.sendto(datagram, destination)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.counters.dropped += 1
            logger.debug("udp.send_error %s %s", destination, error)
        else:
            self.counters.send_calls += 1
            self.counters.sent += 1
        return True

    def _enqueue(self, datagrams: Sequence[bytes], destination: Address) -> None:
        room = MAX_QUEUED - len(self._queue)
        self._queue.extend((datagram, destination) for datagram in datagrams[:room])
        self.counters.dropped += max(0, len(datagrams) - room)
        if self._watching_writes or self._retry is not None:
            return
        try:
            self._loop.add_writer(self._socket.fileno(), self._writable)
            self._watching_writes = True
        except NotImplementedError:
            self._retry = self._loop.call_later(RETRY_SECONDS, self._writable)

    def _writable(self) -> None:
        self._retry = None
        while self._queue:
            if not self._send_one(*self._queue[0]):
                if not self._watching_writes:
                    self._retry = self._loop.call_later(RETRY_SECONDS, self._writable)
                return
            self._queue.popleft()
        if self._watching_writes:
            self._loop.remove_writer(self._socket.fileno())
            self._watching_writes = False
        self._on_writable()


def path_mtu(destination: Address) -> int | None:
    """The MTU of the interface towards `destination`, in bytes with IP header; None where the system hides it."""
    if not sys.platform.startswith("linux"):
        return None
    v6 = ":" in destination[0]
    with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(destination)
            if v6:
                return probe.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU)
            return probe.getsockopt(socket.IPPROTO_IP, IP_MTU)
        except OSError:
            return None


def why_unreachable(local: Address, address: Address) -> str:
    """Why a socket that is bound to `local` can never send to the IP `address`; empty when it may.

    Only what cannot change while the socket is open: a network that is down is no reason.
    """
    host, v6 = local[0], ":" in local[0]
    if ":" in address[0] and not v6:
        return f"this node listens on {host} and has no IPv6; listen on ::"
    if not is_loopback(local) or (is_loopback(address) and v6 == (":" in address[0])):
        return ""
    target = "::ffff:" + address[0] if v6 and ":" not in address[0] else address[0]
    with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:  # loopback reaches this machine's other addresses on some systems: ask
            if v6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind((host, 0))
            probe.connect((target, address[1]))
        except OSError:
            everywhere = "::" if v6 else "0.0.0.0"
            return f"this node listens on {host} only and cannot reach other machines; listen on {everywhere}"
    return ""


def any_host() -> str:
    """What to listen on to be reached from everywhere: "::", which takes IPv4 too, or "0.0.0.0" without IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
    except OSError:
        return "0.0.0.0"
    return "::"


def is_loopback(address: Address) -> bool:
    """Whether datagrams to this address never leave the machine."""
    try:
        return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
    except ValueError:
        return False


def _open(listen: Address, v6: bool, buffer: int) -> socket.socket:
    handle = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        handle.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            with contextlib.suppress(OSError):  # the system may allow less
                handle.setsockopt(socket.SOL_SOCKET, option, buffer)
        if v6:
            with contextlib.suppress(OSError):
                handle.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if sys.platform.startswith("linux"):  # RFC 9000, 14: QUIC datagrams must not be fragmented
            with contextlib.suppress(OSError):
                handle.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
            if v6:
                with contextlib.suppress(OSError):
                    handle.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        handle.bind(listen)
    except (OSError, OverflowError) as error:
        handle.close()
        detail = getattr(error, "strerror", None) or error
        raise BindFailed(f"cannot listen on {listen[0]} UDP port {listen[1]}: {detail}; choose another") from error
    return handle


def _has_gso(handle: socket.socket) -> bool:
    if not sys.platform.startswith("linux") or not hasattr(handle, "sendmsg"):
        return False
    try:
        handle.setsockopt(SOL_UDP, UDP_SEGMENT, 0)
    except OSError:
        return False
    return True


def _enable_gro(handle: socket.socket) -> bool:
    if not sys.platform.startswith("linux") or not hasattr(handle, "recvmsg"):
        return False
    try:
        handle.setsockopt(SOL_UDP, UDP_GRO, 1)
    except OSError:
        return False
    return True


def _run_end(datagrams: Sequence[bytes], start: int) -> int:
    """Where the run of datagrams ends that one segmented send can carry: equal sizes, the last may be shorter."""
    size = total = len(datagrams[start])
    end = start + 1
    limit = min(len(datagrams), start + BURST)
    while end < limit:
        this = len(datagrams[end])
        if this > size or total + this > MAX_GSO_BYTES:
            break
        total += this
        end += 1
        if this < size:
            break
    return end
