from __future__ import annotations

import json

import pytest

from swarmnode.bench import draft_identity


def test_drafts_flip_near_ties_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    assert draft_identity.main(["--tokens", "600", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert row["equal_tokens"] >= 600
    assert row["accepted"] > 60
    assert row["largest_margin"] < 0.3
    assert len(result["margins"]) == row["flips"]
