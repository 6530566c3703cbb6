"""Can these devices run that model? Who would be the backbone, who holds how many experts, how fast it could be.

Pure arithmetic with the planner's rules (`placement/planner.py`), which itself takes minutes for a model of 80,000
experts: every expert is held; the backbone's own memory goes to whole layers, which then cost no round trip; near
devices before far ones; whole layers on one device; copies with what is left. A test holds it to the planner.

Devices, and what is kept free of them, are those of `devices.py`. Times: the round trip, some time per layer for
frames and hook (SITE_S), and reading the weights that a token touches at MEMORY_RATE; computing itself is less than
reading them. Called by `swarmnode plan`, the gate's report and the page of models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swarmnode.placement.draft import ALIKE
from swarmnode.sizing.devices import GIB, RESERVE, RESERVE_SHARE, Device
from swarmnode.sizing.needs import (
    BATCH,
    F16_BYTES,
    F32_BYTES,
    PROCESS_BYTES,
    BackboneMemory,
    ModelNeeds,
    memory_of,
)

MEMORY_RATE: Final = 40e9  # bytes/s that an ordinary desktop reads of its memory; a laptop 20, an Apple M Max 300
SITE_S: Final = 0.0015  # of a layer elsewhere, beside the round trip: frames, the hook, a worker's engine
LAYER_S: Final = 0.0002  # of each layer on the backbone, however small: its many small operations
DISTANCES_S: Final = (0.020, 0.080, 0.100)  # a town, a continent, the roadmap's
ACCEPTED: Final = (1.0, 1.2, 2.0)  # tokens per step: no drafts, weak guesses, good ones
PROMPT: Final = 1000  # tokens, of the prefill's bytes
MOST_BACKBONES: Final = 64  # kinds of devices that are tried as the backbone


@dataclass(frozen=True, slots=True)
class Share:
    """What one device would hold. `other`: the backbone's dense weights, cache and buffers; 0 for a worker."""

    device: Device
    is_backbone: bool
    experts: int
    expert_bytes: int
    other: int
    left: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Expected tokens/s of one generation with every device this far away, for each of ACCEPTED; upper bounds."""

    rtt_s: float
    tokens_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """An answer. `shares` are of the backbone, then of workers nearest first; empty where there is no backbone.

    missing: bytes that nobody has room for (of a backbone, or of experts). more_devices: how many more like `alike`
    make it fit, 0 where none would. backbone_device: the least memory of a device that can be the backbone. copies: how
    many times over the experts could be held. trips: round trips per token with whole layers on the backbone; of
    `needs.n_sites` without. given: the speed with the devices' own distances, remote: with every expert elsewhere.
    token_bytes: both ways, all layers, F16 in partial mode.
    """

    needs: ModelNeeds
    context: int
    fits: bool
    backbone: BackboneMemory
    shares: tuple[Share, ...]
    missing: int
    missing_what: str
    more_devices: int
    backbone_device: int
    alike: Device
    longest_context: int
    copies: float
    trips: int
    given: Speed
    speeds: tuple[Speed, ...]
    remote: tuple[Speed, ...]
    token_bytes: int


def make_plan(needs: ModelNeeds, devices: Sequence[Device], context: int) -> SwarmPlan:
    """Put a model on devices; `context` in tokens, of one generation at a time. At least one device is needed.

    The backbone is the device with which a token takes least, among those that can be it. Where none can, or experts
    are left over, `fits` is False and the rest says what is missing.
    """
    memory = memory_of(needs, context)
    other = memory.total - PROCESS_BYTES  # a device's `usable` is without it already
    kinds = {(device.memory, device.rtt_s): n for n, device in reversed(list(enumerate(devices)))}  # the first of each
    able = [n for n in kinds.values() if devices[n].usable >= other]
    if not able:
        return _no_backbone(needs, devices, context, memory, other)
    swarm = _Swarm(needs, devices, other)
    splits = [swarm.split(n) for n in _tried(devices, able)]
    return swarm.plan(min(splits, key=swarm.preferred), context, memory)


def _tried(devices: Sequence[Device], able: Sequence[int]) -> Sequence[int]:
    """Which devices are tried as the backbone: one of each kind.

    Of more than MOST_BACKBONES kinds only those than which none is as near with as much memory, and of them an even
    selection: their neighbours among them are nearly alike.
    """
    if len(able) <= MOST_BACKBONES:
        return able
    front: list[int] = []
    for n in sorted(able, key=lambda n: (devices[n].rtt_s, -devices[n].memory)):
        if not front or devices[n].memory > devices[front[-1]].memory:
            front.append(n)
    count = min(len(front), MOST_BACKBONES)
    return [front[n * (len(front) - 1) // max(1, count - 1)] for n in range(count)]


@dataclass(frozen=True, slots=True)
class _Split:
    """Experts on devices, with one of them the backbone: its place among `devices`, how many it holds, and the workers'
    places and counts, nearest first, those that hold none left out. `left`: experts without a place."""

    backbone: int
    local: int
    workers: tuple[int, ...]
    counts: tuple[int, ...]
    left: int
    layers: tuple[tuple[float, int], ...]
    step_s: float


class _Swarm:
    """Devices, and what is the same of them whichever is the backbone."""

    def __init__(self, needs: ModelNeeds, devices: Sequence[Device], other: int) -> None:
        self._needs, self._devices, self._other = needs, devices, other
        self._total = needs.experts_in_all
        self._rooms = [device.usable // needs.expert_bytes for device in devices]
        order = sorted(range(len(devices)), key=lambda n: -devices[n].memory)
        self._largest_first = order
        self._nearest_first = sorted(order, key=lambda n: devices[n].rtt_s)

    def _workers(self, backbone: int) -> list[int]:
        """Nearest first, larger ones before smaller ones; those nearer than the backbone are all as far as it is."""
        rtt_s = self._devices[backbone].rtt_s
        near = [n for n in self._largest_first if n != backbone and self._devices[n].rtt_s <= rtt_s]
        return near + [n for n in self._nearest_first if self._devices[n].rtt_s > rtt_s]

    def split(self, backbone: int) -> _Split:
        """Whole layers on the backbone, the others on the workers."""
        needs, total = self._needs, self._total
        room = (self._devices[backbone].usable - self._other) // needs.expert_bytes
        at_home = min(needs.n_sites, ((room + 1) * needs.n_sites - 1) // total)  # a layer is when all of it is
        local = total * at_home // needs.n_sites
        workers = self._workers(backbone)
        rtts = [_between(self._devices[backbone], self._devices[n]) for n in workers]
        counts = _spread([self._rooms[n] for n in workers], rtts, total - local)
        left = total - local - sum(counts)
        if left > 0:  # what no worker has room for fills up the backbone, though no whole layer
            local += min(room - local, left)
            left = total - local - sum(counts)
        used = [n for n, count in enumerate(counts) if count]
        layers = _layers(needs, [counts[n] for n in used], [rtts[n] for n in used], at_home)
        return _Split(
            backbone=backbone,
            local=local,
            workers=tuple(workers[n] for n in used),
            counts=tuple(counts[n] for n in used),
            left=max(0, left),
            layers=tuple(layers),
            step_s=_step_s(needs, layers),
        )

    def preferred(self, split: _Split) -> tuple[float, ...]:
        """The least of these is the best."""
        backbone = self._devices[split.backbone]
        return split.left, split.step_s, backbone.rtt_s, backbone.memory

    def plan(self, split: _Split, context: int, memory: BackboneMemory) -> SwarmPlan:
        """All that is said of a split."""
        needs, size, layers = self._needs, self._needs.expert_bytes, split.layers
        backbone = self._devices[split.backbone]
        held = dict(zip(split.workers, split.counts, strict=True))
        shares = [
            Share(
                backbone,
                True,
                split.local,
                split.local * size,
                self._other,
                backbone.usable - self._other - split.local * size,
            )
        ]
        for n in self._workers(split.backbone):
            device, count = self._devices[n], held.get(n, 0)
            shares.append(Share(device, False, count, count * size, 0, device.usable - count * size))
        spare = backbone.usable - self._other
        capacity = spare // size + sum(self._rooms) - self._rooms[split.backbone]
        memories = Counter(device.memory for device in self._devices)
        alike = max(self._devices, key=lambda device: memories[device.memory])
        more = math.ceil(split.left / (alike.usable // size)) if split.left and alike.usable >= size else 0
        return SwarmPlan(
            needs=needs,
            context=context,
            fits=not split.left,
            backbone=memory,
            shares=tuple(shares),
            missing=split.left * size,
            missing_what="experts",
            more_devices=more,
            backbone_device=_least_device(self._other),
            alike=alike,
            longest_context=_longest_context(needs, min(spare, (capacity - self._total) * size), context),
            copies=capacity / self._total,
            trips=len(layers),
            given=Speed(max((rtt for rtt, _ in layers), default=0.0), _rates(needs, layers)),
            speeds=tuple(Speed(rtt, _rates(needs, [(rtt, ways) for _, ways in layers])) for rtt in DISTANCES_S),
            remote=tuple(remote_speed(needs, rtt_s) for rtt_s in DISTANCES_S),
            token_bytes=sum(ways for _, ways in layers) * (needs.d_in + needs.d_out) * F16_BYTES,
        )


def _between(backbone: Device, worker: Device) -> float:
    """Either may be the far one."""
    return max(backbone.rtt_s, worker.rtt_s)


def _spread(rooms: Sequence[int], rtts: Sequence[float], wanted: int) -> list[int]:
    """How many of `wanted` experts each worker gets: groups of the same distance, nearest first, by their room."""
    counts = [0] * len(rooms)
    at = 0
    while at < len(rooms) and wanted > 0:
        end = at + 1
        while end < len(rooms) and rtts[end] <= ALIKE * rtts[at]:
            end += 1
        room = sum(rooms[at:end])
        given = min(wanted, room)
        rest = given
        for n in range(at, end):
            counts[n] = min(rooms[n], given * rooms[n] // room if room else 0)
            rest -= counts[n]
        for n in range(at, end):  # what rounding left over
            more = min(rest, rooms[n] - counts[n])
            counts[n] += more
            rest -= more
        wanted -= given
        at = end
    return counts


def _layers(needs: ModelNeeds, counts: Sequence[int], rtts: Sequence[float], at_home: int) -> list[tuple[float, int]]:
    """(round trip, workers asked) of each layer that is not at home, layer after layer filled from the nearest worker.

    A layer is asked of every worker that holds some of it, as far as a token's experts can be on so many. Layers have
    their share of all experts each, whatever the real ones differ by.
    """
    total = needs.experts_in_all
    owners: list[tuple[float, int]] = []
    worker, used = 0, 0
    for layer in range(at_home, needs.n_sites):
        need = total * (layer + 1) // needs.n_sites - total * layer // needs.n_sites
        rtt, ways = 0.0, 0
        while need and worker < len(counts):
            took = min(need, counts[worker] - used)
            if took:
                rtt, ways = max(rtt, rtts[worker]), ways + 1
            need, used = need - took, used + took
            if used >= counts[worker]:
                worker, used = worker + 1, 0
        owners.append((rtt, max(1, min(ways, needs.n_used))))
    return owners


def _step_s(needs: ModelNeeds, layers: Sequence[tuple[float, int]]) -> float:
    """Seconds of a step. Layers at home are read by the backbone as its dense weights are."""
    routed = needs.n_used * needs.expert_bytes
    step = sum(rtt + SITE_S + routed / ways / MEMORY_RATE for rtt, ways in layers)
    at_home = needs.n_sites - len(layers)
    return step + needs.n_layers * LAYER_S + (needs.dense_bytes + at_home * routed) / MEMORY_RATE


def _rates(needs: ModelNeeds, layers: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """Tokens/s for each of ACCEPTED."""
    return tuple(accepted / _step_s(needs, layers) for accepted in ACCEPTED)


def remote_speed(needs: ModelNeeds, rtt_s: float) -> Speed:
    """With every expert so far away, each layer's on one worker."""
    return Speed(rtt_s, _rates(needs, [(rtt_s, 1)] * needs.n_sites))


