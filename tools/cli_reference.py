"""Writes docs/cli.md: every command, argument, option, default and environment variable, read off the code itself.

    python tools/cli_reference.py            write docs/cli.md
    python tools/cli_reference.py --check    exit code 1 where the file is not what the code says (tests/docs runs it)

Of `swarmnode` the signatures of its commands are read, as typer reads them; of `swarmnode-relay`, and of benchmarks
that parse their own flags, the argparse parsers. Nothing is run.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import typer
from typer.models import ArgumentInfo, OptionInfo

from relay.__main__ import _parser as relay_parser
from swarmnode.cli import app
from swarmnode.config import FILE_ALIASES, FILE_KEYS, FILE_LISTS

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "cli.md"
HEAD = """# Command line

Made by `tools/cli_reference.py` from the code; not written by hand.

Exit code 0 is success, 2 a command line that cannot be meant, 1 a failure with one line on standard error that says
what to do, 130 Ctrl-C. `--json` prints data for machines: fields may be added, never renamed. Where a variable is
named, it does the same as the option, which goes before it; one that takes several values separates them by spaces.
`swarmnode up` takes its options from a TOML file too (`--config`, [its keys](#swarmnode-up)).
"""
TYPES = {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "PATH"}


@dataclass(frozen=True)
class Parameter:
    """One argument or option as people read it."""

    spelling: str
    meaning: str
    default: str
    variable: str
    is_argument: bool
    required: bool


@dataclass(frozen=True)
class Command:
    """One thing that can be called. `call` is its function; `of` what its group can do besides being called itself."""

    name: str
    call: Callable[..., Any]
    has_own_flags: bool = False
    is_group: bool = False
    can_be_called: bool = True


def commands(typer_app: typer.Typer, prefix: str) -> Iterator[Command]:
    """All that can be called, in the order of --help; a group before what is in it."""
    for info in typer_app.registered_commands:
        assert info.callback is not None
        name = info.name or info.callback.__name__.replace("_", "-")
        if not info.hidden:
            own_flags = bool((info.context_settings or {}).get("ignore_unknown_options"))
            yield Command(f"{prefix} {name}", info.callback, own_flags)
    for group in typer_app.registered_groups:
        inner = group.typer_instance
        assert inner is not None
        name = f"{prefix} {group.name}"
        own = inner.registered_callback.callback if inner.registered_callback else None
        if own is not None:
            yield Command(name, own, is_group=True, can_be_called=inner.info.invoke_without_command is True)
        yield from commands(inner, name)


def parameters(call: Callable[..., Any]) -> list[Parameter]:
    """What a command takes, hidden options left out."""
    hints = typing.get_type_hints(call, include_extras=True)
    found = []
    for name, one in inspect.signature(call).parameters.items():
        hint, value = hints[name], one.default
        info = next((part for part in getattr(hint, "__metadata__", ()) if isinstance(part, ParameterInfos)), None)
        if info is None and isinstance(value, ParameterInfos):
            info, value = value, value.default
        if info is not None and not info.hidden:
            found.append(parameter(name, plain_type(hint), info, value))
    return found


ParameterInfos = (ArgumentInfo, OptionInfo)


def plain_type(hint: Any) -> type:
    """`Annotated[list[str] | None, …]` → str."""
    while True:
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated or origin is list:
            hint = inside[0]
        elif origin in (types.UnionType, typing.Union):
            hint = next(one for one in inside if one is not type(None))
        else:
            return typing.cast(type, hint)


def parameter(name: str, kind: type, info: Any, value: Any) -> Parameter:
    """One parameter from what typer was told of it."""
    required = value is inspect.Parameter.empty or value is ...
    meaning = info.help or ""
    if info.min is not None and info.max is not None:
        meaning += f" {info.min} to {info.max}."
    variable = info.envvar if isinstance(info.envvar, str) else ", ".join(info.envvar or ())
    is_argument = isinstance(info, ArgumentInfo)
    spelling = name.upper() if is_argument else option_names(name, kind, info)
    return Parameter(spelling, meaning, default(info, value, required), variable, is_argument, required)


def option_names(name: str, kind: type, info: Any) -> str:
    """`--out, -o PATH`, `--lan / --no-lan`."""
    dashed = name.strip("_").replace("_", "-")
    # Within Annotated what looks like the default is the first of the names.
    declared = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str) and one[:1] == "-"]
    if kind is bool:
        return ", ".join(declared or [f"--{dashed}/--no-{dashed}"]).replace("/", " / ")
    return f"{', '.join(declared or [f'--{dashed}'])} {info.metavar or TYPES[kind]}"


def default(info: Any, value: Any, required: bool) -> str:
    """What holds where nothing is given; a text that the code has for people goes before the value."""
    if isinstance(info.show_default, str):
        return info.show_default
    if required:
        return "must be given"
    if value is True:
        return "on"
    return "" if value is None or value is False or value == "" else f"`{value}`"


def own_parser(command: Command) -> argparse.ArgumentParser:
    """The parser of a benchmark that reads its own flags: it is called, and stopped where it would parse."""
    found: list[argparse.ArgumentParser] = []

    class Found(Exception):
        pass

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> typing.NoReturn:
        found.append(parser)
        raise Found

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop), contextlib.suppress(Found):
        command.call(types.SimpleNamespace(args=[]))
    if found:
        return found[0]
    raise RuntimeError(f"{command.name} takes its own flags and parses none: teach this tool where they are")


def reference() -> str:
    """The whole page."""
    there = list(commands(app, "swarmnode"))
    lines = [HEAD, "| command | |", "|---|---|"]
    lines += [f"| [`{one.name}`](#{one.name.replace(' ', '-')}) | {cell(first_line(one.call))} |" for one in there]
    relay = relay_parser()
    about = str(relay.description)
    lines += [f"| [`swarmnode-relay`](#swarmnode-relay) | {about.partition('. ')[0]}. |", ""]
    assert app.registered_callback is not None
    lines += ["`swarmnode` itself:", "", *tables(parameters(app.registered_callback.callback or (lambda: None)))]
    for one in there:
        lines += section(one)
    lines += [
        "## swarmnode-relay",
        "",
        f"{about} `python -m relay` is the same.",
        "",
        *usage("swarmnode-relay [OPTIONS]"),
    ]
    return "\n".join([*lines, *argparse_table(relay)])


def section(command: Command) -> list[str]:
    """How a command is called, what it does, what it takes."""
    lines = [f"## {command.name}", ""]
    for part in inspect.cleandoc(command.call.__doc__ or "").split("\n\n"):
        lines += [" ".join(part.split()), ""]
    if command.has_own_flags:
        return [*lines, *usage(f"{command.name} [OPTIONS]"), *argparse_table(own_parser(command))]
    takes = parameters(command.call)
    words = [command.name, "[OPTIONS]"] if any(not one.is_argument for one in takes) else [command.name]
    words += [one.spelling if one.required else f"[{one.spelling}]" for one in takes if one.is_argument]
    if command.is_group:
        words.append("[COMMAND …]" if command.can_be_called else "COMMAND …")
    lines += [*usage(" ".join(words)), *tables(takes)]
    return [*lines, *file_keys(takes)] if any("--config" in one.spelling for one in takes) else lines


def file_keys(takes: list[Parameter]) -> list[str]:
    """The keys of a configuration file, and which options are none."""
    keys = ", ".join(f"`{one.replace('_', '-')}`" for one in sorted(FILE_KEYS - FILE_LISTS))
    lists = ", ".join(f"`{one}`" for one in sorted(FILE_LISTS))
    options = [one.spelling.split()[0].removeprefix("--") for one in takes if not one.is_argument]
    known = {"config", *FILE_ALIASES, *FILE_KEYS}
    others = ", ".join(f"`--{one}`" for one in options if one.replace("-", "_") not in known)
    return [
        f"Keys of a `--config` file: {keys}; lists: {lists}. A dash may be an underscore, `peer` and `relay` take one"
        f" value or a list, switches are `true` or `false`. On the command line alone: {others}.",
        "",
        "```toml",
        'model = "model.gguf"',
        'memory = "8G"',
        'relay = "https://relay.example"',
        "lan = false",
        'log-format = "json"',
        "```",
        "",
    ]


def usage(line: str) -> list[str]:
    return ["```text", line, "```", ""]


def tables(takes: list[Parameter]) -> list[str]:
    """Arguments and options; the column of variables only where there is one."""
    lines = []
    for title, some in (
        ("argument", [one for one in takes if one.is_argument]),
        ("option", [one for one in takes if not one.is_argument]),
    ):
        variables = any(one.variable for one in some)
        head = [title, "meaning", "default", *(["variable"] if variables else [])]
        rows = [
            [f"`{one.spelling}`", one.meaning, one.default, *([f"`{one.variable}`" * bool(one.variable)] * variables)]
            for one in some
        ]
        lines += table(head, rows) if rows else []
    return lines


def argparse_table(parser: argparse.ArgumentParser) -> list[str]:
    """Arguments and options of an argparse parser."""
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        names = ", ".join(action.option_strings) or action.dest.upper()
        if action.option_strings and action.nargs != 0:
            names += f" {action.metavar or '|'.join(map(str, action.choices or ())) or action.dest.upper()}"
        meaning = parser._get_formatter()._expand_help(action) if action.help else ""
        told = action.default in (None, False, "", []) or "(default" in meaning or isinstance(action.default, tuple)
        rows.append([f"`{names}`", meaning, "" if told else f"`{action.default}`"])
    return table(["option", "meaning", "default"], rows)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table of Markdown, and an empty one."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows), ""]


def cell(text: str) -> str:
    """One line; a bar would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def first_line(call: Callable[..., Any]) -> str:
    return inspect.cleandoc(call.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with what is there."""
    for name in [name for name in os.environ if name.startswith("SWARMNODE_")]:
        del os.environ[name]  # the relay reads defaults from there
    if arguments not in ([], ["--check"]):
        print("usage: python tools/cli_reference.py [--check]", file=sys.stderr)
        return 2
    page = reference().rstrip() + "\n"
    if not arguments:
        TARGET.write_text(page, "utf-8")
    elif not TARGET.exists() or TARGET.read_text("utf-8") != page:
        print("docs/cli.md is not what the code says: run python tools/cli_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
