"""The shipped TLS fronts, adapted to a port, a certificate and a relay of a test. Called by the tests of deploy/."""

from __future__ import annotations

import re
from pathlib import Path

from tests.transport.test_relay_nginx import MAIN

DEPLOY = Path(__file__).parents[2] / "deploy"


def nginx(folder: Path, name: str, listen: str) -> list[str]:
    """The command that runs nginx with deploy/nginx/relay.conf. `folder` has chain.pem and key.pem."""
    text = (DEPLOY / "nginx/relay.conf").read_text()
    live = "/etc/letsencrypt/live/relay.example"
    for shipped, here in {
        f"{live}/fullchain.pem": f"{folder}/chain.pem",
        f"{live}/privkey.pem": f"{folder}/key.pem",
        "listen 443 ssl;": f"listen {listen} ssl;",
        "listen [::]:443 ssl;": "",
        "server_name relay.example;": f"server_name {name};",
    }.items():
        assert shipped in text
        text = text.replace(shipped, here)
    (folder / "relay.conf").write_text(text)
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    return ["nginx", "-p", str(folder), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]


def caddy(folder: Path, name: str, port: int, relay: str = "127.0.0.1:8080") -> list[str]:
    """The command that runs Caddy with deploy/caddy/Caddyfile."""
    text = (DEPLOY / "caddy/Caddyfile").read_text()
    text, sites = re.subn(
        r"^relay\.example \{", f"{name}:{port} {{\n\ttls {folder}/chain.pem {folder}/key.pem", text, flags=re.M
    )
    assert sites == 1
    assert "127.0.0.1:8080 {" in text
    text = text.replace("127.0.0.1:8080 {", f"{relay} {{")
    options = "{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n}\n"
    (folder / "Caddyfile").write_text(options + text)
    environment = ["env", f"XDG_DATA_HOME={folder}", f"XDG_CONFIG_HOME={folder}"]
    return [*environment, "caddy", "run", "--adapter", "caddyfile", "--config", f"{folder}/Caddyfile"]
