"""`swarmnode plan`: can these devices run that model, and how fast? From a file's header, or from a name alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.cli.options import AsJson

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.sizing.needs import ModelNeeds
    from swarmnode.sizing.plan import Share, Speed, SwarmPlan

_SIZES = (16, 32, 64, 128, 256, 512)  # GiB of memory that devices are recommended in


def plan(
    model: Annotated[
        str,
        typer.Argument(help="A GGUF or a model pack, the http(s) address of one, or a name: glm-4.6, deepseek2, …"),
    ],
    devices: Annotated[
        list[str] | None,
        typer.Option(
            "--devices", "-d", help="Memory of the devices: 3x32G, 64G@20ms (its round trip); repeat for other ones."
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of context.")] = 8192,
    rtt: Annotated[float, typer.Option(help="Round trip between devices, ms, where --devices says none.")] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Can these devices run a model? Who would be the backbone, who holds how many experts, how many tokens/s.

    Reads the header of a GGUF at most, of an address too; nothing is downloaded. Without --devices it says what a model
    needs. Exit code 1 where the model does not fit, or this version's llama.cpp cannot run it on any devices.
    """
    import json  # noqa: PLC0415

    from swarmnode.cli.standard_output import check_stdout, flush_stdout  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415
    from swarmnode.sizing.devices import GIB, parse_devices  # noqa: PLC0415
    from swarmnode.sizing.plan import make_plan, recommended  # noqa: PLC0415

    check_stdout()
    if not 0 <= rtt <= 60_000:
        raise UsageError(f"--rtt {rtt:g}: give milliseconds, 0 to 60000")
    there = parse_devices(devices, rtt / 1000) if devices else ()
    needs = _needs(model)
    counts = {size: recommended(needs, size * GIB, context) for size in _SIZES}
    if not there:
        if as_json:
            print(json.dumps(_needs_json(needs, context, counts)))
        else:
            _show_needs(needs, context, counts)
        flush_stdout()
        if needs.cannot_run:
            raise typer.Exit(1)
        return
    found = make_plan(needs, there, context)
    if as_json:
        print(json.dumps(_needs_json(needs, context, counts) | _plan_json(found)))
    else:
        _show_plan(found, counts)
    flush_stdout()
    if not _runs(found):
        raise typer.Exit(1)


def _needs(model: str) -> ModelNeeds:
    """Of a file, a pack, an address, or the table; `cannot_run` where llama.cpp does not know the architecture.

    Raises ModelError, UsageError.
    """
    from dataclasses import replace  # noqa: PLC0415

    needs = _needs_found(model)
    if needs.quantised:  # of the table
        return needs
    from swarmnode.architectures.tiny_model import ARCHITECTURES  # noqa: PLC0415  0.3 s

    if needs.architecture in ARCHITECTURES:
        return needs
    why = f"the installed llama.cpp runs no experts of the architecture {needs.architecture!r}"
    return replace(needs, cannot_run=f"{why}; it takes a version of swarmnode whose llama.cpp does")


def _needs_found(model: str) -> ModelNeeds:
    from swarmnode.errors import ModelError, UsageError  # noqa: PLC0415
    from swarmnode.model.http_url import url_of  # noqa: PLC0415

    if not model.strip():
        raise UsageError("plan wants a model: a GGUF or a model pack, the http(s) address of one, or a name (glm-4.6)")
    if url_of(model) is not None:
        return _needs_of_address(model)
    path = Path(model)
    if path.is_dir() and (path / "manifest.json").is_file():
        from swarmnode.gate.report import pack_needs  # noqa: PLC0415
        from swarmnode.onboard import ModelPack  # noqa: PLC0415

        return pack_needs(ModelPack.open(path))
    if path.is_file():
        from swarmnode.model.gguf_file import GgufFile  # noqa: PLC0415
        from swarmnode.sizing.needs import needs_of  # noqa: PLC0415

        return needs_of(GgufFile.open(path))
    if path.suffix.lower() == ".gguf" or path.is_dir():
        raise ModelError(f"{model}: no such file or model pack: give a GGUF, its http(s) address, or a model's name")
    return _needs_of_name(model)


def _needs_of_name(model: str) -> ModelNeeds:
    """Of the table. Where the name is not the model's own, which one it was taken for is said as an assumption."""
    from dataclasses import replace  # noqa: PLC0415

    from swarmnode.sizing.shapes import find_shape, needs_of_shape  # noqa: PLC0415

    shape = find_shape(model)
    needs = needs_of_shape(shape)
    if shape.is_called(model):
        return needs
    return replace(needs, assumed="; ".join(filter(None, (f"{model} means {shape.name}", needs.assumed))))


def _needs_of_address(model: str) -> ModelNeeds:
    from swarmnode.interruptible import run_interruptible  # noqa: PLC0415
    from swarmnode.model.http_model import FarModel  # noqa: PLC0415
    from swarmnode.model.http_url import url_of  # noqa: PLC0415
    from swarmnode.sizing.needs import needs_of  # noqa: PLC0415

    def work(check: Callable[[], None]) -> ModelNeeds:
        with FarModel(url_of(model) or model, heartbeat=check) as far:
            return needs_of(far.open())

    return run_interruptible(work)


