from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import gateway
from transport.gateway import Gateway, address_in, default_gateway, gateway_in_table, own_address_towards

HEAD = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


def number(host: str) -> str:
    """An address as Linux prints it: the number in memory order."""
    packed = bytes(map(int, host.split(".")))
    return f"{int.from_bytes(packed, sys.byteorder):08X}"


def line(destination: str, router: str, flags: int, metric: int, mask: str) -> str:
    return f"eth0 {number(destination)} {number(router)} {flags:04X} 0 0 {metric} {number(mask)} 0 0 0\n"


def test_the_default_route_with_the_lowest_metric() -> None:
    table = HEAD + "".join(
        [
            line("0.0.0.0", "192.168.7.1", 3, 600, "0.0.0.0"),
            line("0.0.0.0", "192.168.1.254", 3, 100, "0.0.0.0"),
            line("10.0.0.0", "10.0.0.1", 3, 0, "255.0.0.0"),
            line("0.0.0.0", "10.9.9.9", 2, 1, "0.0.0.0"),  # down
            line("0.0.0.0", "0.0.0.0", 1, 1, "0.0.0.0"),  # a point-to-point link: no router to ask
        ]
    )
    assert gateway_in_table(table) == "192.168.1.254"


def test_tables_without_a_default_route() -> None:
    assert gateway_in_table("") is None
    assert gateway_in_table(HEAD + line("10.0.0.0", "10.0.0.1", 3, 0, "255.0.0.0")) is None


@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    gateway_in_table("x\n" + text)
    address_in(text)


@pytest.mark.parametrize(
    ("output", "host"),
    [
        ("default via 192.168.1.1 dev wlan0 proto dhcp metric 600\n", "192.168.1.1"),
        ("   route to: default\ndestination: default\n       mask: default\n    gateway: 10.0.1.1\n", "10.0.1.1"),
        ("192.168.0.1\r\n", "192.168.0.1"),
        ("    mask: 0.0.0.0\n gateway: 10.0.0.1", "10.0.0.1"),
        ("10.0.0.0/8 via 1.2.3.4", "1.2.3.4"),
        ("default dev ppp0 scope link\n", None),
        ("1.2.3.4.5 999.1.1.1", None),
        ("", None),
    ],
)
def test_what_routing_tools_print(output: str, host: str | None) -> None:
    assert address_in(output) == host


def test_the_own_address_is_the_one_that_faces_the_router() -> None:
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert own_address_towards("no host") is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' table")
async def test_the_table_of_this_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "route"
    table.write_text(HEAD + line("0.0.0.0", "127.0.0.1", 3, 0, "0.0.0.0"))
    monkeypatch.setattr(gateway, "ROUTES", table)
    assert await default_gateway() == Gateway("127.0.0.1", "127.0.0.1")


async def test_no_route_and_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "ROUTES", tmp_path / "missing")
    for tool in ("_LINUX_TOOL", "_BSD_TOOL", "_WINDOWS_TOOL"):
        monkeypatch.setattr(gateway, tool, ("no-such-tool",))
    assert await default_gateway() is None


async def test_a_tool_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gateway, "ROUTES", tmp_path / "missing")
    monkeypatch.setattr(gateway, "TOOL_SECONDS", 0.05)
    for tool in ("_LINUX_TOOL", "_BSD_TOOL", "_WINDOWS_TOOL"):
        monkeypatch.setattr(gateway, tool, (sys.executable, "-c", "import time; time.sleep(60)"))
    assert await default_gateway() is None
