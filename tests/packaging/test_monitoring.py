"""The Grafana dashboard and the Prometheus rules: well formed, and about figures that nodes and relays really show."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from relay.config import RelayConfig
from relay.server import RelayServer
from swarmnode.backbone.session import GenerateRequest
from swarmnode.onboard import ModelPack

from ..swarmnode.helpers import start_node

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "swarmnode.json"
PROMETHEUS = DEPLOY / "prometheus"
PROMTOOL = shutil.which("promtool")
MADE_BY_PROMETHEUS = {"up"}
_METRIC = re.compile(r"\b(?:swarmnode|relay|process|python)_[a-z0-9_]+\b|\bup\b")
_SELECTOR = re.compile(r"([a-z0-9_]+)\{([^}]*)\}")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


pytestmark = pytest.mark.xdist_group("monitoring")  # they share the pages


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, demo_pack: ModelPack) -> list[str]:
    """What a founder, a worker of its swarm and a relay between them show."""
    return asyncio.run(read_pages(tmp_path_factory.mktemp("monitoring"), demo_pack))


async def read_pages(tmp_path: Path, demo_pack: ModelPack) -> list[str]:
    relay = RelayServer(RelayConfig(listen=("127.0.0.1", 0), reflector_ports=(0, 0)))
    await relay.start()
    url = f"http://127.0.0.1:{relay.address[1]}"
    quiet: dict[str, Any] = {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0", "lan": False}
    founder, events = await start_node(tmp_path / "f", demo_pack, memory="1M", relays=[url], context=256, **quiet)
    try:
        ticket = (await events.wait("ticket"))[0]["ticket"]
        worker, heard = await start_node(tmp_path / "w", demo_pack, model=None, ticket=ticket, memory="64M", **quiet)
        await events.wait("attached")
        await heard.wait("holding")
        runner, client = founder.runner, founder.client
        assert runner is not None
        assert client is not None
        async with asyncio.timeout(30):
            while not any(view.p50_s for view in client.workers()):  # until the worker has been asked
                async for _ in runner.stream(GenerateRequest(prompt="def f", max_tokens=4)):
                    pass
        reader, writer = await asyncio.open_connection(*relay.address)
        writer.write(b"no HTTP\r\n\r\n")  # a connection that the relay refuses
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        made = [node._metrics for node in (founder, worker)]
        found = [(await one.render()).decode() for one in made if one is not None]
        await worker.close()
        return [*found, relay.metrics.render().decode()]
    finally:
        await founder.close()
        await relay.close()


def shown(pages: list[str]) -> dict[str, set[str]]:
    """Name of every sample → its labels."""
    names: dict[str, set[str]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            suffix = {"counter": "_total"}.get(family.type, "")
            names.setdefault(f"{family.name}{suffix}", set())
            for sample in family.samples:
                names.setdefault(sample.name, set()).update(sample.labels)
    return names


def promtool(*command: str, text: str = "") -> tuple[int, str]:
    """Exit code, and what it said."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *command], input=text, text=True, capture_output=True, check=False)
    return done.returncode, done.stdout + done.stderr


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return loaded


def panels() -> Iterator[dict[str, Any]]:
    for panel in dashboard()["panels"]:
        yield panel
        yield from panel.get("panels", ())


def expressions() -> dict[str, str]:
    """Of the dashboard and the rules, by where they stand."""
    found = {f"{p['title']} {t['refId']}": t["expr"] for p in panels() for t in p.get("targets", ())}
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text("utf-8"))
    found |= {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}
    return found


def test_names_and_units_are_as_prometheus_wants_them(pages: list[str]) -> None:
    series = 0
    for page in pages:
        for family in text_string_to_metric_families(page):
            assert family.documentation, family.name
            assert not re.search(r"(?:_ms|_kb|_mb|_count|_milliseconds|_percent)$", family.name), family.name
            if family.name.startswith(("swarmnode_", "relay_")):
                assert (family.type == "counter") == any(
                    s.name.endswith("_total") for s in family.samples
                ) or not family.samples
                series += len(family.samples)
    assert 200 < series < 1000


@needs_promtool
def test_promtool_has_nothing_against_the_pages(pages: list[str]) -> None:
    for page in pages:
        done = promtool("check", "metrics", text=page)
        assert done == (0, "")


def test_everything_that_is_drawn_or_warned_of_is_shown_by_somebody(pages: list[str]) -> None:
    names = shown(pages)
    assert {"swarmnode_build_info", "relay_build_info", "swarmnode_plan_experts", "swarmnode_swarm_held_bytes"} <= set(
        names
    )
    for where, expression in expressions().items():
        used = set(_METRIC.findall(expression)) - MADE_BY_PROMETHEUS
        assert used <= set(names), where
        assert used or "up{" in expression, where
        for name, selector in _SELECTOR.findall(expression):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector)) - {"instance", "job"}
            assert name in MADE_BY_PROMETHEUS or labels <= names[name], where
        legend = next(
            (t["legendFormat"] for p in panels() for t in p.get("targets", ()) if t["expr"] == expression), ""
        )
        for label in set(re.findall(r"\{\{(\w+)\}\}", legend)) - {"instance"}:
            assert any(label in names[name] for name in used), where
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            assert re.findall(r"label_values\((\w+), instance\)", variable["query"]["query"])[0] in names


def test_the_dashboard_has_what_grafana_needs_to_load_it() -> None:
    # The fields of grafana's own dashboard schema (kinds/dashboard), as far as this file uses them.
    board = dashboard()
    assert board["id"] is None  # Grafana gives it one; the uid makes a later import an update
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", board["uid"])
    assert board["title"]
    assert board["schemaVersion"] >= 36
    assert {"from", "to"} == set(board["time"])
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    numbers = [panel["id"] for panel in panels()]
    assert len(numbers) == len(set(numbers)) > 30
    for panel in panels():
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24, panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["type"] in {"timeseries", "stat"}
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in {"none", "s", "bytes", "Bps", "percentunit"}
        assert panel["targets"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))
        for target in panel["targets"]:
            used = set(re.findall(r"\$\{?(\w+)\}?", target["expr"])) - {"__rate_interval"}
            assert used <= set(variables), panel["title"]


def test_panels_do_not_lie_on_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_every_alert_says_what_is_wrong_and_how_bad() -> None:
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text("utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["description"]


@needs_promtool
def test_prometheus_takes_the_configuration_the_rules_and_every_expression(tmp_path: Path) -> None:
    drawn = [
        {"record": f"drawn:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(expressions().values())
    ]
    rules = tmp_path / "drawn.yml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "drawn", "rules": drawn}]}))
    for what, kind, file in (
        ("check", "config", PROMETHEUS / "prometheus.yml"),
        ("check", "rules", PROMETHEUS / "rules.yml"),
        ("test", "rules", PROMETHEUS / "rules_test.yml"),
        ("check", "rules", rules),
    ):
        code, said = promtool(what, kind, str(file))
        assert code == 0, said
