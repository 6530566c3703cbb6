"""From what reflectors see of this node: what kind of NAT it is behind. PURE.

A reflector answers with the address that a datagram of ours came from. One address for all of them: the NAT maps
endpoint-independently and a peer can be told that address (EASY). Another one for each: symmetric (HARD); then ports
that grow by a fixed step can be predicted. Our own address: no NAT (NONE). Silence of all: UDP is BLOCKED. The words
for mappings are those of RFC 5780, 4.3; filtering is not tested here.

IPv4 decides the kind, since IPv6 is hardly ever translated; IPv6 does where IPv4 is not asked or not answered. One
lost answer changes nothing: an observation stands until two checks in a row of that reflector went unanswered.

Called by reflector_checks and netcheck.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from transport.errors import Address, format_addresses
from transport.proto.addresses import NatKind
from transport.proto.candidates import is_public, parse_host

# Answers that belong to one check. A NAT may move a node to another port between two checks: answers that are further
# apart are not compared.
SAME_CHECK_SECONDS = 5.0
MISSES_TO_FORGET = 2  # checks in a row without an answer, before an observation is given up
# Two ports of one check at most this far apart were given out in sequence: for two random ports the chance is 0.1 %.
MAX_PORT_STEP = 32
MAX_REFLECTORS = 32
MAX_REFLECTED = 4  # of one family


@dataclass(frozen=True, slots=True)
class NatReport:
    """What is known now.

    mapping: "none", "endpoint-independent", "address-dependent", "address-and-port-dependent", "blocked", "unknown".
    reflected: our addresses as seen from outside, IPv4 first; behind a predictable NAT the port given out last.
    port_delta: the step from one external port to the next behind a predictable HARD NAT, else 0.
    port_kept: the external port is the local one. reason: one sentence for people.
    """

    kind: NatKind = NatKind.UNKNOWN
    mapping: str = "unknown"
    reflected: tuple[Address, ...] = ()
    port_delta: int = 0
    port_kept: bool = False
    reason: str = "no reflector has answered yet"


@dataclass(slots=True)
class _Seen:
    """What one reflector saw."""

    address: Address
    local_port: int
    at: float  # of the latest answer
    opened: float  # when we first sent what this address was given to: the order in which a NAT gave out ports


@dataclass(slots=True)
class _Reflector:
    address: Address
    version: int
    seen: _Seen | None = None
    misses: int = 0  # checks without an answer since the last one
    answered: bool = False  # ever

    @property
    def silent(self) -> bool:
        """One check proves it for a reflector that never answered; one that did may have lost a datagram."""
        return self.seen is None and self.misses >= (MISSES_TO_FORGET if self.answered else 1)


@dataclass(slots=True)
class _View:
    """The verdict on one family and realm (Internet, or private network and loopback)."""

    mapping: str = "unknown"
    delta: int = 0


@dataclass(slots=True)
class NatObserver:
    """Collects answers and silences; `report` reads them."""

    _reflectors: dict[Address, _Reflector] = field(default_factory=dict)
    _views: dict[tuple[int, bool], _View] = field(default_factory=dict)
    _heard_directly: bool = False

    def observe(
        self, reflector: Address, local_port: int, seen: Address, now: float, sent: float | None = None
    ) -> bool:
        """`reflector` sees us as `seen`. `sent`: when the first datagram of this check went to it (default `now`).

        True when it saw us elsewhere before: the mapping has moved. Ignored: an address that nobody can have, or one
        of another family than the reflector's.
        """
        entry = self._entry(reflector)
        host = parse_host(seen[0])
        if entry is None or host is None or host.version != entry.version or not 0 < seen[1] < 65536:
            return False
        if host.is_unspecified or host.is_multicast:
            return False
        address = (str(host), seen[1])
        opened = now if sent is None else sent
        moved = entry.seen is not None and entry.seen.address != address
        if entry.seen is not None and entry.seen.address == address:
            opened = entry.seen.opened
        entry.seen = _Seen(address, local_port, now, opened)
        entry.misses, entry.answered = 0, True
        self._judge(entry.version, not is_public(address[0]), now)
        return moved

    def no_answer(self, reflector: Address, now: float) -> None:
        """A whole check of `reflector`, all its tries, went unanswered."""
        entry = self._entry(reflector)
        if entry is None:
            return
        entry.misses += 1
        if entry.misses >= MISSES_TO_FORGET:
            entry.seen = None

    def heard_directly(self) -> None:
        """A peer on the Internet was heard without a relay: UDP is not blocked, whatever reflectors do."""
        self._heard_directly = True

    def keep_only(self, reflectors: Collection[Address]) -> None:
        """Forget all other reflectors, and what they saw."""
        for address in [known for known in self._reflectors if known not in reflectors]:
            del self._reflectors[address]

    def forget_before(self, when: float) -> None:
        """Forget what was seen earlier: the network is another one."""
        self._heard_directly = False
        for entry in self._reflectors.values():
            if entry.seen is not None and entry.seen.at < when:
                entry.seen = None
        living = {(entry.version, not is_public(entry.seen.address[0])) for entry in self._answered() if entry.seen}
        self._views = {key: view for key, view in self._views.items() if key in living}

    def report(self, now: float, own_hosts: Collection[str]) -> NatReport:
        """What follows from all of it. `own_hosts`: addresses of this machine's interfaces."""
        own = {str(host) for host in map(parse_host, own_hosts) if host is not None}
        reflected = (*self._reflected(4), *self._reflected(6))
        for version in (4, 6):
            public = self._in_realm(version, private=False)
            answered = public or self._in_realm(version, private=True)
            if answered:
                return self._answered_report(version, answered, own, reflected)
        asked = [entry for entry in self._reflectors.values() if entry.misses]
        silent = [entry for entry in asked if entry.silent]
        if not asked:
            return NatReport()
        if self._heard_directly:
            return NatReport(reason="no reflector answers, but peers do: UDP is not blocked")
        if len(silent) >= 2 and len(silent) == len(self._reflectors):
            reason = f"none of {len(silent)} reflectors answered: UDP does not get out, or nothing comes back"
            return NatReport(NatKind.BLOCKED, "blocked", reason=reason)
        if len(self._reflectors) == 1:
            return NatReport(
                reason=f"{format_addresses([asked[0].address])} did not answer; one reflector proves nothing"
            )
        return NatReport(reason=f"{len(asked)} of {len(self._reflectors)} reflectors did not answer yet")

    def _answered_report(
        self, version: int, answered: list[_Reflector], own: Collection[str], reflected: tuple[Address, ...]
    ) -> NatReport:
        newest = max(entry.seen.at for entry in answered if entry.seen)
        seen = [entry.seen for entry in answered if entry.seen and entry.seen.at >= newest - SAME_CHECK_SECONDS]
        kept = all(one.address[1] == one.local_port for one in seen)
        where = format_addresses(list(dict.fromkeys(one.address for one in seen))[:3])
        if kept and all(one.address[0] in own for one in seen):
            reason = f"reflectors see this machine's own address {where}"
            return NatReport(NatKind.NONE, "none", reflected, 0, kept, reason)
        view = self._views.get((version, not is_public(seen[0].address[0])), _View())
        if view.mapping == "unknown":
            reason = f"one reflector sees {where}; a second one is needed to tell the kind of NAT"
            return NatReport(NatKind.UNKNOWN, view.mapping, reflected, 0, kept, reason)
        if view.mapping == "endpoint-independent":
            several = len({entry.address[0] for entry in answered}) > 1
            reason = f"{'reflectors see' if several else 'all ports of one reflector see'} the same address {where}"
            return NatReport(NatKind.EASY, view.mapping, reflected, 0, kept, reason)
        step = f"; its ports go by steps of {view.delta}" if view.delta else ""
        reason = f"every reflector sees another address ({where}): the NAT is symmetric{step}"
        return NatReport(NatKind.HARD, view.mapping, reflected, view.delta, kept, reason)

    def _judge(self, version: int, private: bool, now: float) -> None:
        """Renew the verdict when at least two reflectors answered in this check; else the last one stands."""
        entries = [
            entry
            for entry in self._in_realm(version, private)
            if entry.seen and entry.seen.at >= now - SAME_CHECK_SECONDS
        ]
        if len(entries) < 2:
            return
        by_host: dict[str, set[Address]] = {}
        for entry in entries:
            if entry.seen:
                by_host.setdefault(entry.address[0], set()).add(entry.seen.address)
        if len(set[Address]().union(*by_host.values())) == 1:
            view = _View("endpoint-independent")
        elif any(len(addresses) > 1 for addresses in by_host.values()):
            view = _View("address-and-port-dependent", _step(entry.seen for entry in entries if entry.seen))
        else:
            view = _View("address-dependent", _step(entry.seen for entry in entries if entry.seen))
        self._views[version, private] = view

    def _reflected(self, version: int) -> list[Address]:
        """Addresses to tell: in an order that does not change while they do not."""
        told: list[Address] = []
        for private in (False, True):
            seen = [entry.seen for entry in self._in_realm(version, private) if entry.seen]
            view = self._views.get((version, private), _View())
            if not seen:
                continue
            if view.mapping in ("unknown", "endpoint-independent"):
                told.append(max(seen, key=lambda one: one.at).address)
            elif view.delta:  # the peer predicts from the port given out last
                told.append(max(seen, key=lambda one: one.opened).address)
            else:  # its ports tell nothing: one for each host
                first: dict[str, Address] = {}
                for one in sorted(seen, key=lambda one: one.opened):
                    first.setdefault(one.address[0], one.address)
                told += first.values()
        return told[:MAX_REFLECTED]

    def _in_realm(self, version: int, private: bool) -> list[_Reflector]:
        return [
            entry
            for entry in self._answered()
            if entry.version == version and entry.seen and is_public(entry.seen.address[0]) != private
        ]

    def _answered(self) -> list[_Reflector]:
        return [entry for entry in self._reflectors.values() if entry.seen is not None]

    def _entry(self, reflector: Address) -> _Reflector | None:
        entry = self._reflectors.get(reflector)
        if entry is None:
            host = parse_host(reflector[0])
            if host is None:
                return None
            if len(self._reflectors) >= MAX_REFLECTORS:
                del self._reflectors[next(iter(self._reflectors))]
            entry = self._reflectors[reflector] = _Reflector(reflector, host.version)
        return entry


def _step(seen: Iterable[_Seen]) -> int:
    """The smallest step between ports in the order they were given out, 0 when they follow no sequence.

    Others behind the same NAT take ports in between, so steps need not be equal.
    """
    ordered = sorted(seen, key=lambda one: one.opened)
    if len({one.address[0] for one in ordered}) != 1:
        return 0
    ports = list(dict.fromkeys(one.address[1] for one in ordered))
    steps = [after - before for before, after in itertools.pairwise(ports)]
    if not steps or any(abs(step) > MAX_PORT_STEP for step in steps):
        return 0
    if not (all(step > 0 for step in steps) or all(step < 0 for step in steps)):
        return 0
    return min(steps, key=abs)
