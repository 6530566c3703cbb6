"""`swarmnode doctor` must say the truth about networks that are known, with a real relay."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.natlab.lab import Lab
from tests.natlab.node import Host
from tests.natlab.sites import build
from tests.natlab.swarm import Relay
from transport.proto.net_report import PORT_FILTERED, PORT_OPEN

SECONDS = 60  # for a busy machine; the check itself takes at most ten


@dataclass(frozen=True)
class Truth:
    """What the report must say; `advice` is a part of one of its sentences."""

    nat: str
    udp: bool
    filtering: str = "unknown"
    advice: str = ""


TRUTHS = {
    "public": Truth("none", True, PORT_OPEN),
    "fullcone": Truth("easy", True, PORT_OPEN, "The router maps no port"),
    "easy": Truth("easy", True, PORT_FILTERED, "no hairpin"),
    "symmetric": Truth("hard", True, PORT_FILTERED, "gives every destination another port"),
    "symmetric-seq": Truth("hard", True, PORT_FILTERED, "helps to guess them"),
    "udp-blocked": Truth("blocked", False, advice="UDP is blocked"),
    "ipv6": Truth("none", True, PORT_FILTERED),
}


def start(host: Host, url: str) -> subprocess.Popen[str]:
    """The command, inside the host."""
    command = [sys.executable, "-m", "swarmnode", "doctor", "--relay", url, "--json"]
    return host.popen(command, stdout=subprocess.PIPE, text=True)


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it printed; Any: JSON."""
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.mark.slow
async def test_every_kind_of_network(lab: Lab) -> None:
    relay = Relay(lab.host("relay", ipv6=True))
    await relay.ready()
    hosts = {site: build(lab, site, site) for site in TRUTHS}
    processes = {site: start(host, relay.url) for site, host in hosts.items()}
    reports = {site: await asyncio.to_thread(report_of, process) for site, process in processes.items()}
    for site, truth in TRUTHS.items():
        report = reports[site]
        assert (site, report["nat"], report["udp"]) == (site, truth.nat, truth.udp)
        assert (site, report["filtering"]) == (site, truth.filtering)
        assert not truth.advice or any(truth.advice in sentence for sentence in report["advice"]), site
        assert report["relays"][0]["error"] == ""
        assert abs(report["clock_offset_s"]) < 5


@pytest.mark.slow
async def test_hairpin_and_packet_size(lab: Lab) -> None:
    relay = Relay(lab.host("relay"))
    await relay.ready()
    host = lab.nat("gateway", "easy", hairpin=True, carry=1400).host("host")
    report = await asyncio.to_thread(report_of, start(host, relay.url))
    assert (report["nat"], report["hairpin"], report["mtu"]) == ("easy", True, 1380)
    assert any("only 1380 get through" in sentence for sentence in report["advice"])
