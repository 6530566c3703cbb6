from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from swarmnode.bench import wan, wan_lines, wan_measure, wan_text
from swarmnode.bench.wan_cases import LEVERS, STREAMS_ONLY, Case, WanOptions, cases, flags_of, parse_levers, short
from swarmnode.bench.wan_gate import why
from swarmnode.bench.wan_measure import Bench, Stream, Tally, axes_of, compare, row, window
from swarmnode.bench.wan_swarm import SwarmSetting, has_ipv6, wan_swarm
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.gate.verdict_file import bound_of, save_verdict
from swarmnode.onboard import ModelPack
from tests.swarmnode.gate.samples import site, verdict

CASE = Case(80.0, None, "direct", (), "code", 1, 0.0)


def test_sets_of_levers() -> None:
    assert parse_levers("none, all") == ((), LEVERS)
    assert set(LEVERS).difference(*parse_levers("all-remote")) == {"local-experts"}
    assert parse_levers("speculation+f16,f16") == (("f16", "speculation"), ("f16",))
    assert parse_levers("one-by-one") == ((), *((lever,) for lever in LEVERS), LEVERS)
    steps = parse_levers("waterfall")
    assert [len(step) for step in steps] == list(range(len(LEVERS)))
    with pytest.raises(UsageError, match="--levers warp: known are none, all"):
        parse_levers("f16+warp")
    with pytest.raises(UsageError, match="at least one"):
        parse_levers(" ,")


def test_a_set_of_levers_in_a_word() -> None:
    assert [short(step) for step in parse_levers("waterfall")[:6]] == [
        "none", "partial", "f16", "int8", "int8-back", "int8-back+speculation",
    ]  # fmt: skip
    assert short(LEVERS) == short([one for one in LEVERS if one not in STREAMS_ONLY]) == "all"
    assert short(parse_levers("all-remote")[0]) == "all-remote"


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


def test_bounded_cells_of_one_link_have_one_swarm_with_room_for_all_streams() -> None:
    options = WanOptions(rtt_ms=(5.0,), streams=(1, 4, 8), levers=((), LEVERS), text=("code",), cell_s=6.0)
    found = cases(options)
    assert [(case.streams, len(case.levers)) for case in found] == [
        (1, 0), (4, 0), (8, 0), (1, len(LEVERS) - len(STREAMS_ONLY)), (4, len(LEVERS)), (8, len(LEVERS)),
    ]  # fmt: skip
    plain, everything = dict.fromkeys(case.setting(options) for case in found)
    assert plain.flags == ("--mode", "exact")
    assert everything.flags[-4:] == ("--parallel", "8", "--lanes", "2")
    assert everything.workers == 4


def test_the_grid_is_every_link_with_none_and_all_and_one_waterfall() -> None:
    options, _note = wan.options_of(wan._parser().parse_args(["--grid"]))
    found = cases(options)
    grid = [case for case in found if not case.levers or short(case.levers) == "all"]
    assert len(grid) == 6 * 3 * 3 * 2 * 2
    # Its first step is in the grid already, and so is its last: the star changes no word of it.
    assert {(c.rtt_ms, c.mbit, c.path, c.streams) for c in found if c not in grid} == {(80.0, None, "direct", 4)}
    assert len({case.setting(options) for case in grid}) == 6 * 3 * 2 * 2
    assert options.cell_s == 6.0
    quick, _note = wan.options_of(wan._parser().parse_args(["--quick", "--rtt", "0"]))
    assert (quick.rtt_ms, quick.streams, quick.waterfall) == ((0.0,), (1, 4), False)


def test_threads_are_those_of_each_node() -> None:
    options, _note = wan.options_of(wan._parser().parse_args(["--threads", "2"]))
    assert {case.setting(options).threads for case in cases(options)} == {2}
    assert wan.about(options)["threads"] == 2


