"""What n-gram speculation would gain on given texts, offline: `python -m swarmnode.bench.speculation_replay`.

Token streams are replayed through the `Speculator` as a session would: what it drafts is compared with what really
came. Nothing is decoded meanwhile; a step's seconds come from a cost curve, so one stream shows every kind of link.
Streams: the demo model's own output, greedy and at temperature 0.8 (a local run), and real text that it was not trained
on: code, English, and code with edits (one token in thirty replaced, inserted or left out).

Each kind of stream is a node of its own, whose generations run one after the other and share what they learn. `speedup`
is over all of them, `lowest` that of the worst single one. `noise` strays the seconds that the drafter is told.
"""

from __future__ import annotations

import ast
import math
import random
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnode.backbone.draft_policy import DraftPriors
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, Session, TokenEvent
from swarmnode.backbone.speculation import Drafter, Speculator
from swarmnode.bench.command import not_negative, parser, run_command
from swarmnode.demo import CONTEXT, MODEL
from swarmnode.gate.text import held_out_tokens

Seconds = Callable[[int], float]  # of a decode, by its tokens
Stream = tuple[list[int], list[int]]  # prompt, output

# Seconds of a decode of n tokens. One machine: each guess brings other experts in, the first ones nearly as many.
_ONE_MACHINE = (1.0, 1.6, 1.9, 2.15, 2.4, 2.6, 2.75, 2.9)
COSTS: dict[str, Seconds] = {
    "80 ms, 4 layers": lambda n: 0.33 + 0.01 * (n - 1),
    "80 ms, 10 Mbit/s": lambda n: 0.33 + 0.05 * (n - 1),
    "LAN": lambda n: 0.004 + 0.001 * (n - 1),
    "one machine": lambda n: 0.0015 * (_ONE_MACHINE[n - 1] if n <= len(_ONE_MACHINE) else 2.9 + 0.1 * (n - 8)),
    "no gain possible": lambda n: 0.01 * n,
}
_EDIT = 1 / 30


@dataclass(frozen=True, slots=True)
class Replay:
    """One stream through one drafter: tokens after the first, which the prompt's decode gives; the curve's seconds."""

    tokens: int
    steps: int
    drafted: int
    accepted: int
    seconds: float
    plain_seconds: float


def replay(
    stream: Stream, drafter: Drafter, seconds: Seconds, *, noise: float = 0.0, chance: random.Random | None = None
) -> Replay:
    """Run a stream as a session does; `noise` is the standard deviation of the told seconds, of a plain step."""
    prompt, output = stream
    drafter.accept(prompt)
    drafter.stepped(len(prompt), seconds(len(prompt)))
    drafter.accept(output[:1])
    at, steps, drafted, accepted, took = 1, 0, 0, 0, 0.0
    while at < len(output):
        draft = drafter.draft(len(output) - at - 1)
        right = 0
        while right < len(draft) and draft[right] == output[at + right]:
            right += 1
        step = seconds(1 + len(draft))
        took += step
        told = step + (chance.gauss(0.0, noise) * seconds(1) if chance is not None and noise else 0.0)
        drafter.stepped(1 + len(draft), max(told, 0.2 * step))
        drafter.accept(output[at : at + right + 1])
        at += right + 1
        steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + right
    return Replay(len(output) - 1, steps, drafted, accepted, took, (len(output) - 1) * seconds(1))


def edited(tokens: Sequence[int], n_vocab: int, chance: random.Random) -> list[int]:
    """Return the tokens with one in thirty replaced, left out (up to three) or followed by up to three others."""
    result: list[int] = []
    skip = 0
    for token in tokens:
        if skip:
            skip -= 1
        elif chance.random() >= _EDIT:
            result.append(token)
        elif (edit := chance.randrange(3)) == 0:
            skip = chance.randrange(3)
        else:
            count = 1 if edit == 1 else chance.randrange(1, 4)
            result += [token] * (edit == 2) + [chance.randrange(n_vocab) for _ in range(count)]
    return result


