"""Everything about the ways to one peer: what to ping, when to call, which path to use now. PURE.

`PeerPaths` holds one machine per path (path.py), the sessions that open new ones (punch.py), and the decision
(path_policy.py). It sends nothing: whoever owns it (path_keeper.py) feeds it what happened, carries out the actions
that `poll` returns, and calls `poll` again when `timer()` says so. After every input, also `sent` and `heard`, look
at `timer()` and `decision`; both are plain attribute reads. Read the sockets before `poll`: what waits in them is not
silence.

What counts: only authenticated things come in. A source address alone changes nothing: a path is live after a pong
of ours came back over it, or a QUIC handshake did.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from math import inf

from transport.errors import Address
from transport.proto.addresses import Candidate, NatKind, PathId, PathKind
from transport.proto.birthday import Shot
from transport.proto.disco_frames import SEAL_OVERHEAD, TRANSACTION_BYTES, Call, encode
from transport.proto.path import CANDIDATE, DEAD, DOUBTED, LIVE, PROBING, Path, Use
from transport.proto.path_actions import Action, Counters, Replay, SendPing
from transport.proto.path_calm import Calm
from transport.proto.path_config import DEFAULT_MAX_SIZE, RELAY_SIZE, UNPROBED_SIZE, PathConfig
from transport.proto.path_policy import Decision, PathState, PathView, Tier, choose
from transport.proto.punch import Aim, CloseSockets, OpenSockets, Punch, SendCall

RELAY_FRAME_OVERHEAD = 35  # type, key, length

__all__ = [
    "Action",
    "CloseSockets",
    "Counters",
    "Decision",
    "OpenSockets",
    "PathConfig",
    "PathState",
    "PathView",
    "PeerPaths",
    "Replay",
    "SendCall",
    "SendPing",
    "Tier",
]


def kind_of(address: Address) -> PathKind | None:
    """The kind of path to an address, when nothing is known of our own networks; None: nobody can be there."""
    try:
        host = ipaddress.ip_address(address[0].partition("%")[0])
    except ValueError:
        return None
    if host.is_loopback:
        return PathKind.LOOPBACK
    if host.is_multicast or host.is_unspecified or host.is_link_local or not 0 < address[1] < 65536:
        return None
    return PathKind.PUBLIC if host.is_global else PathKind.LAN


class PeerPaths:
    """The paths to one peer. All times in seconds, monotonic, and never going back."""

    def __init__(
        self,
        me: bytes,
        peer: bytes,
        config: PathConfig,
        random_bytes: Callable[[int], bytes],
        now: float,
        classify: Callable[[Address], PathKind | None] = kind_of,
    ) -> None:
        """me, peer: public keys. classify: the kind of path to an address of the peer, None when it is no use."""
        self._config, self._random = config, random_bytes
        self._paths: dict[PathId, Path] = {}
        self._punch = Punch(me, peer, config, random_bytes, classify)
        self._shots: dict[bytes, tuple[Shot, float]] = {}
        self._wanted_at = self._used_at = -inf
        self._strangers, self._strangers_at = config.strangers_burst, now
        self._calm = Calm(config, now)
        self._worried = False  # about the selected path, which is a direct one
        self._had_direct = False
        self._call_again = False  # the network changed: call even though a direct path is not dead yet
        self._due = inf
        self._selected: Path | None = None
        self._replay: Replay | None = None
        self.decision = Decision(since=now)
        self.counters = Counters()

    # What is going on.

    def timer(self) -> float | None:
        """When `poll` is due; None: nothing is waited for."""
        return None if self._due == inf else self._due

    def size(self, path: PathId) -> int:
        """UDP payload in bytes that the path is known to carry."""
        known = self._paths.get(path)
        return known.size if known is not None else RELAY_SIZE if path.relay else UNPROBED_SIZE

    def kind(self, path: PathId) -> PathKind:
        """What the path is called."""
        known = self._paths.get(path)
        return known.kind if known is not None else PathKind.RELAY if path.relay else PathKind.PUBLIC

    def views(self, now: float) -> list[PathView]:
        """All paths, as the policy and people see them."""
        home = self._punch.their_relays[:1]
        return [path.view(now, path.path.relay in home) for path in self._paths.values()]

    @property
    def relays_of_peer(self) -> tuple[str, ...]:
        """Relays where the peer says it can be found, its home first; () until it has called or answered."""
        return self._punch.their_relays

    def recall(self, earlier: PeerPaths) -> None:
        """The peer has restarted, and this machine begins where `earlier` ends: what was said in calls holds."""
        self._punch.recall(earlier._punch)

    # Inputs.

    def local(
        self, candidates: Sequence[Candidate], nat: NatKind, port_delta: int, relays: Sequence[str], now: float
    ) -> None:
        """What we tell the peer of ourselves: at most 16 candidates, and our relays, home first."""
        self._punch.local(candidates, nat, port_delta, relays, now)
        self._update(now)

    def want(self, now: float) -> None:
        """Someone wants to talk to the peer: look for a direct path if there is none. Cheap; call it as you like."""
        self._wanted_at = now
        for path in self._paths.values():
            if path.rested(now):
                path.ask(now)
        self._update(now)

    def candidate(self, path: PathId, kind: PathKind, now: float, max_size: int = DEFAULT_MAX_SIZE) -> None:
        """An address to try; at once when the peer is wanted. max_size: bytes of UDP payload that may be probed."""
        known = self._add(path, kind, now, max_size)
        if known is not None:
            known.keep = True
            if self._active(now) and known.rested(now):
                known.ask(now)
        self._update(now)

    def confirmed(self, path: PathId, kind: PathKind, now: float, max_size: int = DEFAULT_MAX_SIZE) -> None:
        """A QUIC handshake has authenticated the peer over this path."""
        known = self._add(path, kind, now, max_size, trusted=True)
        if known is not None:
            self._used_at = now
            known.keep = True
            known.confirmed(now)
        self._update(now)

    def relay_up(self, url: str, now: float) -> None:
        """Our link to that relay is up."""
        known = self._add(PathId(relay=url), PathKind.RELAY, now, RELAY_SIZE, trusted=True)
        if known is not None:
            if known.down_until > -inf:
                known.restore(now)
            if self._active(now) and known.state is CANDIDATE:
                known.ask(now)
        self._update(now)

    def relay_down(self, url: str, now: float) -> None:
        """Our link to that relay is down."""
        known = self._paths.get(PathId(relay=url))
        if known is not None:
            known.lose(now, "our link to the relay is down")
        self._update(now)

    def relay_gone(self, url: str, now: float) -> None:
        """That relay says that the peer is not there."""
        known = self._paths.get(PathId(relay=url))
        if known is not None and known.down_until != inf:
            known.gone(now)
        self._update(now)

    def on_ping(
        self, path: PathId, kind: PathKind, now: float, max_size: int = DEFAULT_MAX_SIZE, *, left: bool = False
    ) -> None:
        """An authenticated ping arrived by this path (and was answered): the peer is heard here. left: it says that it
        has just left the path for its loss."""
        known = self._add(path, kind, now, max_size)
        if known is not None:
            known.last_heard = now
            self._welcome(known, now)
            if left and known.direct and not known.quality.demoted:
                known.quality.follow(now)
                self._update(now)
            selected = self._selected
            if not known.direct and selected is not None and selected.direct and selected.ask_again(now):
                self._worried = True  # the peer is, and has asked our relay
                self._reckon(now)

    def on_pong(self, path: PathId, tx: bytes, observed: Address | None, now: float) -> None:
        """An authenticated pong arrived by this path. `observed` concerns the surroundings, not this machine."""
        self._catch_up(now)
        known = self._paths.get(path)
        shot = self._shots.pop(tx, None)
        if known is None and shot is not None and shot[0].path == path and now < shot[1]:
            known = self._add(path, shot[0].kind, now, DEFAULT_MAX_SIZE, trusted=True)
            if known is not None:
                known.sent_ping(tx, 0, Use.LIFE, shot[1] - self._config.ping_life)
        if known is not None and known.pong(tx, now):
            self.counters.pongs += 1
            self._update(now)
        else:
            self.counters.unknown_pongs += 1

    def on_call(self, call: Call, relay_url: str, now: float) -> None:
        """A call of the peer arrived through that relay, and it is no replay."""
        self._used_at = now
        relay = self._paths.get(PathId(relay=relay_url))
        if relay is not None and relay.down_until != inf:
            if relay.down_until > -inf:
                relay.restore(now)
            relay.last_heard = now
            self._welcome(relay, now)
        self._punch.on_call(call, relay_url, now)
        self._update(now)

    def heard(self, path: PathId, now: float) -> None:
        """Datagrams of an authenticated connection came by this path. Unknown paths: see `hint`."""
        known = self._selected
        if known is not None and (known.path is path or known.path == path):
            known.last_heard = now
            known.waiting_since = inf
            known.one_way = 0
            if known.state is DEAD:
                self._heard_elsewhere(known, now)
            return
        known = self._paths.get(path)
        if known is not None:
            known.last_heard = now
            known.waiting_since = inf
            known.one_way = 0
            self._heard_elsewhere(known, now)

    def hint(self, path: PathId, kind: PathKind, now: float, max_size: int = DEFAULT_MAX_SIZE) -> None:
        """QUIC bytes for a live connection of this peer came from an unproven source: ask there."""
        is_new = path not in self._paths
        known = self._add(path, kind, now, max_size)
        if known is not None:
            if is_new:
                self._disturb(now)
            self._welcome(known, now)

    def sent(self, path: PathId, size: int, now: float) -> None:
        """Datagrams of a connection went out on this path; size: bytes of the largest."""
        known = self._selected
        if known is None or (known.path is not path and known.path != path):
            known = self._paths.get(path)
            if known is None:
                return
        if known.waiting_since == inf:
            self._first_sent(known, now)
        if size > UNPROBED_SIZE:
            known.last_big = now
            if known.sizes.due == inf:
                known.sizes.sent_big(now)
                self._due = min(self._due, known.sizes.due)

    def sample(self, path: PathId, sent: int, lost: int, goodput_Bps: float | None, now: float) -> None:
        """A second of QUIC on this path: packets sent, found lost, and B/s if the sender was never idle.

        It counts when nothing has happened to the paths since long before that second.
        """
        known = self._paths.get(path)
        if not self._calm.sample(now) or known is None or known.state is not LIVE:
            return
        if goodput_Bps is not None:
            loss = lost / max(1, sent) if known.kind in (PathKind.PUBLIC, PathKind.PUNCHED) else 0.0
            known.quality.carried(goodput_Bps, loss, self._relay_goodput(now) if known.direct else 0.0, now)
        if known.direct:
            known.quality.count(sent, lost, now)
        self._update(now)

    def network_changed(self, now: float) -> None:
        """Interfaces changed, or we woke from sleep: doubt everything, ask everything at once, call again."""
        self._punch.changed(network=True)
        self._shots.clear()
        self._disturb(now)
        for path in self._paths.values():
            path.network_changed(now)
            if path.state in (CANDIDATE, DEAD) and self._active(now):
                path.ask(now)
        self._call_again = True
        self._update(now)

    def sockets_ready(self, count: int, now: float) -> None:
        """Auxiliary sockets 1..count are open."""
        self._punch.sockets_ready(count, now)
        self._update(now)

    # Time.

    def poll(self, now: float) -> list[Action]:
        """Let time pass; what to do now."""
        self._catch_up(now)
        active = self._active(now)
        actions: list[Action] = []
        self._look_for_direct(now)
        self._do_punch(actions, now)
        for path in list(self._paths.values()):
            if now >= path.down_until > -inf:
                path.restore(now)
            if active and path.state is CANDIDATE:
                path.ask(now)
            for size, use in path.poll(now, path is self._selected, active):
                actions.append(self._ping(path, size, use, now))
        self._ask_backup(now)
        self._forget(actions, now)
        self._update(now)
        if self._do_punch(actions, now):  # a path came alive or died: what follows for punching follows now
            self._update(now)
        if self._replay is not None:
            actions.append(self._replay)
            self.counters.replays += 1
            self._replay = None
            self._reckon(now)
        return actions

    def _catch_up(self, now: float) -> None:
        # Our own timer is late: we stood still, and what waits in the sockets has waited as long.
        late = now - self._due
        if self._config.stall < late < inf:
            for path in self._paths.values():
                path.shift(late, now)
            self._due = now
            self._disturb(now)

    def _disturb(self, now: float) -> None:
        if self._calm.disturb(now) and self._selected is not None:
            self._selected.quality.taint(now)

    def _ask_backup(self, now: float) -> None:
        # In question, a path is backed soon: does the relay answer? And the peer, which hears us ask there, asks the
        # path too: it may hear us well by it and not know that we do not hear its answers.
        selected = self._selected
        worried = selected is not None and selected.direct and selected.in_question
        if worried and not self._worried and (url := self._best_relay(now)) is not None:
            self._paths[PathId(relay=url)].ask_again(now)
        self._worried = worried

    def _ping(self, path: Path, size: int, use: Use, now: float) -> SendPing:
        tx = self._random(TRANSACTION_BYTES)
        path.sent_ping(tx, size, use, now)
        self.counters.pings += 1
        return SendPing(path.path, tx, size, use is Use.FAREWELL)

    def _look_for_direct(self, now: float) -> None:
        if self._looking(now) and self._punch.may_start(now):
            relay = self._best_relay(now)
            if relay is not None:
                self._call_again = False
                self._punch.start(relay, now)

    def _looking(self, now: float) -> bool:
        wanted = now - max(self._wanted_at, self._used_at) < self._config.wanted
        if not wanted or (self._had_direct and not self._call_again):
            return False
        return any(
            not path.direct and now >= path.down_until and (path.proven or path.state is not DEAD)
            for path in self._paths.values()
        )

    def _do_punch(self, actions: list[Action], now: float) -> bool:
        done = self._punch.poll(now)
        for action in done:
            match action:
                case Aim(path, kind, delay):
                    known = self._add(path, kind, now, DEFAULT_MAX_SIZE, trusted=True)
                    if known is not None and known.state is not LIVE:
                        known.ask(now, delay)
                case Shot(path):
                    tx = self._random(TRANSACTION_BYTES)
                    self._shots[tx] = (action, now + self._config.ping_life)
                    self.counters.pings += 1
                    actions.append(SendPing(path, tx, 0))
                case SendCall(_, call):
                    self.counters.calls += 1
                    self.counters.relay_bytes += len(encode(call)) + SEAL_OVERHEAD + RELAY_FRAME_OVERHEAD
                    actions.append(action)
                case CloseSockets():
                    actions.append(CloseSockets(self._kept_sockets()))
                case OpenSockets():
                    actions.append(action)
        return bool(done)

    # Inside.

    def _active(self, now: float) -> bool:
        return now - max(self._wanted_at, self._used_at) < self._config.linger

    def _first_sent(self, known: Path, now: float) -> None:
        rested = not self._active(now)
        self._used_at = now
        if known.state is LIVE:
            known.waiting_since = now
            self._due = min(self._due, now + 0.5 * known.patience())
        if rested or now - known.last_heard > self._config.stale_after:
            self._due = min(self._due, now)  # duplicate-on-doubt: what is sent into long silence is doubted at once

    def _heard_elsewhere(self, known: Path, now: float) -> None:
        self._welcome(known, now)
        selected = self._selected
        # The peer prefers another path: does it hear us on this one?
        if selected is not None and selected is not known and selected.state is not PROBING and selected.ask_again(now):
            self._reckon(now)

    def _welcome(self, known: Path, now: float) -> None:
        # The peer is heard here: if the path is not (or no longer) live, find out whether it hears us.
        if known.state is LIVE:
            return
        if known.state is CANDIDATE or (known.state is DEAD and not known.proven):
            known.ask(now, once=known.direct)
            self._update(now)  # a relay is of use from now on
        elif known.ask_again(now):
            self._reckon(now)

    def _add(self, path: PathId, kind: PathKind, now: float, max_size: int, trusted: bool = False) -> Path | None:
        known = self._paths.get(path)
        if known is not None:
            if known.direct:
                known.sizes.allow(max_size, now if known.state is LIVE else inf)
            return known
        config = self._config
        if path.relay and not trusted:
            return None  # our own link to a relay comes first
        if not trusted:
            refill = (now - self._strangers_at) * config.strangers_per_s
            self._strangers = min(config.strangers_burst, self._strangers + refill)
            self._strangers_at = now
            if self._strangers < 1:
                self.counters.strangers += 1
                return None
            self._strangers -= 1
        room = config.max_paths + (config.trusted_room if trusted else 0)
        if len(self._paths) >= config.max_paths and not self._make_room() and len(self._paths) >= room:
            self.counters.strangers += 1
            return None
        known = self._paths[path] = Path(path, self._punch.called(path, kind), now, config, max_size)
        return known

    def _make_room(self) -> bool:
        spare = [
            path
            for path in self._paths.values()
            if path is not self._selected
            and (path.state in (DEAD, CANDIDATE, PROBING) if path.direct else path.down_until == inf)
        ]
        if not spare:
            return False
        victim = min(spare, key=lambda path: (path.keep, path.proven, path.state is not DEAD, path.since))
        del self._paths[victim.path]
        return True

    def _forget(self, actions: list[Action], now: float) -> None:
        for tx in [tx for tx, (_, end) in self._shots.items() if now >= end]:
            del self._shots[tx]
        config = self._config
        for path in list(self._paths.values()):
            spare = path.state is DEAD and path.direct and not path.keep and path is not self._selected
            if spare and now - path.since >= (config.forget_proven if path.proven else config.forget_unproven):
                del self._paths[path.path]
                if path.path.socket:
                    actions.append(CloseSockets(self._kept_sockets()))

    def _kept_sockets(self) -> frozenset[int]:
        kept = (path.path.socket for path in self._paths.values() if path.state in (LIVE, DOUBTED))
        return frozenset(socket for socket in kept if socket)

    def _best_relay(self, now: float) -> str | None:
        relays = [view for view in self.views(now) if not view.direct]
        best = choose(relays, Decision(), now, self._config).primary
        return None if best is None else best.relay

    def _relay_goodput(self, now: float) -> float | None:
        known = [
            path.quality.goodput
            for path in self._paths.values()
            if not path.direct
            and path.quality.goodput is not None
            and now - path.quality.goodput_at < self._config.goodput_memory
        ]
        return max(known, default=None)

    def _update(self, now: float) -> None:
        """Decide anew, tell the punch, and reckon when `poll` is due. After everything that is not hot."""
        if self._punch.knows_more:
            self._punch.knows_more = False
            for path in self._paths.values():
                path.kind = self._punch.called(path.path, path.kind)
        direct = [path.state for path in self._paths.values() if path.direct]
        has_direct = LIVE in direct or DOUBTED in direct
        if LIVE in direct and not self._punch.has_direct:
            self._punch.on_direct()
        elif self._had_direct and not has_direct:
            self._punch.changed()
        self._punch.has_direct, self._had_direct = LIVE in direct, has_direct
        was = self.decision
        self.decision = choose(self.views(now), was, now, self._config, self._punch.verdict)
        primary, duplicate = self.decision.primary, self.decision.duplicate
        doubted = self._selected is not None and self._selected.state is DOUBTED
        if doubted or (primary, duplicate) != (was.primary, was.duplicate):
            self._disturb(now)
        if primary != was.primary:
            self.counters.switches += was.primary is not None
            self._selected = None if primary is None else self._paths[primary]
        if primary is not None and duplicate is not None and was.duplicate is None and primary == was.primary:
            self._replay = Replay(duplicate, self._paths[primary].unheard_since)
        elif primary is not None and was.primary is not None and primary != was.primary and was.duplicate is None:
            left = self._paths.get(was.primary)
            if left is None or left.state in (DOUBTED, DEAD):
                self._replay = Replay(primary, now - self._config.replay if left is None else left.unheard_since)
        self._reckon(now)

    def _reckon(self, now: float) -> None:
        active = self._active(now)
        due = min(self._punch.due, now if self._replay is not None else inf)
        for path in self._paths.values():
            due = min(due, path.due(now, path is self._selected, active))
        if self._punch.idle and self._looking(now):
            due = min(due, self._punch.start_at())
        self._due = now if due == -inf else due
