from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment

from swarmnode.dashboard.cells import clean, fit, pad, text_of, wrap

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


def test_cutting_says_so() -> None:
    assert fit("direct-public", 10) == "direct-pu…"
    assert fit("日本語", 4) == "日 …"
    assert fit("ab", 4, right=True) == "  ab"
