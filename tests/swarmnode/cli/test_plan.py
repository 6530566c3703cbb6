"""`swarmnode plan`: one question, one answer; from a name, a file, a pack, an address."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.cli import main
from swarmnode.gate.verdict_file import bound_of, save_verdict
from swarmnode.model import http_file
from swarmnode.model.gguf_encode import TensorInfo, encode_header, encode_pair
from swarmnode.model.gguf_metadata import ValueType
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import onboard
from tests.swarmnode.gate.samples import site as site_figures
from tests.swarmnode.gate.samples import verdict
from tests.swarmnode.model.http_server import Handler, Site, serve, silent


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as site:
        yield site


def test_can_my_three_machines_run_glm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "GLM-4.6", "--devices", "3x32G"]) == 1
    out = capsys.readouterr().out
    first, _, rest = out.partition("\n")
    assert first.startswith("No: GLM-4.5/4.6 (glm4moe, taken as Q4_K_M) does not fit")
    assert "5 more devices of 32.0 GiB would do" in first
    assert "89 MoE layers of 160 experts, top 8, a shared expert" in rest
    assert main(["plan", "GLM-4.6", "--devices", "3x96G"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Yes: GLM-4.5/4.6")
    for text in ("device 1  backbone", "device 3  worker", "tokens/s", "2 per step", "need a round trip", "--memory "):
        assert text in out


def test_a_models_weights_are_those_of_a_usual_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Seven such devices hold the experts where all of them are Q4_K, which they are in no Q4_K_M file."""
    assert main(["plan", "glm-4.6", "-d", "7x32G"]) == 1
    out = capsys.readouterr().out
    assert "of its 189.0 GiB of experts have no place; 1 more device of 32.0 GiB would do" in out
    assert out.splitlines()[1].startswith("assumed: a Q4_K_M file: experts in Q4_K, with Q6_K for their ffn_down in 43")
    assert main(["plan", "glm-4.6", "-d", "8x32G", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["needs"]["quantised"] == "Q4_K_M"
    assert found["needs"]["assumed"].startswith("a Q4_K_M file: ")
    assert "taken as Q4_K_M" in found["answer"]
    assert main(["plan", "gpt-oss", "-d", "80G"]) == 0
    assert capsys.readouterr().out.startswith("Yes: gpt-oss-120b (gpt-oss, taken as MXFP4)")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt-oss", "-d", "32G@5ms", "-d", "2x32G", "--rtt", "80", "--context", "4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["answer"].startswith("Yes: ")
    assert [device["role"] for device in found["devices"]] == ["backbone", "worker", "worker"]
    assert [device["rtt_ms"] for device in found["devices"]] == [5, 80, 80]
    assert sum(device["experts"] for device in found["devices"]) == 36 * 128
    assert [speed["rtt_ms"] for speed in found["speeds"]] == [20, 80, 100]
    assert found["given"]["accepted_2"] == pytest.approx(2 * found["given"]["accepted_1"], rel=0.01)
    assert found["devices_needed"]["32G"] == 3
    assert found["context"] == 4096


def test_without_devices_it_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3moe"]) == 0
    out = capsys.readouterr().out
    assert "94 MoE layers of 128 experts" in out
    assert "devices, all alike: " in out
    assert main(["plan", "kimi", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices_needed"]["16G"] is None
    assert "MXFP4" in found["needs"]["assumed"]


def test_which_model_a_name_was_taken_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "deepseek2"]) == 0
    assert "assumed: deepseek2 means DeepSeek-V3/R1" in capsys.readouterr().out
    assert main(["plan", "kimi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["needs"]["assumed"].startswith("kimi means Kimi-K3; experts in MXFP4")
    assert main(["plan", "GLM-4.6"]) == 0
    assert "assumed: a Q4_K_M file" in capsys.readouterr().out


def test_a_file_its_pack_and_its_address_say_the_same(
    tmp_path: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = write_random_model(RandomModel(n_layers=3), tmp_path / "m.gguf", parts=2)
    pack = onboard(parts[0], tmp_path / "pack")
    urls = [site.add(part) for part in parts]
    sent = site.sent
    found = []
    for model in (parts[0], pack.path, urls[1]):
        assert main(["plan", str(model), "--devices", "2x8G", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    for other in found[1:]:
        for key in ("n_sites", "expert_bytes", "experts_total_bytes", "dense_bytes", "kv_bytes_per_token"):
            assert other["needs"][key] == found[0]["needs"][key]
        assert other["devices"] == found[0]["devices"]
    assert site.sent - sent < sum(part.stat().st_size for part in parts) * 1.1  # headers of small files: nearly all


def test_the_gates_report_says_the_same_of_a_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = write_random_model(RandomModel(n_layers=3), tmp_path / "m.gguf")
    pack = onboard(path, tmp_path / "pack")
    save_verdict(pack, verdict(*map(site_figures, range(3)), bound=bound_of(pack)))
    assert main(["gate", str(pack.path), "--show", "--json"]) == 0
    gated = json.loads(capsys.readouterr().out)["needs"]
    assert main(["plan", str(pack.path), "-d", "64G", "--context", str(gated["context"]), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    remote = {f"{speed['rtt_ms']:g}": speed["accepted_1"] for speed in planned["all_remote"]}
    assert remote == pytest.approx(gated["tokens_per_s"], abs=1e-3)
    assert planned["backbone_bytes"] == gated["backbone_bytes"]
    assert planned["needs"]["experts_total_bytes"] == gated["experts_bytes"]
    assert planned["model"] == pack.manifest.name
    assert planned["needs"]["n_used"] == pack.manifest.n_used


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["glm", "-d", "3x32G"], 2, "may mean GLM-4.5/4.6 or GLM-5.2"),
        (["GML-4.6"], 2, "did you mean GLM-4.5/4.6"),
        (["gpt-oss-20b", "-d", "32G"], 2, "did you mean gpt-oss-120b"),
        (["mixtral", "-d", "3y32"], 2, "such as 3x32G"),
        (["mixtral", "-d", "8G", "--rtt", "-1"], 2, "--rtt -1"),
        (["mixtral", "--context", "0"], 2, "--context"),
        (["mixtral", "-d", "10000000x32G"], 2, "10000000 devices; 1 to 4096"),
        (["nowhere.gguf"], 1, "no such file"),
        ([""], 2, "plan wants a model: a GGUF"),
        ([" "], 2, "plan wants a model: a GGUF"),
    ],
)
def test_one_line_for_what_cannot_be_meant(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(64))
    assert main(["plan", str(tmp_path / "x.gguf"), "-d", "8G"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [encode_pair("general.architecture", ValueType.STRING, "llama")]
    header = encode_header(pairs, [TensorInfo("blk.0.ffn_up.weight", 0, (32, 32))], 32)
    path = tmp_path / "dense.gguf"
    path.write_bytes(header + bytes(4 * 32 * 32))
    for options in ([], ["-d", "64G"]):
        assert main(["plan", str(path), *options]) == 1
        out, error = capsys.readouterr()
        assert not out
        assert re.fullmatch(r"swarmnode: .*no routed experts \(architecture llama\).*this one is dense\n", error)


def test_an_architecture_that_llama_cpp_does_not_know(
    tmp_path: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = write_random_model(RandomModel(n_layers=1), tmp_path / "m.gguf")
    assert main(["plan", str(path), "-d", "8G"]) == 0
    assert "assumed" not in capsys.readouterr().out
    path.write_bytes(path.read_bytes().replace(b"qwen2moe", b"qwen9moe"))
    for model in (str(path), site.add(path)):
        for options in ([], ["-d", "8G"]):
            assert main(["plan", model, *options]) == 1
            out = capsys.readouterr().out
            assert re.match(r"No: .* cannot run, .*: the installed llama.cpp runs no experts of .* 'qwen9moe'", out)
            assert "Yes" not in out
            assert "tokens/s" not in out
            assert main(["plan", model, *options, "--json"]) == 1
            found = json.loads(capsys.readouterr().out)
            assert "'qwen9moe'" in found["needs"]["cannot_run"]
            if options:
                assert (found["fits"], found["given"]) == (False, None)
                assert found["answer"].startswith("No: ")


def test_a_server_that_wants_a_long_wait(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    def habit(handler: Handler) -> bool:
        handler.answer(429, b"x", Retry_After="100000")
        return True

    site.habit = habit
    assert main(["plan", f"{site.url}/m.gguf"]) == 1
    error = capsys.readouterr().err
    assert "429 Too Many Requests and wants no other request for 28 hours" in error
    assert error.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal there")
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 206 Partial Content\r\n"])
def test_ctrl_c_while_a_server_says_nothing(said: bytes) -> None:
    with silent(said, b"X: y\r\n") as server:
        command = [sys.executable, "-m", "swarmnode", "plan", f"http://{server.address}/m.gguf"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert server.heard.wait(60)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        assert time.monotonic() - began < http_file.READ_S / 2
        assert process.returncode == 130
        assert not out


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors are inherited otherwise there")
@pytest.mark.parametrize("command", ["plan mixtral", "plan mixtral --json", "gate --arch grok --json"])
def test_a_closed_standard_output_is_an_error(command: str) -> None:
    script = f'exec "{sys.executable}" -m swarmnode {command} >&-'
    done = subprocess.run(["/bin/sh", "-c", script], stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"swarmnode: standard output is closed.*\n", done.stderr)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
def test_what_could_not_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "swarmnode", "plan", "mixtral", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode not in (0, 2)
    assert "No space left on device" in done.stderr


def test_what_is_waited_for_is_said_on_standard_error(tmp_path: Path, site: Site) -> None:
    (path,) = write_random_model(RandomModel(n_layers=1), tmp_path / "m.gguf")
    url, left = site.add(path), [1]

    def habit(handler: Handler) -> bool:
        if not left:
            return False
        left.pop()
        handler.answer(503, b"x", Retry_After="1")
        return True

    site.habit = habit
    code = "import sys; from swarmnode.cli import main; from swarmnode.model import http_file as f; f.TELL_S = 0.5; "
    command = [sys.executable, "-c", f"{code}sys.exit(main(sys.argv[1:]))", "plan", url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout)["needs"]["n_sites"] == 1
    assert done.stderr == f"{url}: the server answers 503 Service Unavailable; asking again in 1 s\n"
