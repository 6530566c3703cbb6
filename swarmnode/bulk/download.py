"""A model's manifest and its backbone file from a peer, verified.

The backbone file grows as NAME.part beside its place, which a later call goes on with, and appears there only when its
SHA-256 is the manifest's. Callers: whoever makes a node of a swarm's model.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from swarmnode.bulk.frames import AskBackbone, AskManifest, BackboneFollows, ManifestFollows
from swarmnode.bulk.reply import ask, patience
from swarmnode.errors import BadBulkFrame, ModelError, SourceFailed
from swarmnode.model.atomic_file import sync_folder
from swarmnode.model.backbone_file import backbone_digest
from swarmnode.model.gguf_file import CHUNK_BYTES
from swarmnode.model.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from transport.connection import Connection

STALL_S = 15.0  # silence that ends a download
PART_SUFFIX = ".part"

Progress = Callable[[int, int], None]


async def fetch_manifest(connection: Connection, model_hash: bytes, name: str = "") -> bytes:
    """The manifest's JSON, which `decode_manifest` reads, with exactly this hash (32 bytes).

    Raises SourceFailed, `corrupt` where the peer sent something else.
    """
    name = name or str(connection.peer)
    async with patience(STALL_S, name) as timeout, ask(connection, AskManifest(model_hash), name) as reply:
        part = await reply.part()
        if not isinstance(part, ManifestFollows) or part.size > MAX_MANIFEST_BYTES:
            raise BadBulkFrame(f"{part} where a manifest was asked for")
        data = bytearray()
        while len(data) < part.size:
            data += await reply.some(part.size - len(data))
            timeout.reschedule(asyncio.get_running_loop().time() + STALL_S)
    encoded = bytes(data)
    try:
        manifest = await asyncio.to_thread(decode_manifest, encoded, name)
    except ModelError as error:
        raise SourceFailed(f"the manifest from {error}", corrupt=True) from None
    if manifest.model_hash != model_hash.hex():
        why = f"{name} sent the manifest of model {manifest.model_hash[:16]}… for {model_hash.hex()[:16]}…"
        raise SourceFailed(why, corrupt=True)
    return encoded


async def fetch_backbone(
    connection: Connection, manifest: Manifest, path: Path, progress: Progress | None = None, name: str = ""
) -> None:
    """Make `path` the backbone file of `manifest`, going on with PATH.part. `progress(done, total)` in bytes.

    Raises SourceFailed, `corrupt` where the peer sent another file; ModelError where it cannot be written here, or
    cannot be verified because the manifest does not know its SHA-256. What has come stays, unless it is wrong.
    """
    name = name or str(connection.peer)
    if not manifest.backbone_sha256:
        raise ModelError(f"the backbone file of {manifest.name} cannot be fetched: its manifest has no SHA-256 of it")
    partial = path.with_name(path.name + PART_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        resumed = await _download(connection, manifest, partial, progress, name)
        if resumed and not await asyncio.to_thread(_is_right, partial, manifest):
            # Somebody else's bytes may be the wrong ones, or what a crash of the machine left.
            partial.unlink()
            await _download(connection, manifest, partial, progress, name)
            resumed = False
        if not resumed and not await asyncio.to_thread(_is_right, partial, manifest):
            partial.unlink()
            raise SourceFailed(f"{name} sent a backbone file that is not {manifest.name}'s", corrupt=True)
        await asyncio.to_thread(_put_in_place, partial, path)
    except OSError as error:
        raise ModelError(f"{error.filename or path}: cannot be written ({error.strerror})") from error


async def _download(
    connection: Connection, manifest: Manifest, partial: Path, progress: Progress | None, name: str
) -> bool:
    """Fill `partial`; True where it began with what was there."""
    handle = os.open(partial, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
    try:
        return await _fill(connection, manifest, partial, handle, progress, name)
    finally:
        os.close(handle)


async def _fill(
    connection: Connection, manifest: Manifest, partial: Path, handle: int, progress: Progress | None, name: str
) -> bool:
    begin = os.fstat(handle).st_size
    request = AskBackbone(bytes.fromhex(manifest.model_hash), begin)
    async with patience(STALL_S, name) as timeout, ask(connection, request, name) as reply:
        part = await reply.part()
        if not isinstance(part, BackboneFollows) or part.offset != min(begin, part.end):
            raise BadBulkFrame(f"{part} where a backbone file was asked for from byte {begin}")
        free = shutil.disk_usage(partial.parent).free
        if free < part.end - part.offset:
            raise ModelError(
                f"{partial}: {(part.end - part.offset) / 1e6:,.1f} MB of the backbone file are to be stored, "
                f"{free / 1e6:,.1f} MB are free; make room"
            )
        os.truncate(handle, part.offset)  # a whole file's hole, where it was not put in place
        os.lseek(handle, part.offset, os.SEEK_SET)
        done, waiting = part.offset, bytearray()
        while done < part.end:
            data = await reply.some(min(CHUNK_BYTES, part.end - done))
            timeout.reschedule(asyncio.get_running_loop().time() + STALL_S)
            done += len(data)
            waiting += data
            if len(waiting) >= CHUNK_BYTES or done == part.end:
                await _write(handle, bytes(waiting))
                waiting.clear()
                if progress is not None:
                    progress(done, part.end)
        os.truncate(handle, part.length)
    return part.offset > 0


async def _write(handle: int, data: bytes) -> None:
    """In a thread; cancelled, it still ends first: the handle is closed next, and its number may be another file's."""
    writing = asyncio.ensure_future(asyncio.to_thread(_write_all, handle, data))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _is_right(partial: Path, manifest: Manifest) -> bool:
    try:
        return backbone_digest(partial, manifest) == manifest.backbone_sha256
    except ModelError:  # not even a GGUF file, or cut off
        return False


def _put_in_place(partial: Path, path: Path) -> None:
    with partial.open("r+b", buffering=0) as file:
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)
