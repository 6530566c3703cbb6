"""Random-weight models of a published model's layer shape for `bench wan`: few layers, few experts, true widths.

What decides a decode over a distance is kept: the width that goes over the wire, the experts' inner width, how many are
chosen, the shared expert. The number of experts is what fits: routing is random, and a token's bytes do not depend on
it. The architecture is qwen2moe, whatever the model's own is. Files are written once, into the cache folder
(SWARMNODE_CACHE), each with its pack beside it; one that is there is taken again, whatever would fit today. Called by
`wan.py`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import psutil

from swarmnode.config import default_cache_dir
from swarmnode.errors import UsageError
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.sizing.shapes import MODELS, ModelShape

MOST_EXPERTS = 32
MOST_LAYERS = 16
MOST_BYTES = 4 << 30  # of a file
PROMPT_CHARACTERS = 48  # its vocabulary is bytes: a token each, and a prompt is work for this machine's CPU
_LEAST_SHARED = 256  # qwen2moe has a shared expert always
_ROOM = 0.5  # of what is free, of memory and disk
_SHAPE = re.compile(r"(?P<name>.+?):(?P<layers>[0-9]{1,3})(:(?P<experts>[0-9]{1,4}))?")


@dataclass(frozen=True, slots=True)
class ShapedModel:
    """A model to be written, and how it differs from the one it is named after."""

    model: RandomModel
    path: Path
    note: str


def cache_folder() -> Path:
    """Where the files are."""
    return default_cache_dir() / "bench"


def parse_shape(text: str) -> tuple[ModelShape, int, int]:
    """NAME:LAYERS[:EXPERTS] → shape, layers, and experts at most. UsageError names what is unknown."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--shape {text}: give a model and its layers, such as Qwen3.5-122B:3")
    shape = next((one for one in MODELS if one.name.lower() == match["name"].lower()), None)
    if shape is None:
        raise UsageError(f"--shape {match['name']}: known are {', '.join(one.name for one in MODELS)}")
    layers, experts = int(match["layers"]), int(match["experts"] or MOST_EXPERTS)
    if not 1 <= layers <= MOST_LAYERS:
        raise UsageError(f"--shape {text}: give 1 to {MOST_LAYERS} layers")
    if not shape.k <= experts <= shape.n_expert:
        if match["experts"]:
            raise UsageError(f"--shape {text}: {shape.name} has {shape.n_expert} experts and uses {shape.k} of them")
        experts = min(shape.n_expert, max(shape.k, experts))
    return shape, layers, experts


def shaped_model(text: str, *, room: int | None = None, folder: Path | None = None) -> ShapedModel:
    """The model that `text` describes: as it was written before, else with as many experts as fit `room` bytes
    (default: MOST_BYTES, and half of the free memory and disk). UsageError where not even those that one token uses
    fit."""
    folder = folder or cache_folder()
    shape, layers, experts = parse_shape(text)
    whole = _random_model(shape, layers, experts)
    name = f"{re.sub(r'[^A-Za-z0-9.-]', '-', shape.name)}-{layers}x"

    def path(model: RandomModel) -> Path:
        """The wish is part of it, so that fewer experts that somebody asked for are not taken for all that fit."""
        return folder / f"{name}{model.n_expert}of{experts}-{_fingerprint(model)}.gguf"

    possible = (replace(whole, n_expert=n) for n in range(experts, shape.k - 1, -1))
    model = next((one for one in possible if path(one).is_file()), None)
    if model is None:
        each = _size(_random_model(shape, layers, experts + 1)) - _size(whole)
        room = _room(folder) if room is None else room
        fit = experts - max(0, -(-(_size(whole) - room) // each))
        if fit < shape.k:
            said = f"{shape.k} experts of {layers} layers do not fit {room >> 20} MB"
            raise UsageError(f"--shape {text}: {said}; take fewer")
        model = replace(whole, n_expert=fit)
    notes = [
        f"random weights in the layer shape of {shape.name}: d {shape.d}, ff {shape.d_ff}, top {shape.k}",
        f"{layers} of {shape.layers} layers, {model.n_expert} of {shape.n_expert} experts, {_size(model) / 1e9:.1f} GB",
        f"a shared expert of {model.n_ff_shared}" + ("" if shape.shared else " (the model has none)"),
    ]
    notes += ["the router's weights after the experts, not before"] if shape.weights == "before" else []
    notes += [f"assumed: {shape.assumed}"] if shape.assumed else []
    return ShapedModel(model, path(model), "; ".join(notes))


def written(shaped: ShapedModel) -> Path:
    """The model's file; written where it is not there yet. ModelError where it cannot be."""
    if not shaped.path.is_file():
        shaped.path.parent.mkdir(parents=True, exist_ok=True)
        write_random_model(shaped.model, shaped.path)
    return shaped.path


def _random_model(shape: ModelShape, layers: int, experts: int) -> RandomModel:
    wide = "Q4_K" if shape.d % 256 == 0 else "Q8_0"
    # Rows of the down projection are as long as an expert is wide inside.
    down = "Q6_K" if shape.d_ff % 256 == 0 else "Q8_0"
    return RandomModel(
        d_model=shape.d,
        n_layers=layers,
        n_ff_expert=shape.d_ff,
        n_expert=experts,
        n_used=shape.k,
        expert_types={"gate": wide, "up": wide, "down": down},
        dense_type="Q8_0",
        n_ff_shared=shape.shared or _LEAST_SHARED,
        head_size=128 if shape.d % 128 == 0 else 64,
    )


def _fingerprint(model: RandomModel) -> str:
    """Of all that a file is made from."""
    return hashlib.sha256(msgspec.json.encode(asdict(model), order="sorted")).hexdigest()[:12]


def _size(model: RandomModel) -> int:
    return sum(tensor.n_bytes for tensor in model.tensors())


def _room(folder: Path) -> int:
    there = next(one for one in (folder, *folder.parents) if one.exists())
    return int(min(MOST_BYTES, _ROOM * shutil.disk_usage(there).free, _ROOM * psutil.virtual_memory().available))
