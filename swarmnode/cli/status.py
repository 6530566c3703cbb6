"""`swarmnode status`: what the node of this machine is and does."""

from __future__ import annotations

from swarmnode.cli.options import AsJson, Member, State, named_member, state_dir


def status(state: State = None, peer: Member = None, as_json: AsJson = False) -> None:
    """Show the running node of this machine, or by it another member of its swarm."""
    import asyncio  # noqa: PLC0415
    import json  # noqa: PLC0415

    import msgspec  # noqa: PLC0415

    from swarmnode import control, tables  # noqa: PLC0415

    member = named_member(peer)
    if member:
        from swarmnode.dashboard.attached import status_of  # noqa: PLC0415

        shown = msgspec.to_builtins(asyncio.run(status_of(state_dir(state), member)))
    else:
        shown = asyncio.run(control.request_one(state_dir(state), "status"))["status"]
    if as_json:
        print(json.dumps(shown))
        return
    tables.show(tables.node_table(shown))
    if shown.get("left_out"):
        print(f"too large to be told whole; left out: {shown['left_out']}")
