from __future__ import annotations

import pytest

from transport import errors
from transport.proto.close_codes import error_of_code, error_of_termination
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
