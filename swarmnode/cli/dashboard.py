"""`swarmnode dashboard`: watch the running node of this machine, or by it another member of its swarm."""

from __future__ import annotations

from typing import Annotated

import typer

from swarmnode.cli.options import Member, State, named_member, state_dir


def dashboard(
    state: State = None,
    peer: Member = None,
    once: Annotated[bool, typer.Option("--once", help="Print one still as plain text, and end.")] = False,
    svg: Annotated[str | None, typer.Option(metavar="PATH", help="Write a still as an SVG picture, and end.")] = None,
    html: Annotated[str | None, typer.Option(metavar="PATH", help="Write a still as an HTML page, and end.")] = None,
    size: Annotated[
        str | None, typer.Option(help="COLUMNSxROWS of a still.", show_default="the terminal's, or 120x40")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks at the node.")] = 0.5,
) -> None:
    """Watch the running node: peers, paths, generation, experts, events. Keys are shown by ?; q ends it.

    Where the output is no terminal, a line for each thing that changes.
    """
    import asyncio  # noqa: PLC0415
    import shutil  # noqa: PLC0415
    import sys  # noqa: PLC0415
    import time  # noqa: PLC0415

    from swarmnode.dashboard import attached, still  # noqa: PLC0415
    from swarmnode.dashboard.cells import encoded  # noqa: PLC0415
    from swarmnode.dashboard.layout import compose  # noqa: PLC0415
    from swarmnode.dashboard.look import ASCII  # noqa: PLC0415
    from swarmnode.dashboard.model import Model  # noqa: PLC0415
    from swarmnode.dashboard.terminal import open_terminal  # noqa: PLC0415
    from swarmnode.dashboard.ui import Ui  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415
    from swarmnode.output_file import output_path  # noqa: PLC0415

    folder, member = state_dir(state), named_member(peer)
    if once or svg is not None or html is not None:
        svg_path = output_path(svg, "--svg") if svg is not None else None
        html_path = output_path(html, "--html") if html is not None else None
        at_terminal = sys.stdout.isatty() and svg is None and html is None
        seen = shutil.get_terminal_size(still.DEFAULT) if at_terminal else still.DEFAULT
        columns, rows = still.parse_size(size or f"{seen[0]}x{seen[1]}")
        model = Model(time.localtime().tm_gmtoff)
        asyncio.run(attached.sampled(folder, model, peer=member))
        lines = compose(model, Ui(), columns, rows)
        if svg_path is not None:
            still.write_svg(svg_path, lines, columns)
        if html_path is not None:
            still.write_html(html_path, lines, columns)
        if once:
            encoding = sys.stdout.encoding or "utf-8"
            if "utf" not in encoding.lower():
                lines = compose(model, Ui(), columns, rows, ASCII)
            sys.stdout.buffer.write(encoded(still.as_text(lines), encoding))
            sys.stdout.flush()
        return
    if size is not None:
        raise UsageError("--size is for a still: give --once, --svg or --html too")
    terminal = open_terminal()
    if terminal is None:
        asyncio.run(attached.watch_plainly(folder, interval, peer=member))
        return
    try:
        asyncio.run(attached.watch(folder, interval, terminal, peer=member))
    finally:
        terminal.close()
