"""One file on a web server, read by ranges: redirects, tokens, retries, and every way in which that can fail.

A shell over httpx; blocking, from any thread. A file is what its caller knows of it, else what the first answer says:
each answer must name the same size and version (ETag, else Last-Modified) or it is refused. A broken answer is taken
up where it stopped.
The address that the user named is asked first and may redirect; where that leads is kept until it fails (signed
addresses expire) and never sees the token. Proxies and certificates are those of the environment, as httpx has them.

A server that asks for time (Retry-After) gets it up to MAX_RETRY_AFTER_S. An attempt that takes TELL_S and leads to
nothing is a warning in the log, which every command has on standard error: nothing is waited for in silence.

Callers: `http_model.py` (onboarding), `http_source.py` (experts). What headers mean is `http_url.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus

import httpx

import swarmnode
from swarmnode.errors import Cancelled, DownloadFailed, SourceChanged, TruncatedFile, UsageError
from swarmnode.model.http_url import (
    may_carry_token,
    parse_content_range,
    redirected,
    retry_after,
    same_origin,
    shown,
    token_for,
    version_tag,
)

MAX_REDIRECTS = 5
CONNECT_S, READ_S = 10.0, 20.0
TRIES = 6  # attempts in a row that bring nothing: with the back-off about 15 s
OPEN_TRIES = 3  # of the first contact, where it is more likely the address than the weather
BACK_OFF_S, MAX_BACK_OFF_S = 0.5, 8.0
MAX_RETRY_AFTER_S = 60.0  # that are waited at a server's wish; whoever wants more is not asked again
TELL_S = 5.0  # attempts that take longer, with the wait after them, are told
HEAD_BYTES = 64 * 1024  # what `open` reads: it must ask for something

log = logging.getLogger(__name__)

_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429)  # and 5xx: worth another try


class _TryAgain(Exception):  # not an error yet
    def __init__(self, why: str, after_s: float | None = None, *, free: bool = False) -> None:
        super().__init__(why)
        self.after_s, self.free = after_s, free


def make_client() -> httpx.Client:
    """A client with the environment's proxies and certificates. UsageError where these cannot be used."""
    try:
        return httpx.Client(
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S, pool=4 * READ_S),
            headers={"User-Agent": f"swarmnode/{swarmnode.__version__}", "Accept-Encoding": "identity"},
            limits=httpx.Limits(max_connections=16, max_keepalive_connections=16),
        )
    except (OSError, ValueError, ImportError, httpx.InvalidURL) as error:
        raise UsageError(f"the environment's proxy or certificates cannot be used: {_one_line(error)}") from None


