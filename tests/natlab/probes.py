"""Plain UDP conversations in the lab: who sees which address, who gets through. The lab's own truth, without our code.

One thread drives everything through `select`, many conversations at the same time. Called by test_lab.py.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.natlab.node import Host

Address = tuple[str, int]
AGAIN = 0.15  # seconds until an unanswered question is asked again
PING_EVERY = 0.1


class Reflector:
    """Answers every datagram with the address that it came from, as text; in a thread of its own."""

    def __init__(self, *sockets: socket.socket) -> None:
        self._sockets = sockets
        self._stop, self._stopping = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="reflector", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the sockets stay the caller's."""
        self._stop.close()
        self._thread.join(5)
        self._stopping.close()

    def _run(self) -> None:
        while self._stopping not in (ready := select.select([*self._sockets, self._stopping], [], [])[0]):
            for one in ready:
                with contextlib.suppress(OSError):
                    _, source = one.recvfrom(2048)
                    one.sendto(f"{source[0]} {source[1]}".encode(), source)


def heard(one: socket.socket, wait: float = 0.4) -> tuple[bytes, Address] | None:
    """The next datagram and its source; None when nothing comes."""
    if not select.select([one], [], [], wait)[0]:
        return None
    data, source = one.recvfrom(65_536)
    return data, (source[0], source[1])


def seen_by(one: socket.socket, reflectors: Sequence[Address], wait: float = 1.0) -> list[Address | None]:
    """As which address each reflector sees this socket; None where no answer comes."""
    return seen_by_all([one], reflectors, wait)[one]


def seen_by_all(
    sockets: Sequence[socket.socket], reflectors: Sequence[Address], wait: float = 1.0
) -> dict[socket.socket, list[Address | None]]:
    """The same for many sockets at once. One question after the other per socket: order matters to counting NATs."""
    answers: dict[socket.socket, list[Address | None]] = {one: [] for one in sockets}
    for reflector in reflectors:
        missing, deadline, again = set(sockets), time.monotonic() + wait, 0.0
        while missing and (now := time.monotonic()) < deadline:
            if now >= again:
                again = now + AGAIN
                for one in missing:
                    _send(one, b"who", reflector)
            for one in select.select(list(missing), [], [], AGAIN / 3)[0]:
                with contextlib.suppress(OSError):
                    data, source = one.recvfrom(2048)
                    if source[:2] == reflector:
                        host, _, port = data.decode().partition(" ")
                        answers[one].append((host, int(port)))
                        missing.discard(one)
        for one in missing:
            answers[one].append(None)
    return answers


@dataclass(eq=False)
class End:
    """One side of a punch: its sockets by family, and as what the Internet sees them (None: unknown)."""

    sockets: dict[int, socket.socket]
    mapped: dict[int, Address | None] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)  # families over which an answer came back

    @classmethod
    def of(cls, host: Host, port: int = 0) -> End:
        """Fresh sockets of a host, one per family that it has."""
        families = [family for family, address in ((4, host.ipv4), (6, host.ipv6)) if address]
        return cls({family: host.socket(port=port, ipv6=family == 6) for family in families})

    def close(self) -> None:
        """Close the sockets."""
        for one in self.sockets.values():
            one.close()


def learn(ends: Sequence[End], reflectors: dict[int, Address], wait: float = 1.0) -> None:
    """Fill in `mapped`: one reflector per family."""
    for family, reflector in reflectors.items():
        ours = {end.sockets[family]: end for end in ends if family in end.sockets}
        for one, (address,) in seen_by_all(list(ours), [reflector], wait).items():
            ours[one].mapped[family] = address


def punch(pairs: Sequence[tuple[End, End]], wait: float = 1.2) -> list[bool]:
    """Simultaneous open of all pairs at once; for each, whether both sides got an answer over the same family.

    Each side sends to the other's mapped address, and answers whoever reached it (a peer-reflexive candidate).
    """
    owner: dict[socket.socket, tuple[End, int]] = {}
    targets: dict[socket.socket, set[Address]] = {}
    for pair in pairs:
        for end, other in (pair, pair[::-1]):
            for family, one in end.sockets.items():
                owner[one] = end, family
                mapped = other.mapped.get(family)
                targets[one] = set() if mapped is None else {mapped}
    deadline, again = time.monotonic() + wait, 0.0
    while (now := time.monotonic()) < deadline and not all(one.reached & other.reached for one, other in pairs):
        if now >= again:
            again = now + PING_EVERY
            for one, addresses in targets.items():
                for address in addresses:
                    _send(one, b"ping", address)
        for one in select.select(list(targets), [], [], PING_EVERY / 4)[0]:
            with contextlib.suppress(OSError):
                data, source = one.recvfrom(2048)
                if data == b"ping":
                    targets[one].add((source[0], source[1]))
                    _send(one, b"pong", (source[0], source[1]))
                elif data == b"pong":
                    end, family = owner[one]
                    end.reached.add(family)
    return [bool(one.reached & other.reached) for one, other in pairs]


def _send(one: socket.socket, data: bytes, address: Address) -> None:
    with contextlib.suppress(OSError):  # no route, or an ICMP error of an earlier datagram
        one.sendto(data, address)
