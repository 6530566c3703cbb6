"""What a node counts, as Prometheus reads it: `up --metrics HOST:PORT`.

Made by `node.py`, served by `metrics_listener.py`.

Nothing is counted here: the node's parts have plain counters of their own, and a scrape reads them on the loop. What
would grow with the swarm, or with what peers say, is bounded: a peer is known by its short id, MAX_PEERS of them at a
time; names, addresses and URLs that peers choose are no labels. Names follow Prometheus's conventions: a unit at the
end (seconds, bytes), `_total` for what only grows, `_info` for texts as labels of a 1.

Traffic is an exception: connections come and go with their counters, so `sample` adds up what they say once a second.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swarmnode import __version__
from swarmnode.backbone.sequence import StoppedBy
from swarmnode.compute.ggml import engine_build
from swarmnode.dispatch.frames import RefuseCode
from swarmnode.dispatch.views import SiteStats, WorkerView
from transport.connection import Connection, ConnectionStats
from transport.identity import PeerId
from transport.proto.addresses import NatKind, PathKind

if TYPE_CHECKING:
    from swarmnode.node import Node

MAX_PEERS = 64  # with series of their own; those with the most traffic
MAX_LAYERS = 256  # more than any model has
PATHS = tuple(str(kind) for kind in PathKind)
WAYS = ("out", "in")

Labels = Mapping[str, str]
Row = tuple[tuple[str, ...], float]


class NodeMetrics(Collector):
    """A registry of its own with everything of one node. Use on the node's loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.traffic = Traffic()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    async def render(self) -> bytes:
        """The page for Prometheus, text format 0.0.4. Works while the node is still starting.

        Read at once, written family by family: the loop has other things to do.
        """
        parts = []
        for family in list(self._registry.collect()):
            parts.append(generate_latest(_Only(family)))
            await asyncio.sleep(0)
        return b"".join(parts)

    def sample(self) -> None:
        """Add up traffic; for the node to call once a second."""
        if hasattr(self._node, "endpoint"):
            self.traffic.update(self._node.endpoint.connections())

    def collect(self) -> Iterator[Metric]:
        """Every family, the node's own state first."""
        self.sample()
        node = self._node
        yield from _about(node)
        yield from _generation(node)
        yield from _dispatch(node)
        yield from _served(node)
        if hasattr(node, "endpoint"):
            yield from _transport(node)
            yield from _peers(self.traffic)
        yield from _swarm(node)


