"""The soak behind nginx: a short one answers every request and gives whole figures. No test is a timing."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from swarmnode.bench import relay_front

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@pytest.mark.skipif(NGINX is None and os.environ.get("NATLAB_REQUIRE") != "1", reason="nginx is not installed")
def test_a_short_run_survives_a_cut_and_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(relay_front, "NEAR_CUT", 1.0)
    assert relay_front.main(["--minutes", "0.06", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests"]["sent"] > 20
    assert result["requests"] | {"sent": 0} == {"sent": 0, "unanswered": 0, "wrong": 0, "only_by_relay": True}
    assert result["cuts"]["count"] == len(result["stalls"]) >= 1
    assert "cut at" in relay_front.table(result)


def test_without_nginx_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert relay_front.main(["--minutes", "0.01"]) == 1
    assert capsys.readouterr().err.endswith("relay_front: nginx is not installed\n")
