"""How two nodes behind NATs open a direct path: who says what through the relay, and who pings what when. PURE.

Not the pings themselves and not whether a path works (paths.py, which owns and drives this). One `Punch` per peer.

Session   caller                            called
          CALL, my candidates          →
                                       ←    ANSWER, mine
          GO                           →    fires when it arrives
          fires half a relay RTT later: the first packets of both cross, so that both NATs expect them

Fire      every address that makes sense, LAN first, all within 100 ms; what comes of it is judged after 1 s
Glare     both call at once: the session of the lower key goes on, the other one is forgotten
Again     a plain session that failed is repeated once after 1.5 s. Then only when a candidate, a NAT or the network
          changed, or after five minutes (sooner, in growing gaps, when the plan is plain, which may well have met an
          outage, or when the peer did not even answer), and never more than one per 5 s after a few at once

PLANS, by (my NAT, the peer's); UNKNOWN counts as EASY:
          NONE    EASY    HARD     BLOCKED
  NONE    plain   plain   plain    local
  EASY    plain   plain   spray    local
  HARD    plain   open    local    local
  BLOCKED local   local   local    local
  plain   ping the addresses told
  spray   the peer's NAT takes another port for us: predicted ports first (when its ports grow by a fixed step), then
          the birthday: random ports of its address, until one of its sockets is hit
  open    the other side of that: plain pings (enough for a peer behind a cone), then 256 more sockets
  local   only addresses that need no punch: LAN, IPv6, mapped or given ones. A relay does the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from math import inf

from transport.errors import Address
from transport.proto.addresses import Candidate, CandidateSource, NatKind, PathId, PathKind
from transport.proto.birthday import LOWEST_PORT, Shot, fan, spray
from transport.proto.disco_frames import (
    BOOT_BYTES,
    MAX_CANDIDATES,
    MAX_RELAY_BYTES,
    MAX_RELAYS,
    SESSION_BYTES,
    Call,
    CallStage,
)
from transport.proto.path_config import PathConfig

NEEDS_NO_PUNCH = frozenset({CandidateSource.MAPPED, CandidateSource.GIVEN})
BEHIND_NAT = frozenset({NatKind.EASY, NatKind.HARD})


class Plan(StrEnum):
    """What a side does when both may fire."""

    PLAIN = "plain"
    SPRAY = "spray"
    OPEN = "open"
    LOCAL = "local"


_KINDS = (NatKind.NONE, NatKind.EASY, NatKind.HARD, NatKind.BLOCKED)
_ROWS = {
    NatKind.NONE: (Plan.PLAIN, Plan.PLAIN, Plan.PLAIN, Plan.LOCAL),
    NatKind.EASY: (Plan.PLAIN, Plan.PLAIN, Plan.SPRAY, Plan.LOCAL),
    NatKind.HARD: (Plan.PLAIN, Plan.OPEN, Plan.LOCAL, Plan.LOCAL),
    NatKind.BLOCKED: (Plan.LOCAL, Plan.LOCAL, Plan.LOCAL, Plan.LOCAL),
}
PLANS: Mapping[tuple[NatKind, NatKind], Plan] = {
    (mine, theirs): plan for mine, row in _ROWS.items() for theirs, plan in zip(_KINDS, row, strict=True)
}


def plan_for(mine: NatKind, theirs: NatKind) -> Plan:
    """The plan for two kinds of NAT."""
    return PLANS[_known(mine), _known(theirs)]


def _known(kind: NatKind) -> NatKind:
    return NatKind.EASY if kind is NatKind.UNKNOWN else kind


@dataclass(frozen=True, slots=True)
class SendCall:
    """Send this call through that relay. The shell writes its boot id and the next number into it."""

    relay: str
    call: Call


@dataclass(frozen=True, slots=True)
class OpenSockets:
    """Open auxiliary sockets 1..count for this peer; answer with `sockets_ready(how many there are)`."""

    count: int


@dataclass(frozen=True, slots=True)
class CloseSockets:
    """Close this peer's auxiliary sockets except these."""

    keep: frozenset[int]


@dataclass(frozen=True, slots=True)
class Aim:
    """For paths.py: ping this address a few times, from `delay` seconds on."""

    path: PathId
    kind: PathKind
    delay: float


PunchAction = SendCall | OpenSockets | CloseSockets | Aim | Shot


class _Stage(Enum):
    IDLE = "idle"
    CALLING = "calling"  # CALL sent
    ANSWERED = "answered"  # ANSWER sent
    FIRING = "firing"
    PAUSE = "pause"  # before the second session
    BIRTHDAY = "birthday"


