"""Stills of a node that is not there: to a terminal of another encoding, and to what is no file."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from .quiet_node import quiet_node


def test_a_still_is_written_in_any_encoding_and_into_a_pipe(tmp_path: Path) -> None:
    state = tmp_path / "node"

    def still(*arguments: str, encoding: str = "utf-8") -> bytes:
        command = [sys.executable, "-m", "swarmnode", "dashboard", "--state", str(state), *arguments]
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        return subprocess.run(command, stdout=subprocess.PIPE, env=env, check=True, timeout=100).stdout

    with quiet_node(state):
        plain = still("--once", encoding="ascii").decode("ascii")
        assert "?" not in plain.replace("? help", "")
        assert "swarmnode study - backbone of demo-moe" in plain
        assert " NAT easy " in plain
        assert "swarmnode study · backbone of demo-moe" in still("--once").decode()
        if os.name == "posix":
            assert still("--svg", "/dev/stdout").startswith(b"<svg")


@pytest.mark.skipif(os.name == "nt", reason="no pipes with names")
def test_a_picture_goes_through_a_named_pipe_and_a_link(tmp_path: Path) -> None:
    state, pipe, link = tmp_path / "node", tmp_path / "pipe", tmp_path / "link.html"
    os.mkfifo(pipe)
    link.symlink_to("page.html")
    with quiet_node(state):
        command = [sys.executable, "-m", "swarmnode", "dashboard", "--state", str(state)]
        with subprocess.Popen([*command, "--svg", str(pipe), "--html", str(link)]) as process:
            assert pipe.read_text("utf-8").startswith("<svg")
        assert process.returncode == 0
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert link.is_symlink()
    assert "study" in (tmp_path / "page.html").read_text("utf-8")
