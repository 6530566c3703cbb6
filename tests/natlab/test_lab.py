"""The lab tells the truth: mapping, filtering and reachability of every kind of NAT, with plain sockets."""

from __future__ import annotations

import itertools
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.natlab.lab import Lab
from tests.natlab.nat import CARRIER
from tests.natlab.nat_rules import Firewall, Kind, Ports
from tests.natlab.netns import LabError
from tests.natlab.node import Host
from tests.natlab.probes import Address, End, Reflector, heard, learn, punch, seen_by
from tests.natlab.sites import SITES, Hope, build, hope

MAPPINGS = [
    ("easy", "preserve", "one port", (True, False, False)),
    ("easy", "random", "one port", (True, False, False)),
    ("restricted", "preserve", "one port", (True, True, False)),
    ("restricted", "random", "one port", (True, True, False)),
    ("fullcone", "preserve", "one port", (True, True, True)),
    ("fullcone", "random", "one port", (True, True, True)),
    ("symmetric", "preserve", "each its own", (True, False, False)),
    ("symmetric", "sequential", "in sequence", (True, False, False)),
]
FIRST = "who was asked", "its other port", "a stranger"


def two_ends(one: Host, other: Host, reflector: Address) -> tuple[End, End]:
    """Fresh sockets of two hosts that know what the reflector sees."""
    ends = End.of(one), End.of(other)
    learn(ends, {4: reflector})
    return ends


def meet(one: Host, other: Host, reflector: Address) -> bool:
    """Whether two hosts can punch."""
    ends = two_ends(one, other, reflector)
    (result,) = punch([ends], wait=0.8)
    for end in ends:
        end.close()
    return result


@pytest.mark.parametrize(("kind", "ports", "mapping", "filtering"), MAPPINGS)
def test_mapping_and_filtering(lab: Lab, kind: Kind, ports: Ports, mapping: str, filtering: tuple[bool, ...]) -> None:
    askers = [lab.host("stun1"), lab.host("stun2")]
    sockets = [askers[0].socket(port=3478), askers[0].socket(port=3479), askers[1].socket(port=3478)]
    addresses = [(askers[0].ipv4, 3478), (askers[0].ipv4, 3479), (askers[1].ipv4, 3478)]
    home = lab.nat("home", kind, ports=ports).host("inside")
    reflector = Reflector(*sockets)
    with home.socket() as asked, home.socket() as fresh:
        seen = seen_by(asked, addresses)
        (mapped,) = seen_by(fresh, addresses[:1])
        reflector.close()
        found = [one[1] for one in seen if one is not None]
        assert len(found) == 3
        kept = found[0] == asked.getsockname()[1]
        if mapping == "one port":
            assert len(set(found)) == 1
            assert kept == (ports == "preserve")
        elif mapping == "in sequence":
            assert found == [found[0], found[0] + 1, found[0] + 2]
        else:
            assert len(set(found)) == 3
        assert mapped is not None
        reached = []
        for one in sockets:
            one.sendto(b"x", mapped)
            reached.append(heard(fresh, 0.3) is not None)
        assert dict(zip(FIRST, reached, strict=True)) == dict(zip(FIRST, filtering, strict=True))
    for one in sockets:
        one.close()


@pytest.fixture
def dual_reflectors(lab: Lab) -> Iterator[dict[int, Address]]:
    """One reflector per family."""
    host = lab.host("stun", ipv6=True)
    sockets = host.socket(port=3478), host.socket(port=3478, ipv6=True)
    reflector = Reflector(*sockets)
    yield {4: (host.ipv4, 3478), 6: (host.ipv6, 3478)}
    reflector.close()
    for one in sockets:
        one.close()


