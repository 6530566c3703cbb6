"""`swarmnode up --log-format json`: every line on standard error is one object, and none holds a secret."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.onboard import ModelPack

Process = subprocess.Popen[str]
UP = [sys.executable, "-m", "swarmnode", "up", "--listen", "127.0.0.1:0", "--no-lan", "--threads", "1", "--json"]


def up(folder: Path, *flags: str, **environment: str) -> Process:
    return subprocess.Popen(
        [*UP, "--state", str(folder), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
    )


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Processes that are ended in any case."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(process: Process, event: str) -> dict[str, Any]:
    """Read standard output up to an event."""
    assert process.stdout is not None
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        if found["event"] == event:
            return found
    raise AssertionError(f"{event} did not come")


def test_a_swarm_at_debug_level_logs_objects_and_no_secrets(
    started: list[Process], tmp_path: Path, demo_pack: ModelPack
) -> None:
    loud = {"SWARMNODE_LOG_FORMAT": "json", "SWARMNODE_LOG_LEVEL": "debug"}
    founder = up(tmp_path / "f", "--model", str(demo_pack.path), "--metrics", "127.0.0.1:0", **loud)
    started.append(founder)
    ticket = until(founder, "ticket")["ticket"]
    worker = up(tmp_path / "w", ticket, "--memory", "1M", **loud)
    started.append(worker)
    until(worker, "ready")
    until(founder, "attached")
    secrets = [ticket, ticket[20:60]]
    for folder in ("f", "w"):
        secrets.append(json.loads((tmp_path / folder / "control.json").read_text())["token"])
        key = (tmp_path / folder / "identity.key").read_bytes()
        secrets += [line.decode() for line in key.splitlines() if not line.startswith(b"--")]
    for process in (worker, founder):
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 0
        lines = [json.loads(line) for line in told.splitlines()]
        assert lines
        assert all(list(line)[:4] == ["time", "level", "logger", "event"] for line in lines)
        assert not [secret for secret in secrets if secret in told]


def test_what_ends_it_is_an_object_too(started: list[Process], tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    process = up(tmp_path / "n", "--model", str(broken), "--log-format", "json")
    started.append(process)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = told.splitlines()
    found = json.loads(line)
    assert (found["level"], found["event"]) == ("error", "ended")
    assert "broken.gguf" in found["error"]


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--log-format", "xml", "--log-format xml: say text or json"),
        ("--log-level", "loud", "--log-level loud: say debug, info, warning or error"),
        ("--metrics", "9464", "--metrics: address '9464': write HOST:PORT"),
    ],
)
def test_values_that_cannot_be_meant(
    flag: str, value: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from swarmnode.cli import main

    assert main(["up", "--model", "x.gguf", "--state", str(tmp_path), flag, value]) == 2
    assert says in capsys.readouterr().err