def real_streams(model: LlamaModel, count: int) -> dict[str, list[Stream]]:
    """Real text in place of a model's output: a third of each piece is the prompt."""
    length = 1800
    code = held_out_tokens(model, count * length)
    pieces = [code[at : at + length] for at in range(0, len(code), length)]
    chance = random.Random(5)
    return {
        "code (real)": [(piece[:600], piece[600:]) for piece in pieces],
        "edited code (real)": [(piece[:800], edited(piece[:800], model.n_vocab, chance)) for piece in pieces],
        "English (real)": [(text[:200], text[200:]) for text in _docstrings(model, count)],
    }


def _docstrings(model: LlamaModel, count: int) -> list[list[int]]:
    """Long docstrings of the standard library's modules."""
    found: list[list[int]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        if len(text) >= 1500:
            found.append(model.tokenize(text, special=False)[:1800])
            if len(found) == count:
                break
    return found


def model_streams(model: LlamaModel, count: int, tokens: int) -> dict[str, list[Stream]]:
    """The demo model's own output after real prompts, greedy and sampled."""
    real = real_streams(model, count)
    prompts = {
        name: [b"".join(model.piece(token) for token in prompt[:150]).decode("utf-8", "ignore") for prompt, _ in texts]
        for name, texts in (("code", real["code (real)"]), ("English", real["English (real)"]))
    }
    context = LlamaContext(model, n_context=CONTEXT, n_batch=CONTEXT, threads=1)
    session = Session(model, context)
    try:
        return {
            f"{name} ({'greedy' if not temperature else f'sampled at {temperature}'})": [
                _generated(session, prompt, temperature, seed, tokens) for seed, prompt in enumerate(texts)
            ]
            for name, texts in prompts.items()
            for temperature in (0.0, 0.8)
        }
    finally:
        context.close()


def _generated(session: Session, prompt: str, temperature: float, seed: int, tokens: int) -> Stream:
    request = GenerateRequest(
        prompt=prompt, max_tokens=tokens, ignore_end=True, sampling=Sampling(temperature=temperature, seed=seed)
    )
    events: list[TokenEvent] = []
    session.generate(request, events.append)
    return session.prompt_tokens(request), [event.token for event in events if event.token >= 0]


def rows_of(streams: dict[str, list[Stream]], noise: float) -> list[dict[str, Any]]:
    """One row per kind of stream and cost curve."""
    rows: list[dict[str, Any]] = []
    for link, seconds in COSTS.items():
        for name, texts in streams.items():
            priors, chance = DraftPriors(), random.Random(1)
            done = [replay(text, Speculator(priors), seconds, noise=noise, chance=chance) for text in texts]
            tokens, steps = sum(r.tokens for r in done), sum(r.steps for r in done)
            rows.append(
                {
                    "link": link,
                    "stream": name,
                    "tokens": tokens,
                    "accepted_per_step": round(tokens / steps, 3) if steps else math.nan,
                    "drafted_per_step": round(sum(r.drafted for r in done) / steps, 2) if steps else math.nan,
                    "speedup": round(sum(r.plain_seconds for r in done) / sum(r.seconds for r in done), 3),
                    "lowest": round(min(r.plain_seconds / r.seconds for r in done), 3),
                }
            )
    return rows


def run(*, quick: bool = False, noise: float = 0.05) -> dict[str, Any]:
    """Make the streams and replay them. Quick: two short generations of each kind."""
    model = LlamaModel(MODEL, remote_experts=False)
    try:
        count, tokens = (2, 60) if quick else (8, 300)
        streams = {**model_streams(model, count, tokens), **real_streams(model, count)}
    finally:
        model.close()
    return {"model": MODEL.name, "generations": count, "noise": noise, "rows": rows_of(streams, noise)}


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    made = parser("python -m swarmnode.bench.speculation_replay", __doc__)
    made.add_argument("--quick", action="store_true", help="two short generations of each kind")
    made.add_argument("--noise", type=not_negative, default=0.05, help="of the told seconds, of a plain step")
    return run_command(made, arguments, lambda given: run(quick=given.quick, noise=given.noise))


if __name__ == "__main__":
    raise SystemExit(main())
