"""Is greedy text with drafts the text without? `python -m swarmnode.bench.draft_identity [--tokens N] [--json]`.

The demo model in one plain llama.cpp process, so that nothing but the shape of batches differs: the same held-out
prompts with n-gram drafts and without. The drafter is told a WAN's step times, so that it drafts. A text is compared up
to its first difference; there, `margin` is by how many logits the plain run preferred its token to the next best.
llama.cpp's kernels round a batch otherwise than one token, by up to some tenths of a logit, so a token with a smaller
margin may flip; a larger one would be a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from swarmnode.backbone.draft_policy import DraftPriors
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import GenerateRequest, Session, TokenEvent
from swarmnode.backbone.speculation import Drafter, Speculator
from swarmnode.bench.command import count, parser, run_command
from swarmnode.bench.speculation_replay import COSTS
from swarmnode.demo import CONTEXT, MODEL
from swarmnode.gate.text import held_out_tokens

_PROMPT = 96  # tokens
_OUTPUT = 192
_STEP_S = COSTS["80 ms, 4 layers"]


class _FarAway(Speculator):
    """Believes that every step takes a WAN's time."""

    def stepped(self, n_tokens: int, _seconds: float, generations: int = 1, batch_tokens: int = 0) -> None:
        super().stepped(n_tokens, _STEP_S(n_tokens), generations, batch_tokens)


def run(tokens: int = 10_000) -> dict[str, Any]:
    """One row: how many tokens were compared and equal, and each flip's margin in logits."""
    model = LlamaModel(MODEL, remote_experts=False)
    session = Session(model, LlamaContext(model, n_context=CONTEXT, n_batch=CONTEXT, threads=1))
    priors = DraftPriors()
    compared = drafted = accepted = steps = prompts = 0
    flips: list[float] = []
    try:
        text = held_out_tokens(model, 1 + 2 * tokens)
        while compared < tokens and (prompts + 1) * _PROMPT <= len(text):
            part = text[prompts * _PROMPT : (prompts + 1) * _PROMPT]
            request = GenerateRequest(
                prompt=b"".join(map(model.piece, part)).decode("utf-8", "ignore"), max_tokens=_OUTPUT, ignore_end=True
            )
            margins: list[float] = []
            plain, _ = _tokens(session, request, None, margins)
            guessed, result = _tokens(session, request, _FarAway(priors), [])
            pairs = enumerate(zip(plain, guessed, strict=True))
            first = next((at for at, (one, other) in pairs if one != other), len(plain))
            compared += first
            if first < len(plain):
                flips.append(round(margins[first], 4))
            prompts, steps = prompts + 1, steps + result.steps
            drafted, accepted = drafted + result.drafted, accepted + result.drafts_accepted
    finally:
        session.close()
    row = {
        "prompts": prompts,
        "equal_tokens": compared,
        "flips": len(flips),
        "largest_margin": max(flips, default=0.0),
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
    }
    return {"model": MODEL.stem, "rows": [row], "margins": sorted(flips)}


def _tokens(
    session: Session, request: GenerateRequest, drafter: Drafter | None, margins: list[float]
) -> tuple[list[int], Any]:
    events: list[TokenEvent] = []

    def note(_index: int, logits: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        second, best = np.partition(logits, -2)[-2:]
        margins.append(float(best - second))

    result = session.generate(request, events.append, note, drafter=lambda: drafter)
    return [event.token for event in events if event.token >= 0], result


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    made = parser("python -m swarmnode.bench.draft_identity", __doc__)
    made.add_argument("--tokens", type=count, default=10_000, help="to be compared (default %(default)s)")
    return run_command(made, arguments, lambda given: run(given.tokens))


if __name__ == "__main__":
    raise SystemExit(main())