def test_who_reaches_whom_without_tricks(lab: Lab, dual_reflectors: dict[int, Address]) -> None:
    """Every pair of sites, all at once: direct exactly where hope() says so, and nowhere by luck."""
    left = {site: build(lab, site, f"left-{site}") for site in SITES}
    right = {site: build(lab, site, f"right-{site}") for site in SITES}
    names = list(itertools.combinations_with_replacement(SITES, 2))
    pairs = [(End.of(left[one]), End.of(right[other])) for one, other in names]
    learn([end for pair in pairs for end in pair], dual_reflectors)
    results = dict(zip(names, punch(pairs, wait=2.0), strict=True))
    assert results == {name: hope(*name) is Hope.DIRECT for name in names}
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_blocked_network_lets_only_web_ports_out(lab: Lab) -> None:
    server, inside = lab.host("server"), lab.nat("office", "udp-blocked").host("inside")
    for port, passes in ((80, True), (443, True), (4433, False)):
        with server.socket(socket.SOCK_STREAM, port) as listening, inside.socket(socket.SOCK_STREAM) as client:
            listening.listen()
            client.settimeout(2 if passes else 0.5)
            if passes:
                client.connect((server.ipv4, port))
            else:
                with pytest.raises(TimeoutError):
                    client.connect((server.ipv4, port))
    with server.socket() as one, inside.socket() as other:
        other.sendto(b"x", (server.ipv4, one.getsockname()[1]))
        assert heard(one) is None


@pytest.mark.parametrize("hairpin", [False, True])
@pytest.mark.parametrize("kind", ["easy", "restricted", "fullcone"])
def test_hairpin(lab: Lab, reflectors: list[Address], kind: Kind, hairpin: bool) -> None:
    home = lab.nat("home", kind, hairpin=hairpin)
    one, other = home.host("one"), home.host("other")
    assert meet(one, other, reflectors[0]) is hairpin
    with one.socket() as here, other.socket() as there:  # neighbours need no gateway
        here.sendto(b"x", (other.ipv4, there.getsockname()[1]))
        assert heard(there) is not None


@pytest.mark.parametrize("hairpin", [False, True])
def test_two_homes_behind_one_carrier(lab: Lab, reflectors: list[Address], hairpin: bool) -> None:
    carrier = lab.nat("carrier", "fullcone", lan=CARRIER, hairpin=hairpin)
    one, other = (carrier.nat(f"{name}/gw").host(name) for name in ("one", "other"))
    assert one.ipv4 == other.ipv4 == "192.168.1.2"  # as homes are
    assert one.public_ipv4 == other.public_ipv4 == carrier.ipv4
    assert meet(one, other, reflectors[0]) is hairpin


def test_mappings_are_forgotten(lab: Lab, reflectors: list[Address]) -> None:
    gateway = lab.nat("home", "symmetric")
    inside = gateway.host("inside")
    with inside.socket() as one:
        (before,), (again,) = seen_by(one, reflectors[:1]), seen_by(one, reflectors[:1])
        assert before == again
        gateway.flush()
        (after,) = seen_by(one, reflectors[:1])
        assert after is not None
        assert after != before
        assert after[0] == gateway.ipv4


def test_a_gateway_gets_another_address(lab: Lab, reflectors: list[Address]) -> None:
    gateway = lab.nat("home", "easy", firewall="stateful")
    inside, outside = gateway.host("inside"), lab.host("outside", ipv6=True)
    with inside.socket() as one, outside.socket() as stranger:
        (before,) = seen_by(one, reflectors[:1])
        fresh = gateway.renumber()
        (after,) = seen_by(one, reflectors[:1])
        assert before is not None
        assert after == (fresh, before[1])
        assert before[0] != fresh
        stranger.sendto(b"x", before)
        assert heard(one, 0.3) is None
    with inside.socket(ipv6=True) as one, outside.socket(ipv6=True) as other:
        one.sendto(b"x", (outside.ipv6, other.getsockname()[1]))
        found = heard(other)
        assert found is not None
        assert found[1][0] == inside.ipv6


def test_mappings_time_out(lab: Lab) -> None:
    asker = lab.host("asker")
    inside = lab.nat("home", "easy", udp_timeout=(1, 2)).host("inside")
    with asker.socket(port=3478) as server, inside.socket() as one:
        one.sendto(b"x", (asker.ipv4, 3478))
        found = heard(server)
        assert found is not None
        server.sendto(b"x", found[1])
        assert heard(one) is not None
        time.sleep(3.5)  # the kernel's own clock
        server.sendto(b"x", found[1])
        assert heard(one) is None


