from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dashboard.keys import KeyReader, Pasted, press
from swarmnode.dashboard.ui import Overlay, Page, Sort, Ui

ORDER = ["a", "b", "c"]


def pressed(*keys: str, ui: Ui | None = None) -> Ui:
    state = ui if ui is not None else Ui()
    for key in keys:
        state = press(state, key, ORDER)
    return state


def test_keys_of_a_terminal() -> None:
    reader = KeyReader()
    assert reader.feed(b"s\x1b[A\x1bOB\x1b[5~\x1b[1;5Cq") == ["s", "up", "down", "page up", "q"]
    assert reader.feed("é".encode()[:1]) == []
    assert reader.feed("é".encode()[1:] + b"\r") == ["é", "\r"]


def test_a_sequence_may_come_in_pieces_and_an_escape_may_stand_alone() -> None:
    reader = KeyReader()
    assert reader.feed(b"\x1b") == []
    assert reader.waits
    assert reader.feed(b"[") == []
    assert reader.feed(b"B") == ["down"]
    assert reader.feed(b"\x1b") == []
    assert reader.pause() == ["escape"]
    assert reader.feed(b"[") == ["["]


def test_what_is_pasted_is_no_key_and_only_the_filter_takes_it() -> None:
    reader = KeyReader()
    keys = [*reader.feed(b"j\x1b[200~\r\n a q\x07\ty"), *reader.feed(b"\r\nquit\x1b[A\x1b"), *reader.feed(b"[201~k")]
    assert keys == ["j", " a qy", "k"]
    assert isinstance(keys[1], Pasted)
    assert pressed(keys[1], ui=Ui(asks_to_leave=True)) == Ui(asks_to_leave=True)
    assert pressed("/", "x", keys[1], "\r").filter == "x a qy"
    asked = pressed("q", ui=Ui(asks_to_leave=True))
    assert pressed(Pasted("y"), ui=asked) == asked
    assert reader.feed(b"\x1b[200~" + b"z" * 9999 + b"\x1b[201~") == ["z" * 40]
    assert reader.feed(b"\x1b[201~q") == ["q"]  # an end without a beginning


def test_a_paste_that_never_ends_is_dropped() -> None:
    reader = KeyReader()
    assert reader.feed(b"\x1b[200~quit") == []
    assert reader.waits
    assert reader.is_pasting
    assert reader.pause() == []
    assert not reader.waits
    assert reader.feed(b"s") == ["s"]


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_are_keys_or_nothing(pieces: list[bytes]) -> None:
    reader, ui = KeyReader(), Ui(asks_to_leave=True)
    for piece in pieces:
        for key in [*reader.feed(piece), *reader.pause()]:
            ui = press(ui, key, ORDER)
    assert len(ui.filter) <= 40


def test_sorting_and_reversing() -> None:
    assert pressed("s").sort is Sort.RTT
    assert pressed(*"s" * len(Sort)).sort is Sort.NAME
    assert pressed("r").reverse
    assert not pressed("r", "r").reverse


def test_a_filter_is_typed_kept_and_dropped() -> None:
    ui = pressed("/", "s", "q", "\x7f", "t")
    assert (ui.filter, ui.typing, ui.sort) == ("st", True, Sort.NAME)
    kept = pressed("\r", ui=ui)
    assert (kept.filter, kept.typing) == ("st", False)
    assert pressed("escape", ui=kept).filter == ""
    assert pressed("escape", ui=ui) == Ui()


def test_choosing_and_opening_a_peer() -> None:
    assert pressed("j").selected == "a"
    assert pressed("down", "down", "down", "down").selected == "c"
    assert pressed("G", "k").selected == "b"
    opened = pressed("j", "j", "\r")
    assert (opened.selected, opened.overlay) == ("b", Overlay.PEER)
    assert pressed("down", ui=opened).selected == "c"  # the next one, opened too
    assert pressed("escape", ui=opened).overlay is Overlay.NONE
    assert press(Ui(), "\r", []).overlay is Overlay.NONE


def test_pausing_pages_help_and_the_ticket() -> None:
    assert pressed("p").paused
    assert not pressed("p", " ").paused
    assert [pressed(*"\t" * n).page for n in range(5)] == [Page.ALL, Page.PEERS, Page.EXPERTS, Page.EVENTS, Page.ALL]
    assert pressed("?").overlay is Overlay.HELP
    assert pressed("?", "q") == Ui()
    assert pressed("t").overlay is Overlay.TICKET


@pytest.mark.parametrize("answer", ["n", "q", "x", "escape", "\r"])
def test_a_nodes_own_view_asks_before_it_stops_the_node(answer: str) -> None:
    assert pressed("q").has_left
    asked = pressed("q", ui=Ui(asks_to_leave=True))
    assert (asked.overlay, asked.has_left) == (Overlay.LEAVE, False)
    assert pressed("y", ui=asked).has_left
    assert pressed(answer, ui=asked) == Ui(asks_to_leave=True)
