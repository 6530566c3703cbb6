"""The wheel and the sdist: what is in them, and that each command runs where nothing else of this project is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("wheel")  # they share what is built

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "swarmnode", "transport", "relay")
PACKAGES = ("swarmnode", "transport", "relay")
RELAY_ALONE = ROOT / "deploy" / "relay" / "requirements.txt"


def run(*command: str | Path, **environment: str) -> str:
    """Standard output; an error of the command is the test's."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command, text=True, capture_output=True, check=False, timeout=600, cwd="/", env={**env, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def uv(*command: str | Path) -> str:
    return run(sys.executable, "-m", "uv", *command, "--quiet")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name)  # with the __pycache__ that are there
        else:
            shutil.copy(ROOT / name, tree / name)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_x.py").write_text("")
    uv("build", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder / "dist", tree)
    return folder / "dist"


def wheel_of(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def modules() -> set[str]:
    found = (path for name in PACKAGES for path in (ROOT / name).rglob("*.py") if "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_the_wheel_holds_the_packages_their_data_and_the_licence(built: Path) -> None:
    wheel = wheel_of(built)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        info = archive.read(metadata).decode()
        scripts = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    data = {f"swarmnode/data/{path.name}" for path in (ROOT / "swarmnode" / "data").iterdir() if path.is_file()}
    assert any(name.endswith(".gguf") for name in data)
    wanted = modules() | data | {f"{package}/py.typed" for package in PACKAGES}
    rest = {name for name in names - wanted if ".dist-info/" not in name}
    assert wanted <= names
    assert {Path(name).suffix for name in rest} <= {".html", ".css", ".js", ".svg", ".json"}, rest  # other rooms' data
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in info
    assert "swarmnode = swarmnode.__main__:main" in scripts
    assert "swarmnode-relay = relay.__main__:main" in scripts


def test_the_sdist_holds_what_the_wheel_is_made_of_and_no_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert modules() | {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "relay/py.typed"} <= names
    bad = [
        name for name in names if name.startswith("tests/") or "__pycache__" in name or name.endswith((".pyc", ".so"))
    ]
    assert not bad


def test_the_relay_runs_with_its_own_dependencies_alone(built: Path, tmp_path: Path) -> None:
    home = tmp_path / "relay"
    uv("venv", "--python", sys.executable, home)
    binaries = home / "bin"
    uv("pip", "install", "--python", binaries / "python", "--require-hashes", "-r", RELAY_ALONE)
    uv("pip", "install", "--python", binaries / "python", "--no-deps", wheel_of(built))
    command = [
        str(binaries / "swarmnode-relay"),
        "--listen",
        "127.0.0.1:0",
        "--reflector",
        "0,0",
        "--log-format",
        "json",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stderr is not None
        ready = json.loads(process.stderr.readline())
        try:
            url = f"http://{ready['address']}"
            assert urllib.request.urlopen(f"{url}/healthz", timeout=20).read() == b"ok\n"
            assert b"\nrelay_build_info{" in urllib.request.urlopen(f"{url}/metrics", timeout=20).read()
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    node = subprocess.run([binaries / "swarmnode", "up"], capture_output=True, text=True, check=False, cwd="/")
    assert node.returncode == 1
    assert re.fullmatch(r"swarmnode: only what swarmnode-relay needs is installed here .*\n", node.stderr)
    installed = json.loads(uv("pip", "list", "--python", binaries / "python", "--format", "json"))
    names = {one["name"] for one in installed}
    assert not names & {"numpy", "llama-cpp-python", "aioquic", "qh3", "typer"}


@pytest.fixture
def installed(built: Path, tmp_path: Path) -> Path:
    """The bin folder of an environment with the wheel, and the libraries of this one."""
    home = tmp_path / "node"
    uv("venv", "--python", sys.executable, home)
    binaries = home / "bin"
    uv("pip", "install", "--python", binaries / "python", "--no-deps", wheel_of(built))
    where = run(binaries / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A folder that is named in a .pth gets no .pth read in turn: this checkout, installed as editable, stays out.
    (Path(where) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return binaries


def test_both_commands_run_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    place = run(installed / "python", "-c", "import swarmnode, relay, transport; print(swarmnode.__file__)")
    assert Path(place.strip()).is_relative_to(installed.parent)
    assert run(installed / "swarmnode", "--version").strip() == "0.1.0"
    assert "usage: swarmnode-relay" in run(installed / "swarmnode-relay", "--help")
    model = run(installed / "python", "-c", "from swarmnode.demo import MODEL; print(MODEL)").strip()
    assert Path(model).is_relative_to(installed.parent)
    out = tmp_path / "pack"
    run(installed / "swarmnode", "onboard", model, "--out", out, SWARMNODE_CACHE=str(tmp_path / "cache"))
    assert (out / "manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("PACKAGING_PIPX"), reason="downloads everything: set PACKAGING_PIPX=1")
def test_pipx_installs_the_wheel_with_all_that_it_needs(built: Path, tmp_path: Path) -> None:
    cached = run(sys.executable, "-m", "pip", "cache", "list", "llama_cpp_python")
    if "llama_cpp_python" not in cached:
        pytest.skip("pip has no built llama-cpp-python in its cache: it would be compiled once more, for ten minutes")
    folders = {f"PIPX_{name}": str(tmp_path / name.lower()) for name in ("HOME", "BIN_DIR", "MAN_DIR")}
    pipx = (sys.executable, "-m", "uv", "tool", "run", "--no-config", "pipx")
    # pip, not uv, which has a cache of its own.
    run(*pipx, "install", "--backend", "pip", "--python", sys.executable, wheel_of(built), **folders)
    binaries = tmp_path / "bin_dir"
    assert run(binaries / "swarmnode", "--version").strip() == "0.1.0"
    assert "usage: swarmnode-relay" in run(binaries / "swarmnode-relay", "--help")
