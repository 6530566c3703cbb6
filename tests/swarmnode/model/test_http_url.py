from __future__ import annotations

import contextlib
from pathlib import Path, PureWindowsPath
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarmnode.errors import UsageError
from swarmnode.model.http_url import (
    MAX_TAG,
    file_name,
    is_public_url,
    parse_content_range,
    parse_unsatisfied_range,
    public,
    redirected,
    retry_after,
    same_origin,
    shown,
    sibling,
    token_for,
    url_of,
    version_tag,
)

NASTY = st.text(st.sampled_from("htps:/?#@[]%.a0-\\ \n\0é") | st.characters(), max_size=60)


@pytest.mark.parametrize("model", ["m.gguf", "/a/b.gguf", "C:\\a.gguf", "ftp://a/b", "httpx", "", "http:", "http:/"])
def test_files_are_no_addresses(model: str) -> None:
    assert url_of(model) is None


@pytest.mark.parametrize("as_given", ["https://Host.example/a/m.gguf", "HTTPS://Host.example/a/m.gguf#part"])
def test_an_address_stays_one_as_text_and_as_a_path(as_given: str) -> None:
    assert url_of(as_given) == "https://Host.example/a/m.gguf"
    assert url_of(Path(as_given)) == "https://Host.example/a/m.gguf"
    assert url_of(PureWindowsPath(as_given)) == "https://Host.example/a/m.gguf"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://user:secret@host/m.gguf", "set SWARMNODE_HTTP_TOKEN"),
        ("https://host:99999/m.gguf", "is no address"),
        ("https://host/a b.gguf", "is no address"),
        ("https://host/", "names no file"),
        ("https://host", "names no file"),
        ("https://[::1/m.gguf", "is no address"),
        ("https://host/" + "a" * 3000, "is no address"),
    ],
)
def test_unusable_addresses_are_refused(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        url_of(url)
    assert "secret" not in str(caught.value)


@given(NASTY)
def test_any_text_is_a_file_an_address_or_refused(text: str) -> None:
    url = None
    with contextlib.suppress(UsageError):
        url = url_of(text)
    if url is not None:
        assert urlsplit(url).hostname
        assert file_name(url)


def test_queries_are_neither_shown_nor_handed_on() -> None:
    signed = "https://host/m.gguf?signature=secret"
    assert shown(signed) == "https://host/m.gguf"
    assert public(signed) == ""
    assert public("https://host/ä.gguf") == "https://host/%C3%A4.gguf"
    assert public("https://host/a/m.gguf") == "https://host/a/m.gguf"


@given(NASTY)
def test_what_is_handed_on_is_public(text: str) -> None:
    for url in (text, "https://host/" + text):
        told = public(url)
        assert told == "" or is_public_url(told)
        assert shown(url).isprintable()
        assert "?" not in shown(url)


def test_parts_lie_beside_each_other() -> None:
    url = "https://host/a%20b/m-00001-of-00002.gguf?key=1"
    assert file_name(url) == "m-00001-of-00002.gguf"
    assert sibling(url, "m-00002-of-00002.gguf") == "https://host/a%20b/m-00002-of-00002.gguf?key=1"


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/other", "https://host/other"),
        ("other?x=1#f", "https://host/a/other?x=1"),
        ("//cdn.example/m", "https://cdn.example/m"),
        ("https://user:pw@cdn.example/m", "https://cdn.example/m"),
        ("http://host/m", None),  # without TLS
        ("file:///etc/passwd", None),
        ("https://[", None),
        ("", None),
        (None, None),
    ],
)
def test_redirects(location: str | None, target: str | None) -> None:
    assert redirected("https://host/a/m", location) == target


@given(NASTY)
def test_any_redirect_is_https_or_refused(location: str) -> None:
    target = redirected("https://host/a/m", location)
    assert target is None or (target.startswith("https://") and urlsplit(target).hostname)


