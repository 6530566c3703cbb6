"""The PyPI package `iroh` as a carrier, its relay off: as it comes, and with its copying in Python replaced.

Its generated binding hands bytes to Rust one Python int at a time, which is most of the time of a large request. To
compare transports and not that loop, a second carrier puts memmove in its place; its rows say so. The package is
pinned (extra `bench`), because the class that is changed is private.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
from collections.abc import AsyncIterator, Iterator
from typing import Any

from swarmnode.bench.carriers.base import CHUNK, HEADER, HOST, REQUESTS, Answers, Place, Session

ALPN = b"swarmnode-bench"


class IrohSession:
    """A bidirectional stream of the package. `Any`: its classes come without types that say something."""

    def __init__(self, stream: Any) -> None:
        self._send, self._receive = stream.send(), stream.recv()

    async def ask(self, request: bytes, size: int) -> None:
        """See Session."""
        await self._send.write_all(request)
        await self._receive.read_exact(size)

    async def push(self, data: bytes) -> None:
        """See Session."""
        await self._send.write_all(data)

    async def answer(self) -> None:
        """See Session."""
        await self._receive.read_exact(1)


class Iroh:
    """The package, with or without its own copy."""

    def __init__(self, *, copy_replaced: bool) -> None:
        self.name = "iroh-py-memmove" if copy_replaced else "iroh-py"
        copy = "its binding's byte-by-byte copy replaced by memmove" if copy_replaced else "as it comes"
        self.note = f"the iroh package, relay off, {copy}"
        self.quick = False
        self.bulk_megabytes = 100 if copy_replaced else 8
        self._copy_replaced = copy_replaced

    @property
    def missing(self) -> str:
        """See Carrier."""
        found = importlib.util.find_spec("iroh") is not None
        return "" if found else "not measured: the package is not installed; pip install 'swarmnode[bench]'"

    async def serve(self, place: Place) -> AsyncIterator[str]:
        """See Carrier."""
        with _copying(replaced=self._copy_replaced):
            endpoint = await _bind()
            port = next(name for name in endpoint.bound_sockets() if name.startswith(HOST)).rpartition(":")[2]
            accepting = asyncio.create_task(_accept(endpoint))
            yield f"{port} {endpoint.id().to_bytes().hex()}"
            accepting.cancel()
            await endpoint.close()

    @contextlib.asynccontextmanager
    async def connect(self, place: Place, where: str) -> AsyncIterator[Session]:
        """See Carrier."""
        iroh: Any = importlib.import_module("iroh")  # optional
        port, key = where.split()
        with _copying(replaced=self._copy_replaced):
            endpoint = await _bind()
            address = iroh.EndpointAddr(iroh.EndpointId.from_bytes(bytes.fromhex(key)), None, [f"{HOST}:{port}"])
            connection = await endpoint.connect(address, ALPN)
            yield IrohSession(await connection.open_bi())
            await endpoint.close()


async def _bind() -> Any:
    iroh: Any = importlib.import_module("iroh")
    iroh_ffi: Any = importlib.import_module("iroh.iroh_ffi")
    loop: Any = asyncio.get_running_loop()  # the package asks for a narrower type than asyncio has
    iroh_ffi.uniffi_set_event_loop(loop)
    return await iroh.Endpoint.bind(
        iroh.EndpointOptions(
            preset=iroh.preset_minimal(), relay_mode=iroh.RelayMode.disabled(), alpns=[ALPN], bind_addr=f"{HOST}:0"
        )
    )


async def _accept(endpoint: Any) -> None:
    async with asyncio.TaskGroup() as tasks:
        while (incoming := await endpoint.accept_next()) is not None:
            tasks.create_task(_serve(incoming))


async def _serve(incoming: Any) -> None:
    with contextlib.suppress(Exception):  # the client has gone
        connection = await (await incoming.accept()).connect()
        stream = await connection.accept_bi()
        send, receive = stream.send(), stream.recv()
        written: list[bytes] = []
        answers = Answers(written.append)
        answers.received(await receive.read_exact(HEADER.size))
        while True:  # each read crosses threads: one for each request is the fewest
            whole = answers.mode == REQUESTS
            answers.received(await (receive.read_exact(answers.size) if whole else receive.read(CHUNK)))
            for answer in written:
                await send.write_all(answer)
            written.clear()


@contextlib.contextmanager
def _copying(*, replaced: bool) -> Iterator[None]:
    """Whether bytes go to Rust by memmove, or as the package does it."""
    from iroh import iroh_ffi  # noqa: PLC0415

    builder: Any = iroh_ffi._UniffiRustBufferBuilder
    own = builder.write

    def write(self: Any, value: bytes) -> None:
        with self._reserve(len(value)):
            ctypes.memmove(ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len, bytes(value), len(value))

    if replaced:
        builder.write = write
    try:
        yield
    finally:
        builder.write = own
