from __future__ import annotations

import json
from dataclasses import replace

import pytest

from transport.proto.net_report import PORT_FILTERED, PORT_OPEN, NetReport, RelayCheck, advise

URL = "https://relay.example"
GOOD = NetReport(
    udp=True,
    ipv4="203.0.113.7:4433",
    ipv6="[2001:db8::7]:4433",
    nat="easy",
    mapping="endpoint-independent",
    filtering=PORT_FILTERED,
    hairpin=True,
    port_mapping="pcp",
    port_mapping_detail="203.0.113.7:4433",
    relays=(RelayCheck(URL, 12.0, "", True),),
    mtu=1500,
    interface_mtu=1500,
    clock_offset_s=0.4,
    addresses=("192.168.1.2", "203.0.113.7"),
    local_ipv6="2001:db8::7",
    ipv6_relay=True,
)


def test_nothing_to_say_when_all_is_well() -> None:
    assert advise(GOOD).advice == ()
    assert advise(GOOD).works


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"udp": False, "nat": "blocked"}, "UDP is blocked"),
        ({"udp": None}, "No relay here has a UDP reflector"),
        ({"ipv4": None}, "IPv4 does not reach the relay"),
        ({"ipv6": None}, "has the IPv6 address 2001:db8::7, but nothing comes back"),
        ({"ipv6": None, "local_ipv6": ""}, "There is no IPv6 here"),
        ({"nat": "hard"}, "The NAT gives every destination another port"),
        ({"nat": "hard", "port_delta": 1}, "helps to guess them"),
        ({"nat": "none", "port_mapping": None}, "A firewall lets in only answers"),
        (
            {"port_mapping": None, "port_mapping_detail": "the router maps no port (…)"},
            "switch on UPnP, NAT-PMP or PCP",
        ),
        (
            {"port_mapping": None, "port_mapping_detail": "mapped behind another NAT: pcp gave 10.0.0.9"},
            "The router is behind another NAT (10.0.0.9)",
        ),
        ({"hairpin": False}, "no hairpin"),
        ({"mtu": 1420}, "The interface takes packets of 1500 bytes but only 1420 get through"),
        ({"mtu": 1400, "interface_mtu": 1400}, "Packets of at most 1400 bytes"),
        ({"mtu": 576}, "Packets above 576 bytes are lost, QUIC needs 1228"),
        ({"clock_offset_s": 95.2}, "clock is 95 s ahead"),
        ({"clock_offset_s": -3600.0}, "clock is 3600 s behind"),
        ({"relays": ()}, "No relay was checked"),
        (
            {"relays": (RelayCheck(URL, None, "connection refused"),)},
            f"The relay {URL} cannot be used: connection refused.",
        ),
        ({"relays": (RelayCheck(URL, None, "x"),)}, "No relay can be used"),
        ({"relays": (RelayCheck(URL, 320.0, "", True),)}, "is 320 ms away"),
        ({"addresses": ()}, "has no address"),
    ],
)
def test_each_thing_that_is_not_good_has_its_sentence(change: dict[str, object], sentence: str) -> None:
    advice = advise(replace(GOOD, **change)).advice  # type: ignore[arg-type]
    assert any(sentence in line for line in advice)
    assert len(advice) <= 3
    assert all(line.endswith(".") and "\n" not in line for line in advice)


@pytest.mark.parametrize(
    "change",
    [
        {"mtu": 1480},
        {"mtu": 1499},  # a multiple of four below the interface's
        {"mtu": 1500, "interface_mtu": 9000},
        {"mtu": None},
        {"clock_offset_s": None},
        {"clock_offset_s": 20.0},
        {"nat": "none", "filtering": PORT_OPEN, "port_mapping": None, "hairpin": None},
        {"ipv6": None, "ipv6_relay": False},  # no relay to find out with
    ],
)
def test_what_is_good_enough_needs_none(change: dict[str, object]) -> None:
    assert advise(replace(GOOD, **change)).advice == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("report", "works"),
    [
        (NetReport(relays=(RelayCheck(URL, None, "down"),), addresses=("192.168.1.2",)), False),
        (NetReport(relays=(RelayCheck(URL, None, "down"), RelayCheck("http://two", 3.0))), True),
        (NetReport(addresses=("192.168.1.2",)), True),
        (NetReport(), False),
    ],
)
def test_whether_anything_works(report: NetReport, works: bool) -> None:
    assert report.works is works


def test_the_json_shape_that_scripts_rely_on() -> None:
    shown = json.loads(json.dumps(advise(GOOD).as_json()))
    assert set(shown) >= {
        "udp", "ipv4", "ipv6", "nat", "mapping", "filtering", "hairpin", "port_mapping", "relays", "mtu",
        "clock_offset_s", "advice",
    }  # fmt: skip
    assert shown["relays"] == [{"url": URL, "rtt_ms": 12.0, "error": "", "udp": True}]
    assert shown["advice"] == []
