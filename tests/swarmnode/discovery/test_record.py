from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.discovery import record as records
from swarmnode.discovery.record import (
    MAX_RECORD,
    PeerRecord,
    content,
    decode,
    next_seq,
    peek,
    shown_name,
    sign,
    swarm_tag,
    swarm_topic,
)
from swarmnode.errors import BadRecord
from tests.swarmnode.discovery.samples import SWARM, blob, identity, record
from transport.identity import Identity, PeerId

KEY = Identity.generate(bytes([1]) * 32)
SAMPLE = PeerRecord(
    swarm=SWARM,
    peer=KEY.peer_id,
    seq=0x0123456789,
    ttl_s=10,
    name="kitchen",
    role="worker",
    relays=("https://relay.example",),
    addresses=(("192.168.1.7", 4433), ("2001:db8::7", 4433)),
    certificate=b"\xce\x57",
    model=bytes(range(8)),
    memory=1 << 33,
)
VECTOR = bytes.fromhex(
    "01"
    "8139770ea87d175f56a35466c34c7ecccb8d8a91b4ee37a25df60f5b8fc9b394"
    "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c"
    "0000000123456789 0a 0000000200000000 0001020304050607"
    "07 6b69746368656e 06 776f726b6572"
    "01 0015 68747470733a2f2f72656c61792e6578616d706c65"
    "0002 ce57"
    "02 04 c0a80107 1151 06 20010db8000000000000000000000007 1151"
    "a2a0ba7162cd76f1f766e36a49b35b5da03b3de1df3a1c6387a5a9bdd0170280"
    "c2676ebd3e793d01eb5fad871a90dd3f9e0eebb945486ece504928dbea66700f"
)


def test_the_bytes_of_a_record() -> None:
    assert sign(SAMPLE, KEY.sign) == VECTOR
    assert decode(VECTOR) == SAMPLE
    head = peek(VECTOR)
    assert (head.swarm, head.peer, head.seq, head.ttl_s) == (SWARM.raw, KEY.peer_id.raw, 0x0123456789, 10)


def test_the_names_of_a_swarm_on_relays_and_on_a_lan() -> None:
    assert swarm_topic(SWARM).hex() == "478c2d9bfce223eef1a7a605eed0efa31e408d6bfea6f422ebb8d8dc47379b55"
    assert swarm_tag(SWARM).hex() == "848245de9bdfff2b"


hosts = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
relay_urls = st.from_regex(r"https://[a-z]{1,60}\.example(:[1-9][0-9]{3})?", fullmatch=True)
peer_records = st.builds(
    PeerRecord,
    swarm=st.just(SWARM),
    peer=st.just(KEY.peer_id),
    seq=st.integers(0, 2**64 - 1),
    ttl_s=st.integers(0, 60),
    name=st.text(max_size=100),
    role=st.from_regex(r"[a-z-]{0,16}", fullmatch=True),
    relays=st.lists(relay_urls, max_size=4).map(tuple),
    addresses=st.lists(st.tuples(hosts, st.integers(0, 65_535)), max_size=14).map(tuple),
    certificate=st.binary(max_size=400),
    model=st.sampled_from([b"", bytes(range(1, 9))]),
    memory=st.integers(0, 2**64 - 1),
)


@given(peer_records)
def test_what_is_said_is_understood_and_never_too_long(said: PeerRecord) -> None:
    told = sign(said, KEY.sign)
    assert len(told) <= MAX_RECORD
    understood = decode(told)
    kept = replace(said, name=shown_name(said.name), relays=understood.relays, addresses=understood.addresses)
    assert understood == kept
    assert set(understood.relays) <= set(said.relays)
    assert sign(understood, KEY.sign) == told  # what was cut once is not cut again


def test_what_is_too_much_is_cut_from_the_end() -> None:
    relays = tuple(f"https://{letter * 60}.{'x' * 60}.{'y' * 60}.{'z' * 50}.example" for letter in "abc")
    addresses = tuple((f"2001:db8::{number:x}", 4433) for number in range(1, 13))
    full = replace(SAMPLE, certificate=bytes(400), name="n" * 100, relays=relays, addresses=addresses)
    kept = decode(sign(full, KEY.sign))
    assert kept.name == "n" * 64
    assert kept.relays == relays[: len(kept.relays)]
    assert 1 <= len(kept.relays) < 3 or len(kept.addresses) == 4
    assert kept.addresses == addresses[: len(kept.addresses)]
    assert 4 <= len(kept.addresses) < 12
    short = decode(sign(replace(full, relays=relays[:1], certificate=bytes(100)), KEY.sign))
    assert (short.relays, short.addresses) == (relays[:1], addresses)


def test_what_cannot_be_said() -> None:
    for wrong in (
        {"ttl_s": 61},
        {"ttl_s": -1},
        {"seq": -1},
        {"memory": 1 << 64},
        {"model": b"1234567"},
        {"model": bytes(8)},
        {"certificate": bytes(401)},
        {"role": "Worker 1"},
        {"relays": ("ftp://relay.example",)},
    ):
        with pytest.raises(ValueError, match=r"."):
            sign(replace(SAMPLE, **wrong), KEY.sign)


