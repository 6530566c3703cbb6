"""What partial sums and each wire type change, on held-out text over real workers: the figures behind the defaults.

Every layer is called twice with the same exact inputs, once in exact mode and once in the mode under test (teacher-
forced layer cosine); then the text runs once more in the mode under test alone (logits). Worker processes are started
as `swarmnode up` starts them. What the gate measures without a network, for every pair of types, on any model
(`gate/wires.py`), this measures over real frames: both must agree.

Called by `swarmnode bench fidelity` and by the tests.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode import fidelity
from swarmnode.backbone.hook import F32, I32, Experts, PendingRows
from swarmnode.backbone.llama import LlamaModel
from swarmnode.backbone.trace import trace_model
from swarmnode.bench.clients import attached_client
from swarmnode.demo import MODEL
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.codec import WireName
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.errors import UsageError
from swarmnode.gate.forward import CHUNK, Forward
from swarmnode.gate.text import held_out_tokens
from swarmnode.local_swarm import LocalSwarm, NodeProcess
from swarmnode.onboard import ModelPack, onboard

__all__ = ["held_out_tokens", "run"]

WIRES: tuple[WireName, ...] = ("f32", "f16", "int8", "fp8")
_WORKERS = 3
MOST_POSITIONS = 32_768  # the logits of all are kept, of two runs


class TeacherForced:
    """Experts that answer with the exact rows and note how the other client's rows compare with them."""

    def __init__(self, exact: ExpertClient, other: ExpertClient) -> None:
        self._exact, self._other = exact, other
        self.cosines: list[np.ndarray[Any, np.dtype[np.float64]]] = []

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> PendingRows:
        """See `hook.Experts`."""
        return _Both(self._exact.submit(site, x, ids, weights), self._other.submit(site, x, ids, weights), self)


class _Both:
    def __init__(self, exact: PendingRows, other: PendingRows, owner: TeacherForced) -> None:
        self._exact, self._other, self._owner = exact, other, owner

    def result(self) -> F32:
        exact = self._exact.result()
        self._owner.cosines.append(fidelity.row_cosines(exact, self._other.result()))
        return exact


def run(positions: int = 2048, wires: Sequence[WireName] = WIRES) -> dict[str, Any]:
    """A row for partial sums in each wire type both ways, over `positions` positions (rounded up to whole chunks).

    Raises UsageError where that is no number to be measured with.
    """
    if not 1 <= positions <= MOST_POSITIONS:
        raise UsageError(f"--positions {positions}: give 1 to {MOST_POSITIONS:,}")
    return asyncio.run(_run(positions, wires))


async def _run(positions: int, wires: Sequence[WireName]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        pack = onboard(MODEL, folder / "pack")
        async with LocalSwarm(folder, pack.path) as swarm:
            await swarm.start_workers([f"{i + 1}/{_WORKERS}" for i in range(_WORKERS)])
            rows = [await _measure(pack, swarm.workers, wire, positions) for wire in wires]
    return {"model": pack.manifest.name, "workers": _WORKERS, "rows": rows}


async def _measure(pack: ModelPack, workers: list[NodeProcess], wire: WireName, positions: int) -> dict[str, Any]:
    async with (
        attached_client(pack, workers, DispatchOptions(mode="exact")) as exact,
        attached_client(pack, workers, DispatchOptions(mode="partial", wire_out=wire, wire_back=wire)) as other,
    ):
        return await asyncio.to_thread(_compare, pack, exact, other, wire, positions)


def _compare(pack: ModelPack, exact: ExpertClient, other: ExpertClient, wire: str, positions: int) -> dict[str, Any]:
    model = LlamaModel(pack.backbone, remote_experts=True)
    try:
        chunks = -(-positions // CHUNK)
        tokens = held_out_tokens(model, chunks * CHUNK + 1)
        forced = TeacherForced(exact, other)
        reference = _logits(pack, model, forced, tokens)
        under_test = _logits(pack, model, other, tokens)
    finally:
        model.close()
    cosines = np.concatenate(forced.cosines)
    comparison = fidelity.compare_logits(reference, under_test, np.array(tokens[1:], np.int64))
    return {
        "mode": "partial",
        "wire": wire,
        "layer_cosine_lowest_0.1%": fidelity.lowest(cosines),
        "layer_cosine_mean": float(cosines.mean()),
        **asdict(comparison),
    }


def _logits(pack: ModelPack, model: LlamaModel, experts: Experts, tokens: list[int]) -> F32:
    plan = trace_model(model, {t.name: t.ne for t in pack.manifest.tensors})
    with closing(Forward(model, plan, experts)) as forward:
        return np.concatenate([forward.logits(tokens[at : at + CHUNK]) for at in range(0, len(tokens) - 1, CHUNK)])
