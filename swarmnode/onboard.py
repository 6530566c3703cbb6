"""Makes a model pack out of a GGUF: the sparse backbone file, the manifest, and where the source lies.

    PACK/manifest.json     what workers need to know (model/manifest.py)
    PACK/backbone.gguf     the model without its experts (model/backbone_file.py)
    PACK/source.json       where the GGUF lies on this machine, and what was verified of it; never shared

Composes `model/` and `backbone/`: the recipes come from one traced evaluation of the backbone itself. Called by the
`onboard`, `up` and `demo` commands. Running it twice costs nothing: a pack that fits its source is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarmnode.backbone.graph_trace import GraphPlan, plan_graph
from swarmnode.backbone.hook import GraphRecorder
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.errors import ManifestMismatch, ModelError
from swarmnode.model.atomic_file import write_atomically
from swarmnode.model.backbone_file import backbone_digest, remote_weights, write_backbone
from swarmnode.model.digests import digest_experts
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import Manifest, build_manifest, check_source, load_manifest, save_manifest
from swarmnode.model.stamps import Stamps

Progress = Callable[[str, int, int], None]  # (stage, done, total)


class _Notes(msgspec.Struct, frozen=True):
    """What this machine knows of a pack's files: the source they came from, and the backbone file it wrote."""

    source: Stamps
    backbone: Stamps


@dataclass(frozen=True, slots=True)
class ModelPack:
    """A pack on disk.

    `source` is the first part of the original GGUF; None where this machine has it no more, or not as it was.
    `backbone_known` says that the backbone file is still the one that was written here.
    """

    path: Path
    manifest: Manifest
    source: Path | None
    backbone_known: bool = False

    @property
    def backbone(self) -> Path:
        """The sparse backbone file."""
        return self.path / "backbone.gguf"

    @classmethod
    def open(cls, path: Path) -> ModelPack:
        """Read a pack; ManifestMismatch or ModelError with what to do."""
        if not (path / "manifest.json").is_file():
            raise ModelError(f"{path}: not a model pack (no manifest.json): make one with swarmnode onboard MODEL.gguf")
        manifest = load_manifest(path / "manifest.json")
        try:
            notes = msgspec.json.decode((path / "source.json").read_bytes()[: 1 << 20], type=_Notes)
        except (OSError, msgspec.DecodeError):
            return cls(path, manifest, None)
        there = notes.source.files and notes.source.unchanged()
        source = Path(notes.source.files[0][0]) if there else None
        own = [str((path / "backbone.gguf").resolve())] == [name for name, _, _ in notes.backbone.files]
        return cls(path, manifest, source, own and notes.backbone.unchanged())

    def verify_backbone(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Hash the backbone file unless it is known; ModelError where it is not what the manifest says."""
        if self.backbone_known or not self.manifest.backbone_sha256:
            return
        if backbone_digest(self.backbone, self.manifest, progress) != self.manifest.backbone_sha256:
            raise ModelError(f"{self.backbone}: does not have the manifest's SHA-256; run swarmnode onboard again")


def trace_backbone(backbone: Path, expert_ne: Mapping[str, tuple[int, ...]], *, gpu_layers: int = 0) -> GraphPlan:
    """Load a backbone file and read its graph: two tokens, nothing of the experts computed."""
    model = LlamaModel(backbone, remote_experts=True, gpu_layers=gpu_layers)
    try:
        return trace_model(model, expert_ne)
    finally:
        model.close()


def trace_model(model: LlamaModel, expert_ne: Mapping[str, tuple[int, ...]]) -> GraphPlan:
    """The plan of a loaded backbone. Raises TraceError, DenseModel, ComputeError."""
    recorder = GraphRecorder()
    context = LlamaContext(model, n_context=32, n_batch=8, threads=1, callback=recorder)
    try:
        context.decode([0, min(1, model.n_vocab - 1)], 0, all_logits=True)
    finally:
        context.close()
    if recorder.error is not None:
        raise recorder.error
    return plan_graph(recorder.nodes, expert_ne)


def onboard(source: Path, pack: Path, progress: Progress | None = None) -> ModelPack:
    """Make (or keep) the pack of `source` in the folder `pack`. Any part of a split GGUF names the whole.

    `progress` hears of bytes; what it raises ends the work. Raises NotGguf, TruncatedFile, DenseModel, ModelError,
    TraceError; a pack appears whole or not at all.
    """
    report = progress or (lambda _stage, _done, _total: None)
    gguf = GgufFile.open(source)
    experts = gguf.expert_tensors()
    kept = _existing(pack, gguf)
    if kept is not None:
        return kept
    remote = remote_weights(gguf)
    before = Stamps.of(gguf.paths)
    backbone = pack / "backbone.gguf"
    try:
        info = write_backbone(gguf, backbone, remote, lambda done, total: report("backbone", done, total))
        report("trace", 0, 1)
        plan = trace_backbone(backbone, {name: tensor.ne for name, tensor in experts.items()})
        report("trace", 1, 1)
        sites = [site.site for site in plan.sites]
        digests = digest_experts(gguf, sites, lambda done, total: report("digests", done, total))
        manifest = build_manifest(gguf, sites, digests, backbone_sha256=info.sha256)
        if not before.unchanged():
            raise ModelError(f"{source}: changed while it was read; run swarmnode onboard again")
        notes = _Notes(before, Stamps.of([backbone]))
        write_atomically(pack / "source.json", msgspec.json.encode(notes))
        save_manifest(manifest, pack / "manifest.json")
    except BaseException:
        _remove(pack)
        raise
    return ModelPack.open(pack)


def _remove(pack: Path) -> None:
    """Take back what a failed onboarding wrote; a folder that holds nothing else goes too."""
    with contextlib.suppress(OSError):
        for name in ("manifest.json", "source.json", "backbone.gguf"):
            (pack / name).unlink(missing_ok=True)
        pack.rmdir()


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
