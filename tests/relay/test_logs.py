"""The relay's log as JSON, and where it says how it is to be written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

RELAY = [sys.executable, "-m", "relay", "--reflector", "0,0"]


def test_every_line_is_an_object_the_ready_line_too() -> None:
    command = [*RELAY, "--listen", "127.0.0.1:0"]
    env = {**os.environ, "SWARMNODE_LOG_FORMAT": "json", "SWARMNODE_LOG_LEVEL": "info"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        first, second = (json.loads(process.stderr.readline()) for _ in range(2))
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 0
    assert (first["event"], first["logger"], type(first["port"])) == ("started", "relay.server", int)
    assert (second["event"], second["level"]) == ("ready", "info")
    assert second["address"] == f"127.0.0.1:{first['port']}"
    assert second["reflector_ports"] == first["reflector"]
    assert all(json.loads(line) for line in rest.splitlines())


def test_that_it_cannot_run_is_an_object_as_well() -> None:
    command = [*RELAY, "--listen", "127.0.0.1:0", "--access", "/nonexistent/list", "--log-format", "json"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    found = json.loads(done.stderr)
    assert (done.returncode, found["event"], found["level"]) == (1, "not_started", "error")
    assert "/nonexistent/list" in found["error"]


@pytest.mark.parametrize(
    ("flag", "variable"), [("--log-format", "SWARMNODE_LOG_FORMAT"), ("--log-level", "SWARMNODE_LOG_LEVEL")]
)
def test_a_format_or_level_that_is_none_is_named(flag: str, variable: str) -> None:
    for arguments, env in (([flag, "loud"], {}), ([], {variable: "loud"})):
        done = subprocess.run(
            [*RELAY, *arguments], stderr=subprocess.PIPE, text=True, check=False, timeout=60, env={**os.environ, **env}
        )
        assert done.returncode == 2
        assert done.stderr.startswith(f"swarmnode-relay: argument {flag}: say ")
        assert done.stderr.count("\n") == 1
