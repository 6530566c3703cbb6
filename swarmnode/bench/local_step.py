"""What a step of one token computes where nothing is remote: plain llama.cpp, the whole model in this process.

No swarm on this machine can decode faster than this plus its round trips, but for what it hides in them. Called by
`wan_measure.py`.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from pathlib import Path

from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import Session

PROMPT, STEPS = 8, 24  # tokens; what they are does not matter


def local_step_s(model: Path, threads: int) -> float:
    """Median seconds of a step of `model` after a short prompt. ModelError where it cannot be loaded."""
    whole = LlamaModel(model, remote_experts=False)
    context = LlamaContext(whole, n_context=PROMPT + STEPS, n_batch=PROMPT, threads=threads)
    with closing(Session(whole, context)) as session:
        session.evaluate([at % whole.n_vocab for at in range(PROMPT)], 0)
        found = []
        for step in range(STEPS):
            began = time.perf_counter()
            session.evaluate([step % whole.n_vocab], PROMPT + step)
            found.append(time.perf_counter() - began)
    return statistics.median(found)
