"""The same tokens every time, and one line for a file that cannot serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.backbone.llama import LlamaModel
from swarmnode.errors import ModelError, UsageError
from swarmnode.gate.text import file_tokens, held_out_tokens
from swarmnode.onboard import ModelPack


@pytest.fixture(scope="module")
def model(demo_pack: ModelPack) -> Iterator[LlamaModel]:
    loaded = LlamaModel(demo_pack.backbone, remote_experts=True)
    yield loaded
    loaded.close()


def test_fewer_tokens_are_the_first_of_more(model: LlamaModel) -> None:
    many = held_out_tokens(model, 3000)
    assert len(many) == 3000
    assert held_out_tokens(model, 100) == many[:100]
    assert b"    def " in b"".join(map(model.piece, many))
    with pytest.raises(ModelError, match="held-out sources have only"):
        held_out_tokens(model, 10_000_000)


def test_a_file_of_ones_own(model: LlamaModel, tmp_path: Path) -> None:
    text = "".join(f"def größe{i}(x):\n    return x * {i * i}  # Fläche, {i % 97:b} von {i:x}\n" for i in range(400))
    file = tmp_path / "mine.txt"
    file.write_text(text)
    tokens = model.tokenize(text, special=False)
    assert file_tokens(model, file, len(tokens)) == tokens
    for count in (1, 17, 500, len(tokens) - 1):  # however little of the file is read for them
        assert file_tokens(model, file, count) == tokens[:count]
    with pytest.raises(UsageError, match=f"has only {len(tokens)} tokens"):
        file_tokens(model, file, len(tokens) + 1)


def test_files_that_are_no_text(model: LlamaModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        file_tokens(model, tmp_path / "none", 10)
    with pytest.raises(UsageError, match="cannot be read"):
        file_tokens(model, tmp_path, 10)
    noise = tmp_path / "noise"
    noise.write_bytes(b"\xff\xfe\x80" * 20)
    with pytest.raises(UsageError, match="not UTF-8"):
        file_tokens(model, noise, 100)
    noise.write_bytes(b"some text \xff\xfe\x80 and " * 1000)  # longer than what is read of it
    with pytest.raises(UsageError, match="byte 10 is not UTF-8"):
        file_tokens(model, noise, 100)
    noise.write_bytes(b"some\0text" * 1000)
    with pytest.raises(UsageError, match="character 4 is NUL"):
        file_tokens(model, noise, 100)


def test_a_text_that_repeats_itself(model: LlamaModel, tmp_path: Path) -> None:
    file = tmp_path / "again.txt"
    file.write_text("the same again and again, " * 4000)
    with pytest.raises(
        UsageError, match=r"again\.txt: repeats itself: tokens 0 to 1024 are only \d+ different"
    ) as caught:
        file_tokens(model, file, 2049)
    assert "\n" not in str(caught.value)
    varied = b"".join(map(model.piece, held_out_tokens(model, 8000))).decode("utf-8", "ignore")
    file.write_text(varied)
    count = len(model.tokenize(varied, special=False)) // 4  # real text, then as much of one line as makes a third
    assert len(file_tokens(model, file, count * 3)) == count * 3
    file.write_text(varied[: len(varied) // 2] + "x = 1\n" * len(varied))
    with pytest.raises(UsageError, match="repeats itself"):
        file_tokens(model, file, 8000)
