"""What llama.cpp itself makes of a text: a plain run of the whole file, without any of this project's experts.

Its logits are what exact mode has to give. And at every site it is listened to: what goes into the experts, and what
comes of them. A site's experts as this machine computes them (`experts.py`) are then held against that, on the very
same inputs; so a model is compared with llama.cpp also where only some of its layers fit into memory, and on a GPU.

llama.cpp maps the file: what it reads can be given back at any time, so that no model is too large for this. Called by
`wires.py`; blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from swarmnode.backbone.graph_trace import GraphPlan, SitePlan
from swarmnode.backbone.hook import F32, I32, EvalHook, read_rows
from swarmnode.backbone.llama import LlamaModel
from swarmnode.backbone.trace import trace_model
from swarmnode.compute.engine_api import Engine
from swarmnode.compute.recipe import Site, recipes_hash
from swarmnode.errors import ComputeError, ModelError
from swarmnode.gate.exact import differing_rows, run_text
from swarmnode.gate.experts import Call, Ready
from swarmnode.gate.forward import Forward
from swarmnode.gate.verdict import MOST_FIGURE, LocalFigures, printable


@dataclass(frozen=True, slots=True)
class LocalRun:
    """The text's logits [n, n_vocab] as llama.cpp has them, and what it said at each site; or `refused`, why not."""

    logits: F32 | None
    calls: LocalCalls
    refused: str = ""

    def compare(self, engine: Engine, site: Site) -> LocalFigures:
        """How a site's rows, from this engine on llama.cpp's own inputs, compare with llama.cpp's own."""
        rows = differ = 0
        off = size = 0.0
        for x, ids, weights, theirs in self.calls.read(site.index):
            call = Call.of(site, x, ids, weights)
            ours = call.total(engine, call.x)
            rows += len(theirs)
            differ += differing_rows(ours, theirs)
            off += float(np.square(ours.astype(np.float64) - theirs).sum())
            size += float(np.square(theirs.astype(np.float64)).sum())
        error = (off / size) ** 0.5 if size else MOST_FIGURE if off else 0.0
        return LocalFigures(rows, differ, min(error, MOST_FIGURE) if np.isfinite(error) else MOST_FIGURE)


class LocalCalls:
    """What llama.cpp handed to each site's experts and what they gave, in a file per site."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, site: int, arrays: Sequence[F32 | I32]) -> None:
        """Add a call: x, ids, weights and rows. Raises ModelError where the disk has no room."""
        try:
            with self._file(site).open("ab") as file:
                for array in arrays:
                    np.save(file, array, allow_pickle=False)
        except OSError as error:
            raise ModelError(
                f"{self._folder}: what llama.cpp made of a layer cannot be kept there ({error.strerror})"
            ) from None

    def read(self, site: int) -> Iterator[tuple[F32, I32, F32, F32]]:
        """Every call of a site, none where it was not listened to. Raises ModelError where that cannot be read."""
        try:
            with self._file(site).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                while file.tell() < size:
                    x, ids, weights, rows = (np.load(file, allow_pickle=False) for _ in range(4))
                    yield x, ids, weights, rows
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{self._file(site)}: what llama.cpp made of a layer cannot be read again ({error})"
            ) from None

    def _file(self, site: int) -> Path:
        return self._folder / f"{site}.npy"


def run_locally(
    source: Path,
    sites: Sequence[Site],
    expert_ne: Mapping[str, tuple[int, ...]],
    tokens: Sequence[int],
    folder: Path,
    *,
    listen: Sequence[range],
    threads: int,
    progress: Callable[[int], None],
) -> LocalRun:
    """Run the text (`exact.py`) by llama.cpp alone, and listen at the sites of `listen`.

    Raises ModelError (another graph than the pack's, no room for what is heard), TraceError. Where llama.cpp refuses
    the file, or has no memory for it, the result says so.
    """
    calls = LocalCalls(folder)
    try:
        model = LlamaModel(source, remote_experts=False)
    except (ModelError, ComputeError) as error:
        return LocalRun(None, calls, printable(str(error)))
    with closing(model):
        plan = trace_model(model, expert_ne)
        if recipes_hash([site.site for site in plan.sites]) != recipes_hash(sites):
            raise ModelError(
                f"{source}: llama.cpp builds another graph of the whole model than of its backbone; "
                "run swarmnode onboard again"
            )
        listener = _Listener(plan, calls, {index for group in listen for index in group})
        try:
            forward = Forward(model, hook=listener, threads=threads)
        except ComputeError as error:
            return LocalRun(None, calls, printable(str(error)))
        with closing(forward):
            return LocalRun(run_text(forward, tokens, progress), calls)


class _Listener(EvalHook):
    """Changes nothing: everything is computed by llama.cpp. It reads x, ids and weights, and what the experts gave."""

    def __init__(self, plan: GraphPlan, calls: LocalCalls, wanted: set[int]) -> None:
        self._calls, self._wanted = calls, wanted
        self._asked: dict[int, tuple[F32, I32, F32]] = {}
        super().__init__(_only_read(plan), self)

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> Ready:
        """See `hook.Experts`: what the experts are given; what they gave is read later."""
        if site in self._wanted:
            self._asked[site] = x, ids, weights
        return Ready(x)

    def _put_back(self, site: SitePlan) -> None:
        asked = self._asked.pop(site.site.index, None)
        if asked is not None:
            self._calls.write(site.site.index, (*asked, read_rows(self._kept[site.output])))


def _only_read(plan: GraphPlan) -> GraphPlan:
    """The plan with nothing left out, and each thing looked at as soon as it is there: its memory is used again."""
    sites = tuple(
        replace(site, dispatch_after=max(site.x, site.ids, site.weights or 0), inject_after=site.output)
        for site in plan.sites
    )
    return replace(plan, sites=sites, skip=frozenset(), others=tuple(_only_read(other) for other in plan.others))
