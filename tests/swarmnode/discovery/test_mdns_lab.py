"""mDNS on machines with several interfaces: real namespaces, one cable each. Root only; skips with the reason."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.natlab.lab import why_not
from tests.natlab.netns import Netns

pytestmark = [pytest.mark.natlab, pytest.mark.xdist_group("mdns lab")]
ROOT = Path(__file__).parents[3]
WAIT_S = 30.0  # for what takes a second on a quiet machine


class Child:
    """mdns_child in a namespace."""

    def __init__(self, place: Netns, name: str, number: int, *, is_open: bool = False) -> None:
        command = [sys.executable, "-m", "tests.swarmnode.discovery.mdns_child", name, str(number)]
        with place.inside():
            self.process = subprocess.Popen(
                [*command, "open" if is_open else "closed"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        self.heard: list[dict[str, Any]] = []  # Any: as JSON has it
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.peer = str(self.until(lambda event: event["event"] == "ready")["peer"])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            event = self._lines.get(timeout=WAIT_S)
            self.heard.append(event)
            if wanted(event):
                return event

    def until_heard(self, name: str, host: str = "") -> dict[str, Any]:
        return self.until(
            lambda event: event["event"] == "heard" and event["name"] == name and (not host or host in event["hosts"])
        )

    def names(self) -> set[str]:
        """Everybody heard of so far."""
        while not self._lines.empty():
            self.heard.append(self._lines.get())
        return {event["name"] for event in self.heard if event["event"] == "heard"}

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Machines:
    """Namespaces with cables between them, and what runs there."""

    def __init__(self) -> None:
        self.places: dict[str, Netns] = {}
        self.children: list[Child] = []

    def place(self, name: str) -> Netns:
        if name not in self.places:
            self.places[name] = Netns(ipv6=True)
        return self.places[name]

    def cable(self, one: str, device: str, address: str, other: str, other_address: str) -> None:
        """From `device` of one machine to `lan0` of another; without addresses IPv6's own are all there is."""
        near, far = self.place(one), self.place(other)
        near.ip(f"link add {device} type veth peer name lan0 netns {far.path}")
        near.ip(*([f"addr add {address}/24 dev {device}"] if address else []), f"link set {device} up")
        far.ip(*([f"addr add {other_address}/24 dev lan0"] if other_address else []), "link set lan0 up")
        near.wait_up(device)
        far.wait_up("lan0")

    def child(self, place: str, number: int, *, is_open: bool = False) -> Child:
        child = Child(self.place(place), place, number, is_open=is_open)
        self.children.append(child)
        return child

    def close(self) -> None:
        for child in self.children:
            child.end()
        for place in self.places.values():
            place.close()


@pytest.fixture
def machines() -> Iterator[Machines]:
    if reason := why_not():
        pytest.skip(reason)
    made = Machines()
    yield made
    made.close()


def test_every_lan_hears_of_a_machine_with_several_and_no_container_does(machines: Machines) -> None:
    machines.cable("middle", "eth0", "10.1.0.1", "left", "10.1.0.2")
    machines.cable("middle", "wlan0", "10.2.0.1", "right", "10.2.0.2")
    machines.cable("middle", "eth1", "", "six", "")
    machines.cable("middle", "docker0", "172.17.0.1", "container", "172.17.0.2")
    left, right, six = machines.child("left", 1), machines.child("right", 2), machines.child("six", 3)
    container = machines.child("container", 4)
    middle = machines.child("middle", 5)
    for child in (left, right, six):
        event = child.until_heard("middle")
        assert event["hosts"] == ["10.1.0.1", "10.2.0.1"]
        assert event["lasting"]
    for name in ("left", "right", "six"):
        if name not in middle.names():
            middle.until_heard(name)
    assert "container" not in middle.names()
    assert not container.names()
    assert left.names() == right.names() == six.names() == {"middle"}


def test_addresses_that_change_are_told_again_and_a_goodbye_is_heard(machines: Machines) -> None:
    machines.cable("middle", "eth0", "10.1.0.1", "left", "10.1.0.2")
    left, middle = machines.child("left", 1), machines.child("middle", 5)
    left.until_heard("middle", "10.1.0.1")
    middle.until_heard("left")
    machines.place("middle").ip("addr del 10.1.0.1/24 dev eth0", "addr add 10.1.0.9/24 dev eth0")
    middle.tell("changed")
    left.until_heard("middle", "10.1.0.9")
    machines.cable("middle", "eth1", "10.2.0.1", "right", "10.2.0.2")  # a network that comes later
    right = machines.child("right", 2)
    middle.tell("changed")
    right.until_heard("middle", "10.2.0.1")
    middle.until_heard("right")
    middle.tell("close")
    middle.until(lambda event: event["event"] == "closed")
    left.until(lambda event: event["event"] == "lost" and event["peer"] == middle.peer)
    assert middle.process.wait(WAIT_S) == 0


def test_a_machine_without_any_network_says_why_and_finds_it_when_it_comes(machines: Machines) -> None:
    alone = machines.child("alone", 1)
    problem = alone.until(lambda event: event["event"] == "problem")
    assert problem["why"].startswith("nobody on the local network can be found: no interface leads to one")
    alone.tell("changed")
    machines.cable("alone", "eth0", "10.1.0.1", "other", "10.1.0.2")
    other = machines.child("other", 2)
    alone.tell("changed")
    other.until_heard("alone", "10.1.0.1")
    alone.until_heard("other")
    assert sum(event["event"] == "problem" for event in alone.heard) == 1
