"""asyncio streams as carriers: TLS 1.3 over TCP, and aioquic's own asyncio layer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from swarmnode.bench.carriers.base import CHUNK, HOST, Answers, Place, Session


class StreamsSession:
    """asyncio's StreamReader and StreamWriter."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, request: bytes, size: int) -> None:
        """See Session."""
        self._writer.write(request)
        await self._reader.readexactly(size)

    async def push(self, data: bytes) -> None:
        """See Session."""
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> None:
        """See Session."""
        await self._reader.readexactly(1)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    answers = Answers(writer.write)
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            answers.received(data)
            await writer.drain()
    writer.close()


def _certificate(place: Place, name: str) -> tuple[Path, Path]:
    """Certificate and key as files, which ssl wants."""
    certificate = place.folder / f"{name}.cert.pem"
    certificate.write_bytes(place.identity(name).certificate_pem)
    return certificate, place.key_file(name)


class Tls:
    """TLS 1.3 over TCP."""

    name = "tcp-tls"
    note = "TLS 1.3 over TCP, asyncio streams"
    quick = True
    bulk_megabytes = 200
    missing = ""

    async def serve(self, place: Place) -> AsyncIterator[str]:
        """See Carrier."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(*_certificate(place, self.name))
        server = await asyncio.start_server(_serve, HOST, 0, ssl=context, limit=4 * CHUNK)
        yield str(server.sockets[0].getsockname()[1])
        server.close()

    @contextlib.asynccontextmanager
    async def connect(self, place: Place, where: str) -> AsyncIterator[Session]:
        """See Carrier."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(HOST, int(where), ssl=context, limit=4 * CHUNK)
        yield StreamsSession(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


class StockAioquic:
    """aioquic.asyncio."""

    name = "aioquic-stock"
    note = "aioquic.asyncio as it comes"
    quick = False
    bulk_megabytes = 8
    missing = ""

    async def serve(self, place: Place) -> AsyncIterator[str]:
        """See Carrier."""
        from aioquic.asyncio import serve  # noqa: PLC0415 - only this server needs it
        from aioquic.quic.configuration import QuicConfiguration  # noqa: PLC0415

        configuration = QuicConfiguration(is_client=False, alpn_protocols=["bench"])
        configuration.load_cert_chain(*_certificate(place, self.name))
        tasks: set[asyncio.Future[None]] = set()

        def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(_serve(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await serve(HOST, 0, configuration=configuration, stream_handler=handle)
        yield str(server._transport.get_extra_info("sockname")[1])
        server.close()

    @contextlib.asynccontextmanager
    async def connect(self, place: Place, where: str) -> AsyncIterator[Session]:
        """See Carrier."""
        from aioquic.asyncio import connect  # noqa: PLC0415
        from aioquic.quic.configuration import QuicConfiguration  # noqa: PLC0415

        configuration = QuicConfiguration(alpn_protocols=["bench"], verify_mode=ssl.CERT_NONE)
        async with connect(HOST, int(where), configuration=configuration) as client:
            yield StreamsSession(*await client.create_stream())
