"""The last matrix of an expert as numbers: what `dispatch/row_screen.py` works its directions out from.

Whoever has a model's experts can have them (`SourceBank`, `SliceStore`): `stacked` gives a site's slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from swarmnode.compute.recipe import Site
from swarmnode.model.slicing import StackedTensor


class LastMatrices:
    """Gives D of y = D·h, the last step of an expert's recipe, as float32[d_out, d_ff]."""

    def __init__(
        self, sites: Mapping[int, Site], stacked: Callable[[int, tuple[int, ...]], Mapping[str, StackedTensor]]
    ) -> None:
        """`stacked(site, experts)` returns tensor name -> slices, as `SourceBank.stacked` does."""
        self._sites, self._stacked = sites, stacked

    def __call__(self, site: int, expert: int) -> npt.NDArray[np.float32] | None:
        """Return the matrix of one expert, or None where its recipe ends otherwise or its type cannot be read."""
        described = self._sites[site]
        last = described.recipe.steps[-1]
        if last.op != "MUL_MAT_ID" or not last.sources[0].startswith("t"):
            return None
        tensor = self._stacked(site, (expert,)).get(described.tensors[int(last.sources[0][1:])])
        if tensor is None or expert not in tensor.experts or len(tensor.ne) != 2:
            return None
        at = tensor.experts.index(expert) * tensor.stride
        d_ff, d_out = tensor.ne
        if d_out != described.d_out:
            return None
        rows = np.asarray(tensor.data[at : at + tensor.stride]).reshape(d_out, -1)
        try:
            values = dequantize(rows, GGMLQuantizationType(tensor.ggml_type))
        except (NotImplementedError, ValueError):
            return None
        return np.ascontiguousarray(values.reshape(d_out, d_ff), np.float32)
