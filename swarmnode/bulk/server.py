"""Answers the requests of a bulk connection: manifest, backbone file, experts, holdings, in pieces.

A shell over `frames.py`; loop thread only, files are read in threads. It yields: after every 64 KiB everything else on
the loop has its turn, and sleeps as long as `pause` says, which is how answers to calls go before slices. A few
requests per connection and in all are served at a time; the others wait a moment and are then told BUSY. A peer that
does not read what it asked for, or asks and never ends its question, is cut off. Owned by whoever accepts connections;
the same connection may be used by a `source.PeerSource` for the other direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from swarmnode.bulk.frames import (
    HEAD,
    VERSION,
    Absent,
    Answer,
    AskBackbone,
    AskExperts,
    AskHoldings,
    AskManifest,
    BackboneFollows,
    ExpertFollows,
    FailCode,
    Failed,
    Head,
    HoldingsFollow,
    ManifestFollows,
    Request,
    decode_request,
    encode_holdings,
)
from swarmnode.bulk.provider import SliceProvider
from swarmnode.errors import BadBulkFrame, ModelError
from swarmnode.model.backbone_file import written_bytes
from swarmnode.model.gguf_file import CHUNK_BYTES, GgufFile
from swarmnode.model.slicing import Buffer
from transport.connection import Connection
from transport.errors import IncompleteRead, TransportError
from transport.stream import Stream

PIECE = 64 * 1024
MAX_REQUESTS = 4  # at a time from one connection: enough to fill any link, each holds one chunk of CHUNK_BYTES
MAX_REQUESTS_IN_ALL = 32
REQUEST_S = 10.0  # for a question to be complete
BUSY_S = 3.0  # what a question waits for its turn: less than what an asker takes for silence
STALL_S = 30.0  # a piece that cannot be sent for this long: the peer does not read
MAX_BACKBONES = 64  # whose extents are remembered
BROKEN_OFF = 1  # the code a stream is reset with when its data cannot be completed

Find = Callable[[bytes], SliceProvider | None]
log = logging.getLogger(__name__)


class BulkServer:
    """See the module. `find(model hash, 32 bytes)` says what there is to give; `pause()` is seconds per piece.

    Figures: `bytes_sent` (of slices and files, as handed to the transport), `requests`, `refused`.
    """

    def __init__(
        self,
        find: Find,
        pause: Callable[[], float] = lambda: 0.0,
        *,
        max_requests: int = MAX_REQUESTS,
        max_in_all: int = MAX_REQUESTS_IN_ALL,
        busy_s: float = BUSY_S,
        stall_s: float = STALL_S,
    ) -> None:
        self.bytes_sent = self.requests = self.refused = 0
        self._find, self._pause = find, pause
        self._max_requests = max_requests
        self._busy_s, self._stall_s = busy_s, stall_s
        self._all = asyncio.Semaphore(max_in_all)
        self._extents: dict[tuple[Path, int, int], tuple[int, int]] = {}

    async def serve(self, connection: Connection) -> None:
        """Answer until the connection ends; cancelled, everything that it does ends too."""
        own = asyncio.Semaphore(self._max_requests)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await own.acquire()  # what is not accepted waits in the transport, which bounds it
                try:
                    stream = await connection.accept_stream()
                except TransportError:
                    return
                tasks.create_task(self._serve_stream(connection, stream)).add_done_callback(lambda _: own.release())

    async def _serve_stream(self, connection: Connection, stream: Stream) -> None:
        """Never raises but CancelledError: others go on."""
        done = False
        try:
            try:
                await self._answer(stream)
            except (BadBulkFrame, ModelError) as error:
                await self._refuse(stream, FailCode.BAD_REQUEST, str(error))
            async with asyncio.timeout(self._stall_s):
                await stream.finish()
            done = True
        except (TransportError, TimeoutError, _CutShort) as error:
            log.info("bulk_request_ended peer=%s why=%r", connection.peer.short, str(error) or "it does not read")
        except Exception:
            log.exception("bulk_request_failed peer=%s", connection.peer.short)
        finally:
            if not (done and stream.receive_ended):  # a side that has finished stays finished
                with contextlib.suppress(TransportError):
                    stream.reset(BROKEN_OFF)

    async def _answer(self, stream: Stream) -> None:
        async with asyncio.timeout(REQUEST_S):
            try:
                head = Head.decode(await stream.readexactly(HEAD.size))
                fields = await stream.readexactly(head.n_fields)
            except IncompleteRead as error:
                raise BadBulkFrame(f"a request ends after {len(error.partial)} of {error.expected} bytes") from None
        self.requests += 1
        if head.version != VERSION:
            why = f"bulk protocol version {head.version} there, {VERSION} here; run the same version on both"
            await self._refuse(stream, FailCode.OTHER_VERSION, why)
            return
        request = decode_request(head, fields)
        provider = self._find(request.model_hash)
        if provider is None:
            await self._refuse(stream, FailCode.UNKNOWN_MODEL, f"model {request.model_hash.hex()[:16]}… is not here")
            return
        try:
            async with asyncio.timeout(self._busy_s):
                await self._all.acquire()
        except TimeoutError:
            await self._refuse(stream, FailCode.BUSY, "too many requests are being served; ask again later")
            return
        try:
            await self._serve_request(stream, request, provider)
        finally:
            self._all.release()

    async def _serve_request(self, stream: Stream, request: Request, provider: SliceProvider) -> None:
        match request:
            case AskManifest():
                data = await asyncio.to_thread(provider.manifest_bytes)
                await self._write(stream, ManifestFollows(len(data)).encode())
                await self._send(stream, data)
            case AskHoldings():
                sizes = [site.n_expert for site in provider.manifest.sites]
                data = encode_holdings(provider.holdings(), sizes)
                await self._write(stream, HoldingsFollow(len(data)).encode())
                await self._send(stream, data)
            case AskExperts():
                await self._send_experts(stream, request, provider)
            case AskBackbone():
                await self._send_backbone(stream, request, provider)

    async def _send_experts(self, stream: Stream, request: AskExperts, provider: SliceProvider) -> None:
        size = provider.manifest.expert_bytes(request.site)
        for expert in request.experts:
            try:
                pieces, first = await asyncio.to_thread(_begin, provider, request.site, expert)
            except ModelError as error:
                log.debug("bulk_absent site=%d expert=%d why=%r", request.site, expert, str(error))
                await self._write(stream, Absent(expert).encode())
                continue
            await self._write(stream, ExpertFollows(expert, size).encode())
            await self._send_pieces(stream, first, pieces, size)

    async def _send_backbone(self, stream: Stream, request: AskBackbone, provider: SliceProvider) -> None:
        path = provider.backbone
        if path is None:
            await self._refuse(
                stream, FailCode.NO_BACKBONE, f"the backbone file of {provider.manifest.name} is not here"
            )
            return
        try:
            end, length = await asyncio.to_thread(self._extent, path, provider)
        except (OSError, ModelError) as error:
            log.warning("bulk_backbone_unreadable path=%s why=%r", path, str(error))
            await self._refuse(stream, FailCode.NO_BACKBONE, "the backbone file here cannot be read")
            return
        offset = min(request.offset, end)
        pieces = _read_file(path, offset, end - offset)
        first = await asyncio.to_thread(_next, pieces)
        await self._write(stream, BackboneFollows(offset, end, length).encode())
        await self._send_pieces(stream, first, pieces, end - offset)

    def _extent(self, path: Path, provider: SliceProvider) -> tuple[int, int]:
        """How much of a backbone file is data, and its length."""
        stat = path.stat()
        key = (path, stat.st_size, stat.st_mtime_ns)
        if key not in self._extents:
            if len(self._extents) >= MAX_BACKBONES:
                self._extents.clear()
            self._extents[key] = written_bytes(GgufFile.open(path), provider.manifest), stat.st_size
        return self._extents[key]

    async def _send_pieces(self, stream: Stream, first: Buffer | None, pieces: Iterator[Buffer], size: int) -> None:
        """`first` and the rest of `pieces`, `size` bytes in all. Raises _CutShort where they are not."""
        sent, piece = 0, first
        while piece is not None:
            sent += len(piece)
            if sent > size:
                break
            await self._send(stream, piece)
            if sent == size:
                return
            try:
                piece = await asyncio.to_thread(_next, pieces)
            except ModelError as error:
                raise _CutShort(str(error)) from None
        if sent != size:
            raise _CutShort(f"{sent} of {size} bytes could be read")

    async def _send(self, stream: Stream, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), PIECE):
            piece = view[at : at + PIECE]
            await self._write(stream, piece)
            self.bytes_sent += len(piece)
            await asyncio.sleep(max(0.0, self._pause()))

    async def _write(self, stream: Stream, data: Buffer) -> None:
        async with asyncio.timeout(self._stall_s):
            await stream.write(data)

    async def _refuse(self, stream: Stream, code: FailCode, why: str) -> None:
        self.refused += 1
        answer: Answer = Failed(code, why)
        await self._write(stream, answer.encode())


class _CutShort(Exception):
    """The data of a part cannot be completed: its size has been sent already."""


def _begin(provider: SliceProvider, site: int, expert: int) -> tuple[Iterator[Buffer], Buffer | None]:
    pieces = provider.read(site, expert)
    return pieces, next(pieces, None)


def _next(pieces: Iterator[Buffer]) -> Buffer | None:
    return next(pieces, None)


def _read_file(path: Path, offset: int, length: int) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while length and (piece := file.read(min(length, CHUNK_BYTES))):
                length -= len(piece)
                yield piece
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
