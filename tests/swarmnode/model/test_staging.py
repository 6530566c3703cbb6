"""What was in a folder stays whole until all that replaces it is there, whenever the work ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.errors import ModelError
from swarmnode.model.staging import replace_together, staging, sweep

NAMES = ("first", "second")


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def fill(folder: Path, text: str) -> None:
    for name in NAMES:
        (folder / name).write_text(text)


def make_and_raise(folder: Path, error: BaseException) -> None:
    with staging(folder) as made:
        fill(made, "new")
        raise error


def test_replaces_together(tmp_path: Path) -> None:
    fill(tmp_path, "old")
    (tmp_path / "gone").write_text("old")
    (tmp_path / "other").write_text("stays")
    with staging(tmp_path) as made:
        fill(made, "new")
        (made / "left over").touch()
        assert (tmp_path / "first").read_text() == "old"
        replace_together(made, tmp_path, NAMES, gone=("gone", "never there"))
    assert contents(tmp_path) == {"first": "new", "second": "new", "other": "stays"}


def test_work_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    fill(tmp_path, "old")
    with pytest.raises(KeyboardInterrupt):
        make_and_raise(tmp_path, KeyboardInterrupt())
    assert contents(tmp_path) == {"first": "old", "second": "old"}
    with pytest.raises(ZeroDivisionError):
        make_and_raise(tmp_path / "a new folder", ZeroDivisionError())
    assert not (tmp_path / "a new folder").exists()


def test_a_move_that_fails_is_taken_back(tmp_path: Path) -> None:
    fill(tmp_path, "old")
    with staging(tmp_path) as made:
        (made / "first").write_text("new")  # and no second
        with pytest.raises(ModelError, match="cannot be written"):
            replace_together(made, tmp_path, NAMES)
    assert contents(tmp_path) == {"first": "old", "second": "old"}


def test_what_the_dead_left(tmp_path: Path) -> None:
    fill(tmp_path, "old")
    with staging(tmp_path) as busy:
        dead = tmp_path / f"{busy.name}0"
        dead.mkdir()
        (dead / "first").touch()
        (dead / "lock").touch()
        foreign = tmp_path / ".swarmnode-making-something"
        foreign.mkdir()
        sweep(tmp_path)
        assert busy.is_dir()
        assert foreign.is_dir()
        assert not dead.exists()
        foreign.rmdir()
    assert contents(tmp_path) == {"first": "old", "second": "old"}


@pytest.mark.parametrize("moved", [0, 1])
def test_who_died_while_moving_is_finished(tmp_path: Path, moved: int) -> None:
    dead = tmp_path / ".swarmnode-making-00000000"
    (dead / "old").mkdir(parents=True)
    (dead / "lock").touch()
    fill(dead, "new")
    fill(dead / "old", "old")
    if moved:
        (dead / "first").rename(tmp_path / "first")
    sweep(tmp_path)
    assert contents(tmp_path) == {"first": "new", "second": "new"}


def test_where_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "pack", tmp_path / ("x" * 300)):
        with pytest.raises(ModelError, match="cannot be written"), staging(folder):
            pass