# -- data


def _needs_json(needs: ModelNeeds, context: int, counts: dict[int, int]) -> dict[str, Any]:
    import dataclasses  # noqa: PLC0415

    from swarmnode.sizing.needs import memory_of  # noqa: PLC0415

    memory = memory_of(needs, context)
    return {
        "model": needs.name,
        "needs": dataclasses.asdict(needs),
        "context": context,
        "backbone_bytes": memory.total,
        "backbone": dataclasses.asdict(memory),
        "devices_needed": {f"{size}G": count or None for size, count in counts.items()},
    }


def _plan_json(found: SwarmPlan) -> dict[str, Any]:
    from swarmnode.sizing.plan import PROMPT  # noqa: PLC0415

    return {
        "fits": _runs(found),
        "answer": _answer(found),
        "missing_bytes": found.missing,
        "missing": found.missing_what if found.missing else None,
        "more_devices": found.more_devices or None,
        "longest_context": found.longest_context,
        "copies": round(found.copies, 3),
        "round_trips": found.trips,
        "token_bytes": found.token_bytes,
        "prompt_bytes": found.token_bytes * PROMPT,
        "devices": [_share_json(share) for share in found.shares],
        "given": _speed_json(found.given) if _runs(found) else None,
        "speeds": [_speed_json(speed) for speed in found.speeds],
        "all_remote": [_speed_json(speed) for speed in found.remote],
    }


def _share_json(share: Share) -> dict[str, Any]:
    return {
        "name": share.device.name,
        "memory": share.device.memory,
        "rtt_ms": round(share.device.rtt_s * 1000, 3),
        "role": "backbone" if share.is_backbone else "worker",
        "experts": share.experts,
        "expert_bytes": share.expert_bytes,
        "other_bytes": share.other,
        "left_bytes": share.left,
    }


def _speed_json(speed: Speed) -> dict[str, Any]:
    from swarmnode.sizing.plan import ACCEPTED  # noqa: PLC0415

    rates = {f"accepted_{accepted:g}": round(rate, 3) for accepted, rate in zip(ACCEPTED, speed.tokens_s, strict=True)}
    return {"rtt_ms": round(speed.rtt_s * 1000, 3), **rates}


# -- for people


def _runs(found: SwarmPlan) -> bool:
    return found.fits and not found.needs.cannot_run


def _answer(found: SwarmPlan) -> str:
    """One sentence."""
    needs = found.needs
    if needs.cannot_run:
        return _cannot_run(needs)
    name = f"{needs.name} ({needs.architecture}{f', taken as {needs.quantised}' if needs.quantised else ''})"
    if found.fits:
        count = len(found.shares)
        backbone = found.shares[0].device
        devices = f"these {count} devices, {backbone.name} as the backbone" if count > 1 else "this device alone"
        far = f" at {_ms(found.given.rtt_s)}" if found.trips else " without a round trip"
        rates = f"at most {_rate(found.given.tokens_s[0])} tokens/s{far}, {_rate(found.given.tokens_s[-1])}"
        return f"Yes: {name} runs on {devices}; {rates} where drafts give 2 tokens per step."
    if not found.shares:
        needed = f"its backbone takes {_gib(found.backbone.total)} with {found.context} tokens of context"
        most = f"no device has more than {_gib(found.alike.usable)} to give"
        shorter = found.longest_context // 256 * 256
        hint = f" It would with --context {shorter}." if shorter else f" One of {_gib(found.backbone_device)} would do."
        return f"No: {name} does not fit: {needed}, and {most}.{hint}"
    hint = "such devices hold not one expert"
    if count := found.more_devices:
        hint = f"{count} more {'device' if count == 1 else 'devices'} of {_gib(found.alike.memory)} would do"
    experts = f"{_gib(found.missing)} of its {_gib(needs.experts_total_bytes)} of experts have no place"
    return f"No: {name} does not fit: {experts}; {hint}."


def _cannot_run(needs: ModelNeeds) -> str:
    return f"No: {needs.name} cannot run, on whatever devices: {needs.cannot_run}."


def _show_plan(found: SwarmPlan, counts: dict[int, int]) -> None:
    from swarmnode.sizing.plan import PROMPT  # noqa: PLC0415
    from swarmnode.tables import console_for_data, human_bytes, show  # noqa: PLC0415

    console = console_for_data()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    say(_answer(found))
    _say_assumed(found.needs, say)
    say("")
    _say_needs(found.needs, found.context, counts, say)
    if found.needs.cannot_run:
        return
    if found.shares:
        say("")
        show(_devices_table(found.shares))
    say("")
    show(_speeds_table(found))
    say("")
    if found.fits:
        at_home = found.needs.n_sites - found.trips
        say(
            f"{found.trips} of {found.needs.n_sites} MoE layers need a round trip"
            + (f"; the experts of {at_home} are all on the backbone" if at_home else "")
        )
        say(f"memory for {found.copies:.1f} copies of the experts; context of up to {found.longest_context} tokens")
        own = found.shares[0]
        told = f"--memory {_option(own.device.usable - own.other)} on {own.device.name}"
        rest = list(dict.fromkeys(_option(share.device.usable) for share in found.shares[1:4]))
        told += f", up to {', '.join(rest)} on the others" if rest else ""
        say(f"unless told, a node gives experts half of what is free: {told}")
    say(
        f"on the wire: {human_bytes(found.token_bytes)} per token (partial sums, F16), a prompt of {PROMPT} tokens "
        f"{human_bytes(found.token_bytes * PROMPT)}"
    )
    say("speeds: round trips, 1.5 ms per layer, weights read at 40 GB/s; a slower device, or a busy one, is slower")
    say("kept free of each device: a tenth of its memory, 1.5 GiB at least, and 0.1 GiB for the node itself")