class _Only(Collector):
    """One family that has been read, to be written."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """That family."""
        yield self._family


class Traffic:
    """Bytes and datagrams of all connections that ever were, by path, and of those that are, by peer."""

    def __init__(self) -> None:
        self._seen: dict[Connection, tuple[int, int, int]] = {}
        self.by_path: Counter[tuple[str, str]] = Counter()  # (path, "out" | "in") → bytes
        self.lost = 0
        self.by_peer: dict[PeerId, tuple[int, int]] = {}  # bytes out and in, of peers that are connected
        self.stats: dict[PeerId, ConnectionStats] = {}  # of each one's oldest connection

    def update(self, connections: Iterable[Connection]) -> None:
        """Read every connection that is, and once more those that are not any more."""
        live = list(connections)
        self.stats = {}
        there: set[PeerId] = set()
        for connection in live:
            there.add(connection.peer)
            self.stats.setdefault(connection.peer, self._add(connection))
        for gone in self._seen.keys() - set(live):
            self._add(gone)
            del self._seen[gone]
        self.by_peer = {peer: sums for peer, sums in self.by_peer.items() if peer in there}

    def _add(self, connection: Connection) -> ConnectionStats:
        stats = connection.stats()
        now = stats.bytes_out, stats.bytes_in, stats.lost
        before = self._seen.get(connection, (0, 0, 0))
        out, back, lost = (max(0, new - old) for new, old in zip(now, before, strict=True))
        self._seen[connection] = now
        self.by_path[stats.path, "out"] += out
        self.by_path[stats.path, "in"] += back
        self.lost += lost
        sums = self.by_peer.get(connection.peer, (0, 0))
        self.by_peer[connection.peer] = sums[0] + out, sums[1] + back
        return stats


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"swarmnode_{name}", what, value=value)


def _total(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"swarmnode_{name}", what, value=value)


def _gauges(name: str, what: str, labels: Iterable[str], rows: Iterable[Row]) -> Metric:
    family = GaugeMetricFamily(f"swarmnode_{name}", what, labels=tuple(labels))
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _totals(name: str, what: str, labels: Iterable[str], rows: Iterable[Row]) -> Metric:
    family = CounterMetricFamily(f"swarmnode_{name}", what, labels=tuple(labels))
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counts(name: str, what: str, label: str, counts: Mapping[str, int]) -> Metric:
    return _totals(name, what, [label], [((key,), count) for key, count in counts.items()])


def _about(node: Node) -> Iterator[Metric]:
    config = node.config
    build = {
        "version": __version__,
        "python": platform.python_version(),
        "llama_cpp_python": engine_build().rpartition(" ")[2],
        "quic": config.transport.engine,
    }
    yield _gauges("build_info", "Always 1; versions are labels", build, [(tuple(build.values()), 1)])
    about = {"role": config.role, "mode": config.mode, "founder": str(config.founds_swarm).lower()}
    yield _gauges("node_info", "Always 1; what the node was told to be", about, [(tuple(about.values()), 1)])
    yield _gauge("ready", "1 once the node has started, 0 while it starts or stops", node.is_ready)
    yield _gauge("uptime_seconds", "Since the node was made", time.monotonic() - node.started)


def _generation(node: Node) -> Iterator[Metric]:
    runner = node.runner
    if runner is None:
        return
    totals = runner.totals()
    yield _gauge("generations_running", "Generations under way", runner.running)
    yield _gauge("generations_waiting", "Requests that wait for their turn", runner.waiting)
    ends = {why: runner.ended[why] for why in (*get_args(StoppedBy), "error")}
    yield _counts("generations", "Generations that ended, by what stopped them", "stopped_by", ends)
    yield _total("generated_tokens", "Tokens given to whoever asked", runner.tokens)
    yield _total("prompt_tokens", "Tokens of prompts evaluated", totals.prompt_tokens)
    yield _total("generation_steps", "Decodes behind the prompts, of every generation by itself", totals.steps)
    yield _total("generation_step_tokens", "Tokens that came of these steps", totals.step_tokens)
    yield _total("generation_round_trips", "Waits for other nodes in these steps", totals.round_trips)
    yield _total("drafted_tokens", "Tokens drafted, to be verified", totals.drafted)
    yield _total(
        "drafted_tokens_accepted", "Drafted tokens that the model would have chosen too", totals.drafts_accepted
    )
    yield _gauge("last_generation_tokens_per_second", "Of the generation that ended last", runner.last_tokens_per_s)


def _dispatch(node: Node) -> Iterator[Metric]:
    client = node.client
    if client is None:
        return
    layers = _by_layer(client.site_stats(), {site.index: site.layer for site in node.pack.manifest.sites})
    sums = SiteStats()
    for one in layers.values():
        _add(sums, one)
    shown = {str(layer): layers[layer] for layer in sorted(layers)[:MAX_LAYERS]}

    def per_layer(field: str) -> list[Row]:
        return [((layer,), getattr(one, field)) for layer, one in shown.items()]

    label = ["layer"]
    yield _totals("dispatch_round_trips", "MoE calls that waited for another node, by layer", label, per_layer("calls"))
    yield _totals("dispatch_local_calls", "MoE calls that needed nobody else", label, per_layer("local_calls"))
    yield _totals("dispatch_wait_seconds", "How long decode threads stood still", label, per_layer("wait_s"))
    yield _totals(
        "dispatch_round_trip_seconds", "From the call to the last answer needed", label, per_layer("round_trip_s")
    )
    yield _totals(
        "dispatch_longest_busy_seconds", "Engine time of each call's busiest worker", label, per_layer("longest_busy_s")
    )
    rows = [((layer, "out"), float(one.bytes_out)) for layer, one in shown.items()]
    rows += [((layer, "in"), float(one.bytes_back)) for layer, one in shown.items()]
    yield _totals("dispatch_bytes", "Frames to workers and back", ["layer", "direction"], rows)
    yield _total("dispatch_requests", "CALL frames sent", sums.requests)
    yield _total("dispatch_tokens", "Tokens that passed MoE layers", sums.tokens)
    pairs = {"remote": sums.pairs - sums.local_pairs, "local": sums.local_pairs}
    yield _counts("dispatch_rows", "Rows (token and expert) computed, by where", "where", pairs)
    yield _total("dispatch_workers_busy_seconds", "Engine time of all workers together", sums.busy_s)
    yield _total("dispatch_workers_queued_seconds", "Time in all workers' queues together", sums.queued_s)
    yield _total("dispatch_hedged", "Answers later than expected, asked of another node too", sums.late)
    yield _total("dispatch_failed_calls", "Calls that nobody could answer", sums.failed_calls)
    yield _total("dispatch_checked_rows", "Rows computed once more, to be compared", sums.checked_rows)
    yield _total("dispatch_mismatches", "Answers found wrong so", sums.mismatches)
    yield _gauge("dispatch_quarantined_workers", "Workers not asked any more", len(client.quarantined()))
    views = client.workers()
    yield _gauge("dispatch_workers", "Workers attached", len(views))
    yield _gauge("dispatch_suspended_workers", "Of them, suspended now", sum(view.suspect for view in views))
    yield from _workers(views)


def _workers(views: Iterable[WorkerView]) -> Iterator[Metric]:
    best: dict[str, WorkerView] = {}
    for view in sorted(views, key=lambda one: -one.rows):
        best.setdefault(view.peer[:8], view)
    shown = dict(list(best.items())[:MAX_PEERS])

    def per_worker(field: str) -> list[Row]:
        return [((peer,), value) for peer, one in shown.items() if (value := getattr(one, field)) is not None]

    label = ["peer"]
    yield _totals("worker_calls", "Calls that a worker answered, since it was attached", label, per_worker("calls"))
    yield _totals("worker_rows", "Rows that a worker computed for this node", label, per_worker("rows"))
    yield _totals("worker_failures", "Late, lost, refused and bad answers", label, per_worker("failures"))
    yield _gauges("worker_in_flight", "Calls not answered yet", label, per_worker("in_flight"))
    yield _gauges("worker_experts", "Experts that a worker serves", label, per_worker("experts"))
    yield _gauges(
        "worker_answer_median_seconds", "What half of its recent answers took at most", label, per_worker("p50_s")
    )
    yield _gauges("worker_answer_p95_seconds", "What 95 of 100 of them took at most", label, per_worker("p95_s"))


def _by_layer(stats: Mapping[int, SiteStats], layer_of: Mapping[int, int]) -> dict[int, SiteStats]:
    """Sites of one layer together."""
    layers: defaultdict[int, SiteStats] = defaultdict(SiteStats)
    for index, one in stats.items():
        _add(layers[layer_of[index]], one)
    return layers


def _add(sums: SiteStats, one: SiteStats) -> None:
    for field in fields(SiteStats):
        setattr(sums, field.name, getattr(sums, field.name) + getattr(one, field.name))


def _served(node: Node) -> Iterator[Metric]:
    if node.engine is not None:
        yield _total("engine_kernel_seconds", "Time in ggml's kernels", node.engine.kernel_s)
        experts = sum(len(held) for held in node.engine.holdings.values())
        yield _gauge("held_experts", "Experts that this node can compute", experts)
    if node.worker is None:
        return
    stats = node.worker.stats()
    yield _total("served_calls", "Calls answered for other nodes", stats.calls)
    yield _total("served_rows", "Rows computed for other nodes", stats.pairs)
    refused = {code.name.lower(): stats.refused.get(code.name.lower(), 0) for code in RefuseCode}
    yield _counts("served_refused", "Calls of other nodes refused, by reason", "reason", refused)
    yield _total("served_busy_seconds", "Engine time of answered calls", stats.busy_s)
    yield _total("served_queued_seconds", "Time in the queue of answered calls", stats.queued_s)
    yield _total("served_dropped_clients", "Clients sent away for what they did", stats.dropped_clients)
    yield _gauge("served_clients", "Nodes that call this one", stats.clients)
    yield _gauge("served_calls_in_flight", "Calls admitted and not answered yet", stats.in_flight)
    yield _gauge("served_calls_waiting", "Of them, those that wait for the engine", stats.waiting)
    yield _gauge("served_rows_in_flight", "Rows admitted and not answered yet", stats.load)
    yield _gauge(
        "served_rows_per_second", "What the engine makes of calls of decode size; 0: unknown", stats.rows_per_s
    )


def _transport(node: Node) -> Iterator[Metric]:
    endpoint = node.endpoint
    counters = endpoint.reach.counters()
    yield _counts("quic_refused", "What came for QUIC and led to nothing", "reason", asdict(endpoint.quic_counters))
    yield _counts(
        "disco_messages", "Sealed messages between peers, by what became of them", "kind", asdict(counters.disco)
    )
    yield _counts("datagrams_discarded", "Datagrams and batches that led to nothing", "reason", asdict(counters.socket))
    yield _counts("stun_datagrams", "To and from reflectors", "kind", asdict(counters.stun))
    around = endpoint.reach.surroundings
    nat = around.nat.kind.name.lower() if around is not None else NatKind.UNKNOWN.name.lower()
    yield _gauges("nat_info", "Always 1; the kind of NAT in front of this node", ["kind"], [((nat,), 1)])
    own = [relay for relay in endpoint.relays() if relay.own]
    up: list[Row] = [((relay.url,), relay.up) for relay in own]
    yield _gauges("relay_connected", "1 where a relay of this node's user is connected", ["relay"], up)
    frames, sizes, dropped = list[Row](), list[Row](), list[Row]()
    for relay in own:
        link = counters.relays.get(relay.url)
        if link is not None:
            frames += [((relay.url, "out"), link.sent_frames), ((relay.url, "in"), link.received_frames)]
            sizes += [((relay.url, "out"), link.sent_bytes), ((relay.url, "in"), link.received_bytes)]
            dropped.append(((relay.url,), link.dropped_frames))
    yield _totals("relay_frames", "Frames over a relay", ["relay", "direction"], frames)
    yield _totals("relay_bytes", "Bytes over a relay, WebSocket headers not among them", ["relay", "direction"], sizes)
    yield _totals("relay_dropped_frames", "Frames that found a relay's socket full", ["relay"], dropped)


def _peers(traffic: Traffic) -> Iterator[Metric]:
    kinds = Counter(stats.path for stats in traffic.stats.values())
    yield _gauges(
        "peers",
        "Connected peers, by path",
        ["path"],
        [((path,), kinds[path]) for path in dict.fromkeys((*PATHS, *kinds))],
    )
    sizes = [((path, way), float(traffic.by_path[path, way])) for path in PATHS for way in WAYS]
    yield _totals("transport_bytes", "UDP payload of all connections, by path", ["path", "direction"], sizes)
    yield _total("transport_lost_datagrams", "Datagrams that QUIC counts as lost", traffic.lost)
    shown: dict[str, PeerId] = {}
    for peer in sorted(traffic.stats, key=lambda one: -sum(traffic.by_peer.get(one, (0, 0)))):
        if len(shown) < MAX_PEERS:
            shown.setdefault(peer.short, peer)
    yield _gauge("peers_without_series", "Connected peers beyond those listed", len(traffic.stats) - len(shown))
    rtt: list[Row] = []
    paths: list[Row] = []
    moved: list[Row] = []
    for name, peer in shown.items():
        stats = traffic.stats[peer]
        if stats.rtt_s is not None:
            rtt.append(((name,), stats.rtt_s))
        paths.append(((name, stats.path), 1))
        moved += [((name, way), size) for way, size in zip(WAYS, traffic.by_peer[peer], strict=True)]
    yield _gauges("peer_rtt_seconds", "Smoothed round trip time of QUIC", ["peer"], rtt)
    yield _gauges("peer_path_info", "Always 1; the path in use is a label", ["peer", "path"], paths)
    yield _totals("peer_bytes", "UDP payload since the peer came", ["peer", "direction"], moved)


def _swarm(node: Node) -> Iterator[Metric]:
    part = node.swarm
    if part is None or not hasattr(part, "member"):
        return
    yield _gauge("swarm_members", "Members that are alive, this node not among them", len(part.member.records()))
    yield _gauge("swarm_linked_members", "Members with which messages go directly", len(part.member.mesh.up()))
    yield _gauge("swarm_budget_bytes", "What this node gives to experts", part.budget_bytes)
    if part.agent is not None:
        yield _gauge("swarm_held_bytes", "Experts that are held for the swarm", part.agent.held_bytes)
        yield _gauge("swarm_holding_trouble", "1 while what was assigned cannot be held", bool(part.agent.trouble))
    yield _total("swarm_given_bytes", "Slices and model files given to members", part.bulk.bytes_sent)
    yield _total("swarm_taken_bytes", "Slices that came from members", sum(part.member.taken().values()))
    if part.lead is not None and (plan := part.lead.plan) is not None:
        where = {"workers": sum(plan["workers"].values()), "local": plan["local"], "uncovered": plan["uncovered"]}
        yield _gauges(
            "plan_experts",
            "Experts in the last plan, by who holds them",
            ["where"],
            [((key,), n) for key, n in where.items()],
        )
