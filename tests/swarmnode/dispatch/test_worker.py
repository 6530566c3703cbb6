"""The worker against good, greedy and hostile clients on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading

import numpy as np
import pytest

from swarmnode.compute.null_engine import NullEngine
from swarmnode.dispatch import worker
from swarmnode.dispatch.admission import AdmissionLimits
from swarmnode.dispatch.codec import F32, WireType
from swarmnode.dispatch.engine_times import RECENT
from swarmnode.dispatch.frame_decoder import FrameDecoder
from swarmnode.dispatch.frames import (
    PROTOCOL_VERSION,
    TO_CLIENT,
    Answer,
    CallFrame,
    Cancel,
    Frame,
    Goodbye,
    Hello,
    HoldingsUpdate,
    Refuse,
    RefuseCode,
    Welcome,
)
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.options import DispatchOptions, WorkerOptions
from swarmnode.dispatch.request import I32, make_request
from swarmnode.errors import BadFrame, CallFailed, CallRefused, HelloMismatch
from tests.swarmnode.dispatch.samples import D_IN, D_OUT, MODEL, SITES, everything, full_engine, make_input
from tests.swarmnode.dispatch.swarm import (
    BrokenEngine,
    GatedEngine,
    Holdings,
    Member,
    Swarm,
    eventually,
    stop_sending,
    swarm,
)
from transport.config import TransportConfig
from transport.connection import Connection
from transport.stream import Stream

ALL = everything()


def make_call(call_id: int, site: int = 0, n: int = 1, *, partial: bool = False) -> CallFrame:
    request = make_request(SITES[site], *make_input(SITES[site], n), partial=partial)
    return request.share(range(len(request.experts))).frame(call_id, WireType.F32, WireType.F32)


class RawClient:
    """A client that sends whatever bytes the test likes."""

    def __init__(self, connection: Connection, stream: Stream) -> None:
        self.connection, self.stream = connection, stream
        self._decoder = FrameDecoder(TO_CLIENT)
        self._frames: list[Frame] = []

    @classmethod
    async def connect(
        cls, s: Swarm, member: Member, hello: bytes | None = None, config: TransportConfig | None = None
    ) -> RawClient:
        """A connection of its own to the worker, greeted unless `hello` is other bytes."""
        endpoint = await s.bind(config)
        s.extras.append(endpoint)
        connection = await endpoint.dial(member.endpoint.peer_id, [member.endpoint.address])
        client = cls(connection, await connection.open_stream())
        client.send(Hello(MODEL.key("raw")).encode() if hello is None else hello)
        if hello is None:
            assert isinstance(await client.next(), Welcome)
        return client

    def send(self, data: bytes) -> None:
        self.stream.write_nowait(data)

    async def next(self) -> Frame:
        async with asyncio.timeout(20):
            while not self._frames:
                data = await self.stream.read(1 << 16)
                assert data, "the worker ended the stream"
                self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    async def closed(self) -> str:
        async with asyncio.timeout(20):
            await self.connection.wait_closed()
        return str(self.connection.close_reason)


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        (dataclasses.replace(MODEL, model_hash="33" * 32, name="big"), ("model differs", "11" * 32, "33" * 32, "big")),
        (dataclasses.replace(MODEL, recipes_hash="44" * 32), ("recipes hash differs", "22" * 32, "44" * 32)),
        (dataclasses.replace(MODEL, engine_build="null 2"), ("engine build differs", "null 1", "null 2")),
    ],
)
async def test_a_mismatch_is_named_with_both_values_at_both_ends(theirs: ModelKey, what: tuple[str, ...]) -> None:
    async with swarm() as s:
        member = await s.add(ALL, model=theirs, attach=False)
        with pytest.raises(HelloMismatch) as caught:
            await s.client.attach(await s.dial(member))
        await eventually(lambda: member.real.stats().dropped_clients == 1)
        for part in what:
            assert part in str(caught.value)
            assert part in member.real.stats().last_fault
        assert s.client.workers() == []


async def test_another_protocol_version_is_named_by_both_ends() -> None:
    async with swarm() as s:
        member = await s.add(ALL)
        other = dataclasses.replace(MODEL.key("later"), version=PROTOCOL_VERSION + 1)
        client = await RawClient.connect(s, member, Hello(other).encode())
        welcome = await client.next()
        assert isinstance(welcome, Welcome)
        assert welcome.key.version == PROTOCOL_VERSION
        await client.connection.close()
        await eventually(lambda: "version differs: here 2, there 3" in member.real.stats().last_fault)
        await s.check()


async def test_a_client_that_says_nothing_is_shown_out() -> None:
    async with swarm() as s:
        member = await s.add(ALL, options=WorkerOptions(hello_timeout_s=0.1), attach=False)
        connection = await s.dial(member)
        await asyncio.wait_for(connection.wait_closed(), 20)
        assert "no HELLO within 0.1 s" in member.real.stats().last_fault


async def test_a_worker_that_says_nothing_is_not_attached() -> None:
    async with swarm(DispatchOptions(hello_timeout_s=0.1)) as s:
        endpoint = await s.bind()
        s.extras.append(endpoint)
        connection = await s.endpoint.dial(endpoint.peer_id, [endpoint.address])
        with pytest.raises(CallRefused, match=r"no WELCOME within 0\.1 s"):
            await s.client.attach(connection)
        await asyncio.wait_for(connection.wait_closed(), 20)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff" * 64, "frame type 255 is unknown"),
        (Hello(MODEL.key("again")).encode(), "a HELLO frame in mid-stream"),
        (Goodbye("").encode(), "frame type 8 is unknown or not for this side"),
        (make_call(1).encode() * 2, "call 1 is still open and was begun again"),
        ((1 << 30).to_bytes(4, "little") + b"\x04", "a CALL frame of 1073741824 bytes"),
    ],
    ids=["garbage", "hello", "wrong side", "same id", "length"],
)
async def test_a_client_that_breaks_the_protocol_is_dropped_and_nobody_else_notices(data: bytes, why: str) -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated)
        hostile = await RawClient.connect(s, member)
        hostile.send(data)
        assert why in await hostile.closed()
        gated.open()
        await s.check()
        assert why in member.real.stats().last_fault
        assert member.real.stats().dropped_clients == 1
        await eventually(lambda: member.real.stats().in_flight == 0)


async def test_memory_that_runs_out_for_a_frame_costs_its_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(decoder: FrameDecoder, data: bytes) -> list[Frame]:
        raise MemoryError

    async with swarm() as s:
        member = await s.add(ALL)
        client = await RawClient.connect(s, member)
        with monkeypatch.context() as patch:
            patch.setattr(FrameDecoder, "feed", feed)
            client.send(make_call(1).encode())
            assert "internal error in the frame decoder" in await client.closed()
        await eventually(lambda: member.real.stats().dropped_clients == 1)
        await s.check()


async def test_the_first_frame_must_be_hello() -> None:
    async with swarm() as s:
        member = await s.add(ALL)
        client = await RawClient.connect(s, member, make_call(1).encode())
        assert "began with CALL, not with HELLO" in await client.closed()


@pytest.mark.parametrize(
    ("change", "code", "why"),
    [
        ({"site": 77}, RefuseCode.BAD_REQUEST, "the model has no site 77"),
        ({"experts": np.array([1, 2, 3, 400], np.uint16)}, RefuseCode.BAD_REQUEST, "expert 400 of 16"),
        (
            {"n_tokens": 2, "n_rows": 2, "tokens": np.array([0, 0, 1, 9], np.uint16), "rows": bytes(2 * 4 * D_IN)},
            RefuseCode.BAD_REQUEST,
            "token 9 of 2",
        ),
        ({"rows": b"short"}, RefuseCode.BAD_REQUEST, "5 bytes of x"),
        ({"experts": np.array([1, 2, 3, 15], np.uint16)}, RefuseCode.NOT_HELD, "expert 15 not held here"),
    ],
)
async def test_a_call_that_cannot_be_computed_is_refused_and_the_next_one_served(
    change: dict[str, object], code: RefuseCode, why: str
) -> None:
    async with swarm() as s:
        member = await s.add({0: range(15)})
        client = await RawClient.connect(s, member)
        good = dataclasses.replace(make_call(1), experts=np.array([1, 2, 3, 4], np.uint16))
        client.send(dataclasses.replace(good, **change).encode())  # type: ignore[arg-type]  # fields of several types
        refuse = await client.next()
        assert isinstance(refuse, Refuse)
        assert refuse.code is code
        assert why in refuse.why
        client.send(dataclasses.replace(good, id=2).encode())
        answer = await client.next()
        assert isinstance(answer, Answer)
        assert (answer.id, answer.n_rows, len(answer.rows)) == (2, 4, 4 * 4 * D_OUT)


async def test_an_engine_that_fails_is_a_refusal_not_a_crash() -> None:
    async with swarm() as s:
        member = await s.add(ALL, engine=BrokenEngine(SITES, ALL))
        for _ in range(2):
            with pytest.raises(CallFailed, match="refused, compute failed: RuntimeError: device lost"):
                await s.check()
        assert member.real.stats().refused == {"compute_failed": 2}
        assert member.real.stats().in_flight == 0


async def test_a_client_above_its_allowance_is_refused_at_once() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated, limits=AdmissionLimits(calls_per_peer=3))
        client = await RawClient.connect(s, member)
        client.send(b"".join(make_call(call_id).encode() for call_id in range(1, 6)))
        for call_id in (4, 5):
            refuse = await client.next()
            assert isinstance(refuse, Refuse)
            assert (refuse.id, refuse.code) == (call_id, RefuseCode.OVERLOADED)
            assert "3 calls of yours" in refuse.why
        gated.open()
        assert {(await client.next()).id for _ in range(3)} == {1, 2, 3}  # type: ignore[union-attr]  # all are answers


@pytest.mark.parametrize("calls", [2, 128])
async def test_what_welcome_says_is_taken_from_a_client_that_is_alone(calls: int) -> None:
    small = AdmissionLimits(
        max_pairs=16, max_bytes=16 * 4 * D_IN, calls_per_peer=6, calls=calls, pairs=20, bytes=16 * 8 * D_IN
    )
    async with swarm() as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated, limits=small)
        told = member.remote.limits if member.remote is not None else None
        assert told is not None
        client = await RawClient.connect(s, member)
        for call_id in range(told.max_calls):
            client.send(make_call(call_id, n=told.max_pairs // 4).encode())
        await eventually(
            lambda: member.real.stats().in_flight + sum(member.real.stats().refused.values()) == told.max_calls
        )
        gated.open()
        replies = [await client.next() for _ in range(told.max_calls)]
        assert all(isinstance(reply, Answer) for reply in replies)
        assert member.real.stats().refused == {}


async def test_a_client_that_piles_up_calls_does_not_hold_another_up() -> None:
    async with swarm() as s:
        order: list[int] = []

        class Noting(GatedEngine):
            def raw_rows(self, site, x, rows, experts):  # type: ignore[no-untyped-def]  # as GatedEngine
                out = super().raw_rows(site, x, rows, experts)
                order.append(len(rows))
                return out

        gated = Noting(ALL)
        member = await s.add(ALL, engine=gated)
        greedy, modest = await RawClient.connect(s, member), await RawClient.connect(s, member)
        greedy.send(b"".join(make_call(call_id, n=5).encode() for call_id in range(1, 8)))
        await eventually(lambda: member.real.stats().in_flight == 7)
        modest.send(make_call(1).encode())
        await eventually(lambda: member.real.stats().in_flight == 8)
        gated.open()
        assert isinstance(await modest.next(), Answer)
        await eventually(lambda: len(order) == 8)
        assert order.index(4) <= 3  # two were with the engine already, one more may have its turn


async def test_two_clients_at_once_get_their_own_rows() -> None:
    async with swarm() as one, swarm(seed=1) as two:
        member = await one.add(ALL)
        await two.client.attach(await two.dial(member))
        await asyncio.gather(
            *(s.check(site, n, seed) for s in (one, two) for site in (0, 1) for n in (1, 3) for seed in (1, 2))
        )
        assert member.real.stats().clients == 2


async def test_overload_by_one_client_makes_the_other_wait_but_not_fail() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated, limits=AdmissionLimits(calls=2))
        hog = await RawClient.connect(s, member)
        hog.send(make_call(1).encode() + make_call(2).encode())
        await eventually(lambda: member.real.stats().in_flight == 2)
        call = asyncio.create_task(s.check())
        await eventually(lambda: member.real.stats().refused.get("overloaded", 0) >= 2)
        gated.open()
        await call


async def test_every_call_gets_exactly_one_reply_a_cancelled_one_too() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated)
        client = await RawClient.connect(s, member)
        client.send(b"".join(make_call(call_id).encode() for call_id in range(1, 7)))
        await eventually(lambda: member.real.stats().in_flight == 6)
        client.send(Cancel(1).encode() + Cancel(5).encode() + Cancel(99).encode())
        first = await client.next()
        assert isinstance(first, Refuse)
        assert (first.id, first.code) == (5, RefuseCode.CANCELLED)  # it had not begun
        gated.open()
        replies = [await client.next() for _ in range(5)]
        assert [reply.id for reply in replies] == [1, 2, 3, 4, 6]  # type: ignore[union-attr]  # all carry an id
        assert isinstance(replies[0], Refuse)
        assert all(isinstance(reply, Answer) for reply in replies[1:])


async def test_a_client_that_does_not_read_is_dropped_and_its_answers_are_bounded() -> None:
    config = TransportConfig(stream_window=1 << 16, connection_window=1 << 16, max_send_buffer=1 << 16)
    async with swarm() as s:
        options = WorkerOptions(stall_s=0.2)
        member = await s.add(ALL, options=options, config=config)
        client = await RawClient.connect(s, member, config=config)
        big = [make_call(call_id, n=512).encode() for call_id in range(1, 9)]  # 0.3 MB each way
        await asyncio.gather(*(client.stream.write(call) for call in big), return_exceptions=True)
        assert "took no data for 0.2 s" in await client.closed()
        await eventually(lambda: member.real.stats().in_flight == 0)
        assert member.real.stats().dropped_clients == 1
        await s.check()


async def test_a_client_that_lets_nothing_be_sent_to_it_is_dropped_with_its_calls() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated)
        client = await RawClient.connect(s, member)
        client.send(make_call(1).encode())
        stop_sending(client.stream)
        await eventually(lambda: member.real.stats().in_flight == 1)
        client.send(make_call(2).encode())
        await eventually(lambda: member.real.stats().in_flight == 2)
        gated.open()
        await client.closed()
        await eventually(lambda: member.real.stats().in_flight == 0)
        assert member.real.stats().dropped_clients == 1
        await s.check()


class WhereEngine(NullEngine):
    """Notes which thread each call runs on; fails while it is `broken`."""

    def __init__(self, holdings: Holdings) -> None:
        super().__init__(SITES, holdings)
        self.on_loop: list[bool] = []
        self._loop_thread = threading.current_thread()
        self.broken = False

    def raw_rows(self, site: int, x: F32, rows: I32, experts: I32) -> F32:
        self.on_loop.append(threading.current_thread() is self._loop_thread)
        if self.broken:
            raise RuntimeError("device lost")
        return super().raw_rows(site, x, rows, experts)


async def test_only_a_small_call_of_a_kind_known_to_be_short_runs_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "INLINE_S", math.inf)  # whatever is known counts as short, however busy this machine is
    async with swarm() as s:
        engine = WhereEngine(ALL)
        client = await RawClient.connect(s, await s.add(ALL, engine=engine))

        async def run(*, times: int, site: int = 0, n: int = 1) -> list[bool]:
            engine.on_loop.clear()
            for call_id in range(times):
                client.send(make_call(call_id, site, n).encode())
                await client.next()
            return engine.on_loop

        in_thread = [False] * RECENT
        engine.broken = True
        assert await run(times=RECENT + 1) == [*in_thread, False]  # a failure shows nothing
        engine.broken = False
        assert await run(times=RECENT + 1) == [*in_thread, True]
        assert await run(times=RECENT + 1, n=4) == [*in_thread, True]  # a larger call is another kind
        assert await run(times=RECENT + 1, site=1) == [*in_thread, True]
        assert await run(times=RECENT + 1, n=512) == [*in_thread, False]  # its rows alone are too much
        assert await run(times=1) == [True]


async def test_a_call_of_a_kind_that_was_long_runs_in_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "INLINE_S", 0.0)
    async with swarm() as s:
        engine = WhereEngine(ALL)
        await s.add(ALL, engine=engine)
        for seed in range(RECENT + 2):
            await s.check(seed=seed)
        assert engine.on_loop == [False] * (RECENT + 2)


async def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated)
        client = await RawClient.connect(s, member)
        client.send(b"".join(make_call(call_id).encode() for call_id in range(1, 7)))
        await gated.wait_entered()
        await client.connection.close()
        await eventually(lambda: member.real.stats().clients == 1)
        gated.open()
        await eventually(lambda: member.real.stats().in_flight == 0)
        assert member.real.stats().calls <= 2  # those with the engine; the others were not computed for nobody


async def test_closing_finishes_what_was_admitted_and_refuses_the_rest() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated)
        client = await RawClient.connect(s, member)
        client.send(make_call(1).encode() + make_call(2).encode())
        await eventually(lambda: member.real.stats().in_flight == 2)
        closing = asyncio.create_task(member.real.close("moving house"))
        assert await client.next() == Goodbye("moving house")
        client.send(make_call(3).encode())
        refuse = await client.next()
        assert isinstance(refuse, Refuse)
        assert refuse.code is RefuseCode.SHUTTING_DOWN
        gated.open()
        assert {(await client.next()).id for _ in range(2)} == {1, 2}  # type: ignore[union-attr]  # all are answers
        await client.connection.close()
        await asyncio.wait_for(closing, 20)


async def test_holdings_that_change_are_announced() -> None:
    class Growing(NullEngine):
        def grow(self, holdings: Holdings) -> None:
            self.__init__(SITES, holdings)  # type: ignore[misc]  # as if a slice had been fetched

    async with swarm() as s:
        engine = Growing(SITES, {0: (1, 2)})
        member = await s.add({}, engine=engine)
        client = await RawClient.connect(s, member)
        engine.grow(ALL)
        member.real.announce_holdings()
        assert isinstance(await client.next(), HoldingsUpdate)
        await eventually(lambda: s.client.workers()[0].experts == sum(map(len, ALL.values())))
        await s.check()


async def test_partial_sums_over_the_wire_are_the_engines() -> None:
    async with swarm() as s:
        member = await s.add(ALL)
        client = await RawClient.connect(s, member)
        for site in range(3):
            client.send(make_call(site, site, n=3, partial=True).encode())
            answer = await client.next()
            assert isinstance(answer, Answer)
            request = make_request(SITES[site], *make_input(SITES[site], 3), partial=True)
            expected = request.share(range(len(request.experts))).compute(full_engine())
            assert bytes(answer.rows) == expected.tobytes()


async def test_a_worker_that_begins_with_another_frame_is_not_attached() -> None:
    async with swarm() as s:
        endpoint = await s.bind()
        s.extras.append(endpoint)

        async def serve() -> None:
            connection = await endpoint.accept()
            stream = await connection.accept_stream()
            stream.write_nowait(Goodbye("?").encode())
            await connection.wait_closed()

        serving = asyncio.create_task(serve())
        with pytest.raises(BadFrame, match="began with GOODBYE, not with WELCOME"):
            await s.client.attach(await s.endpoint.dial(endpoint.peer_id, [endpoint.address]))
        await serving
