"""The command line: one file per command that parses and calls, nothing else. Stable; scripts rely on it.

Exit code 0 success, 2 usage, 1 failure with one line on stderr that says what to do, 130 after Ctrl-C. A module here
imports only typer at its top, so that `swarmnode --help` stays fast.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from swarmnode.cli import bench, dashboard, demo, doctor, gate, generate, onboard, peers, ping, plan, status, ticket, up

# Typer raises click's errors, from click itself or, in newer versions, from a copy it carries.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="swarmnode",
    help="Ordinary devices run one large Mixture-of-Experts model together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(up.up)
app.command()(status.status)
app.command()(peers.peers)
app.command()(ping.ping)
app.command()(onboard.onboard)
app.command()(gate.gate)
app.command()(plan.plan)
app.command()(generate.generate)
app.command()(demo.demo)
app.command()(doctor.doctor)
app.command()(dashboard.dashboard)
app.add_typer(ticket.app, name="ticket")
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        from swarmnode import __version__  # noqa: PLC0415

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code. Every expected error becomes one line on stderr."""
    from swarmnode.errors import SwarmnodeError  # noqa: PLC0415
    from transport.errors import LocalFault, TransportError  # noqa: PLC0415

    try:
        result = app(args=arguments, standalone_mode=False)
    except typer.Abort:
        return 130
    except _ClickException as error:
        help_text = type(error).__name__ == "NoArgsIsHelpError"
        print(error.format_message() if help_text else f"swarmnode: {error.format_message()}", file=sys.stderr)
        return int(error.exit_code)
    except SwarmnodeError as error:
        print(f"swarmnode: {error}", file=sys.stderr)
        return error.exit_code
    except TransportError as error:
        print(f"swarmnode: {error}", file=sys.stderr)
        return 2 if isinstance(error, LocalFault) and type(error).__name__ == "ConfigError" else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"swarmnode: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    return result if isinstance(result, int) else 0
