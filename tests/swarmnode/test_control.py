from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from swarmnode.control import MAX_LINE, ControlServer, Json, Send, request, request_one
from swarmnode.errors import CallFailed, ControlError, NobodyHolds, NoNode, UsageError


class Node:
    """A handler with one operation of each kind."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()

    async def __call__(self, op: str, arguments: Json, send: Send) -> None:
        if op == "echo":
            await send({"event": "echo", **arguments})
        elif op == "fail":
            raise CallFailed("layer 3: no answer")
        elif op == "nobody":
            raise NobodyHolds(3, [5, 4])
        elif op == "bug":
            raise ZeroDivisionError("oh")
        elif op == "forever":
            await send({"event": "tick"})
            self.started.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()


@pytest.fixture
async def node(tmp_path: Path):  # type: ignore[no-untyped-def]  # an async generator fixture
    handler = Node()
    server = ControlServer(tmp_path, handler)
    await server.start()
    yield handler
    await server.close()
    assert not (tmp_path / "control.json").exists()


async def test_answers_and_errors_keep_their_kind(tmp_path: Path, node: Node) -> None:
    assert await request_one(tmp_path, "echo", text="é\n", n=3) == {"event": "echo", "text": "é\n", "n": 3}
    with pytest.raises(CallFailed, match="layer 3: no answer"):
        await request_one(tmp_path, "fail")
    with pytest.raises(ControlError, match="layer 3: nobody reachable holds experts 4, 5"):
        await request_one(tmp_path, "nobody")
    with pytest.raises(ControlError, match="answered nothing"):
        await request_one(tmp_path, "unknown")


async def test_the_announcement_is_private(tmp_path: Path, node: Node) -> None:
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "control.json").stat().st_mode) == 0o600


async def test_a_fault_of_ours_is_told_and_the_node_lives_on(tmp_path: Path, node: Node) -> None:
    with pytest.raises(ControlError, match="internal error: ZeroDivisionError: oh"):
        await request_one(tmp_path, "bug")
    assert (await request_one(tmp_path, "echo"))["event"] == "echo"


async def test_a_wrong_token_gets_nothing(tmp_path: Path, node: Node) -> None:
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
    path = tmp_path / "control.json"
    announced = json.loads(path.read_text())
    for line in (
        b'{"token": "guess", "op": "echo"}\n',
        b'{"op": "echo"}\n',
        b"[]\n",
        b"\xff\xfe\n",
        b"\n",
        b'{"token": 5, "op": "echo"}\n',
        '{"token": "é", "op": "echo"}\n'.encode(),
        b"GET / HTTP/1.1\r\n",
        b"",
        b'{"token": "%s", "op": 7}\n' % announced["token"].encode(),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", announced["port"])
        writer.write(line)
        if not line:
            writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    assert unhandled == []
    assert (await request_one(tmp_path, "echo"))["event"] == "echo"


async def test_a_line_without_end_is_dropped(tmp_path: Path, node: Node) -> None:
    announced = json.loads((tmp_path / "control.json").read_text())
    reader, writer = await asyncio.open_connection("127.0.0.1", announced["port"])
    writer.write(b"x" * (MAX_LINE + 100_000))
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    with pytest.raises(UsageError, match="at most"):
        await request_one(tmp_path, "echo", text="x" * MAX_LINE)


async def test_closing_the_connection_cancels_the_work(tmp_path: Path, node: Node) -> None:
    events = request(tmp_path, "forever")
    assert (await anext(events))["event"] == "tick"
    await node.started.wait()
    await events.aclose()
    await asyncio.wait_for(node.cancelled.wait(), 5)


async def test_one_node_per_state_folder(tmp_path: Path, node: Node) -> None:
    with pytest.raises(ControlError, match=f"a node runs here already \\(pid {os.getpid()}"):
        await ControlServer(tmp_path, node).start()


@pytest.mark.parametrize("content", [None, "", "{}", '{"port": 1, "token": "x", "pid": 1}', "\x00" * 100])
async def test_no_node(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "control.json").write_text(content)
    with pytest.raises(NoNode, match="start one with swarmnode up"):
        await request_one(tmp_path, "status")
    server = ControlServer(tmp_path, Node())
    await server.start()  # a stale announcement does not keep a new node out
    await server.close()


async def test_a_copied_state_folder_is_not_taken_for_a_running_node(tmp_path: Path) -> None:
    async def handler(op: str, arguments: Json, send: Send) -> None:
        await send({"event": "here"})

    first, copy = tmp_path / "first", tmp_path / "copy"
    one = ControlServer(first, handler)
    await one.start()
    shutil.copytree(first, copy)
    other = ControlServer(copy, handler)
    await other.start()
    with pytest.raises(ControlError, match="a node runs here already"):
        await ControlServer(first, handler).start()
    await other.close()
    await one.close()