def test_tokens_go_where_they_belong() -> None:
    both = {"SWARMNODE_HTTP_TOKEN": "ours", "HF_TOKEN": "theirs"}
    hf = {"HF_TOKEN": "theirs"}
    assert token_for("https://host/m", both) == ("ours", "SWARMNODE_HTTP_TOKEN")
    assert token_for("https://host/m", hf) == ("", "SWARMNODE_HTTP_TOKEN")
    assert token_for("https://huggingface.co/m", hf) == ("theirs", "HF_TOKEN")
    assert token_for("https://huggingface.co/m", both) == ("ours", "SWARMNODE_HTTP_TOKEN")
    assert token_for("https://huggingface.co.evil.example/m", hf)[0] == ""
    assert token_for("https://mirror.example/m", {**hf, "HF_ENDPOINT": "https://mirror.example"})[0] == "theirs"
    assert token_for("http://host/m", both)[0] == ""
    assert token_for("http://127.0.0.1:1/m", both)[0] == "ours"
    assert token_for("https://host/m", {"SWARMNODE_HTTP_TOKEN": "a\nX: b"})[0] == ""


def test_origins() -> None:
    assert same_origin("https://host/a", "https://HOST:443/b")
    assert not same_origin("https://host/a", "http://host/a")
    assert not same_origin("https://host/a", "https://host:444/a")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("bytes 0-9/100", (0, 10, 100)),
        ("bytes 99-99/100", (99, 100, 100)),
        ("bytes 0-100/100", None),
        ("bytes 5-4/100", None),
        ("bytes 0-9/*", None),
        ("bytes */100", None),
        ("bytes 0-9/99999999999999999999", None),
        ("bytes \u0661-2/3", None),
        (None, None),
    ],
)
def test_content_range(value: str | None, found: tuple[int, int, int] | None) -> None:
    assert parse_content_range(value) == found


@given(st.text() | st.from_regex(r"bytes [0-9]*-[0-9]*/[0-9]*"))
@example("bytes 0-0/1\n")
def test_any_content_range_is_a_range_or_none(value: str) -> None:
    found = parse_content_range(value)
    assert found is None or 0 <= found[0] < found[1] <= found[2]


@given(st.text(), st.text())
def test_tags_and_delays_are_bounded(tag: str, delay: str) -> None:
    found = version_tag({"etag": tag})
    assert len(found) <= MAX_TAG
    assert found.isprintable()
    seconds = retry_after(delay, tag, 1e9)
    assert seconds is None or 0 <= seconds < 1e18


DATE = "Sun, 09 Sep 2001 01:46:40 GMT"  # Unix time 1,000,000,000


@pytest.mark.parametrize(
    ("value", "date", "now", "seconds"),
    [
        ("3", None, 0, 3.0),
        ("100000", DATE, 0, 100_000.0),
        (DATE, None, 1e9 - 30, 30.0),
        (DATE, None, 1e9 + 30, 0.0),
        (DATE, "Sun, 09 Sep 2001 01:46:20 GMT", 5.0, 20.0),  # by the server's clock
        (DATE, "yesterday", 1e9 - 7, 7.0),
        ("Sunday, 09-Sep-01 01:46:40 GMT", None, 1e9 - 7, 7.0),
        ("Sun Sep  9 01:46:40 2001", None, 1e9 - 7, 7.0),
        ("Sun, 09 Sep 99999 01:46:40 GMT", None, 0, None),
        ("Sun, 99 Sep 2001 01:46:40 GMT", None, 0, None),
        ("soon", None, 0, None),
        ("", None, 0, None),
        (None, None, 0, None),
    ],
)
def test_how_long_a_server_wants_to_be_left_alone(
    value: str | None, date: str | None, now: float, seconds: float | None
) -> None:
    assert retry_after(value, date, now) == seconds


@pytest.mark.parametrize(
    ("value", "size"),
    [("bytes */0", 0), ("bytes */123", 123), ("bytes 0-1/2", None), ("bytes */*", None), ("bytes */" + "9" * 16, None)],
)
def test_what_a_refused_range_says_of_the_size(value: str, size: int | None) -> None:
    assert parse_unsatisfied_range(value) == size


@given(st.none() | st.text())
def test_any_refused_range_is_a_size_or_none(value: str | None) -> None:
    size = parse_unsatisfied_range(value)
    assert size is None or size >= 0


def test_versions() -> None:
    assert version_tag({"etag": 'W/"a"', "last-modified": "x"}) == '"a"'
    assert version_tag({"last-modified": "Sun, 09 Sep 2001 01:46:40 GMT"}) == "Sun, 09 Sep 2001 01:46:40 GMT"
    assert version_tag({}) == ""
