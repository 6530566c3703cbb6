"""Frozen snapshots of a node that anything may read: the control socket, the command line, the dashboard. A leaf."""

from __future__ import annotations

from typing import Any

import msgspec


class PeerStatus(msgspec.Struct, frozen=True):
    """One peer as this node sees it. `holdings` maps layer → expert ranges; rates are bytes per second.

    `in_flight` counts this node's calls to it that are not answered yet; `waiting_rows` is what the worker said last of
    its own queue (the founder alone is told).
    """

    peer: str
    name: str
    role: str
    path: str
    reason: str
    rtt_ms: float
    loss: float
    relay: str
    up_Bps: float
    down_Bps: float
    holdings: dict[str, str]
    last_seen_s: float
    address: str = ""
    experts: int = 0
    calls: int = 0
    rows: int = 0
    failures: int = 0
    suspect: bool = False
    latency_ms: float = 0.0
    bytes_out: int = 0
    bytes_back: int = 0
    in_flight: int = 0
    waiting_rows: int = 0


class SiteStatus(msgspec.Struct, frozen=True):
    """Dispatch counters of one MoE layer since the node started (or the generation, where a difference is shown).

    `evaluations` counts the steps that passed it, those among them too that needed nobody else.
    """

    layer: int
    round_trips: int
    bytes_out: int
    bytes_back: int
    wait_ms: float
    busy_ms: float
    evaluations: int = 0


class GenerationStatus(msgspec.Struct, frozen=True):
    """What the backbone is doing, and how it was told to do it.

    `tokens` since it started; `tokens_per_s` of the generation that ended last; `running` and `waiting` count
    generations. `wires` are the types on the way out and back by layer, such as "INT8/F16"; `verdict`
    whose gate's verdict it goes by, "own" or "founder", "" for none, and behind a colon why the model fails by it.
    """

    active: bool
    tokens: int
    tokens_per_s: float
    running: int = 0
    waiting: int = 0
    parallel: int = 1
    lanes: int = 1
    mode: str = "exact"
    wires: dict[str, str] = {}
    speculate: str = "off"
    verdict: str = ""


class TransportStatus(msgspec.Struct, frozen=True):
    """What the transport has counted since the node started, by the counters' names.

    `quic`: datagrams of `unknown` connections, `unauthentic` batches (nothing in them was new and
    the peer's: repeated packets too, and a few of every handshake), connections that
    `flooded` before they had authenticated, or were let in: `early_excess` had sent too much, `early_dropped` were
    refused (or gave way to another one) with a request that nobody has seen.
    `disco`, sealed messages between peers: `pings_…`, `pongs_…`, `calls_…` that went out and came in, `pongs_unknown`
    (to no open ping: late, or not honest); refused: `forged`, `malformed`, `replayed`, `not_admitted`, `rationed`
    (from strangers, more per second than are looked at); `withheld`: own pings to unproven addresses above the ration.
    `socket`: `unknown` (datagrams of no protocol spoken here), `relay_down` (batches for a relay that was not there),
    `socket_closed` (batches for a socket of a punch that is over).
    `stun`, what reflectors are asked: requests `sent`, `answers`, `ignored` answers, requests `withheld`.
    `relays`, by URL, of the links that exist now, those that peers named among them: frames and bytes `sent_…` and
    `received_…`, `dropped_frames` (the socket was full), `bad_frames`.
    """

    quic: dict[str, int] = {}
    disco: dict[str, int] = {}
    socket: dict[str, int] = {}
    stun: dict[str, int] = {}
    relays: dict[str, dict[str, int]] = {}


class MemberStatus(msgspec.Struct, frozen=True):
    """A member that is alive. `memory` is what it gives to experts, bytes; linked: messages go directly."""

    peer: str
    name: str
    role: str
    memory: int
    linked: bool


class SwarmStatus(msgspec.Struct, frozen=True):
    """This node in its swarm. `budget` bytes are for experts, `held_bytes` of them are used; since it started
    `given_bytes` of slices and model files went to other members, and `taken_bytes` of slices came, by member.
    `trouble` says why this worker cannot hold what it was assigned; `plan`, on the founder, is the last plan in figures
    (coordination/lead.py).
    """

    swarm: str
    founder: bool
    members: list[MemberStatus]
    budget: int = 0
    held_bytes: int = 0
    given_bytes: int = 0
    taken_bytes: dict[str, int] = {}
    trouble: str = ""
    plan: dict[str, Any] | None = None


class EventStatus(msgspec.Struct, frozen=True):
    """Something that has happened, as `up` prints it. Numbers grow by one; `at` is seconds since 1970."""

    number: int
    at: float
    event: str
    text: str


class NodeStatus(msgspec.Struct, frozen=True):
    """One node. `memory` is the process's resident bytes; `holdings` maps layer → expert ranges.

    `relays` are those of the user that are connected, home first; `relay_problems` says of his others (by URL) why not.
    `swarm` is None for a node that is wired by hand. `quarantined`: workers whose answers were wrong, by peer, and why.
    `served_…` is what it has computed for others; of the engine's busy time `served_kernel_ms` is ggml's own.
    `events` are the last ones, oldest first; tickets are not among them. `selected`, where routing is counted, maps
    layer → one digit per expert, how often it was chosen lately: 0 never, f as often as the most chosen of its layer.
    `left_out`, of another member's node: what its status had too much of to be told whole.
    """

    peer: str
    name: str
    version: str
    role: str
    nat: str
    addresses: list[str]
    relays: list[str]
    model: str
    holdings: dict[str, str]
    memory: int
    uptime_s: float
    peers: list[PeerStatus]
    sites: list[SiteStatus] = []
    generation: GenerationStatus = GenerationStatus(False, 0, 0.0)
    served_calls: int = 0
    served_rows: int = 0
    served_busy_ms: float = 0.0
    served_kernel_ms: float = 0.0
    relay_problems: dict[str, str] = {}
    transport: TransportStatus = TransportStatus()
    swarm: SwarmStatus | None = None
    quarantined: dict[str, str] = {}
    events: list[EventStatus] = []
    selected: dict[str, str] = {}
    left_out: str = ""
