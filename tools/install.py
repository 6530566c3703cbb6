"""Fills this interpreter's environment from the lock file and installs swarmnode into it. Called by the Makefile.

llama-cpp-python is built from source on first use, silently and for minutes; this says so and shows that it moves. It
is compiled for the processor at hand, which pip's cache does not know: a wheel that another machine left there is found
out and compiled anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PROBE = "from swarmnode.bench.engine import run; run(quick=True)"  # the kernels that experts are computed with
ILLEGAL_INSTRUCTION = (-signal.SIGILL, 0xC000001D)  # how a process ends so; the second on Windows


def pip(*arguments: str) -> None:
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}  # setuptools warns of editable installs as such
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True, env=quiet)


def locked_part(lock: Path, package: str) -> tuple[str, str]:
    """The lock file's requirement of one package, and all the others."""
    blocks: list[str] = []
    for line in lock.read_text().splitlines(keepends=True):
        if line.startswith((" ", "\t")) and blocks:
            blocks[-1] += line
        elif not line.startswith("#"):
            blocks.append(line)
    wanted = [b for b in blocks if b.startswith(package + "==")]
    return "".join(wanted), "".join(b for b in blocks if b not in wanted)


def with_a_clock(label: str, work: list[str]) -> None:
    """Run a silent pip command and print the minutes it has taken."""
    start = time.monotonic()
    done = threading.Event()

    def tick() -> None:
        while not done.wait(15):
            spent = int(time.monotonic() - start)
            print(f"  … {label}: {spent // 60}:{spent % 60:02d} so far", flush=True)

    clock = threading.Thread(target=tick, daemon=True)
    clock.start()
    try:
        pip(*work)
    finally:
        done.set()
        clock.join()


def fits_this_processor() -> bool:
    """Whether llama.cpp, as it is installed, has no instruction that this processor does not know."""
    probe = subprocess.run([sys.executable, "-c", PROBE], check=False, stdout=subprocess.DEVNULL)
    return probe.returncode not in ILLEGAL_INSTRUCTION


def main() -> int:
    lock = Path(sys.argv[1]).resolve()
    here = lock.parent
    native, others = locked_part(lock, "llama-cpp-python")
    scratch = Path(sys.prefix) / "lock"
    scratch.mkdir(exist_ok=True)
    (scratch / "others.txt").write_text(others)
    (scratch / "native.txt").write_text(native)
    try:
        print("1/3 Python packages", flush=True)
        pip("install", "--quiet", "--require-hashes", "-r", str(scratch / "others.txt"))
        print("2/3 llama.cpp: compiled the first time, about ten minutes on two cores; cached afterwards", flush=True)
        compile_native = ["install", "--quiet", "--no-deps", "--require-hashes", "-r", str(scratch / "native.txt")]
        with_a_clock("compiling llama.cpp", compile_native)
        print("3/3 swarmnode", flush=True)
        pip("install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(here))
        if not fits_this_processor():
            print("the cached llama.cpp was compiled for another processor: compiling it for this one", flush=True)
            with contextlib.suppress(subprocess.CalledProcessError):  # there may be no cache
                pip("cache", "remove", "--quiet", "llama_cpp_python")
            with_a_clock("compiling llama.cpp", [*compile_native, "--force-reinstall"])
    except subprocess.CalledProcessError as error:
        print(f"install: pip failed with exit code {error.returncode}; its message stands above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
