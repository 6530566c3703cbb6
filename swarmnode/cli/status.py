"""`swarmnode status`: what the node of this machine is and does."""

from __future__ import annotations

from swarmnode.cli.options import AsJson, State, state_dir


def status(state: State = None, as_json: AsJson = False) -> None:
    """Show the running node of this machine."""
    import asyncio  # noqa: PLC0415
    import json  # noqa: PLC0415

    from swarmnode import control, tables  # noqa: PLC0415

    answer = asyncio.run(control.request_one(state_dir(state), "status"))
    if as_json:
        print(json.dumps(answer["status"]))
    else:
        tables.show(tables.node_table(answer["status"]))
