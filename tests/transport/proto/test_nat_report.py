from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import Address
from transport.proto.addresses import NatKind
from transport.proto.nat_report import MAX_REFLECTED, MAX_REFLECTORS, NatObserver

A1, A2 = ("11.0.0.1", 3478), ("11.0.0.1", 3479)
B1, B2 = ("11.0.0.2", 3478), ("11.0.0.2", 3479)
SIX1, SIX2 = ("2001:db8:f::1", 3478), ("2001:db8:f::1", 3479)
LAN1, LAN2 = ("192.168.1.9", 3478), ("192.168.1.9", 3479)
OWN = ["127.0.0.1", "::1", "192.168.1.7", "fe80::1%eth0"]
PORT = 4433
OUTSIDE = ("11.5.5.5", 48259)


def seen(*answers: tuple[Address, Address], now: float = 0.0) -> NatObserver:
    """An observer with one check's answers."""
    observer = NatObserver()
    for at, (reflector, address) in enumerate(answers):
        observer.observe(reflector, PORT, address, now + at * 0.01)
    return observer


def test_nothing_is_known_before_anyone_was_asked() -> None:
    report = NatObserver().report(0.0, OWN)
    assert (report.kind, report.mapping, report.reflected) == (NatKind.UNKNOWN, "unknown", ())


def test_the_same_address_for_all_is_an_easy_nat() -> None:
    report = seen((A1, OUTSIDE), (B1, OUTSIDE)).report(1.0, OWN)
    assert report.kind == NatKind.EASY
    assert report.mapping == "endpoint-independent"
    assert report.reflected == (OUTSIDE,)
    assert not report.port_kept
    assert "11.5.5.5:48259" in report.reason


def test_two_ports_of_one_reflector_are_enough() -> None:
    assert seen((A1, OUTSIDE), (A2, OUTSIDE)).report(1.0, OWN).kind == NatKind.EASY


def test_a_kept_port_is_said() -> None:
    assert seen((A1, ("11.5.5.5", PORT)), (B1, ("11.5.5.5", PORT))).report(1.0, OWN).port_kept


def test_one_reflector_tells_the_address_and_not_the_kind() -> None:
    report = seen((A1, OUTSIDE)).report(1.0, OWN)
    assert (report.kind, report.reflected) == (NatKind.UNKNOWN, (OUTSIDE,))
    assert "second" in report.reason


def test_random_ports_are_a_hard_nat_of_one_address() -> None:
    report = seen((A1, ("11.5.5.5", 16577)), (B1, ("11.5.5.5", 3671)), (B2, ("11.5.5.5", 40001))).report(1.0, OWN)
    assert report.kind == NatKind.HARD
    assert report.mapping == "address-and-port-dependent"
    assert report.port_delta == 0
    assert report.reflected == (("11.5.5.5", 16577),)  # its port is of no use, one tells the host


def test_a_mapping_for_each_host_is_hard_too() -> None:
    one, other = ("11.5.5.5", 16577), ("11.5.5.5", 3671)
    report = seen((A1, one), (A2, one), (B1, other), (B2, other)).report(1.0, OWN)
    assert (report.kind, report.mapping) == (NatKind.HARD, "address-dependent")


@pytest.mark.parametrize(
    ("ports", "delta"),
    [
        ([40000, 40001, 40002], 1),
        ([40000, 40002, 40004], 2),
        ([40000, 40001, 40004], 1),  # somebody else took two in between
        ([40002, 40001, 40000], -1),
        ([40000, 40001, 39000], 0),
        ([40001, 40000, 40002], 0),
        ([40000, 40100, 40200], 0),
    ],
)
def test_ports_that_grow_are_predictable_and_the_last_is_told(ports: list[int], delta: int) -> None:
    answers = [(reflector, ("11.5.5.5", port)) for reflector, port in zip((A1, A2, B1), ports, strict=True)]
    report = seen(*answers).report(1.0, OWN)
    assert (report.kind, report.port_delta) == (NatKind.HARD, delta)
    if delta:
        assert report.reflected == (("11.5.5.5", ports[-1]),)


