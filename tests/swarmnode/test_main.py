"""`python -m swarmnode`: Ctrl-C while it is still importing."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTED = """
import runpy, sys

class Interrupting:
    @staticmethod
    def find_spec(name, *_):
        if name == "swarmnode.cli.up":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting)
sys.argv = ["swarmnode", "--version"]
runpy.run_module("swarmnode", run_name="__main__")
"""


def test_ctrl_c_at_once_is_quiet() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")
