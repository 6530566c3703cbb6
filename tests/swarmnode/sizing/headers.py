"""Headers without files: what `needs_of` reads, made by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from swarmnode.model.gguf_metadata import MAX_INTEGERS
from swarmnode.sizing.needs import ModelNeeds


@dataclass(frozen=True)
class FakeTensor:
    """A line of a directory; one byte per value unless said otherwise."""

    ne: tuple[int, ...]
    n_bytes: int = -1

    def __post_init__(self) -> None:
        if self.n_bytes < 0:
            object.__setattr__(self, "n_bytes", math.prod(self.ne))


class FakeMetadata(dict[str, object]):
    """See `needs.MetadataLike`; a list stands for an array."""

    def integers(self, key: str) -> tuple[int, ...] | None:
        """As `model.gguf_metadata.Metadata` has it: None for what is no list of counts."""
        value = self.get(key)
        items = value if isinstance(value, list) else [value]
        numbers = tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))
        return numbers if 0 < len(numbers) == len(items) <= MAX_INTEGERS else None


@dataclass
class FakeHeader:
    """See `needs.HeaderLike`."""

    metadata: FakeMetadata = field(default_factory=FakeMetadata)
    tensors: dict[str, FakeTensor] = field(default_factory=dict)
    architecture: str = "arch"
    name: str = "fake"

    def layer(self, n: int, **tensors: tuple[int, ...]) -> FakeHeader:
        """Add tensors of a block; `_` in a name's last place stands for its point."""
        for name, ne in tensors.items():
            self.tensors[f"blk.{n}.{name}.weight"] = FakeTensor(ne)
        return self

    def experts(self, n: int, n_expert: int = 4, d: int = 64, ff: int = 32) -> FakeHeader:
        """Add gate, up and down of a block."""
        return self.layer(
            n, ffn_gate_exps=(d, ff, n_expert), ffn_up_exps=(d, ff, n_expert), ffn_down_exps=(ff, d, n_expert)
        )


def needs(**changes: Any) -> ModelNeeds:
    """A small model: 10 layers of 8 experts of 1 GiB, a backbone of 2 GiB and 1 MiB per token of context."""
    figures: dict[str, Any] = {
        "name": "small", "architecture": "arch", "n_layers": 10, "n_sites": 10, "n_expert": 8, "n_used": 2,
        "d_in": 1024, "d_out": 1024, "expert_bytes": 1 << 30, "experts_total_bytes": 80 << 30,
        "dense_bytes": 2 << 30, "shared_expert": True, "kv_bytes_per_token": 1 << 20, "context_length": 1 << 16,
    }  # fmt: skip
    return ModelNeeds(**(figures | changes))