def _show_needs(needs: ModelNeeds, context: int, counts: dict[int, int]) -> None:
    from swarmnode.tables import console_for_data  # noqa: PLC0415

    console = console_for_data()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    if needs.cannot_run:
        say(_cannot_run(needs))
        say("")
    _say_needs(needs, context, counts, say)
    _say_assumed(needs, say)
    if needs.cannot_run:
        return
    say("give --devices 3x32G to see who would hold what, and how fast it is")


def _say_assumed(needs: ModelNeeds, say: Callable[[str], None]) -> None:
    if needs.assumed:
        say(f"assumed: {needs.assumed}")


def _say_needs(needs: ModelNeeds, context: int, counts: dict[int, int], say: Callable[[str], None]) -> None:
    from swarmnode.sizing.needs import memory_of  # noqa: PLC0415
    from swarmnode.tables import human_bytes  # noqa: PLC0415

    memory = memory_of(needs, context)
    shared = "a shared expert" if needs.shared_expert else "no shared expert"
    params = f"{needs.n_params / 1e9:.0f} B parameters, " if needs.n_params >= 1e9 else ""
    say(
        f"{needs.name}: {params}{needs.n_sites} MoE layers of {needs.n_expert} experts, top {needs.n_used}, {shared}, "
        f"{human_bytes(needs.expert_bytes)} each"
    )
    cache = f"cache of {context} tokens {_gib(memory.cache)}"
    rest = f"buffers {_gib(memory.compute)} + process {_gib(memory.process)}"
    say(f"backbone: {_gib(memory.total)} = weights {_gib(memory.dense)} + {cache} + {rest}")
    say(f"experts: {_gib(needs.experts_total_bytes)} in all, {_gib(1000 * needs.expert_bytes)} per 1,000, shared out")
    fitting = [f"{count} of {size} GiB" for size, count in counts.items() if count]
    say(f"devices, all alike: {' or '.join(fitting[:4]) or 'more than this table has'}")
    if needs.context_length and context > needs.context_length:
        say(f"the model was trained for {needs.context_length} tokens of context")


def _devices_table(shares: tuple[Share, ...]) -> Table:
    from swarmnode.tables import plain_table  # noqa: PLC0415

    table = plain_table(("device", "role"), ("memory", "RTT", "dense, cache", "experts", "of", "left"))
    groups: list[tuple[list[str], int]] = []
    for share in shares:
        row = [
            "backbone" if share.is_backbone else "worker",
            _gib(share.device.memory),
            _ms(share.device.rtt_s),
            _gib(share.other) if share.other else "–",
            str(share.experts),
            _gib(share.expert_bytes),
            _gib(share.left),
        ]
        if groups and len(shares) > 12 and groups[-1][0][1:] == row:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1)
        else:
            groups.append(([share.device.name, *row], 1))
    for row, count in groups:
        table.add_row(row[0] if count == 1 else f"{row[0]} and {count - 1} like it", *row[1:])
    return table


def _speeds_table(found: SwarmPlan) -> Table:
    from swarmnode.tables import plain_table  # noqa: PLC0415

    table = plain_table(("tokens/s",), ("no drafts", "1.2 per step", "2 per step"))
    rows = []
    if found.fits:
        apart = [speed for speed in found.speeds if found.trips]
        if found.given not in apart:
            rows.append(("as given", found.given))
        rows += [(f"devices {_ms(speed.rtt_s)} apart", speed) for speed in apart]
    rows += [(f"all experts {_ms(speed.rtt_s)} away", speed) for speed in found.remote]
    for name, speed in rows:
        table.add_row(name, *(_rate(rate) for rate in speed.tokens_s))
    return table


def _gib(n: float) -> str:
    """Binary units, as memory is sold and as --memory takes it."""
    return f"{n / (1 << 30):.1f} GiB" if n >= 0.05 * (1 << 30) else f"{n / (1 << 20):.0f} MiB"


def _option(n: int) -> str:
    """A size as an option takes it, rounded down."""
    return f"{n * 10 // (1 << 30) / 10:.1f}G" if n >= 1 << 30 else f"{n >> 20}M"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:g} ms"


def _rate(rate: float) -> str:
    return f"{rate:.2f}" if rate < 10 else f"{rate:.0f}"
