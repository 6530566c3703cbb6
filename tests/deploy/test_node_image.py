"""deploy/node/Dockerfile and the node's unit, with this machine's pip cache; minutes: only with DEPLOY_NODE_IMAGE=1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deploy.dockerfile import PATH, Builder
from tests.deploy.systemd_host import SystemdHost, why_not

ROOT = Path(__file__).parents[2]
MODEL = "lib/python3.11/site-packages/swarmnode/data/pystdlib-moe-15m-Q4_K_M.gguf"
READY_S = 120.0

pytestmark = [
    pytest.mark.skipif(os.environ.get("DEPLOY_NODE_IMAGE") != "1", reason="takes minutes; DEPLOY_NODE_IMAGE=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("deploy images"),
]


def test_it_generates_as_nobody_and_as_a_service(base: Path, tmp_path: Path) -> None:
    cache = subprocess.check_output([sys.executable, "-m", "pip", "cache", "dir"], text=True).strip()
    image = Builder(base, tmp_path, ROOT, pip_cache=Path(cache)).build(ROOT / "deploy/node/Dockerfile")
    print(f"the node's image adds {image.installed_bytes / 1e6:.1f} MB to its base")
    assert not (image.upper / "opt/swarmnode/lib/python3.11/site-packages/pip").exists()
    command = image.starting([*image.entrypoint, "demo", "--tokens", "8", "--json"], read_only=False)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["identical"] is True

    if reason := why_not():
        pytest.skip(reason)
    files = {"/opt/swarmnode": image.upper / "opt/swarmnode"}
    unit = ROOT / "deploy/systemd/swarmnode.service"
    drop_in = f"[Service]\nEnvironment=SWARMNODE_MODEL=/opt/swarmnode/{MODEL} SWARMNODE_LISTEN=127.0.0.1:0\n"
    with SystemdHost(unit, files, drop_in) as host:
        inside = ["nsenter", "-t", str(host.first), "-m", "-p", "-i", "-u", "-C", "env", "-i", f"PATH={PATH}"]
        generate = ["/opt/swarmnode/bin/swarmnode", "generate", "def main():", "--tokens", "8", "--json"]
        deadline = time.monotonic() + READY_S
        while True:
            asked = subprocess.run(
                [*inside, *generate, "--state", "/var/lib/swarmnode"], capture_output=True, text=True, check=False
            )
            if asked.returncode == 0 or time.monotonic() > deadline:
                break
            time.sleep(1)
        assert asked.returncode == 0, asked.stderr + host.systemctl("status", "--full", "--no-pager", unit.name)
        assert json.loads(asked.stdout)["tokens"] == 8
        host.systemctl("stop", unit.name)
        assert "Result=success" in host.systemctl("show", "-p", "Result", unit.name)
