"""What a worker must know of a model to fetch, verify, hold and compute its experts without the GGUF.

It names every stacked expert tensor (type, shape, bytes per expert, where it lies in the source files), the
sites with their recipes, one SHA-256 per (site, expert), and the tokenizer's hash. It holds no weights.
`model_hash` is what two nodes compare: it depends on everything that decides an expert's bits and on nothing
else (not on paths, on how the source is split, on the model's name, or on the backbone's own weights, which
workers never see).

A model on a web server that nobody has read whole has "" for the digests that are not known. There `model_hash` also
covers the files themselves (address, size, the server's tag) and where in them each tensor lies: it says "these bytes,
from there". Such an expert can be verified by nobody, so it is taken from that address alone, never from a peer.

Written by onboarding, read by workers and backbones, also from other nodes: `load_manifest` and
`decode_manifest` take nothing on trust.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from swarmnode.compute.recipe import Site, check_site
from swarmnode.errors import CorruptSlice, ManifestMismatch, ModelError
from swarmnode.model.atomic_file import write_atomically
from swarmnode.model.digests import Digests, digest_experts
from swarmnode.model.gguf_file import GgufFile, GgufTensor
from swarmnode.model.http_url import MAX_TAG, MAX_URL, is_public_url
from swarmnode.model.slicing import SliceShape, slice_shape

__all__ = [
    "ExpertTensor",
    "Manifest",
    "SourceFile",
    "build_manifest",
    "digest_experts",
    "load_manifest",
    "save_manifest",
]

FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20  # 100 layers of 512 experts make about 4 MiB
MAX_EXPERTS = 1 << 16
MAX_SITES = 4096
MAX_FILES = 99_999  # gguf-split numbers parts with five digits

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
MaybeDigest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class SourceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file of the GGUF that the manifest was made from: its name without folders, its bytes.

    From a web server also `url`, where others may find it ("" where the address is nobody else's business: it has a
    query), and `tag`, what the server calls this version of it (ETag, else Last-Modified).
    """

    name: Name
    size: Count
    url: Annotated[str, msgspec.Meta(max_length=MAX_URL)] = ""
    tag: Annotated[str, msgspec.Meta(max_length=MAX_TAG)] = ""


class ExpertTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stacked expert tensor: `ne` of the stack (outermost, the expert, last), `stride` bytes per expert.

    `offset` is absolute in source file number `file`.
    """

    name: Name
    ggml_type: Count
    ne: tuple[Count, ...]
    stride: Count
    file: Count
    offset: Count


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """See the module. `digests[site][expert]` is over the expert's slices in the order of the site's tensors, "" if
    not known.

    `backbone_sha256` is over the written part of the backbone file (see `backbone_file.BackboneInfo`), "" if
    not known.
    """

    format: int
    name: Annotated[str, msgspec.Meta(max_length=200)]
    architecture: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    n_layers: Count
    d_model: Count
    n_expert: Count
    n_used: Count
    source_files: tuple[SourceFile, ...]
    tensors: tuple[ExpertTensor, ...]
    sites: tuple[Site, ...]
    digests: tuple[tuple[MaybeDigest, ...], ...]
    tokenizer_hash: Digest
    backbone_sha256: MaybeDigest
    shared_expert: bool
    model_hash: Digest

    def tensor(self, name: str) -> ExpertTensor:
        """By name. Raises ManifestMismatch where there is none."""
        cache: dict[str, ExpertTensor] | None = self.__dict__.get("_by_name")
        if cache is None:
            cache = self.__dict__["_by_name"] = {tensor.name: tensor for tensor in self.tensors}
        if name not in cache:
            raise ManifestMismatch(f"a site names tensor {name[:80]!r}, which the manifest does not list")
        return cache[name]

    def site_tensors(self, site: int) -> tuple[ExpertTensor, ...]:
        """The tensors of a site in its own order. Raises ModelError for a site that is not there."""
        if not 0 <= site < len(self.sites):
            raise ModelError(f"site {site} does not exist; {self.name} has {len(self.sites)}")
        return tuple(self.tensor(name) for name in self.sites[site].tensors)

    def expert_bytes(self, site: int) -> int:
        """Bytes of one expert of a site, all its tensors together."""
        return sum(tensor.stride for tensor in self.site_tensors(site))


def tensor_shape(tensor: ExpertTensor) -> SliceShape:
    """The slice of one expert."""
    return slice_shape(tensor.name, tensor.ggml_type, tensor.ne)


def build_manifest(
    gguf: GgufFile,
    sites: Sequence[Site],
    digests: Digests,
    *,
    backbone_sha256: str = "",
    source_files: Sequence[SourceFile] = (),
) -> Manifest:
    """Put a manifest together from a model, its traced sites and `digest_experts`' result.

    `source_files`: where they say more than the names and sizes of the files.
    Raises ManifestMismatch where they do not fit, DenseModel or NotGguf where the file is no MoE model.
    """
    experts = gguf.expert_tensors()
    manifest = Manifest(
        format=FORMAT,
        name=gguf.name,
        architecture=gguf.architecture,
        n_layers=gguf.hyperparameter("block_count"),
        d_model=gguf.hyperparameter("embedding_length"),
        n_expert=gguf.hyperparameter("expert_count"),
        n_used=gguf.hyperparameter("expert_used_count"),
        source_files=tuple(source_files)
        or tuple(SourceFile(path.name, size) for path, size in zip(gguf.paths, gguf.sizes, strict=True)),
        tensors=tuple(_expert_tensor(tensor) for tensor in experts.values()),
        sites=tuple(sites),
        digests=digests,
        tokenizer_hash=tokenizer_hash(gguf),
        backbone_sha256=backbone_sha256,
        shared_expert=any("_shexp." in name for name in gguf.tensors),
        model_hash="0" * 64,
    )
    manifest = msgspec.structs.replace(manifest, model_hash=compute_model_hash(manifest))
    check_manifest(manifest)
    return manifest


def tokenizer_hash(gguf: GgufFile) -> str:
    """SHA-256 over the `tokenizer.*` metadata as it stands in the file, in the order of the keys."""
    digest = hashlib.sha256()
    for key in sorted(key for key in gguf.metadata if key.startswith("tokenizer.")):
        raw = gguf.metadata.raw(key)
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def compute_model_hash(manifest: Manifest) -> str:
    """SHA-256 over what decides an expert's bits, in a canonical encoding: the same on every system."""
    used = sorted({name for site in manifest.sites for name in site.tensors})
    parts: tuple[object, ...] = (
        "swarmnode model 1",
        manifest.architecture,
        manifest.n_layers,
        manifest.d_model,
        [(name, manifest.tensor(name).ggml_type, manifest.tensor(name).ne) for name in used],
        manifest.sites,
        manifest.digests,
        manifest.tokenizer_hash,
    )
    if not is_hashed(manifest):
        places = [(name, manifest.tensor(name).file, manifest.tensor(name).offset) for name in used]
        files = [(source.name, source.size, source.url, source.tag) for source in manifest.source_files]
        parts = ("unhashed", parts, files, places)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def is_hashed(manifest: Manifest) -> bool:
    """Does every expert have a digest?"""
    return all(all(digests) for digests in manifest.digests)


def check_manifest(manifest: Manifest) -> None:
    """Refuse a manifest that contradicts itself.

    Raises ManifestMismatch, and RecipeError for an unusable recipe.
    """
    _require(manifest.format == FORMAT, f"format {manifest.format}; this program reads format {FORMAT}")
    _require(0 < len(manifest.sites) <= MAX_SITES, f"{len(manifest.sites)} sites; 1 to {MAX_SITES} are allowed")
    _require(0 < len(manifest.source_files) <= MAX_FILES, f"{len(manifest.source_files)} source files")
    texts = (manifest.name, manifest.architecture, *(tensor.name for tensor in manifest.tensors))
    _require(all(text.isprintable() for text in texts), "a name has control characters")
    for source in manifest.source_files:
        _require(
            source.name.isprintable() and not set(source.name) & set("/\\:") and source.name not in (".", ".."),
            f"source file name {source.name!r} is no plain file name; rename the file",
        )
        _require(
            not source.url or is_public_url(source.url),
            f"source file {source.name!r} has an address that is none: {source.url[:100]!r}",
        )
        _require(source.tag.isprintable(), f"source file {source.name!r} has a tag with control characters")
    _require(len({t.name for t in manifest.tensors}) == len(manifest.tensors), "a tensor appears twice")
    for tensor in manifest.tensors:
        _check_tensor(manifest, tensor)
    _require(len(manifest.digests) == len(manifest.sites), "not one list of digests per site")
    for position, site in enumerate(manifest.sites):
        _require(site.index == position, f"site {position} calls itself {site.index}")
        _require(0 < site.n_used <= site.n_expert <= MAX_EXPERTS, f"site {position}: {site.n_expert} experts")
        _require(len(manifest.digests[position]) == site.n_expert, f"site {position}: not one digest per expert")
        _require(bool(site.tensors), f"site {position} has no tensors")
        for name in site.tensors:
            found = manifest.tensor(name).ne[-1]
            _require(found == site.n_expert, f"{name} stacks {found} experts, site {position} has {site.n_expert}")
        shapes = {t.name: (tensor_shape(t).ne, t.ggml_type) for t in manifest.site_tensors(position)}
        check_site(site, shapes)
    actual = compute_model_hash(manifest)
    _require(
        actual == manifest.model_hash,
        f"model_hash says {manifest.model_hash[:16]}…, content has {actual[:16]}…",
    )


