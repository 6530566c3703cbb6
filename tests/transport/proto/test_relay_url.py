from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.proto.relay_url import MAX_URL, BadRelayUrl, is_global, parse_relay_url


@pytest.mark.parametrize(
    ("text", "canonical", "authority", "websocket"),
    [
        ("https://relay.example", "https://relay.example", "relay.example", "wss://relay.example/relay"),
        (
            "HTTPS://Relay.Example.:443/",
            "https://relay.example",
            "relay.example",
            "wss://relay.example/relay",
        ),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080", "127.0.0.1:8080", "ws://127.0.0.1:8080/relay"),
        ("http://[::1]:8080", "http://[::1]:8080", "[::1]:8080", "ws://[::1]:8080/relay"),
        ("http://[2001:DB8:0::1]", "http://[2001:db8::1]", "[2001:db8::1]", "ws://[2001:db8::1]/relay"),
        (
            "https://cdn.example:8443/Some/path/",
            "https://cdn.example:8443/Some/path",
            "cdn.example:8443",
            "wss://cdn.example:8443/Some/path/relay",
        ),
        (" https://relay.example ", "https://relay.example", "relay.example", "wss://relay.example/relay"),
        ("https://relay.example:80", "https://relay.example:80", "relay.example:80", "wss://relay.example:80/relay"),
    ],
)
def test_a_url_has_one_canonical_text(text: str, canonical: str, authority: str, websocket: str) -> None:
    url = parse_relay_url(text)
    assert (str(url), url.authority, url.websocket) == (canonical, authority, websocket)
    assert parse_relay_url(canonical) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "relay.example",
        "relay.example:8080",
        "ws://relay.example",
        "ftp://relay.example",
        "file:///etc/passwd",
        "http://",
        "http://:80",
        "http://user:secret@relay.example",
        "http://relay.example?x=1",
        "http://relay.example#x",
        "http://relay.example/%2e%2e",
        "http://relay.example/../x",
        "http://relay.example/./x",
        "http://relay.example//x",
        "http://relay.example:0",
        "http://relay.example:65536",
        "http://relay.example:x",
        "http://relay example",
        "http://relay.example\nHost: x",
        "http://relay.example/a\r\nX: y",
        "http://-x.example",
        "http://x..example",
        "http://[::1",
        "http://[fe80::1%eth0]:80",
        "http://127.1",
        "http://2130706433",
        "http://300.1.1.1",
        "http://ré.example",
        "http://١٢٣.example",
        "https://" + "a" * 64 + ".example",
        "https://" + "a." * 200 + "example",
    ],
)
def test_what_is_no_relay_url_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(BadRelayUrl) as caught:
        parse_relay_url(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("http://127.0.0.1:1", True),
        ("http://10.1.2.3", True),
        ("http://192.168.1.1", True),
        ("http://169.254.169.254", True),
        ("http://100.64.0.1", True),
        ("http://0.0.0.0:1", True),
        ("http://224.0.0.1", True),
        ("http://[::1]", True),
        ("http://[::]", True),
        ("http://[fe80::1]", True),
        ("http://[fd00::1]", True),
        ("http://[ff02::1]", True),
        ("http://[::ffff:127.0.0.1]", True),
        ("http://[::ffff:10.0.0.1]", True),
        ("http://[64:ff9b::127.0.0.1]", True),
        ("http://[64:ff9b::a00:1]", True),
        ("http://[2002:7f00:1::]", True),
        ("http://localhost", True),
        ("http://x.localhost", True),
        ("http://8.8.8.8", False),
        ("http://[2606:4700::1111]", False),
        ("http://[::ffff:8.8.8.8]", False),
        ("https://relay.example", False),
    ],
)
def test_private_addresses_are_known_in_every_disguise(text: str, private: bool) -> None:
    assert parse_relay_url(text).is_private is private


def test_a_zone_does_not_hide_a_link_local_address() -> None:
    assert not is_global("fe80::1%eth0")


@given(st.one_of(st.text(max_size=300), st.from_regex(r"https?://[^\s]{0,80}", fullmatch=True)))
def test_any_text_is_a_url_or_a_refusal(text: str) -> None:
    try:
        url = parse_relay_url(text)
    except BadRelayUrl:
        return
    assert len(text) <= MAX_URL
    assert parse_relay_url(url.text) == url
    assert url.text.isascii()
    assert 0 < url.port < 65536
    assert not set(url.websocket) & set(" \r\n\t?#@%")
