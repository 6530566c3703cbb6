"""Asks reflectors, from the node's main socket, which address they see, and when to ask again. SHELL.

By STUN from the main socket, since a NAT maps each socket apart. A check: each reflector gets the request twice,
250 ms apart, the second time only without an answer; it counts as silent after 1.5 s, and a later answer still counts
as an answer. A whole check asks up to six: at start, when the network or the reflectors are others, once more when
answers were lost, and when a mapping has moved. Behind a NAT a small one of two follows every 25 s and keeps the
mapping open. Where nobody answers it asks less and less; without a NAT it does not ask again.

What the answers mean is nat_report's. Called by surroundings. One loop; owns timers only.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from transport.errors import Address
from transport.proto import stun
from transport.proto.addresses import Candidate, CandidateSource, NatKind
from transport.proto.candidates import InterfaceAddress, is_public, parse_host, usable
from transport.proto.nat_report import NatObserver, NatReport

RETRY_SECONDS = 0.25  # between the two tries of a check
VERDICT_SECONDS = 1.5  # from the start of a check to its end
AGAIN_SECONDS = 2.0  # a check that lost answers is repeated once, this much later
KEEP_SECONDS = 25.0  # between checks behind a NAT: mappings should live 120 s (RFC 4787, REQ-5), real ones live 30
SILENT_SECONDS, MAX_SILENT_SECONDS = 30.0, 600.0  # between checks that nobody answers, doubling
SPREAD = 0.1  # of these times, so that nodes that started together do not ask together

MAX_REFLECTORS = 32
PORTS_OF_A_HOST = 2  # both are needed to tell an address-dependent mapping from one that also depends on the port
IPV4_REFLECTORS, IPV6_REFLECTORS = 4, 2  # in a whole check
KEEP_REFLECTORS = 2  # to keep a mapping and see that it moved, two are enough
# Whatever happens, no more STUN than this: a burst for a start and a few changes, then 20 a minute.
STUN_BURST, STUN_PER_SECOND = 40.0, 20 / 60


@dataclass(slots=True)
class StunCounters:
    """Datagrams since the start."""

    sent: int = 0
    answers: int = 0
    ignored: int = 0  # not asked for, from elsewhere, or broken
    withheld: int = 0  # more than the bound allows


@dataclass(slots=True)
class _Asked:
    reflector: Address
    first_sent: float
    answered: bool = False


@dataclass(slots=True)
class _Check:
    began: float
    whole: bool
    asked: dict[bytes, _Asked]  # by transaction id


class ReflectorChecks:
    """Keeps a NatReport true."""

    def __init__(
        self, port: int, listen_host: str, send_udp: Callable[[bytes, Address], None], on_result: Callable[[], None]
    ) -> None:
        """`port`, `listen_host`: of the main socket, which `send_udp` sends from. `on_result`: `report` may be new."""
        self._port, self._listen_host = port, listen_host
        self._send_udp, self._on_result = send_udp, on_result
        self.counters = StunCounters()
        self._observer = NatObserver()
        self._reflectors: tuple[Address, ...] = ()
        self._interfaces: Sequence[InterfaceAddress] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._check: _Check | None = None
        self._earlier: _Check | None = None  # its late answers still count
        self._again = False  # a whole check is due as soon as the one under way ends
        self._repeated = False  # the last check was the repetition of one that lost answers
        self._silent_for = 0.0
        self._changed_at: float | None = None
        self._tokens, self._tokens_at = STUN_BURST, 0.0

    def start(self, interfaces: Sequence[InterfaceAddress]) -> None:
        """Begin to ask, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._tokens_at = self._loop.time()
        self._interfaces = interfaces
        self._begin(whole=True)

    def close(self) -> None:
        """Stop."""
        self._loop = None
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    @property
    def can_ask(self) -> bool:
        """Whether a reflector is known."""
        return bool(self._reflectors)

    def report(self) -> NatReport:
        """What is known now."""
        now = self._loop.time() if self._loop is not None else 0.0
        return self._observer.report(now, {one.host for one in self._interfaces})

    def set_reflectors(self, reflectors: Iterable[Address]) -> None:
        """Who to ask: IP addresses and ports, best first. Asks at once when there are new ones among them."""
        kept: dict[Address, None] = {}
        for host, port in reflectors:
            ip = parse_host(host)
            if ip is not None and 0 < port < 65536 and not ip.is_link_local and not ip.is_multicast:
                kept[str(ip), port] = None
        fresh = tuple(kept)[:MAX_REFLECTORS]
        new = set(fresh) - set(self._reflectors)
        self._reflectors = fresh
        if fresh:  # else no relay is up now: what was seen is true until it is shown to be false
            self._observer.keep_only(fresh)
        if new:
            self.renew()

    def renew(self) -> None:
        """Ask all again now."""
        self._silent_for = 0.0
        self._begin(whole=True)

    def network_changed(self, interfaces: Sequence[InterfaceAddress]) -> None:
        """Ask all again; what is not confirmed within this check is forgotten."""
        self._interfaces = interfaces
        if self._loop is not None:
            self._changed_at = self._loop.time()
            self.renew()

    def heard_directly(self) -> None:
        """A peer on the Internet was heard without a relay."""
        self._observer.heard_directly()

    def on_stun(self, data: bytes, source: Address) -> None:
        """A STUN datagram came in on the main socket."""
        if self._loop is None:
            return
        parsed = stun.parse_binding_response(data)
        host = parse_host(source[0])
        asked = self._find(parsed[0]) if parsed is not None else None
        if parsed is None or asked is None or host is None or (str(host), source[1]) != asked.reflector:
            self.counters.ignored += 1
            return
        if asked.answered:  # the answer to the second try
            return
        asked.answered = True
        self.counters.answers += 1
        moved = self._observer.observe(asked.reflector, self._port, parsed[1], self._loop.time(), asked.first_sent)
        if moved and (self._check is None or not self._check.whole):
            self._again = True  # is it still the same kind of NAT?
        if self._check is not None:
            if all(one.answered for one in self._check.asked.values()):
                self._end_check()
            return
        if self._again:
            self._begin(whole=True)
        self._on_result()

    def _find(self, transaction: bytes) -> _Asked | None:
        for check in (self._check, self._earlier):
            if check is not None and transaction in check.asked:
                return check.asked[transaction]
        return None

    # -- one check

    def _begin(self, *, whole: bool) -> None:
        """Begin a check, or have a whole one follow the one under way."""
        if self._loop is None:
            return
        if self._check is not None:
            self._again = self._again or whole
            return
        self._again = False
        self._cancel("next")
        check = _Check(self._loop.time(), whole, {})
        sent = check.began
        targets = self._targets(whole)
        for reflector in targets:
            transaction = os.urandom(stun.TRANSACTION_BYTES)
            if self._ask(transaction, reflector):
                # Strictly growing, however coarse the clock: the order is what tells a NAT's sequence of ports.
                sent = max(self._loop.time(), sent + 1e-6)
                check.asked[transaction] = _Asked(reflector, sent)
        if not check.asked:
            if not targets:
                self._forget_other_network()
            self._schedule()
            return
        self._check = check
        self._after("retry", RETRY_SECONDS, self._retry)
        self._after("verdict", VERDICT_SECONDS, self._end_check)

    def _retry(self) -> None:
        if self._check is not None:
            for transaction, asked in self._check.asked.items():
                if not asked.answered:
                    self._ask(transaction, asked.reflector)

    def _ask(self, transaction: bytes, reflector: Address) -> bool:
        assert self._loop is not None
        now = self._loop.time()
        self._tokens = min(STUN_BURST, self._tokens + (now - self._tokens_at) * STUN_PER_SECOND)
        self._tokens_at = now
        if self._tokens < 1:
            self.counters.withheld += 1
            return False
        self._tokens -= 1
        self.counters.sent += 1
        self._send_udp(stun.binding_request(transaction), reflector)
        return True

    def _end_check(self) -> None:
        check, self._check = self._check, None
        if check is None or self._loop is None:
            return
        self._earlier = check
        self._cancel("retry")
        self._cancel("verdict")
        was_blocked = self.report().kind == NatKind.BLOCKED
        silent = [asked.reflector for asked in check.asked.values() if not asked.answered]
        for reflector in silent:
            if reflector in self._reflectors:
                self._observer.no_answer(reflector, self._loop.time())
        if self._changed_at is not None and check.began >= self._changed_at:
            self._forget_other_network()
        if len(silent) < len(check.asked):
            self._silent_for = 0.0
        if self._again:
            self._begin(whole=True)
        elif silent and not self._repeated and not was_blocked:
            self._repeated = True
            self._after("next", AGAIN_SECONDS, lambda: self._begin(whole=True))
        else:
            self._repeated = False
            self._schedule()
        self._on_result()

    def _forget_other_network(self) -> None:
        if self._changed_at is not None:
            self._observer.forget_before(self._changed_at)
            self._changed_at = None

    def _schedule(self) -> None:
        """When to ask again, after a check whose outcome stands."""
        report = self.report()
        if not self._reflectors or report.kind == NatKind.NONE:
            return  # a change of the network asks again
        wait = KEEP_SECONDS
        if not report.reflected:
            wait = self._silent_for = min(MAX_SILENT_SECONDS, self._silent_for * 2 or SILENT_SECONDS)
        wait *= random.uniform(1 - SPREAD, 1 + SPREAD)
        self._after("next", wait, lambda: self._begin(whole=False))

    def _targets(self, whole: bool) -> list[Address]:
        """Whom to ask: several hosts before several ports of one, those of the Internet before those of the LAN."""
        ranked: list[tuple[int, bool, Address]] = []
        ports: Counter[str] = Counter()
        for address in self._reflectors:
            if ports[address[0]] < PORTS_OF_A_HOST and reachable(address, self._interfaces, self._listen_host):
                ranked.append((ports[address[0]], not is_public(address[0]), address))
                ports[address[0]] += 1
        ranked.sort(key=lambda entry: entry[:2])
        v4 = [address for _, _, address in ranked if ":" not in address[0]]
        v6 = [address for _, _, address in ranked if ":" in address[0]]
        if whole:
            return v4[:IPV4_REFLECTORS] + v6[:IPV6_REFLECTORS]
        if self._earlier is not None:  # those who answer keep a mapping
            answered = {asked.reflector for asked in self._earlier.asked.values() if asked.answered}
            v4.sort(key=lambda address: address not in answered)
        return v4[:KEEP_REFLECTORS] or v6[:KEEP_REFLECTORS]

    def _after(self, name: str, seconds: float, what: Callable[[], None]) -> None:
        assert self._loop is not None
        self._cancel(name)
        self._timers[name] = self._loop.call_later(seconds, what)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


def reachable(reflector: Address, interfaces: Sequence[InterfaceAddress], listen_host: str) -> bool:
    """Whether a reflector can be asked from here; one on this machine can be asked by any socket."""
    host = parse_host(reflector[0])
    if host is not None and host.is_loopback:
        return host.version == 4 or ":" in listen_host
    return usable(Candidate(reflector, CandidateSource.GIVEN), interfaces, listen_host=listen_host, port=0)
