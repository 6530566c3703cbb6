"""docs/models.md is what its tool makes of the results beside it, and those are of today's code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from swarmnode.architectures.check import ArchResult
from swarmnode.architectures.real_shapes import SHAPES, ShapeResult
from swarmnode.architectures.tiny_model import ARCHITECTURES
from swarmnode.sizing.shapes import MODELS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "tools" / "models_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(tool: ModuleType) -> None:
    assert tool.main(["--check"]) == 0, "run tools/models_page.py"


def test_results_are_of_these_models_and_architectures(tool: ModuleType) -> None:
    shapes = tool.load(tool.SHAPE_FILE)
    assert [row["model"] for row in shapes] == list(SHAPES)
    for row, shape in zip(shapes, MODELS, strict=True):
        assert (row["arch"], row["experts"], row["k"]) == (shape.arch, shape.n_expert, shape.k)
        assert (row["d"], row["d_ff"], row["type"]) == (shape.d, shape.d_ff, shape.expert_type)
        assert row["bytes_per_expert"] == shape.expert_bytes
        assert row["passed"], row["error"]
    rows = tool.load(tool.ARCH_FILE)
    assert {row["arch"] for row in rows} == set(ARCHITECTURES)
    for row in rows:
        assert row["passed"], (row["arch"], row["variant"], row["type"], row["error"])


def test_a_page_of_other_results(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGE", "ARCH_FILE", "SHAPE_FILE"):
        monkeypatch.setattr(tool, name, tmp_path / name)
    cosines = {"partial_f32": 1.0, "f16": 0.999949, "int8": 0.99989, "fp8": 0.999}
    passed = ArchResult(
        arch="qwen3moe",
        variant="base",
        type="F32",
        identical=True,
        layer_cosine=cosines,
        rollback="refused",
        passed=True,
    )
    failed = ArchResult(arch="llama4", variant="base", type="F32", error="it is red")
    shape = ShapeResult(
        model="GLM-4.5/4.6", arch="glm4moe", type="Q4_K", sites=89, experts=160, k=8, shared_expert=True, d=5120,
        d_ff=1536, identical=True, layer_cosine=cosines, bytes_per_expert=13_271_040,
        token_bytes={"f16": 20_588, "int8": 10_508}, passed=True,
    )  # fmt: skip
    for name, rows in (("arch", [passed, failed]), ("shape", [shape])):
        (tmp_path / name).write_bytes(msgspec.json.encode(rows))
    assert tool.main(["--architectures", str(tmp_path / "arch"), "--shapes", str(tmp_path / "shape")]) == 0
    text = (tmp_path / "PAGE").read_text("utf-8")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert {f"`{arch}`" for arch in ARCHITECTURES} <= lines.keys()
    assert "| base | F32 | yes | 1.0000000 | 0.99994 | 0.99989 | 0.99900 | no |" in lines["`qwen3moe`"]
    assert "none, see below" in lines["`llama4`"]
    assert "- `llama4` base F32: it is red" in text
    models = {
        line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ") and "GiB" not in line
    }
    assert len([name for name in models if any(name.startswith(shape.name) for shape in MODELS)]) == 12
    glm = next(line for name, line in models.items() if name.startswith("GLM-4.5/4.6"))
    assert "| 160, 8 | yes | 13.3 Q4_K | 13 | yes | 0.99994 | 0.99989 | 0.99900 | 20.6 · 10.5 |" in glm
    assert tool.main(["--check"]) == 0
