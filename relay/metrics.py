"""What the relay counts, and how Prometheus reads it. Sessions and the reflector add to Counts; /metrics renders.

Counts are plain integers, because they are touched for every frame; they become metrics only when somebody asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib import metadata

from prometheus_client import CollectorRegistry, Histogram, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOGIN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def version() -> str:
    """Of the installed package."""
    try:
        return metadata.version("swarmnode")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


class Drop(StrEnum):
    """Why a frame was not delivered."""

    CLIENT_RATE = "client_rate"
    GLOBAL_RATE = "global_rate"
    DISCO_RATE = "disco_rate"
    NOT_CONNECTED = "not_connected"
    QUEUE_FULL = "queue_full"
    RECORD_RATE = "record_rate"
    RECORD_TOPICS = "record_topics"
    DIRECTORY_FULL = "directory_full"


class Unreflected(StrEnum):
    """Why a datagram to the reflector got no answer."""

    BAD = "bad"  # no STUN request, or one shorter than its answer
    RATE = "rate"


class Counts:
    """Totals since the start. Frames and bytes are those accepted for delivery, by class."""

    __slots__ = (
        "bytes_bulk",
        "bytes_disco",
        "drops",
        "ends",
        "frames_bulk",
        "frames_disco",
        "logins",
        "records_published",
        "records_sent",
        "reflected",
        "strangers",
        "unreflected",
    )

    def __init__(self) -> None:
        self.frames_bulk = 0
        self.frames_disco = 0
        self.bytes_bulk = 0
        self.bytes_disco = 0
        self.drops: Counter[Drop] = Counter()
        self.logins: Counter[str] = Counter()  # by result: "ok", or the name of a RefusalCode in lower case
        self.ends: Counter[str] = Counter()  # sessions that ended, by why
        self.strangers: Counter[str] = Counter()  # connections that ended without a login, by why
        self.records_published = 0  # refreshed and withdrawn ones too
        self.records_sent = 0
        self.reflected = 0
        self.unreflected: Counter[Unreflected] = Counter()


class Metrics(Collector):
    """The relay's own registry: its counts, gauges read when asked, and the figures of the process."""

    def __init__(self, counts: Counts, gauges: Callable[[], dict[str, float]]) -> None:
        """`gauges`: values by name, without the prefix; names with their units."""
        self._counts = counts
        self._gauges = gauges
        self._version = version()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self.login_seconds = Histogram(
            "relay_login_seconds",
            "From the accepted connection to the finished login",
            buckets=LOGIN_BUCKETS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        build = GaugeMetricFamily("relay_build_info", "Always 1; the version is its label", labels=["version"])
        build.add_metric([self._version], 1)
        yield build
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"relay_{name}", name.replace("_", " "), value=value)
        for name, what, bulk, disco in (
            ("relay_frames", "Frames relayed", counts.frames_bulk, counts.frames_disco),
            ("relay_bytes", "Bytes relayed, frame headers included", counts.bytes_bulk, counts.bytes_disco),
        ):
            family = CounterMetricFamily(name, what, labels=["class"])
            family.add_metric(["bulk"], bulk)
            family.add_metric(["disco"], disco)
            yield family
        drops = CounterMetricFamily("relay_drops", "Frames not delivered", labels=["reason"])
        for reason in Drop:
            drops.add_metric([reason.value], counts.drops[reason])
        yield drops
        logins = CounterMetricFamily("relay_logins", "Logins by result", labels=["result"])
        for result, count in sorted(counts.logins.items()):
            logins.add_metric([result], count)
        yield logins
        ends = CounterMetricFamily("relay_sessions_ended", "Sessions that ended, by why", labels=["why"])
        for why, count in sorted(counts.ends.items()):
            ends.add_metric([why], count)
        yield ends
        strangers = CounterMetricFamily(
            "relay_connections_refused", "Connections that were ended before a login, by why", labels=["why"]
        )
        for why, count in sorted(counts.strangers.items()):
            strangers.add_metric([why], count)
        yield strangers
        published, sent = counts.records_published, counts.records_sent
        yield CounterMetricFamily("relay_records_published", "Records taken into the directory", value=published)
        yield CounterMetricFamily("relay_records_sent", "Records sent to watchers", value=sent)
        yield CounterMetricFamily("relay_reflected", "STUN answers sent", value=counts.reflected)
        unreflected = CounterMetricFamily(
            "relay_reflector_drops", "Datagrams to the reflector that got no answer", labels=["reason"]
        )
        for cause in Unreflected:
            unreflected.add_metric([cause.value], counts.unreflected[cause])
        yield unreflected
