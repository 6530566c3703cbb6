"""`swarmnode peers`: who the node of this machine is connected to."""

from __future__ import annotations

from swarmnode.cli.options import AsJson, State, state_dir


def peers(state: State = None, as_json: AsJson = False) -> None:
    """Show the peers of the running node: path, round-trip time, holdings."""
    import asyncio  # noqa: PLC0415
    import json  # noqa: PLC0415

    from swarmnode import control, tables  # noqa: PLC0415

    answer = asyncio.run(control.request_one(state_dir(state), "peers"))
    if as_json:
        print(json.dumps(answer["peers"]))
    else:
        tables.show(tables.peers_table(answer["peers"]))
