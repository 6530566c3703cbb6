from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "install.py"
LOCK = """\
# a comment
llama-cpp-python==1.0 \\
    --hash=sha256:aa
other==2.0 \\
    --hash=sha256:bb
"""


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_engine_tells_a_wheel_of_another_processor(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.fits_this_processor()
    monkeypatch.setattr(install, "PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not install.fits_this_processor()


@pytest.mark.parametrize("fits", [True, False])
def test_such_a_wheel_leaves_the_cache_and_is_compiled_anew(
    install: ModuleType, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, asked = tmp_path / "requirements.lock", list[tuple[str, ...]]()
    lock.write_text(LOCK)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["install.py", str(lock)])
    monkeypatch.setattr(install, "pip", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(install, "fits_this_processor", lambda: fits)
    assert install.main() == 0
    assert ("another processor" in capsys.readouterr().out) is not fits
    native = str(tmp_path / "lock" / "native.txt")
    compiled = [one for one in asked if native in one]
    assert [one[-1] == "--force-reinstall" for one in compiled] == ([False] if fits else [False, True])
    removed = [at for at, one in enumerate(asked) if one[:2] == ("cache", "remove")]
    assert removed == ([] if fits else [asked.index(compiled[-1]) - 1])
    assert (tmp_path / "lock" / "native.txt").read_text().startswith("llama-cpp-python==1.0")
    assert (tmp_path / "lock" / "others.txt").read_text().startswith("other==2.0")
