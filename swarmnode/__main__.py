"""`python -m swarmnode` is the `swarmnode` script."""

import sys

from swarmnode.cli import main

sys.exit(main())
