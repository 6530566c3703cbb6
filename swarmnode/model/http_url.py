"""Addresses of model files on web servers, and what headers say of ranges. Pure: text in, text out.

Which address a user means, how the other parts of a split model are addressed, which token may go where, what of an
address may be shown or handed on. Everything from a server is hostile: bounded, and None where it makes no sense.
Callers: `http_file.py`, `http_model.py`, `http_source.py`, `manifest.py`, the commands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from pathlib import PurePath
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit

from swarmnode.errors import UsageError

MAX_URL = 2048
MAX_TAG = 256
MAX_SIZE = 1 << 53
TOKEN_VARIABLE = "SWARMNODE_HTTP_TOKEN"  # a name, not a secret
HF_TOKEN_VARIABLE = "HF_TOKEN"
HF_HOSTS = ("huggingface.co", "hf.co")

_URL = re.compile(r"^(https?):[/\\]{1,2}([^/\\].*)\Z", re.IGNORECASE | re.DOTALL)
_CONTENT_RANGE = re.compile(r"^bytes[ =]([0-9]{1,16})-([0-9]{1,16})/([0-9]{1,16})\Z", re.ASCII)
_UNSATISFIED = re.compile(r"^bytes[ =]\*/([0-9]{1,16})\Z", re.ASCII)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def url_of(model: PurePath | str) -> str | None:
    """The address that the user means by `model`; None for a file.

    A path that was made of an address has lost one of its two slashes: it counts as the address.
    Raises UsageError for an address that cannot be used.
    """
    match = _URL.match(str(model))
    if match is None:
        return None
    url = f"{match[1].lower()}://{match[2]}"
    if isinstance(model, PurePath) and "\\" in url:
        url = url.replace("\\", "/")
    parts = _split(url)
    if parts is None or len(url) > MAX_URL or not url.isprintable() or " " in url:
        raise UsageError(f"{url[:200]!r} is no address of a file on a web server")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"a name or password in an address is not used; set {TOKEN_VARIABLE} to a token instead")
    if not file_name(url):
        raise UsageError(f"{shown(url)}: names no file; give the address of a .gguf file")
    return urlunsplit(parts._replace(fragment=""))


def is_public_url(url: str) -> bool:
    """Is it a whole address that may be handed on: http or https, no name, password, query or fragment?"""
    parts = _split(url)
    if parts is None or len(url) > MAX_URL or not url.isprintable() or not url.isascii() or " " in url:
        return False
    return parts.username is None and not parts.query and not parts.fragment and "?" not in url and "@" not in url


def public(url: str) -> str:
    """What of an address others may be told: all of it, or "" where it may carry a secret."""
    parts = _split(url)
    if parts is None:
        return ""
    plain = urlunsplit(parts._replace(path=quote(parts.path, safe="/%:+,;=~!$&'()*-._")))
    return plain if is_public_url(plain) else ""


def shown(url: str) -> str:
    """An address for messages: without its query, which may be a secret, and short."""
    parts = _split(url)
    if parts is None:
        return "".join(c for c in url[:100] if c.isprintable()).partition("?")[0]
    host = parts.netloc.rpartition("@")[2]
    return "".join(c for c in f"{parts.scheme}://{host}{parts.path}" if c.isprintable())[:300]


def file_name(url: str) -> str:
    """The file's name, without folders; "" where there is none."""
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    return "" if set(name) & set("/\\:") or name in (".", "..") or not name.isprintable() else name[:255]


def sibling(url: str, name: str) -> str:
    """The address of the file `name` beside the one at `url`."""
    parts = urlsplit(url)
    folder = parts.path.rpartition("/")[0]
    return urlunsplit(parts._replace(path=f"{folder}/{quote(name)}"))


