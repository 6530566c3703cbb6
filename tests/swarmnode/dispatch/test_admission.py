"""What a worker takes on: bounded, fair, and accounted for to the last byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dispatch.admission import Admission, AdmissionLimits, Ticket

SMALL = AdmissionLimits(max_pairs=100, max_bytes=100, calls_per_peer=3, calls=5, pairs=20, bytes=1000)


def offer(admission: Admission[str], peer: str, job: str = "", pairs: int = 1, nbytes: int = 1) -> Ticket[str]:
    ticket = admission.offer(peer, job, pairs, nbytes)
    assert isinstance(ticket, Ticket)
    return ticket


def test_clients_take_turns_whatever_they_pile_up() -> None:
    admission: Admission[str] = Admission(SMALL)
    for peer, job in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2")):
        offer(admission, peer, job)
    order = []
    while (ticket := admission.take()) is not None:
        order.append(ticket.job)
    assert order == ["a1", "b1", "a2", "b2", "a3"]


def test_refusals_name_the_limit() -> None:
    admission: Admission[str] = Admission(SMALL)
    tickets = [offer(admission, "a") for _ in range(3)]
    assert admission.offer("a", "", 1, 1) == "3 calls of yours are not answered yet"
    assert admission.offer("b", "", 18, 1) == "3 rows are waiting here, 20 are the limit"
    assert admission.offer("b", "", 1, 998) == "3 bytes are waiting here, 1000 are the limit"
    offer(admission, "b")
    offer(admission, "c")
    assert admission.offer("d", "", 1, 1) == "5 calls are waiting here"
    for ticket in tickets:
        assert admission.withdraw(ticket)
    offer(admission, "a")


def test_one_client_does_not_get_all_the_memory() -> None:
    admission: Admission[str] = Admission(SMALL)
    held = offer(admission, "a", nbytes=400)
    other = offer(admission, "b", nbytes=300)
    assert admission.offer("a", "", 1, 101) == "400 bytes of yours are waiting here, 500 are the limit"
    assert admission.withdraw(other)
    offer(admission, "a", nbytes=101)
    offer(admission, "b", nbytes=399)
    assert admission.take() is held
    admission.release(held)
    offer(admission, "a", nbytes=399)


def test_one_call_alone_is_taken_even_if_it_is_above_the_totals() -> None:
    admission: Admission[str] = Admission(SMALL)
    offer(admission, "a", pairs=99, nbytes=5000)


sizes = st.integers(1, 1000)


@given(
    st.builds(
        AdmissionLimits,
        max_pairs=sizes,
        max_bytes=sizes,
        calls_per_peer=st.integers(1, 9),
        calls=st.integers(1, 9),
        pairs=sizes,
        bytes=sizes,
    )
)
def test_a_client_that_is_alone_gets_all_that_it_was_told(limits: AdmissionLimits) -> None:
    admission: Admission[str] = Admission(limits)
    tickets = [offer(admission, "a", "", limits.max_pairs, 2 * limits.max_bytes) for _ in range(limits.calls_of_one)]
    assert isinstance(admission.offer("a", "", 1, 1), str)
    assert admission.take() is tickets[0]  # being computed, it counts all the same
    assert isinstance(admission.offer("a", "", 1, 1), str)
    admission.release(tickets[0])
    offer(admission, "a", "", limits.max_pairs, 2 * limits.max_bytes)


def test_a_client_that_has_all_it_may_leaves_room_for_a_second_one() -> None:
    limits = AdmissionLimits()
    admission: Admission[str] = Admission(limits)
    for _ in range(limits.calls_of_one):
        offer(admission, "a", "", limits.max_pairs, 2 * limits.max_bytes)
    for _ in range(4):
        offer(admission, "b", "", limits.max_pairs, 2 * limits.max_bytes)
    first = admission.take()
    assert first is not None
    admission.release(first)
    assert "bytes of yours" in str(admission.offer("a", "", limits.max_pairs, 2 * limits.max_bytes))
    offer(admission, "b", "", limits.max_pairs, 2 * limits.max_bytes)


def test_a_call_counts_until_its_answer_has_left() -> None:
    admission: Admission[str] = Admission(SMALL)
    for _ in range(3):
        offer(admission, "a")
    running = admission.take()
    assert running is not None
    assert not admission.withdraw(running)
    assert isinstance(admission.offer("a", "", 1, 1), str)
    admission.release(running)
    offer(admission, "a")


steps = st.lists(
    st.tuples(st.sampled_from(["offer", "take", "withdraw", "release", "drop"]), st.integers(0, 2), st.integers(1, 9)),
    max_size=60,
)


@given(steps)
def test_the_books_balance(actions: list[tuple[str, int, int]]) -> None:
    admission: Admission[str] = Admission(SMALL)
    waiting: list[Ticket[str]] = []
    running: list[Ticket[str]] = []
    for action, peer, size in actions:
        if action == "offer":
            ticket = admission.offer(peer, "", size, size)
            if isinstance(ticket, Ticket):
                waiting.append(ticket)
        elif action == "take":
            if (taken := admission.take()) is not None:
                waiting.remove(taken)
                running.append(taken)
        elif action == "withdraw" and waiting:
            assert admission.withdraw(waiting.pop(0))
        elif action == "release" and running:
            admission.release(running.pop())
        elif action == "drop":
            for dropped in admission.drop(peer):
                waiting.remove(dropped)
            assert all(ticket.peer != peer for ticket in waiting)
        assert admission.waiting == len(waiting)
        assert admission.calls == len(waiting) + len(running)
        assert admission.pairs == sum(ticket.pairs for ticket in waiting + running)
        assert admission.nbytes == sum(ticket.nbytes for ticket in waiting + running)
        assert admission.calls <= SMALL.calls
