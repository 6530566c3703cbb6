"""`python -m swarmnode` is the `swarmnode` script. Ctrl-C ends it quietly while it is still importing, too.

Standard streams that were not given are the null device. Where only the relay's needs are installed, one line says so.
"""

from __future__ import annotations

import sys

from transport.standard_streams import fill_standard_streams


def main() -> int:
    """Run a command and return its exit code; see `cli.main`."""
    fill_standard_streams()
    try:
        from swarmnode.cli import main as command  # noqa: PLC0415

        return command()
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print(
            "swarmnode: only what swarmnode-relay needs is installed here (typer is missing); "
            "for a node install swarmnode with its dependencies",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
