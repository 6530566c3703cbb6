"""What partial sums and F16 on the wire change, on held-out text over real workers: the figures behind the default.

Every layer is called twice with the same exact inputs, once in exact mode and once in the mode under test (teacher-
forced layer cosine); then the text runs once more in the mode under test alone (logits). Worker processes are started
as `swarmnode up` starts them.

Called by `swarmnode bench fidelity` and by the tests.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sysconfig
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode import fidelity
from swarmnode.backbone.hook import F32, I32, EvalHook, Experts, PendingRows
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import Session
from swarmnode.bench.clients import attached_client
from swarmnode.demo import MODEL
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.codec import WireName
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.errors import ModelError
from swarmnode.local_swarm import LocalSwarm, NodeProcess
from swarmnode.onboard import ModelPack, onboard, trace_model

CHUNK = 128  # tokens evaluated together, each chunk a text of its own
WIRES: tuple[WireName, ...] = ("f32", "f16")
_WORKERS = 3
# The split of the demo model's recipe (tools/train_demo_model.py): by file, one in twenty, some kinds in neither part.
_HELD_OUT_SHARE = 20
_IN_NEITHER = re.compile(r"(^|/)site-packages/|(^|/)[^/]*data[^/]*/|^encodings/")
_MAX_FILE = 64 << 10  # bytes; the recipe's bound for tests, which holds for every file


def held_out_tokens(model: LlamaModel, count: int) -> list[int]:
    """Tokens of standard-library sources that the demo model was not trained on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    tokens: list[int] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        if bucket % _HELD_OUT_SHARE or _IN_NEITHER.search(name) or path.stat().st_size > _MAX_FILE:
            continue
        tokens += model.tokenize(path.read_text("utf-8", "ignore"), special=False)
        if len(tokens) >= count:
            return tokens[:count]
    raise ModelError(f"{root}: the held-out sources have only {len(tokens)} tokens of {count}")


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


def run(positions: int = 2048) -> dict[str, Any]:
    """Rows for F32 and F16 partial sums over `positions` positions (rounded up to whole chunks)."""
    return asyncio.run(_run(positions))


async def _run(positions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        pack = onboard(MODEL, folder / "pack")
        async with LocalSwarm(folder, pack.path) as swarm:
            await swarm.start_workers([f"{i + 1}/{_WORKERS}" for i in range(_WORKERS)])
            rows = [await _measure(pack, swarm.workers, wire, positions) for wire in WIRES]
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
        reference = _logits(pack, model, forced, tokens, chunks)
        under_test = _logits(pack, model, other, tokens, chunks)
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


def _logits(pack: ModelPack, model: LlamaModel, experts: Experts, tokens: list[int], chunks: int) -> F32:
    plan = trace_model(model, {t.name: t.ne for t in pack.manifest.tensors})
    hook = EvalHook(plan, experts)
    context = LlamaContext(model, n_context=CHUNK, n_batch=CHUNK, threads=1, callback=hook)
    session = Session(model, context, hook)
    out = np.empty((chunks * CHUNK, model.n_vocab), np.float32)
    try:
        for at in range(0, len(out), CHUNK):
            context.clear()
            session.evaluate(tokens[at : at + CHUNK], 0, all_logits=True)
            for i in range(CHUNK):
                out[at + i] = context.logits(i)
    finally:
        context.close()
    return out
