"""`swarmnode doctor`: what this machine's network lets a node do, with advice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnode.cli.options import AsJson

if TYPE_CHECKING:
    from rich.table import Table

    from transport.proto.net_report import NetReport


def doctor(
    relay: Annotated[
        list[str] | None,
        typer.Option(envvar="SWARMNODE_RELAY", help="URL of a relay to check with; repeat for more."),
    ] = None,
    relay_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="SWARMNODE_RELAY_CA", help="Authorities (PEM) for relays' certificates beside the system's."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine's network: UDP, NAT, IPv6, port mapping, relays, packet size, clock; with advice."""
    import asyncio  # noqa: PLC0415
    import json  # noqa: PLC0415

    from swarmnode.config import authorities  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415
    from transport.netcheck import netcheck  # noqa: PLC0415
    from transport.proto.relay_url import BadRelayUrl  # noqa: PLC0415

    try:
        ca_file = authorities(relay_ca) if relay_ca is not None else None
        report = asyncio.run(netcheck(relay or [], ca_file=ca_file))
    except BadRelayUrl as error:
        raise UsageError(f"--relay: {error}") from None
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        from swarmnode.tables import console_for_data  # noqa: PLC0415

        console = console_for_data()
        console.print(_table(report))
        for sentence in report.advice:
            console.print(f"• {sentence}", markup=False, highlight=False)
        if not report.advice:
            console.print("Nothing to improve.")
    if not report.works:
        raise typer.Exit(1)


def _table(report: NetReport) -> Table:
    """One line per finding, for people."""
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    words = {True: "yes", False: "no", None: "unknown"}
    rows = {
        "UDP": {True: "works", False: "blocked", None: "unknown"}[report.udp],
        "IPv4": report.ipv4 or "no answer",
        "IPv6": report.ipv6 or (f"{report.local_ipv6}, not checked" if report.local_ipv6 else "none"),
        "NAT": f"{report.nat} ({report.nat_reason})",
        "mapping": report.mapping,
        "filtering": report.filtering,
        "hairpin": words[report.hairpin] if report.nat != "none" else "not needed",
        "port mapping": f"{report.port_mapping or 'none'} ({report.port_mapping_detail})",
        "packet size": f"{report.mtu} bytes" if report.mtu else "unknown",
        "clock": "unknown" if report.clock_offset_s is None else f"{report.clock_offset_s:+.1f} s",
        "addresses": ", ".join(dict.fromkeys(report.addresses)) or "none",
    }
    for name, value in rows.items():
        table.add_row(name, _escaped(value))
    for relay in report.relays:
        rtt = "connected" if relay.rtt_ms is None else f"{relay.rtt_ms:.1f} ms"
        table.add_row("relay", _escaped(f"{relay.url}: {relay.error or rtt}"))
    return table


def _escaped(text: str) -> str:
    from rich.markup import escape  # noqa: PLC0415

    return escape(text)
