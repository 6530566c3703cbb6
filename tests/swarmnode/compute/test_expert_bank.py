"""The bank refuses stacks that do not fit their site, uses mapped slices in place, and outlives its engines."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from swarmnode.bench.synthetic import random_stacks, swiglu_site
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.errors import EngineError, NobodyHolds, RecipeError
from swarmnode.model.slicing import StackedTensor

SITE, SHAPES = swiglu_site(64, 32, 8, 2, types=(8, 8, 8))
X = np.random.default_rng(0).standard_normal((2, 64), np.float32)
ROWS, EXPERTS = np.array([0, 1], np.int32), np.array([6, 2], np.int32)


def stacks(*experts: int) -> dict[str, StackedTensor]:
    return random_stacks(SHAPES, experts)


def rows_of(bank: ExpertBank) -> bytes:
    engine = ExpertEngine(bank)
    answer = engine.raw_rows(0, X, ROWS, EXPERTS)
    engine.close()
    return answer.tobytes()


def test_a_mapped_file_is_used_in_place(tmp_path: Path) -> None:
    mapped = {}
    for number, (name, stack) in enumerate(stacks(2, 6).items()):
        (tmp_path / str(number)).write_bytes(bytes(32) + stack.data.tobytes())
        data = np.memmap(tmp_path / str(number), np.uint8, "r", offset=32)
        mapped[name] = dataclasses.replace(stack, data=data)
    bank = ExpertBank([SITE], {0: mapped}, "cpu")
    first = rows_of(bank)
    assert bank.nbytes == sum(stack.data.nbytes for stack in mapped.values())
    down = tmp_path / "2"
    down.write_bytes(bytes(down.stat().st_size))  # the file changes under the bank: nothing was copied
    assert rows_of(bank) != first
    assert not any(rows_of(bank))
    bank.close()


def test_data_that_is_not_aligned_is_copied() -> None:
    odd = {}
    for name, stack in stacks(2, 6).items():
        raw = np.zeros(len(stack.data) + 64, np.uint8)
        start = -raw.ctypes.data % 32 + 1
        raw[start : start + len(stack.data)] = stack.data
        odd[name] = dataclasses.replace(stack, data=raw[start : start + len(stack.data)])
    aligned, misaligned = ExpertBank([SITE], {0: stacks(2, 6)}, "cpu"), ExpertBank([SITE], {0: odd}, "cpu")
    assert rows_of(aligned) == rows_of(misaligned)
    aligned.close()
    misaligned.close()


def test_sites_without_experts_are_left_out() -> None:
    bank = ExpertBank([SITE], {0: stacks()}, "cpu")
    assert not bank.holdings
    engine = ExpertEngine(bank)
    with pytest.raises(NobodyHolds, match="layer 0: nobody reachable holds experts 2, 6"):
        engine.raw_rows(0, X, ROWS, EXPERTS)
    engine.close()
    bank.close()
    assert not ExpertBank([SITE], {}, "cpu").holdings


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"experts": (2, 2)}, "twice"),
        ({"experts": (2, 8)}, "does not exist"),
        ({"experts": (2, 5, 6)}, "bytes in a row for 3 experts"),
        ({"ne": (64, 16)}, "step 2"),
        ({"ggml_type": 2}, "bytes in a row"),
        ({"ggml_type": 26}, "cannot be computed"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(change: dict[str, object], reason: str) -> None:
    names = SITE.tensors if "experts" in change else SITE.tensors[:1]
    made = stacks(2, 6)
    for name in names:
        made[name] = dataclasses.replace(made[name], **change)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=reason):
        ExpertBank([SITE], {0: made}, "cpu")


def test_stacks_of_one_site_must_hold_the_same_experts() -> None:
    made = stacks(2, 6)
    made[SITE.tensors[1]] = stacks(6, 2)[SITE.tensors[1]]
    with pytest.raises(RecipeError, match="hold different experts"):
        ExpertBank([SITE], {0: made}, "cpu")


def test_the_weights_stay_until_the_last_engine_closes() -> None:
    bank = ExpertBank([SITE], {0: stacks(2, 6)}, "cpu")
    expected = rows_of(bank)
    engine = ExpertEngine(bank)
    bank.close()
    assert engine.raw_rows(0, X, ROWS, EXPERTS).tobytes() == expected
    with pytest.raises(EngineError, match="closed"):
        ExpertEngine(bank)
    engine.close()
    bank.close()


def test_impossible_thread_counts_are_refused() -> None:
    bank = ExpertBank([SITE], {0: stacks(2, 6)}, "cpu")
    with pytest.raises(EngineError, match="threads"):
        ExpertEngine(bank, threads=0)
    bank.close()
