"""The demo: one backbone and several workers as processes of this machine, checked against the plain local run.

Not a simulation: it starts `swarmnode up` like a person would. Called by the `demo` command.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, GenerateResult, Session, TokenEvent
from swarmnode.config import build_config
from swarmnode.control import Json
from swarmnode.errors import Cancelled, ControlError, UsageError
from swarmnode.gate import Verdict, gate_failure
from swarmnode.gate.known_verdicts import keep_verdict
from swarmnode.gate.wires import GateOptions, measure
from swarmnode.local_swarm import LocalSwarm
from swarmnode.onboard import ModelPack, onboard

MODEL = Path(__file__).parent / "data" / "pystdlib-moe-15m-Q4_K_M.gguf"
CONTEXT, BATCH = 512, 512  # tokens; the same on both sides, because a batch's shape decides bits
MAX_WORKERS = 16
GATE_POSITIONS = 1024  # of real text, where rows of INT8 or FP8 are asked for
_REFRESH = 0.25  # seconds between two looks at the backbone's status

PROMPT = '''"""Read and write lines of a configuration file."""

import os
import re

class Parser:
    """A simple parser of lines.

    Each line is a key and a value, separated by an equals sign.
    """

    def __init__(self, filename, encoding=None):
        self.filename = filename
        self.encoding = encoding
        self.lines = []

    def read(self):
        """Read the file and return a list of lines."""
        with open(self.filename, encoding=self.encoding) as f:
           '''


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run. `emulate` and `quic` are passed on to the backbone and, `quic`, to the workers."""

    model: Path = MODEL
    prompt: str = PROMPT
    tokens: int = 64
    workers: int = 3
    mode: str = "exact"
    wire: str = "f32"
    sampling: Sampling = field(default_factory=Sampling)
    emulate: str | None = None
    quic: str | None = None


class View(Protocol):
    """Shows a running demo."""

    def stage(self, text: str) -> None:
        """What is being done now."""

    def token(self, text: str) -> None:
        """More text."""

    def status(self, status: Json) -> None:
        """A new snapshot of the backbone."""


async def run_demo(options: DemoOptions, view: View) -> Json:
    """Start the swarm, generate, compare, stop. Returns the JSON shape of `demo`; raises SwarmnodeError."""
    if not 1 <= options.workers <= MAX_WORKERS:
        raise UsageError(f"--workers {options.workers}: give 1 to {MAX_WORKERS}")
    request = GenerateRequest(
        prompt=options.prompt, max_tokens=options.tokens, sampling=options.sampling, digests=True, ignore_end=True
    )
    request.check()
    # The flags of the nodes, judged before anything is started.
    flags = {"mode": options.mode, "wire": options.wire, "emulate": options.emulate, "quic": options.quic}
    config = build_config({"model": options.model, **flags}, None, state_dir=Path())
    with tempfile.TemporaryDirectory(prefix="swarmnode-demo-") as name:
        folder = Path(name)
        view.stage("onboarding the model: backbone file and manifest")
        pack = await asyncio.to_thread(onboard, options.model, folder / "pack")
        gate_failure(pack, force=False)  # before anything is started
        if set(config.wires) - {"f32", "f16"}:
            view.stage("measuring which wire types the model can have")
            keep_verdict(pack, await _measured(pack))
            gate_failure(pack, force=False)
        view.stage("running the model as one plain local process")
        local = await asyncio.to_thread(local_run, pack.source or options.model, request)
        view.stage(f"starting {options.workers} workers and a backbone")
        async with LocalSwarm(folder, pack.path) as swarm:
            quic = ["--quic", options.quic] if options.quic else []
            emulate = ["--emulate", options.emulate] if options.emulate else []
            await swarm.start(
                [f"{i + 1}/{options.workers}" for i in range(options.workers)],
                backbone=[
                    *quic, *emulate, "--no-local-experts", "--mode", options.mode, "--wire", options.wire,
                    "--context", str(CONTEXT), "--batch", str(BATCH),
                ],
                worker=quic,
            )  # fmt: skip
            view.stage("generating over the swarm")
            tokens, result, sites, status = await _swarm_run(swarm, request, view)
            view.stage("stopping")
        return _report(local, tokens, result, sites, status)


