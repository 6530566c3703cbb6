"""The gate on real models: it passes the product's codec on the shipped one, and fails what is bad."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from swarmnode.backbone.library import library
from swarmnode.demo import MODEL
from swarmnode.dispatch.codec import F32, Buffer, WireType, decode_rows, encode_rows
from swarmnode.errors import BadFrame, ModelError, UsageError
from swarmnode.gate import load_verdict, save_verdict, wires_allowed
from swarmnode.gate.coding import Codec
from swarmnode.gate.report import mean_expert_bytes, pack_needs, report
from swarmnode.gate.verdict import Verdict
from swarmnode.gate.wires import GateOptions, _not_exact, measure
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack, onboard
from swarmnode.sizing.needs import needs_of
from tests.swarmnode.gate.bad_codecs import ONE_SCALE

OWN_KL = 4.8e-3  # the shipped model's Q4_K_M against its F16, see MODEL_CARD.md


@pytest.fixture(scope="module")
def shipped(demo_pack: ModelPack) -> Verdict:
    return measure(demo_pack, GateOptions(positions=1024, own_kl=OWN_KL))


@pytest.fixture(scope="module")
def random_pack(tmp_path_factory: pytest.TempPathFactory) -> ModelPack:
    folder = tmp_path_factory.mktemp("random")
    write_random_model(RandomModel(), folder / "r.gguf")
    return onboard(folder / "r.gguf", folder / "pack")


@pytest.mark.slow
class TestShippedModel:
    def test_every_type_passes_with_the_known_figures(self, shipped: Verdict) -> None:
        assert shipped.identical is True
        assert shipped.positions == 1024
        assert [shipped.passed(wire) for wire in ("f16", "int8", "fp8")] == [""] * 3
        assert set(shipped.best().values()) == {("int8", "int8")}
        for wires, least in (("f32/f32", 0.9999999), ("f16/f16", 0.9999), ("int8/int8", 0.9995), ("fp8/fp8", 0.9985)):
            assert min(site.lowest[wires] for site in shipped.sites) >= least
        for found in shipped.pairs:
            assert found.confident > 800
            assert found.argmax_confident >= 0.998
            assert 0 < found.kl <= 0.15 * OWN_KL

    def test_its_report(self, shipped: Verdict, demo_pack: ModelPack) -> None:
        found = report(demo_pack.manifest, shipped)
        assert list(found["layer_cosine"]) == ["partial_f32", "f16", "int8", "fp8"]
        for name in ("argmax", "argmax_confident", "kl", "dnll"):
            assert list(found[name]) == ["partial_f32", "f16", "int8", "fp8"]
        assert found["kl"]["partial_f32"] < 1e-5 < found["kl"]["f16"]
        assert list(found["wires"]) == ["f16", "int8", "fp8"]
        assert (found["exact_positions"], found["local_differ"], found["first_differing_layer"]) == (128, 0, None)
        assert (found["layers_measured"], found["layers_not_measured"]) == ([0, 1, 2, 3], [])
        assert all((row["exact_rows"], row["differ"]) == (128, 0) for row in found["rows"])
        assert all(row["partial_f32"] >= 0.999999 for row in found["rows"])
        assert found["bytes_exact"] == 4 * 4 * 256 * (1 + 4)
        assert found["rows"][0]["bytes"] == {
            "exact": 5120, "partial_f32": 2048, "f16": 1024, "int8": 520, "fp8": 520
        }  # fmt: skip
        assert (found["passed"], found["error"], found["identical"]) == (True, "", True)
        assert (found["sites"], found["experts"], found["k"], found["shared_expert"]) == (4, 16, 4, True)
        assert found["variant"] == "Q4_K+Q6_K"
        assert found["experts_bytes"] == 2 * 16 * (found["smallest_slice"] + found["largest_slice"])
        assert found["needs"] is None
        assert found["bytes_f32"] == 4 * 2 * 256 * 4
        assert found["bytes_best"] == 4 * 2 * (256 + 2 * 2)
        assert [row["best"] for row in found["rows"]] == ["int8/int8"] * 4
        assert len(found["pairs"]) == 9

    def test_a_bad_codec_fails(self, demo_pack: ModelPack, shipped: Verdict, tmp_path: Path) -> None:
        """INT8 with one scale for a whole tensor: its argmax and KL look as good as those of the real one."""
        bad = measure(demo_pack, GateOptions(positions=1024, own_kl=OWN_KL, codec=ONE_SCALE, worker=False))
        assert bad.passed("int8").startswith("no layer's cosine is 0.9985 both ways (best 0.9")
        assert all(back != "int8" for _, back in bad.site_wires("int8", "int8").values())
        assert all(back != "int8" for _, back in bad.best().values())
        assert (bad.passed("f16"), bad.passed("fp8")) == ("", "")
        pack = ModelPack(tmp_path, demo_pack.manifest, demo_pack.source)
        save_verdict(pack, bad)  # and it says nothing of the real one
        assert load_verdict(pack) == "its verdict is of another codec"
        save_verdict(pack, shipped)
        assert wires_allowed(pack, "int8", "int8") == ({}, [])


def test_nan_fails(random_pack: ModelPack) -> None:
    """FP8 rows that a receiver always refuses, and one INT8 row in each batch that is NaN, in the second half only."""
    stages: list[tuple[str, int, int]] = []

    def decode(data: Buffer, wire: WireType, n: int, d: int) -> F32:
        if wire is WireType.FP8:
            raise BadFrame("FP8 rows with a NaN code")
        rows = decode_rows(data, wire, n, d)
        if wire is WireType.INT8 and stages and stages[-1][0] == "logits":
            rows = rows.copy()
            rows[0, 0] = np.nan
        return rows

    codec = Codec(encode_rows, decode)
    options = GateOptions(positions=1024, codec=codec, worker=False)
    found = measure(random_pack, options, lambda *stage: stages.append(stage))
    assert (found.exact_positions, found.identical) == (0, None)
    assert found.passed("fp8") == "no layer's cosine is 0.9985 both ways (best -1.00000)"
    assert found.passed("int8").startswith("NaN or infinity in ")
    assert found.passed("f16") == ""
    assert set(found.site_wires("fp8", "int8").values()) == {("f16", "f16")}
    assert set(found.best().values()) == {("f16", "f16")}
    assert [stage for stage in stages if stage[1] == 1024 and stage[0] in ("layers", "logits")] == [
        ("layers", 1024, 1024),
        ("logits", 1024, 1024),
    ]


def test_what_cannot_be_measured(random_pack: ModelPack, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1023 positions"):
        GateOptions(positions=1023)
    for own_kl in (float("nan"), 0.0, -1.0, 0.51, 10.0):
        with pytest.raises(UsageError, match="cannot be meant"):
            GateOptions(own_kl=own_kl)
    for threads in (0, -1, 513, 10**9):
        with pytest.raises(UsageError, match=f"{threads} threads cannot be meant"):
            GateOptions(threads=threads)
    for layers in (-7, 65536, 10**12):
        with pytest.raises(UsageError, match=f"{layers} layers on the GPU cannot be meant"):
            GateOptions(gpu_layers=layers)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(UsageError, match="has only"):
        measure(random_pack, GateOptions(text=short))
    without = ModelPack(random_pack.path, random_pack.manifest, None, backbone_known=True)
    with pytest.raises(ModelError, match="the GGUF is not on this machine"):
        measure(without, GateOptions())


@pytest.mark.parametrize("stage", ["digests", "exact", "layers", "logits", "local"])
def test_a_file_that_changes_meanwhile_is_one_line(tmp_path: Path, stage: str) -> None:
    file = tmp_path / "r.gguf"
    write_random_model(RandomModel(), file)
    pack = onboard(file, tmp_path / "pack")

    def progress(now: str, done: int, _total: int) -> None:
        if now == stage and done:
            os.utime(file, (1, 1))  # a cut would end this process where it comes at the wrong moment

    with pytest.raises(ModelError, match=r"r\.gguf: changed while it was measured; leave it alone") as caught:
        measure(pack, GateOptions(positions=1024), progress)
    assert "\n" not in str(caught.value)


def test_exact_mode_is_left_out_only_on_a_gpu(random_pack: ModelPack, monkeypatch: pytest.MonkeyPatch) -> None:
    if library().llama_supports_gpu_offload():
        pytest.skip("layers really lie on a GPU here")
    assert _not_exact(GateOptions(gpu_layers=99, device="cpu")) == ""
    monkeypatch.setattr(library(), "llama_supports_gpu_offload", lambda: True)
    assert "backbone lie on a GPU" in _not_exact(GateOptions(gpu_layers=99, device="cpu"))
    assert _not_exact(GateOptions(device="cpu")) == ""
    found = measure(random_pack, GateOptions(positions=1024, gpu_layers=1))
    assert (found.exact_positions, found.identical) == (0, None)
    assert "added up in another order" in report(random_pack.manifest, found)["not_exact"]


def test_what_the_listener_raises_ends_it(random_pack: ModelPack) -> None:
    def stop(stage: str, done: int, _total: int) -> None:
        if (stage, done) == ("layers", 128):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(random_pack, GateOptions(positions=1024, worker=False), stop)


def test_an_expert_that_rotted_on_disk(tmp_path: Path) -> None:
    """Other bytes, with size and time as they were."""
    file = tmp_path / "r.gguf"
    write_random_model(RandomModel(), file)
    pack = onboard(file, tmp_path / "pack")
    before, tensor = file.stat(), pack.manifest.site_tensors(1)[0]
    with file.open("r+b") as handle:
        handle.seek(tensor.offset + 2 * tensor.stride)
        byte = handle.read(1)[0]
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ModelPack.open(pack.path).source is not None  # nobody sees it otherwise
    stages: list[tuple[str, int, int]] = []
    layer = pack.manifest.sites[1].layer
    with pytest.raises(ModelError, match=rf"r\.gguf: expert 2 of layer {layer} is not what was onboarded") as caught:
        measure(pack, GateOptions(positions=1024), lambda *stage: stages.append(stage))
    assert "\n" not in str(caught.value)
    assert {stage for stage, _, _ in stages} == {"digests"}
    assert stages[-1][1] == stages[-1][2]


def test_bytes_per_expert_are_the_mean_of_all(demo_pack: ModelPack) -> None:
    """The shipped model's later layers have larger ones."""
    sizes = [demo_pack.manifest.expert_bytes(site.index) for site in demo_pack.manifest.sites]
    assert len(set(sizes)) > 1
    assert mean_expert_bytes(demo_pack.manifest) == sum(sizes) // len(sizes) == pack_needs(demo_pack).expert_bytes
    assert needs_of(GgufFile.open(demo_pack.source or MODEL)).expert_bytes == mean_expert_bytes(demo_pack.manifest)