class HttpFile:
    """See the module. `size` and `tag` are known once it is open. Does not close the client."""

    def __init__(
        self,
        url: str,
        client: httpx.Client,
        *,
        size: int = -1,
        tag: str = "",
        named: bool = True,
        environment: Mapping[str, str] = os.environ,
        back_off_s: float = BACK_OFF_S,
    ) -> None:
        """`size` and `tag`, where they are known already: nothing else is read then.

        `named`: the user gave this address, so its host may see the user's token.
        """
        self.url, self.size, self.tag, self.head = url, size, tag, b""
        self._settled = False  # size and tag are what an answer said
        self.received_bytes = 0
        self._client, self._back_off_s = client, back_off_s
        self._token, self._variable = token_for(url, environment) if named else ("", "")
        self._target = ""  # where redirects led last
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._active: set[httpx.Response] = set()
        self._told_until = 0.0  # one line for all requests that wait at the same time

    @property
    def name(self) -> str:
        """The address for messages."""
        return shown(self.url)

    def open(self) -> HttpFile:
        """Learn size and version, and keep the first bytes as `head`. Raises as `stream`."""
        if self.size < 0:
            self.head = b"".join(self._pieces(0, HEAD_BYTES, OPEN_TRIES, None))
        return self

    def read(self, offset: int, length: int) -> bytes:
        """The same as `stream`, whole: for pieces known to be small."""
        if offset + length <= len(self.open().head):
            return self.head[offset : offset + length]
        return b"".join(self.stream(offset, length))

    def stream(self, offset: int, length: int, abort: threading.Event | None = None) -> Iterator[bytes]:
        """`length` bytes from `offset`, as they come; `abort` ends it between two pieces.

        Raises TruncatedFile beyond the file's end, SourceChanged, DownloadFailed, Cancelled after `stop` or `abort`.
        """
        self.open()
        if offset + length > self.size:
            raise TruncatedFile(f"{self.name}: has {self.size} bytes, {offset + length} are needed")
        yield from self._pieces(offset, length, TRIES, abort)

    def stop(self) -> None:
        """End all that is under way, from another thread; nothing can be read any more."""
        self._stop.set()
        with self._lock:
            active = list(self._active)
        for response in active:
            stream = response.extensions.get("network_stream")
            raw = stream.get_extra_info("socket") if stream is not None else None
            with contextlib.suppress(OSError, ValueError):
                if isinstance(raw, socket.socket):
                    raw.shutdown(socket.SHUT_RDWR)

    def _pieces(self, offset: int, length: int, tries: int, abort: threading.Event | None) -> Iterator[bytes]:
        done = failures = 0
        while done < length:
            before, began = done, time.monotonic()
            try:
                with self._answer(offset + done, offset + length) as (response, end):
                    length = min(length, self.size - offset)  # `open` asks for more than a small file has
                    for piece in response.iter_raw():
                        if self._stop.is_set() or (abort is not None and abort.is_set()):
                            raise Cancelled(f"{self.name}: given up")
                        if len(piece) > end - offset - done:
                            raise DownloadFailed(f"{self.name}: the server sends more than it announced")
                        done += len(piece)
                        with self._lock:
                            self.received_bytes += len(piece)
                        yield piece
                if done == before:
                    raise _TryAgain("the answer was empty")
            except _TryAgain as error:
                failures = 1 if done > before else failures + (not error.free)
                self._pause(failures, tries, str(error), error.after_s, abort, began)
            except httpx.HTTPError as error:
                failures = 1 if done > before else failures + 1
                self._pause(failures, tries, self._explain(error), None, abort, began)
            except httpx.StreamError as error:
                raise Cancelled(f"{self.name}: {error}") from None

    def _pause(
        self,
        failures: int,
        tries: int,
        why: str,
        after_s: float | None,
        abort: threading.Event | None,
        began: float,
    ) -> None:
        """Wait before the next attempt. Raises DownloadFailed where there is none left, or it is too far away."""
        if self._stop.is_set() or (abort is not None and abort.is_set()):
            raise Cancelled(f"{self.name}: given up")
        if after_s is not None and after_s > MAX_RETRY_AFTER_S:
            raise DownloadFailed(f"{self.name}: {why} and wants no other request for {_span(after_s)}; try again then")
        if failures >= tries:
            raise DownloadFailed(f"{self.name}: {why} ({tries} attempts); try again later")
        if not failures:
            return
        delay = min(self._back_off_s * 2 ** (failures - 1), MAX_BACK_OFF_S) * random.uniform(0.75, 1.25)
        if after_s is not None and self._back_off_s:
            delay = max(delay, after_s)
        self._tell(why, delay, time.monotonic() - began)
        self._stop.wait(delay)

    def _tell(self, why: str, delay: float, took: float) -> None:
        """Say what is waited for, unless all of it is short, or it was said of a wait that lasts still."""
        now = time.monotonic()
        with self._lock:
            if took + delay < TELL_S or now < self._told_until:
                return
            self._told_until = now + delay
        log.warning("%s: %s; asking again in %s", self.name, why, _span(delay))

    @contextlib.contextmanager
    def _answer(self, start: int, end: int) -> Iterator[tuple[httpx.Response, int]]:
        """An answer with bytes from `start`, and where it ends. Checked, body not read yet."""
        kept = self._target
        response, target = self._request(kept or self.url, start, end)
        with self._lock:
            self._active.add(response)
        try:
            if kept and 400 <= response.status_code < 500 and response.status_code not in (416, *_PASSING):
                self._target = ""  # it may have expired: ask the named address again
                raise _TryAgain(f"the server answers {_status(response)}", free=True)
            stop = self._check(response, start, end)
            self._target = "" if target == self.url else target
            yield response, stop
        finally:
            response.close()
            with self._lock:
                self._active.discard(response)

    def _request(self, url: str, start: int, end: int) -> tuple[httpx.Response, str]:
        for _ in range(MAX_REDIRECTS + 1):
            if self._stop.is_set():
                raise Cancelled(f"{self.name}: given up")
            headers = {"Range": f"bytes={start}-{end - 1}"}
            if self._token and same_origin(url, self.url):
                headers["Authorization"] = f"Bearer {self._token}"
            try:
                response = self._client.send(self._client.build_request("GET", url, headers=headers), stream=True)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
                raise DownloadFailed(f"{shown(url)}: no address that can be asked ({_one_line(error)})") from None
            except RuntimeError as error:  # the client was closed meanwhile
                raise Cancelled(f"{self.name}: {error}") from None
            if response.status_code not in _REDIRECTS:
                return response, url
            response.close()
            target = redirected(url, response.headers.get("location"))
            if target is None:
                raise DownloadFailed(f"{shown(url)}: redirects to where it may not (no address, or without TLS)")
            url = target
        raise DownloadFailed(f"{self.name}: more than {MAX_REDIRECTS} redirects")

    def _check(self, response: httpx.Response, start: int, end: int) -> int:
        """Refuse whatever is not a range of this very file; where the range ends."""
        status = response.status_code
        if status in _PASSING or status >= 500:
            why = f"the server answers {_status(response)}"
            raise _TryAgain(why, retry_after(response.headers.get("retry-after")))
        if status in (401, 403):
            raise DownloadFailed(f"{self.name}: the server answers {_status(response)}: {self._advice()}")
        if status in (404, 410):
            raise DownloadFailed(f"{self.name}: no such file on the server ({_status(response)})")
        if status == 416:
            if self.size >= 0:
                raise SourceChanged(
                    f"{self.name}: is not the same file any more (shorter than {self.size} bytes); onboard it again"
                )
            raise TruncatedFile(f"{self.name}: an empty file")
        kind = response.headers.get("content-type", "").lower()
        if status in (200, 206) and kind.startswith(("text/html", "application/xhtml")):
            hint = " (on Hugging Face …/resolve/…, not …/blob/…)" if "/blob/" in self.url else ""
            raise DownloadFailed(f"{self.name}: a web page, not a GGUF; give the address of the file itself{hint}")
        if status == 200:
            raise DownloadFailed(
                f"{self.name}: the server sends whole files only (no ranges); download the file and onboard that"
            )
        found = parse_content_range(response.headers.get("content-range"))
        encoding = response.headers.get("content-encoding", "identity")
        if status != 206 or found is None or encoding.lower() != "identity":
            raise DownloadFailed(f"{self.name}: the server answers {_status(response)} to a range in no usable way")
        begin, stop, size = found
        tag = version_tag(response.headers)
        with self._lock:
            if not self._settled:
                self.size, self.tag = size if self.size < 0 else self.size, self.tag or tag
                self._settled = (size, tag) == (self.size, self.tag)
        if (size, tag) != (self.size, self.tag):
            raise SourceChanged(f"{self.name}: is not the same file any more ({size} bytes now); onboard it again")
        if begin != start or stop > end:
            raise DownloadFailed(f"{self.name}: the server sends bytes {begin}-{stop - 1} where {start} on were asked")
        return stop

    def _advice(self) -> str:
        if self._token:
            return f"the token in {self._variable} may not read it"
        if not self._variable:
            return "only the node where somebody named this address has a token for it"
        if not may_carry_token(self.url):
            return "a token is sent with https only"
        return f"set {self._variable} to a token that may read it"

    def _explain(self, error: httpx.HTTPError) -> str:
        """What went wrong on the way. Raises DownloadFailed where another attempt is of no use."""
        cause: BaseException | None = error
        host = error.request.url.host if error._request is not None else self.name
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise DownloadFailed(f"{self.name}: TLS: {host}'s certificate: {cause.verify_message}") from None
            if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
                raise DownloadFailed(f"{self.name}: TLS with {host} failed: {_one_line(cause)}") from None
            if isinstance(cause, socket.gaierror):
                if cause.errno != socket.EAI_AGAIN:
                    raise DownloadFailed(f"{self.name}: no host {host} is known (DNS: {cause.strerror})") from None
                return f"the name of {host} cannot be looked up now (DNS: {cause.strerror})"
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, httpx.TimeoutException):
            return f"{host} does not answer in time"
        return f"the connection to {host} failed: {_one_line(error)}"


def _status(response: httpx.Response) -> str:
    with contextlib.suppress(ValueError):
        return f"{response.status_code} {HTTPStatus(response.status_code).phrase}"
    return str(response.status_code)


def _span(seconds: float) -> str:
    """A time to wait, rounded up, for people: 45 s, 28 hours."""
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{min(math.ceil(seconds / length), 9999)} {unit}"
    return f"{math.ceil(seconds)} s"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c for c in text if c.isprintable())[:200]
