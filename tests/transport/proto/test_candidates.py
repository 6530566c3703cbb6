from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import Address
from transport.proto.addresses import Candidate, CandidateSource, PathKind
from transport.proto.candidates import (
    InterfaceAddress,
    choose,
    is_container,
    is_private,
    is_public,
    is_tunnel,
    kind_of,
    parse_host,
    usable,
)
from transport.proto.disco_frames import MAX_CANDIDATES

PORT = 4433
LOOPBACK = [InterfaceAddress("lo", "127.0.0.1", 8), InterfaceAddress("lo", "::1", 128)]
LAPTOP = [
    *LOOPBACK,
    InterfaceAddress("wlan0", "192.168.1.7", 24, preferred=True),
    InterfaceAddress("wlan0", "2001:db8:1::a", 64),
    InterfaceAddress("wlan0", "2001:db8:1::b", 64, preferred=True, temporary=True),
    InterfaceAddress("wlan0", "2001:db8:1::c", 64, temporary=True, deprecated=True),
    InterfaceAddress("wlan0", "fd12::7", 64),
    InterfaceAddress("wlan0", "fe80::1%wlan0", 64),
    InterfaceAddress("docker0", "172.17.0.1", 16),
    InterfaceAddress("br-0123456789ab", "172.18.0.1", 16),
    InterfaceAddress("veth1234", "169.254.9.9", 16),
    InterfaceAddress("virbr0", "192.168.122.1", 24),
    InterfaceAddress("eth0", "10.9.9.9", 24, is_up=False),
    InterfaceAddress("tailscale0", "100.101.102.103", 32),
    InterfaceAddress("wg0", "10.8.0.2", 24, point_to_point=True),
]


def hosts(candidates: tuple[Candidate, ...]) -> list[str]:
    return [candidate.address[0] for candidate in candidates]


def tell(
    interfaces: list[InterfaceAddress],
    listen_host: str = "::",
    *,
    reflected: tuple[Address, ...] = (),
    mapped: tuple[Address, ...] = (),
    observed: tuple[Address, ...] = (),
    given: tuple[Address, ...] = (),
) -> tuple[Candidate, ...]:
    return choose(
        interfaces,
        reflected=reflected,
        mapped=mapped,
        observed=observed,
        given=given,
        listen_host=listen_host,
        port=PORT,
    )


def test_a_laptop_tells_its_lan_first_and_its_tunnels_last_and_nothing_of_its_containers() -> None:
    told = tell(
        LAPTOP,
        reflected=(("11.0.0.5", 61000), ("2001:db8:1::b", PORT)),
        mapped=(("11.0.0.5", PORT),),
        observed=(("11.0.0.9", 7),),
        given=(("11.1.1.1", 9),),
    )
    assert [(c.address, c.source.name) for c in told] == [
        (("192.168.1.7", PORT), "INTERFACE"),
        (("fd12::7", PORT), "INTERFACE"),
        (("2001:db8:1::b", PORT), "INTERFACE"),
        (("11.1.1.1", 9), "GIVEN"),
        (("11.0.0.5", PORT), "MAPPED"),
        (("11.0.0.5", 61000), "REFLECTED"),
        (("11.0.0.9", 7), "OBSERVED"),
        (("100.101.102.103", PORT), "INTERFACE"),
        (("10.8.0.2", PORT), "INTERFACE"),
    ]


def test_one_address_of_an_ipv6_network_is_told_and_it_is_not_a_deprecated_one() -> None:
    kept = [
        InterfaceAddress("eth0", "2001:db8::3", 64, deprecated=True),
        InterfaceAddress("eth0", "2001:db8::2", 64, temporary=True),
        InterfaceAddress("eth0", "2001:db8::1", 64),
        InterfaceAddress("eth0", "2001:db8:0:1::1", 64, tentative=True),
        InterfaceAddress("eth0", "2002:102:304::1", 64),
        InterfaceAddress("eth0", "2001:0:1::1", 64),
    ]
    assert hosts(tell(kept)) == ["2001:db8::1"]


