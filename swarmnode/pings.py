"""Pings to one peer, one after the other, with the path that each took. Called by node.py and by `swarmnode ping`."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmnode import control
from swarmnode.config import PeerAddress, authorities, format_address
from swarmnode.errors import NoNode, UsageError
from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.errors import LocalFault, Unreachable
from transport.identity import TEXT_LENGTH, Identity, PeerId
from transport.proto.addresses import PathId, PathKind
from transport.proto.path_policy import PathState, PathView
from transport.proto.relay_url import parse_relay_url
from transport.udp_socket import any_host

TIMEOUT = 5.0  # seconds for one answer, and for the first path
MIN_INTERVAL, MAX_INTERVAL = 0.05, 86_400.0  # seconds
MAX_COUNT = 1_000_000_000
NO_PATH = "none"


class PingResult(msgspec.Struct, frozen=True):
    """One ping. `rtt_ms` is None when nothing came back, and `reason` then says why: it was lost on this path, or there
    was none (`path` "none") and nothing was sent."""

    peer: str
    path: str
    address: str
    relay: str
    rtt_ms: float | None
    reason: str


def checked_numbers(count: Any, interval: Any) -> tuple[int, float]:
    """How many pings (0: without end), and the seconds between two. UsageError when they cannot be meant."""
    if type(count) is not int or not 0 <= count <= MAX_COUNT:
        raise UsageError(f"--count {count}: give a whole number from 0 to {MAX_COUNT}")
    if type(interval) not in (int, float) or not MIN_INTERVAL <= interval <= MAX_INTERVAL:  # NaN is in no range
        raise UsageError(f"--interval {interval}: give seconds from {MIN_INTERVAL} to {MAX_INTERVAL:g}")
    return count, float(interval)


def chosen_peer(wanted: str, known: Sequence[PeerAddress], own: PeerId) -> PeerAddress:
    """The peer that a user means: of those known by the beginning of its id, any other by its whole id.

    UsageError when it is none, several, or this node itself.
    """
    start, at, _ = wanted.partition("@")
    if at or len(start) >= TEXT_LENGTH:
        target = PeerAddress.parse(wanted)
        if target.peer == own:
            raise UsageError("that is this node itself")
        return target if at else next((one for one in known if one.peer == target.peer), target)
    found = [one for one in known if start and str(one.peer).startswith(start)]
    if len(found) == 1:
        return found[0]
    if found:
        shorts = ", ".join(one.peer.short for one in found)
        raise UsageError(f"{start} is the beginning of {len(found)} peer ids ({shorts}); give more of it")
    names = ", ".join(one.peer.short for one in known[:8])
    raise UsageError(
        f"no peer of this node begins with {start[:TEXT_LENGTH]!r}"
        f" ({f'it knows {names}' if names else 'it has none'}); give a whole PEERID for another one"
    )


async def ping_peer(
    endpoint: Endpoint, target: PeerAddress, count: int, interval: float
) -> AsyncGenerator[PingResult, None]:
    """`count` pings (0: without end), `interval` seconds apart."""
    sent = 0
    while count == 0 or sent < count:
        if sent:
            await asyncio.sleep(interval)
        sent += 1
        before = _path_in_use(endpoint, target.peer)
        try:
            answer = await endpoint.ping(target.peer, target.addresses, timeout=TIMEOUT)
        except Unreachable as error:
            used = before or _path_in_use(endpoint, target.peer)
            if used is not None:
                yield _result(target.peer, used.kind, used.path, None, f"no answer within {TIMEOUT:g} s")
            else:
                reason = str(error).removeprefix(f"peer {target.peer} ")
                yield PingResult(str(target.peer), NO_PATH, "", "", None, reason)
            continue
        rtt_ms = round(answer.rtt * 1e3, 3)
        yield _result(target.peer, answer.path.kind, answer.path.id, rtt_ms, answer.reason)


def _path_in_use(endpoint: Endpoint, peer: PeerId) -> PathView | None:
    """The path that a ping goes by: the peer's datagrams take it, and it answers."""
    decision = endpoint.decision(peer)
    live = [view for view in endpoint.paths(peer) if view.state is PathState.LIVE]
    return next((view for view in live if decision is not None and view.path == decision.primary), None)


def _result(peer: PeerId, kind: PathKind, path: PathId, rtt_ms: float | None, reason: str) -> PingResult:
    address = "" if path.relay else format_address(path.address)
    return PingResult(str(peer), str(kind), address, path.relay, rtt_ms, reason)


async def run_pings(
    state_dir: Path,
    peer: str,
    count: int,
    interval: float,
    relays: Sequence[str],
    relay_ca: Path | None,
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Ping by the node that runs with this state folder; without one, by an endpoint of our own with the same key.

    A running node is always asked first: a second session with its key would take its relays away from it.
    """
    checked_numbers(count, interval)
    urls = _relay_urls(relays)
    authority = authorities(relay_ca) if relay_ca is not None else None
    with contextlib.suppress(NoNode):
        async for event in control.request(state_dir, "ping", peer=peer, count=count, interval=interval):
            show({key: value for key, value in event.items() if key != "event"})
        return
    alone = f"no node runs here to ask ({state_dir})"
    try:
        target = PeerAddress.parse(peer)
    except UsageError as error:
        raise UsageError(f"{alone}, and {error}") from None
    if target.address is None and not urls:
        raise UsageError(f"{alone}: give PEERID@HOST:PORT, or PEERID with --relay URL")
    identity = Identity.load_or_create(state_dir / "identity.key")
    if target.peer == identity.peer_id:
        raise UsageError("that is this node itself")
    config = TransportConfig(relays=urls, relay_ca=authority)
    async with await Endpoint.bind(
        identity, config, listen=(any_host(), 0), admit=lambda who: who == target.peer
    ) as own:
        async for result in ping_peer(own, target, count, interval):
            show(msgspec.to_builtins(result))


def _relay_urls(given: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(parse_relay_url(url).text for url in given)
    except LocalFault as error:
        raise UsageError(f"--relay: {error}") from None


class PingLines:
    """Results as lines for people; remembers the last path to tell of a switch."""

    def __init__(self) -> None:
        self.sent = self.answered = self.lost = 0
        self._rtts: list[float] = []
        self._last = ""

    def of(self, result: dict[str, Any]) -> list[str]:
        """The lines of one result."""
        self.sent += 1
        path = f"{result['path']} {result['relay'] or result['address']}"
        if result["rtt_ms"] is None:
            if result["path"] == NO_PATH:
                return [f"no path: {result['reason']}"]
            self.lost += 1
            return [f"    lost     {path} ({result['reason']})"]
        self.answered += 1
        self._rtts.append(result["rtt_ms"])
        lines = [f"→ {path} ({result['reason']})"] if path != self._last else []
        self._last = path
        return [*lines, f"{result['rtt_ms']:8.1f} ms  {path}"]

    def summary(self) -> str:
        """What all of them showed."""
        text = f"{self.answered} of {self.sent} pings answered"
        if self.lost:
            text += f", {self.lost} lost"
        if pathless := self.sent - self.answered - self.lost:
            text += f", {pathless} without a path"
        if self._rtts:
            low, middle, high = min(self._rtts), statistics.median(self._rtts), max(self._rtts)
            text += f": {low:.1f} / {middle:.1f} / {high:.1f} ms (least/median/most)"
        return text
