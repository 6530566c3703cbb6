from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.proto.candidates import parse_host
from transport.proto.netlink import DELADDR as KIND
from transport.proto.netlink import host_of, messages, stopped_link

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="the vectors are of a little-endian machine")

# Recorded from Linux 6.18: `ip addr del 192.168.7.2/24 dev eth0`, then the far end of eth0 set down (its start).
DELADDR = bytes.fromhex(
    "500000001500000078680c6b957a0000021880000300000008000100c0a8070208000200c0a80702090003006574683000000000"
    "080008000000000014000600ffffffffffffffff331e1200331e1200"
)
LINK_DOWN = bytes.fromhex("000001000300000003100000000000000900030065746830000000000000")  # flags: up, no carrier


def test_messages_of_the_kernel_are_read() -> None:
    [(kind, payload)] = list(messages(DELADDR))
    assert kind == KIND
    assert host_of(payload) == "192.168.7.2"


def test_a_link_that_stopped_is_named_and_one_that_runs_is_not() -> None:
    assert stopped_link(LINK_DOWN) == "eth0"
    assert stopped_link(LINK_DOWN.replace(b"\x03\x10", b"\x43\x10")) == ""


@given(st.binary(max_size=300) | st.binary(max_size=80).map(lambda tail: DELADDR[:24] + tail))
def test_any_bytes_from_the_kernel_are_survived(data: bytes) -> None:
    for _, payload in messages(data):
        assert len(payload) <= len(data)
        assert host_of(payload) == "" or parse_host(host_of(payload)) is not None
        stopped_link(payload)
