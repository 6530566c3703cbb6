"""What dispatch says about itself: plain figures that anything may read. A leaf.

Built by `client.py` and `worker.py`; read by the status file, the dashboard, `demo --json` and the
benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One attached worker as this client has seen it. Times in seconds, None before anything was measured.

    `holdings` is site -> experts, `experts` their number, `rows` the pairs it computed for us. `failures`
    counts its own faults (late, lost, refused, bad); `suspect` says that it is suspended at this moment.
    `checked_rows` are those of its rows that were computed once more; `quarantined` says why it is never asked again,
    "" otherwise. `recent_s` is the median of the last few answers of decode size, and `recent_rows` their mean size.
    """

    peer: str
    name: str
    path: str
    rtt_s: float | None
    holdings: Mapping[int, tuple[int, ...]]
    experts: int
    calls: int
    rows: int
    failures: int
    last_fault: str
    suspect: bool
    leaving: bool
    in_flight: int
    bytes_out: int
    bytes_in: int
    p50_s: float | None
    p95_s: float | None
    checked_rows: int = 0
    quarantined: str = ""
    recent_s: float | None = None
    recent_rows: float = 0.0


@dataclass(slots=True)
class SiteStats:
    """Counters of one site since the start. Bytes are those of whole frames, times are seconds.

    `calls` are results that needed at least one remote answer: the blocking round trips. `requests` are the
    CALL frames behind them. `round_trip_s` runs from submit to the last answer needed, `wait_s` is how much
    of it the decode thread stood still. `busy_s` and `queued_s` add up all workers' own figures;
    `longest_busy_s` takes only the busiest answer of each call, which is what a round trip cannot be shorter
    than. `late` counts answers that missed their deadline. `checked_rows` are the pairs computed once more, here or by
    another worker, to be compared; `mismatches` are the answers that were found wrong so.
    """

    calls: int = 0
    local_calls: int = 0
    requests: int = 0
    tokens: int = 0
    pairs: int = 0
    local_pairs: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    round_trip_s: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    queued_s: float = 0.0
    longest_busy_s: float = 0.0
    late: int = 0
    failed_calls: int = 0
    checked_rows: int = 0
    mismatches: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What a worker has done since its start. `refused` is by the name of the code. Seconds, bytes of whole frames.

    `load` is the number of (token, expert) rows admitted and not answered yet. `row_s` is site -> seconds of the engine
    per row in recent calls of decode size, for sites that were called and those of the same shape; `rows_per_s` is what
    that makes over all of them, 0 before the first call. `changes` counts sites whose experts were replaced.
    """

    clients: int
    waiting: int
    in_flight: int
    calls: int
    pairs: int
    refused: Mapping[str, int]
    dropped_clients: int
    busy_s: float
    queued_s: float
    bytes_in: int
    bytes_out: int
    last_fault: str
    load: int
    rows_per_s: float
    row_s: Mapping[int, float]
    changes: int
    leaving: bool
