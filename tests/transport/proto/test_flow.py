from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import CreditExceeded
from transport.proto.flow import ReceiveCredit, SendCredit


def test_a_sender_stops_at_its_limit_and_goes_on_with_a_new_one() -> None:
    credit = SendCredit(100)
    credit.use(100)
    assert credit.available == 0
    assert not credit.raise_to(90)
    assert credit.raise_to(150)
    assert credit.available == 50


def test_a_receiver_grants_when_half_of_the_window_is_used() -> None:
    credit = ReceiveCredit(100, "stream 4")
    credit.receive(100)
    assert not credit.consume(49)
    assert credit.consume(1)
    assert credit.grant() == 150


def test_a_peer_that_overruns_its_credit_is_named_with_both_numbers() -> None:
    credit = ReceiveCredit(100, "stream 4")
    credit.receive(100)
    with pytest.raises(CreditExceeded, match="101 bytes received on stream 4, the credit was 100") as caught:
        credit.receive(1)
    assert (caught.value.limit, caught.value.received) == (100, 101)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=200))
def test_sender_and_receiver_agree_and_the_unread_never_exceeds_the_window(steps: list[tuple[int, int]]) -> None:
    sender, receiver = SendCredit(100), ReceiveCredit(100, "stream 4")
    unread = 0
    for wanted, read in steps:
        size = min(wanted, sender.available)
        sender.use(size)
        receiver.receive(size)
        unread += size
        taken = min(read, unread)
        unread -= taken
        if receiver.consume(taken):
            sender.raise_to(receiver.grant())
        assert unread <= 100
        assert sender.available > 0 or unread >= 50  # whoever reads is never starved
