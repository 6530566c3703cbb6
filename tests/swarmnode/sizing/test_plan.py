"""Devices from texts, and models on devices: nothing is held twice or by nobody, and the planner finds the same."""

from __future__ import annotations

import contextlib
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import UsageError
from swarmnode.placement.planner import plan
from swarmnode.placement.request import PlanRequest, WorkerSpec
from swarmnode.sizing.devices import GIB, Device, parse_devices
from swarmnode.sizing.needs import PROCESS_BYTES, memory_of, needs_of
from swarmnode.sizing.plan import MOST_BACKBONES, make_plan, recommended, remote_speed
from swarmnode.sizing.shapes import find_shape, needs_of_shape
from tests.swarmnode.sizing.headers import FakeHeader, needs


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["3x32G"], [(32 << 30, 0.02)] * 3),
        (["64G@80ms"], [(64 << 30, 0.08)]),
        (["2×16GiB @ 5", "1 x 1.5t@0.1s"], [(16 << 30, 0.005)] * 2 + [(3 << 39, 0.1)]),
        (["8g,2*512M@0ms"], [(8 << 30, 0.02), (1 << 29, 0.0), (1 << 29, 0.0)]),
        (["64GB", "64gb,64GiB"], [(64 << 30, 0.02)] * 3),
    ],
)
def test_devices(texts: list[str], expected: list[tuple[int, float]]) -> None:
    found = parse_devices(texts, 0.02)
    assert [(device.memory, device.rtt_s) for device in found] == expected
    assert len({device.name for device in found}) == len(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "3x",
        "x32G",
        "32Q",
        "0x32G",
        "3x32G@",
        "3x32G@fast",
        "-1x8G",
        "99999x1G",
        "1e9G",
        "5000T",
        "8G@99s",
        "4x64G@5ſ",  # its capital letter is S
        "64\u212a",  # the Kelvin sign, whose small letter is k
        "64Gb",
        "64Gib",
        "9" * 5000 + "x1G",
    ],
)
def test_devices_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_devices([text], 0.02)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10000000x32G", "10000000 devices; 1 to 4096"),
        (f"{'9' * 30}x32G", "1 to 4096"),
        (f"3x{'9' * 30}G", "that much memory"),
        (f"8G@{'9' * 30}ms", "no connection"),
        ("3 of 32G", "give a number and a size"),
        ("3x64Gb", "Gb are bits; memory is in bytes: give a number and a size"),
    ],
)
def test_what_is_too_much_is_said_to_be(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_devices([text], 0.02)


def test_no_devices() -> None:
    with pytest.raises(UsageError, match="no devices"):
        parse_devices([], 0.02)


@given(st.text(max_size=30))
def test_any_text_is_devices_or_an_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_devices([text], 0.02)


@given(
    devices=st.lists(st.tuples(st.integers(1, 200), st.sampled_from([0.0, 0.02, 0.025, 0.3])), min_size=1, max_size=9),
    context=st.integers(1, 32_768),
    n_sites=st.integers(1, 12),
)
def test_every_expert_is_held_once_within_memory(devices: list[tuple[int, float]], context: int, n_sites: int) -> None:
    model = needs(n_sites=n_sites, experts_total_bytes=n_sites * 8 << 30)
    there = [Device(f"d{n}", size << 30, rtt) for n, (size, rtt) in enumerate(devices)]
    found = make_plan(model, there, context)
    held = sum(share.experts for share in found.shares)
    if not found.shares:
        assert not found.fits
        assert all(device.usable < memory_of(model, context).total - PROCESS_BYTES for device in there)
        return
    assert sorted(share.device.name for share in found.shares) == sorted(device.name for device in there)
    assert [share.is_backbone for share in found.shares] == [True] + [False] * (len(there) - 1)
    for share in found.shares:
        assert share.left >= 0
        assert share.experts * model.expert_bytes + share.other + share.left == share.device.usable
    assert found.fits == (held == 8 * n_sites)
    assert found.missing == (8 * n_sites - held) * model.expert_bytes
    assert found.trips <= n_sites
    if not found.fits:
        assert all(share.left < model.expert_bytes for share in found.shares)
        if found.more_devices:
            alike = [Device(f"more{n}", found.alike.memory, found.alike.rtt_s) for n in range(found.more_devices)]
            assert make_plan(model, [*there, *alike], context).fits


def test_near_devices_first_and_whole_layers_at_home() -> None:
    model = needs()
    there = parse_devices(["64G@1ms", "64G@2ms", "64G@90ms"], 0.02)
    found = make_plan(model, there, 1024)
    assert found.fits
    assert [share.device.name for share in found.shares] == ["device 1", "device 2", "device 3"]
    assert [share.experts for share in found.shares] == [48, 32, 0]  # 6 layers at home, the rest near, none far
    assert found.trips == 4
    assert found.given.rtt_s == 0.002
    assert found.token_bytes == 4 * 2 * 1024 * 2
    rates = [speed.tokens_s[0] for speed in (found.given, *found.speeds)]
    assert rates == sorted(rates, reverse=True)
    assert found.speeds[0].tokens_s[2] == pytest.approx(2 * found.speeds[0].tokens_s[0])
    assert found.remote[0].tokens_s[0] < found.speeds[0].tokens_s[0]


def test_the_planner_finds_the_same() -> None:
    model = needs_of_shape(find_shape("mixtral"))
    there = parse_devices(["3x40G"], 0.02)
    found = make_plan(model, there, 8192)
    assert found.fits
    backbone, *workers = found.shares
    sites = range(model.n_sites)
    placement = plan(
        PlanRequest(
            expert_bytes=dict.fromkeys(sites, model.expert_bytes),
            n_expert=dict.fromkeys(sites, model.n_expert),
            weights={site: np.zeros(model.n_expert) for site in sites},
            workers=[WorkerSpec(share.device.name, share.device.usable, share.device.rtt_s) for share in workers],
            k=dict.fromkeys(sites, model.n_used),
            local_budget=backbone.device.usable - backbone.other,
            replicas=1,
        )
    )
    assert not placement.uncovered
    assert placement.estimate.round_trips_per_token == pytest.approx(found.trips, abs=1.0)
    local = sum(mask.bit_count() for mask in placement.local.values())
    assert local == pytest.approx(backbone.experts, abs=model.n_expert)


def test_glm_on_three_machines() -> None:
    model = needs_of_shape(find_shape("GLM-4.6"))
    small = make_plan(model, parse_devices(["3x32G"], 0.02), 8192)
    assert not small.fits
    assert make_plan(model, parse_devices([f"{3 + small.more_devices}x32G"], 0.02), 8192).fits
    assert not make_plan(model, parse_devices([f"{2 + small.more_devices}x32G"], 0.02), 8192).fits
    assert make_plan(model, parse_devices(["3x96G"], 0.02), 8192).fits


def test_no_device_can_be_the_backbone() -> None:
    model = needs()
    found = make_plan(model, parse_devices(["20x8G"], 0.02), 32_768)
    assert not found.fits
    assert (found.shares, found.missing_what) == ((), "backbone")
    assert make_plan(model, parse_devices(["20x8G"], 0.02), found.longest_context // 256 * 256).shares
    largest = [*parse_devices(["20x8G"], 0.02), Device("large", found.backbone_device, 0.02)]
    assert make_plan(model, largest, 32_768).shares


@pytest.mark.parametrize("size", [16, 32, 128, 512])
def test_recommended_is_the_least_that_fits(size: int) -> None:
    model = needs_of_shape(find_shape("deepseek"))
    count = recommended(model, size * GIB, 8192)
    assert make_plan(model, [Device("", size * GIB, 0.02)] * count, 8192).fits
    assert count == 1 or not make_plan(model, [Device("", size * GIB, 0.02)] * (count - 1), 8192).fits


def test_recommended_knows_what_is_too_small() -> None:
    model = needs_of_shape(find_shape("kimi"))
    assert recommended(model, 32 * GIB, 8192) == 0
    assert recommended(model, 64 * GIB, 8192, most=3) == 0


def test_layers_that_differ_are_counted_as_they_are() -> None:
    header = FakeHeader()
    for n in range(10):  # as in grovemoe: a second, smaller set in every layer
        header.experts(n, 8, 2048, 1024)
        header.layer(n, ffn_up_chexps=(2048, 1024, 2), ffn_down_chexps=(1024, 2048, 2), ffn_gate_chexps=(2048, 1024, 2))
    model = needs_of(header)
    assert (model.n_sites, model.n_expert, model.experts_in_all) == (20, 8, 100)
    alone = make_plan(model, parse_devices(["64G"], 0.02), 512)
    assert alone.fits
    assert [(share.experts, share.expert_bytes) for share in alone.shares] == [(100, model.experts_total_bytes)]
    device = Device("", PROCESS_BYTES + (1 << 30) * 3 // 2 + 70 * model.expert_bytes, 0.02)
    count = recommended(model, device.memory, 512)
    assert make_plan(model, [device] * count, 512).fits
    found = make_plan(model, [device] * 3, 512)
    assert sum(share.experts for share in found.shares) == 100
    assert found.trips == 20 - found.shares[0].experts // 5
    assert found.given.rtt_s == 0.02


@pytest.mark.parametrize("rising", [False, True])
def test_thousands_of_devices_of_hundreds_of_kinds(rising: bool) -> None:
    model = needs_of_shape(find_shape("kimi"))
    source = random.Random(1)
    kinds = [(64 + n if rising else source.randrange(48, 512), (1 + n) / 1000) for n in range(512)]
    there = [Device(f"d{n}", kinds[n % 512][0] * GIB, kinds[n % 512][1]) for n in range(4096)]
    began = time.process_time()
    found = make_plan(model, there, 8192)
    assert time.process_time() - began < 5  # seconds for what took minutes; a busy machine is no matter
    assert found.fits
    assert sum(share.experts for share in found.shares) == model.experts_in_all


def test_of_many_kinds_the_best_backbone_is_still_found() -> None:
    model = needs()
    count = MOST_BACKBONES + 10
    there = [Device(f"d{n}", (20 + n // 8) * GIB, 0.02 + n / 1e5) for n in range(count)]
    best = Device("best", 90 * GIB, 0.001)
    found = make_plan(model, [*there, best], 1024)
    assert found.fits
    assert found.shares[0].device is best


def test_with_every_expert_elsewhere_a_token_waits_for_every_layer() -> None:
    model = needs()
    speed = remote_speed(model, 0.08)
    assert 0.5 / 0.8 < speed.tokens_s[0] < 1 / 0.8
    assert speed.tokens_s[2] == pytest.approx(2 * speed.tokens_s[0])
    assert make_plan(model, parse_devices(["3x64G"], 0.02), 1024).remote[1] == speed