def test_a_port_forward_lets_everybody_in(lab: Lab) -> None:
    gateway, stranger = lab.nat("home", "easy"), lab.host("stranger")
    inside = gateway.host("inside")
    gateway.forward(7777, inside, 7000)
    with inside.socket(port=7000) as one, stranger.socket() as other:
        other.sendto(b"x", (gateway.ipv4, 7777))
        assert heard(one) is not None


def test_ipv6_firewalls(lab: Lab) -> None:
    stranger = lab.host("stranger", ipv6=True)
    cases: list[tuple[Firewall, bool, bool]] = [
        ("open", True, True),
        ("stateful", True, False),
        ("udp-blocked", False, False),
    ]
    for firewall, outward, inward in cases:
        inside = lab.nat(f"home-{firewall}", None, firewall=firewall).host(f"in-{firewall}", ipv4=False)
        assert inside.ipv4 == ""
        with inside.socket(ipv6=True) as one, stranger.socket(ipv6=True) as other:
            other.sendto(b"x", (inside.ipv6, one.getsockname()[1]))
            assert (heard(one, 0.3) is not None) is inward
            one.sendto(b"x", (stranger.ipv6, other.getsockname()[1]))
            found = heard(other, 0.3)
            assert (found is not None) is outward
            if found is not None:  # nothing is translated, and the answer comes in
                assert found[1] == (inside.ipv6, one.getsockname()[1])
                other.sendto(b"x", found[1])
                assert heard(one) is not None


def test_ipv6_behind_two_gateways(lab: Lab) -> None:
    carrier = lab.nat("carrier", "easy", lan=CARRIER, firewall="open")
    homes = [carrier.nat(f"{name}/gw", "easy", firewall="open").host(name) for name in ("one", "other")]
    stranger = lab.host("stranger", ipv6=True)
    for source, target in ((homes[0], homes[1]), (stranger, homes[0]), (homes[1], stranger)):
        with source.socket(ipv6=True) as one, target.socket(ipv6=True) as other:
            one.sendto(b"x", (target.ipv6, other.getsockname()[1]))
            found = heard(other)
            assert found is not None
            assert found[1][0] == source.ipv6


def test_a_machine_without_ipv6_has_none(lab: Lab) -> None:
    with lab.host("old").socket(ipv6=True) as one, pytest.raises(OSError, match="Cannot assign"):
        one.sendto(b"x", ("2606:1100::1", 9))


def test_a_host_firewall_lets_in_what_was_asked_for(lab: Lab) -> None:
    server, other = lab.host("server", firewall=True), lab.host("other")
    with server.socket() as one, other.socket() as two:
        two.sendto(b"x", (server.ipv4, one.getsockname()[1]))
        assert heard(one, 0.3) is None
        one.sendto(b"x", (other.ipv4, two.getsockname()[1]))
        found = heard(two)
        assert found is not None
        two.sendto(b"x", found[1])
        assert heard(one) is not None


def test_a_black_hole_swallows_udp_of_one_pair_only(lab: Lab) -> None:
    one, other = lab.nat("home", "easy").host("one"), lab.host("other")
    third = lab.host("third")
    with one.socket() as a, other.socket(port=9) as b, third.socket(port=9) as c:

        def passes() -> tuple[bool, bool]:
            a.sendto(b"there", (other.ipv4, 9))
            there = heard(b, 0.3)
            b.sendto(b"back", (one.public_ipv4, a.getsockname()[1]))
            return there is not None, heard(a, 0.3) is not None

        assert passes() == (True, True)
        lab.black_hole(one, other)
        assert passes() == (False, False)
        a.sendto(b"x", (third.ipv4, 9))
        assert heard(c) is not None
        assert other.unheard() == one.unheard() == 1
        with other.socket(socket.SOCK_STREAM, 80) as listening, one.socket(socket.SOCK_STREAM) as client:
            listening.listen()
            client.settimeout(5)
            client.connect((other.ipv4, 80))
        lab.heal(one, other)
        assert passes() == (True, True)
        lab.black_hole(one, other, both=False)
        assert passes() == (False, True)
        lab.heal(one, other)


