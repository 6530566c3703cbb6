"""`onboard` and `gate` of a file that is no model they can run: one line that names it, exit code 1, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from swarmnode.cli import main
from swarmnode.model.gguf_metadata import ValueType
from swarmnode.model.random_model import RandomModel, write_random_model
from tests.swarmnode.model.gguf_editor import Editor, Line

U32, TEXT = ValueType.UINT32, ValueType.STRING
Edit = Callable[[Editor], None]


def scales(e: Editor) -> None:
    values = np.array([1, 1, np.nan, 1, 1, 1, 1, 1], np.float32)
    e.lines.append(Line("blk.1.ffn_down_exps.scale", 0, (8,), 0, values.tobytes()))
    e.pack()


def rename(old: str, new: str) -> Edit:
    """Another architecture, with its keys."""

    def edit(e: Editor) -> None:
        pairs = [(key, raw) for key, raw in e.pairs.items() if key.startswith(old + ".")]
        for key, raw in pairs:
            del e.pairs[key]
            e.pairs[new + key.removeprefix(old)] = raw.replace(old.encode(), new.encode(), 1)
        e.set("general.architecture", TEXT, new)

    return edit


BROKEN: dict[str, tuple[Edit, str]] = {
    "counts": (lambda e: e.set("qwen2moe.expert_count", U32, 9), "stacks 8 experts, but qwen2moe.expert_count is 9"),
    "scales": (scales, "blk.1.ffn_down_exps.scale of expert 2 holds NaN or infinity"),
    "future": (rename("qwen2moe", "qwen9moe"), "does not know the architecture 'qwen9moe'; update"),
    "shapes": (
        lambda e: e.set("qwen2moe.attention.head_count", U32, 31),
        "llama.cpp cannot load it: check_tensor_dims: tensor 'blk.0.attn_",
    ),
    "assertion": (lambda e: e.set("qwen2moe.expert_group_count", U32, 8), "llama.cpp ended its process over this file"),
}


def broken(folder: Path, edit: Edit) -> Path:
    [path] = write_random_model(RandomModel(d_model=64, n_layers=2, vocab=300), folder / "whole.gguf")
    edited = Editor.of(path)
    edit(edited)
    path.unlink()
    return edited.write(folder / "broken.gguf")


@pytest.mark.parametrize("command", ["onboard", "gate"])
@pytest.mark.parametrize("case", BROKEN)
def test_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, case: str
) -> None:
    edit, message = BROKEN[case]
    path = broken(tmp_path, edit)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = main([command, str(path), *(["--json"] if command == "onboard" else [])])
    out, err = capsys.readouterr()
    assert code == 1
    assert len(err.splitlines()) == 1, err
    assert message in err
    assert "broken.gguf: " in err
    assert out.strip() == ""
    assert [file.name for file in tmp_path.iterdir() if file.suffix in (".gguf", ".pack")] == ["broken.gguf"]
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    """In a terminal's process: no page of log, no core dump's message beside the line."""
    for edit, text in ((BROKEN["assertion"]), (BROKEN["counts"])):
        path = broken(tmp_path, edit)
        command = [sys.executable, "-m", "swarmnode", "onboard", str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"}, check=False
        )
        assert done.returncode == 1
        assert text in " ".join(done.stderr.split())
        assert "GGML_ASSERT" not in done.stdout
        assert "Traceback" not in done.stderr


def test_a_text_and_a_folder_are_no_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text(json.dumps({"not": "a model, but long enough"}))
    for path, code in ((tmp_path / "text.gguf", 1), (tmp_path, 1), (tmp_path / "absent.gguf", 1)):
        assert main(["onboard", str(path)]) == code
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["onboard"]) == 2