def test_ports_follow_the_order_of_sending_not_of_answers() -> None:
    observer = NatObserver()
    for reflector, port, sent, now in ((B1, 40002, 0.002, 0.01), (A1, 40000, 0.0, 0.2), (A2, 40001, 0.001, 0.3)):
        observer.observe(reflector, PORT, ("11.5.5.5", port), now, sent)
    report = observer.report(1.0, OWN)
    assert (report.port_delta, report.reflected) == (1, (("11.5.5.5", 40002),))
    # the mappings are the old ones in later checks, in whatever order they are asked
    for reflector, port, sent in ((A1, 40000, 30.2), (B1, 40002, 30.1), (A2, 40001, 30.0)):
        observer.observe(reflector, PORT, ("11.5.5.5", port), 30.5, sent)
    assert observer.report(31.0, OWN) == report


def test_our_own_address_seen_from_outside_is_no_nat() -> None:
    report = seen((A1, ("11.7.7.7", PORT)), (B1, ("11.7.7.7", PORT))).report(1.0, ["11.7.7.7", "127.0.0.1"])
    assert (report.kind, report.mapping, report.port_kept) == (NatKind.NONE, "none", True)
    assert seen((A1, ("11.7.7.7", PORT))).report(1.0, ["11.7.7.7"]).kind == NatKind.NONE


def test_our_own_address_with_another_port_is_a_nat() -> None:
    seen_as = ("11.7.7.7", 999)
    assert seen((A1, seen_as), (B1, seen_as)).report(1.0, ["11.7.7.7"]).kind == NatKind.EASY


def test_the_internet_decides_before_the_lan() -> None:
    lan = ("192.168.1.7", PORT)
    observer = seen((LAN1, lan), (LAN2, lan), (A1, OUTSIDE), (B1, OUTSIDE))
    report = observer.report(1.0, OWN)
    assert report.kind == NatKind.EASY
    assert report.reflected == (OUTSIDE, lan)
    assert seen((LAN1, lan), (LAN2, lan)).report(1.0, OWN).kind == NatKind.NONE


def test_ipv4_decides_and_ipv6_does_where_there_is_no_ipv4() -> None:
    own6 = ("2001:db8::7", PORT)
    both = seen((A1, OUTSIDE), (B1, OUTSIDE), (SIX1, own6), (SIX2, own6))
    hosts = [*OWN, "2001:db8::7"]
    assert both.report(1.0, hosts).kind == NatKind.EASY
    assert both.report(1.0, hosts).reflected == (OUTSIDE, own6)
    only6 = seen((SIX1, own6), (SIX2, own6))
    only6.no_answer(A1, 1.0)
    only6.no_answer(B1, 1.0)
    assert only6.report(1.0, hosts).kind == NatKind.NONE


def test_silence_of_all_is_blocked_and_of_one_proves_nothing() -> None:
    observer = NatObserver()
    observer.no_answer(A1, 1.0)
    assert observer.report(1.0, OWN).kind == NatKind.UNKNOWN
    assert "one reflector proves nothing" in observer.report(1.0, OWN).reason
    observer.no_answer(A2, 1.0)
    assert observer.report(1.0, OWN).kind == NatKind.BLOCKED


def test_a_peer_that_is_heard_shows_that_udp_is_not_blocked() -> None:
    observer = NatObserver()
    observer.no_answer(A1, 1.0)
    observer.no_answer(A2, 1.0)
    observer.heard_directly()
    assert observer.report(1.0, OWN).kind == NatKind.UNKNOWN


def test_lost_answers_change_nothing_until_a_second_check_loses_them() -> None:
    observer = seen((A1, OUTSIDE), (B1, OUTSIDE))
    report = observer.report(1.0, OWN)
    observer.no_answer(A1, 2.0)
    assert observer.report(2.0, OWN) == report
    observer.no_answer(B1, 2.0)
    assert observer.report(2.0, OWN) == report
    observer.no_answer(A1, 4.0)
    assert observer.report(4.0, OWN).kind == NatKind.EASY  # one still stands, and the verdict with it
    observer.no_answer(B1, 4.0)
    assert observer.report(4.0, OWN).kind == NatKind.BLOCKED
    observer.observe(A1, PORT, OUTSIDE, 40.0)
    assert observer.report(40.0, OWN).reflected == (OUTSIDE,)


