"""A worker's slices on disk: fetched once, verified, kept stacked per (site, tensor), mapped to be served.

    FOLDER/lock                     one process at a time
    FOLDER/index.json               which expert lies in which slot (`store_index.py`)
    FOLDER/site-00003-g0-t1.slots   site 3's slices of its tensor number 1 (`slot_files.py`)

Adding an expert appends one slot to each file of its site. The index is replaced only after the slots it
names were verified against the manifest's SHA-256 and flushed: a process killed at any moment leaves a
store that opens with all indexed slots, and at most one batch is fetched again. Every error is a ModelError
with one line.

Not a cache: nothing is dropped by itself. What changes the store takes turns, from whatever threads; `holdings`,
`missing`, `stacked` and `read` may be called meanwhile from any thread and never wait. An expert without a digest in
the manifest (of a model that nobody has hashed yet) is taken as it comes, and kept by its checksums alone: who adds it
answers for where it is from.

Callers: the worker's start, onboarding, `bulk/`, tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from swarmnode.errors import CorruptSlice, ModelError, TruncatedFile
from swarmnode.model.atomic_file import TEMPORARY_SUFFIX, write_atomically
from swarmnode.model.folder_lock import FolderLock
from swarmnode.model.gguf_file import SourceReader
from swarmnode.model.manifest import Manifest, corrupt_expert, tensor_shape
from swarmnode.model.slicing import Buffer, StackedTensor
from swarmnode.model.slot_files import FILE_NAME, flush_file, map_slots, read_slot, slot_file, write_slot
from swarmnode.model.source_places import locate
from swarmnode.model.stamps import Stamps
from swarmnode.model.store_damage import Slot, altered, find_damage, find_shortage
from swarmnode.model.store_index import FORMAT, SiteSlots, StoreIndex, load_index, save_index

# A batch ends, and is flushed and indexed, at whichever comes first: what a crash may cost, against an
# fsync per expert.
BATCH_BYTES = 64 << 20
BATCH_EXPERTS = 256
VERIFIED = "verified.json"  # stamps of the slot files as they were when all of them had been hashed


@dataclass(slots=True)
class _Slots:
    """A site's slots. The first `indexed` of them are in the index on disk."""

    generation: int = 0
    experts: list[int] = field(default_factory=list)
    checks: list[tuple[int, ...]] = field(default_factory=list)
    indexed: int = 0

    @classmethod
    def of(cls, saved: SiteSlots) -> _Slots:
        return cls(saved.generation, list(saved.experts), list(saved.checks), len(saved.experts))


