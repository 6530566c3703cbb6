"""Real text as tokens, for measuring what a change does to a model: the same tokens every time.

Without a file of the user's own it is source code of the Python standard library, which every machine has. Called by
the gate and by the benchmarks.
"""

from __future__ import annotations

import codecs
import hashlib
import math
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from swarmnode.backbone.llama import LlamaModel
from swarmnode.errors import ModelError, UsageError

HELD_OUT = "Python standard library"  # what to call the tokens of `held_out_tokens`
# The split of the demo model's recipe (tools/train_demo_model.py): by file, one in twenty, some kinds in neither part.
_HELD_OUT_SHARE = 20
_IN_NEITHER = re.compile(r"(^|/)site-packages/|(^|/)[^/]*data[^/]*/|^encodings/")
_MAX_FILE = 64 << 10  # bytes; the recipe's bound for tests, which holds for every file
# A text that repeats itself is foretold by any model. Of 6,000 windows of so many tokens out of source code and prose,
# with a vocabulary of 2,048, half have 223 different ones or more, and those with fewer than 64 are tables of numbers.
WINDOW = 1024
LEAST_DIFFERENT = 64
_LEAST_WINDOWS = 0.75  # of them: a real text may have its table
_TOKEN_BYTES = 8  # bytes of text read per token wanted, at first; real tokenizers have 3 to 5


def held_out_tokens(model: LlamaModel, count: int) -> list[int]:
    """Tokens of standard-library sources that the demo model was not trained on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    tokens: list[int] = []
    for path in _held_out_files(root):
        tokens += model.tokenize(path.read_text("utf-8", "ignore"), special=False)
        if len(tokens) >= count:
            return tokens[:count]
    raise ModelError(f"{root}: the held-out sources have only {len(tokens)} tokens of {count}")


def _held_out_files(root: Path) -> list[Path]:
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in ("site-packages", "__pycache__")]
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py" and _is_held_out(path.relative_to(root).as_posix()):
                found.append(path)
    return sorted(path for path in found if path.stat().st_size <= _MAX_FILE)


def _is_held_out(name: str) -> bool:
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return not bucket % _HELD_OUT_SHARE and not _IN_NEITHER.search(name)


def file_tokens(model: LlamaModel, path: Path, count: int) -> list[int]:
    """The first tokens of a text file; no more of it is read than they take.

    UsageError where it has not so many, is no text, or repeats itself.
    """
    size = count * _TOKEN_BYTES
    while True:
        try:
            with path.open("rb") as file:
                data = file.read(size)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
        whole = len(data) < size
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)  # a character may be cut
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: cannot be read as text: byte {error.start} is not UTF-8") from None
        if (at := text.find("\0")) >= 0:
            raise UsageError(f"{path}: cannot be read as text: character {at} is NUL")
        tokens = model.tokenize(text, special=False)
        if len(tokens) > count or (whole and len(tokens) == count):  # the last token of a cut text may be another one
            _check_varied(path, tokens[:count])
            return tokens[:count]
        if whole:
            raise UsageError(f"{path}: has only {len(tokens)} tokens of this model, and {count} are needed")
        size *= 2


def _check_varied(path: Path, tokens: Sequence[int]) -> None:
    """Raise UsageError where too many windows have too few different tokens; of less than one nothing is said."""
    windows = [len(set(tokens[at : at + WINDOW])) for at in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    few = [index for index, different in enumerate(windows) if different < LEAST_DIFFERENT]
    if len(windows) - len(few) < math.ceil(_LEAST_WINDOWS * len(windows)):
        at = few[0] * WINDOW
        raise UsageError(
            f"{path}: repeats itself: tokens {at} to {at + WINDOW} are only {windows[few[0]]} different ones, "
            f"{LEAST_DIFFERENT} are needed; give a text of more variety"
        )
