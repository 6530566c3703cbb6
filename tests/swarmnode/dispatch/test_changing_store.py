"""A worker over a slice store that grows and shrinks on disk while it serves: the shipped model, slice by slice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.demo import MODEL
from swarmnode.dispatch.hello import mask_of
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.request import combine, make_request
from swarmnode.model.store import SliceStore
from swarmnode.onboard import ModelPack
from tests.swarmnode.dispatch.samples import make_input
from tests.swarmnode.dispatch.swarm import swarm
from tests.swarmnode.dispatch.test_changes import note_faults
from tests.swarmnode.helpers import poll

PATIENT = DispatchOptions(late_floor_s=60, late_ceiling_s=60)
MAPS = Path("/proc/self/maps")


def mapped(folder: Path) -> list[str]:
    """Lines of the slot files below a folder that this process still maps."""
    return [line for line in MAPS.read_text().splitlines() if str(folder) in line]


async def maps_become(folder: Path, count: int) -> None:
    async def so() -> bool:
        return len(mapped(folder)) == count

    await poll(so)


@pytest.mark.skipif(not MAPS.exists(), reason="no /proc/self/maps here")
async def test_slices_come_and_go_on_disk_and_in_memory(
    demo_pack: ModelPack, demo_engine: ExpertEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = note_faults(monkeypatch)
    manifest = demo_pack.manifest
    sites = manifest.sites[:2]
    inputs, expected = [], []
    for site in sites:
        x, ids, weights = make_input(site, 2)
        request = make_request(site, x, ids, weights, partial=False)
        share = request.share(range(len(request.experts)))
        inputs.append((site.index, x, ids, weights))
        expected.append(combine(request, [(share, share.compute(demo_engine))]).tobytes())
    random = np.random.default_rng(0)
    store = SliceStore(tmp_path / "slices", manifest)
    engine = ExpertEngine(ExpertBank(manifest.sites, {}, "cpu"))
    async with swarm(PATIENT, local=demo_engine, sites=manifest.sites) as s:
        member = await s.add({}, engine=engine)
        done = asyncio.Event()

        async def ask() -> None:
            while not done.is_set():
                for one, rows in zip(inputs, expected, strict=True):
                    assert (await s.call(*one)).tobytes() == rows

        asking = asyncio.create_task(ask())
        for number in range(24):
            index = number % len(sites)
            held = set(store.holdings().get(index, ()))
            wanted = {int(e) for e in random.permutation(sites[index].n_expert)[: random.integers(0, 12)]}
            if number % 3:  # grow; else hold others altogether, or nothing
                wanted |= held
            await asyncio.to_thread(store.fill_from_source, MODEL, {index: wanted})
            await asyncio.to_thread(store.forget, index, held - wanted)
            await member.real.change({index: store.stacked(index)}, grace_s=0.01)
            assert member.real.holdings.get(index, 0) == mask_of(wanted)
            # each file that is held is mapped once, and nothing of what it was before, once no call computes with it
            tensors = sum(len(sites[i].tensors) for i in store.holdings())
            await maps_become(tmp_path, tensors)
        done.set()
        await asking
        stats = member.real.stats()
        assert stats.calls > 0
        assert set(stats.refused) <= {"not_held"}
        assert faults <= {"late"}
        for index in range(len(sites)):
            await member.real.change({index: {}}, grace_s=0.0)
        await maps_become(tmp_path, 0)
    engine.close()
    store.close()
