"""The snapshot of a node that `status` and `peers` show (status.py has the shapes). Reads, changes nothing.

Called by `operations.py` on the loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import psutil

from swarmnode import __version__
from swarmnode.compute.recipe import Site
from swarmnode.config import format_address
from swarmnode.dispatch.lane import dispatch_lane
from swarmnode.event_log import EventLog
from swarmnode.experts_spec import format_holdings
from swarmnode.snapshot import named, peer_rows, selected_rows, site_rows, transport_row, unconnected
from swarmnode.status import (
    GenerationStatus,
    MemberStatus,
    NodeStatus,
    PeerStatus,
    SiteStatus,
    SwarmStatus,
    TransportStatus,
)

if TYPE_CHECKING:
    from swarmnode.node import Node


def node_status(node: Node) -> NodeStatus:
    """A snapshot; loop thread only. Works while the node is still starting."""
    config = node.config
    started = hasattr(node, "endpoint")
    pack = getattr(node, "pack", None)
    sites = pack.manifest.sites if pack is not None else ()
    worker = node.worker.stats() if node.worker is not None else None
    relays = [relay for relay in node.endpoint.relays() if relay.own] if started else []
    return NodeStatus(
        peer=str(node.endpoint.peer_id) if started else "",
        name=config.name,
        version=__version__,
        role=config.role,
        nat=_nat(node) if started else "unknown",
        addresses=_addresses(node) if started else [],
        relays=[relay.url for relay in relays if relay.up],
        relay_problems={relay.url: relay.error or "not connected yet" for relay in relays if not relay.up},
        model=pack.manifest.name if pack is not None else str(config.model),
        holdings=format_holdings(node.engine.holdings, sites) if node.engine is not None else {},
        memory=psutil.Process().memory_info().rss,
        uptime_s=round(time.monotonic() - node.started, 3),
        peers=_peers(node, sites) if started else [],
        sites=node_sites(node),
        generation=_generation(node),
        served_calls=worker.calls if worker is not None else 0,
        served_rows=worker.pairs if worker is not None else 0,
        served_busy_ms=round(worker.busy_s * 1e3, 3) if worker is not None else 0.0,
        served_kernel_ms=round(node.engine.kernel_s * 1e3, 3) if node.engine is not None else 0.0,
        transport=_transport(node) if started else TransportStatus(),
        swarm=_swarm(node),
        quarantined=node.client.quarantined() if node.client is not None else {},
        events=node.emit.latest() if isinstance(node.emit, EventLog) else [],
        selected=_selected(node, sites),
    )


def _selected(node: Node, sites: Sequence[Site]) -> dict[str, str]:
    """What the router chooses, where it is counted: on the founder."""
    routing = node.routing
    return selected_rows(routing.stats, sites) if routing is not None else {}


def _swarm(node: Node) -> SwarmStatus | None:
    part = node.swarm
    if part is None or not hasattr(part, "member"):
        return None
    linked = set(part.member.mesh.up())
    members = [
        MemberStatus(str(record.peer), record.name, record.role, record.memory, record.peer in linked)
        for record in part.member.records()
    ]
    agent = part.agent
    return SwarmStatus(
        swarm=str(part.entry.membership.swarm),
        founder=part.entry.authority is not None,
        members=members,
        budget=part.budget_bytes,
        held_bytes=agent.held_bytes if agent is not None else 0,
        given_bytes=part.bulk.bytes_sent,
        taken_bytes={str(peer): count for peer, count in part.member.taken().items() if count},
        trouble=agent.trouble if agent is not None else "",
        plan=part.lead.plan if part.lead is not None else None,
    )


def _transport(node: Node) -> TransportStatus:
    return transport_row(node.endpoint.quic_counters, node.endpoint.reach.counters())


def _nat(node: Node) -> str:
    around = node.endpoint.reach.surroundings
    return around.nat.kind.name.lower() if around is not None else "unknown"


def _addresses(node: Node) -> list[str]:
    """Where this node listens, and where others may reach it."""
    around = node.endpoint.reach.surroundings
    told = [candidate.address for candidate in around.candidates] if around is not None else []
    return [format_address(address) for address in dict.fromkeys([node.endpoint.address, *told])]


def _generation(node: Node) -> GenerationStatus:
    runner = node.runner
    if runner is None:
        return GenerationStatus(False, 0, 0.0)
    config = node.config
    return GenerationStatus(
        active=runner.active,
        tokens=runner.tokens,
        tokens_per_s=runner.last_tokens_per_s,
        running=runner.running,
        waiting=runner.waiting,
        parallel=config.parallel,
        lanes=config.lanes,
        mode=config.mode,
        wires=_wires(node),
        speculate=str(config.speculate),
        verdict=node.verdict,
    )


def _wires(node: Node) -> dict[str, str]:
    if node.client is None:
        return {}
    pairs = {site: node.client.wires(site.index) for site in node.pack.manifest.sites}
    return {str(site.layer): f"{out.name}/{back.name}" for site, (out, back) in pairs.items()}


def node_sites(node: Node) -> list[SiteStatus]:
    """Dispatch counters per site."""
    return site_rows(node.client.site_stats(), node.pack.manifest.sites) if node.client is not None else []


def _peers(node: Node, sites: Sequence[Site]) -> list[PeerStatus]:
    connections = node.endpoint.connections()
    rows = peer_rows(
        connections,
        {view.peer: view for view in node.client.workers()} if node.client is not None else {},
        [str(c.peer) for c in connections if c.lane == dispatch_lane(c.peer)],
        node.rates,
        time.monotonic(),
        sites,
        node.endpoint.decision,
    )
    if (part := node.swarm) is not None and hasattr(part, "member"):
        rows = named(rows, {str(one.peer): (one.name, one.role) for one in part.member.records()})
        if part.lead is not None:
            waiting = {str(peer): report.waiting for peer, report in part.lead.reports.items()}
            rows = [
                msgspec.structs.replace(row, waiting_rows=waiting[row.peer]) if waiting.get(row.peer) else row
                for row in rows
            ]
    there = {row.peer for row in rows}
    problems = node.links.problems if node.links is not None else {}
    missing = [known for known in node.config.peers if str(known.peer) not in there]
    return rows + [unconnected(known, problems.get(str(known.peer), "dialling")) for known in missing]
