"""What the command line shows people: rich tables, a progress bar, numbers with units. Data stays JSON elsewhere.

What others choose (names, reasons) and IPv6 addresses in brackets are `Text`: in a plain string rich would read markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

NAME_WIDTH = 20  # a peer chooses its name; other columns need room too
_PIPE_WIDTH = 200  # columns where output is no terminal: nothing is cut there

Row = Mapping[str, Any]  # decoded JSON, as it came over the control channel

# What to call what the transport refused: group and name of the counter, see status.TransportStatus.
_REFUSED = {
    ("disco", "forged"): "forged",
    ("disco", "malformed"): "malformed",
    ("disco", "replayed"): "replayed",
    ("disco", "not_admitted"): "of peers not admitted",
    ("disco", "rationed"): "of strangers above the ration",
    ("socket", "unknown"): "unknown datagrams",
    ("quic", "flooded"): "that flooded",
    ("quic", "early_excess"): "that sent too much before they were let in",
}


def human_bytes(n: float) -> str:
    """1.3 GB, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def console_for_data() -> Console:
    """Standard output; wide where it is no terminal, so that nothing is cut for a script that reads it."""
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def show(table: Table) -> None:
    """Print to standard output."""
    console_for_data().print(table)


def plain_table(left: Sequence[str], right: Sequence[str]) -> Table:
    """A table without lines: columns of text, then columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def tickets_table(tickets: Sequence[Row]) -> Table:
    """One row per ticket that was given out."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for name in ("ticket", "role", "joined", "state"):
        table.add_column(name, no_wrap=name != "state")
    for one in tickets:
        of = f"{len(one['joined'])} of {one['uses']}" if one["uses"] else str(len(one["joined"]))
        table.add_row(one["id"], one["role"], of, Text(one["state"]))
    return table


def peers_table(peers: Sequence[Row]) -> Table:
    """One row per peer, in 80 columns."""
    table = plain_table(("peer", "name", "role", "path"), ("RTT ms", "call ms", "experts", "rows"))
    table.add_column("why")
    for p in peers:
        table.add_row(
            p["peer"][:8],
            Text(p["name"][:NAME_WIDTH]),
            p["role"] + (" ?" if p["suspect"] else ""),
            p["path"],
            f"{p['rtt_ms']:.1f}",
            f"{p['latency_ms']:.1f}",
            str(p["experts"]),
            str(p["rows"]),
            Text(p["reason"]),
        )
    return table


def node_table(status: Row) -> Table:
    """A node's own facts, then its peers in short."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    held = ", ".join(f"layer {layer}: {ids}" for layer, ids in status["holdings"].items())
    rows = {
        "node": f"{status['name']} ({status['role']}), version {status['version']}",
        "peer id": status["peer"],
        "addresses": ", ".join(status["addresses"]),
        "NAT": status["nat"],
        "relays": "\n".join([*status["relays"], *(f"{url}: {why}" for url, why in status["relay_problems"].items())]),
        "model": status["model"],
        "holdings": held or "none",
        "memory": human_bytes(status["memory"]),
        "up for": f"{status['uptime_s']:.0f} s",
        "peers": f"{len(status['peers'])}",
        "served": f"{status['served_calls']} calls, {status['served_rows']} rows",
    }
    if wires := status["generation"]["wires"]:
        rows |= _generation_rows(status["generation"], wires)
    if swarm := status.get("swarm"):
        rows |= _swarm_rows(swarm)
    for peer, why in status.get("quarantined", {}).items():
        rows[f"not asked: {peer[:8]}"] = why
    if refused := _refused(status["transport"]):
        rows["refused"] = refused
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _generation_rows(generation: Row, wires: dict[str, str]) -> dict[str, str]:
    kinds = sorted(set(wires.values()))
    by_kind = (f"{kind} in layer {', '.join(layer for layer, one in wires.items() if one == kind)}" for kind in kinds)
    where = kinds[0] if len(kinds) == 1 else "; ".join(by_kind)
    running, waiting, most = (generation[key] for key in ("running", "waiting", "parallel"))
    return {
        "experts asked": f"{generation['mode']} mode, {where} on the wire{_gate(generation.get('verdict', ''))}",
        "generating": f"{running} of {most} at once in {generation['lanes']} contexts, {waiting} waiting; "
        f"drafts: {generation['speculate']}",
    }


def _gate(verdict: str) -> str:
    """As in " (the founder's gate)"; the own one is what everybody expects, unless the model failed it."""
    whose, _, failure = verdict.partition(": ")
    gate = "the founder's gate" if whose == "founder" else "its gate"
    if failure:
        return f"; failed {gate}: {failure}"
    return f" (by {gate})" if whose == "founder" else ""


def _swarm_rows(swarm: Row) -> dict[str, str]:
    members = [f"{one['peer'][:8]} {one['name']} ({one['role']})" for one in swarm["members"]]
    rows = {
        "swarm": f"{swarm['swarm'][:8]}, {'founded here' if swarm['founder'] else 'a member of it'}",
        "members": "\n".join(members) or "none other here",
        "for experts": f"{human_bytes(swarm['held_bytes'])} of {human_bytes(swarm['budget'])} used",
    }
    if swarm["trouble"]:
        rows["trouble"] = swarm["trouble"]
    if plan := swarm["plan"]:
        of = ", ".join(f"{peer[:8]}: {count}" for peer, count in sorted(plan["workers"].items()))
        rows["plan"] = f"experts here: {plan['local']}; {of or 'on no worker'}; elsewhere: {plan['uncovered']}"
    return rows


def _refused(transport: Row) -> str:
    counts = {what: transport[group].get(name, 0) for (group, name), what in _REFUSED.items()}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def print_rows(result: Mapping[str, Any], *, as_json: bool) -> None:
    """A benchmark's result: JSON, or its facts and a table of its rows."""
    if as_json:
        print(json.dumps(result))
        return
    console = console_for_data()
    for key, value in result.items():
        if key != "rows":
            console.print(f"{key}: {value}")
    rows: Sequence[Row] = result["rows"]
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, value in rows[0].items():
        table.add_column(column, justify="right" if isinstance(value, int | float) else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if v is None else f"{v:.7g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


class StageBars:
    """Progress bars on standard error; silent where that is no terminal or they are disabled."""

    def __init__(self, *columns: ProgressColumn, enabled: bool) -> None:
        console = Console(stderr=True)
        self._bars = Progress(*columns, console=console, disable=not enabled or not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        """Report a stage; the first call makes its bar."""
        self.put(stage, stage, done, total)

    def put(self, bar: str, text: str, done: int, total: int) -> None:
        """Report what `text` says, on a bar that may show one thing after another."""
        if bar not in self._tasks:
            self._tasks[bar] = self._bars.add_task(text, total=total)
        self._bars.update(self._tasks[bar], description=text, completed=done, total=total)


class ProgressBar(StageBars):
    """Stages with bytes done, rate and time left."""

    def __init__(self, *, enabled: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        super().__init__(*columns, TimeRemainingColumn(), enabled=enabled)
