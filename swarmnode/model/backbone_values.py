"""Whether everything that is not an expert's weight is a number: read once, when a model is onboarded.

The logits do not tell. Where a quantised matrix comes next, ggml quantises the activations first, and a maximum skips
NaN: a NaN in a norm becomes some other number there, of the plain local run as well, and all that is compared agrees.
Experts' weights are looked at with their digests (`digests.py`). Called by `onboard.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from functools import partial

import numpy as np
import numpy.typing as npt

from swarmnode.compute.ggml_types import BLOCK_TYPES, TYPE_BY_NAME
from swarmnode.errors import BrokenModel
from swarmnode.model.gguf_file import EXPERT_TENSOR, GgufFile, GgufTensor
from swarmnode.model.gguf_values import checked

# Where infinity has a meaning, and which: no sink, an expert that is never selected, a frequency that does not turn (0:
# either sign); the router's bias of an expert that is switched off, a state that keeps nothing (-1: -inf alone).
_MAY_BE_INFINITE = (
    (re.compile(r"attn_sinks|exp_probs_b|rope_(freqs|factors)"), 0),
    (re.compile(r"\.ffn_gate_inp\.bias$|\.ssm_a(\.weight)?$"), -1),
)
# Types whose blocks are one value each, and how they are read as floats.
_FLOATS: dict[int, Callable[[bytes], npt.NDArray[np.float16 | np.float32]]] = {
    TYPE_BY_NAME["F32"].id: lambda data: np.frombuffer(data, "<f4"),
    TYPE_BY_NAME["F16"].id: lambda data: np.frombuffer(data, "<f2"),
    TYPE_BY_NAME["BF16"].id: lambda data: (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view("<f4"),
}


def check_values(
    backbone: GgufFile, experts: Collection[str], shown: str, progress: Callable[[int, int], None]
) -> None:
    """Refuse a model in which a tensor of its backbone file, those named `experts` apart, holds NaN or infinity.

    Infinity passes where it has a meaning. `shown` names the model. `progress` hears of tensors, several times for a
    large one; what it raises ends it. Raises BrokenModel naming the tensor, and the expert where it has a row for each;
    TruncatedFile.
    """
    tensors = [tensor for name, tensor in backbone.tensors.items() if name not in experts]
    with backbone.reader() as reader:
        for done, tensor in enumerate(tensors):
            pieces = reader.chunks(tensor.file, tensor.offset, tensor.n_bytes)
            allowed = next((sign for pattern, sign in _MAY_BE_INFINITE if pattern.search(tensor.name)), None)
            if allowed is not None and tensor.ggml_type in _FLOATS:
                values = _FLOATS[tensor.ggml_type](b"".join(bytes(piece) for piece in pieces))
                if np.isnan(values).any():
                    raise BrokenModel(f"{shown}: {_name(tensor)} holds NaN; fetch the file again")
                if allowed < 0 and np.isposinf(values).any():
                    raise BrokenModel(f"{shown}: {_name(tensor)} holds +infinity; fetch the file again")
                continue
            for _ in checked(pieces, tensor.ggml_type, partial(_broken, shown, tensor)):
                progress(done, len(tensors))
    progress(len(tensors), len(tensors))


def _broken(shown: str, tensor: GgufTensor, block: int) -> str:
    of_expert = ""
    if EXPERT_TENSOR.match(tensor.name):
        of_expert = f" of expert {block * BLOCK_TYPES[tensor.ggml_type].elements // math.prod(tensor.ne[:-1])}"
    return f"{shown}: {_name(tensor)}{of_expert} holds NaN or infinity; fetch the file again"


def _name(tensor: GgufTensor) -> str:
    return "".join(c if c.isprintable() else "?" for c in tensor.name)
