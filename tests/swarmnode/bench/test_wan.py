from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from swarmnode.bench import wan, wan_text
from swarmnode.bench.wan import LEVERS, Case, Stream, Tally, WanOptions, cases, flags_of, parse_levers, row, window
from swarmnode.bench.wan_swarm import SwarmSetting, has_ipv6, wan_swarm
from swarmnode.errors import UsageError
from swarmnode.onboard import ModelPack

CASE = Case(80.0, None, "direct", (), "code", 1, 0.0)


def test_sets_of_levers() -> None:
    assert parse_levers("none, all") == ((), LEVERS)
    assert parse_levers("speculation+f16,f16") == (("f16", "speculation"), ("f16",))
    assert parse_levers("one-by-one") == ((), *((lever,) for lever in LEVERS), LEVERS)
    steps = parse_levers("waterfall")
    assert [len(step) for step in steps] == list(range(len(LEVERS)))
    with pytest.raises(UsageError, match="--levers warp: known are none, all"):
        parse_levers("f16+warp")
    with pytest.raises(UsageError, match="at least one"):
        parse_levers(" ,")


def test_a_set_of_levers_in_a_word() -> None:
    assert [wan.short(step) for step in parse_levers("waterfall")[:6]] == [
        "none", "partial", "f16", "int8", "int8-back", "int8-back+speculation",
    ]  # fmt: skip
    assert wan.short(LEVERS) == wan.short([one for one in LEVERS if one not in wan.STREAMS_ONLY]) == "all"


def test_flags_say_what_the_levers_mean() -> None:
    assert flags_of((), 1) == ("--mode", "exact")
    assert flags_of(("partial",), 1) == ("--mode", "partial")
    assert flags_of(("f16",), 1) == ("--mode", "partial", "--wire", "f16")
    assert flags_of(LEVERS, 8) == ("--mode", "partial", "--wire", "int8", "--parallel", "8", "--lanes", "2")
    assert flags_of(("batch",), 4) == ("--mode", "exact", "--parallel", "4", "--lanes", "1")


def test_cases_of_one_swarm_stand_together_and_none_twice() -> None:
    options = WanOptions(
        rtt_ms=(5.0,), streams=(1, 4), levers=((), ("batch",), ("speculation",)), text=("prose", "code")
    )
    found = cases(options)
    # With one stream the batch is the plain case; the speculating ones come behind it, in the same swarm.
    assert [(c.streams, c.levers, c.text) for c in found[:4]] == [
        (1, (), "prose"), (1, (), "code"), (1, ("speculation",), "prose"), (1, ("speculation",), "code"),
    ]  # fmt: skip
    settings = [case.setting(options) for case in found]
    assert len(set(settings)) == 2
    assert settings == sorted(settings, key=settings.index)
    assert len(found) == len(set(found)) == 10
    assert [case.at_once for case in found if case.streams == 4 and "batch" in case.levers] == [4, 4]


def test_a_window_counts_only_what_runs_together() -> None:
    together = [[0.0, 1.0, 2.0, 3.0], [0.5, 1.5, 2.5, 3.5, 4.5]]
    assert window(together, together=True) == (5, 2.5)  # (0.5, 3.0]: 1, 2, 3 and 1.5, 2.5
    assert window(together, together=False) == (8, 4.5)
    in_turns = [[0.0, 1.0], [2.0, 3.0]]
    assert window(in_turns, together=True) == window(in_turns, together=False) == (3, 3.0)
    assert window([[], []], together=True) == (0, 0.0)


def result(**given: Any) -> dict[str, Any]:
    plain = {"tokens": 11, "prompt_tokens": 5, "steps": 10, "decode_s": 4.0, "blocking_round_trips_per_token": 4.0}
    return {**plain, **given}


def tallied(stream: Stream) -> Tally:
    tally = Tally()
    tally.add([stream], together=True)
    return tally


def test_a_row_has_its_bound_and_the_ratio_to_it() -> None:
    times = [0.4 * i for i in range(11)]
    found = row(CASE, tallied(Stream(times, result())), 4)
    assert (found["tokens_per_s"], found["steps_per_s"], found["accepted_per_step"]) == (2.5, 2.5, 1.0)
    assert found["bound_tokens_per_s"] == 3.125
    assert found["ratio_to_bound"] == 0.8
    near = Case(0.0, None, "direct", (), "code", 1, 0.0)
    assert row(near, tallied(Stream(times, result())), 4)["bound_tokens_per_s"] is None
    # With half the layers here a step waits for two round trips.
    kept = Case(80.0, None, "direct", ("local-experts",), "code", 1, 0.0)
    found = row(kept, tallied(Stream(times, result(blocking_round_trips_per_token=2.0))), 4)
    assert found["bound_tokens_per_s"] == 6.25


def test_what_speculation_gains_is_told_beside_the_same_without() -> None:
    times = [0.4 * i for i in range(11)]
    plain = row(CASE, tallied(Stream(times, result())), 4)
    drafted = result(steps=5, decode_s=2.5, blocking_round_trips_per_token=2.0, drafted=9, drafts_accepted=5)
    speculating = Case(80.0, None, "direct", ("speculation",), "code", 1, 0.0)
    one = row(speculating, tallied(Stream([0.25 * i for i in range(11)], drafted)), 4)
    wan.compare(speculating, one, {CASE: plain, speculating: one})
    assert (one["accepted_per_step"], one["bound_tokens_per_s"]) == (2.0, 6.25)
    assert (one["gain"], one["break_even"]) == (1.6, 1.25)
    assert plain["gain"] is None


def test_prompts_do_not_change_and_have_not_been_trained_on() -> None:
    for kind in wan_text.CLASSES:
        texts = wan_text.prompts(kind)
        assert texts == wan_text.prompts(kind)
        assert len(set(texts)) == len(texts) >= 4
        assert all(150 < len(text) < 1000 and text == text.rstrip() for text in texts)
    for name in wan_text.CODE_FILES:  # one file in twenty, as in tools/train_demo_model.py
        assert int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 20 == 0


def test_a_rate_that_is_no_number_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert wan.main(["--rtt", "far"]) == 2
    assert "--rtt far: give numbers" in capsys.readouterr().err
    assert wan.main(["--text", "poem"]) == 2
    assert "say prose, code, edit" in capsys.readouterr().err


def test_one_swarm_is_measured_with_and_without_speculation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    arguments = ["--rtt", "5", "--levers", "partial,partial+speculation", "--text", "edit", "--seconds", "0.2"]
    assert wan.main([*arguments, "--tokens", "16", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert sorted(len(one["levers"]) for one in rows) == [1, 2]
    plain = next(one for one in rows if one["levers"] == ["partial"])
    assert plain["bound_tokens_per_s"] == 50.0
    assert plain["tokens_per_s"] > 0
    assert plain["blocking_round_trips_per_token"] == pytest.approx(4.0)
    assert plain["bytes_per_token"] > 1024 * 4
    other = next(one for one in rows if one is not plain)
    assert other["accepted_per_step"] >= 1.0
    assert other["gain"] > 0


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on loopback: it is what parts the two nodes here")
async def test_over_a_relay_alone(tmp_path: Path, demo_pack: ModelPack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    async with wan_swarm(tmp_path, demo_pack, SwarmSetting(0.0, path="relay")) as backbone:
        assert [peer["path"] for peer in (await backbone.status())["peers"]] == ["relay"]
