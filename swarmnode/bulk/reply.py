"""One request of the bulk protocol and the reading of its answer; every failure is a SourceFailed with one line.

Loop thread only. Callers: `source.py` and `download.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from swarmnode.bulk.frames import HEAD, Answer, FailCode, Failed, Head, Request, decode_answer
from swarmnode.errors import BadBulkFrame, SourceFailed
from transport.connection import Connection
from transport.errors import IncompleteRead, TransportError
from transport.stream import Stream

NO_MORE = 2  # the code a stream is reset with whose answer is not wanted any more
READ_BYTES = 1 << 20


class Reply:
    """The answer to one request. Made by `ask`."""

    def __init__(self, stream: Stream, name: str, on_bytes: Callable[[int], None]) -> None:
        self._stream, self._name, self._on_bytes = stream, name, on_bytes

    async def part(self) -> Answer:
        """The next part's fields. Raises SourceFailed for FAILED, and for bytes that are no answer."""
        data = await self._stream.readexactly(HEAD.size)
        head = Head.decode(data)
        fields = await self._stream.readexactly(head.n_fields)
        self._on_bytes(HEAD.size + head.n_fields)
        part = decode_answer(head, fields)
        if isinstance(part, Failed):
            busy, absent = part.code is FailCode.BUSY, part.code in (FailCode.UNKNOWN_MODEL, FailCode.NO_BACKBONE)
            raise SourceFailed(f"{self._name} refused: {part.why}", busy=busy, not_held=absent)
        return part

    async def fill(self, view: memoryview) -> None:
        """Exactly as many bytes of data as `view` has."""
        while view:
            data = await self.some(len(view))
            view[: len(data)] = data
            view = view[len(data) :]

    async def some(self, n: int) -> bytes:
        """Between 1 and `n` bytes of data."""
        data = await self._stream.read(min(n, READ_BYTES))
        if not data:
            raise SourceFailed(f"{self._name} ended its answer {n:,} bytes too early")
        self._on_bytes(len(data))
        return data


@contextlib.asynccontextmanager
async def ask(
    connection: Connection, request: Request, name: str, on_bytes: Callable[[int], None] = lambda _: None
) -> AsyncIterator[Reply]:
    """Ask `name` at the other end; the stream is gone after the block, whatever happens in it.

    `on_bytes` hears of everything received. Raises SourceFailed for whatever the other end or the way to it did.
    """
    stream: Stream | None = None
    try:
        stream = await connection.open_stream()
        await stream.write(request.encode())
        await stream.finish()
        yield Reply(stream, name, on_bytes)
    except BadBulkFrame as error:
        raise SourceFailed(f"{name} answered with {error}", corrupt=True) from None
    except IncompleteRead:
        raise SourceFailed(f"{name} ended its answer too early") from None
    except TransportError as error:
        raise SourceFailed(f"{name} was lost: {error}") from None
    finally:
        if stream is not None and not stream.receive_ended:
            with contextlib.suppress(TransportError):
                stream.reset(NO_MORE)


@contextlib.asynccontextmanager
async def patience(seconds: float, name: str) -> AsyncIterator[asyncio.Timeout]:
    """A time-out that is a SourceFailed; whoever hears something reschedules it."""
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield timeout
    except TimeoutError:
        raise SourceFailed(f"{name} sent nothing for {seconds:g} s") from None
