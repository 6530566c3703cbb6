"""A GGUF model on a web server: its headers and parts, and a reader that fetches ahead.

`FarModel.open` reads headers by range and finds the other parts by name; the GgufFile it makes can be cut like one on
disk. All requests run in a few threads of its own, so that the caller's thread can look for Ctrl-C (`heartbeat`) while
it waits. Memory: WINDOW pieces. Caller: onboarding.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from swarmnode.compute.recipe import Site
from swarmnode.model.digests import Digests, expert_chunks, site_plan
from swarmnode.model.gguf_file import GgufFile, assemble, check_part, part_names
from swarmnode.model.gguf_header import Header, parse_header
from swarmnode.model.http_file import BACK_OFF_S, HttpFile, make_client
from swarmnode.model.http_url import file_name, public, sibling
from swarmnode.model.manifest import SourceFile

PIECE_BYTES = 4 << 20
WINDOW = 4  # pieces on the way at a time: several connections are faster than one over a long way
GAP_BYTES = 4096  # unwanted bytes between two wanted ranges that cost less than a request
HEARTBEAT_S = 0.2

T = TypeVar("T")


class FarModel:
    """A model's files on a server. Owns its threads and connections; `close` ends them."""

    def __init__(
        self, url: str, *, heartbeat: Callable[[], None] = lambda: None, back_off_s: float = BACK_OFF_S
    ) -> None:
        """`url`: of the file or any part. `heartbeat` is called a few times a second while the network is waited for;
        what it raises ends the work."""
        self.url = url
        self._heartbeat, self._back_off_s = heartbeat, back_off_s
        self._client = make_client()
        self._pool = ThreadPoolExecutor(WINDOW, thread_name_prefix="http")
        self._opened: list[HttpFile] = []
        self.files: list[HttpFile] = []  # the parts, in order

    def open(self) -> GgufFile:
        """Read all headers. Raises NotGguf, TruncatedFile, DownloadFailed, ModelError."""
        given = self._file(self.url)
        header = self._header(given)
        names = part_names(file_name(self.url), header, given.name)
        self.files, headers = [], []
        for n, name in enumerate(names):
            same = name == file_name(self.url)
            part = given if same else self._file(sibling(self.url, name))
            other = header if same else self._header(part)
            check_part(other, n, len(names), part.name)
            self.files.append(part)
            headers.append(other)
        paths = [Path(name) for name in names]
        return assemble(paths, headers, [part.size for part in self.files], lambda: FarReader(self))

    def source_files(self) -> tuple[SourceFile, ...]:
        """For the manifest."""
        return tuple(SourceFile(file_name(f.url), f.size, public(f.url), f.tag) for f in self.files)

    @property
    def received_bytes(self) -> int:
        """Bytes of files that came over the network so far."""
        return sum(file.received_bytes for file in self._opened)

    def wait(self, future: Future[T]) -> T:
        """The result, with heartbeats until it is there."""
        while True:
            try:
                return future.result(timeout=HEARTBEAT_S)
            except TimeoutError:
                if future.done():
                    raise
                self._heartbeat()

    def fetch(self, file: int, offset: int, length: int, abort: threading.Event) -> Future[bytes]:
        """Begin to read one piece."""
        stream = self.files[file].stream
        return self._pool.submit(lambda: b"".join(stream(offset, length, abort)))

    def close(self) -> None:
        """End whatever is under way."""
        for file in self._opened:
            file.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def __enter__(self) -> FarModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, url: str) -> HttpFile:
        file = HttpFile(url, self._client, back_off_s=self._back_off_s)
        self._opened.append(file)
        return file

    def _header(self, file: HttpFile) -> Header:
        file.tells_all = True  # nobody shows how far a header is
        try:
            self.wait(self._pool.submit(file.open))
            return parse_header(_Forward(self, self._pool, file), file.size, file.name)
        finally:
            file.tells_all = False


