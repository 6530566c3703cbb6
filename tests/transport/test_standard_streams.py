"""A process that was started without some of its standard streams."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, sys
from transport.standard_streams import fill_standard_streams
fill_standard_streams()
print("out"); print("err", file=sys.stderr); sys.stdin.read()
other = os.open(os.devnull, os.O_RDONLY)
assert other > 2, other  # nothing else gets a number that libraries write to
assert all(os.get_inheritable(fd) for fd in range(3))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="what a POSIX shell does")
@pytest.mark.parametrize("line", ["", "<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_all_three_are_open(line: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {line}', "sh", sys.executable, "-c", CODE],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if ">&-" in line.replace("2>&-", "") else "out\n")
    assert done.stderr == ("" if "2>&-" in line else "err\n")
