"""How long a newcomer waits: a fresh Debian 12, what README asks for, a clone, `make demo`; minutes for each step.

Run by hand, as root, where debootstrap is installed: python3 tools/newcomer.py [--compile]. Without --compile this
machine's pip cache is lent, so that llama.cpp need not be compiled. Everything is in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ASKED_FOR = ["python3", "python3-venv", "g++", "make"]  # what README names
TRUST = Path("/etc/ssl/certs/ca-certificates.crt")  # this machine's authorities are the newcomer's

# Mounts live in a namespace of their own and go with it.
INSIDE = """
set -e
cd "$1"; shift
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs tmpfs tmp
cp /etc/resolv.conf etc/resolv.conf
if [ -n "$PIP_CACHE" ]; then mkdir -p root/.cache/pip; mount --bind "$PIP_CACHE" root/.cache/pip; fi
if [ -e "$TRUST" ]; then mkdir -p etc/ssl/certs; cp "$TRUST" etc/ssl/certs/ca-certificates.crt; fi
exec chroot . /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
  DEBIAN_FRONTEND=noninteractive PIP_CERT="$TRUST" "$@"
"""


def inside(root: Path, cache: str, *command: str) -> None:
    """Run a command in the root. Raises CalledProcessError."""
    wrapped = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", INSIDE, "sh", str(root), *command]
    env = {**os.environ, "PIP_CACHE": cache, "TRUST": str(TRUST)}
    subprocess.run(wrapped, check=True, stdin=subprocess.DEVNULL, env=env)


def clone(target: Path, *, as_is: bool) -> None:
    """This repository's last commit, or its files as they are."""
    if not as_is:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True)
        return
    target.mkdir()
    listed = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"])
    present = b"\0".join(name for name in listed.split(b"\0") if name and (ROOT / os.fsdecode(name)).exists())
    pack = ["tar", "-C", str(ROOT), "--null", "-T", "-", "-c"]
    packed = subprocess.run(pack, input=present, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-C", str(target), "-x"], input=packed, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compile", action="store_true", help="compile llama.cpp as on a machine that never did")
    parser.add_argument("--work-tree", action="store_true", help="the files as they are here, not the last commit")
    options = parser.parse_args()
    cache = "" if options.compile else subprocess.check_output([sys.executable, "-m", "pip", "cache", "dir"], text=True)
    took: dict[str, float] = {}

    def step(name: str, work: object) -> None:
        assert callable(work)
        start = time.monotonic()
        work()
        took[name] = time.monotonic() - start

    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        root = Path(folder, "root")
        step(
            "a Debian 12 (not the newcomer's)",
            lambda: subprocess.run(
                ["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True, stdout=subprocess.DEVNULL
            ),
        )
        install = ["apt-get", "install", "-y", "-qqq", "--no-install-recommends", *ASKED_FOR]
        step("Python and a compiler", lambda: inside(root, "", *install))
        step("clone", lambda: clone(root / "root/swarmnode", as_is=options.work_tree))
        make = ["make", "-C", "/root/swarmnode", "demo"]
        step("make demo", lambda: inside(root, cache.strip(), *make))
        step("make demo, again", lambda: inside(root, cache.strip(), *make))
    for name, seconds in took.items():
        print(f"{seconds / 60:6.1f} min  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
