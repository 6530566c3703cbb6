"""Benchmarks that are ended from outside: by signals as they come from a service manager, a terminal that is closed,
Ctrl-C. Nothing is left, and one line is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
LONG_S = 60.0  # a machine with much other work


@contextmanager
def bench(temporary: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m …` in a process group of its own, with its folders in `temporary`."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], folder: Path, pattern: str) -> list[psutil.Process]:
    """Its children, once there is something in `folder` that is called so."""
    end = time.monotonic() + LONG_S
    while not list(folder.glob(pattern)):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    return psutil.Process(process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=LONG_S)[1]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_processes_that_move_bytes(tmp_path: Path, how: str) -> None:
    number = getattr(signal, how)
    with bench(tmp_path, "swarmnode.bench.bulk", "--megabytes", "1") as process:
        children = wait_for(process, tmp_path, "bench-bulk-*/keys-0")
        assert children
        os.killpg(process.pid, number)  # Ctrl-C and a terminal's end come to the whole group
        out, errors = process.communicate(timeout=LONG_S)
    assert (process.returncode, out, errors) == (128 + number, "", "bench bulk: interrupted\n")
    assert all_gone(children)
    assert list(tmp_path.iterdir()) == []


def test_a_gate_that_is_run_for_a_lever(tmp_path: Path) -> None:
    arguments = ["--levers", "int8", "--rtt", "0", "--text", "prose"]
    with bench(tmp_path, "swarmnode.bench.wan", *arguments) as process:
        children = wait_for(process, tmp_path, "swarmnode-gate-*/exact")
        process.send_signal(signal.SIGTERM)  # to it alone
        out, errors = process.communicate(timeout=LONG_S)
    assert (process.returncode, out) == (143, "")
    assert errors.splitlines()[-1] == "wan: interrupted"
    assert all_gone(children)
    assert list(tmp_path.iterdir()) == []


def test_a_command_with_options_of_its_own(tmp_path: Path) -> None:
    with bench(tmp_path, "swarmnode", "bench", "fidelity") as process:
        children = wait_for(process, tmp_path, "swarmnode-bench-*/worker-*/stderr.txt")
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=LONG_S)
    assert (process.returncode, out, errors) == (143, "", "")
    assert all_gone(children)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("how", "said"), [("KeyboardInterrupt", ""), ("ValueError", "ValueError\n")])
def test_ctrl_c_while_a_module_is_imported_is_quiet(how: str, said: str) -> None:
    code = f"import sys; sys.argv = ['-m']; import swarmnode.bench; raise {how}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith(said)
    assert (done.returncode, bool(done.stderr)) == (1 if said else 130, bool(said))
