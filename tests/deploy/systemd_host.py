"""A real systemd as the first process of namespaces of its own, over this machine's files: runs a unit as it will run.

What it writes lies in an overlay; /proc/sys and /sys are read-only; its control groups are below one that goes at the
end. The network is the caller's. Needs root and cgroup v2. Called by the tests of deploy/systemd.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.deploy.dockerfile import PATH

SYSTEMD = Path("/lib/systemd/systemd")
START_SECONDS = 60.0
HOST = """
set -e
echo $$ > "$2/cgroup.procs"
exec unshare --mount --pid --cgroup --ipc --uts --fork --kill-child --propagation private sh -c '
set -e
cd "$1"
mkdir -p work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
mount -t proc proc root/proc
mount --bind root/proc/sys root/proc/sys
mount -o remount,bind,ro root/proc/sys
mount -t tmpfs tmpfs root/dev
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty root/dev/
mkdir root/dev/shm root/dev/pts root/dev/mqueue
mount -t devpts -o newinstance,ptmxmode=0666 devpts root/dev/pts
ln -s pts/ptmx root/dev/ptmx
mount -t tmpfs tmpfs root/run
mount -t tmpfs tmpfs root/tmp
mount -t sysfs -o ro sysfs root/sys
mount -t tmpfs tmpfs root/sys/fs/cgroup
mount -t cgroup2 cgroup2 root/sys/fs/cgroup
cd root
pivot_root . mnt
umount -l /mnt
mount --make-rshared /
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit="$2" \
  --log-target=null --show-status=no </dev/null
' sh "$1" "$3"
"""


class SystemdHost:
    """with SystemdHost(unit, {"/opt/relay": folder}) as host: the unit is active."""

    def __init__(self, unit: Path, files: dict[str, Path], drop_in: str = "", entering: Sequence[str] = ()) -> None:
        """`files`: folders by the path at which they are seen. `drop_in`: as of `systemctl edit`.

        `entering`: a command that runs it somewhere, as in a host of the NAT lab.
        """
        self.unit = unit.name
        self._folder = Path(tempfile.mkdtemp(prefix="systemd-host-"))
        upper = self._folder / "upper"
        units = upper / "etc/systemd/system"
        units.mkdir(parents=True)
        # Nothing but this unit and what it needs: no network manager of this machine is started or waited for.
        shutil.copy(unit, units / unit.name)
        for target in ("network-online.target", "sysinit.target", "basic.target", "sockets.target", "timers.target"):
            (units / target).write_text(f"[Unit]\nDescription={target}\nDefaultDependencies=no\n")
        if drop_in:
            (units / f"{unit.name}.d").mkdir()
            (units / f"{unit.name}.d/override.conf").write_text(drop_in)
        for seen, folder in files.items():
            shutil.copytree(folder, upper / seen.strip("/"), symlinks=True)
        self._group = _cgroup2() / self._folder.name
        self._group.mkdir()
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "sh",
            "-c",
            HOST,
            "sh",
            str(self._folder),
            str(self._group),
            self.unit,
        ]
        self._process: subprocess.Popen[Any] = subprocess.Popen(
            [*entering, *command], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_SECONDS
        while (state := self.systemctl("is-active", self.unit)) != "active":
            if time.monotonic() > deadline or state == "failed" or self._process.poll() is not None:
                told = self.systemctl("status", "--full", "--no-pager", self.unit)
                self.close()
                raise AssertionError(f"{self.unit} is {state}:\n{told}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def first(self) -> int:
        """The process id of systemd itself; 0 while there is none."""
        try:
            return int((self._group / "init.scope/cgroup.procs").read_text().split()[0])
        except (OSError, IndexError):
            return 0

    @property
    def main(self) -> int:
        """The process id, as this machine sees it, of the unit's main process."""
        return int((self._group / "system.slice" / self.unit / "cgroup.procs").read_text().split()[0])

    def systemctl(self, *arguments: str) -> str:
        """What systemctl in there prints."""
        if not self.first:
            return ""
        inside = ["nsenter", "-t", str(self.first), "-m", "-p", "-i", "-u", "-C"]
        command = [*inside, "env", "-i", f"PATH={PATH}", "timeout", "-s", "KILL", "20", "systemctl", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    def close(self) -> None:
        """End all of it."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)  # unshare; --kill-child takes systemd along
        self._process.wait(10)
        deadline = time.monotonic() + 10
        while self._group.exists() and time.monotonic() < deadline:
            for group in sorted((path.parent for path in self._group.rglob("cgroup.procs")), reverse=True):
                with contextlib.suppress(OSError):  # its processes are going
                    group.rmdir()
            time.sleep(0.05)
        shutil.rmtree(self._folder, ignore_errors=True)


def _cgroup2() -> Path:
    """Where cgroup v2 is mounted. Raises StopIteration where it is not."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return Path(next(fields[1] for fields in mounts if fields[2] == "cgroup2"))


def why_not() -> str:
    """What is missing for it, in words; empty where it works."""
    if os.geteuid() != 0:
        return "a systemd of one's own needs root"
    if not SYSTEMD.exists() or not shutil.which("nsenter"):
        return "systemd is not installed"
    try:
        probe = _cgroup2() / f"systemd-probe-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
    except (OSError, StopIteration):
        return "there is no cgroup v2 to write to"
    return ""
