"""Port mapping against a real router's daemon, miniupnpd, in a gateway of the lab: what it maps must let people in."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.natlab.lab import Lab
from tests.natlab.nat import Nat
from tests.natlab.node import Host

PORT = 4433
SECONDS = 20
DAEMON = shutil.which("miniupnpd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

# The chains that miniupnpd writes into, as its own nft_init.sh makes them; and the LAN may talk to the gateway.
CHAINS = """
table inet filter {
  chain miniupnpd { }
  chain prerouting_miniupnpd { }
  chain postrouting_miniupnpd { }
  chain forward { type filter hook forward priority 0; policy accept; jump miniupnpd; }
  chain prerouting { type nat hook prerouting priority -100; policy accept; jump prerouting_miniupnpd; }
  chain postrouting { type nat hook postrouting priority 100; policy accept; jump postrouting_miniupnpd; }
}
insert rule ip filter input iifname "lan0" accept
"""
MAPPER = """
import asyncio, sys
from transport.port_mapping import PortMapper

async def main():
    mapper = PortMapper(int(sys.argv[1]), lambda external, how: print(external, how, flush=True))
    mapper.start()
    await asyncio.to_thread(sys.stdin.readline)
    await mapper.close()

asyncio.run(main())
"""


@pytest.fixture
def home(lab: Lab) -> Nat:
    gateway = lab.nat("home", "easy")
    gateway.nft(CHAINS)
    return gateway


def run_daemon(gateway: Nat, folder: Path, *, upnp: bool) -> subprocess.Popen[bytes]:
    if DAEMON is None:
        pytest.skip("miniupnpd is not installed")
    config = folder / "miniupnpd.conf"
    config.write_text(
        f"ext_ifname=wan0\next_ip={gateway.ipv4}\nlistening_ip=lan0\nport=5555\nsecure_mode=yes\n"
        f"enable_natpmp={'no' if upnp else 'yes'}\nenable_upnp={'yes' if upnp else 'no'}\n"
        "uuid=00000000-0000-0000-0000-000000000001\nallow 1024-65535 0.0.0.0/0 1024-65535\n"
    )
    with gateway.inside():
        return subprocess.Popen(
            [DAEMON, "-d", "-f", config, "-P", folder / "pid"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def lets_in(lab: Lab, gateway: Nat, host: Host, name: str) -> bool:
    """Does a datagram of a stranger reach the host by the mapping?"""
    with lab.host(name).socket() as stranger, host.socket(port=PORT) as inside:
        inside.settimeout(1.0)
        stranger.sendto(b"hello", (gateway.ipv4, PORT))
        try:
            return inside.recv(100) == b"hello"
        except TimeoutError:
            return False


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pcp", "upnp"])
async def test_a_stranger_comes_in_while_the_port_is_mapped(lab: Lab, home: Nat, tmp_path: Path, how: str) -> None:
    host = home.host("host")
    daemon = run_daemon(home, tmp_path, upnp=how == "upnp")
    try:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        mapper = host.popen(
            [sys.executable, "-c", MAPPER, str(PORT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert mapper.stdin is not None
        assert mapper.stdout is not None
        async with asyncio.timeout(SECONDS):
            told = await asyncio.to_thread(mapper.stdout.readline)
        assert told == f"('{home.ipv4}', {PORT}) {how}\n"
        assert await asyncio.to_thread(lets_in, lab, home, host, "stranger")
        await asyncio.to_thread(mapper.communicate, "\n", SECONDS)
        assert mapper.returncode == 0
        assert not await asyncio.to_thread(lets_in, lab, home, host, "late")
    finally:
        daemon.terminate()
        daemon.wait(10)
