"""Fixtures that several rooms use: the shipped model's pack, its experts as an engine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.demo import MODEL
from swarmnode.model.source_bank import SourceBank
from swarmnode.onboard import ModelPack, onboard

settings.register_profile("no deadline", deadline=None)  # a timing is never a test
settings.load_profile("no deadline")

# Whoever runs the tests in the background (nohup, a script's `&`) has them ignore these, and every process that they
# start would ignore them too: the tests of Ctrl-C and of a closed terminal need them.
for _name, _handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    _number = getattr(signal, _name, None)
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(scope="session")
def demo_pack(tmp_path_factory: pytest.TempPathFactory) -> ModelPack:
    """The shipped model, onboarded."""
    return onboard(MODEL, tmp_path_factory.mktemp("demo") / "pack")


@pytest.fixture(scope="session")
def demo_engine(demo_pack: ModelPack) -> Iterator[ExpertEngine]:
    """All experts of the shipped model."""
    bank = SourceBank(MODEL, demo_pack.manifest)
    stacked = {site.index: bank.stacked(site.index) for site in demo_pack.manifest.sites}
    engine = ExpertEngine(ExpertBank(demo_pack.manifest.sites, stacked))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a test reaches the user's own folders."""
    monkeypatch.setenv("SWARMNODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SWARMNODE_STATE", str(tmp_path / "state"))