class _Forward:
    """A far file read forward, for the header's parser."""

    def __init__(self, model: FarModel, pool: ThreadPoolExecutor, file: HttpFile) -> None:
        self._model, self._pool, self._file, self._at = model, pool, file, 0

    def read(self, size: int, /) -> bytes:
        at = self._at
        size = min(size, self._file.size - at)
        here = self._file.head[at : at + size]
        rest = size - len(here)
        data = here + (self._model.wait(self._pool.submit(self._file.read, at + len(here), rest)) if rest else b"")
        self._at += len(data)
        return data


class FarReader:
    """See gguf_file.Reader. What was expected is fetched ahead; anything else when it is asked for."""

    def __init__(self, model: FarModel) -> None:
        self._model = model
        self._planned: deque[tuple[int, int, int]] = deque()  # (file, start, end)
        self._coming: deque[tuple[tuple[int, int, int], Future[bytes]]] = deque()
        self._abort = threading.Event()

    def expect(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """See gguf_file.Reader."""
        self._planned.extend(pieces_of(ranges))
        self._fill()

    def chunks(self, file: int, offset: int, length: int) -> Iterator[memoryview]:
        """See gguf_file.Reader. Raises DownloadFailed, SourceChanged."""
        end = offset + length
        while offset < end:
            while self._coming and not self._covers(self._coming[0][0], file, offset):
                if not any(self._covers(piece, file, offset) for piece, _ in self._coming):
                    break
                self._coming.popleft()
            if self._coming and self._covers(self._coming[0][0], file, offset):
                (_, start, stop), future = self._coming[0]
                data = memoryview(self._model.wait(future))[offset - start : min(stop, end) - start]
                if min(stop, end) == stop:
                    self._coming.popleft()
                    self._fill()
            else:
                size = min(end - offset, PIECE_BYTES)
                data = memoryview(self._model.wait(self._model.fetch(file, offset, size, self._abort)))
            offset += len(data)
            yield data

    def close(self) -> None:
        """Give up what is under way."""
        self._abort.set()
        for _, future in self._coming:
            future.cancel()
        self._planned.clear()
        self._coming.clear()

    def __enter__(self) -> FarReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self) -> None:
        while self._planned and len(self._coming) < WINDOW:
            piece = self._planned.popleft()
            self._coming.append((piece, self._model.fetch(piece[0], piece[1], piece[2] - piece[1], self._abort)))

    @staticmethod
    def _covers(piece: tuple[int, int, int], file: int, offset: int) -> bool:
        return piece[0] == file and piece[1] <= offset < piece[2]


def pieces_of(ranges: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """(file, start, end) of what is fetched at once for ranges (file, offset, length) that are read in this order.

    Neighbours are joined, long ones cut.
    """
    joined: list[list[int]] = []
    for file, offset, length in ranges:
        last = joined[-1] if joined else None
        if last is not None and last[0] == file and 0 <= offset - last[2] <= GAP_BYTES:
            last[2] = offset + length
        elif length:
            joined.append([file, offset, offset + length])
    for file, start, end in joined:
        for at in range(start, end, PIECE_BYTES):
            yield file, at, min(at + PIECE_BYTES, end)


def digest_far_experts(
    gguf: GgufFile, sites: Sequence[Site], progress: Callable[[int, int], None] | None = None
) -> Digests:
    """As `digests.digest_experts`, in one pass over each stack from its beginning to its end."""
    plans = [site_plan(gguf, site) for site in sites]
    total = sum(tensor.n_bytes for plan in plans for tensor, _ in plan)
    done, result = 0, []
    with gguf.reader() as reader:
        reader.expect([(t.file, t.offset, shape.stride * shape.n_expert) for plan in plans for t, shape in plan])
        for plan, site in zip(plans, sites, strict=True):
            hashes = [hashlib.sha256() for _ in range(site.n_expert)]
            for tensor, shape in plan:
                for expert, digest in enumerate(hashes):
                    for chunk in expert_chunks(reader, gguf, tensor, shape, expert):
                        digest.update(chunk)
                        done += len(chunk)
                    if progress is not None:
                        progress(done, total)
            result.append(tuple(digest.hexdigest() for digest in hashes))
    return tuple(result)
