"""One file on a web server, read by ranges: redirects, tokens, retries, and every way in which that can fail.

A shell over httpx; blocking, from any thread. A file is what its caller knows of it, else what the first answer says:
each answer must name the same size and version (ETag, else Last-Modified) or it is refused. A broken answer is taken
up where it stopped.
The address that the user named is asked first and may redirect; where that leads is kept until it fails (signed
addresses expire) and never sees the token. Proxies and certificates are those of the environment, as httpx has them.

A server that asks for time (Retry-After) gets it up to MAX_RETRY_AFTER_S. An attempt that takes TELL_S and leads to
nothing is a warning in the log, which every command has on standard error, and so is a file that comes slowly: nothing
is waited for in silence. Nor for ever: headers have a deadline, bytes a least pace (`http_pace.py`), and an attempt
that brings next to nothing counts as one that brought nothing.

`stop` ends whatever a thread of it is waiting for: `http_network.py`.

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
from swarmnode.model.http_network import Watch, watch_client
from swarmnode.model.http_pace import SLOW_RATE, TELL_EVERY_S, Pace
from swarmnode.model.http_url import (
    may_carry_token,
    parse_content_range,
    parse_unsatisfied_range,
    redirected,
    retry_after,
    same_origin,
    shown,
    token_for,
    version_tag,
)

MAX_REDIRECTS = 5
CONNECT_S, READ_S = 10.0, 20.0  # READ_S twice over after a failure: over TLS bytes come 16 KiB at a time
HEADERS_S = 45.0  # of one answer, with the way there: lookup, connection, TLS, a proxy, redirects
PIECE_S = 60.0  # of an answer: one could consist of a chunk's header
TRIES = 6  # attempts in a row that bring nothing: with the back-off about 15 s
OPEN_TRIES = 3  # of the first contact, where it is more likely the address than the weather
BACK_OFF_S, MAX_BACK_OFF_S = 0.5, 8.0
MAX_RETRY_AFTER_S = 60.0  # that are waited at a server's wish; whoever wants more is not asked again
FORGIVEN_BYTES = 1024  # an attempt that brings so much is no failure
TELL_S = 5.0  # attempts that take longer, with the wait after them, are told
TELL_AGAIN_S = 30.0  # between two lines that say how slow it is
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
        client = httpx.Client(
            timeout=_timeout(READ_S),
            headers={"User-Agent": f"swarmnode/{swarmnode.__version__}", "Accept-Encoding": "identity"},
            limits=httpx.Limits(max_connections=16, max_keepalive_connections=16),
        )
    except (OSError, ValueError, ImportError, httpx.InvalidURL) as error:
        raise UsageError(f"the environment's proxy or certificates cannot be used: {_one_line(error)}") from None
    return watch_client(client)


class HttpFile:
    """See the module. `size` and `tag` are known once it is open. Does not close the client.

    tells_all: whoever reads shows no progress of its own, so all that takes long is told, not only what is slow.
    """

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
        self.tells_all = False
        self._watch = Watch()
        self._lock = threading.Lock()
        self._told_until = self._slow_told_until = 0.0  # one line for all requests that wait at the same time

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
        self._watch.stop()

    def _pieces(self, offset: int, length: int, tries: int, abort: threading.Event | None) -> Iterator[bytes]:
        done = failures = 0
        pace = Pace()
        pace.resume(time.monotonic())
        while done < length:
            before, began, asked_wait = done, time.monotonic(), None
            try:
                with self._answer(offset + done, offset + length, READ_S * (2 if failures else 1)) as (response, end):
                    length = min(length, self.size - offset)  # `open` asks for more than a small file has
                    for piece in self._body(response):
                        self._go_on(abort)
                        if len(piece) > end - offset - done:
                            raise DownloadFailed(f"{self.name}: the server sends more than it announced")
                        done += len(piece)
                        with self._lock:
                            self.received_bytes += len(piece)
                        is_slow = self._count(pace, len(piece))
                        yield piece
                        pace.resume(time.monotonic())
                        if is_slow and done < length:
                            raise _TryAgain("next to nothing came for a minute")
                        self._tell_slow(pace, length)
                if done < length and done - before < FORGIVEN_BYTES:
                    raise _TryAgain(f"an answer of {done - before} bytes" if done > before else "the answer was empty")
                continue
            except _TryAgain as error:
                why, asked_wait, is_free = str(error), error.after_s, error.free
            except httpx.HTTPError as error:
                why, is_free = self._explain(error), False
            except httpx.StreamError as error:
                raise Cancelled(f"{self.name}: {error}") from None
            failures = 1 if done - before >= FORGIVEN_BYTES else failures + (not is_free)
            self._count(pace, 0)
            self._pause(failures, tries, why, asked_wait, abort, began)
            if asked_wait is not None:
                pace.resume(time.monotonic())

    def _body(self, response: httpx.Response) -> Iterator[bytes]:
        pieces = response.iter_raw()
        while True:
            with self._watch.over(PIECE_S):  # not over what is done with a piece
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def _go_on(self, abort: threading.Event | None) -> None:
        if self._watch.is_stopped or (abort is not None and abort.is_set()):
            raise Cancelled(f"{self.name}: given up")

    def _count(self, pace: Pace, n_bytes: int) -> bool:
        """Whether too little came lately. Raises DownloadFailed where that was so too often."""
        is_slow = pace.count(time.monotonic(), n_bytes)
        if pace.is_hopeless:
            came = f"{_size(pace.received)} in {pace.waited_s:.0f} s"
            raise DownloadFailed(f"{self.name}: comes too slowly to be waited for ({came}); try again later")
        return is_slow

    def _tell_slow(self, pace: Pace, length: int) -> None:
        now = time.monotonic()
        with self._lock:
            if pace.waited_s < TELL_EVERY_S or now < self._slow_told_until:
                return
            if not self.tells_all and pace.rate >= SLOW_RATE:
                return
            self._slow_told_until = now + TELL_AGAIN_S
        of = f"{_size(pace.received)} of {_size(length)}"
        log.warning("%s: is being read: %s after %.0f s", self.name, of, pace.waited_s)

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
        self._go_on(abort)
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
        self._watch.wait(delay)

    def _tell(self, why: str, delay: float, took: float) -> None:
        """Say what is waited for, unless all of it is short, or it was said of a wait that lasts still."""
        now = time.monotonic()
        with self._lock:
            if took + delay < TELL_S or now < self._told_until:
                return
            self._told_until = now + delay
        log.warning("%s: %s; asking again in %s", self.name, why, _span(delay))

    @contextlib.contextmanager
    def _answer(self, start: int, end: int, read_s: float) -> Iterator[tuple[httpx.Response, int]]:
        """An answer with bytes from `start`, and where it ends. Checked, body not read yet."""
        kept = self._target
        with self._watch.over(HEADERS_S):
            response, target = self._request(kept or self.url, start, end, read_s)
        try:
            if kept and 400 <= response.status_code < 500 and response.status_code not in (416, *_PASSING):
                self._target = ""  # it may have expired: ask the named address again
                raise _TryAgain(f"the server answers {_status(response)}", free=True)
            stop = self._check(response, start, end)
            self._target = "" if target == self.url else target
            yield response, stop
        finally:
            response.close()

    def _request(self, url: str, start: int, end: int, read_s: float) -> tuple[httpx.Response, str]:
        for _ in range(MAX_REDIRECTS + 1):
            self._go_on(None)
            headers = {"Range": f"bytes={start}-{end - 1}"}
            if self._token and same_origin(url, self.url):
                headers["Authorization"] = f"Bearer {self._token}"
            try:
                request = self._client.build_request("GET", url, headers=headers, timeout=_timeout(read_s))
                response = self._client.send(request, stream=True)
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
            said = response.headers
            raise _TryAgain(why, retry_after(said.get("retry-after"), said.get("date"), time.time()))
        if status in (401, 403):
            raise DownloadFailed(f"{self.name}: the server answers {_status(response)}: {self._advice()}")
        if status in (404, 410):
            raise DownloadFailed(f"{self.name}: no such file on the server ({_status(response)})")
        if status == 416:
            has = parse_unsatisfied_range(response.headers.get("content-range"))
            if self.size >= 0 and has != self.size:
                now = f"shorter than {self.size} bytes" if has is None else f"{has} bytes now"
                raise SourceChanged(f"{self.name}: is not the same file any more ({now}); onboard it again")
            if has:
                raise DownloadFailed(
                    f"{self.name}: the server has {has} bytes of it and refuses to send those from {start} on "
                    f"({_status(response)})"
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


def _timeout(read_s: float) -> httpx.Timeout:
    return httpx.Timeout(read_s, connect=CONNECT_S, pool=4 * READ_S)


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


def _size(n: float) -> str:
    return f"{n:.0f} bytes" if n < 10_000 else f"{n / 1e3:.0f} kB" if n < 10e6 else f"{n / 1e6:.0f} MB"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c for c in text if c.isprintable())[:200]
