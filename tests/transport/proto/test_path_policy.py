from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.proto.addresses import PathId, PathKind
from transport.proto.path_config import PathConfig
from transport.proto.path_policy import NO_PATH, Decision, PathState, PathView, Tier, choose

CONFIG = PathConfig()
NOW = 1000.0
LIVE, DOUBTED, DEAD, PROBING = PathState.LIVE, PathState.DOUBTED, PathState.DEAD, PathState.PROBING


def view(name: str, kind: PathKind, state: PathState = LIVE, rtt: float | None = 0.02, **more: object) -> PathView:
    path = PathId(relay=name) if kind is PathKind.RELAY else PathId((name, 4433))
    return replace(PathView(path, kind, state, rtt, samples=5, last_heard=NOW - 0.4), **more)  # type: ignore[arg-type]


LOOP = view("127.0.0.1", PathKind.LOOPBACK, rtt=0.0001)
LAN = view("192.168.1.2", PathKind.LAN, rtt=0.001)
FAR_LAN = view("10.8.0.2", PathKind.LAN, rtt=0.06)
PUBLIC = view("8.1.1.1", PathKind.PUBLIC, rtt=0.012)
PUNCHED = view("8.1.1.2", PathKind.PUNCHED, rtt=0.014)
HOME = view("https://home", PathKind.RELAY, rtt=0.048, home=True)
RELAY = view("https://relay", PathKind.RELAY, rtt=0.03)
NEW_RELAY = replace(RELAY, state=PROBING, rtt=None, proven=False)


def held(path: PathView) -> Decision:
    return Decision(path.path, since=NOW - 100, tier=path.tier)


def silent(path: PathView) -> PathView:
    return replace(path, state=DOUBTED)


def dead(path: PathView) -> PathView:
    return replace(path, state=DEAD)


def lossy(path: PathView) -> PathView:
    return replace(path, demoted="loses 8 %")


@pytest.mark.parametrize(
    ("views", "current", "primary", "duplicate", "reason"),
    [
        ([], None, None, None, NO_PATH),
        ([replace(PUBLIC, state=PROBING)], None, None, None, "no path yet: waiting for an answer"),
        ([NEW_RELAY], None, NEW_RELAY, None, "relay: no answer yet; looking"),
        ([RELAY], None, RELAY, None, "looking"),
        ([RELAY, HOME], None, HOME, None, "looking"),
        ([RELAY, HOME], RELAY, HOME, None, "looking"),
        ([NEW_RELAY, HOME], NEW_RELAY, HOME, None, "looking"),
        ([PUBLIC, HOME], HOME, PUBLIC, None, "direct: 12 ms, relay 48 ms"),
        ([PUBLIC], None, PUBLIC, None, "direct: 12 ms"),
        ([PUNCHED, PUBLIC], None, PUBLIC, None, "direct: 12 ms"),
        ([PUNCHED, PUBLIC], PUNCHED, PUNCHED, None, "punched: 14 ms"),  # no hurry for two milliseconds
        ([FAR_LAN, PUBLIC], PUBLIC, FAR_LAN, None, "lan: 60 ms"),  # the tier goes before RTT
        ([LAN, LOOP], None, LOOP, None, "loopback: < 1 ms"),
        ([silent(PUBLIC), HOME], PUBLIC, PUBLIC, HOME, "duplicated: direct silent for 0.4 s, also by relay"),
        ([silent(PUBLIC), NEW_RELAY], PUBLIC, PUBLIC, NEW_RELAY, "duplicated: direct silent for 0.4 s, also by relay"),
        ([silent(PUBLIC), PUNCHED], PUBLIC, PUBLIC, PUNCHED, "duplicated: direct silent for 0.4 s, also by punched"),
        ([silent(PUBLIC), PUNCHED, HOME], PUBLIC, PUBLIC, HOME, "duplicated: direct silent for 0.4 s, also by relay"),
        (
            [silent(PUBLIC), replace(PUNCHED, last_heard=NOW), HOME],
            PUBLIC,
            PUNCHED,
            None,
            "punched: 14 ms, relay 48 ms",
        ),
        ([silent(HOME), RELAY], HOME, HOME, RELAY, "duplicated: relay silent for 0.4 s, also by relay"),
        ([silent(PUBLIC)], PUBLIC, PUBLIC, None, "direct: the only path, silent for 0.4 s"),
        ([dead(PUBLIC)], PUBLIC, PUBLIC, None, "direct: the only path, silent for 0.4 s"),
        ([dead(PUBLIC), HOME], PUBLIC, HOME, None, "relay: the direct path does not answer"),
        ([dead(PUBLIC), silent(HOME)], PUBLIC, HOME, None, "relay: the only path, silent for 0.4 s"),
        ([dead(PUBLIC), replace(HOME, down=True)], HOME, PUBLIC, None, "direct: the only path, silent for 0.4 s"),
        ([lossy(PUBLIC), HOME], PUBLIC, HOME, None, "relay: direct path loses 8 %"),
        ([lossy(PUBLIC), NEW_RELAY], PUBLIC, PUBLIC, None, "direct: it loses 8 %, but there is no other path"),
        ([lossy(PUBLIC), PUNCHED, HOME], PUBLIC, PUNCHED, None, "punched: 14 ms, relay 48 ms"),
        ([replace(HOME, down=True), RELAY], HOME, RELAY, None, "looking"),
        (
            [replace(PUBLIC, state=DEAD, proven=False)],
            None,
            None,
            None,
            NO_PATH,
        ),
    ],
)
def test_the_table(
    views: list[PathView], current: PathView | None, primary: PathView | None, duplicate: PathView | None, reason: str
) -> None:
    before = Decision() if current is None else held(current)
    after = choose(views, before, NOW, CONFIG, "looking")
    assert after.primary == (None if primary is None else primary.path)
    assert after.duplicate == (None if duplicate is None else duplicate.path)
    assert after.reason == reason
    assert after.since == (before.since if after.primary == before.primary else NOW)
    chosen = next((one for one in views if one.path == after.primary), None)
    assert after.tier == (Tier.NONE if chosen is None else chosen.tier)


