"""What the `gate` command shows people: a model's figures, or a row for each of many small ones. Data stays JSON.

Called by `cli/gate.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from swarmnode.tables import StageBars, console_for_data, human_bytes, plain_table, show

Row = Mapping[str, Any]
_SAID = {True: "the plain local run's bits", False: "not the plain local run's bits", None: "not compared"}
_COSINES = ("partial_f32", "f16", "int8", "fp8")
_NAMED = 12  # layers that are named before they are only counted
NO_FIGURE = "–"


class GateProgress(StageBars):
    """A bar per stage with the time left, or one that many things share."""

    def __init__(self, *, enabled: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        super().__init__(*columns, enabled=enabled)

    def update_one(self, what: str, done: int, total: int) -> None:
        """Report one thing of many, on a bar that all of them share."""
        self.put("", what, done, total)


def show_model(found: Row, where: str) -> None:
    """One model's figures (`gate/report.py`), and where they are kept."""
    lines = [
        f"{found['model']}: {found['sites']} MoE layers, {found['experts']} experts ({found['variant']}), "
        f"top {found['k']}, {'a' if found['shared_expert'] else 'no'} shared expert",
        f"one expert {_between(found['smallest_slice'], found['largest_slice'])}, "
        f"all {human_bytes(found['experts_bytes'])}",
        *_needs(found["needs"]),
        f"{found['positions']} positions of {found['text']}, {found['seconds']:.0f} s; swarmnode {found['version']}",
        f"exact mode: {_exact(found)}",
    ]
    if found["layers_not_measured"]:
        lines.append(
            f"measured: layer {_layers(found['layers_measured'])}; no room for the experts of layer "
            f"{_layers(found['layers_not_measured'])}: F16 at most there, and no verdict on the whole model"
        )
    _print(*lines, "")
    if found["pairs"]:
        show(_pairs_table(found))
    _print("", "layer cosine at the lowest 0.1 %: on the way out · back · both")
    show(_layers_table(found["rows"], judged=found["identical"] is not False))
    if found["identical"] is False:  # whatever the wires did
        _print(f"failed: {found['error']}", where)
        return
    for wire, said in found["wires"].items():
        _print(f"{wire.upper()} " + ("passed" if said["passed"] else f"does not pass: {said['why']}"))
    if found["error"]:
        _print(f"failed: {found['error']}")
    best = sorted({row["best"].upper() for row in found["rows"]})
    _print(
        f"cheapest that passes: {', '.join(best)}: {human_bytes(found['bytes_best'])} per token, beside "
        f"{human_bytes(found['bytes_f32'])} in F32 and {human_bytes(found['bytes_exact'])} in exact mode (rows of all "
        "layers, one worker)",
        where,
    )


