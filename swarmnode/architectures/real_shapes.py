"""Real shapes through worker, wire and gate: one MoE layer of each known model, with random weights.

A worker process serves the layer over QUIC; this process asks it as a backbone does, in exact mode and in partial mode
with each wire type, and computes the same with an engine of its own. Not the whole model, and no text: what is shown is
that these widths, types, counts and recipes go through, what an expert weighs, and what a token costs. Called by
`swarmnode gate --shape`.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil

from swarmnode.architectures.check import one_line
from swarmnode.architectures.real_layer import RealLayer, leaning_rows, write_layer
from swarmnode.backbone.hook import F32, I32
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.codec import WireName
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.request import combine, make_request
from swarmnode.errors import SwarmnodeError
from swarmnode.fidelity import RowReference
from swarmnode.gate.bounds import row_objection
from swarmnode.gate.exact import differing_rows
from swarmnode.gate.experts import site_engine
from swarmnode.gate.temporary import gate_folder
from swarmnode.gate.worker_process import WorkerSettings, run_beside_worker
from swarmnode.sizing.shapes import MODELS, ModelShape, find_shape

SHAPES: tuple[str, ...] = tuple(shape.name for shape in MODELS)

_WIRES: dict[str, WireName] = {"partial_f32": "f32", "f16": "f16", "int8": "int8", "fp8": "fp8"}

ROOM = 1 << 30  # bytes of experts that are written
SHARE = 4  # of free memory and disk, one part in so many at most
STEPS = 8  # single tokens, as in a decode
PARAMETERS = 4e9  # that a batch goes through, about: tokens × experts × their size
MOST_TOKENS, LEAST_TOKENS = 64, 8  # of a batch

Progress = Callable[[str, int, int], None]  # (name, done, of how many)


class ShapeResult(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one layer gave. `error` is one line; with it the figures are those that were had before.

    `written`: experts that had weights. bytes_per_expert: of the slices a worker maps, all tensors; `roadmap_mb`: what
    the roadmap says, 0 for nothing. `layer_cosine`: the lowest of any row. `token_bytes`: CALL and ANSWER frames of one
    token at this layer, one worker. `recipe`: its operations in order.
    """

    model: str
    arch: str
    variant: str = "one layer"
    type: str
    sites: int
    experts: int
    k: int
    shared_expert: bool
    d: int
    d_ff: int
    written: int = 0
    identical: bool = False
    layer_cosine: dict[str, float] = {}
    bytes_per_expert: int = 0
    roadmap_mb: float = 0.0
    token_bytes: dict[str, int] = {}
    recipe: list[str] = []
    assumed: str = ""
    passed: bool = False
    error: str = ""
    seconds: float = 0.0


def gate_shapes(names: Sequence[str], progress: Progress, *, room: int = ROOM) -> list[ShapeResult]:
    """Put one layer of each model through. Blocks for some seconds each; what `progress` raises ends it.

    Experts of at most `room` bytes are on disk and in memory at a time, in a folder of its own that goes with it; a
    layer of which not as many fit as a token selects is a row with an error. Raises UsageError for a name that the
    table has not.
    """
    shapes = [find_shape(name) for name in names]
    results = []
    for done, shape in enumerate(shapes):
        progress(shape.name, done, len(shapes))
        with gate_folder() as folder:
            free = min(psutil.virtual_memory().available, shutil.disk_usage(folder).free) // SHARE

            def check(shape: ModelShape = shape, done: int = done) -> None:
                progress(shape.name, done, len(shapes))

            results.append(check_shape(shape, folder, min(room, free), check))
    if shapes:
        progress(shapes[-1].name, len(shapes), len(shapes))
    return results


def check_shape(shape: ModelShape, folder: Path, room: int, check: Callable[[], None]) -> ShapeResult:
    """One model's layer. Raises nothing that a shape can cause, and whatever `check` raises."""
    began = time.monotonic()
    result = ShapeResult(
        model=shape.name,
        arch=shape.arch,
        type=shape.expert_type,
        sites=shape.layers,
        experts=shape.n_expert,
        k=shape.k,
        shared_expert=shape.shared > 0,
        d=shape.d,
        d_ff=shape.d_ff,
        roadmap_mb=shape.size_mb,
        assumed=shape.assumed,
    )
    try:
        layer = write_layer(shape, folder, room)
        check()
        _measure(result, layer, check)
        result.error = objection(result)
        result.passed = not result.error
    except SwarmnodeError as error:
        result.error = one_line(error, folder)
    result.seconds = round(time.monotonic() - began, 3)
    return result


