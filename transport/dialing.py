"""One dial: a race over the ways to a peer, shared by everybody who waits for the same (peer, lane). SHELL.

Ways are the peer's path, as soon as there is one (through a relay at first), and addresses. Each address gets its own
QUIC connection, since another node may answer at a stale address; the next one starts when the last has failed or
after ATTEMPT_DELAY (RFC 8305, 5). The first that reaches the right peer proves who we are;
the endpoint decides everything about identities and duplicates. Called by the endpoint only.

What callers want sent with the proof (`Early`) goes out on that one attempt: the race is decided before. It is sent
again only after the peer has refused, and so dropped it; where an attempt is lost, it may have been carried out, and
the dial fails instead of trying again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transport.connection import Connection
from transport.errors import (
    Address,
    ConnectionClosed,
    ConnectionLost,
    DuplicateConnection,
    EngineFault,
    HandshakeFailed,
    PeerFault,
    Refused,
    TransportError,
    Unreachable,
    WrongPeer,
    format_addresses,
)
from transport.identity import PeerId
from transport.proto.control_frames import CloseCode
from transport.stream import Stream
from transport.udp_socket import why_unreachable

ATTEMPT_DELAY = 0.25  # RFC 8305, 8: recommended
RETRY_DELAY = 0.25  # before an address is tried again
APPLICATION_ERROR = 0x0C  # RFC 9000, 20.1: any close by the application, as seen before the handshake is done

Key = tuple[PeerId, str]
Target = Address | None  # None: the path that is known to the peer


@dataclass(slots=True, eq=False)
class Early:
    """What one caller wants sent with the proof, and the connection and stream on which it was last."""

    data: bytes
    connection: Connection | None = None
    stream: Stream | None = None

    def send(self, connection: Connection) -> None:
        """The proof is on its way there."""
        stream = connection.send_early(self.data)
        if stream is not None:
            self.connection, self.stream = connection, stream

    def sent_on(self, connection: Connection) -> Stream | None:
        """The stream that began with it on the connection that has won; None where nothing was sent there."""
        return self.stream if self.connection is connection else None


class Dial:
    """A running dial. Its future is resolved by the endpoint, with whichever connection wins."""

    def __init__(
        self, key: Key, connect: Callable[[Target], Connection], over: Callable[[Dial], Connection | None]
    ) -> None:
        """`connect` starts an attempt. `over` is called when the dial ends, before its callers hear of it; it may
        know a connection that the peer opened meanwhile."""
        self.key = key
        self.proving: Connection | None = None  # the attempt that has sent its proof
        self.reached = False  # some attempt has completed its handshake
        self.waiters = 0
        self.early: list[Early] = []
        self.addresses: list[Address] = []
        self.skipped: dict[Address, str] = {}  # given but not tried, and why
        self.future: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self.future.add_done_callback(_retrieve)
        self._connect, self._over = connect, over
        self._finished = False
        self._hopes = False
        self._queue: deque[Target] = deque()
        self._retries: dict[Target, asyncio.TimerHandle] = {}
        self._attempts: dict[Connection, Target] = {}
        self._errors: dict[Target, TransportError] = {}
        self._progress = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"dial-{key[0].short}")

    def add(self, addresses: Sequence[Address], skipped: Mapping[Address, str]) -> None:
        """Try these too, after those that are known already; `skipped` cannot be tried, for the reasons given."""
        self.skipped.update(skipped)
        for address in addresses:
            if address not in self.addresses:
                self.addresses.append(address)
                self._queue.append(address)
        self._progress.set()

    def hope(self) -> None:
        """A path may still be found (`add_path`): the dial is not over when all addresses have failed."""
        self._hopes = True

    def add_path(self) -> None:
        """There is a path to the peer: it is tried first."""
        self._hopes = True
        if None not in self._queue and None not in self._attempts.values() and None not in self._retries:
            self._queue.appendleft(None)
            self._progress.set()

    def owns(self, connection: Connection) -> bool:
        """Whether this connection is an attempt of this dial."""
        return connection in self._attempts

    def sent_proof(self, connection: Connection) -> None:
        """This attempt has reached the peer first, and proved who we are: what callers want sent with it follows."""
        self.reached = True
        self.proving = connection
        for early in self.early:
            early.send(connection)

    def attempt_ended(self, connection: Connection, error: TransportError) -> None:
        """An attempt is over. Ends the dial when the peer itself refused, when no attempt is left, and when it is not
        known what became of something that was sent with the proof."""
        target = self._attempts.pop(connection)
        if self.proving is connection:
            self.proving = None
        if self._finished:
            return
        self._errors[target] = error
        if not isinstance(error, Refused) and any(early.sent_on(connection) for early in self.early):
            self.finish(error)
        elif _may_pass(error):
            loop = asyncio.get_running_loop()
            self._retries[target] = loop.call_later(RETRY_DELAY, self._retry, target)
        elif isinstance(error, Refused):
            self.finish(error)
        self._progress.set()

    def finish(self, outcome: Connection | TransportError) -> None:
        """Resolve the dial and close every attempt but the outcome."""
        if self._finished:
            return
        self._finished = True
        outcome = self._over(self) or outcome
        if isinstance(outcome, Connection):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)
        self._task.cancel()
        for retry in self._retries.values():
            retry.cancel()
        for connection in [*self._attempts]:
            if connection is not outcome:
                connection.end(CloseCode.DUPLICATE, "another attempt won", ConnectionClosed(0, "dial over"))
        self._attempts.clear()

    def timed_out(self, timeout: float, no_path: str = "") -> TransportError:
        """The error of a caller whose time is up. `no_path`: why the peer has no path.

        Where it could have come by a path, another node at one of its addresses is not the whole story: a private
        address means somebody else in every network.
        """
        wrong = [error for error in self._errors.values() if isinstance(error, WrongPeer)]
        if wrong and not no_path:
            return wrong[0]
        others = {address for error in wrong for address in error.addresses}
        taken = f"another node is at {format_addresses(sorted(others))}" if others else ""
        failed = {str(error) for error in self._errors.values() if not isinstance(error, WrongPeer)}
        detail = "; ".join(filter(None, [*sorted(failed), taken, no_path]))
        tried = [address for address in self.addresses if address not in others]
        return Unreachable(self.key[0], tried, timeout, detail, self.skipped)

    def _retry(self, target: Target) -> None:
        del self._retries[target]
        self._queue.append(target)
        self._progress.set()

    def _exhausted(self) -> TransportError:
        """The error when every address has failed for good: the most telling one."""
        errors = sorted(self._errors.values(), key=lambda error: not isinstance(error, WrongPeer))
        return errors[0] if errors else Unreachable(self.key[0], (), 0.0, skipped=self.skipped)

    async def _run(self) -> None:
        while True:
            self._progress.clear()
            if self._queue:
                target = self._queue.popleft()
                try:
                    self._attempts[self._connect(target)] = target
                except Exception as error:  # the library's or ours: it must not leave the callers waiting
                    fault = error if isinstance(error, TransportError) else EngineFault(f"cannot dial: {error!r}")
                    self._errors[target] = fault
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ATTEMPT_DELAY):
                        await self._progress.wait()
            elif self._attempts or self._retries or self._hopes:
                await self._progress.wait()
            else:
                self.finish(self._exhausted())
                return


@dataclass(frozen=True, slots=True)
class Resolved:
    """The addresses that a socket can send to, and the others as they were given, each with the reason."""

    usable: list[Address]
    skipped: dict[Address, str]


async def resolve(addresses: Sequence[Address], local: Address) -> Resolved:
    """Look names up and sort out what a socket bound to `local` can never send to."""
    usable: list[Address] = []
    skipped: dict[Address, str] = {}
    for given in addresses:
        host, port = given
        if not 0 < port < 65536:
            skipped[given] = "ports are 1 to 65535"
            continue
        try:
            ipaddress.ip_address(host.partition("%")[0])
            found = [given]
        except ValueError:
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
                found = [(str(info[4][0]), port) for info in infos]
            except (OSError, UnicodeError) as error:  # an unknown name is one address less
                skipped[given] = f"the name was not found: {getattr(error, 'strerror', None) or error}"
                continue
        reasons = {address: why_unreachable(local, address) for address in found}
        usable += [address for address, reason in reasons.items() if not reason]
        if all(reasons.values()):
            skipped[given] = next(iter(reasons.values()), "the name has no address")
    return Resolved(usable, skipped)


def _may_pass(error: TransportError) -> bool:
    """Whether the same address is worth another attempt for as long as someone waits: silence, a node that shuts
    down or has too many handshakes at the moment, or one that holds a connection to us which is gone here."""
    if isinstance(error, ConnectionLost | DuplicateConnection):
        return True
    if isinstance(error, HandshakeFailed):
        return error.code == APPLICATION_ERROR
    return isinstance(error, ConnectionClosed) and not isinstance(error, PeerFault) and error.code == 0


def _retrieve(future: asyncio.Future[Connection]) -> None:
    """A dial whose callers have all gone may fail unheard."""
    if not future.cancelled():
        future.exception()
