from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.proto import path_policy
from transport.proto.addresses import PathId, PathKind
from transport.proto.path_config import PathConfig
from transport.proto.path_policy import NO_PATH, RULES, Decision, PathState, PathView, Tier, choose

CONFIG = PathConfig()
NOW = 1000.0
CANDIDATE, PROBING, LIVE, DOUBTED, DEAD = PathState


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
NEW_HOME = replace(HOME, state=PROBING, rtt=None, proven=False)


def held(path: PathView) -> Decision:
    return Decision(path.path, since=NOW - 100, tier=path.tier)


def silent(path: PathView) -> PathView:
    return replace(path, state=DOUBTED)


def dead(path: PathView) -> PathView:
    return replace(path, state=DEAD)


def lossy(path: PathView) -> PathView:
    return replace(path, demoted="loses 8 %")


def slow(path: PathView) -> PathView:
    return replace(path, demoted="carries 2.0 MB/s, the relay 6.0 MB/s")


def heard_now(path: PathView) -> PathView:
    return replace(path, last_heard=NOW)


def down(path: PathView) -> PathView:
    return replace(path, down=True)


# rule that decides, paths, the primary before, the primary and the duplicate after, the reason
Row = tuple[str, list[PathView], PathView | None, PathView | None, PathView | None, str]
DOUBLED = "duplicated: direct silent for 0.4 s, also by relay"
TABLE: list[Row] = [
    # Nothing, or nothing to hold on to: the best one there is.
    ("gone", [], None, None, None, NO_PATH),
    ("gone", [replace(PUBLIC, state=PROBING)], None, None, None, "no path yet: waiting for an answer"),
    ("gone", [replace(PUBLIC, state=CANDIDATE)], None, None, None, NO_PATH),
    ("gone", [replace(PUBLIC, state=DEAD, proven=False)], None, None, None, NO_PATH),
    ("gone", [down(HOME)], HOME, None, None, NO_PATH),
    ("gone", [NEW_RELAY], None, NEW_RELAY, None, "relay: no answer yet; looking"),
    ("gone", [RELAY], None, RELAY, None, "looking"),
    ("gone", [RELAY, HOME], None, HOME, None, "looking"),
    ("gone", [PUBLIC], None, PUBLIC, None, "direct: 12 ms"),
    ("gone", [replace(PUBLIC, rtt=None)], None, PUBLIC, None, "direct: a handshake came through"),
    ("gone", [PUNCHED, PUBLIC], None, PUBLIC, None, "direct: 12 ms"),
    ("gone", [LAN, LOOP], None, LOOP, None, "loopback: < 1 ms"),
    ("gone", [LAN, PUBLIC, HOME], None, LAN, None, "lan: 1 ms, relay 48 ms"),
    ("gone", [lossy(PUBLIC), HOME], None, HOME, None, "relay: direct path loses 8 %"),
    ("gone", [HOME], PUBLIC, HOME, None, "looking"),  # the primary was forgotten
    ("gone", [dead(PUBLIC)], PUBLIC, PUBLIC, None, "direct: the only path, silent for 0.4 s"),
    ("gone", [dead(PUBLIC), HOME], PUBLIC, HOME, None, "relay: the direct path does not answer"),
    ("gone", [dead(PUBLIC), PUNCHED, HOME], PUBLIC, PUNCHED, None, "punched: 14 ms, relay 48 ms"),
    ("gone", [dead(PUBLIC), lossy(PUNCHED), HOME], PUBLIC, HOME, None, "relay: direct path loses 8 %"),
    ("gone", [dead(PUBLIC), NEW_RELAY], PUBLIC, NEW_RELAY, None, "relay: no answer yet; looking"),
    ("gone", [dead(PUBLIC), silent(HOME)], PUBLIC, HOME, None, "relay: nothing answers, silent for 0.4 s"),
    ("gone", [dead(PUBLIC), down(HOME)], HOME, PUBLIC, None, "direct: the only path, silent for 0.4 s"),
    ("gone", [down(HOME), RELAY], HOME, RELAY, None, "looking"),
    # The primary has never answered: whatever answers, and of those that never did the preferred one.
    ("unproven", [NEW_RELAY, HOME], NEW_RELAY, HOME, None, "looking"),
    ("unproven", [NEW_RELAY, PUBLIC], NEW_RELAY, PUBLIC, None, "direct: 12 ms"),
    ("unproven", [NEW_RELAY, NEW_HOME], NEW_RELAY, NEW_HOME, None, "relay: no answer yet; looking"),
    ("unproven", [NEW_RELAY, NEW_HOME], NEW_HOME, NEW_HOME, None, "relay: no answer yet; looking"),
    ("unproven", [NEW_RELAY, silent(PUBLIC)], NEW_RELAY, NEW_RELAY, None, "relay: no answer yet; looking"),
    (
        "unproven",
        [NEW_RELAY, lossy(PUBLIC)],
        NEW_RELAY,
        PUBLIC,
        None,
        "direct: it loses 8 %, but there is no other path",
    ),
    # The primary is in doubt: another one of its tier that is heard right now, or both.
    ("doubted", [silent(PUBLIC), HOME], PUBLIC, PUBLIC, HOME, DOUBLED),
    ("doubted", [silent(PUBLIC), NEW_RELAY], PUBLIC, PUBLIC, NEW_RELAY, DOUBLED),
    ("doubted", [silent(PUBLIC), heard_now(HOME)], PUBLIC, PUBLIC, HOME, DOUBLED),  # a relay is always heard
    ("doubted", [silent(PUBLIC), PUNCHED, HOME], PUBLIC, PUBLIC, HOME, DOUBLED),  # what fails for other reasons
    ("doubted", [silent(PUBLIC), silent(PUNCHED), HOME], PUBLIC, PUBLIC, HOME, DOUBLED),
    (
        "doubted",
        [silent(PUBLIC), PUNCHED],
        PUBLIC,
        PUBLIC,
        PUNCHED,
        "duplicated: direct silent for 0.4 s, also by punched",
    ),
    (
        "doubted",
        [silent(PUBLIC), heard_now(PUNCHED), HOME],
        PUBLIC,
        PUNCHED,
        None,
        "punched: 14 ms, relay 48 ms",
    ),
    ("doubted", [silent(PUBLIC), heard_now(LAN), HOME], PUBLIC, LAN, None, "lan: 1 ms, relay 48 ms"),
    (
        "doubted",
        [silent(LAN), heard_now(PUBLIC), HOME],
        LAN,
        LAN,
        HOME,
        "duplicated: lan silent for 0.4 s, also by relay",
    ),
    ("doubted", [silent(HOME), RELAY], HOME, HOME, RELAY, "duplicated: relay silent for 0.4 s, also by relay"),
    ("doubted", [silent(HOME), PUBLIC], HOME, HOME, PUBLIC, "duplicated: relay silent for 0.4 s, also by direct"),
    ("doubted", [silent(HOME), heard_now(PUBLIC)], HOME, PUBLIC, None, "direct: 12 ms, relay 48 ms"),
    ("doubted", [silent(PUBLIC)], PUBLIC, PUBLIC, None, "direct: the only path, silent for 0.4 s"),
    ("doubted", [silent(PUBLIC), down(HOME)], PUBLIC, PUBLIC, None, "direct: the only path, silent for 0.4 s"),
    # A better tier answers, or the primary has lost its own.
    ("better", [PUBLIC, HOME], HOME, PUBLIC, None, "direct: 12 ms, relay 48 ms"),
    ("better", [FAR_LAN, PUBLIC], PUBLIC, FAR_LAN, None, "lan: 60 ms"),  # the tier goes before RTT
    ("better", [RELAY, HOME], RELAY, HOME, None, "looking"),
    ("better", [lossy(PUBLIC), HOME], PUBLIC, HOME, None, "relay: direct path loses 8 %"),
    ("better", [lossy(PUBLIC), PUNCHED, HOME], PUBLIC, PUNCHED, None, "punched: 14 ms, relay 48 ms"),
    ("better", [lossy(LAN), PUBLIC], LAN, PUBLIC, None, "direct: 12 ms"),
    ("better", [slow(PUBLIC), HOME], PUBLIC, HOME, None, "relay: direct path carries 2.0 MB/s, the relay 6.0 MB/s"),
    # Nothing speaks against it.
    ("stay", [LOOP, LAN], LAN, LAN, None, "lan: 1 ms"),  # one tier: a matter of RTT
    ("stay", [PUBLIC, HOME], PUBLIC, PUBLIC, None, "direct: 12 ms, relay 48 ms"),
    ("stay", [PUNCHED, PUBLIC], PUNCHED, PUNCHED, None, "punched: 14 ms"),  # no hurry for two milliseconds
    ("stay", [silent(PUBLIC), HOME], HOME, HOME, None, "looking"),
    ("stay", [replace(PUBLIC, state=PROBING), HOME], HOME, HOME, None, "looking"),
    ("stay", [lossy(PUBLIC), HOME], HOME, HOME, None, "relay: direct path loses 8 %"),
    ("stay", [lossy(PUBLIC), NEW_RELAY], PUBLIC, PUBLIC, None, "direct: it loses 8 %, but there is no other path"),
    ("stay", [lossy(PUBLIC), lossy(PUNCHED)], PUBLIC, PUBLIC, None, "direct: it loses 8 %, but there is no other path"),
    ("stay", [lossy(PUBLIC), silent(HOME)], PUBLIC, PUBLIC, None, "direct: it loses 8 %, but there is no other path"),
    ("stay", [HOME, RELAY], HOME, HOME, None, "looking"),  # the peer's home, though the other one is faster
]


