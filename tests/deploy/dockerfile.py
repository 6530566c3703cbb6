"""Runs a Dockerfile's own steps without a container engine: each stage an overlay over a Debian root. SHELL.

What python:3.11-slim is to a container engine, a root made by mmdebstrap is here (Debian 12's Python is 3.11). Every
step runs in mount and process namespaces of its own, so nothing is left mounted, however it ends. Known: FROM … AS,
ARG, ENV, WORKDIR, RUN, COPY (also --from, .dockerignore), USER, EXPOSE, VOLUME, HEALTHCHECK CMD, ENTRYPOINT and CMD,
all in the form these files use; anything else is an error. Needs root. Called by the tests of deploy/.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

BASE = "python:3.11-slim"
BASE_PACKAGES = "ca-certificates,python3,python3-venv,python3-pip"
STEP_SECONDS = 900
TRUST = Path("/etc/ssl/certs/ca-certificates.crt")  # as a builder behind a proxy is given its authorities
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# $1: folder of the mount points, then pairs "name=lower:upper" up to "--", then the command, run with $ROOT mounted.
MOUNTED = """
set -e
folder=$1; shift
while [ "$1" != -- ]; do
  name=${1%%=*}; layers=${1#*=}
  mkdir -p "$folder/$name" "${layers##*:}.work"
  mount -t overlay overlay -o "lowerdir=${layers%:*},upperdir=${layers##*:},workdir=${layers##*:}.work" "$folder/$name"
  shift
done
shift
exec "$@"
"""
# $1: the root, $2: setpriv's arguments, $3: folder to be in; then the command. READ_ONLY=1 as docker run --read-only.
ENTERED = """
set -e
cd "$1"; who=$2; where=$3; shift 3
mount -t proc proc proc
mount -t tmpfs tmpfs dev
for device in null zero full random urandom tty; do cp -a /dev/$device dev/; done
ln -s /proc/self/fd dev/fd
mkdir dev/shm
mount -t tmpfs tmpfs tmp
touch etc/resolv.conf
mount --bind /etc/resolv.conf etc/resolv.conf
if [ -n "$TRUST_FILE" ]; then mount --bind "$TRUST_FILE" etc/ssl/certs/ca-certificates.crt; fi
if [ -n "$PIP_CACHE" ]; then mkdir -p root/.cache/pip; mount --bind "$PIP_CACHE" root/.cache/pip; fi
if [ -n "$READ_ONLY" ]; then mount -o remount,bind,ro .; fi
unset TRUST_FILE PIP_CACHE READ_ONLY
# shellcheck disable=SC2086
exec chroot . /usr/bin/setpriv $who -- /usr/bin/env --chdir="$where" "$@"
"""


class DockerfileError(Exception):
    """A step failed, or is not known here; the text is the step and what it printed."""


@dataclass
class Image:
    """A stage: layers below and its own, and what a container of it is started with."""

    name: str
    lower: str
    upper: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    exposed: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    args: dict[str, str] = field(default_factory=dict)

    @property
    def installed_bytes(self) -> int:
        """What this stage adds to its base."""
        return tree_bytes(self.upper)

    def starting(self, command: Sequence[str], *, read_only: bool = True) -> list[str]:
        """The command line that runs something in a container of this image, as its user, without any capability.

        The process keeps its id; the network is the caller's.
        """
        uid, gid = self.user.split(":")
        who = f"--reuid {uid} --regid {gid} --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all"
        env = [f"{key}={value}" for key, value in {"PATH": PATH, **self.env}.items()]
        outer = ["env", "-i", f"PATH={PATH}", *(["READ_ONLY=1"] if read_only else [])]
        inner = ["sh", "-c", ENTERED, "sh", f"{self.upper}.mnt/root", who, self.workdir, "-i", *env, *command]
        return ["unshare", "--mount", *outer, *self._mounted({"root": self}, inner)]

    def _mounted(self, mounts: Mapping[str, Image], command: Sequence[str]) -> list[str]:
        pairs = [f"{name}={image.lower}:{image.upper}" for name, image in mounts.items()]
        return ["sh", "-c", MOUNTED, "sh", f"{self.upper}.mnt", *pairs, "--", *command]


def tree_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, hard links once."""
    seen = {(s.st_dev, s.st_ino): s.st_size for s in (p.lstat() for p in folder.rglob("*") if not p.is_dir())}
    return sum(seen.values())


def make_base(folder: Path) -> Path:
    """A Debian 12 with Python 3.11 and pip. Raises CalledProcessError."""
    root = folder / "base"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return root


class Builder:
    """Builds the images of one Dockerfile."""

    def __init__(self, base: Path, folder: Path, context: Path, pip_cache: Path | None = None) -> None:
        """`pip_cache`: lent to the steps, as a builder that has built before has one."""
        self._base, self._folder, self._context, self._pip_cache = base, folder, context, pip_cache
        self.images: dict[str, Image] = {}

    def build(self, file: Path, until: str = "") -> Image:
        """The last stage, or the first whose next step contains the text `until`. Raises DockerfileError."""
        image: Image | None = None
        for step in DockerfileParser(path=str(file)).structure:
            name, value = step["instruction"], step["value"]
            if name == "COMMENT":
                continue
            if until and until in value:
                break
            if name == "FROM":
                image = self._stage(value)
            elif image is None:
                raise DockerfileError(f"{name} before the first FROM")
            else:
                self._step(image, name, value)
        if image is None:
            raise DockerfileError(f"{file} has no FROM")
        return image

    def _stage(self, value: str) -> Image:
        base, _, name = value.partition(" AS ")
        if base != BASE:
            raise DockerfileError(f"FROM {base}: only {BASE} is known here")
        name = name or "final"
        upper = self._folder / name
        upper.mkdir(parents=True)
        self.images[name] = Image(name, str(self._base), upper)
        return self.images[name]

    def _step(self, image: Image, name: str, value: str) -> None:
        match name:
            case "ARG":
                key, _, default = value.partition("=")
                image.args[key] = "".join(shlex.split(default))
            case "ENV":
                known = {"PATH": PATH, **image.env}
                pairs = dict(part.split("=", 1) for part in shlex.split(value))
                image.env |= {key: text.replace("$PATH", known["PATH"]) for key, text in pairs.items()}
            case "WORKDIR":
                image.workdir = value
                self._run(image, ["mkdir", "-p", value], workdir="/")
            case "RUN":
                self._run(image, ["sh", "-c", value])
            case "COPY":
                self._copy(image, shlex.split(value))
            case "USER":
                image.user = value
            case "EXPOSE":
                image.exposed = value.split()
            case "VOLUME":
                image.volumes.append(value)
            case "HEALTHCHECK":
                image.healthcheck = json.loads(value[value.index("CMD ") + 4 :])
            case "ENTRYPOINT":
                image.entrypoint = json.loads(value)
            case "CMD":
                image.command = json.loads(value)
            case _:
                raise DockerfileError(f"{name} is not known here")

    def _run(self, image: Image, command: Sequence[str], workdir: str | None = None) -> None:
        env = {"PATH": PATH, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", "TMPDIR": "/tmp"}
        env |= {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "http", "HTTP"))}
        env.pop("PIP_FIND_LINKS", None)
        env |= image.args | image.env
        outer = {"TRUST_FILE": str(TRUST) if TRUST.exists() else "", "PIP_CACHE": str(self._pip_cache or "")}
        pairs = [f"{key}={value}" for key, value in env.items()]
        inner = ["sh", "-c", ENTERED, "sh", f"{image.upper}.mnt/root", "--reuid 0", workdir or image.workdir]
        self._do(image, {"root": image}, [*inner, "-i", *pairs, *command], " ".join(command), outer)

    def _copy(self, image: Image, words: Sequence[str]) -> None:
        source_image = None
        if words[0].startswith("--from="):
            source_image = self.images[words[0].removeprefix("--from=")]
            words = words[1:]
        *sources, target = words
        mounts = {"root": image} | ({"from": source_image} if source_image is not None else {})
        top = f"{image.upper}.mnt/from" if source_image is not None else str(self._context)
        into = f"{image.upper}.mnt/root" + os.path.normpath(os.path.join(image.workdir, target))
        for source in sources:
            path = f"{top}/{source.strip('/')}"
            if source_image is None and (self._ignored(source) or not os.path.exists(path)):
                raise DockerfileError(f"COPY {source}: not in the context (see .dockerignore)")
            is_folder = os.path.isdir(path) if source_image is None else True
            if is_folder:
                script = 'mkdir -p "$2" && cp -a "$1/." "$2" && find "$2" -name __pycache__ -prune -exec rm -r {} +'
            else:
                into_file = into if not target.endswith("/") else f"{into}/{Path(source).name}"
                script = f'mkdir -p "$(dirname {shlex.quote(into_file)})" && cp "$1" {shlex.quote(into_file)}'
            if source_image is not None:
                script = 'mkdir -p "$2" && cp -a "$1/." "$2"'
            self._do(image, mounts, ["sh", "-c", script, "sh", path, into], f"COPY {source}", {})

    def _ignored(self, source: str) -> bool:
        file = self._context / ".dockerignore"
        ignored = False
        for line in file.read_text().splitlines() if file.exists() else []:
            pattern = line.strip()
            if pattern and not pattern.startswith("#"):
                keep = pattern.startswith("!")
                if fnmatch.fnmatch(source.strip("/"), pattern.lstrip("!")):
                    ignored = not keep
        return ignored

    def _do(
        self, image: Image, mounts: Mapping[str, Image], command: Sequence[str], what: str, env: Mapping[str, str]
    ) -> None:
        namespaces = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
        done = subprocess.run(
            [*namespaces, *image._mounted(mounts, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_SECONDS,
            env={"PATH": PATH, **env},
            check=False,
        )
        if done.returncode:
            raise DockerfileError(f"{image.name}: {what}\nexit code {done.returncode}\n{done.stdout[-4000:]}")


def missing() -> str:
    """What this machine lacks for it, in a word; empty when it can."""
    if os.geteuid() != 0:
        return "root"
    return next((tool for tool in ("mmdebstrap", "unshare", "setpriv") if not shutil.which(tool)), "")