async def _measured(pack: ModelPack) -> Verdict:
    """The gate's verdict, from a thread that ends soon after this is cancelled."""
    over = threading.Event()

    def go_on(_stage: str, _done: int, _total: int) -> None:
        if over.is_set():
            raise Cancelled("cancelled")

    try:
        return await asyncio.to_thread(measure, pack, GateOptions(positions=GATE_POSITIONS), go_on)
    finally:
        over.set()


def local_run(model_file: Path, request: GenerateRequest) -> tuple[list[TokenEvent], GenerateResult]:
    """The reference: the same file, prompt, batch shapes and sampler in one llama.cpp process without a hook."""
    model = LlamaModel(model_file, remote_experts=False)
    try:
        session = Session(model, LlamaContext(model, n_context=CONTEXT, n_batch=BATCH, threads=1))
        try:
            events: list[TokenEvent] = []
            result = session.generate(request, events.append)
            return [e for e in events if e.token >= 0], result
        finally:
            session.context.close()
    finally:
        model.close()


async def _swarm_run(
    swarm: LocalSwarm, request: GenerateRequest, view: View
) -> tuple[list[Json], Json, list[Json], Json]:
    async def watch() -> None:
        while True:
            view.status(await swarm.backbone.status())
            await asyncio.sleep(_REFRESH)

    tokens: list[Json] = []
    result: Json | None = None
    sites: list[Json] = []
    watching = asyncio.create_task(watch())
    try:
        async for event in swarm.backbone.generate(msgspec.to_builtins(request)):
            if event["event"] == "token":
                view.token(event["text"])
                if event["token"] >= 0:
                    tokens.append(event)
            elif event["event"] == "result":
                result, sites = event["result"], event["sites"]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    status = await swarm.backbone.status()
    view.status(status)
    if result is None:
        raise ControlError("the backbone ended the generation without a result")
    return tokens, result, sites, status


def _report(
    local: tuple[list[TokenEvent], GenerateResult],
    tokens: Sequence[Json],
    result: Json,
    sites: Sequence[Json],
    status: Json,
) -> Json:
    local_events, local_result = local
    expected = [(e.token, e.digest) for e in local_events]
    got = [(e["token"], e["digest"]) for e in tokens]
    round_trips = sum(site["round_trips"] for site in sites)
    bytes_out = sum(site["bytes_out"] for site in sites)
    bytes_back = sum(site["bytes_back"] for site in sites)
    evaluated = result["prompt_tokens"] + result["steps"]
    report: dict[str, Any] = {
        "identical": got == expected and bool(got) and result["text"] == local_result.text,
        "same_text": result["text"] == local_result.text,
        "identical_logit_rows": sum(a == b for a, b in zip(got, expected, strict=False)),
        "tokens": result["tokens"],
        "prompt_tokens": result["prompt_tokens"],
        "text": result["text"],
        "tokens_per_s": round(result["tokens_per_s"], 2),
        "local_tokens_per_s": round(local_result.tokens_per_s, 2),
        "blocking_round_trips_per_token": round(result["blocking_round_trips_per_token"], 3),
        "workers": [
            {key: peer[key] for key in ("peer", "name", "path", "rtt_ms", "experts", "rows", "latency_ms")}
            for peer in sorted(status["peers"], key=lambda peer: str(peer["name"]))
            if peer["role"] == "worker"
        ],
        "sites": list(sites),
        "round_trips": round_trips,
        "bytes_out": bytes_out,
        "bytes_back": bytes_back,
        "bytes_per_token_per_site": round((bytes_out + bytes_back) / max(1, evaluated * len(sites)), 1),
        "backbone_memory": status["memory"],
    }
    return report
