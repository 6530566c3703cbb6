"""Makes a model pack out of a GGUF: the sparse backbone file, the manifest, and where the source lies.

    PACK/manifest.json     what workers need to know (model/manifest.py)
    PACK/backbone.gguf     the model without its experts (model/backbone_file.py)
    PACK/source.json       where the GGUF lies (here, or on a web server), and what was verified of it; never shared
    PACK/digests.json      of a model on a web server: digests of the experts read so far (model/recorded_digests.py)
    PACK/verdict.json      what the gate found out about wire types (gate/verdict_file.py)

Composes `model/` and `backbone/`: the recipes come from one traced evaluation of the backbone itself. Called by the
`onboard`, `up` and `demo` commands. Running it twice costs nothing: a pack that fits its source is kept.

A pack is made beside the files of the one that is there (model/staging.py), which stays whole until the new one is: an
onboarding that fails or is interrupted takes nothing away. It is replaced where it was made from the same file or
address, or is of the same model; the pack of another model, and a file that is no pack's, are refused. A verdict is
never removed: it says itself which model it is about.

From a web server only headers and the backbone's own tensors are read: such a pack has no digests of its experts
(see model/manifest.py), unless everything is to be read once (`hash_all`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from swarmnode.backbone.trace import accept_apart, trace_apart, trace_backbone
from swarmnode.compute.recipe import Site
from swarmnode.errors import Cancelled, DownloadFailed, ManifestMismatch, ModelError, SourceChanged, UsageError
from swarmnode.model.atomic_file import write_atomically
from swarmnode.model.backbone_file import backbone_digest, remote_weights, write_backbone
from swarmnode.model.backbone_values import check_values
from swarmnode.model.digests import Digests, digest_experts
from swarmnode.model.folder_lock import FolderLock
from swarmnode.model.gguf_check import check_model
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.gguf_shell import write_shell
from swarmnode.model.http_url import shown, url_of
from swarmnode.model.manifest import (
    Manifest,
    SourceFile,
    build_manifest,
    check_source,
    is_hashed,
    load_manifest,
    save_manifest,
)
from swarmnode.model.staging import replace_together, staging, sweep
from swarmnode.model.stamps import Stamps

Progress = Callable[[str, int, int], None]  # (stage, done, total)

# From here on llama.cpp is asked whether it takes a model before its backbone is copied: that costs half a second.
ASK_BYTES = 64 << 20

_MANIFEST, _BACKBONE, _NOTES, _DIGESTS = "manifest.json", "backbone.gguf", "source.json", "digests.json"


class _Notes(msgspec.Struct, frozen=True):
    """What this machine knows of a pack's files: the source they came from, and the backbone file it wrote."""

    source: Stamps
    backbone: Stamps
    url: str = ""


