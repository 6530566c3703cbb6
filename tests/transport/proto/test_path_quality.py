from __future__ import annotations

from random import Random

import pytest

from transport.proto.path_config import PathConfig
from transport.proto.path_quality import Quality

CONFIG = PathConfig()


def seconds(quality: Quality, count: int, sent: int, loss: float, start: float = 0.0, seed: int = 0) -> float:
    random, now = Random(seed), start
    for _ in range(count):
        now += 1.0
        quality.count(sent, sum(random.random() < loss for _ in range(sent)), now)
    return now


@pytest.mark.parametrize("sent", [5, 20, 50, 500])
def test_two_percent_are_never_taken_for_five(sent: int) -> None:
    for seed in range(20):
        quality = Quality(CONFIG)
        seconds(quality, 60, sent, 0.02, seed=seed)
        assert quality.demoted == ""


@pytest.mark.parametrize(("sent", "within"), [(20, 12), (50, 8), (500, 4)])
def test_ten_percent_are_noticed(sent: int, within: int) -> None:
    for seed in range(20):
        quality = Quality(CONFIG)
        seconds(quality, within, sent, 0.10, seed=seed)
        assert quality.demoted.startswith("loses ")


def test_fewer_than_fifty_packets_say_nothing() -> None:
    quality = Quality(CONFIG)
    for second in range(4):
        quality.count(12, 6, float(second))
    assert quality.demoted == ""
    assert quality.loss == 0.0
    quality.count(12, 6, 4.0)
    quality.count(12, 6, 5.0)
    assert quality.demoted == "loses 50 %"


@pytest.mark.parametrize("first", [[(558, 164)], [(260, 101), (152, 19)], [(1153, 62)]])
def test_slow_start_says_nothing(first: list[tuple[int, int]]) -> None:
    """As seen on links of 10, 4 and 20 Mbit/s, after pings that were all answered."""
    quality = Quality(CONFIG)
    for at in range(3):
        quality.count(1, 0, float(at))
    for at, (sent, lost) in enumerate([*first, *[(500, 2)] * 10]):
        quality.count(sent, lost, 3.0 + 0.75 * at)
        quality.carried(5e5, lost / sent, None, 3.0 + 0.75 * at)
        assert quality.demoted == ""


def test_a_policer_shows_at_full_speed() -> None:
    """3 Mbit/s for UDP: the sender settles at 4 to 6 % of loss; as seen, from the first sample on."""
    quality = Quality(CONFIG)
    for at, (sent, lost) in enumerate([(420, 276), (186, 10), (207, 9), (207, 11), (205, 10)]):
        assert quality.demoted == ""
        quality.count(sent, lost, 0.75 * at)
        quality.carried(3.6e5, lost / sent, None, 0.75 * at)
        if quality.demoted:
            break
    assert quality.demoted == "loses 5 % at full speed"


def test_a_policer_is_borne_when_the_relay_is_no_faster() -> None:
    quality = Quality(CONFIG)
    for at in range(60):
        quality.count(200, 9, 0.75 * at)
        quality.carried(3.6e5, 0.045, 5.0e5, 0.75 * at)
    assert quality.demoted == ""
    for at in range(60, 70):
        quality.carried(3.6e5, 0.045, 6.0e5, 0.75 * at)
    assert quality.demoted == "loses 4 % at full speed"


def train(quality: Quality, start: float, lost: int) -> tuple[float, int]:
    """Run the train that is due; (when it ended, pings sent)."""
    now, sent = start, 0
    while quality.due <= now + 1.0:
        now = max(now, quality.due)
        if quality.poll(now):
            sent += 1
            quality.trained(sent > lost, now)
    return now, sent


def test_a_demoted_path_comes_back_after_a_clean_train() -> None:
    quality = Quality(CONFIG)
    now = seconds(quality, 5, 100, 0.2)
    assert quality.demoted
    assert now + 25 < quality.due <= now + CONFIG.demote_hold
    end, pings = train(quality, quality.due, lost=1)
    assert pings == CONFIG.train_pings
    assert end - now <= 36
    assert quality.demoted == ""
    assert quality.loss == 0.0


def test_every_failed_train_doubles_the_hold_and_ends_early() -> None:
    quality = Quality(CONFIG)
    seconds(quality, 5, 100, 0.2)
    gaps = []
    for _ in range(7):
        end, pings = train(quality, quality.due, lost=50)
        assert pings <= 3
        assert quality.demoted
        gaps.append(round(quality.due - end))
    assert gaps == [60, 120, 240, 480, 900, 900, 900]


def test_a_path_that_was_good_for_long_starts_anew() -> None:
    quality = Quality(CONFIG)
    seconds(quality, 5, 100, 0.2)
    end, _ = train(quality, quality.due, lost=0)
    now = seconds(quality, 5, 100, 0.2, start=end + 5)
    assert quality.due - now > 50
    end, _ = train(quality, quality.due, lost=0)
    now = seconds(quality, 5, 100, 0.2, start=end + 5000)
    assert quality.due - now < 31


def test_goodput_under_half_of_the_relays() -> None:
    quality = Quality(CONFIG)
    for goodput in (2e6, 2e6, 4e6, 2e6, 2e6):
        quality.carried(goodput, 0.0, 6e6, 1.0)
    assert quality.demoted == ""
    quality.carried(2e6, 0.0, 6e6, 1.0)
    assert quality.demoted.startswith("carries ")
    other = Quality(CONFIG)
    for _ in range(10):
        other.carried(1.0, 0.0, None, 1.0)  # nothing is known of a relay
    assert other.demoted == ""


def test_whoever_leaves_for_loss_says_so_until_it_is_answered() -> None:
    quality = Quality(CONFIG)
    assert not quality.poll_farewell(0.0)
    now = seconds(quality, 4, 100, 0.2)
    assert quality.demoted
    sent = []
    while quality.farewell_due < now + 10:
        at = quality.farewell_due
        assert quality.poll_farewell(at)
        sent.append(at)
    assert len(sent) == CONFIG.farewells
    again = Quality(CONFIG)
    now = seconds(again, 4, 100, 0.2)
    assert again.poll_farewell(now)
    again.told()
    assert not again.poll_farewell(now + 1)


@pytest.mark.parametrize(
    ("packets", "loss", "follows"), [(0, 0.0, True), (20, 0.0, True), (100, 0.2, True), (100, 0.0, False)]
)
def test_the_peer_is_followed_unless_our_own_packets_arrive(packets: int, loss: float, follows: bool) -> None:
    quality = Quality(CONFIG)
    quality.count(packets, round(packets * loss), 1.0)
    quality.follow(2.0)
    assert bool(quality.demoted) is follows
    assert not quality.poll_farewell(2.0)  # it knows
    if follows:
        end, _ = train(quality, quality.due, lost=0)
        assert end >= 2.0 + CONFIG.demote_hold
        assert not quality.demoted
