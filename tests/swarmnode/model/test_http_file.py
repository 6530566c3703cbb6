"""Against real servers on this machine: one with every bad habit, and nginx where it is installed."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import logging
import random
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarmnode.errors import Cancelled, DownloadFailed, ModelError, SourceChanged, TruncatedFile, UsageError
from swarmnode.model import http_file, http_pace
from swarmnode.model.http_file import HEAD_BYTES, OPEN_TRIES, TRIES, HttpFile, make_client

from .http_server import Habit, Handler, Site, serve, silent

DATA = random.Random(1).randbytes(300_000)


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with make_client() as client:
        yield client


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as site:
        site.files["/m.gguf"] = DATA
        yield site


Make = Callable[..., HttpFile]


@pytest.fixture
def make(site: Site, client: httpx.Client) -> Make:
    def make(path: str = "/m.gguf", **given: object) -> HttpFile:
        settings = {"back_off_s": 0.001, "environment": {}, **given}
        return HttpFile(site.url + path, client, **settings)  # type: ignore[arg-type]

    return make


def test_ranges(make: Make, site: Site) -> None:
    file = make().open()
    assert file.size == len(DATA)
    assert file.tag
    assert file.read(0, 100) == DATA[:100]  # from what is there already
    assert file.read(123_456, 100_000) == DATA[123_456:223_456]
    assert file.read(len(DATA) - 1, 1) == DATA[-1:]
    assert file.read(5, 0) == b""
    assert len(site.asked) == 3
    assert file.received_bytes == site.sent


def test_a_file_smaller_than_the_first_request(make: Make, site: Site) -> None:
    site.files["/m.gguf"] = b"abc"
    file = make().open()
    assert (file.size, file.head) == (3, b"abc")


def test_what_is_known_is_not_asked_for(make: Make, site: Site) -> None:
    tag = make().open().tag
    site.asked.clear()
    assert make(size=len(DATA), tag=tag).read(1000, 10) == DATA[1000:1010]
    assert [asked[1] for asked in site.asked] == ["bytes=1000-1009"]
    for wrong in ({"size": len(DATA) + 1, "tag": tag}, {"size": len(DATA), "tag": '"other"'}):
        with pytest.raises(SourceChanged, match="not the same file any more"):
            make(**wrong).read(1000, 10)


def test_beyond_the_end(make: Make) -> None:
    with pytest.raises(TruncatedFile, match=r"m.gguf: has 300000 bytes, 300001 are needed"):
        make().read(299_999, 2)


def test_goes_on_where_an_answer_broke_off(make: Make, site: Site) -> None:
    file = make().open()
    site.sent, site.drop_after = 0, [10_000, 50_000, 0, 1]
    assert file.read(0, 250_000) == DATA[:250_000]
    assert site.sent == 250_000
    assert site.asked[-1][1] == "bytes=60001-249999"


def failing(status: int, times: int, **headers: str) -> Habit:
    left = [times]

    def habit(handler: Handler) -> bool:
        left[0] -= 1
        if left[0] >= 0:
            handler.answer(status, b"x", **headers)
        return left[0] >= 0

    return habit


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_passing_trouble_is_waited_out(make: Make, site: Site, status: int) -> None:
    file = make().open()
    site.habit = failing(status, TRIES - 1, Retry_After="0")
    assert file.read(0, 100_000) == DATA[:100_000]


def test_lasting_trouble_is_told(make: Make, site: Site) -> None:
    site.habit = failing(503, 1000)
    with pytest.raises(DownloadFailed, match=r"m.gguf: the server answers 503 Service Unavailable \(3 attempts\)"):
        make().open()
    assert len(site.asked) == OPEN_TRIES


@pytest.mark.parametrize(
    ("wanted", "said"),
    [("100000", "28 hours"), ("61", "61 s"), ("4000", "67 minutes"), ("9" * 18, "9999 days")],
)
def test_a_server_that_wants_too_long_a_wait_is_not_asked_again(make: Make, site: Site, wanted: str, said: str) -> None:
    site.habit = failing(429, 1000, Retry_After=wanted)
    with pytest.raises(DownloadFailed, match=rf"429 Too Many Requests and wants no other request for {said}; try"):
        make().open()
    assert len(site.asked) == 1


def test_a_wait_is_told_once(
    make: Make, site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = make().open()
    assert not caplog.messages
    site.habit = failing(503, 1, Retry_After="0")
    file.read(100_000, 9)
    assert not caplog.messages  # a short one
    monkeypatch.setattr(http_file, "TELL_S", 0.5)
    site.habit = failing(503, 2, Retry_After="1")
    with caplog.at_level(logging.WARNING, logger=http_file.__name__):
        threads = [threading.Thread(target=file.read, args=(100_000, 9)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    (message,) = caplog.messages
    assert message.endswith("/m.gguf: the server answers 503 Service Unavailable; asking again in 1 s")


@pytest.mark.parametrize(
    ("habit", "message"),
    [
        (failing(404, 9), r"no such file on the server \(404 Not Found\)"),
        (failing(401, 9), "401 Unauthorized: set SWARMNODE_HTTP_TOKEN to a token"),
        (failing(403, 9), "403 Forbidden: set SWARMNODE_HTTP_TOKEN to a token"),
        (failing(200, 9), "whole files only"),
        (failing(200, 9, Content_Type="text/html; charset=utf-8"), "a web page, not a GGUF"),
        (failing(206, 9), "in no usable way"),
        (failing(206, 9, Content_Range="bytes 0-0/*"), "in no usable way"),
        (failing(206, 9, Content_Range="bytes 0-0/9", Content_Encoding="gzip"), "in no usable way"),
        (failing(206, 9, Content_Range="bytes 1-1/9"), "sends bytes 1-1 where 0 on were asked"),
        (failing(416, 9), "an empty file"),
        (failing(416, 9, Content_Range="bytes */0"), "an empty file"),
        (failing(416, 9, Content_Range="bytes */77"), r"has 77 bytes of it and refuses to send those from 0 on \(416"),
        (failing(418, 9), "418 I'm a Teapot to a range in no usable way"),
        (failing(777, 9), "answers 777"),
        (failing(302, 9), "redirects to where it may not"),
        (failing(302, 9, Location="ftp://host/x"), "redirects to where it may not"),
        (failing(302, 99, Location="/m.gguf"), "more than 5 redirects"),
    ],
)
def test_useless_answers_are_one_line_each(make: Make, site: Site, habit: Habit, message: str) -> None:
    site.habit = habit
    with pytest.raises(ModelError, match=message) as caught:
        make("/m.gguf?secret=1").open()
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


HEADERS = {
    "Content-Range": ["bytes 0-65535/300000", "bytes 0-9/10", "bytes 5-1/3", "bytes */0", "x" * 9000, "bytes 0-0/1"],
    "Content-Length": ["0", "10", "-1", "99999999999999999999", "x", "65536"],
    "Location": ["/m.gguf", "http://[", "//", "http://127.0.0.1:1/x", "https://nowhere.invalid:99999/", "\xff"],
    "Content-Encoding": ["gzip", "identity", "br"],
    "Transfer-Encoding": ["chunked", "gzip"],
    "Retry-After": ["0", "-1", "99999999999", "soon"],
    "ETag": ["W/", '"' * 1000, ""],
    "Content-Type": ["text/html", "multipart/byteranges; boundary=x"],
}


def test_any_answer_is_a_file_or_one_line(make: Make, site: Site) -> None:
    chance = random.Random(7)

    def habit(handler: Handler) -> bool:
        status = chance.choice([200, 206, 206, 206, 301, 302, 304, 307, 400, 401, 404, 416, 429, 500, 999])
        lines = [f"HTTP/1.1 {status} {chance.choice(['OK', '', 'x' * 500])}"]
        lines += [f"{name}: {chance.choice(values)}" for name, values in HEADERS.items() if chance.random() < 0.4]
        body = chance.randbytes(chance.choice([0, 1, 10, 65536]))
        handler.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        handler.close_connection = True
        return True

    site.habit = habit
    for _ in range(150):
        try:
            file = make(back_off_s=0).open()
        except ModelError as error:
            assert str(error).isprintable()  # noqa: PT017  # either is right
        else:
            assert len(file.head) == min(file.size, HEAD_BYTES)


def test_more_bytes_than_announced(make: Make, site: Site) -> None:
    def habit(handler: Handler) -> bool:
        handler.answer(206, b"x" * 100, Content_Range="bytes 0-9/10")
        return True

    site.habit = habit
    with pytest.raises(DownloadFailed, match="more than it announced"):
        make().open()


def test_another_file_in_its_place(make: Make, site: Site) -> None:
    file = make().open()
    site.files["/m.gguf"] = DATA[::-1]
    with pytest.raises(SourceChanged, match="not the same file any more"):
        file.read(100_000, 10)
    site.files["/m.gguf"] = DATA[:1000]
    with pytest.raises(SourceChanged, match=r"not the same file any more \(1000 bytes now\)"):
        file.read(100_000, 10)


def test_a_refused_range_of_the_same_file(make: Make, site: Site) -> None:
    file = make().open()
    site.habit = failing(416, 9, Content_Range=f"bytes */{len(DATA)}")
    with pytest.raises(DownloadFailed, match="has 300000 bytes of it and refuses to send those from 100000 on"):
        file.read(100_000, 10)


def test_a_date_to_come_back_at_is_waited_for(make: Make, site: Site) -> None:
    at = formatdate(2e9, usegmt=True)
    site.habit = failing(429, 1, Retry_After=at, Date=formatdate(2e9 - 200, usegmt=True))
    with pytest.raises(DownloadFailed, match=r"wants no other request for \d+ (days|minutes)"):
        make().open()


def trickle(n_bytes: int, every_s: float, over: threading.Event) -> Habit:
    """Answers with so many bytes at a time, for as long as anybody listens."""

    def habit(handler: Handler) -> bool:
        start, _, last = handler.headers["Range"].removeprefix("bytes=").partition("-")
        end = min(int(last) + 1, len(DATA))
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(DATA)}")
        handler.send_header("Content-Length", str(end - int(start)))
        handler.send_header("ETag", f'"{hash(DATA):x}"')
        handler.end_headers()
        handler.close_connection = True
        at = int(start)
        with contextlib.suppress(OSError):
            while at < end and not over.wait(every_s):
                handler.wfile.write(DATA[at : min(at + n_bytes, end)])
                at += n_bytes
        return True

    return habit


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set when the test is."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds instead of minutes."""
    monkeypatch.setattr(http_pace, "WINDOW_S", 0.5)
    monkeypatch.setattr(http_pace, "LEAST_BYTES", 1024)
    monkeypatch.setattr(http_file, "TELL_EVERY_S", 0.2)


