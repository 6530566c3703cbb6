"""What a node looks like from outside: the rows of `status` and `peers`, made from its parts. Reads, changes nothing.

Called by `node_status.py`. The shapes are in `status.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

import msgspec
import numpy as np

from swarmnode.compute.recipe import Site
from swarmnode.config import PeerAddress, format_address
from swarmnode.dispatch.views import SiteStats, WorkerView
from swarmnode.experts_spec import format_holdings
from swarmnode.placement.routing import RoutingStats
from swarmnode.rates import Rates
from swarmnode.status import PeerStatus, SiteStatus, TransportStatus
from transport.connection import Connection, ConnectionStats
from transport.identity import PeerId
from transport.proto.path_policy import Decision
from transport.quic_driver import DriverCounters
from transport.reach import ReachCounters

MAX_ROWS, MAX_ROW = 256, 512  # layers and experts of `selected_rows`: larger than any model, and bounded
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def traffic(connections: Iterable[Connection]) -> dict[str, tuple[int, int]]:
    """Peer → bytes out and in, all its connections together."""
    totals: dict[str, tuple[int, int]] = {}
    for connection in connections:
        stats = connection.stats()
        out, back = totals.get(str(connection.peer), (0, 0))
        totals[str(connection.peer)] = out + stats.bytes_out, back + stats.bytes_in
    return totals


def peer_rows(
    connections: Sequence[Connection],
    called: Mapping[str, WorkerView],
    calling: Iterable[str],
    rates: Rates,
    now: float,
    sites: Sequence[Site],
    decision: Callable[[PeerId], Decision | None],
) -> list[PeerStatus]:
    """One row per connected peer. `called` are the workers of this node's client, `calling` the peers it serves;
    `decision` says why a peer's datagrams take their path."""
    rows: dict[str, PeerStatus] = {}
    totals = traffic(connections)
    for connection in connections:
        peer = str(connection.peer)
        if peer not in rows:
            why = decision(connection.peer)
            reason = why.reason if why is not None else ""
            rows[peer] = _connected(peer, connection.stats(), reason, totals[peer], rates, now)
    for peer in calling:
        if peer in rows:
            rows[peer] = msgspec.structs.replace(rows[peer], role="backbone")
    for peer, view in called.items():
        if peer in rows:
            role = "both" if rows[peer].role == "backbone" else "worker"
            rows[peer] = msgspec.structs.replace(
                rows[peer],
                name=view.name,
                role=role,
                holdings=format_holdings(view.holdings, sites),
                experts=view.experts,
                calls=view.calls,
                rows=view.rows,
                failures=view.failures,
                suspect=view.suspect,
                latency_ms=round((view.p50_s or 0.0) * 1e3, 3),
                in_flight=view.in_flight,
            )
    return list(rows.values())


def _connected(
    peer: str, stats: ConnectionStats, reason: str, total: tuple[int, int], rates: Rates, now: float
) -> PeerStatus:
    up, down = rates.of(peer)
    return PeerStatus(
        peer=peer,
        name="",
        role="peer",
        path=stats.path,
        reason=reason,
        rtt_ms=round((stats.rtt_s or 0.0) * 1e3, 3),
        loss=stats.lost / max(1, stats.datagrams_out),
        relay=stats.relay,
        up_Bps=round(up),
        down_Bps=round(down),
        holdings={},
        last_seen_s=round(rates.silent_s(peer, now), 3),
        address="" if stats.relay else format_address(stats.path_address),
        bytes_out=total[0],
        bytes_back=total[1],
    )


def unconnected(known: PeerAddress, reason: str) -> PeerStatus:
    """A configured peer that is not there, and why."""
    return PeerStatus(
        peer=str(known.peer),
        name="",
        role="peer",
        path="none",
        reason=reason,
        rtt_ms=0.0,
        loss=0.0,
        relay="",
        up_Bps=0.0,
        down_Bps=0.0,
        holdings={},
        last_seen_s=-1.0,
        address=format_address(known.address) if known.address is not None else "",
    )


def site_rows(stats: Mapping[int, SiteStats], sites: Sequence[Site]) -> list[SiteStatus]:
    """Dispatch counters per site, in graph order."""
    return [
        SiteStatus(
            layer=sites[index].layer,
            round_trips=one.calls,
            bytes_out=one.bytes_out,
            bytes_back=one.bytes_back,
            wait_ms=round(one.wait_s * 1e3, 3),
            busy_ms=round(one.longest_busy_s * 1e3, 3),
            evaluations=one.calls + one.local_calls,
        )
        for index, one in sorted(stats.items())
    ]


def selected_rows(routing: RoutingStats, sites: Sequence[Site]) -> dict[str, str]:
    """How often each expert was chosen lately, see `status.NodeStatus.selected`; nothing of a site without tokens."""
    rows: dict[str, str] = {}
    for site in sites:
        weights = routing.weights(site.index)
        most = float(weights.max(initial=0.0))
        if most > 0 and len(rows) < MAX_ROWS:
            digits = np.ceil(weights[:MAX_ROW] * (15 / most)).astype(np.uint8).clip(0, 15)
            rows.setdefault(str(site.layer), _DIGITS[digits].tobytes().decode())
    return rows


def named(rows: Iterable[PeerStatus], names: Mapping[str, tuple[str, str]]) -> list[PeerStatus]:
    """Rows of peers that are no workers of ours get the name and role that their record in the swarm has."""

    def one(row: PeerStatus) -> PeerStatus:
        if row.name or row.peer not in names:
            return row
        name, role = names[row.peer]
        return msgspec.structs.replace(row, name=name, role=role if row.role == "peer" else row.role)

    return [one(row) for row in rows]


def transport_row(quic: DriverCounters, counters: ReachCounters) -> TransportStatus:
    """The transport's counters, by name."""
    return TransportStatus(
        quic=asdict(quic),
        disco=asdict(counters.disco),
        socket=asdict(counters.socket),
        stun=asdict(counters.stun),
        relays={url: asdict(of_link) for url, of_link in counters.relays.items()},
    )
