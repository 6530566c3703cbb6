"""`swarmnode generate`: text from the running backbone of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.options import AsJson, State, state_dir


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input, @FILE a file.")],
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="At most this many tokens.")] = 128,
    chat: Annotated[bool, typer.Option(help="Put the prompt through the model's chat template.")] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repeat_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[
        int, typer.Option(help="Same seed, same text, but for the rounding of drafts and shared steps.")
    ] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; repeat for more.")] = None,
    speculate: Annotated[
        bool | None,
        typer.Option("--speculate/--no-speculate", help="Draft tokens ahead.", show_default="as the node was started"),
    ] = None,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Generate with the running backbone (swarmnode up --model …). Ctrl-C ends the generation."""
    import asyncio  # noqa: PLC0415
    import json  # noqa: PLC0415
    import sys  # noqa: PLC0415

    import msgspec  # noqa: PLC0415

    from swarmnode import control  # noqa: PLC0415
    from swarmnode.backbone.sampling import Sampling  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415

    if prompt == "-":
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input cannot be read as text: {error}") from None
    elif prompt.startswith("@"):
        try:
            prompt = Path(prompt[1:]).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{prompt[1:]}: cannot be read as text: {error}") from None
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("the prompt is not UTF-8 text") from None
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty, seed=seed
    )
    sampling.check(n_vocab=0)
    request = {
        **({"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}),
        "max_tokens": tokens,
        "stop": stop or [],
        "sampling": msgspec.to_builtins(sampling),
        "speculate": speculate,
    }

    async def run() -> None:
        async for event in control.request(state_dir(state), "generate", request=request):
            if event["event"] == "token" and not as_json:
                print(event["text"], end="", flush=True)
            elif event["event"] == "result":
                result = event["result"]
                if as_json:
                    print(json.dumps(result))
                else:
                    drafts = f", {result['accepted_per_step']:.2f} per step" if result["drafted"] else ""
                    full = ", the context is full" if result["stopped_by"] == "context" else ""
                    rate = f"{result['tokens_per_s']:.1f}/s"
                    print(f"\n[{result['tokens']} tokens, {rate}{drafts}{full}]", file=sys.stderr)
                if speculate and result["speculation"] != "on":
                    print(f"swarmnode: nothing was drafted: {result['speculation']}", file=sys.stderr)

    asyncio.run(run())
