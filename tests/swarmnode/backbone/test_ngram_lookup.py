"""What is guessed from a text's own repetitions, against a plain search through the text."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.backbone.ngram_lookup import KEPT, LONGEST, TRUSTED_RUN, NgramLookup, Proposal

TEXT = st.lists(st.integers(0, 3), max_size=60)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def lookup(tokens: list[int]) -> NgramLookup:
    found = NgramLookup()
    found.extend(tokens)
    return found


def earlier(text: list[int]) -> tuple[int, list[int]]:
    """The longest n-gram at the end that stood before, and the places that follow it, the latest first."""
    for n in range(min(LONGEST, len(text) - 1), 0, -1):
        places = [at for at in range(len(text) - 1, n - 1, -1) if text[at - n : at] == text[-n:]]
        if places:
            return n, places[:KEPT]
    return 0, []


def test_what_followed_the_same_words_before_is_guessed() -> None:
    assert lookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]).propose(3) == Proposal((4, 5, 6), match=3, count=1)


def test_the_longest_match_decides() -> None:
    text = [7, 1, 2, 40, 7, 7, 1, 2, 40, 8, 2, 50, 2, 50, 7, 1, 2]
    assert lookup(text).propose(1).tokens == (40,)


def test_the_most_frequent_continuation_wins_and_its_rivals_are_told() -> None:
    text = [1, 10, 0, 1, 10, 2, 1, 11, 3, 1]
    assert lookup(text).propose(1) == Proposal((10,), match=1, count=2, rivals=1)


def test_of_equally_frequent_continuations_the_latest_wins() -> None:
    assert lookup([1, 10, 0, 1, 11, 2, 1]).propose(1).tokens == (11,)


def test_a_place_that_a_full_draft_follows_is_preferred() -> None:
    text = [1, 2, 30, 31, 32, 33, 1, 2, 30, 1, 2]
    assert lookup(text).propose(4).tokens == (30, 31, 32, 33)
    assert lookup(text).propose(2).tokens == (30, 1)


def test_a_draft_runs_on_through_itself_past_the_end_of_the_text() -> None:
    assert lookup([1, 2, 3, 1, 2, 3, 1]).propose(8).tokens == (2, 3, 1, 2, 3, 1, 2, 3)
    assert lookup([5, 5]).propose(3).tokens == (5, 5, 5)


def test_nothing_is_guessed_where_nothing_repeats() -> None:
    for text in ([], [1], [1, 2, 3, 4]):
        assert lookup(text).propose(8) == Proposal()
    assert lookup([1, 1]).propose(0) == Proposal()


def test_a_copy_goes_on_past_one_edited_token() -> None:
    source = list(range(100, 140))
    found = lookup([*source, 1, 2, *source[: TRUSTED_RUN + 4]])
    found.propose(4)
    found.extend(source[TRUSTED_RUN + 4 : 2 * TRUSTED_RUN + 4])
    found.extend([99])
    assert found.propose(3) == Proposal(tuple(source[2 * TRUSTED_RUN + 5 :][:3]), match=0, count=1)
    found.extend([98])
    assert found.propose(3).tokens == ()  # two in a row are no edit of one


def test_a_copy_finds_back_after_tokens_left_out_or_put_in() -> None:
    source = [100, 101, 102, 7, 103, 104, 105, 106, 107, 7, 108, 109, 110, 7, 111, 112]
    elsewhere = [7, 50, 7, 50, 7, 50, 7, 50]  # what usually follows a 7
    for edit in ([7], [60, 61, 7]):  # 106 and 107 left out; 107 replaced by two others
        found = lookup([*source, *elsewhere, 1])
        found.extend(source[:1])
        for token in source[1:7]:
            found.propose(4)
            found.extend([token])
        found.propose(4)
        found.extend(edit)
        assert found.propose(3).tokens == (108, 109, 110)


@given(TEXT, st.lists(st.integers(0, 60), max_size=4), st.integers(1, 8))
def test_guesses_are_real_continuations_however_the_text_came(text: list[int], cuts: list[int], most: int) -> None:
    found = NgramLookup()
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(bounds):
        found.extend(text[start:end])
    proposal = found.propose(most)
    n, places = earlier(text)
    if not n:
        assert proposal == Proposal()
        return
    assert len(proposal.tokens) == most
    assert proposal.match <= n
    following = [text[at] for at in places]
    if proposal.match == n and proposal.count + proposal.rivals == len(places):
        assert following.count(proposal.tokens[0]) == proposal.count == max(map(following.count, following))
    seen = [*text, *proposal.tokens]
    m = max(1, proposal.match)
    assert any(
        text[at - m : at] == text[-m:] and tuple(seen[at : at + most]) == proposal.tokens for at in range(m, len(text))
    )


@settings(max_examples=50)
@given(st.lists(st.tuples(TOKENS, st.integers(-1, 20)), max_size=12))
def test_any_tokens_are_taken(calls: list[tuple[list[int], int]]) -> None:
    found = NgramLookup()
    for tokens, most in calls:
        found.extend(tokens)
        assert len(found.propose(most).tokens) in (0, max(most, 0))
    assert len(found) == sum(len(tokens) for tokens, _ in calls)


def test_a_long_prompt_is_indexed_as_single_tokens_are() -> None:
    chance = random.Random(1)
    text = [chance.randrange(40) for _ in range(4000)]
    at_once, singly = lookup(text), NgramLookup()
    for token in text:
        singly.extend([token])
    agree = 0
    for _ in range(200):
        token = chance.randrange(40)
        at_once.extend([token])
        singly.extend([token])
        n, places = earlier([*text, token])
        text.append(token)
        first, second = at_once.propose(4), singly.propose(4)
        assert max(first.match, second.match) <= n
        agree += first == second and first.match == n and first.count + first.rivals == len(places)
    assert agree >= 190  # a chain walk is bounded: what shares a slot with something frequent may be missed


def test_memory_stays_within_the_stated_bytes_per_token() -> None:
    for size in (1_500, 70_000, 150_000):
        found = lookup([at * 7919 % 50_000 for at in range(size)])
        arrays = [found._text, *found._links, *found._heads]
        assert sum(len(a) * a.itemsize for a in arrays) <= 84 * size
