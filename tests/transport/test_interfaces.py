from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from transport import interfaces
from transport.interfaces import (
    InterfaceWatch,
    Snapshot,
    addresses,
    outgoing_hosts,
)
from transport.proto.candidates import InterfaceAddress, parse_host

ROOT = Path(__file__).parents[2]


def test_this_machines_addresses() -> None:
    found = addresses()
    assert any(parse_host(one.host) == parse_host("127.0.0.1") and one.is_up for one in found)
    assert all(parse_host(one.host) is not None and one.prefix <= 128 and one.name for one in found)
    preferred = {one.host for one in found if one.preferred}
    assert preferred == set(outgoing_hosts())


def test_where_the_system_hides_its_interfaces_the_outgoing_addresses_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> dict[str, object]:
        raise PermissionError("no")

    monkeypatch.setattr("psutil.net_if_addrs", forbidden)
    assert {one.host for one in addresses()} == set(outgoing_hosts())


# -- what a change is


def snapshot(*pairs: tuple[str, str], routes: tuple[str, ...] = ()) -> Snapshot:
    return Snapshot.of([InterfaceAddress(name, host, 24) for name, host in pairs], routes)


def test_a_difference_is_told_in_words() -> None:
    old = snapshot(("wlan0", "192.168.1.7"), routes=("wlan0 by 192.168.1.1",))
    new = snapshot(("eth0", "10.0.0.3"), routes=("eth0 by 10.0.0.1",))
    assert old.difference(old) == ""
    assert old.difference(new) == (
        "address 192.168.1.7 gone, address 10.0.0.3 on eth0 new, default route now eth0 by 10.0.0.1"
    )
    assert new.difference(snapshot()) == "address 10.0.0.3 gone, no default route any more"
    many = snapshot(*((f"e{i}", f"10.0.{i}.1") for i in range(9)))
    assert many.difference(snapshot()) == "address 10.0.0.1, 10.0.1.1, 10.0.2.1 and 6 more gone"


def test_what_peers_never_see_is_no_change() -> None:
    unseen = [
        InterfaceAddress("docker0", "172.17.0.1", 16),
        InterfaceAddress("lo", "127.0.0.1", 8),
        InterfaceAddress("eth0", "fe80::1%eth0", 64),
        InterfaceAddress("eth0", "2001:db8::1", 64, tentative=True),
        InterfaceAddress("eth1", "10.0.0.1", 24, is_up=False),
    ]
    assert Snapshot.of(unseen, ()) == snapshot()


# -- watching


class World:
    """A network that a test changes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses = [InterfaceAddress("wlan0", "192.168.1.7", 24)]
        self.routes = ["wlan0 by 192.168.1.1"]
        monkeypatch.setattr(interfaces, "addresses", lambda: list(self.addresses))
        monkeypatch.setattr(interfaces, "default_routes", lambda: list(self.routes))


async def reasons_after(change: Callable[[InterfaceWatch], None], seconds: float = 5.0) -> list[str]:
    """The first reason after `change`, in a list."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    watch = InterfaceWatch(heard.put_nowait, asyncio.get_running_loop())
    try:
        change(watch)
        async with asyncio.timeout(seconds):
            return [await heard.get()]
    finally:
        watch.close()


async def test_where_nothing_tells_the_watch_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(interfaces, "_open_netlink", lambda _loop, _readable: None)
    monkeypatch.setattr(interfaces, "POLL_SECONDS", 0.05)

    def change(watch: InterfaceWatch) -> None:
        assert not watch.watches
        world.addresses = [InterfaceAddress("wlan0", "10.0.0.3", 24)]

    assert await reasons_after(change) == ["address 192.168.1.7 gone, address 10.0.0.3 on wlan0 new"]


async def test_a_change_of_containers_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    heard: list[str] = []
    watch = InterfaceWatch(heard.append, asyncio.get_running_loop())
    world.addresses.append(InterfaceAddress("veth77", "172.18.0.1", 16))
    assert watch.look() == ""
    world.routes = []
    assert watch.look() == "no default route any more"
    assert heard == ["no default route any more"]
    watch.close()


async def test_waking_is_told_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch)
    monkeypatch.setattr(interfaces, "TICK_SECONDS", 0.05)
    offset = 0.0
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + offset)

    def sleep(_watch: InterfaceWatch) -> None:
        nonlocal offset
        offset = 312.0

    assert await reasons_after(sleep) == ["woke after 312 s"]


async def test_a_closed_watch_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch)
    before = open_files()
    watches = [InterfaceWatch(pytest.fail, asyncio.get_running_loop()) for _ in range(20)]
    for watch in watches:
        watch.close()
        watch.close()
    assert open_files() <= before + 2


def open_files() -> int:
    """How many files this process has open; 0 where the system does not show it."""
    files = Path("/proc/self/fd")
    return len(list(files.iterdir())) if files.exists() else 0


NAMESPACE_SCRIPT = """
import asyncio, json, subprocess, time
from transport.interfaces import InterfaceWatch, addresses

async def main():
    heard = asyncio.Queue()
    ip("link set lo up")
    ip("link add eth0 type veth peer name far0", "link set far0 up")
    watch = InterfaceWatch(heard.put_nowait, asyncio.get_running_loop())
    steps = []
    for commands in STEPS:
        began = time.monotonic()
        ip(*commands)
        try:
            async with asyncio.timeout(3):
                reason = await heard.get()
        except TimeoutError:
            reason = None
        steps.append([reason, time.monotonic() - began])
    print(json.dumps({"watches": watch.watches, "steps": steps}))
    watch.close()

def ip(*commands):
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)

asyncio.run(main())
"""


def why_no_namespace() -> str:
    """Why a network namespace cannot be made here; empty when it can."""
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None or shutil.which("ip") is None:
        return "needs Linux with unshare and ip"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"cannot make a network namespace: {tried.stderr.strip()}"


def test_the_kernel_tells_of_real_changes_within_a_second() -> None:
    if reason := why_no_namespace():
        pytest.skip(reason)
    steps: list[tuple[list[str], str]] = [
        (["addr add 192.168.7.2/24 dev eth0", "link set eth0 up"], "address 192.168.7.2 on eth0 new"),
        (["route add default via 192.168.7.1"], "default route now eth0 by 192.168.7.1"),
        (["addr add 2001:db8::5/64 dev eth0 nodad"], "address 2001:db8::5 on eth0 new"),
        (["addr del 192.168.7.2/24 dev eth0"], "address 192.168.7.2 gone, no default route any more"),
        # another network that gives the same address, before anyone looked
        (["addr del 2001:db8::5/64 dev eth0", "addr add 2001:db8::5/64 dev eth0 nodad"],
         "address 2001:db8::5 was away for a moment"),
        (["link set far0 down"], "address 2001:db8::5 gone"),
    ]  # fmt: skip
    script = f"STEPS = {[commands for commands, _ in steps]!r}\n{NAMESPACE_SCRIPT}"
    ran = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", script],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["watches"]
    assert [reason for reason, _ in told["steps"]] == [reason for _, reason in steps]
    assert all(seconds < 3 for _, seconds in told["steps"])
