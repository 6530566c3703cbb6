"""Folders of the gate: gone with it, and with the next one where it was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from swarmnode.errors import ModelError
from swarmnode.gate.temporary import PREFIX, gate_folder

KILLED = """
import os, sys
from swarmnode.gate.temporary import gate_folder
with gate_folder() as folder:
    (folder / "rows").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_it_is_gone_afterwards(tmp_path: Path) -> None:
    with gate_folder() as folder:
        assert folder.parent == tmp_path
        (folder / "more").mkdir()
        (folder / "more" / "rows").write_text("x")
        with gate_folder() as other:  # which leaves the first one alone
            assert other != folder
        assert (folder / "more" / "rows").exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    left = Path(process.stdout.readline().decode().strip())
    with gate_folder():
        assert (left / "rows").exists()  # it lives
    process.kill()
    process.communicate()
    assert (left / "rows").exists()
    with gate_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_what_is_not_surely_ones_own_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    open_to_all = tmp_path / f"{PREFIX}open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (open_to_all / "lock").symlink_to(victim)
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (target / "lock").write_text("")
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}new").mkdir(mode=0o700)  # a process that is about to lock it
    before = {path.name for path in tmp_path.iterdir()}
    with gate_folder():
        pass
    assert {path.name for path in tmp_path.iterdir()} == before
    assert victim.read_text() == "mine"
    assert (target / "lock").exists()


def test_no_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ModelError, match="no temporary folder can be made"), gate_folder():
        pass
