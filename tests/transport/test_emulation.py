from __future__ import annotations

import asyncio
import contextlib
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.emulation import DelayLine, LinkEmulation, LinkModel
from transport.errors import ConfigError


def test_the_whole_text_is_read() -> None:
    setting = LinkEmulation.parse("rtt=80ms,jitter=5ms,loss=1%,rate=20mbit,seed=7")
    assert setting == LinkEmulation(rtt=0.08, jitter=0.005, loss=0.01, rate=2.5e6, seed=7)
    assert LinkEmulation.parse("RTT=0.5s, loss=0.1%") == LinkEmulation(rtt=0.5, loss=0.001)
    assert LinkEmulation.parse("") == LinkEmulation()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rtt=80", "needs a number and a unit"),
        ("rtt=fast", "rtt=80ms"),
        ("rtt=80ms,rtt=90ms", "given twice"),
        ("rtt=61s", "more than 60s"),
        ("loss=1", "percentage"),
        ("loss=101%", "percentage"),
        ("rate=0mbit", "above 0"),
        ("seed=x", "whole number"),
        ("delay=80ms", "unknown 'delay'"),
        (",", "sets nothing"),
        ("rtt=1ms,jitter=5ms", "more than the rtt"),
    ],
)
def test_bad_text_gets_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LinkEmulation.parse(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        LinkEmulation.parse(text)


def test_each_direction_has_half_of_the_round_trip() -> None:
    model = LinkModel(LinkEmulation(rtt=0.08), Random(1))
    assert model.offer(1200, now=5.0) == pytest.approx(5.04)


def test_rate_spaces_datagrams_and_the_queue_is_bounded() -> None:
    model = LinkModel(LinkEmulation(rtt=0.02, rate=1e6), Random(1))
    arrivals = [model.offer(1000, now=0.0) for _ in range(200)]
    kept = [at for at in arrivals if at is not None]
    assert kept[0] == pytest.approx(0.011)
    assert kept[1] - kept[0] == pytest.approx(0.001)
    assert 100 <= len(kept) <= 102  # 100 ms of queue at 1 MB/s, and the one on the wire
    assert model.offer(1000, now=1.0) == pytest.approx(1.011)


def test_loss_is_what_was_asked_for_and_repeatable() -> None:
    setting = LinkEmulation(loss=0.1)
    lost = [LinkModel(setting, Random(3)).offer(100, 0.0) is None for _ in range(1)]
    runs = []
    for _ in range(2):
        model = LinkModel(setting, Random(3))
        runs.append([model.offer(100, 0.0) is None for _ in range(5000)])
    assert runs[0] == runs[1]
    assert runs[0][:1] == lost
    assert 400 < sum(runs[0]) < 600


@given(
    st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 1500)), min_size=1, max_size=50),
    st.integers(0, 2**32),
)
def test_order_is_kept_and_nothing_arrives_early(steps: list[tuple[float, int]], seed: int) -> None:
    model = LinkModel(LinkEmulation(rtt=0.05, jitter=0.05, rate=1e6), Random(seed))
    now, last = 0.0, 0.0
    for gap, size in steps:
        now += gap
        arrives = model.offer(size, now)
        if arrives is not None:
            assert arrives >= max(now, last)
            last = arrives


async def test_the_delay_line_delivers_in_order_and_not_before_time() -> None:
    loop = asyncio.get_running_loop()
    arrived: list[int] = []
    done = asyncio.Event()

    def deliver(items: list[int]) -> None:
        arrived.extend(items)
        if len(arrived) == 20:
            done.set()

    line = DelayLine(loop, LinkModel(LinkEmulation(rtt=0.02, jitter=0.01), Random(1)), deliver)
    start = loop.time()
    for number in range(20):
        line.push(number, 100)
    async with asyncio.timeout(5):
        await done.wait()
    assert arrived == list(range(20))
    assert loop.time() - start >= 0.004  # half of the round trip, less half of the jitter and the timer's slack
    assert line.remaining() == 0.0


async def test_a_closed_delay_line_delivers_nothing() -> None:
    loop = asyncio.get_running_loop()
    arrived: list[int] = []
    line = DelayLine(loop, LinkModel(LinkEmulation(rtt=0.002), Random(1)), arrived.extend)
    line.push(1, 100)
    assert line.remaining() > 0
    line.close()
    passed = asyncio.Event()
    loop.call_later(0.01, passed.set)
    await passed.wait()
    assert arrived == []
