"""What the tests themselves rest on."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("suite")
def test_tests_of_a_group_go_to_one_worker(request: pytest.FixtureRequest) -> None:
    """By a suffix of the test's id; a version of pytest that takes none has each worker build the same images."""
    grouped = bool(getattr(request.config.option, "loadgroup", False))
    assert request.node.nodeid.endswith("@suite") is grouped
