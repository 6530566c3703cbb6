from __future__ import annotations

import asyncio
import json
import signal
import sys
from argparse import Namespace

import pytest

from swarmnode.bench.command import count, markdown, not_negative, parser, positive, run_command
from swarmnode.errors import SwarmnodeError, UsageError
from transport.errors import EndpointClosed

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
    ("problem", "code"),
    [
        (UsageError("--far: no"), 2),
        (SwarmnodeError("no"), 1),
        (EndpointClosed(), 1),
        (PermissionError(13, "no", "/far"), 1),
        (TimeoutError(), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(
    problem: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_given: Namespace) -> dict[str, object]:
        raise problem

    assert run_command(parser("thing", ""), [], measure) == code
    said = capsys.readouterr().err
    assert said.startswith("thing: ")
    assert said != "thing: \n"
    assert said.count("\n") == 1


def test_a_result_may_be_a_failure_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(parser("thing", ""), [], lambda _given: RESULT, failed=lambda result: bool(result["rows"])) == 1
    assert "model: demo" in capsys.readouterr().out


def test_what_is_made_of_a_result_comes_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_result: object, _given: object) -> None:
        raise SwarmnodeError("cannot be written")

    assert run_command(parser("thing", ""), [], lambda _given: RESULT, then=fail) == 1
    said = capsys.readouterr()
    assert "model: demo" in said.out
    assert said.err == "thing: cannot be written\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize(("how", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_a_measurement_in_order(how: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    number = getattr(signal, how)
    before, tidied = signal.getsignal(number), []

    async def work() -> dict[str, object]:
        try:
            signal.raise_signal(number)
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(number)  # a second one does not break off what tidies up
            await asyncio.sleep(0)
            tidied.append(how)
        return {}

    def cut_off(_given: Namespace) -> dict[str, object]:
        try:
            return at_once(_given)
        except KeyboardInterrupt:
            raise ConnectionError("what was cut off says so in its own words") from None

    def at_once(_given: Namespace) -> dict[str, object]:
        signal.raise_signal(number)
        return {}

    for measure in (at_once, cut_off, lambda _given: asyncio.run(work())):
        assert run_command(parser("thing", ""), [], measure) == code
        assert capsys.readouterr() == ("", "thing: interrupted\n")
        assert signal.getsignal(number) == before
    assert tidied == [how]


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_a_signal_that_is_ignored_stays_ignored() -> None:
    def measure(_given: Namespace) -> dict[str, object]:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        return {}

    hangup, interrupt = (signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT))
    try:  # nohup, in the background of a script
        assert run_command(parser("thing", ""), [], measure) == 143
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, hangup)
        signal.signal(signal.SIGINT, interrupt)


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
