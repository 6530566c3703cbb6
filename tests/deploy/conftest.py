"""A Debian root and the images that the Dockerfiles make, once for all tests that need them; the NAT lab's fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.dockerfile import Builder, Image, make_base, missing
from tests.natlab.conftest import lab, natlab_works

__all__ = ["lab", "natlab_works"]

ROOT = Path(__file__).parents[2]


def skip_or_fail(reason: str) -> None:
    """Skips with the reason; fails where everything is required, as in CI."""
    if reason and os.environ.get("NATLAB_REQUIRE") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What python:3.11-slim stands for; DEPLOY_BASE names a folder that has one already."""
    if reason := missing():
        skip_or_fail(f"running a Dockerfile's steps needs {reason}")
    if ready := os.environ.get("DEPLOY_BASE"):
        yield Path(ready)
    else:
        yield make_base(tmp_path_factory.mktemp("debian"))


@pytest.fixture(scope="session")
def relay_image(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """deploy/relay/Dockerfile, all of it."""
    builder = Builder(base, tmp_path_factory.mktemp("relay-image"), ROOT)
    return builder.build(ROOT / "deploy/relay/Dockerfile")
