"""The offline replay: what it counts, and what it shows on short texts."""

from __future__ import annotations

import itertools
import random

from swarmnode.backbone.speculation import Speculator
from swarmnode.bench.speculation_replay import COSTS, edited, replay, run


def test_a_replay_counts_every_token_once() -> None:
    source = [random.Random(1).randrange(200) for _ in range(150)]
    done = replay((source, source), Speculator(), COSTS["80 ms, 4 layers"])
    assert done.tokens == len(source) - 1 == done.steps + done.accepted
    assert done.accepted <= done.drafted
    assert done.plain_seconds > 2.5 * done.seconds


def test_edits_keep_most_of_a_text() -> None:
    source = list(range(3000))
    result = edited(source, 3000, random.Random(2))
    assert 0.9 < sum(a + 1 == b for a, b in itertools.pairwise(result)) / len(source) < 1.0


def test_the_benchmark_shows_every_link_and_stream() -> None:
    result = run(quick=True)
    rows = {(row["link"], row["stream"]): row for row in result["rows"]}
    assert len(rows) == len(COSTS) * 7
    assert rows["80 ms, 4 layers", "edited code (real)"]["speedup"] > 1.8
    assert rows["no gain possible", "English (real)"]["drafted_per_step"] < 0.1
    assert min(row["lowest"] for row in rows.values()) > 0.9
