"""The gate of one architecture in one variant: does a swarm compute what the local model computes?

A tiny model is made and onboarded as any model is; its experts are then held by workers (`framed.py`), and the same
text is run by the plain local model and by the backbone. Called by `run.py` and by tests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from swarmnode.architectures.framed import FramedExperts
from swarmnode.architectures.refusal import LlamaRefused, refused
from swarmnode.architectures.script import Rows, run_script, same, script_tokens
from swarmnode.architectures.tiny_model import write_tiny_model
from swarmnode.backbone.graph_trace import GraphPlan
from swarmnode.backbone.llama import LlamaModel
from swarmnode.backbone.trace import trace_model
from swarmnode.compute.recipe import recipes_hash
from swarmnode.errors import ComputeError, ModelError, SwarmnodeError
from swarmnode.gate.bounds import row_objection
from swarmnode.gate.coding import Codec, Pair
from swarmnode.gate.experts import TeacherForced, site_engine
from swarmnode.gate.forward import Forward
from swarmnode.gate.report import mean_expert_bytes
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import Manifest
from swarmnode.model.source_bank import SourceBank
from swarmnode.onboard import ModelPack, onboard

TAKE_BACK = 6  # tokens whose states a recurrent layer keeps, as a node's backbone does
_PAIRS: dict[str, Pair] = {
    "partial_f32": ("f32", "f32"),
    "f16": ("f16", "f16"),
    "int8": ("int8", "int8"),
    "fp8": ("fp8", "fp8"),
}


class ArchResult(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the gate found. `error` is one line; with it the figures are those that were had before.

    `experts` and `k` are the largest of any site; `bytes_per_expert` the mean over all experts of all sites;
    `layer_cosine` the lowest of any row of any layer. `rollback`: "exact", "differs", "refused" (then no drafts are
    made and no prefix is reused).
    """

    arch: str
    variant: str
    type: str
    sites: int = 0
    experts: int = 0
    k: int = 0
    shared_expert: bool = False
    identical: bool = False
    layer_cosine: dict[str, float] = {}
    bytes_per_expert: int = 0
    rollback: str = ""
    passed: bool = False
    error: str = ""
    built: bool = True  # False: llama.cpp itself cannot build or run it
    seconds: float = 0.0


def check_architecture(
    arch: str, variant: str, ggml_type: str, folder: Path, on_built: Callable[[], None] = lambda: None
) -> ArchResult:
    """Pass a tiny model through the gate. Writes below `folder`. Raises nothing that a model can cause.

    `on_built` is called when the plain local run has been done: what fails from there on is no fault of llama.cpp.
    Before, only what llama.cpp itself refuses is (`built` False); a disk without room is not.
    A failed assertion of llama.cpp ends the process: `run.py` runs this in another one.
    """
    result = ArchResult(arch=arch, variant=variant, type=ggml_type)
    name = f"{arch}-{variant}-{ggml_type}".replace("/", "_")
    source, pack_folder = folder / f"{name}.gguf", folder / name
    try:
        local = _local(write_tiny_model(source, arch, variant, ggml_type))
    except (SwarmnodeError, OSError) as error:
        result.built, result.error = not isinstance(error, LlamaRefused), one_line(error, folder)
        return result
    on_built()
    try:
        _check(result, onboard(source, pack_folder, apart=False), local)
    except (SwarmnodeError, OSError) as error:
        result.error = one_line(error, folder)
    return result


def one_line(error: Exception, folder: Path) -> str:
    """An error for a row: in one line of at most 400 characters, without the temporary folder."""
    return " ".join(str(error).replace(f"{folder}/", "").split())[:400]


def _local(source: Path) -> Rows:
    try:
        with closing(LlamaModel(source, remote_experts=False, take_back=TAKE_BACK)) as model:
            return run_script(model)
    except (ModelError, ComputeError) as error:  # nobody else has a part in it
        raise refused(str(error)) from None


def _check(result: ArchResult, pack: ModelPack, local: Rows) -> None:
    manifest = pack.manifest
    assert pack.source is not None
    with closing(SourceBank(pack.source, manifest)) as slices:
        _describe(result, manifest, GgufFile.open(pack.source))
        with (
            closing(LlamaModel(pack.backbone, remote_experts=True, take_back=TAKE_BACK)) as model,
            closing(FramedExperts(manifest, slices)) as experts,
        ):
            plan = trace_model(model, {tensor.name: tensor.ne for tensor in manifest.tensors})
            if recipes_hash([site.site for site in plan.sites]) != recipes_hash(manifest.sites):
                raise ModelError("the recipes of the backbone that keeps states are others than those onboarded")
            swarm = run_script(model, plan, experts)
            result.identical = same(swarm.plain + swarm.again + swarm.fresh, local.plain + local.again + local.fresh)
            result.rollback = swarm.rollback
            result.layer_cosine = _cosines(pack, model, plan)
    result.error = objection(result)
    result.passed = not result.error


def objection(result: ArchResult) -> str:
    """Why a result does not pass, "" where it does."""
    if not result.identical:
        return "the logits are not those of the local run, bit for bit"
    if why := row_objection(result.layer_cosine, "layer"):
        return why
    if result.rollback not in ("exact", "refused"):
        return "tokens taken back leave another state than before"
    return ""


def _describe(result: ArchResult, manifest: Manifest, gguf: GgufFile) -> None:
    sites = manifest.sites
    result.sites = len(sites)
    result.experts = max(site.n_expert for site in sites)
    result.k = max(site.n_used for site in sites)
    result.bytes_per_expert = mean_expert_bytes(manifest)
    result.shared_expert = any("_shexp." in name for name in gguf.tensors)


def _cosines(pack: ModelPack, model: LlamaModel, plan: GraphPlan) -> dict[str, float]:
    assert pack.source is not None
    sites = pack.manifest.sites
    tokens = script_tokens()
    engine = site_engine(pack.source, pack.manifest, range(len(sites)), threads=1, device="cpu")
    with closing(engine):
        forced = TeacherForced(engine, sites, Codec(), len(tokens))
        with closing(Forward(model, plan, forced)) as forward:
            forward.logits(tokens)
    return {name: round(min(tails[pair].lowest for tails in forced.tails.values()), 8) for name, pair in _PAIRS.items()}
