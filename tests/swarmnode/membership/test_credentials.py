"""What nodes show when a connection opens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import BadDocument
from swarmnode.membership import MAX_CREDENTIALS, Credentials
from tests.swarmnode.membership.people import CERTIFICATE, PROOF

VECTORS = [
    (Credentials.none(), b""),
    (Credentials.certificate(CERTIFICATE), b"\x01" + CERTIFICATE.encode()),
    (Credentials.join(PROOF), b"\x02" + PROOF.encode()),
]


@pytest.mark.parametrize(("credentials", "data"), VECTORS)
def test_fixed_bytes(credentials: Credentials, data: bytes) -> None:
    assert credentials.encode() == data
    assert Credentials.decode(data) == credentials
    assert len(data) <= MAX_CREDENTIALS


@pytest.mark.parametrize(("credentials", "data"), VECTORS)
def test_later_versions_may_add_bytes(credentials: Credentials, data: bytes) -> None:
    assert Credentials.decode((data or b"\0") + b"more") == credentials


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"\x03", "unknown kind 3"), (b"\x01", "certificate of 0"), (b"\x02x", "proof of 1"), (bytes(513), "513 bytes")],
)
def test_one_line_for_what_is_none(data: bytes, text: str) -> None:
    with pytest.raises(BadDocument, match=text):
        Credentials.decode(data)


@given(st.binary(max_size=600))
def test_anything_from_the_network_is_credentials_or_one_line(data: bytes) -> None:
    line = ""
    try:
        assert data.startswith(Credentials.decode(data).encode())
    except BadDocument as error:
        line = str(error)
    assert "\n" not in line