@pytest.mark.parametrize(
    ("listen_host", "expected"),
    [
        ("0.0.0.0", ["192.168.1.7", "11.0.0.5", "100.101.102.103", "10.8.0.2"]),
        ("192.168.1.7", ["192.168.1.7", "11.0.0.5"]),
        ("fd12::7", ["fd12::7", "2001:db8:9::9"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("no address", []),
    ],
)
def test_only_what_the_socket_hears_is_told(listen_host: str, expected: list[str]) -> None:
    reflected = (("11.0.0.5", 1), ("2001:db8:9::9", 2)) if listen_host != "no address" else ()
    assert hosts(tell(LAPTOP, listen_host, reflected=reflected)) == expected


def test_a_node_on_loopback_tells_what_the_user_gave() -> None:
    assert hosts(tell(LAPTOP, "127.0.0.1", given=(("11.0.0.5", 5),))) == ["127.0.0.1", "11.0.0.5"]


def test_many_addresses_do_not_push_out_the_kinds_that_matter() -> None:
    many = [InterfaceAddress("eth0", f"10.0.{i}.1", 24) for i in range(40)]
    many += [InterfaceAddress("eth1", f"11.0.{i}.1", 24) for i in range(40)]
    told = tell(many, reflected=(("11.9.9.9", 1),), mapped=(("11.9.9.9", 2),), observed=(("11.9.9.9", 3),))
    assert len(told) == MAX_CANDIDATES
    sources = [candidate.source for candidate in told]
    for source in (CandidateSource.REFLECTED, CandidateSource.MAPPED, CandidateSource.OBSERVED):
        assert source in sources
    assert told[0].address == ("10.0.0.1", PORT)


def test_carrier_addresses_come_after_those_of_the_lan() -> None:
    told = tell([InterfaceAddress("rmnet0", "100.64.3.4", 24), InterfaceAddress("wlan0", "10.0.0.2", 24)])
    assert hosts(told) == ["10.0.0.2", "100.64.3.4"]


def test_what_others_report_is_checked_before_it_is_told() -> None:
    nonsense = (
        ("0.0.0.0", 1), ("255.255.255.255", 1), ("224.0.0.1", 1), ("127.0.0.1", 1), ("169.254.1.1", 1), ("fe80::1", 1),
        ("ff02::1", 1), ("::", 1), ("11.0.0.1", 0), ("11.0.0.1", 65536), ("11.0.0.1", -1), ("host.example", 1), ("", 1),
    )  # fmt: skip
    assert tell([], observed=nonsense, reflected=nonsense, mapped=nonsense) == ()


@pytest.mark.parametrize(
    ("name", "container"),
    [
        ("docker0", True), ("docker_gwbridge", True), ("br-1a2b3c4d5e6f", True), ("veth0ab", True), ("virbr0", True),
        ("cni0", True), ("podman1", True), ("vmnet8", True), ("lxdbr0", True), ("cali123", True), ("bridge100", True),
        ("vEthernet (WSL)", True), ("VirtualBox Host-Only Network", True),
        ("br0", False), ("br-lan", False), ("eth0", False), ("wan0", False), ("bridge0", False), ("en0", False),
        ("vEthernet (External)", False), ("Ethernet", False), ("wlp3s0", False), ("bond0", False),
    ],
)  # fmt: skip
def test_which_interfaces_are_of_containers(name: str, container: bool) -> None:
    assert is_container(name) == container


def test_a_point_to_point_link_is_a_tunnel_unless_it_is_the_way_to_the_internet() -> None:
    assert is_tunnel(InterfaceAddress("x0", "10.0.0.1", 32, point_to_point=True))
    assert not is_tunnel(InterfaceAddress("x0", "10.0.0.1", 32, point_to_point=True, preferred=True))
    assert not is_tunnel(InterfaceAddress("wan0", "11.0.0.1", 32, point_to_point=True))


@pytest.mark.parametrize(
    ("host", "private", "public"),
    [
        ("10.1.2.3", True, False), ("172.31.0.1", True, False), ("172.32.0.1", False, True),
        ("100.64.0.1", True, False), ("0.0.0.0", False, False),
        ("192.168.1.1", True, False), ("11.0.0.1", False, True), ("127.0.0.1", False, False), ("::1", False, False),
        ("fd00::1", True, False), ("fe80::1%eth0", True, False), ("2001:db8::1", False, True),
        ("224.0.0.1", False, False), ("::ffff:10.0.0.1", True, False), ("nobody", False, False),
    ],
)  # fmt: skip
def test_private_and_public(host: str, private: bool, public: bool) -> None:
    assert (is_private(host), is_public(host)) == (private, public)


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("127.0.0.1", PathKind.LOOPBACK),
        ("192.168.1.7", PathKind.LOOPBACK),
        ("2001:db8:1::a", PathKind.LOOPBACK),
        ("::ffff:192.168.1.7", PathKind.LOOPBACK),
        ("192.168.1.8", PathKind.LAN),
        ("10.77.0.1", PathKind.LAN),  # routed within a site
        ("172.17.0.2", PathKind.LAN),  # a container of this machine
        ("2001:db8:1::77", PathKind.LAN),  # the same link, with addresses of the Internet
        ("fe80::9", PathKind.LAN),
        ("10.8.0.3", PathKind.PUBLIC),  # through a VPN
        ("100.99.1.1", PathKind.PUBLIC),
        ("11.0.0.1", PathKind.PUBLIC),
        ("2001:db8:2::1", PathKind.PUBLIC),
        ("garbage", PathKind.PUBLIC),
    ],
)
def test_the_kind_of_a_peers_address(host: str, kind: PathKind) -> None:
    assert kind_of((host, 1), LAPTOP) == kind