def test_addresses_where_nobody_can_be_are_left_out_at_both_ends() -> None:
    nowhere = (("0.0.0.0", 1), ("224.0.0.251", 5353), ("fe80::1", 4433), ("10.0.0.1", 0), ("name.example", 4433))
    assert decode(sign(replace(SAMPLE, addresses=(*nowhere, ("127.0.0.1", 1))), KEY.sign)).addresses == (
        ("127.0.0.1", 1),
    )
    body = VECTOR[:-64].replace(bytes.fromhex("c0a80107"), bytes.fromhex("e00000fb"))
    told = body + KEY.sign(records.CONTEXT + body)
    assert decode(told).addresses == (("2001:db8::7", 4433),)


def test_a_relay_that_is_none_is_left_out_and_the_rest_stands() -> None:
    body = VECTOR[:-64].replace(b"https://relay.example", b"https://relay.ex\x1b[31m")
    assert decode(body + KEY.sign(records.CONTEXT + body)).relays == ()


def test_bytes_of_a_later_version_are_ignored_but_signed() -> None:
    body = VECTOR[:-64] + b"news"
    assert decode(body + KEY.sign(records.CONTEXT + body)) == SAMPLE
    with pytest.raises(BadRecord, match="not signed by it"):
        decode(body + VECTOR[-64:])


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (b"", "0 bytes is cut short"),
        (VECTOR[:80], "80 bytes is cut short"),
        (bytes(1301), "1301 bytes, at most 1300"),
        (b"\x02" + VECTOR[1:], "version 2, this node reads 1"),
        (VECTOR[:73] + b"\x3d" + VECTOR[74:], "lives 61 s"),
        (VECTOR[:90] + b"\x41" + VECTOR[91:], "name of 65 bytes"),
        (VECTOR[:91] + b"\x1b" + VECTOR[92:], "cannot be printed"),
        (VECTOR[:91] + b"\xff" + VECTOR[92:], "no UTF-8"),
        (VECTOR[:99] + b"W" + VECTOR[100:], "the role 'Worker'"),
        (VECTOR[:105] + b"\x04" + VECTOR[106:], "4 relays"),
        (VECTOR[:106] + b"\x01\x01" + VECTOR[108:], "relay of 257 bytes"),
        (VECTOR[:129] + b"\xff\xff" + VECTOR[131:], "certificate of 65535 bytes"),
        (VECTOR[:133] + b"\x0d" + VECTOR[134:], "13 addresses"),
        (VECTOR[:134] + b"\x05" + VECTOR[135:], "family 5"),
        (VECTOR[:133] + b"\x0c" + VECTOR[134:], "cut short"),
        (VECTOR[:-1] + b"\x00", "not signed by it"),
    ],
)
def test_bytes_that_are_no_record(told: bytes, why: str) -> None:
    with pytest.raises(BadRecord, match=why) as caught:
        decode(told)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=1400))
def test_any_bytes_are_a_record_or_one_error(data: bytes) -> None:
    with pytest.raises(BadRecord):
        decode(data)


@given(st.integers(0, len(VECTOR) - 1), st.binary(min_size=1, max_size=4), st.booleans())
def test_a_record_that_was_touched_is_refused(at: int, put: bytes, cut: bool) -> None:
    told = VECTOR[:at] + put + VECTOR[at + (0 if cut else len(put)) :]
    if told != VECTOR:
        with pytest.raises(BadRecord):
            decode(told)


@given(st.binary(max_size=300), st.integers(74, 200))
def test_whatever_a_member_signs_is_a_record_or_one_error(tail: bytes, keep: int) -> None:
    body = VECTOR[: min(keep, len(VECTOR) - 64)] + tail
    told = body + KEY.sign(records.CONTEXT + body)
    try:
        understood = decode(told)
    except BadRecord:
        return
    assert understood.name.isprintable()
    assert sign(understood, KEY.sign)


def test_names_are_made_fit_to_be_shown() -> None:
    assert shown_name("  my\x1b[31m host\n") == "my [31m host"
    assert shown_name("ü" * 40) == "ü" * 32
    assert shown_name("\ud800x") == "x"


def test_content_is_all_but_time_and_signature() -> None:
    assert content(blob(1, 0)) == content(blob(1, 3))
    assert content(blob(1, 0)) == content(blob(1, 0, ttl_s=20))
    assert content(blob(1, 0)) != content(blob(1, 0, name="other"))
    assert content(blob(1, 0)) != content(blob(2, 0, name="node1"))
    assert record(1).same_content(record(1, 5.0))
    assert not record(1).same_content(record(1, memory=5))


def test_numbers_grow_when_the_clock_jumps_back() -> None:
    assert next_seq(0, 1000.0) == 1_000_000
    assert next_seq(1_000_000, 1000.0) == 1_000_001
    assert next_seq(1_000_001, 10.0) == 1_000_002


def test_a_record_for_another_key_is_not_signed_by_it() -> None:
    stolen = sign(replace(SAMPLE, peer=PeerId(identity(7).peer_id.raw)), KEY.sign)
    with pytest.raises(BadRecord, match="not signed"):
        decode(stolen)