def test_udp_can_be_switched_off_while_it_flows(lab: Lab) -> None:
    gateway, server = lab.nat("office", "easy"), lab.host("server")
    inside = gateway.host("inside")
    with inside.socket() as one, server.socket(port=9) as other:
        for allowed in (True, False, True):
            gateway.set_udp(allowed)
            one.sendto(b"x", (server.ipv4, 9))
            assert (heard(other, 0.3) is not None) is allowed


def test_a_host_moves_to_another_network(lab: Lab) -> None:
    home, office, server = lab.nat("home"), lab.nat("office"), lab.host("server", ipv6=True)
    phone = lab.nat("cafe", "easy", firewall="stateful").host("phone")
    mobile, work = phone.plug(lab, delay_ms=5), phone.plug(office)
    with phone.socket() as one, server.socket(port=9) as other:

        def source() -> str:
            one.sendto(b"x", (server.ipv4, 9))
            found = heard(other, 1)
            assert found is not None
            return found[1][0]

        first = source()
        assert first == phone.public_ipv4
        assert phone.ipv6 != ""
        phone.use(mobile)
        assert source() == phone.ipv4 == mobile.ipv4
        phone.use(work)
        assert source() == office.ipv4 == phone.public_ipv4
        assert phone.ipv6 == ""
        phone.use(phone.uplinks[0])
        assert source() == first
        phone.use(mobile, keep=True)
        assert source() == mobile.ipv4
        assert f" {phone.uplinks[0].ipv4}/" in phone.ip("addr show dev wan0")
        assert f" {mobile.ipv4}/" in phone.ip("addr show dev wan1")
        assert f" {work.ipv4}/" not in phone.ip("addr show dev wan2")
    with pytest.raises(ValueError, match="no link of its own"):
        home.host("inside").set(delay_ms=1)


def test_a_path_that_carries_less_is_a_black_hole_for_large_packets(lab: Lab) -> None:
    one, other = lab.host("one", carry=1300), lab.host("other")
    with one.socket() as here, other.socket(port=9) as there:
        for size, passes in ((1272, True), (1273, False), (1472, False)):
            here.sendto(bytes(size), (other.ipv4, 9))
            assert (heard(there, 0.3) is not None) is passes
        one.set(carry=0)
        here.sendto(bytes(1472), (other.ipv4, 9))
        assert heard(there) is not None
    with lab.host("tunnel", mtu=1280).socket() as here, other.socket(port=9):
        here.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, DO: the machine knows, and says so
        with pytest.raises(OSError, match="too long"):
            here.sendto(bytes(1400), (other.ipv4, 9))


def test_delays_add_up(lab: Lab) -> None:
    one, other = lab.nat("home", delay_ms=15).host("one"), lab.host("other", delay_ms=10)
    lab.between(one, other, delay_ms=5)
    times = []
    with one.socket() as here, other.socket(port=9) as there:
        for _ in range(15):
            start = time.monotonic()
            here.sendto(b"x", (other.ipv4, 9))
            found = heard(there, 2)
            assert found is not None
            there.sendto(b"x", found[1])
            assert heard(here, 2) is not None
            times.append(time.monotonic() - start)
    assert min(times) >= 0.060
    assert statistics.median(times) < 0.090


