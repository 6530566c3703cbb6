"""The local control channel: commands of this machine's user talk to a running node. JSON lines over loopback TCP.

    node     binds 127.0.0.1:0 and writes {port, token, pid} to STATE/control.json (0600)
    client   connects, sends one line {"token": …, "op": …, …}
    node     answers lines {"event": …} until "done" or "error"

Loopback TCP with a token in a private file works alike on every system. Only who may read the user's files gets in.
Closing the connection cancels what it asked for. Not for other machines, and not the HTTP gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

import swarmnode.errors
from swarmnode.errors import ControlError, NodeSilent, NoNode, SwarmnodeError, UsageError

MAX_LINE = 4 << 20  # bytes: a long prompt in JSON
_NAME = "control.json"
_CONNECT_TIMEOUT = 5.0
ANSWER_S = 5.0  # a node answers what it knows within milliseconds, a busy one within a second

Json = dict[str, Any]  # a decoded JSON object; its fields are validated where they are used
Send = Callable[[Json], Awaitable[None]]
Handler = Callable[[str, Json, Send], Awaitable[None]]


class _Endpoint(msgspec.Struct, frozen=True):
    port: int
    token: str
    pid: int
    folder: str = ""  # whose it is: a copied state folder brings the file along


class ControlServer:
    """Serves one node's control channel; `handler(op, arguments, send)` returns when a request is answered."""

    def __init__(self, state_dir: Path, handler: Handler) -> None:
        self._path = state_dir / _NAME
        self._handler = handler
        self._token = secrets.token_hex(16)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and announce. ControlError when a live node has this state directory already."""
        other = _read_endpoint(self._path)
        own = str(self._path.parent.resolve())
        if other is not None and other.folder in ("", own) and _alive(other):
            raise ControlError(
                f"a node runs here already (pid {other.pid}, {self._path.parent}): stop it or give another --state"
            )
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_LINE)
        port = self._server.sockets[0].getsockname()[1]
        try:
            folder = str(self._path.parent.resolve())
            _write_endpoint(self._path, _Endpoint(port, self._token, os.getpid(), folder))
        except OSError as error:
            self._server.close()
            raise ControlError(f"{self._path}: cannot be written ({error.strerror}); give another --state") from None

    async def close(self) -> None:
        """Stop serving and withdraw the announcement."""
        if self._server is None:
            return
        self._server.close()
        own = _read_endpoint(self._path)
        if own is not None and own.token == self._token:
            self._path.unlink(missing_ok=True)
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(message: Json) -> None:
            writer.write(msgspec.json.encode(message) + b"\n")
            await writer.drain()

        work: asyncio.Task[None] | None = None
        try:
            request = _object(await asyncio.wait_for(reader.readline(), _CONNECT_TIMEOUT))
            token, op = request.pop("token", None), request.pop("op", None)
            if not isinstance(token, str) or not isinstance(op, str):
                return
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return
            work = asyncio.ensure_future(self._handler(op, request, send))
            gone = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not work.done():
                return
            try:
                work.result()
            except SwarmnodeError as error:
                await send({"event": "error", "kind": type(error).__name__, "message": str(error)})
            except Exception as error:  # ours, not the client's: it is told, and the node lives on
                message = f"internal error: {type(error).__name__}: {error}"
                await send({"event": "error", "kind": "ControlError", "message": message})
            else:
                await send({"event": "done"})
        except (OSError, ValueError, TimeoutError, ControlError):
            pass  # a client that broke off or never spoke the protocol
        finally:
            if work is not None and not work.done():
                work.cancel()
            if work is not None:
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await work
            writer.close()


async def request(state_dir: Path, op: str, **arguments: Any) -> AsyncGenerator[Json, None]:
    """Ask the node of `state_dir`; yields its events. NoNode when none runs; the node's own error when it sends one.

    Events may be long in coming. Only where none has come yet and the node turns out to be suspended: NodeSilent.
    """
    endpoint = _read_endpoint(state_dir / _NAME)
    missing = NoNode(f"no node is running in {state_dir}: start one with swarmnode up")
    if endpoint is None:
        raise missing
    try:
        opening = asyncio.open_connection("127.0.0.1", endpoint.port, limit=MAX_LINE)
        reader, writer = await asyncio.wait_for(opening, _CONNECT_TIMEOUT)
    except TimeoutError:  # its queue of connections is full: it takes none
        raise _silent(_CONNECT_TIMEOUT) from None
    except OSError:
        raise missing from None
    try:
        line = msgspec.json.encode({"token": endpoint.token, "op": op, **arguments}) + b"\n"
        if len(line) > MAX_LINE:
            raise UsageError(f"the request has {len(line)} bytes; at most {MAX_LINE}")
        writer.write(line)
        is_first = True
        while True:
            try:
                raw = await (_first_line(reader, endpoint.pid) if is_first else reader.readline())
            except (OSError, ValueError) as error:
                raise ControlError(f"the node's answer broke off: {error}") from None
            if not raw:
                raise ControlError("the node ended before it had answered: see its own output")
            is_first = False
            event = _object(raw)
            if event.get("event") == "done":
                return
            if event.get("event") == "error":
                raise _remote_error(event)
            yield event
    finally:
        writer.close()


async def request_one(state_dir: Path, op: str, *, within: float = ANSWER_S, **arguments: Any) -> Json:
    """The one event that an operation answers with. NodeSilent where it has not come in `within` seconds."""
    try:
        async with asyncio.timeout(within), contextlib.aclosing(request(state_dir, op, **arguments)) as events:
            async for event in events:
                return event
    except TimeoutError:
        raise _silent(within) from None
    raise ControlError(f"the node answered nothing to {op}")


async def _first_line(reader: asyncio.StreamReader, pid: int) -> bytes:
    while True:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await reader.readline()
        except TimeoutError:
            if _is_suspended(pid):
                raise _silent(ANSWER_S) from None


def _silent(seconds: float) -> NodeSilent:
    return NodeSilent(f"the node has not answered for {seconds:.0f} s: is it suspended?")


def _is_suspended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except (psutil.Error, OSError):
        return False


def _object(line: bytes) -> Json:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ControlError(f"a line of the control channel is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ControlError("a line of the control channel is no JSON object")
    return value


def _remote_error(event: Json) -> SwarmnodeError:
    """The node's error as an error of the same kind where a message alone makes one."""
    kind = getattr(swarmnode.errors, str(event.get("kind")), None)
    message = str(event.get("message"))
    if isinstance(kind, type) and issubclass(kind, SwarmnodeError) and kind.__init__ is SwarmnodeError.__init__:
        return kind(message)
    return ControlError(message)


def _write_endpoint(path: Path, endpoint: _Endpoint) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(endpoint))
    os.replace(temporary, path)


def _read_endpoint(path: Path) -> _Endpoint | None:
    try:
        return msgspec.json.decode(path.read_bytes()[:4096], type=_Endpoint)
    except (OSError, msgspec.DecodeError):
        return None


def _alive(endpoint: _Endpoint) -> bool:
    """Does that process live and still listen on its port? A recycled pid does not."""
    try:
        listening = psutil.Process(endpoint.pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(c.laddr and c.laddr.port == endpoint.port and c.status == psutil.CONN_LISTEN for c in listening)