def show_many(rows: Sequence[Row], what: str) -> None:
    """A row for each architecture and variant, or each model's layer; `what` names them."""
    table = _table((what,))
    for name in ("variant", "type"):
        table.add_column(name, no_wrap=True)
    for name in ("sites", "experts", "top", "exact", "F32", "F16", "INT8", "FP8", "one expert"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("taking back", "passed"):
        table.add_column(name, overflow="fold")
    for row in rows:
        cosines = row.get("layer_cosine") or {}
        table.add_row(
            Text(str(row.get("arch" if what == "architecture" else "model", ""))),
            Text(str(row.get("variant", ""))),
            str(row.get("type", "")),
            *(str(row.get(key) or NO_FIGURE) for key in ("sites", "experts", "k")),
            ("same bytes" if row["identical"] else "differs") if cosines else NO_FIGURE,
            *(_cosine(cosines.get(key), 7 if key == "partial_f32" else 5) for key in _COSINES),
            human_bytes(row["bytes_per_expert"]) if row.get("bytes_per_expert") else NO_FIGURE,
            str(row.get("rollback") or NO_FIGURE),
            Text("yes" if row["passed"] else str(row.get("error") or "no")),
        )
    show(table)
    built = [row for row in rows if row.get("built", True)]
    more = f"; llama.cpp itself cannot build or run {len(rows) - len(built)}" if len(built) < len(rows) else ""
    _print("", f"{sum(bool(row['passed']) for row in built)} of {len(built)} passed{more}")


def _exact(found: Row) -> str:
    if found["error"] and found["identical"] is False:
        return str(found["error"]).removeprefix("exact mode ")
    if found["not_exact"]:
        return f"not compared: {found['not_exact']}{_beside_llama(found)}"
    said = _SAID[found["identical"]]
    if not found["exact_positions"]:
        return said
    asked = f"{found['exact_positions']} positions over a worker process"
    if found["identical"] is None:
        layers = [row for row in found["rows"] if row["exact_rows"]]
        beside = found["error"] or "as llama.cpp's own, by layer"
        return f"{asked}: every row the same as here, in {len(layers)} layers; {beside}"
    return f"{asked}: {said}"


def _beside_llama(found: Row) -> str:
    errors = [row["local_error"] for row in found["rows"] if row["local_rows"]]
    return f"; beside llama.cpp's own, a layer's rows are off by {100 * max(errors):.2g} % at most" if errors else ""


def _needs(needs: Row | None) -> list[str]:
    if needs is None:
        return []
    rates = ", ".join(f"{rate:.2g} at {ms} ms" for ms, rate in needs["tokens_per_s"].items())
    return [
        f"backbone {human_bytes(needs['backbone_bytes'])} with {needs['context']} tokens of context, experts "
        f"{human_bytes(needs['experts_bytes'])}; at most tokens/s, no layer at home: {rates} round trip"
    ]


def _pairs_table(found: Row) -> Table:
    """One row per pair of types: the whole model with it."""
    table = _table(("out / back", "cosine", "argmax", "clear argmax", "KL", "ΔNLL", "bytes/token"))
    table.add_column("passed", overflow="fold")
    if "partial_f32" in found["kl"]:
        of = {key: found[key]["partial_f32"] for key in ("layer_cosine", "argmax", "argmax_confident", "kl", "dnll")}
        table.add_row("F32, partial sums", *_cells(of | {"bytes": found["bytes_f32"]}), "")
    for pair in found["pairs"]:
        finer = f"{pair['finer_layers']} layers finer" if pair["finer_layers"] else "yes"
        passed = finer if pair["passed"] else "no" if found["identical"] is False else f"no: {pair['why']}"
        table.add_row(f"{pair['out']} / {pair['back']}".upper(), *_cells(pair), passed)
    return table


def _cells(of: Row) -> list[str]:
    shares = (f"{100 * of[key]:.2f} %" for key in ("argmax", "argmax_confident"))
    return [f"{of['layer_cosine']:.5f}", *shares, f"{of['kl']:.1e}", f"{of['dnll']:+.4f}", str(of["bytes"])]


def _layers_table(rows: Sequence[Row], *, judged: bool) -> Table:
    """One row per layer; without the cheapest type that passes where nothing does."""
    table = _table(("layer", "exact", "F32", "F16", "INT8", "FP8", "one expert"))
    table.add_column("cheapest that passes", no_wrap=True)
    for row in rows:
        cells = [
            " · ".join(_cosine(row[key]) for key in (f"{wire}_out", f"{wire}_back", wire)) if row["measured"] else ""
            for wire in ("f16", "int8", "fp8")
        ]
        same = f"{row['differ']} rows differ" if row["differ"] else "same bytes"
        table.add_row(
            str(row["layer"]),
            same if row["exact_rows"] else NO_FIGURE,
            _cosine(row["partial_f32"], 7),
            *cells,
            human_bytes(row["expert_bytes"]),
            row["best"].upper() if judged else NO_FIGURE,
        )
    return table


def _table(columns: Sequence[str]) -> Table:
    return plain_table(columns[:1], columns[1:])


def _cosine(value: float | None, digits: int = 5) -> str:
    return NO_FIGURE if value is None else f"{value:.{digits}f}"


def _between(low: float, high: float) -> str:
    return human_bytes(low) if low == high else f"{human_bytes(low)} to {human_bytes(high)}"


def _layers(layers: Sequence[int]) -> str:
    if len(layers) > _NAMED and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers[:_NAMED])) + (f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else "")


def _print(*lines: str) -> None:
    console = console_for_data()
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