def test_a_window_counts_only_what_runs_together() -> None:
    together = [[0.0, 1.0, 2.0, 3.0], [0.5, 1.5, 2.5, 3.5, 4.5]]
    assert window(together, at_once=2) == (5, 2.5)  # (0.5, 3.0]: 1, 2, 3 and 1.5, 2.5
    # Where they wait for each other, each one's own time counts, and not the prompts between.
    in_turns = [[0.0, 1.0], [2.0, 3.0]]
    assert window(in_turns, at_once=1) == (2, 2.0)
    assert window([*in_turns, [0.5, 1.5], [2.5, 3.5]], at_once=2) == (4, 2.0)
    assert window(in_turns, at_once=2) == (3, 3.0)
    assert window([[], []], at_once=2) == (0, 0.0)


def test_the_tokens_of_what_was_cut_off_count_but_not_its_steps() -> None:
    tally = Tally()
    tally.add([Stream([0.0, 1.0], result(tokens=2, steps=1, decode_s=1.0)), Stream([2.0, 3.0, 4.0])], at_once=1)
    assert (tally.tokens, tally.seconds, tally.steps, tally.decoded) == (3, 3.0, 1, 1)
    assert tally.all_tokens == 2 + 5 + 3 + 5


def result(**given: Any) -> dict[str, Any]:
    plain = {"tokens": 11, "prompt_tokens": 5, "steps": 10, "decode_s": 4.0, "blocking_round_trips_per_token": 4.0}
    return {**plain, **given}


