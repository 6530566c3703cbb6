"""What a node can give others of a model: its manifest, its backbone file, and experts, read as they are sent.

Bytes are read from files, not from mapped memory: a page that is not there yet would stop the whole process, and a
model file that somebody cuts off would end it. Callers: `server.py` (it reads in threads); whoever composes a node
makes the providers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from swarmnode.errors import ModelError
from swarmnode.model.gguf_file import SourceReader
from swarmnode.model.manifest import Manifest, encode_manifest
from swarmnode.model.slicing import Buffer
from swarmnode.model.source_places import SourcePlaces, locate
from swarmnode.model.store import SliceStore


class SliceProvider(Protocol):
    """A model's parts. `holdings` is called on the loop, `manifest_bytes` and `read` in threads."""

    @property
    def manifest(self) -> Manifest:
        """Which model."""

    @property
    def backbone(self) -> Path | None:
        """The backbone file, where there is one."""

    def manifest_bytes(self) -> bytes:
        """The manifest's JSON."""

    def holdings(self) -> Mapping[int, Iterable[int]]:
        """Site -> experts that `read` gives."""

    def read(self, site: int, expert: int) -> Iterator[Buffer]:
        """An expert's slices in the order of the site's tensors, in pieces, each valid until the next is taken.

        Raises ModelError, also in mid-way.
        """


class StoreProvider:
    """What a worker has fetched so far, also while more is being fetched."""

    def __init__(self, store: SliceStore, backbone: Path | None = None) -> None:
        self.manifest = store.manifest
        self.backbone = backbone
        self._store = store
        self._encoded = b""

    def manifest_bytes(self) -> bytes:
        """The manifest's JSON, encoded once."""
        self._encoded = self._encoded or encode_manifest(self.manifest)
        return self._encoded

    def holdings(self) -> Mapping[int, Iterable[int]]:
        """What the store holds now."""
        return self._store.holdings()

    def read(self, site: int, expert: int) -> Iterator[Buffer]:
        """See SliceProvider."""
        return self._store.read(site, expert)


class SourceProvider:
    """Everything, straight from the model's GGUF files."""

    def __init__(self, manifest: Manifest, source: Path, backbone: Path | None = None) -> None:
        """`source`: the GGUF or any of its parts. Raises ManifestMismatch where it is another model, ModelError."""
        self.manifest = manifest
        self.backbone = backbone
        self._places: SourcePlaces = locate(manifest, [source])
        self._encoded = b""

    def manifest_bytes(self) -> bytes:
        """The manifest's JSON, encoded once."""
        self._encoded = self._encoded or encode_manifest(self.manifest)
        return self._encoded

    def holdings(self) -> Mapping[int, Iterable[int]]:
        """Site -> all its experts."""
        return {site.index: range(site.n_expert) for site in self.manifest.sites}

    def read(self, site: int, expert: int) -> Iterator[Buffer]:
        """See SliceProvider."""
        tensors = self.manifest.site_tensors(site)
        if not 0 <= expert < self.manifest.sites[site].n_expert:
            raise ModelError(f"expert {expert} of site {site} does not exist")
        with SourceReader(self._places.paths) as reader:
            for tensor in tensors:
                file, offset = self._places.tensors[tensor.name]
                yield from reader.chunks(file, offset + expert * tensor.stride, tensor.stride)


class PackProvider:
    """Manifest and backbone file of a node that has no slices to give: its pack was made from an address."""

    def __init__(self, manifest: Manifest, backbone: Path | None) -> None:
        self.manifest, self.backbone = manifest, backbone

    def manifest_bytes(self) -> bytes:
        """The manifest's JSON."""
        return encode_manifest(self.manifest)

    def holdings(self) -> Mapping[int, Iterable[int]]:
        """Nothing."""
        return {}

    def read(self, site: int, expert: int) -> Iterator[Buffer]:
        """See SliceProvider: there is nothing to read."""
        raise ModelError(f"expert {expert} of site {site} is not held")
