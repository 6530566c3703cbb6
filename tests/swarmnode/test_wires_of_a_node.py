"""The wire types that a node was told to use, as far as its model's gate allows them, and drafts over a real swarm."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest
from swarmnode.dispatch.codec import WireName, WireType, rows_size
from swarmnode.errors import GateFailed, UsageError
from swarmnode.gate import save_verdict
from swarmnode.gate.verdict_file import bound_of
from swarmnode.onboard import ModelPack

from .gate import samples
from .helpers import generate, start_node, swarm

REQUEST = GenerateRequest(
    prompt="import os\nimport sys\n\n\nclass A:\n    def a(self):\n", max_tokens=24, ignore_end=True
)
D = 256


def gated(folder: Path, pack: ModelPack, int8: float = 0.9999) -> ModelPack:
    """A copy of the demo's pack with a verdict: all passes, but INT8 has this cosine at layer 2."""
    copy = ModelPack.open(Path(shutil.copytree(pack.path, folder / "pack")))
    sites = [samples.site(layer, int8=int8 if layer == 2 else 0.9999) for layer in range(4)]
    save_verdict(copy, samples.verdict(*sites, bound=bound_of(copy)))
    return copy


async def test_int8_needs_a_gate(tmp_path: Path, demo_pack: ModelPack) -> None:
    with pytest.raises(UsageError, match="INT8 on the wire needs a gate that this model passed: run swarmnode gate"):
        await start_node(tmp_path, demo_pack, mode="partial", wire="int8", listen="127.0.0.1:0", peers=[])


@pytest.mark.parametrize(("wire", "out", "back"), [("auto", "int8", "int8"), ("fp8/f16", "fp8", "f16")])
async def test_what_passed_is_used(
    tmp_path: Path, demo_pack: ModelPack, wire: str, out: WireName, back: WireName
) -> None:
    pack = gated(tmp_path, demo_pack)
    async with swarm(tmp_path, pack, ["all"], mode="partial", wire=wire, speculate="off") as (front, _):
        _, result = await generate(front, REQUEST)
        assert result["tokens"] == REQUEST.max_tokens
        for site in front.status().sites:
            rows = result["prompt_tokens"] * (site.layer < 3) + (site.layer == 3) + result["steps"]
            for sent, kind in ((site.bytes_out, out), (site.bytes_back, back)):
                size = rows_size(WireType.of(kind), rows, D)
                assert size < sent < size + 64 * rows + 64 * site.round_trips, (site, kind)


async def test_a_layer_that_fails_has_finer_rows(tmp_path: Path, demo_pack: ModelPack) -> None:
    pack = gated(tmp_path, demo_pack, int8=0.9)
    node, events = await start_node(tmp_path / "n", pack, mode="partial", wire="int8", listen="127.0.0.1:0")
    await node.close()
    notes = [event["note"] for event in events.seen if event["event"] == "wire"]
    assert len(notes) == 1
    assert "layer 2" in notes[0]
    assert "\n" not in notes[0]


@pytest.mark.parametrize("experts", [None, "all"])
async def test_a_model_that_failed_is_not_run(tmp_path: Path, demo_pack: ModelPack, experts: str | None) -> None:
    pack = ModelPack.open(Path(shutil.copytree(demo_pack.path, tmp_path / "pack")))
    sites = [samples.site(layer) for layer in range(4)]
    save_verdict(pack, msgspec.structs.replace(samples.verdict(*sites, bound=bound_of(pack)), local_differ=3))
    settings: dict[str, Any] = {
        "experts": experts,
        "peers": [],
        "listen": "127.0.0.1:0",
        "port_mapping": False,
        "lan": False,
    }
    with pytest.raises(GateFailed, match=r"failed its gate: .* at 3 of 128 positions.*or give --force") as caught:
        await start_node(tmp_path / "a", pack, **settings)
    assert "\n" not in str(caught.value)
    node, events = await start_node(tmp_path / "b", pack, force=True, **settings)
    await node.close()
    notes = [event["note"] for event in events.seen if event["event"] == "note"]
    assert sum("used all the same, as --force says" in note for note in notes) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_drafts_save_round_trips(tmp_path: Path, demo_pack: ModelPack, temperature: float) -> None:
    text = "".join(
        f"    def get_{name}(self):\n        return self.{name}\n\n" for name in ("a", "b", "c", "d", "e", "f")
    )
    request = GenerateRequest(
        prompt="class Values:\n" + text,
        max_tokens=48,
        ignore_end=True,
        sampling=Sampling(temperature=temperature, seed=3),
    )
    settings = {"mode": "partial", "wire": "f16", "emulate": "rtt=40ms", "context": 512}
    async with swarm(tmp_path, demo_pack, ["1/2", "2/2"], **settings) as (front, _):
        tokens, result = await generate(front, request)
    assert len(tokens) == request.max_tokens
    assert result["speculation"] == "on"
    assert result["drafts_accepted"] <= result["drafted"]
    assert result["steps"] == request.max_tokens - 1 - result["drafts_accepted"]
    assert result["blocking_round_trips_per_token"] == pytest.approx(4 * result["steps"] / (request.max_tokens - 1))
    if not temperature:
        assert result["drafts_accepted"]  # how many are made follows the speed of this machine


async def test_a_model_of_another_vocabulary_cannot_draft(tmp_path: Path, demo_pack: ModelPack) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(Exception, match=r"other\.gguf") as caught:
        await start_node(tmp_path, demo_pack, speculate=str(other), listen="127.0.0.1:0")
    assert "\n" not in str(caught.value)