def objection(result: ShapeResult) -> str:
    """Why a result does not pass, "" where it does. The rows are compared with the sums of the exact ones."""
    if not result.identical:
        return "the rows that came back are not this machine's own, byte for byte"
    return row_objection(result.layer_cosine, "row")


@dataclass(frozen=True, slots=True)
class _Batch:
    """What a hook would hand over; see `dispatch.client.ExpertClient.submit`."""

    x: F32
    ids: I32
    weights: F32


def _measure(result: ShapeResult, layer: RealLayer, check: Callable[[], None]) -> None:
    manifest = layer.manifest
    site = manifest.sites[0]
    result.written = len(layer.experts)
    result.bytes_per_expert = manifest.expert_bytes(0)
    result.recipe = [step.op for step in site.recipe.steps]
    tokens = int(PARAMETERS / (site.n_used * 3 * result.d * result.d_ff))
    rng = np.random.default_rng(11)
    batches = [_batch(site, layer.experts, 1, rng) for _ in range(STEPS)]
    batches.append(_batch(site, layer.experts, max(LEAST_TOKENS, min(MOST_TOKENS, tokens)), rng))
    with closing(site_engine(layer.source, manifest, range(1), threads=1, device="cpu")) as engine:
        own = []
        for batch in batches:
            check()
            request = make_request(site, batch.x, batch.ids, batch.weights, partial=False)
            share = request.share(range(len(request.experts)))
            own.append(combine(request, [(share, share.compute(engine))]))
    settings = WorkerSettings(
        manifest_file=layer.manifest_file,
        manifest=manifest,
        source=layer.source,
        group=range(1),
        threads=1,
        device="cpu",
    )

    def exact(client: ExpertClient) -> None:
        answers, result.token_bytes["exact"] = _ask(client, batches)
        result.identical = not sum(differing_rows(a, b) for a, b in zip(own, answers, strict=True))

    run_beside_worker(settings, exact, check)
    references = [RowReference(rows) for rows in own]

    def partial(name: str, client: ExpertClient) -> None:
        answers, result.token_bytes[name] = _ask(client, batches)
        cosines = [reference.cosines(rows) for reference, rows in zip(references, answers, strict=True)]
        result.layer_cosine[name] = round(float(np.concatenate(cosines).min()), 8)

    for name, wire in _WIRES.items():
        options = DispatchOptions(mode="partial", wire_out=wire, wire_back=wire)
        run_beside_worker(settings, functools.partial(partial, name), check, options)


def _batch(site: Site, experts: Sequence[int], n: int, rng: np.random.Generator) -> _Batch:
    """Rows for n tokens, each routed to different ones of `experts`, with weights that add up to 1."""
    chosen = np.argsort(rng.random((n, len(experts))), axis=1)[:, : site.n_used]
    ids = np.asarray(experts, np.int32)[chosen]
    weights = rng.dirichlet(np.full(site.n_used, 4.0), n).astype(np.float32)
    x = leaning_rows(n, site.d_in, rng)
    if site.recipe.weights == "before":
        x = (x[:, None, :] * weights[:, :, None]).reshape(n * site.n_used, site.d_in)
    return _Batch(x, ids, weights)


def _ask(client: ExpertClient, batches: Sequence[_Batch]) -> tuple[list[F32], int]:
    """Every answer, and the bytes of the frames out and back of one token, mean over the single ones."""
    answers: list[F32] = []
    before = client.site_stats()[0]
    for batch in batches:
        if len(answers) == STEPS:
            after = client.site_stats()[0]
        answers.append(client.submit(0, batch.x, batch.ids, batch.weights).result())
    sent = after.bytes_out - before.bytes_out + after.bytes_back - before.bytes_back
    return answers, round(sent / STEPS)
