from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.proto import port_mapping_frames as frames

NONCE = bytes(range(1, 13))
PARSERS = (
    frames.parse_pmp_address,
    frames.parse_pmp_mapping,
    frames.parse_pcp_mapping,
    frames.parse_pcp_epoch,
    frames.parse_ssdp_location,
    lambda data: frames.refuses_version(data, 0),
    lambda data: frames.refuses_version(data, 2),
)

PCP_MAP_ANSWER = bytes.fromhex(
    "02810000" "00001c20" "00000e10" "000000000000000000000000"
    "0102030405060708090a0b0c" "11000000" "1151c350" "00000000000000000000ffffcb007107"
)  # fmt: skip


class TestVectors:
    """The layouts of RFC 6886, 3 and RFC 6887, 7 and 11, byte by byte."""

    def test_nat_pmp_requests(self) -> None:
        assert frames.pmp_ask_address().hex() == "0000"
        assert frames.pmp_ask_mapping(4433, 50000, 7200).hex() == "000100001151c35000001c20"
        assert frames.pmp_ask_mapping(4433, 0, 0).hex() == "000100001151000000000000"

    def test_nat_pmp_answers(self) -> None:
        address = bytes.fromhex("0080000000000e10cb007107")
        assert frames.parse_pmp_address(address) == frames.PmpAddress(0, 3600, "203.0.113.7")
        mapping = bytes.fromhex("0081000000000e101151c35000001c20")
        assert frames.parse_pmp_mapping(mapping) == frames.PmpMapping(0, 3600, 4433, 50000, 7200)

    def test_a_nat_pmp_error_may_be_short(self) -> None:
        assert frames.parse_pmp_address(bytes.fromhex("0080000200000e10")) == frames.PmpAddress(2, 3600, "")

    def test_pcp_request(self) -> None:
        asked = frames.pcp_ask_mapping("192.168.1.2", NONCE, 4433, ("203.0.113.7", 50000), 7200)
        assert asked.hex() == (
            "0201000000001c2000000000000000000000ffffc0a80102"
            "0102030405060708090a0b0c110000001151c35000000000000000000000ffffcb007107"
        )
        assert frames.pcp_ask_epoch("192.168.1.2").hex() == "020000000000000000000000000000000000ffffc0a80102"

    def test_pcp_answers(self) -> None:
        answer = frames.parse_pcp_mapping(PCP_MAP_ANSWER)
        assert answer == frames.PcpMapping(0, 3600, 7200, NONCE, 4433, ("203.0.113.7", 50000))
        epoch = bytes.fromhex("028000000000000000000e10000000000000000000000000")
        assert frames.parse_pcp_epoch(epoch) == 3600

    def test_options_after_a_pcp_answer_are_ignored(self) -> None:
        assert frames.parse_pcp_mapping(PCP_MAP_ANSWER + bytes(8)) == frames.parse_pcp_mapping(PCP_MAP_ANSWER)


@pytest.mark.parametrize(
    ("data", "asked", "refused"),
    [
        ("0081000100000e10", frames.PCP_VERSION, True),  # a NAT-PMP router, asked in PCP
        ("02800001" + "00" * 20, frames.PMP_VERSION, True),  # a PCP router, asked in NAT-PMP
        ("0081000100000e10", frames.PMP_VERSION, False),
        ("0081000200000e10", frames.PCP_VERSION, False),
        ("0001000100000e10", frames.PCP_VERSION, False),  # no answer
        ("00", frames.PCP_VERSION, False),
    ],
)
def test_a_router_of_the_other_protocol_says_so(data: str, asked: int, refused: bool) -> None:
    assert frames.refuses_version(bytes.fromhex(data), asked) is refused


def test_answers_that_cannot_be_meant() -> None:
    for cut in range(len(PCP_MAP_ANSWER)):
        assert frames.parse_pcp_mapping(PCP_MAP_ANSWER[:cut]) is None
    tcp, no_port = bytearray(PCP_MAP_ANSWER), bytearray(PCP_MAP_ANSWER)
    tcp[36] = 6
    no_port[42:44] = b"\0\0"
    assert frames.parse_pcp_mapping(bytes(tcp)) is None
    assert frames.parse_pcp_mapping(bytes(no_port)) is None
    assert frames.parse_pcp_mapping(PCP_MAP_ANSWER + bytes(frames.MAX_MESSAGE)) is None
    assert frames.parse_pmp_mapping(bytes.fromhex("0081000000000e101151000000001c20")) is None


@given(st.one_of(st.binary(max_size=1200), st.binary(max_size=80).map(lambda tail: b"\x02\x81\0\0" + tail)))
def test_no_parser_raises(data: bytes) -> None:
    for parse in PARSERS:
        parse(data)


@given(st.integers(1, 65535), st.integers(1, 65535), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_what_a_router_writes_is_read_back(internal: int, external: int, lifetime: int, epoch: int) -> None:
    pmp = struct.pack(">BBHIHHI", 0, 129, 0, epoch, internal, external, lifetime)
    assert frames.parse_pmp_mapping(pmp) == frames.PmpMapping(0, epoch, internal, external, lifetime)
    asked = frames.pcp_ask_mapping("10.0.0.2", NONCE, internal, ("198.51.100.1", external), lifetime)
    answer = frames.parse_pcp_mapping(struct.pack(">BBBBII12x", 2, 129, 0, 0, lifetime, epoch) + asked[24:])
    assert answer == frames.PcpMapping(0, epoch, lifetime, NONCE, internal, ("198.51.100.1", external))


class TestEpochs:
    """RFC 6887, 8.5: the router's clock may be slow or fast, but not go back or jump."""

    def test_a_router_that_runs_on_lost_nothing(self) -> None:
        clock = frames.EpochClock()
        assert not clock.lost(1000, 0.0)
        assert not clock.lost(1060, 60.0)
        assert not clock.lost(1060, 61.0)  # the same second
        assert not clock.lost(1059, 61.5)  # answers that overtook each other
        assert not clock.lost(4900, 3600 + 300.0)

    @pytest.mark.parametrize(("epoch", "now"), [(5, 60.0), (998, 0.5), (1010, 600.0), (9000, 60.0)])
    def test_a_router_that_restarted(self, epoch: int, now: float) -> None:
        clock = frames.EpochClock()
        clock.lost(1000, 0.0)
        assert clock.lost(epoch, now)
        assert not clock.lost(epoch + 1, now + 1)


class TestSsdp:
    ANSWER = (
        "HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=120\r\nST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n"
        "Location: http://192.168.1.1:5000/rootDesc.xml\r\n\r\n"
    )

    def test_the_question(self) -> None:
        assert frames.ssdp_search("urn:x:1") == (
            b'M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\nST: urn:x:1\r\n\r\n'
        )

    def test_the_answer(self) -> None:
        assert frames.parse_ssdp_location(self.ANSWER.encode()) == "http://192.168.1.1:5000/rootDesc.xml"

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("200 OK", "404 Not Found"),
            ("http://", "file://"),
            ("http://", "https://"),
            ("InternetGatewayDevice", "MediaRenderer"),
            ("rootDesc.xml", "x" * 300),
            ("rootDesc.xml", "a b\x01c"),
            ("Location", "Elsewhere"),
            ("max-age=120", "x" * 3000),
        ],
    )
    def test_what_is_no_answer(self, old: str, new: str) -> None:
        assert frames.parse_ssdp_location(self.ANSWER.replace(old, new).encode()) is None
