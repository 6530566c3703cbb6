"""A command line is parsed and nothing is run: an unknown option, or a value that cannot be, is an error."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from typing import Any

import typer.main

from relay.__main__ import _parser as relay_parser
from swarmnode.cli import app
from tests.docs.console import ROOT
from tools.cli_reference import commands, own_parser


def parse(words: list[str]) -> None:
    """Raises AssertionError with what the program itself would say."""
    match words:
        case ["make", *targets]:
            made = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
            for target in targets:
                assert target in made, f"make knows no {target}"
        case ["swarmnode", *arguments]:
            _parse_swarmnode(arguments)
        case ["swarmnode-relay", *arguments] | ["python", "-m", "relay", *arguments]:
            _parse_with(relay_parser(), arguments)
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module), f"there is no module {module}"
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"there is no {script}"
        case _:
            raise AssertionError("it is no command of this repository")


def _parse_swarmnode(arguments: list[str]) -> None:
    own = next(
        (one for one in commands(app, "swarmnode") if one.has_own_flags and one.name.split()[1:] == arguments[:2]), None
    )
    if own is not None:
        _parse_with(own_parser(own), arguments[2:])
        return
    root: Any = typer.main.get_command(app)
    _silence(root)
    try:
        root.main(args=list(arguments), prog_name="swarmnode", standalone_mode=False)
    except Exception as error:  # click's own, from whichever copy of it typer has
        raise AssertionError(f"swarmnode: {getattr(error, 'message', error)}") from None


def _silence(command: Any) -> None:
    """Commands do nothing but be parsed."""
    command.callback = None
    for inner in getattr(command, "commands", {}).values():
        _silence(inner)


def _parse_with(parser: Any, arguments: list[str]) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(arguments)
    except SystemExit:
        raise AssertionError(said.getvalue().strip()) from None
