"""A relay as its systemd unit and as its container start it, behind TLS in the NAT lab; two nodes generate through it.

The unit is run by a real systemd in namespaces of its own, with all of its sandbox; the container by the steps and the
settings of deploy/relay/Dockerfile and deploy/compose.yaml. DEPLOY_KEEP=FOLDER keeps what doctor and dashboard show.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarmnode.onboard import ModelPack
from tests.deploy import fronts, systemd_host
from tests.deploy.conftest import skip_or_fail
from tests.deploy.dockerfile import Image
from tests.deploy.systemd_host import SystemdHost
from tests.natlab.lab import Lab
from tests.natlab.node import Host
from tests.natlab.swarm import ROOT, Errors
from tests.natlab.swarm_nodes import SiteNode, until
from tests.natlab.test_swarm_sites import REQUEST, WAIT_S, Start, carried_out, expected, goes, ready, start
from tests.transport.test_relay_nginx import make_certificates

__all__ = ["expected", "start"]

UNIT = ROOT / "deploy/systemd/swarmnode-relay.service"
Json = dict[str, Any]  # Any: JSON

pytestmark = [
    pytest.mark.natlab,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("deploy images"),
]


@contextlib.contextmanager
def by_systemd(host: Host, name: str, image: Image) -> Iterator[None]:
    """As `systemctl start swarmnode-relay`."""
    if reason := systemd_host.why_not():
        skip_or_fail(reason)
    flags = f'[Service]\nEnvironment="RELAY_FLAGS=--name {name}"\n'
    files = {"/opt/relay": image.upper / "opt/relay"}
    with SystemdHost(UNIT, files, flags, ["nsenter", f"--net={host.path}"]) as systemd:
        status = Path(f"/proc/{systemd.main}/status").read_text()
        assert "Uid:\t0\t" not in status
        assert "CapBnd:\t0000000000000000" in status
        assert "Seccomp:\t2" in status
        yield
        systemd.systemctl("reload", systemd.unit)
        assert systemd.systemctl("is-active", systemd.unit) == "active"
        systemd.systemctl("stop", systemd.unit)
        assert "Result=success" in systemd.systemctl("show", "-p", "Result", systemd.unit)


@contextlib.contextmanager
def by_container(host: Host, name: str, image: Image) -> Iterator[None]:
    """As `docker compose up relay`."""
    service = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["relay"]
    flags = [name if flag.startswith("${RELAY_NAME") else flag for flag in service["command"]]
    process = host.popen(image.starting([*image.entrypoint, *flags]), stderr=subprocess.PIPE)
    errors = Errors(process, "relay ready")
    assert errors.ready.wait(60)
    assert process.poll() is None, errors
    with host.inside():
        assert subprocess.run(image.starting(image.healthcheck), capture_output=True, check=False).returncode == 0
    yield
    process.terminate()
    assert process.wait(20) == 0, errors


STARTED = {"systemd": by_systemd, "container": by_container}


def doctor(host: Host, url: str, ca: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "swarmnode", "doctor", "--relay", url, "--relay-ca", str(ca), *flags]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"}
    return host.popen(command, stdout=subprocess.PIPE, text=True, env=env)


async def said(process: subprocess.Popen[str]) -> str:
    """What it printed."""
    out, _ = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0
    return out


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def metrics_of(host: Host) -> list[str]:
    """The relay's, past its front: what only the machine itself may see."""
    with host.inside(), urllib.request.urlopen("http://127.0.0.1:8080/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text.splitlines()


async def keep(folder: Path, node: SiteNode, url: str, ca: Path) -> None:
    """What doctor and the dashboard show, for the docs."""
    report = await said(doctor(node.host, url, ca))
    write(folder / f"doctor-{node.host.name}.txt", "".join(f"{line.rstrip()}\n" for line in report.splitlines()))
    still = folder / f"dashboard-{node.host.name}.svg"
    command = [sys.executable, "-m", "swarmnode", "dashboard", "--state", str(node.state), "--svg", str(still)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = node.host.popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env, text=True)
    _, errors = await asyncio.to_thread(process.communicate, timeout=60)
    if process.returncode:
        print(f"no still of {node.host.name}: {errors}")


@pytest.mark.parametrize(("how", "front"), [("systemd", "nginx"), ("container", "nginx")])
async def test_two_nodes_generate_through_it(
    lab: Lab,
    start: Start,
    demo_pack: ModelPack,
    expected: list[tuple[int, str]],
    relay_image: Image,
    tmp_path: Path,
    how: str,
    front: str,
) -> None:
    if shutil.which(front) is None:
        skip_or_fail(f"{front} is not installed")
    host = lab.host("relay")
    name = lab.name(host)
    url, ca = f"https://{name}", tmp_path / "ca.pem"
    make_certificates(tmp_path, name)
    home = lab.nat("home", "easy", delay_ms=5).host("founder")
    office = lab.nat("office", "udp-blocked", delay_ms=5).host("worker")
    with STARTED[how](host, name, relay_image):
        listen = "0.0.0.0:443"
        command = fronts.nginx(tmp_path, name, listen) if front == "nginx" else fronts.caddy(tmp_path, name, 443)
        host.popen(command, stderr=subprocess.DEVNULL)
        common = ("--no-lan", "--relay-ca", str(ca))
        model = ("--model", str(demo_pack.path), "--context", "256", "--batch", "128", "--memory", "1M")
        founder = await start(home, *model, "--relay", url, *common)
        ticket = (await founder.wait_for("ticket"))["ticket"]
        worker = await start(office, ticket, "--memory", "8M", *common)
        checks = {one: doctor(one, url, ca, "--json") for one in (home, office)}  # meanwhile
        await ready(founder, worker)
        await until("everything is held", partial(carried_out, founder, 1), WAIT_S)
        assert await founder.tokens(REQUEST) == expected
        assert (await worker.status())["served_rows"] > 0
        await until("a relayed path", partial(goes, founder, worker, "relay"), WAIT_S)

        reports: dict[Host, Json] = {one: json.loads(await said(check)) for one, check in checks.items()}
        assert (reports[home]["nat"], reports[home]["udp"]) == ("easy", True)  # the reflector is reached past the front
        assert (reports[office]["nat"], reports[office]["udp"]) == ("blocked", False)
        assert [report["relays"][0]["error"] for report in reports.values()] == ["", ""]
        if folder := os.environ.get("DEPLOY_KEEP"):
            for node in (founder, worker):
                await keep(Path(folder, how), node, url, ca)
        await asyncio.gather(founder.end(), worker.end())
        metrics = await asyncio.to_thread(metrics_of, host)
        relayed = [line for line in metrics if line.startswith('relay_bytes_total{class="bulk"}')]
        assert float(relayed[0].split()[1]) > 1e6, "the worker's slices came this way"
