from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from transport.path_samples import PathSample, PathSampler
from transport.quic_engine import EngineCounters


@dataclass(eq=False)
class Talker:
    """A connection, as far as it is sampled."""

    counted: EngineCounters = field(default_factory=lambda: EngineCounters(0.01, 0.01, 0, 0))

    def __post_init__(self) -> None:
        self.link = SimpleNamespace(datagrams_out=0, engine=SimpleNamespace(counters=lambda: self.counted))

    def went_on(self, sent: int, lost: int = 0, acked: int = 0, ran_dry: int = 0) -> None:
        before = self.counted
        self.link.datagrams_out += sent
        self.counted = EngineCounters(
            0.01, 0.01, before.lost + lost, 0, before.sent + sent, before.acked + acked, 0, before.ran_dry + ran_dry
        )


@pytest.fixture
def talkers() -> list[Any]:
    return [Talker(), Talker()]


def test_differences_of_all_connections_of_a_peer_together(talkers: list[Any]) -> None:
    sampler = PathSampler()
    assert sampler.sample(talkers, 0.0) is None
    talkers[0].went_on(100, lost=3, acked=50_000, ran_dry=1)
    talkers[1].went_on(50, lost=1, acked=10_000, ran_dry=2)
    assert sampler.sample(talkers, 2.0) == PathSample(150, 4, None)
    assert sampler.sample(talkers, 3.0) is None  # nothing was sent


def test_goodput_counts_where_a_sender_was_never_idle(talkers: list[Any]) -> None:
    sampler = PathSampler()
    sampler.sample(talkers, 0.0)
    talkers[0].went_on(100, acked=100_000)
    assert sampler.sample(talkers, 0.5) == PathSample(100, 0, 200_000.0)


def test_losses_that_were_taken_back_are_none(talkers: list[Any]) -> None:
    sampler = PathSampler()
    sampler.sample(talkers, 0.0)
    talkers[0].went_on(10, lost=-2)
    assert sampler.sample(talkers, 1.0) == PathSample(10, 0, 0.0)