def redirected(url: str, location: str | None) -> str | None:
    """Where a redirect from `url` leads; None where it may not: no address, or from https to http."""
    if not location or len(location) > 4 * MAX_URL or not location.isprintable():  # signed addresses are long
        return None
    try:
        target = urljoin(url, location)
    except ValueError:
        return None
    parts = _split(target)
    if parts is None or (urlsplit(url).scheme == "https" and parts.scheme != "https"):
        return None
    return urlunsplit(parts._replace(fragment="", netloc=parts.netloc.rpartition("@")[2]))


def token_for(url: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """(token, the variable it is from) for the host of an address that the user named; ("", variable to set) if none.

    SWARMNODE_HTTP_TOKEN goes to any host, HF_TOKEN to Hugging Face's (or HF_ENDPOINT's) alone. No token is sent
    unencrypted, except within this machine.
    """
    parts = _split(url)
    if parts is None:
        return "", TOKEN_VARIABLE
    host = (parts.hostname or "").lower()
    hf_hosts = {*HF_HOSTS, (urlsplit(environment.get("HF_ENDPOINT", "")).hostname or "huggingface.co").lower()}
    names = (TOKEN_VARIABLE, HF_TOKEN_VARIABLE) if host in hf_hosts else (TOKEN_VARIABLE,)
    if may_carry_token(url):
        for name in names:
            token = environment.get(name, "").strip()
            if token and token.isascii() and token.isprintable() and " " not in token:
                return token, name
    return "", names[-1]


def may_carry_token(url: str) -> bool:
    """May a token be sent there: encrypted, or within this machine?"""
    parts = _split(url)
    return parts is not None and (parts.scheme == "https" or (parts.hostname or "").lower() in _LOOPBACK)


def same_origin(one: str, other: str) -> bool:
    """Same scheme, host and port: may `other` get what is meant for `one`?"""
    a, b = _split(one), _split(other)
    return a is not None and b is not None and _origin(a) == _origin(b)


def parse_content_range(value: str | None) -> tuple[int, int, int] | None:
    """(start, end exclusive, size of the file) of a Content-Range header; None where it makes no sense."""
    match = _CONTENT_RANGE.match((value or "")[:80].strip())
    if match is None:
        return None
    start, last, size = (int(group) for group in match.groups())
    return (start, last + 1, size) if start <= last < size <= MAX_SIZE else None


def parse_unsatisfied_range(value: str | None) -> int | None:
    """The file's size by the Content-Range of an answer 416; None where it says none."""
    match = _UNSATISFIED.match((value or "")[:80].strip())
    return int(match[1]) if match is not None and int(match[1]) <= MAX_SIZE else None


def version_tag(headers: Mapping[str, str]) -> str:
    """What the server calls this version of the file: its ETag, else Last-Modified, else "".

    A weak tag counts as the strong one: servers weaken it on the way.
    """
    tag = headers.get("etag", "").strip().removeprefix("W/") or headers.get("last-modified", "").strip()
    return "".join(c for c in tag if c.isprintable())[:MAX_TAG]


def retry_after(value: str | None, date: str | None, now: float) -> float | None:
    """Seconds that a Retry-After header asks for, however many; None where it says nothing that makes sense.

    A date counts from the answer's own `date`, since the clocks may differ, else from `now` (Unix time).
    """
    text = (value or "").strip()
    if re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        return float(text)
    until = _http_date(text)
    if until is None:
        return None
    begun = _http_date((date or "").strip())
    return max(0.0, until - (now if begun is None else begun))


def _http_date(text: str) -> float | None:
    """Unix time of a date as HTTP has it (RFC 9110, 5.6.7)."""
    if not text.isascii() or len(text) > 40:
        return None
    try:
        found = parsedate_to_datetime(text)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _split(url: str) -> SplitResult | None:
    if not url.isprintable():
        return None
    try:
        parts = urlsplit(url)
        port_is_good = parts.port is None or parts.port > 0
    except ValueError:
        return None
    return parts if parts.scheme in ("http", "https") and parts.hostname and port_is_good else None


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, (parts.hostname or "").lower(), port