def check_source(manifest: Manifest, gguf: GgufFile) -> None:
    """Refuse a GGUF that is not the manifest's model, as far as headers tell. Raises ManifestMismatch."""
    for tensor in manifest.tensors:
        found = gguf.tensors.get(tensor.name)
        ours = (tensor.ggml_type, tensor.ne)
        if found is None or (found.ggml_type, found.ne) != ours:
            theirs = "absent" if found is None else f"type {found.ggml_type}, shape {list(found.ne)}"
            raise ManifestMismatch(
                f"{gguf.paths[0]}: {tensor.name} is {theirs}; the manifest of {manifest.name} has type "
                f"{tensor.ggml_type}, shape {list(tensor.ne)}; give the file that was onboarded"
            )


def decode_manifest(data: bytes, where: str = "manifest") -> Manifest:
    """Decode and check a manifest's JSON. Raises ManifestMismatch with one line that begins with `where`."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestMismatch(f"{where}: {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ManifestMismatch(f"{where}: not a manifest of this version ({str(error)[:200]})") from None
    try:
        check_manifest(manifest)
    except ModelError as error:
        raise ManifestMismatch(f"{where}: {error}; run `swarmnode onboard` again or fetch it again") from None
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical JSON; `decode_manifest` reads it."""
    return msgspec.json.encode(manifest)


def load_manifest(path: Path | str) -> Manifest:
    """Read a manifest file. Raises ManifestMismatch, or ModelError where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    return decode_manifest(data, str(path))


def save_manifest(manifest: Manifest, path: Path | str) -> None:
    """Write a manifest file, whole or not at all. Raises ModelError where it cannot be written."""
    write_atomically(Path(path), encode_manifest(manifest))


def corrupt_expert(manifest: Manifest, site: int, expert: int, source: str) -> CorruptSlice:
    """The error for bytes from `source` that are not this expert; names its tensors and their places."""
    places = ", ".join(
        f"{t.name} at {manifest.source_files[t.file].name}:{t.offset + expert * t.stride}"
        for t in manifest.site_tensors(site)
    )
    return CorruptSlice(
        f"{source}: expert {expert} of site {site} does not have the manifest's SHA-256 "
        f"{manifest.digests[site][expert][:16]}… ({places}); fetch it from elsewhere"
    )


def _expert_tensor(tensor: GgufTensor) -> ExpertTensor:
    stride = slice_shape(tensor.name, tensor.ggml_type, tensor.ne).stride
    return ExpertTensor(tensor.name, tensor.ggml_type, tensor.ne, stride, tensor.file, tensor.offset)


def _check_tensor(manifest: Manifest, tensor: ExpertTensor) -> None:
    _require(1 <= len(tensor.ne) <= 4 and all(tensor.ne), f"{tensor.name} has shape {list(tensor.ne)}")
    stride = tensor_shape(tensor).stride
    _require(tensor.stride == stride, f"{tensor.name} has stride {tensor.stride}, its shape makes {stride}")
    _require(
        tensor.file < len(manifest.source_files),
        f"{tensor.name} lies in file {tensor.file}, which is not listed",
    )
    end = tensor.offset + tensor.ne[-1] * stride
    size = manifest.source_files[tensor.file].size
    _require(end <= size, f"{tensor.name} ends at byte {end} of a source file of {size}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ManifestMismatch(message)


def told_address(manifest: Manifest) -> str:
    """The address that the manifest names for its files, if this node may use it on its own; else "".

    Without TLS only where every expert has a hash.
    """
    urls = [source.url for source in manifest.source_files]
    is_safe = all(url.startswith("https://") for url in urls) or (all(urls) and is_hashed(manifest))
    return urls[0] if is_safe else ""
