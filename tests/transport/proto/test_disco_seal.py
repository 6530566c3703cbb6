"""Sealing: fixed bytes, who can open what, and everything that must be refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from transport.identity import Identity
from transport.proto.disco_frames import MAX_DATAGRAM, SEAL_OVERHEAD, DiscoError, Ping, decode, encode
from transport.proto.disco_seal import MAGIC, MAX_BOOTS, DiscoBox, ReplayGuard, montgomery, sender

NONCE = bytes(range(12))
P = 2**255 - 19


def identity(number: int) -> Identity:
    return Identity.generate(bytes([number]) * 32)


def box(number: int, limit: int = 8) -> DiscoBox:
    me = identity(number)
    return DiscoBox(me.peer_id.raw, me.x25519_private(), limit)


def key(number: int) -> bytes:
    return identity(number).peer_id.raw


ALICE, BOB = box(1), box(2)
SEALED = ALICE.seal(key(2), b"ping", NONCE)


def test_the_curve_point_is_the_one_that_libsodium_derives() -> None:
    # libsodium, test/default/ed25519_convert.c
    public = bytes.fromhex("b5076a8474a832daee4dd5b4040983b6623b5f344aca57d4d6ee4baf3f259e6e")
    assert montgomery(public).hex() == "f1814f0e8ff1043d8a44d25babff3cedcae6c22c3edaa48f857ae70de2baae50"


@given(st.binary(min_size=32, max_size=32))
def test_both_halves_of_a_key_map_to_one_x25519_pair(seed: bytes) -> None:
    someone = Identity.generate(seed)
    assert montgomery(someone.peer_id.raw) == someone.x25519_private().public_key().public_bytes_raw()


def test_fixed_bytes() -> None:
    wire = (
        "1d73776e8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c000102030405060708090a0b"
        "9e0fdbcbe986e9a50884f0ab99df126078ad586c"
    )
    assert SEALED.hex() == wire
    assert BOB.open(bytes.fromhex(wire)) == (key(1), b"ping")


@given(st.binary(min_size=1, max_size=300), st.binary(min_size=12, max_size=12))
def test_only_the_receiver_opens_it_and_learns_the_sender(plaintext: bytes, nonce: bytes) -> None:
    datagram = ALICE.seal(key(2), plaintext, nonce)
    assert len(datagram) == len(plaintext) + SEAL_OVERHEAD
    assert sender(datagram) == key(1)
    assert not datagram[0] & 0x40
    assert BOB.open(datagram) == (key(1), plaintext)
    for other in (ALICE, box(3)):  # the author is not the receiver either: nothing can be reflected
        with pytest.raises(DiscoError):
            other.open(datagram)


def test_a_padded_ping_has_its_size_on_the_wire() -> None:
    datagram = ALICE.seal(key(2), encode(Ping(bytes(12)), 1452), NONCE)
    assert len(datagram) == 1452
    assert decode(BOB.open(datagram)[1]) == Ping(bytes(12))


@given(st.integers(0, len(SEALED) - 1), st.integers(1, 255))
def test_one_changed_byte_is_noticed(at: int, change: int) -> None:
    changed = bytearray(SEALED)
    changed[at] ^= change
    with pytest.raises(DiscoError):
        BOB.open(bytes(changed))


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(MAGIC.__add__)))
def test_fuzz_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DiscoError):
        BOB.open(data)


@pytest.mark.parametrize("size", [0, 3, 63, 64, MAX_DATAGRAM + 1])
def test_datagrams_of_impossible_size_have_no_sender(size: int) -> None:
    assert sender(MAGIC.ljust(size, b"\1")[:size]) is None


def little(number: int) -> bytes:
    return number.to_bytes(32, "little")


LOW_ORDER = [
    little(1),  # order 1
    little(P - 1),  # 2
    little(0),  # 4
    little(1 << 255),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),  # 8
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa"),
]
NO_POINT = [little(2), little(P), little(P + 1), b"\xff" * 32, b"", bytes(31), bytes(33)]


@pytest.mark.parametrize("peer", LOW_ORDER + NO_POINT, ids=bytes.hex)
def test_keys_that_nobody_can_have_are_refused(peer: bytes) -> None:
    uses: list[Callable[[DiscoBox], object]] = [
        lambda box: box.keep(peer),
        lambda box: box.seal(peer, b"ping", NONCE),
        lambda box: box.open(MAGIC + peer + bytes(40)),
    ]
    for use in uses:
        fresh = box(1)
        with pytest.raises(DiscoError):
            use(fresh)
        assert not fresh.known(peer)


def test_nobody_talks_to_itself() -> None:
    with pytest.raises(DiscoError, match="ourselves"):
        ALICE.seal(key(1), b"ping", NONCE)
    with pytest.raises(DiscoError, match="ourselves"):
        ALICE.open(MAGIC + key(1) + bytes(40))


def test_a_nonce_of_another_length_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="12 bytes, not 3"):
        ALICE.seal(key(2), b"ping", b"abc")


def test_strangers_push_out_strangers_but_no_kept_peer() -> None:
    node = box(1, limit=2)
    node.keep(key(2))
    node.keep(key(2))
    for stranger in (3, 4, 3, 5):
        node.open(box(stranger).seal(key(1), b"ping", NONCE))
    assert [node.known(key(number)) for number in (2, 3, 4, 5)] == [True, True, False, True]
    node.release(key(2))
    node.release(key(2))
    assert node.known(key(2))
    assert not node.known(key(3))
    node.seal(key(4), b"ping", NONCE)
    assert not node.known(key(5))
    node.keep(key(2))
    assert node.open(box(2).seal(key(1), b"ping", NONCE)) == (key(2), b"ping")


def test_a_forged_sender_is_not_remembered() -> None:
    node = box(2)
    with pytest.raises(DiscoError):
        node.open(SEALED[:-1] + bytes([SEALED[-1] ^ 1]))
    assert not node.known(key(1))


def test_the_key_is_for_this_pair_only() -> None:
    private = X25519PrivateKey.from_private_bytes(bytes(32))
    imposter = DiscoBox(key(1), private)
    with pytest.raises(DiscoError, match="did not seal for us"):
        BOB.open(imposter.seal(key(2), b"ping", NONCE))


def test_calls_pass_once_and_in_order() -> None:
    guard = ReplayGuard()
    a, b = b"a" * 8, b"b" * 8
    assert guard.fresh(key(1), a, 0)
    assert not guard.fresh(key(1), a, 0)
    assert guard.fresh(key(1), a, 5)
    assert not guard.fresh(key(1), a, 4)
    assert guard.fresh(key(2), a, 4)
    assert guard.fresh(key(1), b, 1)  # it restarted
    assert not guard.fresh(key(1), a, 5)
    assert not guard.fresh(key(1), b, 1)


def test_a_peer_that_restarts_often_is_never_locked_out() -> None:
    guard = ReplayGuard()
    boots = [bytes([number]) * 8 for number in range(3 * MAX_BOOTS)]
    assert all(guard.fresh(key(1), boot, 1) for boot in boots)
    assert not any(guard.fresh(key(1), boot, 1) for boot in boots[-MAX_BOOTS:])


def test_the_guard_forgets_the_peer_that_was_silent_longest() -> None:
    guard = ReplayGuard(limit=2)
    boot = bytes(8)
    for number in (1, 2, 1, 3):
        guard.fresh(key(number), boot, number)
    assert not guard.fresh(key(1), boot, 1)
    assert not guard.fresh(key(3), boot, 3)
    assert guard.fresh(key(2), boot, 2)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_no_call_passes_twice_while_its_run_is_remembered(calls: list[tuple[int, int, int]]) -> None:
    guard = ReplayGuard()
    passed = [call for call in calls if guard.fresh(bytes([call[0]]), bytes([call[1]]), call[2])]
    assert len(passed) == len(set(passed))
