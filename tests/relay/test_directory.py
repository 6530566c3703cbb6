"""directory: who is shown what and for how long, what a slow watcher gets, and that every bound holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relay.directory import GRACE, MAX_BEHIND, OVERHEAD, Directory, Published
from transport.proto.relay_frames import MAX_TOPICS, Record, decode_server

TOPIC, OTHER_TOPIC = b"t" * 32, b"u" * 32
PLENTY = 10_000_000


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


ANNA, BERT = key(1), key(2)


def taken(directory: Directory[str], watcher: str, now: float, most: int = 10_000) -> list[Record]:
    records = [decode_server(message) for message in directory.take(watcher, most, now)]
    assert all(isinstance(record, Record) for record in records)
    return records  # type: ignore[return-value]


def test_a_watcher_gets_what_is_there_and_then_what_changes() -> None:
    directory = Directory[str](PLENTY)
    directory.publish(ANNA, TOPIC, 10, b"a", 0.0)
    directory.publish(ANNA, OTHER_TOPIC, 10, b"elsewhere", 0.0)
    directory.watch("w", TOPIC, True)
    assert taken(directory, "w", 2.5) == [Record(TOPIC, ANNA, 8, b"a")]
    assert not directory.waits
    directory.publish(BERT, TOPIC, 10, b"b", 3.0)
    directory.publish(ANNA, TOPIC, 10, b"A", 3.0)
    assert directory.waiting() == ["w"]
    assert taken(directory, "w", 3.0) == [Record(TOPIC, BERT, 10, b"b"), Record(TOPIC, ANNA, 10, b"A")]
    directory.publish(BERT, TOPIC, 0, b"", 4.0)
    assert taken(directory, "w", 4.0) == [Record(TOPIC, BERT, 0)]
    directory.watch("w", TOPIC, False)
    directory.publish(BERT, TOPIC, 10, b"b", 5.0)
    assert not directory.waits
    assert taken(directory, "w", 5.0) == []
    assert directory.watches == 0


def test_a_record_ends_with_its_ttl_and_a_refresh_prolongs_it() -> None:
    directory = Directory[str](PLENTY)
    directory.publish(ANNA, TOPIC, 10, b"a", 0.0)
    directory.publish(ANNA, TOPIC, 10, b"a", 5.0)
    directory.expire(14.9)
    assert directory.count == 1
    directory.watch("w", TOPIC, True)
    taken(directory, "w", 14.9)
    directory.expire(15.0)
    assert taken(directory, "w", 15.0) == [Record(TOPIC, ANNA, 0)]
    assert (directory.count, directory.size) == (0, 0)


def test_a_record_outlives_its_session_by_the_grace_unless_the_next_session_publishes() -> None:
    directory = Directory[str](PLENTY)
    for who in (ANNA, BERT):
        directory.publish(who, TOPIC, 100, b"x", 0.0)
    directory.leave("session of anna", ANNA, 10.0)
    directory.leave("session of bert", BERT, 10.0)
    directory.publish(BERT, TOPIC, 100, b"x", 12.0)
    directory.watch("w", TOPIC, True)
    assert [(record.key, record.ttl_s) for record in taken(directory, "w", 12.0)] == [(ANNA, 3), (BERT, 100)]
    directory.expire(10.0 + GRACE)
    assert taken(directory, "w", 15.0) == [Record(TOPIC, ANNA, 0)]
    directory.leave("session of bert", BERT, 111.0)  # a grace is no gift
    directory.expire(112.0)
    assert directory.count == 0


def test_a_slow_watcher_gets_the_last_version_once_and_each_key_in_its_turn() -> None:
    directory = Directory[str](PLENTY)
    directory.watch("slow", TOPIC, True)
    for version in range(50):
        for number in range(20):
            directory.publish(key(number), TOPIC, 10, bytes((version,)), 0.0)
    first = taken(directory, "slow", 0.0, 5)
    directory.publish(key(0), TOPIC, 10, b"again", 0.0)  # waits behind who has had nothing yet
    rest = taken(directory, "slow", 0.0)
    assert [record.key for record in first + rest] == [*(key(number) for number in range(20)), key(0)]
    assert {record.blob for record in first + rest} == {bytes((49,)), b"again"}


def test_a_watcher_that_is_far_behind_is_brought_up_to_date() -> None:
    directory = Directory[str](PLENTY)
    count = 2 * MAX_BEHIND + 100
    directory.watch("slow", TOPIC, True)
    for number in range(count):
        directory.publish(key(number), TOPIC, 100, b"v1", 0.0)
    for number in range(count):
        directory.publish(key(number), TOPIC, 100, b"v2", 0.0)
    seen: dict[bytes, bytes] = {}
    while directory.waits:
        for record in taken(directory, "slow", 1.0, 16):
            seen[record.key] = record.blob
    assert seen == {key(number): b"v2" for number in range(count)}


def test_those_who_wait_take_turns() -> None:
    directory = Directory[str](PLENTY)
    for watcher in ("a", "b"):
        directory.watch(watcher, TOPIC, True)
    for number in range(3):
        directory.publish(key(number), TOPIC, 10, b"x", 0.0)
    order = []
    while directory.waits:
        order.append(directory.waiting()[0])
        assert len(taken(directory, order[-1], 0.0, 1)) == 1
    assert order == ["a", "b"] * 3


def test_a_client_has_eight_topics_of_each_kind() -> None:
    directory = Directory[str](PLENTY)
    topics = [bytes((number,)) * 32 for number in range(MAX_TOPICS + 1)]
    assert [directory.publish(ANNA, topic, 10, b"x", 0.0) for topic in topics] == [
        *[Published.TAKEN] * MAX_TOPICS,
        Published.TOO_MANY_TOPICS,
    ]
    assert [directory.watch("w", topic, True) for topic in topics] == [*[True] * MAX_TOPICS, False]
    assert directory.publish(ANNA, topics[0], 10, b"refreshed", 0.0) is Published.TAKEN
    directory.publish(ANNA, topics[0], 0, b"", 0.0)
    assert directory.publish(ANNA, topics[-1], 10, b"x", 0.0) is Published.TAKEN
    assert directory.watch("w", topics[0], False)
    assert directory.watch("w", topics[-1], True)


def test_a_full_directory_keeps_what_it_has_and_room_for_everybodys_first() -> None:
    directory = Directory[str](10 * (OVERHEAD + 100))
    topics = [bytes((number,)) * 32 for number in range(8)]
    greedy = [directory.publish(ANNA, topic, 10, bytes(100), 0.0) for topic in topics]
    assert greedy == [*[Published.TAKEN] * 5, *[Published.FULL] * 3]
    others = [directory.publish(key(number), TOPIC, 10, bytes(100), 0.0) for number in range(10, 16)]
    assert others == [*[Published.TAKEN] * 5, Published.FULL]
    assert directory.publish(ANNA, topics[0], 10, bytes(100), 0.0) is Published.TAKEN  # a refresh takes no room
    assert directory.publish(ANNA, topics[0], 10, bytes(101), 0.0) is Published.FULL
    directory.expire(10.0)
    assert (directory.size, directory.count) == (0, 0)


steps = st.lists(
    st.tuples(
        st.sampled_from(["publish", "withdraw", "watch", "unwatch", "leave", "expire", "take"]),
        st.integers(0, 3),
        st.integers(0, 2),
        st.binary(max_size=4),
    ),
    max_size=60,
)


@given(steps=steps)
def test_whatever_happens_who_has_taken_everything_knows_everything(
    steps: list[tuple[str, int, int, bytes]],
) -> None:
    """A watcher's picture, made of what it took, is the directory's; sizes add up; all gone leaves nothing."""
    directory, now = Directory[int](4 * (OVERHEAD + 4)), 0.0
    pictures: dict[int, dict[tuple[bytes, bytes], bytes]] = {number: {} for number in range(4)}
    watched: dict[int, set[bytes]] = {number: set() for number in range(4)}

    def take(who: int, most: int) -> None:
        for message in directory.take(who, most, now):
            record = decode_server(message)
            assert isinstance(record, Record)
            assert record.topic in watched[who]
            if record.ttl_s:
                pictures[who][record.topic, record.key] = record.blob
            else:
                pictures[who].pop((record.topic, record.key), None)

    for step, who, which, blob in steps:
        topic = bytes((which,)) * 32
        now += 0.5
        match step:
            case "publish":
                directory.publish(key(who), topic, 1 + which * 5, blob, now)
            case "withdraw":
                directory.publish(key(who), topic, 0, b"", now)
            case "watch":
                watched[who].add(topic)
                directory.watch(who, topic, True)
            case "unwatch":
                watched[who].discard(topic)
                directory.watch(who, topic, False)
                pictures[who] = {where: seen for where, seen in pictures[who].items() if where[0] != topic}
            case "leave":
                directory.leave(who, key(who), now)
                watched[who], pictures[who] = set(), {}
            case "expire":
                directory.expire(now)
            case "take":
                take(who, 2)
        assert directory.size <= 4 * (OVERHEAD + 4)
        assert directory.watches == sum(map(len, watched.values()))
    for who in range(4):
        take(who, 1000)
    assert not directory.waits
    probe = 9
    for topic in (bytes((which,)) * 32 for which in range(3)):
        directory.watch(probe, topic, True)
    there = {}
    for message in directory.take(probe, 1000, now):
        record = decode_server(message)
        assert isinstance(record, Record)
        there[record.topic, record.key] = record.blob
    assert directory.count == len(there)
    assert directory.size == sum(OVERHEAD + len(blob) for blob in there.values())
    for who in range(4):
        assert pictures[who] == {where: blob for where, blob in there.items() if where[0] in watched[who]}
        directory.leave(who, key(who), now)
    directory.leave(probe, key(probe), now)
    directory.expire(now + GRACE)
    assert (directory.size, directory.count, directory.watches, directory.waits) == (0, 0, 0, False)