def test_a_mapping_that_moved_between_two_checks_is_not_a_hard_nat() -> None:
    observer = seen((A1, OUTSIDE), (B1, OUTSIDE))
    moved = ("11.5.5.5", 50000)
    assert observer.observe(A1, PORT, moved, 25.0)
    report = observer.report(25.0, OWN)
    assert (report.kind, report.reflected) == (NatKind.EASY, (moved,))
    assert observer.observe(B1, PORT, moved, 25.1)
    assert not observer.observe(B1, PORT, moved, 25.2)
    assert observer.report(26.0, OWN).kind == NatKind.EASY


def test_another_network_is_judged_anew() -> None:
    observer = seen((A1, ("11.5.5.5", 1)), (B1, ("11.5.5.5", 20000)))
    assert observer.report(1.0, OWN).kind == NatKind.HARD
    observer.observe(A1, PORT, ("11.6.6.6", 7), 10.2)
    observer.no_answer(B1, 11.0)
    observer.forget_before(10.0)
    report = observer.report(11.0, OWN)
    assert report.reflected == (("11.6.6.6", 7),)
    observer.observe(B1, PORT, ("11.6.6.6", 7), 13.0)
    observer.observe(A1, PORT, ("11.6.6.6", 7), 13.0)
    assert observer.report(13.0, OWN).kind == NatKind.EASY


def test_a_check_that_fails_in_a_new_network_is_not_at_once_blocked() -> None:
    observer = seen((A1, OUTSIDE), (B1, OUTSIDE))
    for kind in (NatKind.UNKNOWN, NatKind.BLOCKED):
        observer.no_answer(A1, 11.0)
        observer.no_answer(B1, 11.0)
        observer.forget_before(10.0)
        assert observer.report(11.0, OWN).kind == kind


def test_reflectors_that_are_gone_say_nothing_more() -> None:
    observer = seen((A1, OUTSIDE), (B1, ("11.5.5.9", 1)))
    observer.keep_only([A1])
    assert observer.report(1.0, OWN).reflected == (OUTSIDE,)


def test_an_address_of_the_wrong_family_or_of_nobody_is_ignored() -> None:
    observer = NatObserver()
    for address in (("2001:db8::1", 5), ("0.0.0.0", 5), ("224.0.0.1", 5), ("11.0.0.1", 0), ("nobody", 5)):
        assert not observer.observe(A1, PORT, address, 0.0)
    assert observer.report(0.0, OWN).reflected == ()


HOSTS = st.sampled_from(["11.5.5.5", "11.5.5.6", "192.168.1.7", "10.0.0.1", "2001:db8::7", "127.0.0.1", "x", ""])
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["observe", "silent", "forget", "heard", "keep"]),
        st.tuples(st.sampled_from(["11.0.0.1", "11.0.0.2", "2001:db8:f::1", "bad"]), st.integers(0, 40)),
        st.tuples(HOSTS, st.integers(-1, 70000)),
        st.floats(0, 100),
    ),
    max_size=60,
)


@given(EVENTS)
def test_any_order_of_news_gives_a_report(events: list[tuple[str, Address, Address, float]]) -> None:
    observer = NatObserver()
    for what, reflector, address, now in events:
        match what:
            case "observe":
                observer.observe(reflector, PORT, address, now)
            case "silent":
                observer.no_answer(reflector, now)
            case "forget":
                observer.forget_before(now)
            case "heard":
                observer.heard_directly()
            case _:
                observer.keep_only([reflector])
        report = observer.report(now, OWN)
        assert report.reason
        assert len(report.reflected) <= 2 * MAX_REFLECTED
        assert report.kind == NatKind.HARD or not report.port_delta
        assert (report.kind == NatKind.EASY) == (report.mapping == "endpoint-independent")


def test_reflectors_are_bounded() -> None:
    observer = NatObserver()
    for port in range(1, 10 * MAX_REFLECTORS):
        observer.observe(("11.0.0.1", port), PORT, OUTSIDE, float(port))
    assert len(observer.report(0.0, OWN).reflected) == 1
    assert len(observer._reflectors) == MAX_REFLECTORS
