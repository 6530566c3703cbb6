"""The shape of `bench bulk`, what its parts are made of, and that nothing is left. Never a time."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from swarmnode.bench import bulk as bench
from swarmnode.bench.bulk import Layout
from swarmnode.bench.bulk_processes import MANIFEST, SOURCE, Part
from swarmnode.bulk.provider import SourceProvider
from swarmnode.errors import SwarmnodeError
from swarmnode.model.manifest import load_manifest

SMALL_MB = 1.0  # becomes the fewest experts that a model has


@pytest.mark.slow
def test_every_way_has_a_row_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    monkeypatch.setattr(bench, "TRIES", 1)
    result = bench.run(megabytes=SMALL_MB, rounds=1, layouts=[Layout(2, 1)])
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not list(tmp_path.iterdir())
    assert json.loads(json.dumps(result)) == result
    assert [row["way"] for row in result["rows"]] == list(bench.WAYS)
    assert result["megabytes"] == round(bench.N_USED * bench.EXPERT_BYTES / bench.MB, 1)
    for row in result["rows"]:
        assert (row["connections"], row["processes"], row["n"]) == (2, 1, 1)
        assert row["MBps_low"] <= row["MBps"] * 1.001
        assert row["MBps"] * 0.999 <= row["MBps_high"]
        assert row["seconds"] > 0
        assert row["sender_s_per_GB"] > 0
        assert row["receiver_s_per_GB"] > 0
        assert (row["store"] > 0) == (row["way"] == "bulk")
        assert 0 < row["of_far"] < 1
        assert row["limit"]
        assert row["note"]
        assert (row["vs_tls"] == 1) or row["way"] != "tcp-tls"
    assert len(bench.table(result).splitlines()) == 2 + len(result["rows"])


def test_pairs_of_processes_share_the_work(tmp_path: Path) -> None:
    size = bench.write_source(tmp_path, SMALL_MB)
    figures = bench.measure(tmp_path, "bulk", Layout(1, 2), size)
    assert figures["MBps"] == pytest.approx(size / figures["seconds"] / bench.MB)
    assert not list(tmp_path.glob("store-*"))


def test_the_source_is_a_model_whose_bytes_are_not_all_alike(tmp_path: Path) -> None:
    size = bench.write_source(tmp_path, 60.0)
    manifest = load_manifest(tmp_path / MANIFEST)
    assert abs(size - 60e6) <= bench.EXPERT_BYTES / 2
    assert size == manifest.expert_bytes(0) * manifest.sites[0].n_expert
    provider = SourceProvider(manifest, tmp_path / SOURCE)
    read = [hashlib.sha256(b"".join(map(bytes, provider.read(0, e)))).hexdigest() for e in range(3)]
    assert read == list(manifest.digests[0][:3])
    assert len(set(manifest.digests[0])) == manifest.sites[0].n_expert
    for count in (1, 2, 3):
        parts = [Part(tmp_path, "bulk", 1, number, count) for number in range(count)]
        assert [expert for part in parts for expert in part.experts(manifest)] == list(range(len(manifest.digests[0])))
        assert [Part.parse(*part.words) for part in parts] == parts


def test_of_disturbed_measurements_the_least_disturbed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(others: list[float]) -> tuple[float, int]:
        left = list(others)
        monkeypatch.setattr(bench, "measure", lambda *_: {"others": left.pop(0)})
        return bench._undisturbed(Path(), "bulk", Layout(1, 1), 1, 3)["others"], len(others) - len(left)

    assert counted([0.1, 0.0]) == (0.1, 1)
    assert counted([0.9, 0.1, 0.0]) == (0.1, 2)
    assert counted([0.7, 0.5, 0.9, 0.0]) == (0.5, 3)


def test_what_limits() -> None:
    figures = {"sender_loop": 0.5, "receiver_loop": 0.5, "store": 0.0, "cores": 1.0, "others": 0.0}
    assert bench.limit(figures, 2) == "nothing alone: they wait for each other"
    assert bench.limit(figures | {"sender_loop": 0.97}, 2) == "the sender's loop"
    assert bench.limit(figures | {"store": 0.9, "cores": 1.95}, 2) == "hashing and writing, all cores"
    assert bench.limit(figures | {"others": 0.95}, 2) == "other work on the cores"


@pytest.mark.parametrize("arguments", [["--way", "pigeon"], ["--megabytes", "0"], ["--rounds", "0"]])
def test_what_cannot_be_meant_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)


@pytest.mark.parametrize(("megabytes", "said"), [("1e12", "1,000,000 at most"), ("1e6", "no room for twice as many")])
def test_more_bytes_than_there_can_be_are_refused(
    megabytes: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=1e12))
    assert bench.main(["--megabytes", megabytes]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_process_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(SwarmnodeError, match="bulk_processes serve"):
        bench.measure(tmp_path, "bulk", Layout(1, 1), 1)  # there is no source
