"""What every benchmark's own command line shares: --json, errors as one line, an end in order, tables.

Called by their `main`, and by `swarmnode bench`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.interruptible import End, ended_in_order
from swarmnode.tables import print_rows
from transport.errors import TransportError

Result = Mapping[str, Any]  # facts, and `rows`: JSON as `tables.print_rows` takes it


def parser(prog: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser that is described by the first line of a module's docstring, and knows --json."""
    made = argparse.ArgumentParser(prog=prog, description=(doc or "").partition("\n")[0])
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    return made


def count(text: str) -> int:
    """An option's type: an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or not 1 <= len(text) <= 12 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: give a whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """An option's type: a number above 0, and no infinite one."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: give a number above 0")
    return value


def not_negative(text: str) -> float:
    """An option's type: 0, or a number above it, and no infinite one."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: give 0 or a number above it")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def show_table(result: Result, _given: argparse.Namespace) -> None:
    """A result's facts and a table of its rows."""
    print_rows(result, as_json=False)


def run_command(
    made: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], Result],
    show: Callable[[Result, argparse.Namespace], None] = show_table,
    failed: Callable[[Result], bool] = lambda _result: False,
    then: Callable[[Result, argparse.Namespace], None] = lambda _result, _given: None,
) -> int:
    """Parse, measure, print. Returns the exit code: 2 for what was asked wrongly, 1 for what did not run, 128 and the
    signal's number for what was ended by one (Ctrl-C: 130).

    `show` prints for people; with --json the result is printed as it is. `then` makes more of what was printed, such as
    files. `failed`: whether a result that was printed is a failure all the same, for exit code 1.
    """
    given = made.parse_args(arguments)
    end = End()
    try:
        with ended_in_order(end):
            result = measure(given)
            try:
                if given.json:
                    print_rows(result, as_json=True)
                else:
                    show(result, given)
            except BrokenPipeError:  # whoever read has what they wanted
                sys.stderr.close()
                return 1
            then(result, given)
    except KeyboardInterrupt:
        print(f"{made.prog}: interrupted", file=sys.stderr)
        return end.exit_code
    except (SwarmnodeError, TransportError, OSError) as error:
        print(f"{made.prog}: {_said(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return int(failed(result))


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}" or type(error).__name__  # a TimeoutError has no words
    return str(error)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table of Markdown; "" of none. A bar within a cell is escaped."""
    if not rows:
        return ""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)