def _least_device(usable: int) -> int:
    """The memory of a device that has so much to give, in whole GiB."""
    own = usable + PROCESS_BYTES
    return math.ceil(max(own + RESERVE, own / (1 - RESERVE_SHARE)) / GIB) * GIB


def _longest_context(needs: ModelNeeds, spare: int, context: int) -> int:
    """How long a context could be with so many bytes more; no longer than the model was trained for."""
    per_token = needs.kv_bytes_per_token + BATCH * F32_BYTES
    longest = context + max(0, spare) // per_token
    return min(longest, needs.context_length) if needs.context_length else longest


def recommended(needs: ModelNeeds, memory: int, context: int, *, most: int = 1024) -> int:
    """How many devices of this much memory run a model; 0 where not even its backbone fits, or more than `most`."""
    device = Device("", memory, 0.0)
    room = device.usable - (memory_of(needs, context).total - PROCESS_BYTES)
    if room < 0 or device.usable < needs.expert_bytes:
        return 0
    left = needs.experts_in_all - room // needs.expert_bytes
    count = 1 + max(0, math.ceil(left / (device.usable // needs.expert_bytes)))
    return count if count <= most else 0


def _no_backbone(
    needs: ModelNeeds, devices: Sequence[Device], context: int, memory: BackboneMemory, other: int
) -> SwarmPlan:
    largest = max(devices, key=lambda device: device.usable)
    without_context = memory_of(needs, 1).total - PROCESS_BYTES
    spare = largest.usable - without_context
    slope = (other - without_context) / max(context - 1, 1)
    nothing = Speed(0.0, tuple(0.0 for _ in ACCEPTED))
    return SwarmPlan(
        needs=needs,
        context=context,
        fits=False,
        backbone=memory,
        shares=(),
        missing=other - largest.usable,
        missing_what="backbone",
        more_devices=0,
        backbone_device=_least_device(other),
        alike=largest,
        longest_context=max(0, int(spare / slope)) if slope > 0 else 0,
        copies=0.0,
        trips=needs.n_sites,
        given=nothing,
        speeds=(),
        remote=tuple(remote_speed(needs, rtt_s) for rtt_s in DISTANCES_S),
        token_bytes=needs.n_sites * (needs.d_in + needs.d_out) * F16_BYTES,
    )
