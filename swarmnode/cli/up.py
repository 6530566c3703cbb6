"""`swarmnode up`: run a node until Ctrl-C."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.options import AsJson, Emulate, Mode, Quic, RelayCa, Relays, State, Threads, Wire, state_dir


def up(
    ticket: Annotated[
        str | None, typer.Argument(envvar="SWARMNODE_TICKET", help="Of the swarm to join; needed once.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(envvar="SWARMNODE_MODEL", metavar="PATH", help="A GGUF file or a model pack: found a swarm."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            envvar="SWARMNODE_MEMORY", help="What to give to experts: 800M, 8G.", show_default="half of what is free"
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Copies of each expert on workers, as room allows.", show_default="2")
    ] = None,
    lan: Annotated[
        bool | None,
        typer.Option("--lan/--no-lan", help="Find members on the local network, and be found.", show_default="on"),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(envvar="SWARMNODE_EXPERTS", help="Serve these experts: all · 2/3 · 0-4,9 · 0:0-4;2:1,3"),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help="backbone, worker or both.",
            show_default="backbone with --model, worker with --experts, else as the ticket says",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Another node: PEERID@HOST:PORT, or PEERID with a --relay; repeat for more."),
    ] = None,
    relay: Relays = None,
    relay_ca: RelayCa = None,
    listen: Annotated[
        str | None,
        typer.Option(
            envvar="SWARMNODE_LISTEN",
            help="UDP address to bind.",
            show_default="everywhere; wired by hand to this machine: 127.0.0.1:0",
        ),
    ] = None,
    open_: Annotated[
        bool | None,
        typer.Option("--open", help="Let in everybody, without a ticket; or join such a swarm on this network."),
    ] = None,
    port_mapping: Annotated[
        bool | None,
        typer.Option("--port-mapping/--no-port-mapping", help="Ask the router for a port.", show_default="on"),
    ] = None,
    advertise: Annotated[
        list[str] | None,
        typer.Option(help="Tell peers this IP:PORT too, such as a forwarded port of the router; repeat for more."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What people call this node.", show_default="host name")] = None,
    mode: Mode = None,
    wire: Wire = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            envvar="SWARMNODE_SPECULATE",
            help="Draft tokens and verify them in one step: ngram, off, or the GGUF of a small draft model.",
            show_default="ngram in partial mode, off in exact mode",
        ),
    ] = None,
    parallel: Annotated[int | None, typer.Option(help="Generations at once.", show_default="1")] = None,
    lanes: Annotated[
        int | None,
        typer.Option(
            help="llama contexts they are spread over: one computes while the other waits.",
            show_default="2, or 1 with --parallel 1",
        ),
    ] = None,
    threads: Threads = None,
    context: Annotated[
        int | None, typer.Option(help="Context in tokens.", show_default="the model's, at most 4096")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Prompt tokens per step.", show_default="512; in partial mode what suits the link"),
    ] = None,
    gpu_layers: Annotated[int | None, typer.Option(help="Backbone layers on the GPU.", show_default="0")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where experts are computed: auto, cpu, or ggml's name.", show_default="auto")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="The GGUF to take slices from.", show_default="where the pack was made from")
    ] = None,
    local_experts: Annotated[
        bool | None,
        typer.Option(
            "--local-experts/--no-local-experts",
            help="A backbone computes experts that no worker can, from its own file.",
            show_default="on",
        ),
    ] = None,
    force: Annotated[
        bool | None, typer.Option("--force", help="Run the model even if its gate failed.", show_default="off")
    ] = None,
    allow_view: Annotated[
        str | None,
        typer.Option(
            envvar="SWARMNODE_ALLOW_VIEW",
            help="Which members of the swarm may see this node's status: members, founder or nobody.",
            show_default="founder",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            envvar="SWARMNODE_METRICS",
            help="Where Prometheus may read figures, such as 127.0.0.1:9464; /healthz is there too.",
            show_default="nowhere",
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(
            envvar="SWARMNODE_LOG_FORMAT",
            help="Of the log on standard error: text, or json, one object per line.",
            show_default="text",
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(envvar="SWARMNODE_LOG_LEVEL", help="debug, info, warning or error.", show_default="warning"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with these options as keys.")] = None,
    emulate: Emulate = None,
    quic: Quic = None,
    state: State = None,
    headless: Annotated[bool, typer.Option("--headless", help="Plain lines, no live view.")] = False,
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Run a node. With --model it founds a swarm and prints a ticket; with a ticket it joins and serves experts.

    With --experts and --peer nodes are wired by hand instead. Ctrl-C ends it cleanly, a second one at once.
    """
    from swarmnode.config import build_config  # noqa: PLC0415
    from swarmnode.errors import SwarmnodeError  # noqa: PLC0415
    from swarmnode.serve import run_node  # noqa: PLC0415
    from transport.errors import ConfigError, TransportError  # noqa: PLC0415
    from transport.line_writer import LineWriter  # noqa: PLC0415
    from transport.log_format import json_line, set_up  # noqa: PLC0415

    given: dict[str, Any] = {
        "ticket": ticket,
        "memory": memory,
        "replicas": replicas,
        "lan": lan,
        "model": model,
        "experts": experts,
        "role": role,
        "peers": peer,
        "relays": relay,
        "relay_ca": relay_ca,
        "port_mapping": port_mapping,
        "advertise": advertise,
        "listen": listen,
        "open": open_,
        "name": name,
        "mode": mode,
        "wire": wire,
        "speculate": speculate,
        "parallel": parallel,
        "lanes": lanes,
        "threads": threads,
        "context": context,
        "batch": batch,
        "gpu_layers": gpu_layers,
        "device": device,
        "source": source,
        "local_experts": local_experts,
        "force": force,
        "allow_view": allow_view,
        "metrics": metrics,
        "log_format": log_format,
        "log_level": log_level,
        "emulate": emulate,
        "quic": quic,
    }
    logs, style = None, log_format  # until the configuration says
    try:
        settled = build_config(given, config, state_dir=state_dir(state))
        style = settled.log_format
        logs = set_up(style, settled.log_level)
        run_node(settled, as_json=as_json, headless=headless, stop_on_eof=stop_on_eof, logs=logs)
    except (SwarmnodeError, TransportError, OSError) as error:
        if style != "json" or isinstance(error, BrokenPipeError):
            raise  # it becomes one line of text
        writer = logs.writer if logs is not None else LineWriter(sys.stderr, str)
        writer.write(json_line("error", "swarmnode", "ended", {"error": error}) + "\n")
        writer.flush()
        raise typer.Exit(getattr(error, "exit_code", 2 if isinstance(error, ConfigError) else 1)) from None
    finally:
        if logs is not None:
            logs.flush()
