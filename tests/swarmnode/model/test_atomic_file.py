from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from swarmnode.errors import ModelError
from swarmnode.model.atomic_file import atomic_writer, write_atomically


def test_replaces_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "file"
    write_atomically(target, b"old")
    with contextlib.suppress(ZeroDivisionError), atomic_writer(target) as file:
        file.write(b"half")
        file.write(bytes(1 // 0))
    assert target.read_bytes() == b"old"
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]


def test_errors_of_the_disk_are_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match=r"file: cannot be written \(No space left\)"),
        atomic_writer(tmp_path / "file"),
    ):
        raise OSError(28, "No space left")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelError, match="folder: cannot be written"):
        write_atomically(tmp_path / "folder", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
