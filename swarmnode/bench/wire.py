"""`bench wire`: the bytes that one token of one MoE layer costs on the wire, by model, number of workers and wire type.

    payload    the CALL and ANSWER frames of all workers that the token's experts live on: encoded by the product's own
               code, mean over tokens that are routed at random to experts spread evenly over the workers
    wire       the same round trips between two endpoints over loopback, with a network's datagrams: everything either
               side sends, acknowledgements and credits included, with IPv4's and UDP's headers; each pair of frame
               sizes that occurs is measured
    overhead   how much larger the second is than the first
    datagrams  per token of all workers both ways, acknowledgements included; each costs its headers, and a frame's
               last one is rarely full

"f32 raw" is the baseline: every expert's own row comes back (exact mode), instead of one sum per worker and token. A
worker answers COMPUTE_S after the call, as if it had computed: later than its acknowledgement, so that this costs a
datagram of its own, as it does on a real way.

Not a test of speed. Called by the command line, or alone: `python -m swarmnode.bench.wire [--quick] [--json]
[--model NAME]… [--workers N]…`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, Final

import numpy as np

from swarmnode.bench.carriers.base import HOST
from swarmnode.bench.command import Result, markdown, parser, run_command, show_table
from swarmnode.compute.recipe import Recipe, Site, Step
from swarmnode.dispatch.codec import WireName, WireType, encode_rows
from swarmnode.dispatch.frames import Answer
from swarmnode.dispatch.request import make_request
from swarmnode.errors import UsageError
from swarmnode.sizing.shapes import MODELS, ModelShape
from transport.config import TransportConfig
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import ConnectionClosed, TransportError
from transport.identity import Identity
from transport.stream import Stream

NAMES: tuple[WireName, ...] = ("f32", "f16", "int8", "fp8")
RAW: Final = "f32 raw"
WORKERS = tuple(range(1, 9))
QUICK_MODELS, QUICK_WORKERS = ("Qwen3.5-122B", "gpt-oss-120b"), (1, 4)
TOKENS = 2000  # routed at random
HEADERS = 28  # bytes of IPv4 and UDP around each datagram
COMPUTE_S = 0.003
ROUND_TRIPS, WARM_UP = 5, 2  # per pair of sizes; the first ones BATCHES times
BATCHES = 3  # a median of so many: what was lost, or probed for on a busy machine, would count twice
SETTLE_S = 0.06  # longer than an acknowledgement may be held back
LANES = 16  # connections that measure at the same time

AIM = 0.08  # of overhead, at most

Row = dict[str, Any]  # JSON: strings, numbers
Sizes = tuple[int, int]  # bytes of a CALL and of its ANSWER
Cost = tuple[float, float]  # what a round trip takes: bytes, datagrams


@dataclass(frozen=True, slots=True)
class Pair:
    """How x goes out and answers come back; `raw`: a row per expert instead of their sum."""

    out: WireName
    back: WireName
    raw: bool = False


PAIRS = (Pair("f32", "f32", raw=True), *(Pair(out, back) for out, back in product(NAMES, NAMES)))
QUICK_PAIRS = (PAIRS[0], Pair("f32", "f32"), Pair("f16", "f16"), Pair("int8", "f16"), Pair("int8", "int8"))


def run(quick: bool = False, models: Sequence[str] = (), workers: Sequence[int] = ()) -> dict[str, Any]:
    """Measure; `{…, rows: [{model, d, k, workers, out, back, payload_bytes, datagram_bytes, overhead, datagrams}]}`.

    Bytes are per token and layer, means. `models`: names out of MODELS, `workers`: how many, all if empty. Blocks for
    about a minute, with `quick` (two models, five wire pairs) for seconds. Raises UsageError for an unknown model.
    """
    known = [shape.name for shape in MODELS]
    if unknown := set(models) - set(known):
        raise UsageError(f"model {unknown.pop()!r} is unknown; use {', '.join(known)}")
    names = models or (QUICK_MODELS if quick else known)
    shapes = [shape for shape in MODELS if shape.name in names]
    counts = workers or (QUICK_WORKERS if quick else WORKERS)
    cases = [
        (shape, n, pair, _frames(shape, n, pair))
        for shape, n, pair in product(shapes, counts, QUICK_PAIRS if quick else PAIRS)
    ]
    on_wire = asyncio.run(_measure({sizes for *_, frames in cases for sizes in frames}))
    config = TransportConfig()
    return {
        "datagrams": f"{config.datagram_size} bytes of UDP payload and {HEADERS} of headers at most, {config.engine}",
        "assumed": "; ".join(f"{shape.name}: {shape.assumed}" for shape in shapes if shape.assumed) or "nothing",
        "rows": [_row(shape, n, pair, frames, on_wire) for shape, n, pair, frames in cases],
    }


def _row(shape: ModelShape, workers: int, pair: Pair, frames: Counter[Sizes], on_wire: dict[Sizes, Cost]) -> Row:
    payload = sum(sum(sizes) * times for sizes, times in frames.items()) / TOKENS
    on_way = sum(on_wire[sizes][0] * times for sizes, times in frames.items()) / TOKENS
    datagrams = sum(on_wire[sizes][1] * times for sizes, times in frames.items()) / TOKENS
    return {
        "model": shape.name,
        "d": shape.d,
        "k": shape.k,
        "workers": workers,
        "out": pair.out,
        "back": RAW if pair.raw else pair.back,
        "payload_bytes": round(payload),
        "datagram_bytes": round(on_way),
        "overhead": round(on_way / payload - 1, 4),
        "datagrams": round(datagrams, 1),
    }


# -- frames


def _frames(shape: ModelShape, workers: int, pair: Pair) -> Counter[Sizes]:
    """How often each pair of frame sizes occurs among TOKENS tokens."""
    found: Counter[Sizes] = Counter()
    for (n, narrow), times in _shares(shape, workers).items():
        found[_sizes(shape, n, narrow, pair)] += times
    return found


@cache
def _shares(shape: ModelShape, workers: int) -> Counter[tuple[int, bool]]:
    """How often a worker is asked for how many experts of a token, and whether all their numbers fit one byte."""
    chosen = np.argsort(np.random.default_rng(7).random((TOKENS, shape.n_expert)), axis=1)[:, : shape.k]
    found: Counter[tuple[int, bool]] = Counter()
    for token in chosen.tolist():
        shares: dict[int, list[int]] = {}
        for expert in token:
            shares.setdefault(expert * workers // shape.n_expert, []).append(expert)
        found.update((len(experts), max(experts) < 256) for experts in shares.values())
    return found


@cache
def _sizes(shape: ModelShape, n: int, narrow: bool, pair: Pair) -> Sizes:
    """The bytes of a CALL for n experts of one token, and of its ANSWER, as the product encodes them."""
    recipe = Recipe((Step("MUL_MAT_ID", ("t0", "x")),), shape.weights)
    site = Site(0, 0, shape.d, shape.d, shape.n_expert, n, ("blk.0.ffn_up_exps.weight",), recipe)
    ids = np.full((1, n), 0 if narrow else shape.n_expert - 1, np.int32)
    rows = np.random.default_rng(n).standard_normal((n, shape.d)).astype(np.float32)
    x = rows if shape.weights == "before" else rows[:1]
    request = make_request(site, x, ids, np.ones((1, n), np.float32), partial=not pair.raw)
    share = request.share(range(n))
    call = share.frame(1, WireType.of(pair.out), WireType.of(pair.back))
    used, data = encode_rows(rows[: share.n_rows_back], WireType.of(pair.back))
    return len(call.encode()), len(Answer(1, used, share.n_rows_back, 0, 0, data).encode())


# -- datagrams


@dataclass(slots=True)
class _RoundTrips:
    """One connection's two ends: the client asks, the server answers after COMPUTE_S."""

    client: Connection
    server: Connection
    asking: Stream
    answering: Stream
    sizes: Sizes = (1, 1)
    _asked: int = 0
    _answered: int = 0
    _done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def begin(self) -> None:
        self.asking.set_receiver(self._on_answer, self._on_end)
        self.answering.set_receiver(self._on_call, lambda _: None)

    def _on_call(self, data: bytes) -> None:
        self._asked += len(data)
        if self._asked >= self.sizes[0]:
            self._asked = 0
            asyncio.get_running_loop().call_later(COMPUTE_S, self._answer, bytes(self.sizes[1]))

    def _answer(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionClosed):  # the measurement was ended while this was waiting
            self.answering.write_nowait(data)

    def _on_answer(self, data: bytes) -> None:
        self._answered += len(data)
        if self._answered >= self.sizes[1] and not self._done.done():
            self._answered = 0
            self._done.set_result(None)

    def _on_end(self, error: TransportError | None) -> None:
        if error is not None and not self._done.done():
            self._done.set_exception(error)

    async def ask(self, times: int) -> None:
        call = bytes(self.sizes[0])
        for _ in range(times):
            self._done = asyncio.get_running_loop().create_future()
            self.asking.write_nowait(call)
            await self._done
        await asyncio.sleep(SETTLE_S)

    def sent(self) -> tuple[int, int]:
        """What both ends have sent so far: bytes, headers included, and datagrams."""
        ends = self.client.stats(), self.server.stats()
        datagrams = sum(end.datagrams_out for end in ends)
        return sum(end.bytes_out for end in ends) + HEADERS * datagrams, datagrams

    async def measure(self, sizes: Sizes) -> Cost:
        """Return what a call of this size and its answer take."""
        self.sizes = sizes
        await self.ask(WARM_UP)
        found: list[Cost] = []
        for _ in range(BATCHES):
            size, count = self.sent()
            await self.ask(ROUND_TRIPS)
            size_after, count_after = self.sent()
            found.append(((size_after - size) / ROUND_TRIPS, (count_after - count) / ROUND_TRIPS))
        return sorted(found)[BATCHES // 2]


async def _measure(wanted: Iterable[Sizes]) -> dict[Sizes, Cost]:
    """Return what each pair of sizes takes on the wire per round trip."""
    config = TransportConfig(port_mapping=False)
    config = replace(config, loopback_datagram_size=config.datagram_size)
    queue, found = sorted(wanted, reverse=True), dict[Sizes, Cost]()

    async def work(round_trips: _RoundTrips) -> None:
        while queue:
            sizes = queue.pop()
            found[sizes] = await round_trips.measure(sizes)

    server = await Endpoint.bind(Identity.generate(), config, listen=(HOST, 0))
    client = await Endpoint.bind(Identity.generate(), config, listen=(HOST, 0))
    async with server, client:
        lanes = [await _connect(client, server, f"wire{i}") for i in range(min(LANES, len(queue)))]
        try:
            async with asyncio.TaskGroup() as tasks:
                for lane in lanes:
                    tasks.create_task(work(lane))
        except ExceptionGroup as lost:
            raise lost.exceptions[0] from None
    return found


async def _connect(client: Endpoint, server: Endpoint, lane: str) -> _RoundTrips:
    ours = await client.dial(server.peer_id, [server.address], lane=lane)
    theirs = await server.accept()
    asking = await ours.open_stream()
    asking.write_nowait(b"?")  # a stream is there when something has come on it
    answering = await theirs.accept_stream()
    await answering.read(1)
    made = _RoundTrips(ours, theirs, asking, answering)
    made.begin()
    return made


# -- for people


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row per model with one worker: bytes in datagrams of some pairs, then the most that any cell has on top, and
    how many cells are above AIM. "" where a pair was not measured."""
    shown = {"f32 raw": ("f32", RAW), "f16": ("f16", "f16"), "int8/f16": ("int8", "f16"), "int8": ("int8", "int8")}
    made = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        single = {(row["out"], row["back"]): row["datagram_bytes"] for row in of_model if row["workers"] == 1}
        made.append({
            "model": model,
            "d": of_model[0]["d"],
            "top": of_model[0]["k"],
            **{name: f"{single[pair]:,}" if pair in single else "" for name, pair in shown.items()},
            "most on top": f"{max(row['overhead'] for row in of_model):.1%}",
            f"cells above {AIM:.0%}": f"{sum(row['overhead'] > AIM for row in of_model)} of {len(of_model)}",
        })  # fmt: skip
    return made


def above_aim(rows: Sequence[Row]) -> list[Row]:
    """A row per model that has cells with more overhead than AIM: which, and where the worst one's comes from, which is
    how little a datagram carries of what it could, since each costs the same."""
    made = []
    above = [row for row in rows if row["overhead"] > AIM]
    for model in dict.fromkeys(row["model"] for row in above):
        of_model = [row for row in above if row["model"] == model]
        worst = max(of_model, key=lambda row: float(row["overhead"]))
        made.append({
            "model": model,
            "d": worst["d"],
            "workers": ", ".join(str(count) for count in sorted({row["workers"] for row in of_model})),
            "out / back": ", ".join(dict.fromkeys(f"{row['out']}/{row['back']}" for row in of_model)),
            "most on top": f"{worst['overhead']:.1%}",
            "datagrams": worst["datagrams"],
            "payload in each": round(worst["payload_bytes"] / worst["datagrams"]),
            "on top of each": round((worst["datagram_bytes"] - worst["payload_bytes"]) / worst["datagrams"]),
        })  # fmt: skip
    return made


def _show(result: Result, given: argparse.Namespace) -> None:
    if not given.summary:
        show_table(result, given)
        return
    print(markdown(summary(result["rows"])))
    print(markdown(above_aim(result["rows"])), end="")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, the summary as Markdown with --summary, or with --json the data."""
    made = parser("wire", __doc__)
    made.add_argument("--quick", action="store_true", help="two models, five pairs of wire types")
    made.add_argument("--model", action="append", choices=[m.name for m in MODELS], help="only this one (repeatable)")
    made.add_argument("--workers", action="append", type=int, choices=WORKERS, help="only so many (repeatable)")
    made.add_argument("--summary", action="store_true", help="a line per model for a page, and what is above the aim")
    return run_command(made, argv, lambda given: run(given.quick, given.model or (), given.workers or ()), _show)


if __name__ == "__main__":
    sys.exit(main())
