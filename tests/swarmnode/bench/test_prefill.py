"""`bench prefill` in small: real processes, a real emulated link; no figure is judged."""

from __future__ import annotations

import pytest

from swarmnode.bench.prefill import DEMO, LAYER, RATES, cases, main, run


def test_a_prompt_and_a_step_of_streams_are_measured_beside_their_bound() -> None:
    said: list[str] = []
    result = run(quick=True, progress=said.append)
    assert [text.split(":")[0] for text in said[::2]] == ["1 of 2", "2 of 2"]
    assert all("tokens/s" in text for text in said[1::2])
    prompt, streams = result["rows"]
    assert prompt["case"].startswith("prompt 256")
    assert streams["case"].startswith("streams 64")
    for row in result["rows"]:
        assert row["compute"] == "paced 10 µs"
        assert row["bound_ms"] == pytest.approx(
            row["local_ms"] + row["rtt_ms"] + max(row["send_ms"], row["compute_ms"], row["return_ms"]), abs=0.3
        )
        assert row["layer_ms"] > row["rtt_ms"]
        assert row["alone_bound_ms"] == pytest.approx(row["bound_ms"] - row["local_ms"], abs=0.3)
        assert min(row["alone_ms"], row["alone_whole_ms"]) > row["rtt_ms"]
        assert row["model"] == DEMO
        assert row["pieces"] >= 1
        assert row["tokens_per_s"] > 0
    # 256 tokens of 256 values in F16 each way, and what their pairs take on the way out
    assert prompt["return_ms"] == pytest.approx(256 * 512 * 8 / 100e6 * 1e3, rel=0.05)
    assert prompt["send_ms"] > prompt["return_ms"]


def test_all_prompts_streams_and_rates_are_asked_for() -> None:
    rows = cases(80.0, RATES, (2048, 8192))
    assert {row.rate for row in rows} == set(RATES)
    assert {(row.kind, row.tokens) for row in rows if row.model == LAYER and row.pace_s} == {
        ("prompt", 2048),
        ("prompt", 8192),
        ("streams", 64),
    }


def test_a_batch_is_no_longer_than_its_prompt_and_all_of_a_prompt_are_alike() -> None:
    """What a batch's calls take alone is a bound of its layers only where they have as many tokens."""
    batches = {row.tokens: row.batch for row in cases(0.0, (100.0,), (1, 2048, 2049, 8192)) if row.model == DEMO}
    assert batches == {1: 1, 2048: 2048, 2049: 1025, 8192: 2048}


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--mbit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [["--rtt", "-1"], ["--mbit", "100,0"], ["--mbit", "nan"], ["--tokens", "0"], ["--tokens", "1000000"]],
)
def test_numbers_that_cannot_be_meant_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2
    assert f"argument {wrong[0]}: " in capsys.readouterr().err