@dataclass(frozen=True, slots=True)
class ModelPack:
    """A pack on disk.

    `source` is the first part of the original GGUF; None where this machine has it no more, or not as it was.
    `backbone_known` says that the backbone file is still the one that was written here. `url`: the address that the
    user onboarded it from, "" if none; with its query, so not for others. `told_verdict`: where a member that
    generates keeps what its founder says of the model (gate/told_verdict.py), None anywhere else.
    """

    path: Path
    manifest: Manifest
    source: Path | None
    backbone_known: bool = False
    url: str = field(default="", repr=False)
    told_verdict: Path | None = None

    @property
    def backbone(self) -> Path:
        """The sparse backbone file."""
        return self.path / "backbone.gguf"

    @property
    def verdict_file(self) -> Path:
        """What the gate found out; `gate.load_verdict` and `gate.save_verdict` read and write it."""
        return self.path / "verdict.json"

    @classmethod
    def open(cls, path: Path) -> ModelPack:
        """Read a pack; ManifestMismatch or ModelError with what to do."""
        if not (path / "manifest.json").is_file():
            raise ModelError(f"{path}: not a model pack (no manifest.json): make one with swarmnode onboard MODEL.gguf")
        manifest = load_manifest(path / "manifest.json")
        notes = _read_notes(path)
        if notes is None:
            return cls(path, manifest, None)
        there = bool(notes.source.files) and notes.source.unchanged()
        source = Path(notes.source.files[0][0]) if there else None
        own = [str((path / "backbone.gguf").resolve())] == [name for name, _, _ in notes.backbone.files]
        return cls(path, manifest, source, own and notes.backbone.unchanged(), notes.url)

    def verify_backbone(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Hash the backbone file unless it is known; ModelError where it is not what the manifest says."""
        if self.backbone_known or not self.manifest.backbone_sha256:
            return
        if backbone_digest(self.backbone, self.manifest, progress) != self.manifest.backbone_sha256:
            raise ModelError(f"{self.backbone}: does not have the manifest's SHA-256; run swarmnode onboard again")


def check_whole(file: Path) -> None:
    """Raise UsageError for a pack's backbone file, which is a model with a hole in place of its experts."""
    real = file.resolve()
    if real.name == _BACKBONE and (real.parent / _MANIFEST).is_file():
        raise UsageError(f"{file}: a model pack's file, without experts; give the pack ({real.parent}) or the GGUF")


def onboard(
    source: Path | str,
    pack: Path,
    progress: Progress | None = None,
    *,
    hash_all: bool = False,
    back_off_s: float | None = None,
    apart: bool = True,
) -> ModelPack:
    """Make (or keep) the pack of `source` in the folder `pack`. Any part of a split GGUF names the whole.

    `source` may be an http(s) address; an interrupted download is gone on with. `hash_all`: read all of it once, so
    that the pack has every expert's digest (a file's pack always has). `progress` hears of bytes, several times a
    second while the network is waited for; what it raises ends the work. `apart` False: trace a file's graph in this
    process, which llama.cpp may then end.

    A pack that is there stays whole until the new one is complete; see the module for what is replaced, what refused.

    Raises UsageError, NotGguf, TruncatedFile, DenseModel, BrokenModel, UnknownArchitecture, DownloadFailed, ModelError,
    TraceError; a pack appears whole or not at all.
    """
    report = progress or (lambda _stage, _done, _total: None)
    url = url_of(source)
    if url is not None:
        return _onboard_far(url, pack, report, hash_all=hash_all, back_off_s=back_off_s)
    check_whole(Path(source))
    gguf = GgufFile.open(source)
    check_model(gguf)
    sweep(pack)
    kept = _existing(pack, gguf)
    if kept is not None:
        return kept
    before = Stamps.of(gguf.paths)

    def digest(sites: Sequence[Site]) -> Digests:
        return digest_experts(gguf, sites, lambda done, total: report("digests", done, total))

    def check() -> None:
        if not before.unchanged():
            raise ModelError(f"{source}: changed while it was read; run swarmnode onboard again")

    return _make(gguf, pack, report, digest, _Origin(before, check=check, apart=apart))


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a pack's notes and manifest say of its source."""

    stamps: Stamps
    url: str = ""
    files: tuple[SourceFile, ...] = ()
    part: Path | None = None  # where an interrupted backbone file is kept
    check: Callable[[], None] = lambda: None
    apart: bool = True  # trace in another process

    @property
    def key(self) -> str:
        """Where the model comes from."""
        return self.url or self.stamps.files[0][0]


def _make(
    gguf: GgufFile, pack: Path, report: Progress, digest: Callable[[Sequence[Site]], Digests], origin: _Origin
) -> ModelPack:
    experts = gguf.expert_tensors()
    remote = remote_weights(gguf)
    shown = str(gguf.paths[0])
    check_replaceable(pack, gguf, origin.key)
    with staging(pack) as made:
        backbone = made / _BACKBONE
        _ask(gguf, sum(tensor.n_bytes for name, tensor in gguf.tensors.items() if name not in remote), report)
        try:
            info = write_backbone(
                gguf, backbone, remote, lambda done, total: report("backbone", done, total), part=origin.part
            )
            check_values(GgufFile.open(backbone), remote, shown, lambda done, total: report("values", done, total))
            report("trace", 0, 1)
            expert_ne = {name: tensor.ne for name, tensor in experts.items()}
            if origin.apart:
                sites = trace_apart(backbone, expert_ne, shown=shown, heartbeat=lambda: report("trace", 0, 1))
            else:
                sites = tuple(plan.site for plan in trace_backbone(backbone, expert_ne).sites)
            report("trace", 1, 1)
            manifest = build_manifest(
                gguf, sites, digest(sites), backbone_sha256=info.sha256, source_files=origin.files
            )
        except (Cancelled, DownloadFailed, KeyboardInterrupt):
            if origin.part is not None and backbone.is_file():  # it was downloaded whole, and will be wanted
                with contextlib.suppress(OSError):
                    backbone.replace(origin.part)
            raise
        origin.check()
        check_replaceable(pack, gguf, origin.key, manifest)
        save_manifest(manifest, made / _MANIFEST)
        stat = backbone.stat()
        stamps = Stamps([(str(pack.resolve() / _BACKBONE), stat.st_size, stat.st_mtime_ns)])
        write_atomically(made / _NOTES, msgspec.json.encode(_Notes(origin.stamps, stamps, origin.url)))
        replace_together(made, pack, (_MANIFEST, _BACKBONE, _NOTES), gone=(_DIGESTS,))
    return ModelPack.open(pack)


def check_replaceable(pack: Path, gguf: GgufFile, key: str, manifest: Manifest | None = None) -> None:
    """Refuse to make the pack of `gguf` in a folder that holds another model's, or files that are no pack's.

    `key` is where the model comes from: the file's resolved path, or its address. Without the new `manifest` the
    headers alone are compared. Raises ModelError.
    """
    another = "give another folder (--out), or remove that one"
    there = pack / _MANIFEST
    notes = _read_notes(pack)
    if not os.path.lexists(there):
        if notes is None and os.path.lexists(pack / _BACKBONE):
            raise ModelError(f"{pack}: holds a {_BACKBONE} that is no model pack's; {another}")
        return
    if notes is not None and key in (notes.url, *(name for name, _, _ in notes.source.files[:1])):
        return
    try:
        old = load_manifest(there)
    except ModelError:
        if notes is None:
            raise ModelError(f"{there}: is no model pack's, or damaged, and stays as it is; {another}") from None
        raise ModelError(f"{pack}: holds a model pack made from another file; {another}") from None
    try:
        check_source(old, gguf)
    except ManifestMismatch:
        pass
    else:
        if manifest is None or old.model_hash == manifest.model_hash:
            return
        if old.backbone_sha256 == manifest.backbone_sha256 != "" and not (is_hashed(old) and is_hashed(manifest)):
            return  # a model on a web server, and the file that was downloaded
    raise ModelError(f"{pack}: holds the pack of another model ({old.name}); {another}")


def _read_notes(pack: Path) -> _Notes | None:
    """What this program noted of a pack, None where it did not make it here."""
    try:
        with (pack / _NOTES).open("rb") as file:
            return msgspec.json.decode(file.read(1 << 20), type=_Notes)
    except (OSError, msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _ask(gguf: GgufFile, copied: int, report: Progress) -> None:
    """Let llama.cpp refuse a model of whose backbone `copied` bytes would be copied or downloaded first."""
    if copied < ASK_BYTES:
        return
    with tempfile.TemporaryDirectory(prefix="swarmnode-shell-") as folder:
        shell = Path(folder) / "shell.gguf"
        try:
            write_shell(gguf, shell)
        except ModelError:  # a file system without holes, or without room for so long a file
            return
        accept_apart(shell, shown=str(gguf.paths[0]), heartbeat=lambda: report("check", 0, 1))
    report("check", 1, 1)


def _onboard_far(url: str, pack: Path, report: Progress, *, hash_all: bool, back_off_s: float | None) -> ModelPack:
    last = ("headers", 0, 1)

    def note(stage: str, done: int, total: int) -> None:
        nonlocal last
        last = (stage, done, total)
        report(stage, done, total)

    from swarmnode.model.http_file import BACK_OFF_S  # noqa: PLC0415  httpx costs 0.2 s and 10 MB
    from swarmnode.model.http_model import FarModel, digest_far_experts  # noqa: PLC0415

    note(*last)
    back_off_s = BACK_OFF_S if back_off_s is None else back_off_s
    with FarModel(url, heartbeat=lambda: report(*last), back_off_s=back_off_s) as model:
        gguf = model.open()
        check_model(gguf)
        files = model.source_files()
        note("headers", 1, 1)
        kept = _existing_far(pack, url, files)
        if kept is not None and (is_hashed(kept.manifest) or not hash_all):
            return kept

        def digest(sites: Sequence[Site]) -> Digests:
            if hash_all:
                return digest_far_experts(gguf, sites, lambda done, total: note("digests", done, total))
            return tuple(("",) * site.n_expert for site in sites)

        if kept is not None:  # all but the digests is there
            old = kept.manifest
            sha256, sites = old.backbone_sha256, old.sites
            manifest = build_manifest(gguf, sites, digest(sites), backbone_sha256=sha256, source_files=files)
            save_manifest(manifest, pack / "manifest.json")
            return ModelPack.open(pack)
        origin = _Origin(Stamps([]), url, files)
        check_replaceable(pack, gguf, origin.key)
        with _alone(pack):  # two downloads into one file would spoil it
            sweep(pack)
            address = hashlib.sha256(url.encode()).hexdigest()[:8]
            version = hashlib.sha256(msgspec.json.encode((url, files))).hexdigest()[:16]
            part = pack / f".backbone-{address}-{version}.part"
            for other in pack.glob(f".backbone-{address}-*.part"):  # of another version
                if other != part:
                    other.unlink(missing_ok=True)
            return _make(gguf, pack, note, digest, replace(origin, part=part))


@contextlib.contextmanager
def _alone(pack: Path) -> Iterator[None]:
    try:
        pack.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{pack}: cannot be written ({error.strerror})") from error
    lock = FolderLock(pack)
    try:
        yield
    finally:
        lock.release()


def _existing_far(pack: Path, url: str, files: tuple[SourceFile, ...]) -> ModelPack | None:
    """The pack that is there already, if it was made from this address and the files are still the same."""
    if not (pack / "manifest.json").is_file():
        return None
    try:
        found = ModelPack.open(pack)
    except ManifestMismatch:
        return None
    if found.url != url or not found.backbone.is_file():
        return None
    before = [(file.size, file.tag) for file in found.manifest.source_files]
    if before != [(file.size, file.tag) for file in files]:
        raise SourceChanged(
            f"{shown(url)}: is another file now than when {pack} was made; remove that folder to take the new one"
        )
    return found


def _existing(pack: Path, gguf: GgufFile) -> ModelPack | None:
    """The pack that is there already, if it was made from this very source."""
    if not (pack / "manifest.json").is_file():
        return None
    try:
        found = ModelPack.open(pack)
        check_source(found.manifest, gguf)
    except ManifestMismatch:
        return None
    if found.source is None or found.source != gguf.paths[0].resolve():
        return None
    return found if found.backbone.is_file() else None
