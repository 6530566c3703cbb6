"""A busy swarm that does not exist: successive snapshots of a node with any number of peers. Pure.

For the benchmark, the tests and pictures; its figures follow from the step alone.
"""

from __future__ import annotations

import math

from swarmnode.status import (
    EventStatus,
    GenerationStatus,
    MemberStatus,
    NodeStatus,
    PeerStatus,
    SiteStatus,
    SwarmStatus,
)

LAYERS, EXPERTS = 24, 64
START = 1_700_000_000  # seconds since 1970
_PATHS = (
    ("direct-lan", "the only path on this network"),
    ("direct-public", "the fastest of 3 paths, 12 ms before the next"),
    ("punched", "punched through both NATs; no faster path for 10 s"),
    ("relay", "no direct path: both NATs change their ports"),
)
_NAMES = ("anvil", "birch", "cobalt", "delta", "ember", "fjord", "grove", "harbor", "iris", "juniper")


def fake_status(step: int, n_peers: int, *, interval_s: float = 0.25) -> NodeStatus:
    """The snapshot at `step`; every figure moves from one step to the next."""
    peers = [_peer(i, step) for i in range(n_peers)]
    tokens = step * 3
    return NodeStatus(
        peer="n0de" + "a" * 48,
        name="study",
        version="0.1.0",
        role="backbone",
        nat="easy",
        addresses=["192.0.2.7:4433", "[2001:db8::7]:4433"],
        relays=["https://relay.example"],
        model="demo-moe",
        holdings={},
        memory=512_000_000 + step * 1000,
        uptime_s=100.0 + step * interval_s,
        peers=peers,
        sites=[_site(layer, tokens) for layer in range(LAYERS)],
        generation=GenerationStatus(
            True, tokens, 11.0, running=1, parallel=4, mode="partial", wires={"0": "INT8/F16"}, speculate="ngram"
        ),
        swarm=SwarmStatus(
            "5wa4m" + "b" * 47,
            True,
            [MemberStatus(peer.peer, peer.name, peer.role, 8 << 30, True) for peer in peers[:8]],
            budget=8 << 30,
            held_bytes=3 << 30,
        ),
        events=[
            EventStatus(number, START + number * 7.0, "member", f"worker {_NAMES[number % 10]}-{number} is here")
            for number in range(max(0, step // 8), step // 8 + 12)
        ],
        selected={str(layer): _heat(layer, step) for layer in range(LAYERS)},
    )


def _peer(i: int, step: int) -> PeerStatus:
    path, reason = _PATHS[i % len(_PATHS)]
    rtt = 8.0 + i % 40 + 3 * math.sin(step / 5 + i)
    return PeerStatus(
        peer=f"{i:04d}peer" + "c" * 44,
        name=f"{_NAMES[i % 10]}-{i}",
        role="worker",
        path=path,
        reason=reason,
        rtt_ms=round(rtt, 3),
        loss=0.001 * (i % 70),
        relay="https://relay.example" if path == "relay" else "",
        up_Bps=1000.0 * (i + 1) + step % 97,
        down_Bps=2000.0 * (i + 1) + step % 89,
        holdings={str(layer): "0-7" for layer in range(i % LAYERS, min(LAYERS, i % LAYERS + 4))},
        last_seen_s=0.1 * (step % 9),
        address="" if path == "relay" else f"192.0.2.{i % 250}:4433",
        experts=8 * min(4, LAYERS - i % LAYERS),
        calls=step * 10,
        rows=step * 40,
        latency_ms=round(rtt + 2, 3),
        bytes_out=step * 1000,
        bytes_back=step * 2000,
        in_flight=(i + step) % 3,
    )


def _site(layer: int, tokens: int) -> SiteStatus:
    wait = tokens * (12.0 + 5 * math.sin(layer))
    return SiteStatus(
        layer, tokens * 2 // 3, tokens * 700, tokens * 1400, round(wait, 3), tokens * 1.0, tokens * 2 // 3
    )


def _heat(layer: int, step: int) -> str:
    drift = step // 40
    return "".join(f"{max(0, 15 - (e * 7 + layer * 3 + drift) % 23):x}" for e in range(EXPERTS))
