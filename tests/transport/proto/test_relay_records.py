"""relay_records: one picture of several relays' directories, and when somebody is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transport.proto.relay_frames import PUBLISH_BURST, PUBLISH_RATE, Record
from transport.proto.relay_records import LEFT, MAX_RECORDS, RESYNC, SLACK, Change, PublishPace, RecordBook

TOPIC, KEY = b"t" * 32, b"k" * 32
A, B = "http://a", "http://b"


def book() -> RecordBook:
    made = RecordBook()
    made.watch(TOPIC)
    return made


def says(ttl: int, blob: bytes = b"x") -> Record:
    return Record(TOPIC, KEY, ttl, blob if ttl else b"")


def test_what_two_relays_say_is_told_once_and_gone_is_gone_on_both() -> None:
    records = book()
    assert records.heard(A, says(10), 0.0) == Change(TOPIC, KEY, b"x")
    assert records.heard(B, says(10), 0.1) is None
    assert records.heard(A, says(10, b"y"), 3.0) == Change(TOPIC, KEY, b"y")
    assert records.heard(B, says(10, b"y"), 3.1) is None
    assert records.heard(A, says(0), 4.0) is None
    assert records.heard(B, says(0), 5.0) == Change(TOPIC, KEY, None)
    assert records.heard(B, says(0), 5.0) is None
    assert records.empty


def test_a_relay_that_falls_silent_has_its_records_for_their_ttl() -> None:
    records = book()
    records.heard(A, says(10), 0.0)
    records.heard(B, says(20), 0.0)
    assert records.expire(10 + SLACK) == []
    assert records.expire(20 + SLACK) == [Change(TOPIC, KEY, None)]


def test_what_a_relay_does_not_say_again_after_a_restart_is_gone() -> None:
    records = book()
    records.heard(A, says(1000), 0.0)
    records.relay_up(A, 5.0)
    assert records.expire(5 + RESYNC - 0.1) == []
    assert records.expire(5 + RESYNC) == [Change(TOPIC, KEY, None)]
    records.heard(A, says(1000), 100.0)
    records.relay_up(A, 105.0)
    records.heard(A, says(1000), 106.0)
    assert records.expire(200.0) == []


def test_a_relay_that_was_left_counts_for_a_little_while() -> None:
    records = book()
    records.heard(A, says(1000), 0.0)
    records.relay_left(A, 10.0)
    assert records.heard(B, says(10), 12.0) is None
    assert records.expire(10 + LEFT - 4) == []
    assert records.heard(B, says(0), 22.0) is None
    assert records.expire(10 + LEFT) == [Change(TOPIC, KEY, None)]


def test_topics_that_are_not_watched_and_floods_are_not_kept() -> None:
    records = book()
    assert records.heard(A, Record(b"o" * 32, KEY, 10, b"x"), 0.0) is None
    for number in range(MAX_RECORDS + 50):
        records.heard(A, Record(TOPIC, number.to_bytes(32, "big"), 10, b"junk"), 0.0)
    assert records.heard(A, says(10), 0.0) is None  # that relay has said too much
    assert records.heard(B, says(10), 0.0) == Change(TOPIC, KEY, b"x")  # another is not to blame
    assert len(records.expire(100.0)) == MAX_RECORDS + 1
    assert records.heard(A, says(10), 100.0) is not None
    records.unwatch(TOPIC)
    assert records.empty


def test_the_pace_stays_below_what_a_relay_takes() -> None:
    pace, sent = PublishPace(0.0), []
    now = 0.0
    while now < 20:
        if not (wait := pace.wait(now)):
            assert pace.take(now)
            sent.append(now)
        else:
            now += wait
    assert len([at for at in sent if at == 0.0]) == PublishPace.BURST < PUBLISH_BURST
    assert len(sent) <= PublishPace.BURST + 20 * PublishPace.RATE + 1
    assert PublishPace.RATE < PUBLISH_RATE


happenings = st.lists(
    st.tuples(
        st.sampled_from(["says", "gone", "up", "left", "later"]),
        st.sampled_from([A, B]),
        st.integers(0, 2),
        st.binary(max_size=1),
    ),
    max_size=50,
)


@given(happenings=happenings)
def test_new_and_gone_alternate_and_everything_ends(happenings: list[tuple[str, str, int, bytes]]) -> None:
    records, now = book(), 0.0
    there: dict[bytes, bytes] = {}

    def told(change: Change | None) -> None:
        if change is None:
            return
        if change.blob is None:
            del there[change.key]
        else:
            assert there.get(change.key) != change.blob
            there[change.key] = change.blob

    for what, url, number, blob in happenings:
        key = bytes((number,)) * 32
        match what:
            case "says":
                told(records.heard(url, Record(TOPIC, key, 5 + number, blob), now))
                assert there[key] == blob
            case "gone":
                told(records.heard(url, Record(TOPIC, key, 0), now))
            case "up":
                records.relay_up(url, now)
            case "left":
                records.relay_left(url, now)
            case _:
                now += 2.0
                for change in records.expire(now):
                    told(change)
    for change in records.expire(now + 100):
        told(change)
    assert not there
    assert records.empty
