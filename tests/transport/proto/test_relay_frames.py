"""relay_frames: fixed vectors, round trips, limits, and no input that does anything but decode or raise its error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import TransportError
from transport.identity import Identity
from transport.proto import relay_frames as frames
from transport.proto.relay_frames import (
    Challenge,
    ClientFrame,
    Data,
    Feature,
    Gone,
    GoneReason,
    Limited,
    Login,
    Ping,
    Pong,
    Publish,
    Record,
    RefusalCode,
    Refused,
    RelayFrameError,
    Restarting,
    ServerFrame,
    UnknownRelayFrame,
    Watch,
    Welcome,
    data_frame,
    datagrams,
    decode_client,
    decode_server,
    login_message,
    relayed,
)

KEY = bytes(range(32))
OTHER = bytes(range(100, 132))
KEY_HEX = KEY.hex()
ECHO = b"\x01\x02\x03\x04\x05\x06\x07\x08"

FROM_SERVER: list[tuple[ServerFrame, str]] = [
    (Challenge(1, KEY), "0101" + KEY_HEX),
    (
        Welcome(20, 15_000, 12_500_000, (3478, 3479), KEY[:16], "192.0.2.7:4433", Feature.DIRECTORY),
        "03001400003a9800bebc200d960d97" + KEY_HEX[:32] + "000e" + b"192.0.2.7:4433".hex() + "01",
    ),
    (Data(KEY, (b"ab", b"c")), "10" + KEY_HEX + "00026162000163"),
    (Data(KEY, (b"ab",), disco=True), "11" + KEY_HEX + "00026162"),
    (Gone(KEY, GoneReason.QUEUE_FULL), "12" + KEY_HEX + "02"),
    (Ping(ECHO), "200102030405060708"),
    (Pong(ECHO, 200), "210102030405060708000000c8"),
    (Restarting(200, 15_000), "30000000c800003a98"),
    (Limited(1000), "31000003e8"),
    (Refused(RefusalCode.KEY_FIGHT, 60_000, "no"), "3f060000ea6000026e6f"),
    (Record(KEY, OTHER, 10, b"blob"), "42" + KEY_HEX + OTHER.hex() + "000a0004" + b"blob".hex()),
    (Record(KEY, OTHER, 0), "42" + KEY_HEX + OTHER.hex() + "00000000"),
]
FROM_CLIENT: list[tuple[ClientFrame, str]] = [
    (Login(1, KEY, "relay:80", KEY + OTHER), "0201" + KEY_HEX + "0008" + b"relay:80".hex() + KEY_HEX + OTHER.hex()),
    (Data(KEY, (b"ab", b"c")), "10" + KEY_HEX + "00026162000163"),
    (Data(KEY, (b"ab",), disco=True), "11" + KEY_HEX + "00026162"),
    (Ping(ECHO), "200102030405060708"),
    (Pong(ECHO), "210102030405060708"),
    (Publish(KEY, 300, b"blob"), "40" + KEY_HEX + "012c0004" + b"blob".hex()),
    (Publish(KEY, 0), "40" + KEY_HEX + "00000000"),
    (Watch(KEY, True), "41" + KEY_HEX + "01"),
    (Watch(KEY, False), "41" + KEY_HEX + "00"),
]

payloads = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=20)


@pytest.mark.parametrize(("frame", "vector"), FROM_SERVER, ids=lambda value: type(value).__name__)
def test_vectors_of_the_server(frame: ServerFrame, vector: str) -> None:
    assert frame.encode().hex() == vector
    assert decode_server(bytes.fromhex(vector)) == frame


@pytest.mark.parametrize(("frame", "vector"), FROM_CLIENT, ids=lambda value: type(value).__name__)
def test_vectors_of_the_client(frame: ClientFrame, vector: str) -> None:
    assert frame.encode().hex() == vector
    assert decode_client(bytes.fromhex(vector)) == frame


@pytest.mark.parametrize(("frame", "vector"), FROM_SERVER, ids=lambda value: type(value).__name__)
def test_later_versions_may_append_fields_but_not_datagrams(frame: ServerFrame, vector: str) -> None:
    longer = bytes.fromhex(vector) + b"later"
    if isinstance(frame, Data):
        with pytest.raises(RelayFrameError, match="do not add up"):
            decode_server(longer)
    else:
        assert decode_server(longer) == frame


@pytest.mark.parametrize(("frame", "vector"), FROM_SERVER, ids=lambda value: type(value).__name__)
def test_a_frame_cut_anywhere_is_an_error(frame: ServerFrame, vector: str) -> None:
    whole = bytes.fromhex(vector)
    for size in range(len(whole)):
        if isinstance(frame, Pong) and size >= 9:  # the spread is optional
            continue
        if isinstance(frame, Welcome) and size == len(whole) - 1:  # as an older relay ends it
            assert decode_server(whole[:size]) == replace(frame, features=0)
            continue
        if isinstance(frame, Data) and size == 37 and len(frame.datagrams) == 2:  # one datagram is whole
            continue
        with pytest.raises(RelayFrameError):
            decode_server(whole[:size])


def test_a_login_cut_anywhere_is_an_error() -> None:
    whole = Login(1, KEY, "relay:80", KEY + OTHER).encode()
    for size in range(len(whole)):
        with pytest.raises(RelayFrameError):
            decode_client(whole[:size])


@pytest.mark.parametrize("frame", [Publish(KEY, 300, b"blob"), Watch(KEY, True)])
def test_what_a_client_says_of_records_cut_anywhere_is_an_error_and_may_grow(frame: Publish | Watch) -> None:
    whole = frame.encode()
    for size in range(len(whole)):
        with pytest.raises(RelayFrameError):
            decode_client(whole[:size])
    assert decode_client(whole + b"later") == frame


def test_records_are_bounded_both_ways() -> None:
    largest = bytes(frames.MAX_BLOB)
    assert decode_client(Publish(KEY, 0xFFFF, largest).encode()) == Publish(KEY, 0xFFFF, largest)
    assert decode_server(Record(KEY, OTHER, 0xFFFF, largest).encode()) == Record(KEY, OTHER, 0xFFFF, largest)
    for wrong in (Publish(KEY, 1, largest + b"x"), Publish(KEY[1:], 1), Publish(KEY, -1), Publish(KEY, 1 << 16)):
        with pytest.raises(RelayFrameError):
            wrong.encode()
    with pytest.raises(RelayFrameError):
        Watch(b"", True).encode()
    size = (frames.MAX_BLOB + 1).to_bytes(2, "big")
    for parse, head in ((decode_client, b"\x40" + KEY), (decode_server, b"\x42" + KEY + OTHER)):
        with pytest.raises(RelayFrameError):
            parse(head + b"\0\1" + size + largest + b"x")
        with pytest.raises(RelayFrameError):  # what may follow later is bounded too
            parse(head + b"\0\1\0\0" + bytes(frames.MAX_BLOB_MESSAGE))


def test_of_another_version_only_the_version_is_read() -> None:
    challenge, login = decode_server(b"\x01\x07"), decode_client(b"\x02\x07what follows is laid out differently")
    assert isinstance(challenge, Challenge)
    assert isinstance(login, Login)
    assert challenge.version == login.version == 7


def test_unknown_types_are_told_apart_from_broken_frames() -> None:
    with pytest.raises(UnknownRelayFrame) as caught:
        decode_client(b"\x7fanything")
    assert caught.value.kind == 0x7F
    with pytest.raises(UnknownRelayFrame):
        decode_client(Limited(1).encode())  # a frame that only servers send


def test_numbers_of_later_versions_are_read_as_unknown() -> None:
    refused, gone = decode_server(b"\x3f\xee\0\0\0\0\0\0"), decode_server(b"\x12" + KEY + b"\x63")
    assert isinstance(refused, Refused)
    assert refused.code is RefusalCode.UNKNOWN
    assert isinstance(gone, Gone)
    assert gone.why is GoneReason.UNKNOWN


def test_the_login_signature_holds_for_one_nonce_and_one_authority() -> None:
    identity = Identity.generate(bytes(32))
    signature = identity.sign(login_message(KEY, "relay.example"))
    assert login_message(KEY, "relay.example").hex() == (
        b"peer-relay login 1\0".hex() + KEY_HEX + "000d" + b"relay.example".hex()
    )
    assert identity.peer_id.verify(signature, login_message(KEY, "relay.example"))
    assert not identity.peer_id.verify(signature, login_message(OTHER, "relay.example"))
    assert not identity.peer_id.verify(signature, login_message(KEY, "other.example"))


def test_the_relay_writes_the_source_and_changes_nothing_else() -> None:
    message = data_frame(KEY, [b"one", b"two"])
    destination, out = relayed(message, OTHER)
    assert destination == KEY
    assert decode_server(out) == Data(OTHER, (b"one", b"two"))


@given(payload=payloads, disco=st.booleans())
def test_round_trip_of_datagrams(payload: list[bytes], disco: bool) -> None:
    message = data_frame(KEY, payload, disco)
    destination, out = relayed(message, OTHER)
    assert destination == KEY
    assert datagrams(memoryview(out)[frames.PAYLOAD_AT :]) == payload
    assert decode_server(out) == Data(OTHER, tuple(payload), disco)


def test_the_largest_messages_pass_and_larger_ones_do_not() -> None:
    chunk = bytes(frames.MAX_DATAGRAM)
    whole, rest = divmod(frames.MAX_DATA_MESSAGE - frames.PAYLOAD_AT, 2 + len(chunk))
    largest = [chunk] * whole + [bytes(rest - 2)]
    assert len(data_frame(KEY, largest)) == frames.MAX_DATA_MESSAGE
    assert relayed(data_frame(KEY, largest), OTHER)[0] == KEY
    for wrong in ([*largest, b"x"], [bytes(frames.MAX_DATAGRAM + 1)], [b""], []):
        with pytest.raises(RelayFrameError):
            data_frame(KEY, wrong)
    with pytest.raises(RelayFrameError):
        data_frame(KEY, [bytes(frames.MAX_DISCO_MESSAGE)], disco=True)
    disco = b"\x11" + data_frame(KEY, [bytes(frames.MAX_DISCO_MESSAGE)])[1:]
    for parse in (decode_server, decode_client, lambda message: relayed(message, OTHER)):
        with pytest.raises(RelayFrameError):
            parse(disco)


def test_texts_are_bounded_when_written() -> None:
    with pytest.raises(RelayFrameError):
        Refused(RefusalCode.OVERLOADED, 0, "é" * 101).encode()
    with pytest.raises(RelayFrameError):
        login_message(KEY, "a" * 301)
    with pytest.raises(RelayFrameError):
        Login(1, KEY, "\udc80", bytes(64)).encode()


def test_the_errors_are_of_the_transport_tree() -> None:
    assert issubclass(RelayFrameError, TransportError)


mutated = st.builds(
    lambda vector, at, value: vector[: at % len(vector)] + value + vector[at % len(vector) + 1 :],
    st.sampled_from([bytes.fromhex(vector) for _, vector in [*FROM_SERVER, *FROM_CLIENT]]),
    st.integers(0, 500),
    st.binary(max_size=3),
)


@given(message=st.one_of(st.binary(max_size=400), mutated))
def test_any_bytes_decode_or_raise_the_one_error(message: bytes) -> None:
    for decode in (decode_server, decode_client):
        try:
            frame = decode(message)
        except RelayFrameError:
            continue
        assert decode(frame.encode()) == frame
    try:
        _, out = relayed(message, OTHER)
    except RelayFrameError:
        accepted = False
    else:
        accepted = True
        assert len(out) == len(message)
    try:
        datagrams(memoryview(message)[frames.PAYLOAD_AT :])
    except RelayFrameError:
        assert not accepted
    else:
        assert accepted
