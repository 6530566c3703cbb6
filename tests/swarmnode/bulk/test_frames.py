from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.bulk.frames import (
    HEAD,
    MAX_FIELDS,
    Absent,
    Answer,
    AskBackbone,
    AskExperts,
    AskHoldings,
    AskManifest,
    BackboneFollows,
    ExpertFollows,
    FailCode,
    Failed,
    Head,
    HoldingsFollow,
    ManifestFollows,
    Request,
    decode_answer,
    decode_holdings,
    decode_request,
    encode_holdings,
    experts_of,
    mask_of,
    max_holdings_bytes,
)
from swarmnode.errors import BadBulkFrame
from tests.swarmnode.bulk.nodes import head

HASH = bytes(range(32))

REQUESTS: list[tuple[Request, str]] = [
    (AskManifest(HASH), "01012000" + HASH.hex()),
    (AskBackbone(HASH, 0x0102030405), "02012800" + HASH.hex() + "0504030201000000"),
    (AskExperts(HASH, 258, (7, 65535)), "03012800" + HASH.hex() + "02010200" + "0700ffff"),
    (AskHoldings(HASH), "04012000" + HASH.hex()),
]
ANSWERS: list[tuple[Answer, str]] = [
    (ManifestFollows(300), "81010800" + "2c01000000000000"),
    (BackboneFollows(1, 2, 1 << 33), "82011800" + "0100000000000000" + "0200000000000000" + "0000000002000000"),
    (ExpertFollows(513, 1 << 20), "83010a00" + "0102" + "0000100000000000"),
    (HoldingsFollow(9), "84010800" + "0900000000000000"),
    (Absent(3), "85010200" + "0300"),
    (Failed(FailCode.BUSY, "später"), "86010800" + "03" + "7370c3a4746572"),
]


@pytest.mark.parametrize(("part", "expected"), REQUESTS)
def test_request_vectors(part: Request, expected: str) -> None:
    data = part.encode()
    assert data.hex() == expected
    assert decode_request(Head.decode(data[: HEAD.size]), data[HEAD.size :]) == part
    longer = Head.decode(HEAD.pack(data[0], 1, len(data) - HEAD.size + 3))
    assert decode_request(longer, data[HEAD.size :] + b"new") == part


@pytest.mark.parametrize(("part", "expected"), ANSWERS)
def test_answer_vectors(part: Answer, expected: str) -> None:
    data = part.encode()
    assert data.hex() == expected
    assert decode_answer(Head.decode(data[: HEAD.size]), data[HEAD.size :]) == part


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (head(1, HASH[:31]), "ends after 31 of 32 bytes"),
        (head(2, HASH + bytes(7)), "ends after 39 of 40"),
        (head(3, HASH + bytes.fromhex("00000000")), "0 experts asked for; 1 to 256"),
        (head(3, HASH + bytes.fromhex("00000101")), "257 experts asked for"),
        (head(3, HASH + bytes.fromhex("0000020001000100")), "asked for twice"),
        (head(3, HASH + bytes.fromhex("000002000100")), "ends after 38 of 40"),
        (head(9, HASH), "kind 9 where a request is due"),
        (head(129, HASH), "kind 129 where a request is due"),
        (head(1, HASH, version=2), "protocol version 2, this node speaks 1"),
    ],
)
def test_bad_requests(data: bytes, why: str) -> None:
    with pytest.raises(BadBulkFrame, match=why):
        decode_request(Head.decode(data[:4]), data[4:])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (head(130, (5).to_bytes(8, "little") + (4).to_bytes(8, "little") * 2), "backbone file of 5, 4, 4 bytes"),
        (head(130, bytes(8) + (1 << 50).to_bytes(8, "little") * 2), "backbone file"),
        (head(131, bytes(9)), "ends after 9 of 10"),
        (head(134, b""), "ends after 0 of 1"),
        (head(1, HASH), "kind 1 where an answer is due"),
        (head(129, bytes(8), version=7), "protocol version 7"),
    ],
)
def test_bad_answers(data: bytes, why: str) -> None:
    with pytest.raises(BadBulkFrame, match=why):
        decode_answer(Head.decode(data[:4]), data[4:])


def test_long_fields_are_refused_before_they_are_read() -> None:
    with pytest.raises(BadBulkFrame, match="1024 at most"):
        Head.decode(HEAD.pack(1, 1, MAX_FIELDS + 1))


def test_what_the_other_side_says_is_one_printable_line() -> None:
    data = head(134, bytes([250]) + b"a\nb\x1b[31m\xff" + b"x" * 500)
    part = decode_answer(Head.decode(data[:4]), data[4:])
    assert isinstance(part, Failed)
    assert part.code is FailCode.FAILED
    assert part.why.startswith("a b [31m\ufffdxx")
    assert part.why.isprintable()
    assert len(part.why) <= 400
    assert len(Failed(FailCode.FAILED, "ü" * 1000).encode()) <= HEAD.size + MAX_FIELDS


def test_holdings_vector() -> None:
    data = encode_holdings({2: [0, 9], 0: [], 1: (15,)}, [4, 16, 10])
    assert data.hex() == "0100" + "10000000" + "0080" + "0200" + "0a000000" + "0102"
    assert decode_holdings(data, [4, 16, 10]) == {1: 1 << 15, 2: 1 | 1 << 9}
    assert max_holdings_bytes([4, 16, 10]) == 3 * 6 + 1 + 2 + 2


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("0100", "end within a site"),
        ("030010000000ffff", "site 3 after -1 of 3"),
        ("01001000000000000100100000000000", "site 1 after 1"),
        ("010011000000ffff01", "give site 1 17 experts; the model has 16"),
        ("010010000000ff", "end within a bitmap"),
        ("02000a00000000ff", "does not exist"),
    ],
)
def test_bad_holdings(data: str, why: str) -> None:
    with pytest.raises(BadBulkFrame, match=why):
        decode_holdings(bytes.fromhex(data), [4, 16, 10])


@given(st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 19), min_size=1)))
def test_holdings_round_trip(held: dict[int, set[int]]) -> None:
    data = encode_holdings(held, [20] * 6)
    assert {site: set(experts_of(mask)) for site, mask in decode_holdings(data, [20] * 6).items()} == held
    assert all(mask_of(experts_of(mask_of(experts))) == mask_of(experts) for experts in held.values())


@given(
    st.integers(0, 255),
    st.binary(max_size=80),
    st.sampled_from([decode_request, decode_answer]),
)
def test_fuzz_parts(kind: int, fields: bytes, decode: Callable[[Head, bytes], object]) -> None:
    """Whatever comes is a part, or BadBulkFrame; a part that was understood is written the same way."""
    try:
        part = decode(Head(kind, 1, len(fields)), fields)
    except BadBulkFrame:
        return
    encoded: bytes = part.encode()  # type: ignore[attr-defined]  # every part has it
    if not isinstance(part, Failed):
        assert fields.startswith(encoded[HEAD.size :])


@given(st.binary(max_size=60))
def test_fuzz_holdings(data: bytes) -> None:
    """Whatever comes names experts of the model, or is BadBulkFrame."""
    try:
        held = decode_holdings(data, [4, 16, 10])
    except BadBulkFrame:
        return
    assert all(mask >> [4, 16, 10][site] == 0 for site, mask in held.items())
