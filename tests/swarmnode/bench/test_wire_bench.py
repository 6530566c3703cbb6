"""The rows of `bench wire`: what is counted, and that the product's promises about bytes hold. Never a time."""

from __future__ import annotations

import asyncio
import json

import pytest

from swarmnode.bench import wire as bench
from swarmnode.errors import UsageError
from swarmnode.sizing.shapes import MODELS
from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.errors import ConnectionClosed
from transport.identity import Identity


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TOKENS", 100)
    monkeypatch.setattr(bench, "ROUND_TRIPS", 3)
    bench._shares.cache_clear()


@pytest.mark.usefixtures("small")
def test_a_token_of_a_layer_costs_what_was_promised() -> None:
    result = bench.run(quick=True, models=["Qwen3.5-122B"])
    assert json.loads(json.dumps(result)) == result
    rows = {(row["workers"], row["out"], row["back"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 2 * 5
    for row in rows.values():
        assert list(row) == [
            "model", "d", "k", "workers", "out", "back", "payload_bytes", "datagram_bytes", "overhead", "datagrams"
        ]  # fmt: skip
        assert (row["model"], row["d"], row["k"]) == ("Qwen3.5-122B", 3072, 8)
        assert 0.02 < row["overhead"] < 0.5
        assert row["datagrams"] >= row["datagram_bytes"] / (1452 + bench.HEADERS)
        assert row["datagram_bytes"] == pytest.approx(row["payload_bytes"] * (1 + row["overhead"]), rel=0.001)
    payload = {key: row["payload_bytes"] for key, row in rows.items()}
    assert 110_000 < payload[1, "f32", "f32 raw"] < 111_000
    assert payload[1, "f16", "f16"] <= 12_400
    assert payload[1, "int8", "f16"] <= 9_400
    assert payload[1, "int8", "int8"] <= 6_700
    # Of four workers a token's eight experts live on 3.6 (4 × (1 − (3/4)^8)), and each gets x and answers.
    assert 3.3 < payload[4, "f16", "f16"] / payload[1, "f16", "f16"] < 3.9


def test_a_summary_has_a_line_per_model_and_says_what_is_above_the_aim() -> None:
    axes = {"model": "M", "d": 2880, "k": 4, "out": "int8", "datagram_bytes": 6480, "payload_bytes": 6000}
    rows = [
        {**axes, "workers": 1, "back": "int8", "overhead": 0.083, "datagrams": 8.0},
        {**axes, "workers": 2, "back": "int8", "overhead": 0.084, "datagrams": 8.0},
        {**axes, "workers": 1, "back": "f16", "overhead": 0.07, "datagrams": 6.0},
    ]
    (line,) = bench.summary(rows)
    assert (line["int8"], line["int8/f16"], line["f16"]) == ("6,480", "6,480", "")
    assert (line["most on top"], line["cells above 8%"]) == ("8.4%", "2 of 3")
    (above,) = bench.above_aim(rows)
    assert (above["workers"], above["out / back"], above["payload in each"]) == ("1, 2", "int8/int8", 750)
    assert bench.above_aim(rows[2:]) == []


def test_every_model_has_frames_of_every_type() -> None:
    for shape in MODELS:
        for pair in bench.PAIRS:
            frames = bench._frames(shape, 2, pair)
            assert bench.TOKENS <= sum(frames.values()) <= 2 * bench.TOKENS
            assert all(size > shape.d for sizes in frames for size in sizes)
    assert len({shape.name for shape in MODELS}) == len(MODELS)


def test_experts_above_a_byte_and_weights_before_the_experts_are_counted() -> None:
    shapes = {shape.name: shape for shape in MODELS}
    step, llama = shapes["Step-3.7-Flash"], shapes["Llama-4-Maverick"]
    pair = bench.Pair("f16", "f16")
    narrow, wide = (bench._sizes(step, 8, fits, pair)[0] for fits in (True, False))
    assert wide == narrow + 8
    assert bench._sizes(llama, 1, True, pair)[0] == bench._sizes(shapes["GLM-4.5/4.6"], 1, True, pair)[0] - 4


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="model 'GPT-1' is unknown"):
        bench.run(models=["GPT-1"])


async def test_a_measurement_whose_connection_ends_is_over() -> None:
    config = TransportConfig(port_mapping=False)
    server, client = [await Endpoint.bind(Identity.generate(), config, listen=("127.0.0.1", 0)) for _ in range(2)]
    async with server, client:
        lane = await bench._connect(client, server, "wire")
        assert (await lane.measure((100, 10)))[0] > 110
        measuring = asyncio.create_task(lane.measure((100, 10)))
        await asyncio.sleep(0)
        await lane.server.close()
        with pytest.raises(ConnectionClosed):
            await measuring
        lane._answer(b"too late")