@pytest.mark.parametrize(
    ("slow", "fast", "switches"),
    [
        (0.100, 0.094, True),  # 5 ms
        (0.100, 0.096, False),
        (0.010, 0.0075, True),  # 20 %
        (0.010, 0.009, False),
        (0.001, 0.0007, False),  # nobody feels it
    ],
)
def test_in_a_tier_only_a_clear_gain_counts(slow: float, fast: float, switches: bool) -> None:
    old, new = replace(PUBLIC, rtt=slow), replace(PUNCHED, rtt=fast)
    decision, now = held(old), NOW
    for sample in range(5):
        decision = choose([old, replace(new, samples=sample)], decision, now, CONFIG)
        now += 1.0
        assert decision.primary == old.path or sample >= CONFIG.gain_samples
    assert (decision.primary == new.path) == switches


def test_a_gain_that_does_not_last_is_forgotten() -> None:
    decision = held(PUBLIC)
    for sample in range(20):
        rtt = 0.001 if sample % 3 else 0.012
        views = [PUBLIC, replace(PUNCHED, rtt=rtt, samples=sample)]
        decision = choose(views, decision, NOW + sample, CONFIG)
        assert decision.primary == PUBLIC.path


def test_a_gain_switches_once_a_minute() -> None:
    decision, switches = held(PUBLIC), []
    for step in range(1200):
        now = NOW + step * 0.1
        current = decision.primary
        views = [replace(path, rtt=0.02 if path.path == current else 0.01, samples=step) for path in (PUBLIC, PUNCHED)]
        decision = choose(views, decision, now, CONFIG)
        if decision.primary != current:
            switches.append(now)
    assert len(switches) == 2
    assert switches[1] - switches[0] >= 60


STATES = st.sampled_from(PathState)
VIEWS = st.lists(
    st.builds(
        PathView,
        path=st.builds(PathId, address=st.tuples(st.sampled_from("abc"), st.just(1)), relay=st.sampled_from(["", "r"])),
        kind=st.sampled_from(PathKind),
        state=STATES,
        rtt=st.none() | st.floats(0, 1),
        samples=st.integers(0, 10),
        last_heard=st.none() | st.floats(0, NOW),
        demoted=st.sampled_from(["", "loses 8 %"]),
        home=st.booleans(),
        proven=st.booleans(),
        down=st.booleans(),
    ),
    unique_by=lambda view: view.path,
    max_size=6,
)


@given(st.lists(VIEWS, max_size=6))
def test_there_is_a_path_whenever_there_can_be(rounds: list[list[PathView]]) -> None:
    decision = Decision()
    for number, views in enumerate(rounds):
        decision = choose(views, decision, NOW + number, CONFIG)
        usable = {view.path: view for view in views if view.standing is not None}
        assert (decision.primary is not None) == bool(usable)
        assert decision.reason
        assert decision.primary is None or decision.primary in usable
        if decision.duplicate is not None:
            assert decision.duplicate != decision.primary
            assert usable[decision.duplicate].standing in (0, 1)
        if any(view.state is LIVE and not view.down for view in views):
            chosen = usable[decision.primary] if decision.primary is not None else None
            assert chosen is not None
            assert chosen.state in (LIVE, DOUBTED)