class SliceStore:
    """See the module."""

    def __init__(self, folder: Path | str, manifest: Manifest, *, repair: bool = False) -> None:
        """Open or create; with `repair`, hash everything held and forget what is damaged.

        Raises ModelError (folder in use, not writable, index unreadable), ManifestMismatch (another model's
        store), TruncatedFile (a slot file is shorter than its index says; not with `repair`).
        """
        self.folder = Path(folder)
        self.manifest = manifest
        self._dirty_bytes = self._dirty_experts = 0
        self._turn = threading.RLock()  # held by whatever changes the store
        with self._disk("cannot be opened"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)
        try:
            index = load_index(self.folder, manifest)
            self._sites = {saved.site: _Slots.of(saved) for saved in index.sites}
            self._remove_leftovers()
            if repair:
                self._repair()
            else:
                self._check_lengths()
        except BaseException:
            self._lock.release()
            raise

    def holdings(self) -> dict[int, tuple[int, ...]]:
        """Site -> experts held, ascending."""
        found = {site: tuple(sorted(slots.experts)) for site, slots in sorted(self._sites.items())}
        return {site: experts for site, experts in found.items() if experts}

    def missing(self, wanted: Mapping[int, Iterable[int]]) -> dict[int, list[int]]:
        """Site -> experts of `wanted` that are not held. Raises ModelError for one that does not exist."""
        absent = {}
        for site, experts in sorted(wanted.items()):
            tensors = self.manifest.site_tensors(site)
            slots = self._sites.get(site)
            held = set(slots.experts) if slots is not None else set()
            ids = sorted(set(experts) - held)
            for expert in ids:
                tensor_shape(tensors[0]).span(expert)
            if ids:
                absent[site] = ids
        return absent

    def add(self, site: int, expert: int, slices: Sequence[Buffer]) -> None:
        """Append an expert, its slices in the order of the site's tensors, unless it is held already.

        Raises CorruptSlice, naming tensors, expert and source offsets, for bytes that are not this expert's.
        """
        with self._turn:
            if not self.missing({site: [expert]}):
                return
            tensors = self.manifest.site_tensors(site)
            sizes = [len(memoryview(piece).cast("B")) for piece in slices]
            if sizes != [tensor.stride for tensor in tensors]:
                raise CorruptSlice(
                    f"expert {expert} of site {site} came as {sizes} bytes; "
                    f"{', '.join(f'{t.name} has {t.stride}' for t in tensors)}"
                )
            self._append(site, expert, [[memoryview(piece).cast("B")] for piece in slices], "received bytes")

    def fill_from_source(
        self,
        gguf_paths: Path | Sequence[Path],
        wanted: Mapping[int, Iterable[int]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Copy what is missing of `wanted` from the model's GGUF (all its files or any one of them).

        Reads the bytes of those experts and nothing else (but the headers, where the files are not the
        manifest's own by name and size). `progress(bytes done, bytes in all)`. Interrupted, it goes on
        where it was.
        """
        todo = self.missing(wanted)
        total = sum(self.manifest.expert_bytes(site) * len(experts) for site, experts in todo.items())
        if not total:
            return
        self.require_space(total)
        given = [Path(gguf_paths)] if isinstance(gguf_paths, str | Path) else [Path(path) for path in gguf_paths]
        places = locate(self.manifest, given)
        done = 0
        with SourceReader(places.paths) as reader:
            for site, experts in todo.items():
                tensors = self.manifest.site_tensors(site)
                for expert in experts:
                    slices = [
                        reader.chunks(file, offset + expert * tensor.stride, tensor.stride)
                        for tensor, (file, offset) in ((t, places.tensors[t.name]) for t in tensors)
                    ]
                    with self._turn:
                        if self.missing({site: [expert]}):
                            self._append(site, expert, slices, str(places.paths[places.tensors[tensors[0].name][0]]))
                    done += self.manifest.expert_bytes(site)
                    if progress is not None:
                        progress(done, total)
        self.flush()

    def flush(self) -> None:
        """Make everything added so far survive a crash. Called per batch, after a fill, and by `close`."""
        with self._turn:
            self._flush()

    def _flush(self) -> None:
        changed = {site: slots for site, slots in self._sites.items() if len(slots.experts) > slots.indexed}
        try:
            with self._disk("cannot be written"):
                for site, slots in changed.items():
                    for path in self._files(site, slots):
                        flush_file(path)
            if changed:
                self._save()
        except ModelError:
            # After a failed flush nobody knows what reached the disk: take these experts for absent.
            for slots in changed.values():
                del slots.experts[slots.indexed :], slots.checks[slots.indexed :]
            raise
        finally:
            self._dirty_bytes = self._dirty_experts = 0

    def stacked(self, site: int) -> dict[str, StackedTensor]:
        """Tensor name -> all slices held of a site, in slot order, mapped; empty where none is held.

        What is added later is in the next call's result; earlier results stay valid.
        """
        tensors = self.manifest.site_tensors(site)
        slots = self._sites.get(site)
        if slots is None or not slots.experts:
            return {}
        experts = tuple(slots.experts)
        return {
            tensor.name: StackedTensor(
                tensor.name,
                tensor.ggml_type,
                tensor_shape(tensor).ne,
                tensor.stride,
                experts,
                map_slots(path, len(experts) * tensor.stride),
            )
            for tensor, path in zip(tensors, self._files(site, slots), strict=True)
        }

    def read(self, site: int, expert: int) -> Iterator[bytes]:
        """An expert's slices in the order of the site's tensors, in pieces, read from the files as they are taken.

        Raises ModelError for one that is not held, or was forgotten meanwhile; TruncatedFile.
        """
        tensors = self.manifest.site_tensors(site)
        slots = self._sites.get(site)
        experts = list(slots.experts) if slots is not None else []
        if slots is None or expert not in experts:
            raise ModelError(f"{self.folder}: expert {expert} of site {site} is not held")
        number = experts.index(expert)
        for tensor, path in zip(tensors, self._files(site, slots), strict=True):
            done = 0
            with self._disk("cannot be read"):
                for piece in read_slot(path, tensor.stride, number):
                    done += len(piece)
                    yield piece
            if done != tensor.stride:
                raise TruncatedFile(f"{path}: ends within expert {expert}; repair the store")

    def verify(self) -> None:
        """Hash everything held. Raises TruncatedFile or CorruptSlice, naming the first damage's place."""
        for _, _, error in self._damage():
            raise error

    def verify_changed(self) -> None:
        """The same, unless no slot file has changed since `note_verified`."""
        try:
            noted = msgspec.json.decode((self.folder / VERIFIED).read_bytes(), type=Stamps)
        except (OSError, msgspec.DecodeError):
            noted = None
        if noted is None or noted != self._stamps():
            self.verify()

    def note_verified(self) -> None:
        """Note that everything held now was hashed, when it was written or by `verify`."""
        with self._turn:
            self._flush()
            write_atomically(self.folder / VERIFIED, msgspec.json.encode(self._stamps()))

    def _stamps(self) -> Stamps:
        with self._disk("cannot be read"):
            held = [(site, slots) for site, slots in list(self._sites.items()) if slots.experts]
            return Stamps.of(path for site, slots in held for path in self._files(site, slots))

    def forget(self, site: int, experts: Iterable[int]) -> None:
        """Give up some experts of a site and their disk space; what was mapped before stays valid.

        The kept slots are copied to files of a new generation, then the index changes over: safe at any
        moment.
        """
        with self._turn:
            self._flush()
            old = self._sites.get(site)
            if old is not None and set(experts) & set(old.experts):
                self._forget(site, old, set(experts))

    def _forget(self, site: int, old: _Slots, gone: set[int]) -> None:
        old_files = self._files(site, old)
        strides = [tensor.stride for tensor in self.manifest.site_tensors(site)]
        kept = [slot for slot, expert in enumerate(old.experts) if expert not in gone]
        new = _Slots(old.generation + 1, [old.experts[i] for i in kept], [old.checks[i] for i in kept])
        new_files = [slot_file(self.folder, site, new.generation, n) for n in range(len(strides))]
        with self._disk("cannot be written"):
            for to, slot in enumerate(kept):
                pieces = [read_slot(path, stride, slot) for path, stride in zip(old_files, strides, strict=True)]
                try:
                    _, checks = write_slot(new_files, strides, to, pieces)
                except ValueError as error:
                    raise TruncatedFile(f"{error}; repair the store") from None
                if checks != old.checks[slot]:
                    raise altered(self._slot(site, slot), checks)
            for path in new_files if kept else []:
                flush_file(path)
        self._sites[site] = new
        try:
            self._save()
        except ModelError:
            self._sites[site] = old
            raise
        for path in old_files:
            with contextlib.suppress(OSError):  # Windows keeps a mapped file; the next opening removes it
                path.unlink()

    def close(self) -> None:
        """Flush and let other processes in. Slices that are mapped stay valid. Closing twice is allowed."""
        with self._turn:
            try:
                self._flush()
            finally:
                self._lock.release()

    def __enter__(self) -> SliceStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, site: int, expert: int, slices: Iterable[Iterable[Buffer]], source: str) -> None:
        slots = self._sites.setdefault(site, _Slots())
        files = self._files(site, slots)
        strides = [tensor.stride for tensor in self.manifest.site_tensors(site)]
        try:
            with self._disk("cannot be written"):
                digest, checks = write_slot(files, strides, len(slots.experts), slices)
        except ModelError:
            # On a full disk the index needs the room that half a slot took.
            for path, stride in zip(files, strides, strict=True):
                with contextlib.suppress(OSError):
                    os.truncate(path, len(slots.experts) * stride)
            raise
        if digest != (self.manifest.digests[site][expert] or digest):
            raise corrupt_expert(self.manifest, site, expert, source)
        slots.experts.append(expert)
        slots.checks.append(checks)
        self._dirty_bytes += sum(strides)
        self._dirty_experts += 1
        if self._dirty_bytes >= BATCH_BYTES or self._dirty_experts >= BATCH_EXPERTS:
            self._flush()

    def _save(self) -> None:
        sites = tuple(
            SiteSlots(site, slots.generation, tuple(slots.experts), tuple(slots.checks))
            for site, slots in sorted(self._sites.items())
            if slots.experts or slots.generation
        )
        save_index(self.folder, StoreIndex(FORMAT, self.manifest.model_hash, sites))
        for slots in self._sites.values():
            slots.indexed = len(slots.experts)

    def _files(self, site: int, slots: _Slots) -> list[Path]:
        count = len(self.manifest.sites[site].tensors)
        return [slot_file(self.folder, site, slots.generation, n) for n in range(count)]

    def _slot(self, site: int, number: int) -> Slot:
        slots = self._sites[site]
        tensors = self.manifest.site_tensors(site)
        return Slot(number, slots.experts[number], tensors, self._files(site, slots), slots.checks[number])

    def _check_lengths(self) -> None:
        for site, slots in self._sites.items():
            if slots.experts and find_shortage(self._slot(site, len(slots.experts) - 1)):
                shortages = (find_shortage(self._slot(site, number)) for number in range(len(slots.experts)))
                raise next(error for error in shortages if error is not None)

    def _damage(self) -> Iterator[tuple[int, int, ModelError]]:
        """Every damaged expert, as (site, expert, error)."""
        for site, slots in sorted(self._sites.items()):
            for number, expert in enumerate(slots.experts):
                with self._disk("cannot be read"):
                    error = find_damage(self._slot(site, number), self.manifest.digests[site][expert])
                if error is not None:
                    yield site, expert, error

    def _repair(self) -> None:
        damaged: dict[int, set[int]] = {}
        for site, expert, _ in self._damage():
            damaged.setdefault(site, set()).add(expert)
        for site, experts in damaged.items():
            self.forget(site, experts)

    def _remove_leftovers(self) -> None:
        """Files that a killed process left behind and the index does not name."""
        named = {path.name for site in self._sites for path in self._files(site, self._sites[site])}
        with self._disk("cannot be written"):
            for path in self.folder.iterdir():
                partial = path.name.startswith(".") and path.name.endswith(TEMPORARY_SUFFIX)
                if partial or (FILE_NAME.match(path.name) and path.name not in named):
                    path.unlink()

    def require_space(self, n_bytes: int) -> None:
        """Raise ModelError where the folder's disk has not that much room."""
        with self._disk("cannot be read"):
            free = shutil.disk_usage(self.folder).free
        if free < n_bytes:
            raise ModelError(
                f"{self.folder}: {n_bytes / 1e6:,.1f} MB are to be stored, {free / 1e6:,.1f} MB are free; "
                "make room or hold fewer experts"
            )

    @contextlib.contextmanager
    def _disk(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelError(f"{error.filename or self.folder}: {what} ({error.strerror})") from error
