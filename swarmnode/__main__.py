"""`python -m swarmnode` is the `swarmnode` script. Ctrl-C ends it quietly while it is still importing, too."""

from __future__ import annotations

import sys


def main() -> int:
    """Run a command and return its exit code; see `cli.main`."""
    try:
        from swarmnode.cli import main as command  # noqa: PLC0415

        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
