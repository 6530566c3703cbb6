from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.backbone.text_stream import TextStream


def feed_all(stream: TextStream, pieces: list[bytes]) -> str:
    out = []
    for piece in pieces:
        out.append(stream.feed(piece))
        if stream.stopped_by is not None:
            break
    return "".join(out) + stream.finish()


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


def test_a_character_cut_in_two_waits_for_its_other_half() -> None:
    stream = TextStream()
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert stream.feed(b"caf" + first) == "caf"
    assert stream.feed(second) == "é"


def test_bytes_that_are_no_utf8_become_replacement_characters() -> None:
    assert feed_all(TextStream(), [b"a\xff", b"b\xc3"]) == "a\ufffdb\ufffd"


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(["END"])
    assert stream.feed(b"one E") == "one "
    assert stream.feed(b"N") == ""
    assert stream.feed(b"X") == "ENX"
    assert stream.feed(b"END more") == ""
    assert stream.stopped_by == "END"
    assert stream.feed(b"ignored") == ""
    assert stream.finish() == ""


@given(st.text(), st.lists(st.integers(0, 7)), st.text(max_size=4))
def test_any_cutting_gives_the_same_text_up_to_the_stop_string(text: str, sizes: list[int], stop: str) -> None:
    at = text.find(stop) if stop else -1
    assert feed_all(TextStream([stop]), cut(text.encode(), sizes)) == (text if at < 0 else text[:at])


@given(st.text(), st.lists(st.integers(0, 7)), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_with_several_stop_strings_none_ever_comes_out(text: str, sizes: list[int], stops: list[str]) -> None:
    shown = feed_all(TextStream(stops), cut(text.encode(), sizes))
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert shown == text or any(text.startswith(stop, len(shown)) for stop in stops)
