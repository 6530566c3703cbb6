"""A real terminal for tests: tmux with a server of its own, and what is seen in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TMUX = shutil.which("tmux")
needs_tmux = pytest.mark.skipif(
    TMUX is None and os.environ.get("NATLAB_REQUIRE") != "1", reason="tmux is not installed"
)
UP = f"{sys.executable} -m swarmnode up --listen 127.0.0.1:0 --no-lan --threads 1"
PATIENCE_S = 40.0


class Tmux:
    """One window with a shell in it."""

    def __init__(self, folder: Path, width: int, height: int, environment: dict[str, str]) -> None:
        assert TMUX is not None, "NATLAB_REQUIRE=1, but tmux is not installed"
        self._command = [TMUX, "-S", f"/tmp/swarmnode-tmux-{uuid.uuid4().hex[:12]}"]
        given = {**os.environ, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **environment}
        given.pop("TMUX", None)
        subprocess.run(
            [*self._command, "-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height),
             "-c", str(folder), "bash --norc --noprofile"],
            env=given, check=True,
        )  # fmt: skip

    def run(self, *arguments: str) -> str:
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def type(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def enter(self, command: str) -> None:
        """A command for the shell."""
        self.run("send-keys", "-l", command)
        self.type("Enter")

    def resize(self, width: int, height: int) -> None:
        self.run("resize-window", "-x", str(width), "-y", str(height))

    def screen(self, *, escapes: bool = False, joined: bool = False) -> str:
        """What is seen now; wrapped lines as one with `joined`."""
        return self.run("capture-pane", "-p", *(["-e"] if escapes else []), *(["-J"] if joined else []))

    def is_alternate(self) -> bool:
        return self.run("display-message", "-p", "#{alternate_on}").strip() == "1"

    def wait_for(self, *texts: str, absent: tuple[str, ...] = (), joined: bool = False) -> str:
        """The screen on which all of these are seen and none of those."""
        end = time.monotonic() + PATIENCE_S
        while True:
            screen = self.screen(joined=joined)
            if all(text in screen for text in texts) and not any(text in screen for text in absent):
                return screen
            assert time.monotonic() < end, f"not seen: {texts} without {absent}; the screen is\n{screen}"
            time.sleep(0.05)

    def close(self) -> None:
        subprocess.run([*self._command, "kill-server"], capture_output=True, check=False)
        Path(self._command[2]).unlink(missing_ok=True)


@contextmanager
def terminal(folder: Path, width: int = 80, height: int = 24, **environment: str) -> Iterator[Tmux]:
    one = Tmux(folder, width, height, environment)
    try:
        yield one
    finally:
        one.close()
