"""What a user sees when something is wrong: one line on stderr, exit code 2 for usage and 1 for failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from swarmnode import __version__
from swarmnode.cli import main
from swarmnode.demo import MODEL
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack, onboard

PEER = "a" * 56


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command"),
        (["up"], "give --model FILE to found a swarm, or the ticket"),
        (["up", "--model", "no-such.gguf", "--experts", "all"], "no such file"),
        (["up", "--model", "{demo}", "--experts", "0-99"], "layer 0 has experts 0 to 15, not 0-99"),
        (["up", "--model", "{demo}", "--experts", "4/3"], "the share 4/3 does not exist"),
        (["up", "--model", "{demo}", "--experts", "9:1"], "layer 9 has no experts"),
        (["up", "--model", "{demo}", "--experts", "one"], "not understood"),
        (["up", "--model", "{demo}", "--role", "king"], "say backbone, worker or both"),
        (["up", "--model", "{demo}", "--role", "worker"], "a worker needs --experts"),
        (["up", "--model", "{demo}", "--peer", "somebody"], "PEERID@HOST:PORT"),
        (["up", "--model", "{demo}", "--peer", f"{PEER}@1.2.3.4:1"], "checksum"),
        (["up", "--model", "{demo}", "--listen", "here"], "HOST:PORT"),
        (["up", "--model", "{demo}", "--emulate", "rtt=fast"], "rtt"),
        (["up", "--model", "{demo}", "--quic", "tcp"], "use qh3 or aioquic"),
        (["up", "--model", "{demo}", "--threads", "0"], "--threads 0"),
        (["up", "--model", "{demo}", "--wire", "f16"], "--mode exact needs --wire f32"),
        (["up", "--config", "no-such.toml"], "cannot be read as TOML"),
        (["demo", "--workers", "0"], "--workers 0"),
        (["demo", "--mode", "fast"], "say exact or partial"),
        (["demo", "--wire", "f16"], "--mode exact needs --wire f32"),
        (["demo", "--emulate", "x"], "emulation"),
        (["demo", "--quic", "tcp"], "use qh3 or aioquic"),
        (["generate", "x", "--temperature", "nan"], "temperature nan is out of range"),
        (["up", "--model", "{demo}", "--experts", "0:1;0:2"], "layer 0 is given twice"),
        (["demo", "--tokens", "0"], "max tokens 0"),
        (["generate", "@no-such-file"], "cannot be read as text"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, tmp_path: Path) -> None:
    code, out, err = run(capsys, *(a.format(demo=MODEL) for a in arguments))
    assert message in err
    assert err.startswith("swarmnode: ")
    assert err.count("\n") == 1
    assert out == ""
    assert code == (1 if "no such file" in message else 2)


def test_failures_without_a_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in (["status"], ["peers"], ["generate", "hello"]):
        code, _, err = run(capsys, *command, "--state", str(tmp_path))
        assert (code, err) == (1, f"swarmnode: no node is running in {tmp_path}: start one with swarmnode up\n")


def test_what_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in (
        ["onboard", str(MODEL), "--out", str(tmp_path / ("x" * 300))],
        ["up", "--model", str(tmp_path / ("y" * 300)), "--state", str(tmp_path)],
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 1
        assert err.count("\n") == 1


def test_a_stale_announcement_is_no_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text(json.dumps({"port": 9, "token": "x", "pid": 1}))
    code, _, err = run(capsys, "status", "--state", str(tmp_path))
    assert code == 1
    assert "no node is running" in err


class TestBadModels:
    def onboard(self, capsys: pytest.CaptureFixture[str], file: Path) -> str:
        code, out, err = run(capsys, "onboard", str(file), "--out", str(file.with_suffix(".pack")))
        assert code == 1
        assert out == ""
        assert err.startswith("swarmnode: ")
        assert err.count("\n") == 1
        assert not (file.with_suffix(".pack") / "manifest.json").exists()
        return err

    def test_not_a_gguf(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "notes.gguf"
        file.write_bytes(b"these are notes" * 100)
        assert "not a GGUF" in self.onboard(capsys, file)

    def test_an_empty_file(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "empty.gguf"
        file.touch()
        self.onboard(capsys, file)

    def test_truncated(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "short.gguf"
        file.write_bytes(MODEL.read_bytes()[:5_000_000])
        error = self.onboard(capsys, file)
        assert "5000000" in error or "5,000,000" in error

    def test_a_dense_model(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "dense.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_block_count(1)
        writer.add_tensor("blk.0.ffn_up.weight", np.zeros((8, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert "this one is dense" in self.onboard(capsys, file)

    def test_an_architecture_llama_cpp_does_not_know(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "new.gguf"
        file.write_bytes(MODEL.read_bytes().replace(b"qwen2moe", b"qwen9moe"))
        assert "does not know the architecture 'qwen9moe'; update" in self.onboard(capsys, file)
        assert not file.with_suffix(".pack").exists()

    def test_a_missing_part_of_a_split_model(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        parts = write_random_model(RandomModel(), tmp_path / "m.gguf", parts=3)
        parts[1].unlink()
        assert parts[1].name in self.onboard(capsys, parts[0])


def test_onboarding_a_split_model_from_any_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    single = write_random_model(RandomModel(), tmp_path / "s.gguf")
    parts = write_random_model(RandomModel(), tmp_path / "m.gguf", parts=3)
    code, out, _ = run(capsys, "onboard", str(parts[2]), "--out", str(tmp_path / "split"), "--json")
    assert code == 0
    assert json.loads(out)["sites"] == 2
    run(capsys, "onboard", str(single[0]), "--out", str(tmp_path / "single"))
    split, whole = ModelPack.open(tmp_path / "split"), ModelPack.open(tmp_path / "single")
    assert split.manifest.model_hash == whole.manifest.model_hash
    assert split.backbone.read_bytes() == whole.backbone.read_bytes()


def test_a_changed_source_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, demo_pack: ModelPack
) -> None:
    altered = bytearray(MODEL.read_bytes())
    altered[demo_pack.manifest.tensors[0].offset + 7] ^= 1
    source = tmp_path / MODEL.name
    source.write_bytes(altered)
    code, _, err = run(
        capsys,
        "up",
        "--model",
        str(demo_pack.path),
        "--experts",
        "0",
        "--source",
        str(source),
        "--state",
        str(tmp_path),
    )
    assert code == 1
    assert "SHA-256" in err
    assert demo_pack.manifest.tensors[0].name.split(".")[1] in err
    assert err.count("\n") == 1


class TestSourceAfterOnboarding:
    """A GGUF that was replaced must never be computed with as if it were the one that was onboarded."""

    @pytest.fixture
    def copied(self, tmp_path: Path) -> tuple[Path, Path]:
        source = tmp_path / "model.gguf"
        source.write_bytes(MODEL.read_bytes())
        assert onboard(source, tmp_path / "pack").source == source
        return source, tmp_path / "pack"

    @staticmethod
    def alter(source: Path, pack: ModelPack) -> None:
        altered = bytearray(source.read_bytes())
        altered[pack.manifest.tensors[0].offset + 7] ^= 1
        source.write_bytes(altered)

    def test_unchanged_is_kept_and_replaced_is_onboarded_again(self, copied: tuple[Path, Path]) -> None:
        source, folder = copied
        before = ModelPack.open(folder)
        assert onboard(source, folder).manifest == before.manifest
        self.alter(source, before)
        assert ModelPack.open(folder).source is None
        after = onboard(source, folder)
        assert after.source == source
        assert after.manifest.model_hash != before.manifest.model_hash

    @pytest.mark.parametrize("role", [["--experts", "0"], ["--context", "64"]])
    def test_an_altered_file_given_by_source_is_refused(
        self, role: list[str], copied: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        source, folder = copied
        self.alter(source, ModelPack.open(folder))
        state = ["--state", str(tmp_path / "state")]
        code, _, err = run(capsys, "up", "--model", str(folder), "--source", str(source), *role, *state)
        assert code == 1
        assert "does not have the manifest's SHA-256" in err
        assert err.count("\n") == 1

    def test_a_worker_without_its_source_says_so(
        self, copied: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        source, folder = copied
        source.unlink()
        state = ["--state", str(tmp_path / "state")]
        code, _, err = run(capsys, "up", "--model", str(folder), "--experts", "0", *state)
        assert code == 1
        assert "give --source MODEL.gguf or onboard again" in err


def test_a_manifest_that_contradicts_itself_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, demo_pack: ModelPack
) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    manifest = json.loads((demo_pack.path / "manifest.json").read_text())
    manifest["sites"][0]["n_used"] = 3
    (pack / "manifest.json").write_text(json.dumps(manifest))
    (pack / "backbone.gguf").write_bytes(demo_pack.backbone.read_bytes())
    code, _, err = run(capsys, "up", "--model", str(pack), "--state", str(tmp_path / "s"))
    assert code == 1
    assert "model_hash" in err


def test_a_pack_whose_backbone_is_gone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, demo_pack: ModelPack
) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "manifest.json").write_bytes((demo_pack.path / "manifest.json").read_bytes())
    code, _, err = run(capsys, "up", "--model", str(pack), "--state", str(tmp_path / "s"))
    assert code == 1
    assert "backbone.gguf" in err
    assert err.count("\n") == 1


def test_onboard_says_what_it_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "onboard", str(MODEL), "--out", str(tmp_path / "p"))
    assert code == 0
    assert "4 MoE layers, 16 experts, top 4" in out
    code, out, _ = run(capsys, "onboard", str(MODEL), "--out", str(tmp_path / "p"), "--json")
    facts = json.loads(out)
    assert (facts["sites"], facts["experts"], facts["used"], facts["shared_expert"]) == (4, 16, 4, True)
    assert facts["expert_bytes"] == 32 * 110_592 + 32 * 127_488


def test_version_and_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarmnode", "--version"], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == __version__
    done = subprocess.run(
        [sys.executable, "-m", "swarmnode", "--help"], capture_output=True, text=True, timeout=30, check=True
    )
    for command in ("up", "status", "peers", "onboard", "generate", "demo", "bench"):
        assert command in done.stdout
