"""The lab as a fixture. It skips, with the reason, where no lab can be built; with NATLAB_REQUIRE=1 it fails there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.natlab.lab import Lab, why_not
from tests.natlab.probes import Reflector

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "natlab: needs root, nftables and /dev/net/tun; skips with the reason elsewhere")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.natlab)


@pytest.fixture(scope="session")
def natlab_works() -> None:
    """Skips what needs a lab."""
    if reason := why_not():
        if os.environ.get("NATLAB_REQUIRE") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def lab(natlab_works: None) -> Iterator[Lab]:
    """A lab of this test's own; the test fails when the lab itself has lost packets."""
    with Lab(seed=1) as lab:
        yield lab
        lost = lab.ring_drops()
    assert not lost, f"the lab was overloaded and dropped packets, so the result is void: {lost}"


@pytest.fixture
def reflectors(lab: Lab) -> Iterator[list[tuple[str, int]]]:
    """Three IPv4 reflectors: two ports of one public host, and another host."""
    hosts = lab.host("stun1"), lab.host("stun2")
    sockets = [hosts[0].socket(port=3478), hosts[0].socket(port=3479), hosts[1].socket(port=3478)]
    reflector = Reflector(*sockets)
    yield [(hosts[0].ipv4, 3478), (hosts[0].ipv4, 3479), (hosts[1].ipv4, 3478)]
    reflector.close()
    for one in sockets:
        one.close()
