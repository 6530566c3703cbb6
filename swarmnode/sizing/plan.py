"""Can these devices run that model? Who would be the backbone, who holds how many experts, how fast it could be.

Pure arithmetic with the planner's rules (`placement/planner.py`), which itself takes minutes for a model of 80,000
experts: every expert is held; the backbone's own memory goes to whole layers, which then cost no round trip; near
devices before far ones; whole layers on one device; copies with what is left. A test holds it to the planner.

What is kept free (`usable`): a tenth of a device's memory and at least RESERVE for its system, and what a node's
process takes. Times: the round trip, some time per layer for frames and hook, and reading the weights that a token
touches at MEMORY_RATE; computing itself is less than reading them. Called by `swarmnode plan` and the page of models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swarmnode.errors import UsageError
from swarmnode.placement.draft import ALIKE
from swarmnode.sizing.needs import (
    BATCH,
    DEFAULT_SITE_S,
    F16_BYTES,
    F32_BYTES,
    PROCESS_BYTES,
    BackboneMemory,
    ModelNeeds,
    memory_of,
)

GIB: Final = 1 << 30
RESERVE: Final = 3 * GIB // 2  # what a system without other work needs
RESERVE_SHARE: Final = 0.1
MEMORY_RATE: Final = 40e9  # bytes/s that an ordinary desktop reads of its memory; a laptop 20, an Apple M Max 300
LAYER_S: Final = 0.0002  # of each layer on the backbone, however small: its many small operations
DISTANCES_S: Final = (0.020, 0.080, 0.100)  # a town, a continent, the roadmap's
ACCEPTED: Final = (1.0, 1.2, 2.0)  # tokens per step: no drafts, weak guesses, good ones
PROMPT: Final = 1000  # tokens, of the prefill's bytes
MAX_DEVICES: Final = 4096
MAX_MEMORY: Final = 1 << 50
MAX_RTT_S: Final = 60.0

_DEVICE = re.compile(
    r"(?:(?P<count>[0-9]{1,5})\s*[x×*]\s*)?(?P<size>[0-9]{1,12}(?:\.[0-9]{1,3})?)\s*(?P<unit>[kmgt]?)i?b?"
    r"(?:\s*@\s*(?P<rtt>[0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(?P<scale>ms|s)?)?",
    re.IGNORECASE,
)
_SYNTAX = "give a number and a size, such as 3x32G, 64G or 2x16G@80ms"


@dataclass(frozen=True, slots=True)
class Device:
    """A machine that may take part: its whole memory, bytes, and the round trip between it and the others."""

    name: str
    memory: int
    rtt_s: float

    @property
    def usable(self) -> int:
        """Bytes for a model, with its node's process taken off."""
        return max(0, self.memory - max(RESERVE, int(self.memory * RESERVE_SHARE)) - PROCESS_BYTES)


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


def parse_devices(texts: Sequence[str], rtt_s: float) -> tuple[Device, ...]:
    """Devices from texts such as "3x32G", "64G@20ms"; `rtt_s` where a text names no round trip.

    G is 2^30, as in `up --memory`. Raises UsageError for what cannot be meant.
    """
    found: list[Device] = []
    for text in texts:
        for part in text.split(","):
            found += _devices(part.strip(), rtt_s, len(found))
            if len(found) > MAX_DEVICES:
                raise UsageError(f"--devices: {len(found)} devices; {MAX_DEVICES} at most are planned for")
    if not found:
        raise UsageError(f"no devices: {_SYNTAX}")
    return tuple(found)


def _devices(text: str, rtt_s: float, before: int) -> list[Device]:
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise UsageError(f"--devices {text[:40]!r}: {_SYNTAX}")
    count = int(match["count"] or 1)
    memory = int(float(match["size"]) * 1024 ** " kmgt".index((match["unit"] or " ").lower()))
    if match["rtt"] is not None:
        rtt_s = float(match["rtt"]) / (1 if (match["scale"] or "ms").lower() == "s" else 1000)
    if not 1 <= count <= MAX_DEVICES:
        raise UsageError(f"--devices {text[:40]!r}: {count} devices; 1 to {MAX_DEVICES} can be planned for")
    if not 1 << 20 <= memory <= MAX_MEMORY:
        raise UsageError(f"--devices {text[:40]!r}: that much memory cannot be meant; {_SYNTAX}")
    if rtt_s > MAX_RTT_S:
        raise UsageError(f"--devices {text[:40]!r}: a round trip of {rtt_s:g} s is no connection")
    return [Device(f"device {before + n + 1}", memory, rtt_s) for n in range(count)]


