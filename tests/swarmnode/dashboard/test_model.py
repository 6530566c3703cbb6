from __future__ import annotations

import msgspec
import pytest

from swarmnode.dashboard.fake import EXPERTS, LAYERS, fake_status
from swarmnode.dashboard.history import Series
from swarmnode.dashboard.model import Model
from swarmnode.dashboard.ui import Sort, Ui
from swarmnode.status import GenerationStatus, NodeStatus, SiteStatus

EMPTY = NodeStatus("p" * 56, "n", "1", "backbone", "easy", [], [], "m", {}, 1, 1.0, [])


def generated(tokens: int, uptime: float, *, active: bool = True, sites: int = 2) -> NodeStatus:
    """Two round trips of 100 + 300 bytes per token and site; the second site is waited for 5 ms, the first 2 ms."""
    return msgspec.structs.replace(
        EMPTY,
        uptime_s=uptime,
        generation=GenerationStatus(active, tokens, 7.0),
        sites=[
            SiteStatus(layer, 2 * tokens, 100 * tokens, 300 * tokens, (2.0 + 3 * layer) * 2 * tokens, 1.0, tokens // 2)
            for layer in range(sites)
        ],
    )


def test_figures_per_token_are_differences() -> None:
    model = Model()
    for second in range(20):
        model.take(generated(1000 + 10 * second, 1.0 + second), float(second))
    figures = model.figures
    assert figures.tokens_per_s == pytest.approx(10)
    assert figures.tokens_per_step == pytest.approx(2)
    assert figures.trips_per_token == pytest.approx(4)
    assert figures.bytes_per_token_layer == pytest.approx(400)
    assert figures.slowest == 1
    assert figures.wait_ms == pytest.approx(5)
    assert dict(figures.waits) == pytest.approx({0: 2, 1: 5})


def test_idle_time_before_a_generation_does_not_dilute_its_rate() -> None:
    model = Model()
    for second in range(10):
        model.take(generated(0, 1.0 + second), float(second))
    model.take(generated(30, 11.0), 10.0)
    assert model.figures.tokens_per_s == pytest.approx(30)


def test_what_a_token_costs_stays_when_the_generation_has_ended() -> None:
    model = Model()
    model.take(generated(10, 1.0), 0.0)
    model.take(generated(20, 2.0), 1.0)
    for second in range(2, 12):
        model.take(generated(20, 1.0 + second, active=False), float(second))
    assert model.figures.tokens_per_s == 0
    assert model.figures.trips_per_token == pytest.approx(4)


def test_the_first_snapshot_tells_of_everything_since_the_start() -> None:
    model = Model()
    model.take(generated(1000, 50.0, active=False), 0.0)
    assert model.figures.tokens_per_s == 0
    assert model.figures.trips_per_token == pytest.approx(4)


def test_a_node_that_was_started_anew_begins_anew() -> None:
    model = Model()
    model.take(generated(1000, 50.0), 0.0)
    model.take(generated(1010, 51.0), 1.0)
    model.take(generated(0, 0.5), 2.0)
    assert model.figures.trips_per_token == 0


def test_whom_the_slowest_layer_waits_for() -> None:
    model = Model()
    for step in range(9):
        model.take(fake_status(step, 40), step / 4)
    held = [row.status for row in model.peers if str(model.figures.slowest) in row.status.holdings]
    assert model.figures.waits_for == max(held, key=lambda peer: peer.latency_ms).peer


def test_one_value_of_a_second_is_kept_and_not_for_ever() -> None:
    series = Series()
    for step in range(4000):
        series.add(step / 4, float(step))
    assert series.values[-3:] == [3991.0, 3995.0, 3999.0]
    assert len(series.values) <= 240


@pytest.mark.parametrize("sort", list(Sort))
def test_every_order_is_total_and_can_be_reversed(sort: Sort) -> None:
    model = Model()
    model.take(fake_status(3, 60), 0.0)
    forwards = [row.status.peer for row in model.shown(Ui(sort=sort))]
    backwards = [row.status.peer for row in model.shown(Ui(sort=sort, reverse=True))]
    assert sorted(forwards) == sorted(one.peer for one in fake_status(3, 60).peers)
    assert forwards == backwards[::-1]


def test_the_slowest_peer_comes_first_by_rtt_and_a_filter_looks_everywhere() -> None:
    model = Model()
    model.take(fake_status(3, 60), 0.0)
    by_rtt = [row.status.rtt_ms for row in model.shown(Ui(sort=Sort.RTT))]
    assert by_rtt[0] == pytest.approx(max(by_rtt), abs=1)
    assert {row.path for row in model.shown(Ui(filter="RELAY"))} == {"relay"}
    assert [row.name for row in model.shown(Ui(filter="birch-31"))] == ["birch-31"]
    assert model.shown(Ui(filter="nothing at all")) == []


def test_nothing_to_show_anew_has_no_new_version() -> None:
    model = Model()
    model.take(fake_status(3, 3), 0.0)
    version = model.version
    model.set_progress([])
    model.set_trouble("")
    assert model.version == version
    model.set_progress(["loading"])
    assert model.version > version


def test_the_swarm_that_does_not_exist_has_a_heat_map() -> None:
    selected = fake_status(0, 0).selected
    assert len(selected) == LAYERS
    assert {len(row) for row in selected.values()} == {EXPERTS}
