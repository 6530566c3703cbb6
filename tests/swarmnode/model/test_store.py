from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

import swarmnode
from swarmnode.errors import CorruptSlice, ManifestMismatch, ModelError, TruncatedFile
from swarmnode.model import store as store_module
from swarmnode.model import store_index
from swarmnode.model.manifest import build_manifest, save_manifest
from swarmnode.model.slicing import is_aligned
from swarmnode.model.store import SliceStore

from .conftest import Sample

ALL = {0: range(6), 1: range(6)}
EVERYTHING = {0: (0, 1, 2, 3, 4, 5), 1: (0, 1, 2, 3, 4, 5)}
ROOT = Path(swarmnode.__file__).parent.parent

needs_sigkill = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")


def check(store: SliceStore, sample: Sample) -> None:
    """What is mapped is what the source has, in slot order."""
    for site, experts in store.holdings().items():
        stacks = store.stacked(site)
        assert tuple(stacks) == sample.sites[site].tensors
        for n, stack in enumerate(stacks.values()):
            assert tuple(sorted(stack.experts)) == experts
            assert stack.data.tobytes() == b"".join(sample.slices(site, e)[n] for e in stack.experts)
            assert is_aligned(stack.data)
    store.verify()


@pytest.fixture
def pack(sample: Sample, tmp_path: Path) -> Path:
    """A folder as `store_child.py` wants it."""
    folder = tmp_path / "pack"
    folder.mkdir()
    shutil.copy(sample.path, folder)
    save_manifest(sample.manifest, folder / "manifest.json")
    return folder


def child(action: str, store: Path, pack: Path, count: int = 0) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        str(Path(__file__).with_name("store_child.py")),
        action,
        str(store),
        str(pack),
        str(count),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_add_keeps_order_of_arrival_and_reopens(sample: Sample, tmp_path: Path) -> None:
    with SliceStore(tmp_path, sample.manifest) as store:
        assert store.missing({0: [3, 1], 1: []}) == {0: [1, 3]}
        assert store.stacked(0) == {}
        store.add(0, 3, sample.slices(0, 3))
        before = store.stacked(0)["blk.0.ffn_up_exps.weight"]
        store.add(0, 1, [memoryview(piece) for piece in sample.slices(0, 1)])
        store.add(0, 1, sample.slices(0, 1))  # held already
        assert store.holdings() == {0: (1, 3)}
        assert store.missing({0: [3, 1, 2]}) == {0: [2]}
        assert before.experts == (3,)
        assert before.data.tobytes() == sample.slices(0, 3)[1]
    with SliceStore(tmp_path, sample.manifest) as store:
        assert store.holdings() == {0: (1, 3)}
        stack = store.stacked(0)["blk.0.ffn_down_exps.weight"]
        assert (stack.experts, stack.ne) == ((3, 1), (64, 128))
        assert stack.stride == len(sample.slices(0, 0)[2])
        check(store, sample)


