"""What the router has chosen lately: per site how often each expert, which experts together, and a sample of choices.

Pure. `note` is called on the decode thread, once for each call of a site; everything else belongs to the planner and
reads a copy. There is one writer; a reader at the same moment sees some of the newest counts and not others, which
no figure here depends on. Counts are halved every `half_life` tokens of their site, so that placement follows what
is generated now.

File (`to_bytes`), little-endian; everything after the sizes is bounded by the model that the reader knows:
  "SRS1", half_life f64, sites u32; per site: index u32, n_expert u32, n_used u32, tokens f64, seen u64, samples u32,
  paired u8, pair scale f32, weights f32[n_expert], where paired: pairs above the diagonal, in units of the scale,
  f16[n_expert·(n_expert−1)/2], samples u16[samples, n_used];  CRC-32 of all before, u32.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swarmnode.errors import BadPlacement

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]

HALF_LIFE = 20_000.0  # tokens: an evening's conversation, long enough for the tail of 256 experts to be seen
FOLD = 64  # tokens gathered before they are counted: the cost of counting is shared by as many calls
SAMPLES = 4096  # choices remembered per site: what joint probabilities are estimated from
MAX_STRIDE = 8  # at most one in so many tokens is kept, so that the sample reaches SAMPLES × this back
MAX_PAIRED = 1024  # experts up to which pairs are counted: 4 MB per site
MAX_EXPERTS = 1 << 16
MAX_USED = 64
_RESCALE_AT = 1024.0  # float32 counts stay exact enough up to here
_MAGIC = b"SRS1"
_HEAD = struct.Struct("<4sdI")
_SITE = struct.Struct("<IIIdQIBf")


@dataclass(slots=True)
class _Counts:
    """Counts in units of `unit`, which grows instead of all counts being made smaller."""

    weights: F64
    pairs: NDArray[np.float32] | None  # flat [n × n], the diagonal holds the weights
    unit: float = 1.0
    tokens: float = 0.0


@dataclass(slots=True)
class _Site:
    n_expert: int
    counts: _Counts
    n_used: int = 0  # 0 until the first call
    seen: int = 0  # tokens, without decay
    kept: int = 0  # samples ever written
    samples: NDArray[np.uint16] = field(default_factory=lambda: np.empty((0, 0), np.uint16))
    waiting: list[I32] = field(default_factory=list)
    n_waiting: int = 0


class RoutingStats:
    """See the module. `sites` is site index → number of experts."""

    def __init__(self, sites: Mapping[int, int], half_life: float = HALF_LIFE) -> None:
        if not (math.isfinite(half_life) and half_life >= 1):
            raise BadPlacement(f"half-life {half_life} is out of range: give at least one token")
        self._half_life = half_life
        self._sites: dict[int, _Site] = {}
        for site, n in sites.items():
            if not 1 <= n <= MAX_EXPERTS:
                raise BadPlacement(f"site {site} has {n} experts: 1 to {MAX_EXPERTS} are possible")
            pairs = np.zeros(n * n, np.float32) if n <= MAX_PAIRED else None
            self._sites[site] = _Site(n, _Counts(np.zeros(n), pairs))

    def note(self, site: int, ids: I32) -> None:
        """Count a call: ids [n_tokens, n_used]. Never raises; what does not fit the model is left out."""
        state = self._sites.get(site)
        if state is None or ids.ndim != 2:
            return
        state.waiting.append(ids.copy())
        state.n_waiting += len(ids)
        if state.n_waiting >= FOLD:
            self._fold(state)

    def flush(self) -> None:
        """Count what still waits to be counted (fewer than FOLD tokens per site). The writer's thread."""
        for state in self._sites.values():
            self._fold(state)

    def weights(self, site: int) -> F64:
        """How often each expert was chosen, decayed: float64[n_expert]."""
        counts = self._site(site).counts
        return counts.weights / counts.unit

    def pairs(self, site: int) -> F64 | None:
        """How often two experts were chosen for one token, decayed: symmetric float64[n_expert, n_expert], diagonal 0.

        None for a site of more than MAX_PAIRED experts.
        """
        state = self._site(site)
        counts = state.counts
        if counts.pairs is None:
            return None
        pairs = counts.pairs.reshape(state.n_expert, -1).astype(np.float64)
        np.fill_diagonal(pairs, 0.0)
        return pairs / counts.unit

    def tokens(self, site: int) -> float:
        """How many tokens the counts of a site stand for, decayed."""
        counts = self._site(site).counts
        return counts.tokens / counts.unit

    def samples(self, site: int) -> I32:
        """Up to SAMPLES of the latest choices: int32[m, n_used], in no order."""
        state = self._site(site)
        return state.samples[: min(state.kept, SAMPLES)].astype(np.int32)

    def _site(self, site: int) -> _Site:
        if site not in self._sites:
            raise BadPlacement(f"there are no routing statistics of site {site}")
        return self._sites[site]

    def _fold(self, state: _Site) -> None:
        waiting, state.waiting, state.n_waiting = state.waiting, [], 0
        n, n_used = state.n_expert, state.n_used
        if not n_used:
            n_used = waiting[0].shape[1] if waiting else 0
            if not 1 <= n_used <= MAX_USED:
                return
            state.n_used, state.samples = n_used, np.empty((SAMPLES, n_used), np.uint16)
        fitting = [ids for ids in waiting if ids.shape[1] == n_used]
        if not fitting:
            return
        ids = np.concatenate(fitting).astype(np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= n):
            ids = ids[((ids >= 0) & (ids < n)).all(axis=1)]
        if not len(ids):
            return
        counts = state.counts
        if counts.unit > _RESCALE_AT:
            pairs = None if counts.pairs is None else counts.pairs / np.float32(counts.unit)
            counts = _Counts(counts.weights / counts.unit, pairs, 1.0, counts.tokens / counts.unit)
        grown = counts.unit * 2.0 ** (min(len(ids), 64 * self._half_life) / self._half_life)
        if grown > 2.0**60:  # so many tokens at once that nothing older counts
            counts = _Counts(np.zeros(n), None if counts.pairs is None else np.zeros(n * n, np.float32))
            grown = 1.0
        counts.unit = grown
        counts.tokens += grown * len(ids)
        counts.weights += np.bincount(ids.reshape(-1), minlength=n) * grown
        if counts.pairs is not None:
            cells = (ids[:, :, None] * n + ids[:, None, :]).reshape(-1)
            np.add.at(counts.pairs, cells, np.float32(grown))
        state.counts = counts
        self._sample(state, ids)

    @staticmethod
    def _sample(state: _Site, ids: NDArray[np.int64]) -> None:
        stride = min(MAX_STRIDE, 1 + state.seen // SAMPLES)
        chosen = ids[-state.seen % stride :: stride][-SAMPLES:]
        state.samples[(state.kept + np.arange(len(chosen))) % SAMPLES] = chosen
        state.kept += len(chosen)
        state.seen += len(ids)

    def to_bytes(self) -> bytes:
        """Everything counted so far, for `from_bytes`. See the module for the layout."""
        out = [_HEAD.pack(_MAGIC, self._half_life, len(self._sites))]
        for index, state in self._sites.items():
            samples = self.samples(index).astype("<u2")
            upper = np.empty(0)
            if (pairs := self.pairs(index)) is not None:
                upper = pairs[np.triu_indices(state.n_expert, 1)]
            scale = float(upper.max(initial=0.0)) or 1.0
            out.append(
                _SITE.pack(
                    index,
                    state.n_expert,
                    state.n_used,
                    self.tokens(index),
                    state.seen,
                    len(samples),
                    pairs is not None,
                    scale,
                )
            )
            out += [self.weights(index).astype("<f4").tobytes(), (upper / scale).astype("<f2").tobytes()]
            out.append(samples.tobytes())
        data = b"".join(out)
        return data + struct.pack("<I", zlib.crc32(data))

    @classmethod
    def from_bytes(cls, data: bytes, sites: Mapping[int, int]) -> RoutingStats:
        """The statistics that `to_bytes` wrote for a model of these sites. Raises BadPlacement for anything else."""
        if len(data) < _HEAD.size + 4 or data[:4] != _MAGIC:
            raise BadPlacement("these are no routing statistics, or those of another version")
        if zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            raise BadPlacement("the routing statistics are damaged: wrong checksum")
        _, half_life, count = _HEAD.unpack_from(data)
        if count != len(sites):
            raise BadPlacement(f"the routing statistics have {count} sites, the model {len(sites)}")
        stats = cls(sites, half_life)
        reader = _Reader(memoryview(data)[:-4], _HEAD.size)
        for _ in range(count):
            stats._read_site(reader)
        if reader.at != len(data) - 4:
            raise BadPlacement("the routing statistics have bytes left over")
        return stats

    def _read_site(self, reader: _Reader) -> None:
        index, n, n_used, tokens, seen, n_samples, paired, scale = reader.head()
        state = self._sites.get(index)
        if state is None or state.n_expert != n or state.kept or state.counts.tokens:
            raise BadPlacement(f"the routing statistics name site {index} with {n} experts, which the model has not")
        known = 1 <= n_used <= MAX_USED if n_samples else 0 <= n_used <= MAX_USED
        figures = math.isfinite(tokens) and tokens >= 0 and math.isfinite(scale) and scale > 0
        if not (known and figures and n_samples <= SAMPLES and paired == (n <= MAX_PAIRED) and seen < 1 << 62):
            raise BadPlacement(f"the routing statistics of site {index} are damaged")
        weights = reader.array("<f4", n).astype(np.float64)
        upper = reader.array("<f2", n * (n - 1) // 2 if paired else 0).astype(np.float64) * scale
        samples = reader.array("<u2", n_samples * n_used).reshape(n_samples, n_used)
        numbers = (weights, upper)
        if any(not np.isfinite(a).all() or a.min(initial=0) < 0 for a in numbers) or samples.max(initial=0) >= n:
            raise BadPlacement(f"the routing statistics of site {index} are damaged")
        counts = state.counts
        counts.weights, counts.tokens = weights, tokens
        if counts.pairs is not None:
            square = np.zeros((n, n), np.float32)
            square[np.triu_indices(n, 1)] = np.minimum(upper, np.finfo(np.float32).max)
            counts.pairs = (square + square.T + np.diag(weights.astype(np.float32))).reshape(-1)
        state.n_used, state.seen, state.kept = n_used, seen, n_samples
        if n_used:
            state.samples = np.empty((SAMPLES, n_used), np.uint16)
            state.samples[:n_samples] = samples


class _Reader:
    """Takes bounded pieces off a file."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self.at = data, at

    def head(self) -> tuple[int, int, int, float, int, int, int, float]:
        return _SITE.unpack(self._take(_SITE.size))

    def array(self, dtype: str, count: int) -> NDArray[np.float32]:
        return np.frombuffer(self._take(np.dtype(dtype).itemsize * count), dtype)

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self.at:
            raise BadPlacement("the routing statistics are cut off")
        self.at += size
        return self._data[self.at - size : self.at]
