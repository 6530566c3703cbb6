"""`swarmnode demo`: a whole swarm on this machine, checked against the local run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.options import AsJson, Emulate, Mode, Quic, Wire


def demo(
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens to generate.")] = 64,
    prompt: Annotated[str | None, typer.Option(help="Another prompt than the built-in one.")] = None,
    workers: Annotated[int, typer.Option(help="Worker processes; each holds an equal share.")] = 3,
    model: Annotated[Path | None, typer.Option(help="Another GGUF than the shipped one.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    mode: Mode = None,
    wire: Wire = None,
    emulate: Emulate = None,
    quic: Quic = None,
    as_json: AsJson = False,
) -> None:
    """Start a backbone and workers as processes here, generate, check against the plain local run, stop everything."""
    import asyncio  # noqa: PLC0415
    import contextlib  # noqa: PLC0415
    import json  # noqa: PLC0415
    import signal  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from swarmnode import demo as rooms  # noqa: PLC0415
    from swarmnode import demo_view  # noqa: PLC0415
    from swarmnode.backbone.sampling import Sampling  # noqa: PLC0415

    options = rooms.DemoOptions(
        model=model if model is not None else rooms.MODEL,
        prompt=prompt if prompt is not None else rooms.PROMPT,
        tokens=tokens,
        workers=workers,
        mode=mode or "exact",
        wire=wire or "f32",
        sampling=Sampling(temperature=temperature, seed=seed),
        emulate=emulate,
        quic=quic,
    )
    console = Console()

    async def run() -> dict[str, Any]:
        task = asyncio.current_task()
        assert task is not None
        for name in ("SIGTERM", "SIGHUP"):  # a closed terminal must not leave the swarm's folder behind
            with contextlib.suppress(NotImplementedError, AttributeError):
                asyncio.get_running_loop().add_signal_handler(getattr(signal, name), task.cancel)
        return await rooms.run_demo(options, view)

    with demo_view.SilentView() if as_json else demo_view.LiveView(console, options.prompt) as view:
        try:
            report = asyncio.run(run())
        except asyncio.CancelledError:
            raise typer.Abort from None
    if as_json:
        print(json.dumps(report))
    else:
        demo_view.verdict(console, options.prompt, report, options.mode)
    if options.mode == "exact" and not report["identical"]:
        raise typer.Exit(1)
