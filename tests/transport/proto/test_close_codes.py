from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transport import errors
from transport.proto.close_codes import MAX_REASON, error_of_code, error_of_termination, printable
from transport.proto.control_frames import CloseCode


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (CloseCode.NOT_ADMITTED, errors.NotAdmitted),
        (CloseCode.DUPLICATE, errors.DuplicateConnection),
        (CloseCode.BAD_SIGNATURE, errors.BadSignature),
        (CloseCode.VERSION_MISMATCH, errors.VersionMismatch),
        (CloseCode.OVERLOADED, errors.Overloaded),
        (CloseCode.REPLACED, errors.ConnectionReplaced),
        (CloseCode.CREDIT_EXCEEDED, errors.ConnectionClosed),
        (7, errors.ConnectionClosed),
    ],
)
def test_every_code_has_its_error(code: int, kind: type[errors.TransportError]) -> None:
    error = error_of_code(code, "because")
    assert type(error) is kind
    assert "because" in str(error)


def test_what_ends_an_open_connection_is_always_a_connection_closed() -> None:
    for code in [0, 7, *CloseCode]:
        for kind in ("idle", "application", "transport"):
            error = error_of_termination(kind, code, "why", is_open=True)
            assert isinstance(error, errors.ConnectionClosed)


def test_a_transport_error_before_authentication_is_a_failed_handshake() -> None:
    error = error_of_termination("transport", 0x128, "no application protocol", is_open=False)
    assert isinstance(error, errors.HandshakeFailed)
    assert "0x128" in str(error)


@given(st.sampled_from(["idle", "application", "transport"]), st.integers(0, 2**62 - 1), st.text(), st.booleans())
@example("transport", 0x128, "\x1b]0;owned\x07\n" * 1000, False)
@example("application", CloseCode.NOT_ADMITTED, "\x1b[2J\r\u202egnp.exe", False)
def test_whatever_a_stranger_says_is_one_short_printable_line(
    kind: Literal["idle", "application", "transport"], code: int, reason: str, is_open: bool
) -> None:
    error = error_of_termination(kind, code, reason, is_open=is_open)
    assert str(error).isprintable()
    assert len(str(error)) < 3 * MAX_REASON
    said = getattr(error, "reason", "")
    assert said.isprintable()
    assert len(said) <= MAX_REASON


def test_a_reason_that_can_be_shown_is_left_alone() -> None:
    assert printable("zu viele Anfragen für 家, später") == "zu viele Anfragen für 家, später"