@dataclass(frozen=True, slots=True)
class _Side:
    candidates: tuple[Candidate, ...] = ()
    nat: NatKind = NatKind.UNKNOWN
    port_delta: int = 0


class Punch:
    """The sessions with one peer. Drive it with `poll` when `due` says so; `verdict` is for people."""

    def __init__(
        self,
        me: bytes,
        peer: bytes,
        config: PathConfig,
        random_bytes: Callable[[int], bytes],
        classify: Callable[[Address], PathKind | None],
    ) -> None:
        """me, peer: public keys. classify: the kind of path to an address, None when it cannot work from here."""
        self._mine_goes_first = me < peer
        self._config, self._random, self._classify = config, random_bytes, classify
        self._mine, self._theirs = _Side(), _Side()
        self._told = NatKind.UNKNOWN  # what the peer was told last of ours
        self._relays: tuple[str, ...] = ()
        self._stage = _Stage.IDLE
        self._relay = ""
        self._session = b""
        self._caller = False
        self._round = 0  # sessions since something changed
        self._calls = 0
        self._called_at = -inf
        self._next = inf  # when the stage ends
        self._plan = Plan.PLAIN
        self._out: list[PunchAction] = []
        self._changed = True
        self._worked = False  # a direct path has been live in this network
        self._failed = 0  # sessions in a row since
        self._ignored = 0  # sessions in a row that the peer never answered: it may be busy, or coming back
        self._starts: deque[float] = deque(maxlen=config.session_burst)
        self._last_at = -inf  # the last session, whoever called
        self._answers, self._answers_at = config.answers_burst, 0.0
        self._had_birthday = False
        self._birthday: Iterator[tuple[float, Shot]] | None = None
        self._shot: tuple[float, Shot] = (inf, Shot(PathId(), PathKind.PUNCHED))
        self.has_direct = False  # kept by paths.py: a direct path is live
        self.knows_more = False  # for paths.py: paths may be called something else now
        self.their_relays: tuple[str, ...] = ()
        self.verdict = ""

    @property
    def idle(self) -> bool:
        """Whether no session is under way."""
        return self._stage is _Stage.IDLE

    @property
    def due(self) -> float:
        """When `poll` has something to do."""
        return -inf if self._out else min(self._next, self._shot[0])

    def called(self, path: PathId, kind: PathKind) -> PathKind:
        """What both sides call a path: both know what they told each other in calls, and the kind of its address.

        Punched is what leads from behind one NAT to behind another; IPv6 has none.
        """
        if kind not in (PathKind.PUBLIC, PathKind.PUNCHED):
            return kind
        punched = {self._told, self._theirs.nat} <= BEHIND_NAT and ":" not in path.address[0]
        return PathKind.PUNCHED if punched else PathKind.PUBLIC

    # Inputs.

    def recall(self, earlier: Punch) -> None:
        """Start with what was said in the calls of another one, with the same peer."""
        self._told, self._theirs, self.their_relays = earlier._told, earlier._theirs, earlier.their_relays
        self.knows_more = True

    def local(
        self, candidates: Sequence[Candidate], nat: NatKind, port_delta: int, relays: Sequence[str], now: float
    ) -> None:
        """What the peer is told of us. A real change allows new sessions."""
        mine = _Side(tuple(candidates)[:MAX_CANDIDATES], nat, max(-32768, min(32767, port_delta)))
        self._relays = tuple(url for url in relays if len(url.encode()) <= MAX_RELAY_BYTES)[:MAX_RELAYS]
        if mine != self._mine:
            self._mine = mine
            self.changed()

    def changed(self, network: bool = False) -> None:
        """Something is other than it was when sessions failed; `network`: it is another one altogether."""
        self._changed, self._ignored = True, 0
        if network:
            self._had_birthday = self._worked = False
            self._failed = 0

    def may_start(self, now: float) -> bool:
        """Whether a session may be started."""
        return self._stage is _Stage.IDLE and now >= self.start_at()

    def start_at(self) -> float:
        """When the next session may be started, as far as is known now."""
        config, starts = self._config, self._starts
        spaced = starts[0] + config.session_gap * len(starts) if len(starts) == starts.maxlen else -inf
        if self._changed:
            return spaced
        patience = config.retry_session
        if self._ignored:
            patience = config.session_gap * 2 ** (self._ignored - 1)
        elif self._plan is Plan.PLAIN:
            again = 2 ** max(0, self._failed - 1)
            patience = config.retry_plain * again
            if self._worked:
                patience = min(config.retry_plain, config.retry_worked * again)
        return max(spaced, self._last_at + min(patience, config.retry_session))

    def start(self, relay: str, now: float) -> None:
        """Call the peer through that relay."""
        self._changed = False
        self._last_at = now
        self._round = 0
        self._begin(relay, now)

    def on_call(self, call: Call, relay: str, now: float) -> None:
        """A call of the peer arrived through that relay."""
        match call.stage:
            case CallStage.CALL if self._accepts(now):
                self._note(call)
                if self._stage is _Stage.CALLING and self._mine_goes_first:
                    return  # glare: it will answer ours
                self._changed, self._last_at = False, now
                self._enter(_Stage.ANSWERED, now + self._config.go_timeout)
                self._relay, self._session, self._caller = relay, call.session, False
                self._say(CallStage.ANSWER)
            case CallStage.ANSWER if self._stage is _Stage.CALLING and call.session == self._session:
                self._note(call)
                self._say(CallStage.GO)
                relay_rtt = now - self._called_at
                self._fire(now, min(0.5 * relay_rtt, 0.5))
            case CallStage.GO if self._stage is _Stage.ANSWERED and call.session == self._session:
                self._fire(now, 0.0)
            case _:
                pass  # late, doubled or too many

    def on_direct(self) -> None:
        """A direct path is live: nothing more to open."""
        self._enter(_Stage.IDLE, inf)
        self._worked, self._failed = True, 0
        self.verdict = ""

    def sockets_ready(self, count: int, now: float) -> None:
        """Auxiliary sockets 1..count are open."""
        target = self._target()
        if self._stage is not _Stage.BIRTHDAY or self._plan is not Plan.OPEN or target is None:
            return
        count = min(count, self._config.birthday_sockets)
        if count:
            self._begin_birthday(fan(target, count, self._config, now))

    # Time.

    def poll(self, now: float) -> list[PunchAction]:
        """Let time pass; what to do now."""
        if now >= self._next:
            self._next = inf
            self._stage_ended(now)
        while now >= self._shot[0]:
            self._out.append(self._shot[1])
            self._load(now)
        out, self._out = self._out, []
        return out

    def _stage_ended(self, now: float) -> None:
        config = self._config
        match self._stage:
            case _Stage.CALLING if self._calls < config.call_tries:
                self._call(now)
            case _Stage.CALLING:
                self._ignored = min(self._ignored + 1, 10)
                self._fail("relay only: the peer does not answer calls")
            case _Stage.ANSWERED:
                self._fire(now, 0.0)
            case _Stage.FIRING | _Stage.PAUSE | _Stage.BIRTHDAY if self.has_direct:
                self.on_direct()
            case _Stage.FIRING if self._plan in (Plan.SPRAY, Plan.OPEN) and not self._had_birthday:
                self._had_birthday = True
                self._enter(_Stage.BIRTHDAY, now + config.birthday_time)
                self.verdict = "relay: looking for a direct path, one NAT is hard"
                target = self._target()
                if self._plan is Plan.OPEN:
                    self._out.append(OpenSockets(config.birthday_sockets))
                elif target is not None:
                    self._begin_birthday(spray(target, self._config, self._random, now))
            case _Stage.FIRING if self._caller and self._round < 2 and self._plan is Plan.PLAIN:
                self._enter(_Stage.PAUSE, now + max(0.0, config.second_session - config.judge_after))
            case _Stage.PAUSE:
                self._begin(self._relay, now)
            case _Stage.BIRTHDAY | _Stage.FIRING:
                self._fail(self._why())
            case _Stage.IDLE:
                pass

    def _enter(self, stage: _Stage, until: float) -> None:
        if self._stage is _Stage.BIRTHDAY:
            self._birthday, self._shot = None, (inf, self._shot[1])
            if self._plan is Plan.OPEN:
                self._out.append(CloseSockets(frozenset()))  # paths.py adds what it keeps
        self._stage, self._next = stage, until

    def _fail(self, verdict: str) -> None:
        self._failed = min(self._failed + self._caller, 10)
        self._enter(_Stage.IDLE, inf)
        self.verdict = verdict

    def _why(self) -> str:
        mine, theirs = _known(self._mine.nat), _known(self._theirs.nat)
        if mine is NatKind.BLOCKED:
            return "relay only: UDP is blocked here"
        if theirs is NatKind.BLOCKED:
            return "relay only: UDP is blocked at the peer"
        if mine is theirs is NatKind.HARD:
            return "relay only: both NATs are hard"
        if NatKind.HARD in (mine, theirs):
            return "relay only: one NAT is hard, and no port of it was hit"
        return "relay only: no direct address answered"

    # Saying.

    def _begin(self, relay: str, now: float) -> None:
        self._starts.append(now)
        self._round += 1
        self._relay, self._session, self._caller = relay, self._random(SESSION_BYTES), True
        self._calls = 0
        if not self.verdict:
            self.verdict = "relay: looking for a direct path"
        self._call(now)

    def _call(self, now: float) -> None:
        self._calls += 1
        self._called_at = now
        self._enter(_Stage.CALLING, now + self._config.call_timeout)
        self._say(CallStage.CALL)

    def _say(self, stage: CallStage) -> None:
        mine = self._mine
        brief = stage is CallStage.GO  # the peer has everything already
        call = Call(
            stage=stage,
            session=self._session,
            boot=bytes(BOOT_BYTES),
            number=0,
            nat=mine.nat,
            port_delta=mine.port_delta,
            candidates=() if brief else mine.candidates,
            relays=() if brief else self._relays,
        )
        self._told, self.knows_more = mine.nat, True
        self._out.append(SendCall(self._relay, call))

    def _note(self, call: Call) -> None:
        self._ignored = 0
        self.knows_more = True
        self._theirs = _Side(call.candidates[:MAX_CANDIDATES], call.nat, call.port_delta)
        self.their_relays = call.relays[:MAX_RELAYS]

    def _accepts(self, now: float) -> bool:
        config = self._config
        refill = (now - self._answers_at) * config.answers_per_s
        self._answers = min(config.answers_burst, self._answers + refill)
        self._answers_at = now
        if self._answers < 1:
            return False
        self._answers -= 1
        return True

    # Firing.

    def _fire(self, now: float, delay: float) -> None:
        self._plan = plan_for(self._mine.nat, self._theirs.nat)
        aims = self._aims()
        gap = min(self._config.aim_gap, self._config.aim_time / max(1, len(aims)))
        for number, (address, kind) in enumerate(aims):
            self._out.append(Aim(PathId(address), kind, delay + number * gap))
        if self._plan is Plan.LOCAL:  # what a relay is for: say so at once, an answer may still prove it wrong
            self.verdict = self._why()
        if self._plan is Plan.LOCAL and not aims:
            self._fail(self._why())
        else:
            self._enter(_Stage.FIRING, now + delay + self._config.judge_after)

    def _aims(self) -> list[tuple[Address, PathKind]]:
        found: dict[Address, PathKind] = {}
        for candidate in self._theirs.candidates:
            kind = self._classify(candidate.address)
            if kind is None:
                continue
            local = kind in (PathKind.LAN, PathKind.LOOPBACK) or ":" in candidate.address[0]
            if self._plan is not Plan.LOCAL or local or candidate.source in NEEDS_NO_PUNCH:
                found.setdefault(candidate.address, kind)
        near = [item for item in found.items() if item[1] in (PathKind.LOOPBACK, PathKind.LAN)]
        far = [item for item in found.items() if item not in near]
        predicted = [item for item in self._predicted() if item[0] not in found]
        return (near[:MAX_CANDIDATES] + predicted + far)[: MAX_CANDIDATES + len(predicted)]

    def _predicted(self) -> list[tuple[Address, PathKind]]:
        step = self._theirs.port_delta
        if self._plan is not Plan.SPRAY or step == 0:
            return []
        seen = self._seen_ports()
        if not seen:
            return []
        host, last = max(seen, key=lambda address: address[1] * (1 if step > 0 else -1))
        ports = [last + step * ahead for ahead in range(1, self._config.predict_ports + 1)]
        return [((host, port), PathKind.PUNCHED) for port in ports if LOWEST_PORT <= port <= 65535]

    def _seen_ports(self) -> list[Address]:
        sources = (CandidateSource.REFLECTED, CandidateSource.OBSERVED)
        return [
            candidate.address
            for candidate in self._theirs.candidates
            if candidate.source in sources
            and ":" not in candidate.address[0]
            and self._classify(candidate.address) is not None
        ]

    # Birthday.

    def _target(self) -> Address | None:
        seen = self._seen_ports()
        if seen:
            return seen[0]
        public = [candidate.address for candidate in self._theirs.candidates if ":" not in candidate.address[0]]
        return next((address for address in public if self._classify(address) is PathKind.PUBLIC), None)

    def _begin_birthday(self, shots: Iterator[tuple[float, Shot]]) -> None:
        self._birthday = shots
        self._load(-inf)

    def _load(self, now: float) -> None:
        assert self._birthday is not None
        gap = self._config.birthday_gap if self._plan is Plan.SPRAY else 0.0
        found = next(self._birthday, None)
        if found is None:
            self._birthday, self._shot = None, (inf, self._shot[1])
        else:
            self._shot = (max(found[0], now + gap), found[1])