@pytest.mark.usefixtures("hasty")
def test_what_comes_too_slowly_is_told_and_given_up(
    make: Make, site: Site, over: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    file = make().open()
    site.habit = trickle(20, 0.05, over)
    with (
        caplog.at_level(logging.WARNING, logger=http_file.__name__),
        pytest.raises(DownloadFailed, match=r"m.gguf: comes too slowly to be waited for \(\d+ bytes in \d+ s\); try"),
    ):
        file.read(100_000, 100_000)
    assert re.search(r"m.gguf: is being read: \d+ bytes of 100 kB after \d+ s", caplog.messages[0])
    assert len([message for message in caplog.messages if "is being read" in message]) == 1  # not again at once
    assert len({asked[1] for asked in site.asked}) == 4  # each window ended in a request for the rest


@pytest.mark.usefixtures("hasty")
def test_a_slow_link_is_waited_for(make: Make, site: Site, over: threading.Event) -> None:
    file = make().open()
    site.habit = trickle(2000, 0.05, over)
    assert file.read(100_000, 60_000) == DATA[100_000:160_000]
    assert len(site.asked) == 2


@pytest.mark.usefixtures("hasty")
def test_what_takes_long_is_told_where_nobody_else_shows_it(
    make: Make, site: Site, over: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    file = make().open()
    site.habit = trickle(10_000, 0.05, over)
    with caplog.at_level(logging.WARNING, logger=http_file.__name__):
        file.read(100_000, 150_000)
        assert not caplog.messages
        file.tells_all = True
        file.read(100_000, 150_000)
    assert re.search(r"m.gguf: is being read: \d+ kB of 150 kB after \d+ s", caplog.messages[0])


@pytest.mark.parametrize("n_bytes", [1, 100])
def test_next_to_nothing_per_answer_is_not_gone_on_with(make: Make, site: Site, n_bytes: int) -> None:
    file = make().open()

    def habit(handler: Handler) -> bool:
        start = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
        said = f"bytes {start}-{start + n_bytes - 1}/{len(DATA)}"
        handler.answer(206, DATA[start : start + n_bytes], Content_Range=said, ETag=file.tag)
        return True

    site.habit = habit
    site.asked.clear()
    with pytest.raises(DownloadFailed, match=rf"m.gguf: an answer of {n_bytes} bytes \(6 attempts\)"):
        file.read(100_000, 100_000)
    assert len(site.asked) == TRIES


def test_a_server_that_stalls_after_a_few_bytes(
    make: Make, site: Site, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_file, "READ_S", 0.2)

    def stall(handler: Handler) -> bool:
        start = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-199999/{len(DATA)}")
        handler.send_header("ETag", file.tag)
        handler.send_header("Content-Length", str(200_000 - start))
        handler.end_headers()
        handler.wfile.write(DATA[start : start + 100])
        handler.close_connection = True
        over.wait(30)
        return True

    file = make().open()
    site.habit = stall
    with pytest.raises(DownloadFailed, match=r"does not answer in time \(6 attempts\)"):
        file.read(100_000, 100_000)


def test_a_chunk_whose_header_never_ends(
    make: Make, site: Site, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_file, "PIECE_S", 0.2)

    def habit(handler: Handler) -> bool:
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-65535/{len(DATA)}")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"100;")
        handler.close_connection = True
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                handler.wfile.write(b"x")
        return True

    site.habit = habit
    with pytest.raises(DownloadFailed, match=r"does not answer in time \(3 attempts\)"):
        make().open()


def test_headers_have_a_deadline(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_file, "HEADERS_S", 0.3)
    with silent(b"HTTP/1.1 206 Partial Content\r\n", b"X: y\r\n") as server:
        file = HttpFile(f"http://{server.address}/m.gguf", client, back_off_s=0.001, environment={})
        with pytest.raises(DownloadFailed, match=r"127.0.0.1 does not answer in time \(3 attempts\)"):
            file.open()


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 206 Partial Content\r\n"])
def test_stop_ends_what_waits_for_headers(client: httpx.Client, scheme: str, said: bytes) -> None:
    with silent(said if scheme == "http" else b"", b"X: y\r\n") as server:  # https: in the handshake
        file = HttpFile(f"{scheme}://{server.address}/m.gguf", client, environment={})
        assert ended_by_stop(file, server.heard) < http_file.CONNECT_S / 2


def test_stop_ends_what_waits_on_a_connection_that_was_used_before(
    make: Make, site: Site, over: threading.Event
) -> None:
    hanging = threading.Event()

    def habit(handler: Handler) -> bool:
        hanging.set()
        over.wait(60)
        return False

    file = make().open()
    site.habit = habit
    assert ended_by_stop(file, hanging, 100_000) < http_file.READ_S / 2


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_stop_ends_what_waits_for_a_proxy(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    with silent() as server:
        monkeypatch.setenv(f"{scheme}_proxy", f"http://{server.address}")
        with make_client() as client:
            file = HttpFile(f"{scheme}://nowhere.invalid/m.gguf", client, environment={})
            assert ended_by_stop(file, server.heard) < http_file.CONNECT_S / 2


def test_stop_ends_a_connection_that_is_not_made(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    connecting, over = threading.Event(), threading.Event()

    def connect(*_: object, **__: object) -> socket.socket:
        connecting.set()
        over.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(socket, "create_connection", connect)
    try:
        file = HttpFile("http://127.0.0.1:9/m.gguf", client, environment={})
        assert ended_by_stop(file, connecting) < http_file.CONNECT_S / 2
    finally:
        over.set()


def ended_by_stop(file: HttpFile, hanging: threading.Event, offset: int = 0) -> float:
    """Seconds from `stop` until a read that hangs has ended, in Cancelled."""
    caught: list[BaseException] = []

    def read() -> None:
        try:
            file.read(offset, 10)
        except (Cancelled, ModelError) as error:
            caught.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert hanging.wait(30)
    began = time.monotonic()
    file.stop()
    thread.join(60)
    took = time.monotonic() - began
    assert [type(error) for error in caught] == [Cancelled]
    return took


def test_a_token_stays_with_the_host_that_was_named(site: Site, client: httpx.Client) -> None:
    with serve() as cdn:
        cdn.files["/far"] = DATA
        site.token = "t0k3n"
        site.redirects["/moved"] = cdn.url + "/far"
        site.redirects["/here"] = "/m.gguf"
        environment = {"SWARMNODE_HTTP_TOKEN": "t0k3n"}
        assert HttpFile(site.url + "/here", client, environment=environment).read(0, 9) == DATA[:9]
        assert [asked[2] for asked in site.asked] == ["Bearer t0k3n"] * 2
        assert HttpFile(site.url + "/moved", client, environment=environment).read(0, 9) == DATA[:9]
        assert [asked[2] for asked in cdn.asked] == [None]
        with pytest.raises(DownloadFailed, match="only the node where somebody named this address has a token"):
            HttpFile(site.url + "/m.gguf", client, environment=environment, named=False).open()
        with pytest.raises(DownloadFailed, match="the token in SWARMNODE_HTTP_TOKEN may not read it"):
            HttpFile(site.url + "/m.gguf", client, environment={"SWARMNODE_HTTP_TOKEN": "other"}).open()


def test_a_redirect_is_kept_until_it_expires(make: Make, site: Site) -> None:
    site.files["/signed-1"] = site.files["/signed-2"] = DATA
    site.redirects["/moved"] = "/signed-1"
    file = make("/moved").open()
    assert file.read(70_000, 9) == DATA[70_000:70_009]
    assert [asked[0] for asked in site.asked] == ["/moved", "/signed-1", "/signed-1"]
    del site.files["/signed-1"]
    site.redirects["/moved"] = "/signed-2"
    assert file.read(80_000, 9) == DATA[80_000:80_009]
    assert [asked[0] for asked in site.asked[3:]] == ["/signed-1", "/moved", "/signed-2"]


def certificate(folder: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """A self-signed certificate for `name`, and a server's context with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(name))]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(cert.public_bytes(serialization.Encoding.PEM) + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return path, context


def test_tls(tmp_path: Path, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    path, context = certificate(tmp_path, "127.0.0.1")
    with serve(context) as site:
        site.files["/m.gguf"] = DATA
        with pytest.raises(DownloadFailed, match=r"TLS: 127.0.0.1's certificate: self-signed certificate"):
            HttpFile(site.url + "/m.gguf", client).open()
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        with make_client() as trusting:
            assert HttpFile(site.url + "/m.gguf", trusting).read(9, 9) == DATA[9:18]
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "absent.pem"))
    with pytest.raises(UsageError, match="proxy or certificates cannot be used"):
        make_client()


def test_tls_with_a_server_that_has_none(site: Site, client: httpx.Client) -> None:
    with pytest.raises(DownloadFailed, match=r"TLS with 127.0.0.1 failed"):
        HttpFile(site.url.replace("http:", "https:") + "/m.gguf", client).open()


def test_no_server(client: httpx.Client) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/m.gguf"
        with pytest.raises(DownloadFailed, match=r"the connection to 127.0.0.1 failed: .*\(3 attempts\)"):
            HttpFile(url, client, back_off_s=0.001).open()


def test_no_such_host(client: httpx.Client) -> None:
    with pytest.raises(DownloadFailed, match="DNS"):
        HttpFile("http://nowhere.invalid/m.gguf", client, back_off_s=0.001).open()


def test_an_unusable_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "nonsense://x")
    with pytest.raises(UsageError, match="proxy or certificates cannot be used"):
        make_client()


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx(tmp_path: Path, client: httpx.Client) -> None:
    (tmp_path / "m.gguf").write_bytes(DATA)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr; events {{}}"
        f"http {{ access_log off; client_body_temp_path {tmp_path}/b; proxy_temp_path {tmp_path}/p;"
        f"fastcgi_temp_path {tmp_path}/f; uwsgi_temp_path {tmp_path}/u; scgi_temp_path {tmp_path}/s;"
        f"server {{ listen 127.0.0.1:{port}; root {tmp_path};"
        f"location = /moved {{ return 307 /m.gguf; }}"
        f"location = /whole {{ max_ranges 0; alias {tmp_path}/m.gguf; }} }} }}"
    )
    command = ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            file = HttpFile(url + "/moved", client)
            for _ in range(20):
                try:
                    file.open()
                    break
                except DownloadFailed:  # not listening yet
                    assert process.poll() is None
            assert file.size == len(DATA)
            assert file.read(123_456, 100_000) == DATA[123_456:223_456]
            with pytest.raises(DownloadFailed, match="whole files only"):
                HttpFile(url + "/whole", client).open()
            with pytest.raises(DownloadFailed, match="no such file"):
                HttpFile(url + "/absent", client).open()
        finally:
            process.terminate()
