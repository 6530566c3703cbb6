"""Tables of `bench wan`: a row each for a terminal, or the grid as a page has it, with a column per round trip.

Pure. Called by `wan.py`, which prints what comes of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from swarmnode.bench.wan_cases import WATERFALL_RTT_MS, short

Row = Mapping[str, Any]  # JSON; see `wan.py`

HIDDEN = ("drafted", "drafts_accepted", "tokens", "local_step_ms")


def table(result: Mapping[str, Any]) -> dict[str, Any]:
    """The same for people: levers as one word, without the columns that nobody reads in a table."""
    names = [name for name in dict.fromkeys(name for one in result["rows"] for name in one) if name not in HIDDEN]
    names.sort(key="skipped".__eq__)  # it is the last column
    rows = [
        {name: short(one["levers"]) if name == "levers" else one.get(name) for name in names} for one in result["rows"]
    ]
    return {**result, "rows": rows}


def by_round_trip(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row per path, rate, number of streams, levers, text and temperature; a column per round trip.

    A cell is "tokens/s of bound (ratio)", the rate alone where there is no bound, "" where nothing was measured. What
    is the same in all rows has no column, and sets of levers that were measured at one of several round trips no row.
    """
    distances = {short(row["levers"]): set[float]() for row in rows}
    for row in rows:
        distances[short(row["levers"])].add(row["rtt_ms"])
    if any(len(found) > 1 for found in distances.values()):
        rows = [row for row in rows if len(distances[short(row["levers"])]) > 1]
    rtts = sorted({row["rtt_ms"] for row in rows})
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        named = {
            "path": row["path"],
            "Mbit/s": "unlimited" if row["mbit"] is None else f"{row['mbit']:g}",
            "streams": row["streams"],
            "levers": short(row["levers"]),
            "text": row["text"],
            "temperature": row["temperature"],
        }
        made = found.setdefault(tuple(named.values()), named | {f"{rtt:g} ms": "" for rtt in rtts})
        made[f"{row['rtt_ms']:g} ms"] = _cell(row)
    made_rows = list(found.values())
    constant = [name for name in ("text", "temperature", "path") if len({row[name] for row in made_rows}) == 1]
    return [{name: value for name, value in row.items() if name not in constant} for row in made_rows]


def _cell(row: Row) -> str:
    rate = row.get("tokens_per_s")
    if not rate:
        return "–" if row.get("skipped") else ""
    bound = row.get("bound_tokens_per_s")
    return f"{rate:.3g}" + (f" of {bound:.3g} ({row['ratio_to_bound']:.2f})" if bound else "")


def group_of(row: Row) -> tuple[Any, ...]:
    """What rows have in common that differ in levers and round trip."""
    return row["path"], row["mbit"], row["text"], row["streams"], row["temperature"]


def waterfall_steps(rows: Sequence[Row]) -> list[Row]:
    """The rows at one round trip that add levers one after the other, from none; [] where there is no such chain."""
    if not rows:
        return []
    rtt = min({row["rtt_ms"] for row in rows}, key=lambda one: abs(one - WATERFALL_RTT_MS))
    chain: list[Row] = []
    for row in sorted((row for row in rows if row["rtt_ms"] == rtt), key=lambda row: len(row["levers"])):
        last = chain[-1]["levers"] if chain else None
        more = set(row["levers"]).difference(last or ())
        if (last is None and not more) or (last is not None and len(more) == 1 and set(last) < set(row["levers"])):
            chain.append(row)
    return chain if len(chain) > 2 else []


def added(before: Row, after: Row) -> str:
    """The levers that the second row has and the first does not."""
    return "+ " + ", ".join(lever for lever in after["levers"] if lever not in before["levers"])


def waterfall(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row per lever of the first chain that the rows have (`waterfall_steps`); [] where they have none."""
    rows = [row for row in rows if row.get("tokens_per_s")]
    chains = (
        waterfall_steps([row for row in rows if group_of(row) == key]) for key in dict.fromkeys(map(group_of, rows))
    )
    steps = next(filter(None, chains), [])
    names = ["none", *(added(a, b) for a, b in itertools.pairwise(steps))]
    return [
        {
            "levers": name,
            "tokens/s": f"{row['tokens_per_s']:.3g}",
            "steps/s": f"{row['steps_per_s']:.3g}",
            "tokens per step": f"{row['accepted_per_step']:.3g}",
            "round trips per token": f"{row['blocking_round_trips_per_token']:.2g}",
            "of the bound": f"{row['ratio_to_bound']:.2f}" if row["ratio_to_bound"] else "",
            "bytes per token": f"{row['bytes_per_token']:,}",
        }
        for name, row in zip(names, steps, strict=False)
    ]