def make_plan(needs: ModelNeeds, devices: Sequence[Device], context: int) -> SwarmPlan:
    """Put a model on devices; `context` in tokens, of one generation at a time. At least one device is needed.

    The backbone is the device with which a token takes least, among those that can be it. Where none can, or experts
    are left over, `fits` is False and the rest says what is missing.
    """
    memory = memory_of(needs, context)
    other = memory.total - PROCESS_BYTES  # a device's `usable` is without it already
    kinds = {(device.memory, device.rtt_s): device for device in reversed(devices)}  # the first of each kind
    able = [device for device in kinds.values() if device.usable >= other]
    if not able:
        return _no_backbone(needs, devices, context, memory, other)
    plans = [_with_backbone(needs, devices, device, context, memory, other) for device in able]
    return min(plans, key=_preferred)


def _preferred(plan: SwarmPlan) -> tuple[float, ...]:
    backbone = plan.shares[0].device
    return plan.missing, -plan.given.tokens_s[0], backbone.rtt_s, backbone.memory


def _with_backbone(
    needs: ModelNeeds,
    devices: Sequence[Device],
    backbone: Device,
    context: int,
    memory: BackboneMemory,
    other: int,
) -> SwarmPlan:
    size = needs.expert_bytes
    total = needs.n_sites * needs.n_expert
    at = devices.index(backbone)
    workers = sorted((d for n, d in enumerate(devices) if n != at), key=lambda d: (_between(backbone, d), -d.memory))
    room = (backbone.usable - other) // size
    local = min(room, total)
    if local < total:  # a layer is at home when all of it is
        local = local // needs.n_expert * needs.n_expert
    at_home = local // needs.n_expert
    counts = _spread([d.usable // size for d in workers], [_between(backbone, d) for d in workers], total - local)
    left = total - local - sum(counts)
    if left > 0:  # what no worker has room for fills up the backbone, though no whole layer
        local += min(room - local, left)
        left = total - local - sum(counts)
    shares = (
        Share(backbone, True, local, local * size, other, backbone.usable - other - local * size),
        *(Share(d, False, n, n * size, 0, d.usable - n * size) for d, n in zip(workers, counts, strict=True)),
    )
    capacity = room + sum(d.usable // size for d in workers)
    layers = _layers(needs, counts, [_between(backbone, d) for d in workers], at_home)
    alike = max(devices, key=lambda d: sum(other.memory == d.memory for other in devices))
    return SwarmPlan(
        needs=needs,
        context=context,
        fits=left <= 0,
        backbone=memory,
        shares=shares,
        missing=max(0, left) * size,
        missing_what="experts",
        more_devices=math.ceil(left / (alike.usable // size)) if left > 0 and alike.usable >= size else 0,
        backbone_device=_least_device(other),
        alike=alike,
        longest_context=_longest_context(needs, min(backbone.usable - other, (capacity - total) * size), context),
        copies=capacity / total,
        trips=len(layers),
        given=Speed(max((rtt for rtt, _ in layers), default=0.0), _rates(needs, layers)),
        speeds=tuple(Speed(rtt, _rates(needs, [(rtt, ways) for _, ways in layers])) for rtt in DISTANCES_S),
        remote=_remote(needs),
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

    A layer is asked of every worker that holds some of it, as far as a token's experts can be on so many.
    """
    owners: list[tuple[float, int]] = []
    worker, used = 0, 0
    for _ in range(needs.n_sites - at_home):
        need, rtt, ways = needs.n_expert, 0.0, 0
        while need and worker < len(counts):
            took = min(need, counts[worker] - used)
            if took:
                rtt, ways = max(rtt, rtts[worker]), ways + 1
            need, used = need - took, used + took
            if used >= counts[worker]:
                worker, used = worker + 1, 0
        owners.append((rtt, max(1, min(ways, needs.n_used))))
    return owners


def _rates(needs: ModelNeeds, layers: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """Tokens/s for each of ACCEPTED. Layers at home are read by the backbone as its dense weights are."""
    routed = needs.n_used * needs.expert_bytes
    step = sum(rtt + DEFAULT_SITE_S + routed / ways / MEMORY_RATE for rtt, ways in layers)
    at_home = needs.n_sites - len(layers)
    step += needs.n_layers * LAYER_S + (needs.dense_bytes + at_home * routed) / MEMORY_RATE
    return tuple(accepted / step for accepted in ACCEPTED)


def _least_device(usable: int) -> int:
    """The memory of a device that has so much to give, in whole GiB."""
    own = usable + PROCESS_BYTES
    return math.ceil(max(own + RESERVE, own / (1 - RESERVE_SHARE)) / GIB) * GIB


def _remote(needs: ModelNeeds) -> tuple[Speed, ...]:
    """With every expert elsewhere, each layer's on one worker."""
    layers = [(0.0, 1)] * needs.n_sites
    return tuple(Speed(rtt, _rates(needs, [(rtt, ways) for _, ways in layers])) for rtt in DISTANCES_S)


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
    left = needs.n_sites * needs.n_expert - room // needs.expert_bytes
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
        remote=_remote(needs),
        token_bytes=needs.n_sites * (needs.d_in + needs.d_out) * F16_BYTES,
    )