def tallied(stream: Stream) -> Tally:
    tally = Tally()
    tally.add([stream], at_once=1)
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
    compare(speculating, one, {CASE: plain, speculating: one})
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "1"], ["--tokens", "-3"], ["--seconds", "0"], ["--seconds", "nan"], ["--cell", "0"],
        ["--kept", "1.5"], ["--kept", "nan"], ["--streams", "1.5"], ["--streams", "0"], ["--streams", "100000"],
        ["--temperature", "-1"], ["--mbit", "inf"], ["--rtt", "nan"], ["--threads", "0"], ["--tokens", "0"],
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_measured_with_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert wan.main(arguments) == 2
    said = capsys.readouterr().err
    assert f"{arguments[0]} " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--levers", ""], "--levers: give at least one set"),
        (["--rtt", "1e9"], "--rtt 1e9: give numbers from 0 to 1,000,000"),
        (["--seconds", "1e9"], "--seconds 1e+09: give 0.01 to 1,000,000"),
        (["--shape", ""], "--shape : give a model and its layers"),
        (["--draft", "/nonexistent"], "--draft /nonexistent: cannot be read"),
        (["--model", "/nonexistent"], "--model /nonexistent: cannot be read"),
        (["--model", __file__], "not a GGUF file"),
        (["--plot", __file__], "figures cannot be written there"),
        (["--from", "/nonexistent", "--plot", __file__], "figures cannot be written there"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_is_measured(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    assert wan.main([*arguments, "--out", str(out)]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert (told.err.count("\n"), told.out, out.exists()) == (1, "", False)


def test_the_table_is_printed_where_figures_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "rows.jsonl"
    file = wan_lines.RowFile(kept, {"model": "demo"}, resume=False)
    for rtt in (5.0, 80.0):
        file.add(row(replace(CASE, rtt_ms=rtt), tallied(Stream([0.4 * i for i in range(11)], result())), 4))
    arguments = ["--from", str(kept), "--plot", str(tmp_path / "figures")]
    assert wan.main(arguments) == 0
    table = capsys.readouterr().out
    (figure,) = (tmp_path / "figures").iterdir()
    figure.unlink()
    figure.mkdir()
    assert wan.main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == table != ""
    assert said.err == f"wan: {figure}: cannot be written (Is a directory)\n"


def test_rows_without_any_figures_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = {**axes_of(CASE), "skipped": "the gate: layer 1 differs"}
    found = [skipped]
    monkeypatch.setattr(wan, "run", lambda *_: {"rows": found})
    assert wan.main([]) == 1
    said = capsys.readouterr()
    assert "layer 1 differs" in said.out
    assert said.err == "wan: no row has figures: the gate: layer 1 differs\n"
    found.append({**row(CASE, tallied(Stream([0.0, 1.0], result())), 4)})
    assert wan.main([]) == 0


async def test_rounds_that_take_no_time_end(
    tmp_path: Path, demo_pack: ModelPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    options = WanOptions(rtt_ms=(0.0,), levers=((),), text=("code",), tokens=1)
    rows: list[dict[str, Any]] = []
    bench = Bench(options, demo_pack, tmp_path, lambda _case, row: rows.append(row), lambda _text: None)
    with pytest.raises(SwarmnodeError, match="generations of 1 tokens take no time"):
        await bench.run(cases(options))
    assert not rows


async def test_a_founder_learns_from_prompts_as_short_as_those_that_are_measured(
    tmp_path: Path, demo_pack: ModelPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose vocabulary is bytes, whole prompts do not fit the context."""
    learnt: list[str] = []

    async def learn(_folder: Path, _pack: ModelPack, texts: Sequence[str]) -> bytes:
        learnt.extend(texts)
        raise SwarmnodeError("enough")

    monkeypatch.setattr(wan_measure, "learn_routing", learn)
    options = WanOptions(rtt_ms=(0.0,), levers=(("local-experts",),), text=("code",), prompt_characters=48)
    with pytest.raises(SwarmnodeError, match="enough"):
        await Bench(options, demo_pack, tmp_path, lambda *_: None, lambda _text: None).run(cases(options))
    assert learnt == [text[-48:] for text in wan_text.prompts("code")]


def test_why_a_gate_failed() -> None:
    report = json.dumps({"model": "m", "passed": False, "error": "layer 1 is the first that differs"})
    assert why(report, "noise") == "layer 1 is the first that differs"
    assert why("", "│ one │\n│ no such file │\n╰──╯\n") == "no such file"
    assert why("[1]", "") == why('{"error": 1}', "") == why("\x00", "──") == ""


async def test_a_lever_is_barred_where_the_packs_verdict_is_a_failure(
    tmp_path: Path, demo_pack: ModelPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = ModelPack.open(Path(shutil.copytree(demo_pack.path, tmp_path / "pack")))
    sites = pack.manifest.sites
    figures = [
        site(one.layer) if at else structs.replace(site(one.layer), exact_rows=128, differ=7)
        for at, one in enumerate(sites)
    ]
    save_verdict(pack, verdict(*figures, bound=bound_of(pack)))
    rows: list[dict[str, Any]] = []
    options = WanOptions(rtt_ms=(0.0,), levers=parse_levers("int8"), text=("code",))
    bench = Bench(options, pack, tmp_path, lambda _case, row: rows.append(row), lambda _text: None)
    await bench.run(cases(options))
    assert [row["skipped"].partition(": layer")[0] for row in rows] == [
        "the gate: exact mode does not give the local run's bits"
    ]


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
    assert plain["local_step_ms"] == other["local_step_ms"] > 0


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    out = tmp_path / "rows.jsonl"
    arguments = ["--rtt", "2", "--levers", "partial", "--streams", "1,2", "--text", "code", "--cell", "60"]
    arguments += ["--seconds", "0.3", "--out", str(out)]
    assert wan.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [one["streams"] for one in rows] == [1, 2]
    assert all(one["tokens_per_s"] > 0 and one["bound_tokens_per_s"] == 125.0 for one in rows)
    assert wan_lines.load(out)[1] == rows
    assert wan.main(arguments) == 2
    assert "--resume" in capsys.readouterr().err
    # It ended while the second row was being written.
    out.write_bytes(out.read_bytes()[:-20])
    assert wan.main([*arguments, "--resume", "--json"]) == 0
    said = capsys.readouterr()
    assert "1 of 2 cells are measured already" in said.err
    assert json.loads(said.out)["rows"][0] == rows[0]
    assert len(wan_lines.load(out)[1]) == 2
    assert wan.main(["--from", str(out), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| Mbit/s | streams | levers | 2 ms |\n")


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on loopback: it is what parts the two nodes here")
async def test_over_a_relay_alone(tmp_path: Path, demo_pack: ModelPack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    async with wan_swarm(tmp_path, demo_pack, SwarmSetting(0.0, path="relay")) as backbone:
        assert [peer["path"] for peer in (await backbone.status())["peers"]] == ["relay"]
