from __future__ import annotations

import pytest

from swarmnode.bench.faults import FaultOptions, Gap, Kill, Record, fewest_copies, main, report, run


async def test_a_killed_worker_changes_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    # Room for all in each: on a busy machine one may look slow, and the plan then leaves it out.
    result = await run(FaultOptions(single=2, workers=3, memory="9M", tokens=48))
    assert result["kills"] == 2
    assert result["generations"] == 2
    assert (result["aborted"], result["different"]) == (0, 0), result["reasons"]
    assert result["tokens"] == 96
    assert result["stall_ms"]["max"] >= 0


def test_a_stall_is_what_a_pause_has_beyond_the_usual_one_of_its_kind() -> None:
    record = Record()
    at = 0.0
    for length, first in (
        (0.5, True),
        (0.1, False),
        (0.1, False),
        (0.5, True),
        (0.7, False),
        (0.1, False),
        (0.1, False),
    ):
        record.gaps.append(Gap(at, at + length, first))
        at += length
    kill = Kill(1.3, "w", in_use=True, spared=True, until=1.4)
    record.kills.append(kill)
    assert record.usual(first=True) == pytest.approx(0.5)
    assert record.usual(first=False) == pytest.approx(0.1)
    kill.stall_s, kill.before_first = record.stall(kill.at, kill.at + 0.1)
    assert kill.stall_s == pytest.approx(0.6)
    assert not kill.before_first
    before, first = record.stall(0.0, 0.4)
    assert before == pytest.approx(0.0)
    assert first
    said = report(FaultOptions(emulate="rtt=40ms"), record, (1.0, 1.0, 1.0))
    assert said["bound_ms"] == 580
    assert said["stall_ms"]["p95"] == pytest.approx(600.0)


def test_windows_with_a_kill_are_not_quiet() -> None:
    record = Record(gaps=[Gap(i / 10, (i + 1) / 10, first=False) for i in range(200)])
    assert len(record.quiet()) == 6
    record.kills.append(Kill(4.0, "w", in_use=False, spared=True, until=9.5))
    assert len(record.quiet()) == 3


def test_every_expert_must_be_there_twice_not_only_as_many_altogether() -> None:
    one, other = {"0": "0-3", "1": "0-3"}, {"0": "0-3", "1": "0,2"}
    assert fewest_copies([one, one], 8) == 2
    assert fewest_copies([one, one, other], 8) == 2
    assert fewest_copies([one, other, {"0": "0-1"}], 8) == 1  # sixteen altogether
    assert fewest_copies([other], 8) == 0  # two are with nobody
    assert fewest_copies([], 8) == 0


@pytest.mark.parametrize("every", ["often", "0-5", "nan", "-"])
def test_every_needs_seconds(every: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--every={every}"]) == 2
    assert "give FROM-TO in seconds" in capsys.readouterr().err
