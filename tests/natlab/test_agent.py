"""The agent and what drives it, without relays: a dial by address, requests, bulk, a watch on paths, names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.natlab.lab import Lab
from tests.natlab.swarm import Agent, AgentError


async def test_agents_do_what_they_are_told(lab: Lab) -> None:
    home, server = lab.nat("home", "easy", delay_ms=5).host("home-host"), lab.host("server", ipv6=True)
    one, other = Agent(home, "one"), Agent(server, "other")
    await one.ready()
    await other.ready()
    dialled = await one.ask("dial", peer=other.peer, addresses=[[server.ipv4, other.port]])
    assert dialled["first_byte_ms"] >= 20  # a handshake and a request, 10 ms each
    assert dialled["path"] == "direct-public"
    assert dialled["via"] == f"{server.ipv4}:{other.port}"
    assert (await one.ask("ping", peer=other.peer))["rtt_ms"] >= 10
    assert (await one.ask("wait", peer=other.peer, direct=True))["waited_ms"] < 1000
    streamed = await one.ask("stream", peer=other.peer, seconds=0.6)
    assert (streamed["sent"], streamed["answered"], streamed["lost"]) == (30, 30, 0)
    assert streamed["p50_ms"] >= 10
    assert len(streamed["latencies_ms"]) == 30
    assert (await one.ask("bulk", peer=other.peer, size=1_000_000))["MBps"] > 0
    (peer,) = (await other.ask("status"))["peers"]
    assert peer["peer"] == one.peer
    assert peer["via"].startswith(home.public_ipv4)
    with pytest.raises(AgentError, match="still direct-public"):
        await one.ask("wait", peer=other.peer, direct=False, timeout=0.1)
    await one.ask("hangup", peer=other.peer)
    with pytest.raises(AgentError, match="dial first"):
        await one.ask("ping", peer=other.peer)
    await one.close()
    await other.close()
    assert one.process.poll() == other.process.poll() == 0


async def test_an_agent_that_ends_tells_why(lab: Lab) -> None:
    agent = Agent(lab.host("server"), "one", (), "--listen", "11.9.9.9:1")
    with pytest.raises(AssertionError, match="cannot listen on"):
        await agent.ready()
    await agent.close()


def test_names_are_the_labs_own(lab: Lab) -> None:
    server, client = lab.host("server", ipv6=True), lab.host("client")
    name = lab.name(server)
    code = "import socket, sys; print(sorted({one[4][0] for one in socket.getaddrinfo(sys.argv[1], 80)}))"
    process = client.popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=20)[0].strip() == str(sorted([server.ipv4, server.ipv6]))
