"""`swarmnode ticket`: let devices into the swarm that the node of this machine founded, and keep them out again."""

from __future__ import annotations

from typing import Annotated

import typer

from swarmnode.cli.options import AsJson, State, state_dir

app = typer.Typer(help="Let devices into this swarm, and keep them out again.", invoke_without_command=True)


@app.callback()
def ticket(
    context: typer.Context,
    expires: Annotated[str, typer.Option(help="How long it is good: 30m, 24h, 7d, or never.")] = "24h",
    uses: Annotated[int, typer.Option(help="How many devices it lets in; 0 for any number.")] = 0,
    role: Annotated[str, typer.Option(help="What they may be: worker, backbone or any.")] = "worker",
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Print a new ticket, for `swarmnode up` on another device. Needs the running node that founded the swarm."""
    if context.invoked_subcommand is not None:
        return
    import asyncio  # noqa: PLC0415
    import json  # noqa: PLC0415

    from swarmnode import control  # noqa: PLC0415
    from swarmnode.tickets import checked_role, parse_duration  # noqa: PLC0415

    seconds, named = parse_duration(expires), checked_role(role)
    asked = control.request_one(state_dir(state), "ticket", expires_s=seconds, uses=uses, role=named)
    answer = asyncio.run(asked)
    print(json.dumps({k: v for k, v in answer.items() if k != "event"}) if as_json else answer["ticket"])


@app.command("list")
def list_(state: State = None, as_json: AsJson = False) -> None:
    """Show the tickets given out: who joined with them, and whether they still let anybody in."""
    import json  # noqa: PLC0415

    from swarmnode import tables  # noqa: PLC0415
    from swarmnode.tickets import ticket_rows  # noqa: PLC0415

    rows = ticket_rows(state_dir(state))
    if as_json:
        print(json.dumps(rows))
    else:
        tables.show(tables.tickets_table(rows))


@app.command()
def revoke(
    ticket: Annotated[str, typer.Argument(help="The ticket, its id, or the first digits of the id.")],
    expel: Annotated[bool, typer.Option("--expel", help="Also put out everybody who joined with it.")] = False,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Let nobody in with this ticket any more."""
    import json  # noqa: PLC0415

    from swarmnode.tickets import revoke as revoke_ticket  # noqa: PLC0415

    row = revoke_ticket(state_dir(state), ticket, expel=expel)
    print(json.dumps(row) if as_json else row["message"])


@app.command()
def expel(
    peer: Annotated[str, typer.Argument(help="The member's id, or the first characters of it.")],
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Put one member out for good; no ticket lets it in again."""
    import json  # noqa: PLC0415

    from swarmnode.tickets import expel as expel_member  # noqa: PLC0415

    row = expel_member(state_dir(state), peer)
    print(json.dumps(row) if as_json else row["message"])
