from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from swarmnode.bench import wan_plot
from swarmnode.bench.wan_cases import parse_levers
from swarmnode.bench.wan_table import waterfall_steps
from swarmnode.errors import SwarmnodeError, UsageError


def rows() -> list[dict[str, Any]]:
    axes = {"path": "direct", "mbit": None, "text": "edit", "streams": 1, "temperature": 0.0}
    return [
        {**axes, "rtt_ms": rtt, "levers": list(levers), "tokens_per_s": 2.0 + i, "bound_tokens_per_s": bound}
        for rtt, bound in ((0.0, None), (80.0, 12.5))
        for i, levers in enumerate(parse_levers("waterfall"))
    ]


def test_a_waterfall_is_a_chain_from_none_at_the_round_trip_nearest_to_80_ms() -> None:
    steps = waterfall_steps(rows())
    assert [len(step["levers"]) for step in steps] == list(range(9))
    assert {step["rtt_ms"] for step in steps} == {80.0}
    no_chain = [row for row in rows() if len(row["levers"]) in (0, 4, 8)]
    assert waterfall_steps(no_chain) == waterfall_steps([]) == []


def test_figures_are_png_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"rows": [*rows(), {"rtt_ms": 5.0, "skipped": "no such flag"}]}), "utf-8")
    assert wan_plot.main([str(kept), str(tmp_path / "figures")]) == 0
    made = [Path(line) for line in capsys.readouterr().out.split("\n") if line]
    assert sorted(path.name.split("-")[0] for path in made) == ["curves", "waterfall"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_a_grid_is_one_figure_per_path(tmp_path: Path) -> None:
    grid = [
        {**row, "mbit": mbit, "streams": streams}
        for mbit in (None, 10.0)
        for streams in (1, 4)
        for row in rows()
        if len(row["levers"]) in (0, 8)
    ]
    made = wan_plot.figures({"rows": grid}, tmp_path)
    assert [path.name for path in made] == ["grid-direct-edit.png"]
    assert made[0].read_bytes().startswith(b"\x89PNG")
    kept = tmp_path / "kept.jsonl"
    kept.write_text("nothing of that kind\n", "utf-8")
    assert wan_plot.main([str(kept), str(tmp_path)]) == 2


def test_without_matplotlib_it_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install"):
        wan_plot.check(tmp_path)


def test_a_folder_is_made_and_tried_before_anything_is_measured(tmp_path: Path) -> None:
    wan_plot.check(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below", Path("a\0b"), tmp_path / ("n" * 300)):
        with pytest.raises(UsageError, match="figures cannot be written there"):
            wan_plot.check(wrong)


def test_a_figure_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    made = wan_plot.figures({"rows": rows()}, tmp_path)
    made[0].unlink()
    made[0].mkdir()
    with pytest.raises(SwarmnodeError, match=f"{made[0].name}: cannot be written"):
        wan_plot.figures({"rows": rows()}, tmp_path)
