from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment

from swarmnode.dashboard.cells import clean, encoded, fit, pad, text_of, wrap

any_text = st.text(st.characters(codec=None), max_size=60)  # lone surrogates too
widths = st.integers(0, 80)


@given(any_text)
def test_nothing_that_moves_a_cursor_or_turns_text_around_is_left(text: str) -> None:
    shown = clean(text)
    assert not [one for one in shown if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")]
    assert clean(shown) == shown


@given(any_text, widths, st.booleans())
def test_a_text_fits_exactly(text: str, width: int, right: bool) -> None:
    assert cell_len(fit(clean(text), width, right)) == width


@given(st.lists(any_text, max_size=5), widths)
def test_a_line_is_exactly_as_wide_as_it_should_be(texts: list[str], width: int) -> None:
    assert cell_len(text_of(pad([Segment(clean(text)) for text in texts], width))) == width


@given(any_text, st.integers(2, 80))
def test_wrapped_lines_fit_and_lose_no_word(text: str, width: int) -> None:
    lines = wrap(clean(text), width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(clean(text).split())


def test_what_a_hostile_name_becomes() -> None:
    assert clean("\x1b[2J\x07evil\u202egnp.exe") == "·[2J·evil·gnp.exe"
    assert clean("a\nb\tc") == "a b c"
    assert len(clean("Z" + "\u0300\u0301\u0302" * 30)) <= 3  # a tower of marks
    assert clean("[red]no markup[/]") == "[red]no markup[/]"
    assert clean("日本語 äöü") == "日本語 äöü"


@pytest.mark.parametrize("blank", ["\u2800", "\u3164", "\uffa0", "\u115f", "\u1160"])
def test_a_name_of_characters_that_are_drawn_as_nothing_is_seen(blank: str) -> None:
    assert clean(blank * 3) == "···"


@given(any_text, st.sampled_from(["ascii", "latin-1", "cp437", "utf-8"]))
def test_what_an_encoding_lacks_takes_as_many_cells(text: str, encoding: str) -> None:
    plain = "".join(one for one in clean(text) if unicodedata.category(one)[0] != "M")
    assert cell_len(encoded(plain, encoding).decode(encoding)) == cell_len(plain)


def test_what_an_encoding_lacks_becomes_something_similar() -> None:
    assert encoded("a · b… ↑1 ↓2 “c” – 日\n", "ascii") == b'a - b~ ^1 v2 "c" - ??\n'
    assert encoded("a · b…", "latin-1") == b"a \xb7 b~"
    assert encoded("日 · …", "utf-8").decode() == "日 · …"


def test_cutting_says_so() -> None:
    assert fit("direct-public", 10) == "direct-pu…"
    assert fit("日本語", 4) == "日 …"
    assert fit("ab", 4, right=True) == "  ab"
