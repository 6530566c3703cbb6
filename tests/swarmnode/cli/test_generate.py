"""`swarmnode generate`: what is said about drafts, and where."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode import control
from swarmnode.cli import main

RESULT = {"tokens": 2, "tokens_per_s": 3.0, "drafted": 0, "accepted_per_step": 1.0, "stopped_by": "length"}


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize(
    ("flags", "speculation", "expected"),
    [
        (["--speculate"], "this node has nothing that drafts", "this node has nothing that drafts"),
        (["--speculate"], "on", None),
        ([], "the recurrent layers of qwen3next cannot take back a draft", None),
        (["--no-speculate"], "off", None),
    ],
)
def test_who_asks_for_drafts_hears_why_there_are_none(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: list[str],
    speculation: str,
    expected: str | None,
    more: list[str],
) -> None:
    result = {**RESULT, "speculation": speculation}

    async def answer(_state: Path, _op: str, **_arguments: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"event": "token", "text": "ab"}
        yield {"event": "result", "result": result}

    monkeypatch.setattr(control, "request", answer)
    assert main(["generate", "x", *flags, *more, "--state", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out) == result) if more else (out == "ab")
    said = [line for line in err.splitlines() if line.startswith("swarmnode: ")]
    assert said == ([f"swarmnode: nothing was drafted: {expected}"] if expected else [])
