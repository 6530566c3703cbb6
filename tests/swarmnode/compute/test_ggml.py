"""Loading the library: one copy of it in a process, whoever comes first, and names for traced ops."""

from __future__ import annotations

import subprocess
import sys

import pytest

from swarmnode.compute import ggml
from swarmnode.errors import EngineError

MAPPED = """
{imports}
with open("/proc/self/maps") as maps:
    files = {{line.split()[-1] for line in maps if "libggml" in line}}
print(len(files), *sorted(files))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("order", [("swarmnode.compute.ggml", "llama_cpp"), ("llama_cpp", "swarmnode.compute.ggml")])
def test_llama_cpp_and_the_engine_share_one_library(order: tuple[str, str]) -> None:
    """Two copies would mean two registries, and tensors of one given to the other."""
    script = MAPPED.format(imports="\n".join(f"import {name}" for name in order))
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    count, *files = out.stdout.split()
    assert count == "3", files  # libggml, libggml-base, libggml-cpu


def test_op_names() -> None:
    assert ggml.op_name(0) == "NONE"


def test_a_missing_function_names_the_versions() -> None:
    with pytest.raises(EngineError, match=rf"has no ggml_nonsense; install {ggml.MIRROR_VERSION}"):
        ggml._function("ggml_nonsense", None)