def test_neighbours_in_a_carriers_network_are_a_lan() -> None:
    assert kind_of(("100.64.0.9", 1), [InterfaceAddress("eth0", "100.64.0.2", 24)]) == PathKind.LAN


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (("192.168.1.9", 5), True),
        (("192.168.1.7", 5), True),  # another node of this machine
        (("192.168.1.7", PORT), False),  # ourselves
        (("10.1.1.1", 5), True),
        (("11.0.0.1", 5), True),
        (("2001:db8:7::1", 5), True),
        (("127.0.0.1", 5), False),
        (("::1", 5), False),
        (("192.168.1.255", 5), False),
        (("255.255.255.255", 5), False),
        (("0.0.0.0", 5), False),
        (("239.1.2.3", 5), False),
        (("169.254.3.3", 5), False),
        (("fe80::1", 5), False),
        (("ff02::1", 5), False),
        (("11.0.0.1", 0), False),
        (("11.0.0.1", 70000), False),
        (("name.example", 5), False),
    ],
)
def test_which_candidates_of_a_peer_are_usable(address: Address, expected: bool) -> None:
    candidate = Candidate(address, CandidateSource.INTERFACE)
    assert usable(candidate, LAPTOP, listen_host="::", port=PORT) == expected


def test_usable_depends_on_what_we_have_and_where_we_listen() -> None:
    v4_only = [*LOOPBACK, InterfaceAddress("eth0", "10.0.0.2", 24), InterfaceAddress("eth0", "fe80::1%eth0", 64)]
    six = Candidate(("2001:db8:7::1", 5), CandidateSource.INTERFACE)
    four = Candidate(("11.0.0.1", 5), CandidateSource.REFLECTED)
    here = Candidate(("127.0.0.1", 5), CandidateSource.INTERFACE)
    assert not usable(six, v4_only, listen_host="::", port=PORT)
    assert not usable(six, LAPTOP, listen_host="0.0.0.0", port=PORT)
    assert not usable(four, LAPTOP, listen_host="fd12::7", port=PORT)
    assert not usable(four, [InterfaceAddress("eth0", "2001:db8::1", 64)], listen_host="::", port=PORT)
    assert not usable(four, LAPTOP, listen_host="127.0.0.1", port=PORT)
    assert usable(here, LAPTOP, listen_host="127.0.0.1", port=PORT)
    assert not usable(here, LAPTOP, listen_host="127.0.0.1", port=5)
    assert not usable(here, LAPTOP, listen_host="::1", port=PORT)  # that socket has no IPv4


ADDRESSES = st.one_of(
    st.ip_addresses().map(str), st.text(max_size=40), st.sampled_from(["fe80::1%eth0", "::ffff:1.2.3.4", "1.2.3.4"])
)
PORTS = st.integers(-1, 70_000)
INTERFACES = st.lists(
    st.builds(
        InterfaceAddress,
        name=st.sampled_from(["eth0", "wg0", "docker0", "lo", "", "veth"]),
        host=ADDRESSES,
        prefix=st.integers(0, 32),
        is_up=st.booleans(),
        preferred=st.booleans(),
        point_to_point=st.booleans(),
        tentative=st.booleans(),
        temporary=st.booleans(),
        deprecated=st.booleans(),
    ),
    max_size=30,
)
HEARD = st.lists(st.tuples(ADDRESSES, PORTS), max_size=30)


@given(INTERFACES, HEARD, HEARD, HEARD, HEARD, st.sampled_from(["::", "0.0.0.0", "127.0.0.1", "1.2.3.4"]))
def test_whatever_comes_in_what_is_told_is_bounded_unique_and_sane(
    interfaces: list[InterfaceAddress],
    reflected: list[Address],
    mapped: list[Address],
    observed: list[Address],
    user: list[Address],
    listen_host: str,
) -> None:
    told = choose(
        interfaces,
        reflected=reflected,
        mapped=mapped,
        observed=observed,
        given=user,
        listen_host=listen_host,
        port=PORT,
    )
    assert len(told) <= MAX_CANDIDATES
    assert len({candidate.address for candidate in told}) == len(told)
    for candidate in told:
        host = ip_address(candidate.address[0])
        assert not host.is_multicast
        assert not host.is_unspecified
        assert 0 < candidate.address[1] < 65536
        assert kind_of(candidate.address, interfaces) in PathKind


@given(INTERFACES, ADDRESSES, PORTS, st.sampled_from(["::", "0.0.0.0", "127.0.0.1", "::1", "fd12::7", ""]))
def test_nothing_a_peer_names_is_sent_to_loopback_or_to_many(
    interfaces: list[InterfaceAddress], host: str, port: int, listen_host: str
) -> None:
    candidate = Candidate((host, port), CandidateSource.OBSERVED)
    if usable(candidate, interfaces, listen_host=listen_host, port=PORT):
        address = parse_host(host)
        assert address is not None
        assert not address.is_multicast
        assert not address.is_link_local
        assert listen_host in ("127.0.0.1", "::1") or not address.is_loopback
