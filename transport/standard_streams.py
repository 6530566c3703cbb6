"""Standard streams for a process that was started without some of them (`>&-`, a service manager, a closed terminal).

Python has None in their place then, and the first file or socket that is opened gets the number that libraries in C
write to. Called first thing by `swarmnode` and by the relay.
"""

from __future__ import annotations

import os
import sys


def fill_standard_streams() -> None:
    """Have sys.stdin, sys.stdout and sys.stderr be open, on the null device where they were not given."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one, if nobody has taken it
        if opened == fd:
            os.set_inheritable(fd, True)  # as standard streams are
        setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8", errors="replace"))
