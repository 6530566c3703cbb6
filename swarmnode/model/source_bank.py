"""Stacked experts straight from the original GGUF: mapped files, nothing copied to disk.

For a node that has the model file: the backbone's own copy of experts, and a worker on the same machine. A
worker that fetched its experts over the network has a `store.SliceStore` instead; both answer `stacked(site)`
alike.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmnode.errors import ModelError, TruncatedFile
from swarmnode.model.gguf_file import GgufFile, GgufTensor
from swarmnode.model.manifest import Manifest, check_source
from swarmnode.model.slicing import StackedTensor, aligned_empty, is_aligned, slice_shape


class SourceBank:
    """Views of a model's experts. Holds the mapped files until `close` and until the last view is gone."""

    def __init__(self, gguf: GgufFile | Path | str, manifest: Manifest) -> None:
        """Raises ManifestMismatch where the file's header is not the manifest's model; hashes nothing."""
        self._gguf = gguf if isinstance(gguf, GgufFile) else GgufFile.open(gguf)
        self._manifest = manifest
        check_source(manifest, self._gguf)
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        self.copied_bytes = 0

    def holdings(self) -> dict[int, tuple[int, ...]]:
        """Everything: site -> all experts."""
        return {site.index: tuple(range(site.n_expert)) for site in self._manifest.sites}

    def stacked(self, site: int, experts: Iterable[int] | None = None) -> dict[str, StackedTensor]:
        """Tensor name -> slices of `experts` (default: all), in ascending order, for each tensor of the site.

        No byte is copied when the experts are consecutive and the first one is aligned for ggml (all experts
        of a usual GGUF are). Otherwise they are copied into memory and counted in `copied_bytes`.
        """
        n_expert = self._manifest.sites[site].n_expert if 0 <= site < len(self._manifest.sites) else 0
        chosen = tuple(range(n_expert)) if experts is None else tuple(sorted(set(experts)))
        tensors = [self._gguf.tensors[tensor.name] for tensor in self._manifest.site_tensors(site)]
        if not chosen:
            return {}
        return {tensor.name: self._stack(tensor, chosen) for tensor in tensors}

    def close(self) -> None:
        """Let the mapped files go; views that are still in use keep theirs."""
        self._maps.clear()

    def _stack(self, tensor: GgufTensor, experts: tuple[int, ...]) -> StackedTensor:
        shape = slice_shape(tensor.name, tensor.ggml_type, tensor.ne)
        spans = [shape.span(expert) for expert in experts]
        whole = self._map(tensor.file)[tensor.offset : tensor.offset + tensor.n_bytes]
        data = whole[spans[0][0] : spans[-1][1]]
        if len(data) != len(experts) * shape.stride or not is_aligned(data):
            data = aligned_empty(len(experts) * shape.stride)
            for slot, (start, end) in enumerate(spans):
                data[slot * shape.stride : (slot + 1) * shape.stride] = whole[start:end]
            data.flags.writeable = False
            self.copied_bytes += len(data)
        return StackedTensor(tensor.name, tensor.ggml_type, shape.ne, shape.stride, experts, data)

    def _map(self, file: int) -> npt.NDArray[np.uint8]:
        if file not in self._maps:
            path, size = self._gguf.paths[file], self._gguf.sizes[file]
            try:
                with path.open("rb") as handle:
                    mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelError(f"{path}: cannot be mapped into memory ({error})") from error
            if len(mapped) < size:
                raise TruncatedFile(f"{path}: has {len(mapped)} bytes, had {size} when it was opened")
            self._maps[file] = np.frombuffer(mapped, dtype=np.uint8)
        return self._maps[file]
