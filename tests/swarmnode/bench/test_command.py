from __future__ import annotations

import json
from argparse import Namespace

import pytest

from swarmnode.bench.command import markdown, parser, run_command
from swarmnode.errors import SwarmnodeError, UsageError

ROWS = [{"name": "a|b", "ms": 1.5}]
RESULT = {"model": "demo", "rows": ROWS}


def test_a_result_is_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    made = parser("thing", "What it measures.\n\nMore.")
    assert made.description == "What it measures."
    assert run_command(made, [], lambda _given: RESULT) == 0
    said = capsys.readouterr().out
    assert "model: demo" in said
    assert "a|b" in said
    assert run_command(made, ["--json"], lambda _given: RESULT) == 0
    assert json.loads(capsys.readouterr().out) == RESULT
    assert markdown(ROWS) == "| name | ms |\n| --- | --- |\n| a\\|b | 1.5 |\n"
    assert markdown([]) == ""


@pytest.mark.parametrize(
    ("problem", "code"), [(UsageError("--far: no"), 2), (SwarmnodeError("no"), 1), (KeyboardInterrupt(), 130)]
)
def test_what_goes_wrong_is_one_line_and_a_code(
    problem: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_given: Namespace) -> dict[str, object]:
        raise problem

    assert run_command(parser("thing", ""), [], measure) == code
    assert capsys.readouterr().err.startswith("thing: ")
