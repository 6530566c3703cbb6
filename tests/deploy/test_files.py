"""What can be checked of deploy/ without starting it: schemas, linters, and that the files agree with the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from relay.config import DEFAULT_PORT, DEFAULT_REFLECTOR_PORTS
from tests.deploy.dockerfile import PATH

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CRD = "autoscaling.k8s.io/v1"  # not part of Kubernetes itself
MOST_EXPOSED = 2.0  # of 10, as systemd-analyze counts; what it likes less than this is said in the units
Json = dict[str, Any]  # Any: YAML


def tool(name: str) -> str:
    """A program of this machine or of this environment; where CI runs it must be there."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{PATH}")
    if found is None:
        if os.environ.get("NATLAB_REQUIRE") == "1":
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed")
    return found


def check(*command: str) -> str:
    """Run a checker; what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def manifests() -> list[Json]:
    """Every object of deploy/kubernetes."""
    found = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [one for file in found for one in yaml.safe_load_all(file.read_text())]


def named(kind: str, name: str = "relay") -> Json:
    """One of them."""
    return next(one for one in manifests() if (one["kind"], one["metadata"]["name"]) == (kind, name))


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_manifests_follow_the_schemas_of_kubernetes(version: str) -> None:
    builtin = [str(file) for file in (DEPLOY / "kubernetes").glob("*.yaml") if CRD not in file.read_text()]
    said = check(tool("kubernetes-validate"), "-k", version, "--strict", *builtin)
    assert said.count("passed for resource") == len(manifests()) - 1


def test_manifests_agree_with_each_other() -> None:
    relays = named("StatefulSet")["spec"]
    container = relays["template"]["spec"]["containers"][0]
    ports = {port["name"]: (port["containerPort"], port.get("protocol", "TCP")) for port in container["ports"]}
    first, second = DEFAULT_REFLECTOR_PORTS
    assert ports == {"websocket": (DEFAULT_PORT, "TCP"), "stun": (first, "UDP"), "stun-other": (second, "UDP")}
    labels = relays["template"]["metadata"]["labels"]
    rules = {rule["host"]: rule["http"]["paths"] for rule in named("Ingress")["spec"]["rules"]}
    for number in range(relays["replicas"]):  # each under a name of its own
        pod = {"statefulset.kubernetes.io/pod-name": f"relay-{number}"}
        assert named("Service", f"relay-{number}")["spec"]["selector"] == pod
        reflector = named("Service", f"reflector-{number}")["spec"]
        assert reflector["selector"] == pod
        assert reflector["externalTrafficPolicy"] == "Local", "else clients are told a wrong address"
        paths = rules[f"relay-{number}.example"]
        assert {one["backend"]["service"]["name"] for one in paths} == {f"relay-{number}"}
        assert {one["path"] for one in paths} == {"/relay", "/healthz", "/"}
    assert len(rules) == relays["replicas"]
    for selector in (
        relays["selector"]["matchLabels"],
        named("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        named("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    scaler = named("VerticalPodAutoscaler")
    assert scaler["apiVersion"] == CRD
    assert scaler["spec"]["targetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "relay"}
    assert not [one for one in manifests() if one["kind"] == "HorizontalPodAutoscaler"], "see relay.yaml"


def test_compose_file_follows_its_schema() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    schema = json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    jsonschema.validate(compose, schema)
    for name in ("relay", "node"):
        build = compose["services"][name]["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    assert (DEPLOY / "caddy" / "Caddyfile").is_file()


@pytest.mark.parametrize("name", ["relay", "node"])
def test_dockerfiles_pass_the_linter(name: str) -> None:
    check(tool("hadolint"), str(DEPLOY / name / "Dockerfile"))


def test_small_cloud() -> None:
    config = tomllib.loads((DEPLOY / "fly/fly.toml").read_text())
    assert (DEPLOY / "fly" / config["build"]["dockerfile"]).resolve() == DEPLOY / "relay/Dockerfile"
    served = {(one["protocol"], one["internal_port"]): one for one in config["services"]}
    udp = [("udp", port) for port in DEFAULT_REFLECTOR_PORTS]
    assert set(served) == {("tcp", DEFAULT_PORT), *udp}
    for one in udp:
        assert [port["port"] for port in served[one]["ports"]] == [one[1]], "the same port outside as inside"
    flags = config["processes"]["relay"].split()
    done = subprocess.run(
        [sys.executable, "-m", "relay", *flags, "--tls-cert", "x"], capture_output=True, text=True, check=False
    )
    assert "belong together" in done.stderr, "every flag was understood"


def test_nginx_takes_its_file(tmp_path: Path) -> None:
    """With a certificate; a real run through it is in tests/transport/test_relay_nginx.py."""
    from tests.transport.test_relay_nginx import MAIN, make_certificates

    make_certificates(tmp_path)
    live = "/etc/letsencrypt/live/relay.example"
    text = (DEPLOY / "nginx/relay.conf").read_text()
    text = text.replace(f"{live}/fullchain.pem", f"{tmp_path}/chain.pem").replace(
        f"{live}/privkey.pem", f"{tmp_path}/key.pem"
    )
    (tmp_path / "relay.conf").write_text(re.sub("listen (.*)443 ssl", r"listen \g<1>44399 ssl", text))
    (tmp_path / "nginx.conf").write_text(MAIN.format(folder=tmp_path))
    check(tool("nginx"), "-t", "-e", f"{tmp_path}/error.log", "-p", str(tmp_path), "-c", f"{tmp_path}/nginx.conf")


def test_caddy_takes_its_file() -> None:
    check(tool("caddy"), "validate", "--adapter", "caddyfile", "--config", str(DEPLOY / "caddy/Caddyfile"))


@pytest.mark.parametrize("name", ["swarmnode-relay", "swarmnode"])
def test_systemd_finds_its_units_hardened(name: str) -> None:
    analyze = tool("systemd-analyze")
    threshold = f"--threshold={round(MOST_EXPOSED * 10)}"
    check(analyze, "security", "--offline=yes", threshold, str(DEPLOY / f"systemd/{name}.service"))


def test_systemd_takes_its_units_as_the_readme_checks_them(tmp_path: Path) -> None:
    tool("systemd-analyze")
    told = (DEPLOY / "README.md").read_text().partition("## Checking the units")[2]
    (commands,) = re.findall("```sh\n(.*?)```", told, re.DOTALL)
    assert "verify" in commands
    done = subprocess.run(
        ["sh", "-ec", commands], cwd=ROOT, env={"PATH": PATH, "TMPDIR": str(tmp_path)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ".service" not in done.stderr
    assert {one.name for one in tmp_path.glob("*/*")} == {one.name for one in (DEPLOY / "systemd").iterdir()}


def test_locks_of_the_images_are_parts_of_the_lock() -> None:
    def pins(path: Path) -> dict[str, str]:
        return dict(re.findall(r"^([a-z0-9._-]+)==([^ ;\\]+)", path.read_text(), re.MULTILINE))

    whole = pins(ROOT / "requirements.lock")
    for name in ("relay", "node"):
        part = pins(DEPLOY / name / "requirements.txt")
        assert part
        assert part.items() <= whole.items(), "run make lock"
    assert not {"pytest", "ruff", "mypy"} & set(pins(DEPLOY / "node/requirements.txt"))
    wanted = (DEPLOY / "relay/requirements.in").read_text().splitlines()
    assert {line for line in wanted if not line.startswith("#")} <= set(pins(DEPLOY / "relay/requirements.txt"))


def test_every_file_has_its_line_and_its_check() -> None:
    told = (DEPLOY / "README.md").read_text()
    for file in DEPLOY.rglob("*"):
        if (
            file.is_file()
            and file.name != "README.md"
            and "grafana" not in file.parts
            and "prometheus" not in file.parts
        ):
            named = file.relative_to(DEPLOY).as_posix()
            assert named in told or f"{file.parent.name}/*.yaml" in told, f"deploy/README.md does not tell of {named}"
