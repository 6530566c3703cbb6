"""config and client_address: what texts mean, and one line for those that mean nothing."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.client_address import address_text, forwarded_for, one_subscriber, parse_address
from relay.config import (
    RelayConfig,
    is_our_name,
    parse_listen,
    parse_names,
    parse_network,
    parse_reflector,
    read_access_file,
    tls_context,
)
from transport.errors import ConfigError
from transport.identity import Identity

TRUSTED = (parse_network("10.0.0.0/8"), parse_network("fd00::/8"))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("[::]:8080", ("::", 8080)),
        (":80", ("::", 80)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
        ("localhost:81", ("localhost", 81)),
    ],
)
def test_listen(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address


@pytest.mark.parametrize("text", ["", "8080", "host", "host:", "host:x", "host:65536", "::1:80", "host:-1", "host:٣"])
def test_no_address_to_listen_on(text: str) -> None:
    with pytest.raises(ConfigError, match="listen on"):
        parse_listen(text)


def test_reflector_ports() -> None:
    assert parse_reflector("3478,3479") == (3478, 3479)
    assert parse_reflector("0,0") == (0, 0)
    assert parse_reflector("off") is None
    for text in ("", "3478", "3478,3478", "1,2,3", "a,b", "1,70000"):
        with pytest.raises(ConfigError):
            parse_reflector(text)


def test_networks_and_names() -> None:
    assert str(parse_network("10.1.2.3/8")) == "10.0.0.0/8"
    assert parse_names(["Relay.Example", "relay.example:8443"]) == {"relay.example", "relay.example:8443"}
    with pytest.raises(ConfigError):
        parse_network("10.0.0.0/99")
    for text in ("", "https://relay.example", "a" * 301):
        with pytest.raises(ConfigError):
            parse_names([text])


@given(text=st.text(max_size=40))
def test_any_authority_is_ours_or_not(text: str) -> None:
    assert is_our_name(text, frozenset({"relay.example"})) in (True, False)
    assert not is_our_name(text, frozenset())


def test_the_access_list(tmp_path: Path) -> None:
    one, two = Identity.generate().peer_id, Identity.generate().peer_id
    file = tmp_path / "access"
    file.write_text(f"# comment\n\n  {one}  # one\n{str(two).upper()}\n{one}\n")
    assert read_access_file(file) == {one.raw, two.raw}
    file.write_text(f"{one}\nnonsense\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_access_file(file)
    file.write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError):
        read_access_file(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_access_file(tmp_path / "none")


def test_sizes_that_cannot_be_meant() -> None:
    for settings in ({"max_clients": 0}, {"client_rate": -1}, {"global_rate": 2**32}):
        with pytest.raises(ConfigError):
            RelayConfig(**settings)  # type: ignore[arg-type]


def test_tls_files_that_are_none(tmp_path: Path) -> None:
    assert tls_context(RelayConfig()) is None
    file = tmp_path / "x.pem"
    for content in (None, b"nonsense"):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match="TLS certificate"):
            tls_context(RelayConfig(tls=(file, file)))


@pytest.mark.parametrize(
    ("values", "client"),
    [
        (["198.51.100.7"], "198.51.100.7"),
        (["1.2.3.4, 198.51.100.7"], "198.51.100.7"),  # what the client itself claims stands further left
        (["1.2.3.4", "198.51.100.7, 10.0.0.1"], "198.51.100.7"),
        (["198.51.100.7:4711"], "198.51.100.7"),
        (["[2001:db8::7]:4711"], "2001:db8::7"),
        (["2001:db8::7"], "2001:db8::7"),
        (["::ffff:198.51.100.7"], "198.51.100.7"),
        (["1.2.3.4, unknown, 10.0.0.1"], None),
        (["10.0.0.1"], None),
        ([], None),
        ([""], None),
        (["1.2.3.4," * 300], None),
    ],
)
def test_forwarded_for(values: list[str], client: str | None) -> None:
    assert forwarded_for(values, TRUSTED) == (None if client is None else ip_address(client))


@given(text=st.text(max_size=60))
def test_any_header_is_an_address_or_none(text: str) -> None:
    forwarded_for([text], TRUSTED)


def test_addresses_as_bounds_and_as_text() -> None:
    one, two = parse_address("2001:db8:0:1::1"), parse_address("[2001:db8:0:1:ffff::2%eth0]:1")
    assert one_subscriber(one) == one_subscriber(two) != one_subscriber(parse_address("2001:db8:0:2::1"))
    assert one_subscriber(parse_address("192.0.2.1")) != one_subscriber(parse_address("192.0.2.2"))
    assert address_text(one, 5) == "[2001:db8:0:1::1]:5"
    assert address_text(parse_address("192.0.2.1"), 0) == "192.0.2.1:0"
    assert address_text(None, 5) == ""
