"""How the gate measures a model: what the `gate` command was given, checked.

Pure. Used by `wires.py`, which measures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from swarmnode.errors import UsageError
from swarmnode.gate.bounds import MAX_OWN_KL, MIN_POSITIONS
from swarmnode.gate.coding import Codec

MAX_POSITIONS = 1 << 20
MAX_THREADS = 512  # as `compute/device.py` has it
MAX_GPU_LAYERS = 65535


@dataclass(frozen=True, slots=True)
class GateOptions:
    """How to measure. `positions` is rounded up to whole chunks; `text` is a file of the user's own; `own_kl` what the
    model's quantisation costs (KL to its unquantised weights, nats per position), where that is known; `memory` in
    bytes, None for what is free; `worker`: whether exact mode is tried with a worker process."""

    positions: int = 2048
    text: Path | None = None
    own_kl: float | None = None
    memory: int | None = None
    worker: bool = True
    threads: int = 1
    device: str = "auto"
    gpu_layers: int = 0
    codec: Codec = field(default_factory=Codec)

    def __post_init__(self) -> None:
        if not MIN_POSITIONS <= self.positions <= MAX_POSITIONS:
            few = "; of fewer, the lowest 0.1 % of rows says nothing" if self.positions < MIN_POSITIONS else ""
            raise UsageError(f"{self.positions} positions: give {MIN_POSITIONS} to {MAX_POSITIONS}{few}")
        if self.own_kl is not None and not 0 < self.own_kl <= MAX_OWN_KL:
            raise UsageError(
                f"a quantisation that costs a KL of {self.own_kl:g} cannot be meant: give nats per position, more than "
                f"0 and at most {MAX_OWN_KL}"
            )
        if not 1 <= self.threads <= MAX_THREADS:
            raise UsageError(f"{self.threads} threads cannot be meant: give 1 to {MAX_THREADS}")
        if not 0 <= self.gpu_layers <= MAX_GPU_LAYERS:
            raise UsageError(f"{self.gpu_layers} layers on the GPU cannot be meant: give 0 to {MAX_GPU_LAYERS}")
