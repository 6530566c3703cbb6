"""`swarmnode-relay`: will serve the relay. This version has only the package's place and its import contracts."""

from __future__ import annotations

import sys


def main() -> int:
    """Say what there is; exit code 1, because nothing is served."""
    print("swarmnode-relay: this version has no relay server; connect nodes by address with --peer", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
