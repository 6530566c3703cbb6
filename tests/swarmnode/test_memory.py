"""The backbone's process does not hold the experts, on disk or in memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.local_swarm import LocalSwarm
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import onboard

# Experts of 650 MB beside a dense part of a few MB.
MODEL = RandomModel(
    d_model=1024,
    n_layers=2,
    n_ff_expert=1024,
    n_expert=96,
    n_used=8,
    expert_types={"gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"},
    n_ff_shared=256,
)

LOCAL_RUN = """
import sys, psutil
from pathlib import Path
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import GenerateRequest, Session
model = LlamaModel(Path(sys.argv[1]), remote_experts=False)
session = Session(model, LlamaContext(model, n_context=128, n_batch=128, threads=1))
session.generate(GenerateRequest(prompt="a b c d e f g h" * 4, max_tokens=4))
print(psutil.Process().memory_info().rss)
"""


@pytest.mark.slow
async def test_backbone_memory_does_not_contain_the_experts(tmp_path: Path) -> None:
    (source,) = write_random_model(MODEL, tmp_path / "model.gguf")
    pack = onboard(source, tmp_path / "pack")
    expert_bytes = sum(t.stride * t.ne[-1] for t in pack.manifest.tensors)
    assert expert_bytes > 600 << 20
    async with LocalSwarm(tmp_path, pack.path) as swarm:
        await swarm.start(["1/2", "2/2"], backbone=["--no-local-experts", "--context", "128"])
        request = {"prompt": "a b c d e f g h" * 4, "max_tokens": 4}
        events = [event async for event in swarm.backbone.generate(request)]
        backbone = (await swarm.backbone.status())["memory"]
    assert events[-1]["event"] == "result"
    local = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", LOCAL_RUN, str(source)], capture_output=True, text=True, check=True
    )
    assert int(local.stdout) > expert_bytes
    assert backbone < int(local.stdout) - 0.85 * expert_bytes  # it has its own code and rows under way
    assert pack.backbone.stat().st_blocks * 512 < expert_bytes / 10