def test_udp_is_policed_and_lost_without_touching_tcp(lab: Lab) -> None:
    one, other = lab.host("one", udp_up_mbit=4, udp_loss=0.0), lab.host("other")
    with one.socket() as here, other.socket(port=9) as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 21)
        for _ in range(200):  # 246 KB at once; the burst of 32 KiB passes, and what 4 Mbit/s refill meanwhile
            here.sendto(bytes(1200), (other.ipv4, 9))
        arrived = 0
        while heard(there, 0.3):
            arrived += 1
        assert 20 <= arrived <= 100
        assert lab.stats()["other"]["policed"] == 200 - arrived
        one.set(udp_up_mbit=0, udp_loss=1.0)
        here.sendto(b"x", (other.ipv4, 9))
        assert heard(there, 0.3) is None
    with other.socket(socket.SOCK_STREAM, 80) as listening, one.socket(socket.SOCK_STREAM) as client:
        listening.listen()
        client.settimeout(5)
        client.connect((other.ipv4, 80))
        accepted, _ = listening.accept()
        accepted.settimeout(5)
        client.sendall(bytes(100_000))
        client.close()
        size = 0
        while chunk := accepted.recv(65_536):
            size += len(chunk)
        accepted.close()
        assert size == 100_000
    counters = lab.stats()["one"]
    assert counters["other_bytes"] > 100_000
    assert counters["udp_bytes"] > 200 * 1200


def test_loss_is_what_was_asked_for(lab: Lab) -> None:
    one, other = lab.host("one", udp_loss=0.2), lab.host("other")
    lab.between(one, other, udp_loss=0.1)
    arrived = 0
    with one.socket() as here, other.socket(port=9) as there:
        for _ in range(20):
            for _ in range(50):
                here.sendto(b"x", (other.ipv4, 9))
            while heard(there, 0.02):
                arrived += 1
    assert 650 <= arrived <= 790  # 0.8 × 0.9 of 1000; five standard deviations


def test_a_link_goes_down_and_comes_back(lab: Lab) -> None:
    gateway, server = lab.nat("home"), lab.host("server")
    inside = gateway.host("inside")
    with inside.socket() as one, server.socket(port=9) as other:
        for up in (True, False, True):
            gateway.set(up=up)
            one.sendto(b"x", (server.ipv4, 9))
            assert (heard(other, 0.3) is not None) is up


def test_processes_live_in_hosts_and_end_with_the_lab(natlab_works: None) -> None:
    send = "import socket, sys, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
    with Lab() as lab:
        inside, server = lab.nat("home").host("inside"), lab.host("server")
        with server.socket(port=9) as listening:
            code = send + "s.sendto(b'hi', (sys.argv[1], 9)); time.sleep(60)"
            process = inside.popen([sys.executable, "-c", code, server.ipv4])
            found = heard(listening, 10)
        assert found is not None
        assert found[1][0] == inside.public_ipv4
        assert process.poll() is None
    assert process.poll() is not None


def test_processes_end_when_the_tests_are_killed(natlab_works: None) -> None:
    code = (
        "import sys, time; from tests.natlab.lab import Lab; lab = Lab(); "
        "process = lab.nat('home').host('inside').popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        watched = os.pidfd_open(pid)
        owner.kill()
    ended = select.select([watched], [], [], 10)[0]
    os.close(watched)
    assert ended, "a process of the lab outlived it"


def test_our_own_network_is_left_alone(lab: Lab) -> None:
    def links() -> str:
        return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout

    before = links()
    lab.nat("home").host("inside").use(lab.nodes["inside"].plug(lab))
    assert links() == before


@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_where_no_lab_can_be_built_the_reason_is_said(required: str, outcome: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "mistakes", __file__]
    environment = {**os.environ, "NATLAB_TUN": "/nowhere", "NATLAB_REQUIRE": required}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert outcome in done.stdout
    assert "natlab needs /nowhere read-write" in done.stdout


def test_mistakes_are_named(lab: Lab) -> None:
    with pytest.raises(ValueError, match="taken"):
        [lab.host("twin") for _ in range(2)]
    with pytest.raises(ValueError, match="unknown link option"):
        lab.host("typo", dealy_ms=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no hairpin"):
        lab.nat("odd", "symmetric", hairpin=True)
    with pytest.raises(LabError, match="nft"):
        lab.host("plain").nft("nonsense")
