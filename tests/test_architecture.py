"""What may import what is held by import-linter (`make lint`); here: what a command loads, and what is locked."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEAVY = ("numpy", "gguf", "llama_cpp", "qh3", "aioquic", "cryptography", "jinja2", "asyncio")


def loaded_by(code: str) -> set[str]:
    """Top-level modules in sys.modules after running `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint('\\n'.join({{m.split('.')[0] for m in sys.modules}}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stderr.split())


def test_help_loads_nothing_that_no_command_needs() -> None:
    loaded = loaded_by("from swarmnode.cli import main\nmain(['--help'])")
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("module", ["relay", "relay.__main__"])
def test_the_relay_loads_no_model_stack(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert not loaded & {"numpy", "gguf", "llama_cpp", "swarmnode", "qh3", "aioquic"}


def test_transport_loads_nothing_of_models() -> None:
    loaded = loaded_by("import transport.endpoint")
    assert not loaded & {"numpy", "gguf", "llama_cpp", "swarmnode", "relay", "typer", "rich"}


@pytest.mark.parametrize(
    "module", ["swarmnode.backbone.graph_trace", "swarmnode.compute.recipe", "swarmnode.dispatch.frames"]
)
def test_pure_rooms_load_no_engine_and_no_network(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert not loaded & {"llama_cpp", "qh3", "aioquic", "typer", "rich"}


def test_the_lock_file_has_everything_that_pyproject_asks_for() -> None:
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    locked = dict(re.findall(r"^([a-z0-9._-]+)==([^ ;]+)", (root / "requirements.lock").read_text(), re.MULTILINE))
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement.name


def test_the_tests_that_the_documentation_names_exist() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs" / "reach.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)?::(test_\w+)`", text)
    assert len(named) >= 12
    file = ""
    for given, name in named:
        file = given or file
        assert re.search(rf"^(async )?def {name}\(", (root / file).read_text(), re.MULTILINE), f"{file}::{name}"
