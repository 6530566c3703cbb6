from __future__ import annotations

import json
from argparse import Namespace

import pytest

from swarmnode.bench.command import count, markdown, not_negative, parser, positive, run_command
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


def test_a_result_may_be_a_failure_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(parser("thing", ""), [], lambda _given: RESULT, failed=lambda result: bool(result["rows"])) == 1
    assert "model: demo" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "", "x", "1e400"])
def test_numbers_that_cannot_be_measured_with(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in (count, positive, *(() if text == "0" else (not_negative,))):
        made = parser("thing", "")
        made.add_argument("--n", type=kind)
        with pytest.raises(SystemExit) as ended:
            run_command(made, [f"--n={text}"], lambda _given: RESULT)
        assert ended.value.code == 2
        assert "argument --n: " in capsys.readouterr().err
    assert (count("12"), positive("0.5"), not_negative("0")) == (12, 0.5, 0.0)