def test_fill_takes_what_is_missing_from_single_and_split_files(sample: Sample, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    one = sample.manifest.expert_bytes(0)
    with SliceStore(tmp_path, sample.manifest) as store:
        store.add(0, 2, sample.slices(0, 2))
        store.fill_from_source(sample.path, {0: [1, 2]}, lambda done, total: seen.append((done, total)))
        assert seen == [(one, one)]
        store.fill_from_source([sample.path], {0: range(4)})
        store.fill_from_source(sample.parts[1], ALL)
        store.fill_from_source(tmp_path / "absent", ALL)  # nothing is missing, nothing is opened
        assert store.holdings() == EVERYTHING
        check(store, sample)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no count of bytes read here")
def test_fill_reads_hardly_more_than_it_keeps(sample: Sample, tmp_path: Path) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    with SliceStore(tmp_path, sample.manifest) as store:
        before = bytes_read()
        store.fill_from_source(sample.path, {0: [0, 2, 3, 5], 1: [1, 4]})
        assert bytes_read() - before <= 1.05 * 6 * sample.manifest.expert_bytes(0)


def test_wrong_bytes_are_refused_and_named(sample: Sample, tmp_path: Path) -> None:
    good = sample.slices(1, 4)
    offset = sample.manifest.tensor("blk.1.ffn_up_exps.weight").offset + 4 * len(good[1])
    with SliceStore(tmp_path, sample.manifest) as store:
        altered = [good[0], bytes([good[1][0] ^ 1]) + good[1][1:], good[2]]
        with pytest.raises(CorruptSlice, match=rf"expert 4 of site 1 .*blk.1.ffn_up_exps.weight at tiny.gguf:{offset}"):
            store.add(1, 4, altered)
        for slices in ([good[1], good[0], good[2]], good[:2], [*good[:2], good[2][:-1]], [*good, b""]):
            with pytest.raises(CorruptSlice, match="expert 4 of site 1"):
                store.add(1, 4, slices)
        for site, expert in ((2, 0), (-1, 0), (0, 6), (0, -1)):
            with pytest.raises(ModelError, match="does not exist"):
                store.add(site, expert, good)
        assert store.holdings() == {}
        store.add(1, 4, good)
        check(store, sample)


def test_a_damaged_source_is_named_and_the_rest_kept(sample: Sample, tmp_path: Path) -> None:
    source = Path(shutil.copy(sample.path, tmp_path / "tiny.gguf"))
    tensor = sample.manifest.tensor("blk.1.ffn_down_exps.weight")
    raw = bytearray(source.read_bytes())
    raw[tensor.offset + 2 * tensor.stride] ^= 0xFF
    source.write_bytes(raw)
    message = rf"{source}: expert 2 of site 1 .*:{tensor.offset + 2 * tensor.stride}"
    with SliceStore(tmp_path / "store", sample.manifest) as store, pytest.raises(CorruptSlice, match=message):
        store.fill_from_source(source, ALL)
    with SliceStore(tmp_path / "store", sample.manifest) as store:
        assert store.holdings() == {0: EVERYTHING[0], 1: (0, 1)}
        store.fill_from_source(sample.path, ALL)
        check(store, sample)


def test_another_model_and_damaged_indexes_are_refused(sample: Sample, tmp_path: Path) -> None:
    with SliceStore(tmp_path, sample.manifest) as store:
        store.add(0, 0, sample.slices(0, 0))
    digests = sample.manifest.digests
    other = build_manifest(sample.gguf, sample.sites, (digests[1], digests[0]))
    with pytest.raises(ManifestMismatch, match="each model a folder of its own"):
        SliceStore(tmp_path, other)
    index = tmp_path / store_index.FILE_NAME
    good = index.read_text()
    for bad in (
        "",
        "{}",
        "[" * 100_000,
        good.replace('"format":1', '"format":2'),
        good.replace('"experts":[0]', '"experts":[9]'),
        good.replace('"experts":[0]', '"experts":[0,0]'),
        good.replace('"site":0', '"site":7'),
    ):
        index.write_text(bad)
        with pytest.raises(ModelError, match=rf"{store_index.FILE_NAME}: .*delete {tmp_path} to fetch again") as caught:
            SliceStore(tmp_path, sample.manifest)
        assert "\n" not in str(caught.value)
    index.write_text(good)
    with SliceStore(tmp_path, sample.manifest) as store:
        check(store, sample)


def test_altered_slots_are_named_and_repaired(sample: Sample, tmp_path: Path) -> None:
    with SliceStore(tmp_path, sample.manifest) as store:
        store.fill_from_source(sample.path, ALL)
    stride = sample.manifest.tensor("blk.1.ffn_up_exps.weight").stride
    [path] = tmp_path.glob("site-00001-*-t1.slots")
    raw = bytearray(path.read_bytes())
    raw[4 * stride + 7] ^= 1
    path.write_bytes(raw)
    message = rf"{path}: blk.1.ffn_up_exps.weight, expert 4 at byte {4 * stride} was altered"
    with SliceStore(tmp_path, sample.manifest) as store, pytest.raises(CorruptSlice, match=message):
        store.verify()
    with SliceStore(tmp_path, sample.manifest, repair=True) as store:
        assert store.holdings() == {0: EVERYTHING[0], 1: (0, 1, 2, 3, 5)}
        assert store.missing(ALL) == {1: [4]}
        check(store, sample)
        store.fill_from_source(sample.path, ALL)
        check(store, sample)


def test_truncated_slots_are_named_and_repaired(sample: Sample, tmp_path: Path) -> None:
    with SliceStore(tmp_path, sample.manifest) as store:
        store.fill_from_source(sample.path, ALL)
    stride = sample.manifest.tensor("blk.0.ffn_down_exps.weight").stride
    [path] = tmp_path.glob("site-00000-*-t2.slots")
    os.truncate(path, 3 * stride + 1)
    message = rf"{path}: blk.0.ffn_down_exps.weight, expert 3 .* has {3 * stride + 1} bytes, {4 * stride} expected"
    with pytest.raises(TruncatedFile, match=message):
        SliceStore(tmp_path, sample.manifest)
    with SliceStore(tmp_path, sample.manifest, repair=True) as store:
        assert store.holdings() == {0: (0, 1, 2), 1: EVERYTHING[1]}
        check(store, sample)
    [path] = tmp_path.glob("site-00001-*-t0.slots")
    path.unlink()
    with SliceStore(tmp_path, sample.manifest, repair=True) as store:
        assert store.holdings() == {0: (0, 1, 2)}
        store.fill_from_source(sample.path, ALL)
        check(store, sample)


def test_forget_frees_space_and_keeps_what_is_mapped(sample: Sample, tmp_path: Path) -> None:
    with SliceStore(tmp_path, sample.manifest) as store:
        store.fill_from_source(sample.path, {0: range(6)})
        old = store.stacked(0)["blk.0.ffn_gate_exps.weight"]
        store.forget(0, [0, 2])
        store.forget(0, [2])
        store.forget(1, [2])
        assert store.holdings() == {0: (1, 3, 4, 5)}
        assert old.data.tobytes() == b"".join(sample.slices(0, expert)[0] for expert in range(6))
        check(store, sample)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.slots")) == 4 * sample.manifest.expert_bytes(0)
        store.add(0, 0, sample.slices(0, 0))
        check(store, sample)
    with SliceStore(tmp_path, sample.manifest) as store:
        store.forget(0, range(6))
        assert store.holdings() == {}
        assert list(tmp_path.glob("*.slots")) == []
    with SliceStore(tmp_path, sample.manifest) as store:
        store.add(0, 5, sample.slices(0, 5))
        check(store, sample)


def test_index_is_written_per_batch(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    real = store_index.save_index

    def counted(folder: Path, index: store_index.StoreIndex) -> None:
        saved.append(sum(len(slots.experts) for slots in index.sites))
        real(folder, index)

    monkeypatch.setattr(store_module, "save_index", counted)
    monkeypatch.setattr(store_module, "BATCH_EXPERTS", 5)
    with SliceStore(tmp_path, sample.manifest) as store:
        store.fill_from_source(sample.path, ALL)
    assert saved == [5, 10, 12]


def test_failed_flush_forgets_the_batch(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    with SliceStore(tmp_path, sample.manifest) as store:
        store.add(0, 0, sample.slices(0, 0))
        store.flush()
        store.add(0, 1, sample.slices(0, 1))
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "flush_file", full)
            with pytest.raises(ModelError, match=r"slots: cannot be written \(No space left on device\)"):
                store.flush()
        assert store.holdings() == {0: (0,)}
        store.add(0, 1, sample.slices(0, 1))
    with SliceStore(tmp_path, sample.manifest) as store:
        assert store.holdings() == {0: (0, 1)}
        check(store, sample)


def test_no_room(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with SliceStore(tmp_path, sample.manifest) as store, pytest.raises(ModelError, match="make room or hold fewer"):
        store.fill_from_source(sample.path, ALL)


def test_read_gives_what_was_added(sample: Sample, tmp_path: Path) -> None:
    with SliceStore(tmp_path, sample.manifest) as store:
        store.add(0, 3, sample.slices(0, 3))
        store.add(0, 1, sample.slices(0, 1))
        assert b"".join(store.read(0, 1)) == b"".join(sample.slices(0, 1))
        with pytest.raises(ModelError, match="expert 2 of site 0 is not held"):
            next(store.read(0, 2))
        begun = store.read(0, 1)
        next(begun)
        store.forget(0, [3])
        assert b"".join(store.read(0, 1)) == b"".join(sample.slices(0, 1))
        with pytest.raises(ModelError, match="cannot be read"):
            list(begun)
        store.stacked(0)


def test_threads_that_change_and_read_do_not_meet(sample: Sample, tmp_path: Path) -> None:
    with SliceStore(tmp_path, sample.manifest) as store:
        store.add(0, 5, sample.slices(0, 5))

        def change(experts: list[int]) -> None:
            for _ in range(10):
                for expert in experts:
                    store.add(0, expert, sample.slices(0, expert))
                store.forget(0, experts)

        with ThreadPoolExecutor(2) as pool:
            changing = [pool.submit(change, experts) for experts in ([0, 1], [2, 3])]
            while not all(job.done() for job in changing):
                assert 5 in store.holdings()[0]
                with contextlib.suppress(ModelError):  # the file was replaced in that moment
                    for stack in store.stacked(0).values():
                        n = sample.sites[0].tensors.index(stack.name)
                        for slot, expert in enumerate(stack.experts):
                            data = stack.data[slot * stack.stride : (slot + 1) * stack.stride]
                            assert data.tobytes() == sample.slices(0, expert)[n]
            for job in changing:
                job.result()
        assert store.holdings() == {0: (5,)}
        check(store, sample)


def test_without_a_digest_an_expert_is_kept_by_its_checksums(sample: Sample, tmp_path: Path) -> None:
    digests = (("", *sample.manifest.digests[0][1:]), *sample.manifest.digests[1:])
    manifest = msgspec.structs.replace(sample.manifest, digests=digests)
    with SliceStore(tmp_path, manifest) as store:
        store.add(0, 0, sample.slices(0, 0))
        store.verify()
        [file] = list(tmp_path.glob("site-00000-g0-t1.slots"))
    data = bytearray(file.read_bytes())
    data[9] ^= 4
    file.write_bytes(data)
    with SliceStore(tmp_path, manifest) as store, pytest.raises(CorruptSlice, match="was altered"):
        store.verify()


def test_a_file_where_the_folder_should_be(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"file: cannot be opened"):
        SliceStore(tmp_path / "file", sample.manifest)


@needs_sigkill
def test_disk_full_is_one_line_and_can_go_on(sample: Sample, tmp_path: Path, pack: Path) -> None:
    output, _ = child("full", tmp_path / "store", pack).communicate(timeout=60)
    assert output.count("\n") == 1
    assert "cannot be written (File too large)" in output
    with SliceStore(tmp_path / "store", sample.manifest) as store:
        held = sum(map(len, store.holdings().values()))
        assert 0 < held < 12
        check(store, sample)
        store.fill_from_source(sample.path, ALL)
        check(store, sample)


def test_a_second_process_is_told_who_holds_the_store(sample: Sample, tmp_path: Path, pack: Path) -> None:
    with child("hold", tmp_path / "store", pack) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        with pytest.raises(ModelError, match=rf"used by another swarmnode \(process {holder.pid}\)"):
            SliceStore(tmp_path / "store", sample.manifest)
        holder.communicate("", timeout=60)
    with SliceStore(tmp_path / "store", sample.manifest) as store:
        with pytest.raises(ModelError, match="used by another"):
            SliceStore(tmp_path / "store", sample.manifest)
        store.close()
        SliceStore(tmp_path / "store", sample.manifest).close()


@needs_sigkill
def test_killed_at_any_point_keeps_what_was_indexed(sample: Sample, tmp_path: Path, pack: Path) -> None:
    """Killed at ever later operations on its files, the fill gets further each time and at last is complete."""
    folder = tmp_path / "store"
    held: set[tuple[int, int]] = set()
    kills = 0
    for count in range(3, 200, 6):
        with child("fill", folder, pack, count) as process:
            process.communicate(timeout=60)
        with SliceStore(folder, sample.manifest) as store:
            check(store, sample)
            now = {(site, expert) for site, experts in store.holdings().items() for expert in experts}
        assert held <= now
        held = now
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills >= 3
    assert len(held) == 12


@needs_sigkill
@pytest.mark.parametrize("experts", [1, 4, 7])
def test_killed_from_outside_in_the_middle_of_filling(sample: Sample, tmp_path: Path, pack: Path, experts: int) -> None:
    folder = tmp_path / "store"
    with child("fill", folder, pack) as process:
        assert process.stdout is not None
        for _ in range(experts):
            process.stdout.readline()
        process.kill()
    with SliceStore(folder, sample.manifest) as store:
        assert sum(map(len, store.holdings().values())) >= experts // 2 * 2
        check(store, sample)
        store.fill_from_source(sample.path, ALL)
        check(store, sample)
        assert store.holdings() == EVERYTHING


@needs_sigkill
@pytest.mark.parametrize("count", [6, 10, 16, 22, 25, 27])
def test_killed_while_forgetting(sample: Sample, tmp_path: Path, pack: Path, count: int) -> None:
    folder = tmp_path / "store"
    with SliceStore(folder, sample.manifest) as store:
        store.fill_from_source(sample.path, ALL)
    with child("forget", folder, pack, count) as process:
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    with SliceStore(folder, sample.manifest) as store:
        assert store.holdings()[0] in ((0, 1, 2, 3, 4, 5), (0, 2, 3, 5))
        assert store.holdings()[1] == EVERYTHING[1]
        check(store, sample)
        assert len(list(folder.glob("*.slots"))) == 6
