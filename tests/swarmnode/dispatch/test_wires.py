"""Wire types between a real client and real workers: per site, per direction, and no lie in them is believed."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from typing import Literal

import numpy as np
import pytest

from swarmnode.dispatch import codec, worker
from swarmnode.dispatch.codec import Buffer, WireName, WireType, rows_size
from swarmnode.dispatch.frames import Answer, CallFrame, Refuse, RefuseCode
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.request import make_request
from swarmnode.errors import DispatchError
from tests.swarmnode.dispatch.samples import D_IN, D_OUT, SITES, everything, local_rows, make_input, make_site
from tests.swarmnode.dispatch.swarm import Behaviour, swarm
from tests.swarmnode.dispatch.test_worker import RawClient
from transport.stream import Stream

ALL = everything()
NAMES: tuple[WireName, ...] = ("f32", "f16", "int8", "fp8")
TOLERANCE = {"f32": 1e-5, "f16": 5e-3, "int8": 0.05, "fp8": 0.2}  # of the largest value


@pytest.mark.parametrize(("out", "back"), list(itertools.product(NAMES, NAMES)))
@pytest.mark.parametrize("mode", ["exact", "partial"])
async def test_every_pair_of_types_brings_the_same_value(
    mode: Literal["exact", "partial"], out: WireName, back: WireName
) -> None:
    async with swarm(DispatchOptions(mode=mode, wire_out=out, wire_back=back)) as s:
        await s.add(ALL)
        for site in SITES:
            for n in (1, 5):
                x, ids, weights = make_input(site, n)
                rows = await s.call(site.index, x, ids, weights)
                expected = local_rows(site, x, ids, weights)
                error = np.abs(rows - expected).max() / np.abs(expected).max()
                assert error <= TOLERANCE[out] + TOLERANCE[back]


async def test_each_site_has_its_own_types() -> None:
    asked: dict[int, tuple[int, int]] = {}

    def behave(frame: CallFrame, stream: Stream) -> None:
        asked[frame.site] = (frame.wire_out, frame.wire_back)
        stream.write_nowait(Answer(frame.id, 0, 1, 0, 0, bytes(4 * D_OUT)).encode())

    options = DispatchOptions(
        mode="partial", wire_out="int8", wire_back="f16", site_wires={1: ("fp8", "int8"), 2: ("f32", "f32")}
    )
    async with swarm(options) as s:
        await s.add_scripted(ALL, behave)
        for site in SITES:
            await s.call(site.index, *make_input(site, 1))
    assert asked == {0: (2, 1), 1: (3, 2), 2: (0, 0)}


def answer_with(wire: WireType, scale: int, code: int) -> Behaviour:
    """A worker whose rows all have this scale and this code."""

    def behave(frame: CallFrame, stream: Stream) -> None:
        scales = np.full(frame.n_pairs, scale, "<u2").tobytes()
        rows = scales + bytes([code]) * (frame.n_pairs * D_OUT)
        stream.write_nowait(Answer(frame.id, wire, frame.n_pairs, 0, 0, rows).encode())

    return behave


@pytest.mark.parametrize(
    ("wire", "scale", "code"),
    [
        (WireType.INT8, 0x7F80, 1),
        (WireType.INT8, 0x7FC0, 1),
        (WireType.INT8, 0xBF80, 1),
        (WireType.INT8, 0x7F7F, 127),
        (WireType.FP8, 0x7FC0, 1),
        (WireType.FP8, 0x3F80, 0x7F),
        (WireType.FP8, 0x3F80, 0xFF),
    ],
)
async def test_an_answer_that_cannot_be_is_nobodys_rows(wire: WireType, scale: int, code: int) -> None:
    name: WireName = "int8" if wire is WireType.INT8 else "fp8"
    async with swarm(DispatchOptions(wire_back=name)) as s:
        await s.add_scripted(ALL, answer_with(wire, scale, code))
        with pytest.raises(DispatchError, match=r"rows with"):
            await s.check()
        [view] = s.client.workers()
        assert view.failures >= 1
        assert f"{wire.name} rows with" in view.last_fault


async def test_an_answer_in_a_coarser_type_than_was_asked_for_is_refused() -> None:
    async with swarm(DispatchOptions(wire_back="f16")) as s:
        await s.add_scripted(ALL, answer_with(WireType.INT8, 0x3F80, 1))
        with pytest.raises(DispatchError, match="answered in wire type 2 where F16 was asked for"):
            await s.check()


@pytest.mark.parametrize(
    ("wire", "scale", "code"), [(WireType.INT8, 0xFF80, 1), (WireType.INT8, 0x7F00, 1), (WireType.FP8, 0x3F80, 0x7F)]
)
async def test_a_question_that_cannot_be_is_a_bad_request(wire: WireType, scale: int, code: int) -> None:
    request = make_request(SITES[0], *make_input(SITES[0], 1), partial=False)
    frame = request.share(range(len(request.experts))).frame(1, WireType.F32, wire)
    rows = np.array([scale], "<u2").tobytes() + bytes([code]) * D_IN
    async with swarm() as s:
        member = await s.add(ALL, attach=False)
        client = await RawClient.connect(s, member)
        client.send(dataclasses.replace(frame, wire_out=wire, rows=rows).encode())
        refusal = await client.next()
        assert isinstance(refusal, Refuse)
        assert refusal.code is RefuseCode.BAD_REQUEST
        assert "rows with" in refusal.why
        client.send(dataclasses.replace(frame, id=2, wire_out=wire, rows=bytes(len(rows))).encode())
        answer = await client.next()
        assert isinstance(answer, Answer)
        assert (answer.id, answer.wire) == (2, wire)
        assert len(answer.rows) == rows_size(wire, answer.n_rows, D_OUT)
        assert member.real.stats().refused == {"bad_request": 1}


@pytest.mark.parametrize(("wire", "scale", "code"), [(WireType.INT8, 0xFF80, 1), (WireType.FP8, 0x3F80, 0xFF)])
@pytest.mark.parametrize("n", [1, 512])
async def test_rows_are_judged_once_and_not_on_the_loop(
    n: int, wire: WireType, scale: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the engine is: on the loop only when the call itself runs there, because it is short."""
    judged: list[tuple[int, bool]] = []
    loop_thread = threading.current_thread()

    def check_rows(data: Buffer, wire: WireType, n: int, d: int) -> None:
        if d == D_IN:  # not the answers
            judged.append((n, threading.current_thread() is loop_thread))
        real(data, wire, n, d)

    real = codec.check_rows
    for module in (codec, worker):
        monkeypatch.setattr(module, "check_rows", check_rows, raising=False)
    request = make_request(SITES[0], *make_input(SITES[0], n), partial=True)
    good = request.share(range(len(request.experts))).frame(1, wire, wire)
    rows = bytearray(good.rows)
    rows[2 * (n - 1) : 2 * n], rows[-1] = scale.to_bytes(2, "little"), code
    async with swarm() as s:
        member = await s.add(ALL, attach=False)
        client = await RawClient.connect(s, member)
        client.send(good.encode())
        answer = await client.next()
        assert isinstance(answer, Answer)
        client.send(dataclasses.replace(good, id=2, rows=bytes(rows)).encode())
        refusal = await client.next()
        assert isinstance(refusal, Refuse)
        assert (refusal.id, refusal.code) == (2, RefuseCode.BAD_REQUEST)
        assert f"{wire.name} rows with" in refusal.why
        stats = member.real.stats()
        assert (stats.refused, stats.last_fault, stats.calls) == ({"bad_request": 1}, "", 1)
    assert judged == [(n, False), (n, False)]


@pytest.mark.parametrize("n_expert", [16, 256, 300])
def test_experts_are_one_byte_where_all_of_a_call_fit(n_expert: int) -> None:
    site = make_site(n_expert=n_expert, n_used=2)
    x, _, weights = make_input(site, 1)
    for ids, size in (([3, 15], 1), ([3, n_expert - 1], 1 if n_expert <= 256 else 2)):
        request = make_request(site, x, np.array([ids], np.int32), weights, partial=True)
        frame = request.share(range(2)).frame(1, WireType.F32, WireType.F32)
        assert frame.experts.tolist() == ids
        assert frame.experts.itemsize == size