@pytest.mark.parametrize(("rule", "views", "current", "primary", "duplicate", "reason"), TABLE)
def test_the_table(
    rule: str,
    views: list[PathView],
    current: PathView | None,
    primary: PathView | None,
    duplicate: PathView | None,
    reason: str,
) -> None:
    before = Decision() if current is None else held(current)
    after = choose(views, before, NOW, CONFIG, "looking")
    assert after.primary == (None if primary is None else primary.path)
    assert after.duplicate == (None if duplicate is None else duplicate.path)
    assert after.reason == reason
    assert after.since == (before.since if after.primary == before.primary else NOW)
    chosen = next((one for one in views if one.path == after.primary), None)
    assert after.tier == (Tier.NONE if chosen is None else chosen.tier)
    situation = path_policy._Situation(views, before, NOW, CONFIG)
    decided = next((one.__name__.strip("_") for one in RULES if one(situation) is not None), "stay")
    assert decided == rule or not situation.usable


def test_every_rule_has_its_rows() -> None:
    documented = re.findall(r"^  (\w+)(?: {2,}|$)", (path_policy.__doc__ or "").partition("Rules")[2], re.MULTILINE)
    rules = [rule.__name__.strip("_") for rule in RULES]
    assert [*rules, "stay"] == documented
    assert {row[0] for row in TABLE} | {"faster"} == set(documented)  # faster has its own tests: it takes time


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
