#!/usr/bin/env python3
"""Makes docs/models.md out of what the gate found: every architecture, and one layer of each model of the table.

    swarmnode gate --arch all --json > arch.json ; swarmnode gate --shape all --json > shape.json
    python tools/models_page.py --architectures arch.json --shapes shape.json

Without arguments it makes the page anew from the results that are kept beside it (docs/figures/gate-*.json).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarmnode.architectures.tiny_model import ARCHITECTURES
from swarmnode.sizing.devices import GIB, parse_devices
from swarmnode.sizing.needs import memory_of
from swarmnode.sizing.plan import make_plan, recommended
from swarmnode.sizing.shapes import MODELS, needs_of_shape

Row = dict[str, Any]  # of the gate's JSON

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "models.md"
ARCH_FILE, SHAPE_FILE = DOCS / "figures" / "gate-architectures.json", DOCS / "figures" / "gate-shapes.json"
CONTEXT = 8192
NONE = "–"
_WIRES = (("f16", "F16"), ("int8", "INT8"), ("fp8", "FP8"))

_HEAD = f"""\
# Models

Made by `tools/models_page.py` from what the gate found; not written by hand.

```console
$ swarmnode plan GLM-4.6 --devices 3x32G     # can my three machines run it? A name, a GGUF, or its address
$ swarmnode gate model.gguf                  # does this very file run over a swarm as it runs alone?
$ swarmnode gate --arch all                  # tiny models of every architecture: the second table
$ swarmnode gate --shape all                 # one layer of each model, true widths: the first table
```

## Twelve models

One MoE layer of each, with its true widths, counts and types and random weights, went through a worker process, QUIC
and the wire. `exact`: the rows that came back are the local engine's, byte for byte. The cosines are the lowest of any
row in partial mode, both ways; the gate asks for 0.9999 with F16 and 0.9985 with INT8 and FP8. Bytes are of one token
and one layer, out and back, all its experts on one worker. `backbone`: memory with {CONTEXT} tokens of context, without
any expert; `devices`: how many with that much memory, all alike, run it (`swarmnode plan` for any others). The random
weights and rows lean towards one direction, so that errors fare as they do in the trained demo model.
"""

_ASSUMED = """\
Widths are the published ones. `one expert MB` is of the layer that was measured, all of one type; memory and devices
are those of a usual file of the model, as llama.cpp's quantiser makes it, so that 1,000 experts take up to 8 % more
than a thousand such experts. What is assumed of the files, and `swarmnode plan NAME` with them:

"""

_ARCH_HEAD = """\
## Architectures

Every architecture whose graph in the installed llama.cpp calls its MoE function: a tiny random model of it, in each
variant that changes the graph, over workers and by the plain local run. `exact`: the same logits, byte for byte. The
cosines are the lowest of any layer's row with exact inputs. `taken back`: whether tokens can be taken out of the cache
again (drafts, kept prefixes); where not, a node does neither.
"""


def page(arch_rows: Sequence[Row], shape_rows: Sequence[Row]) -> str:
    """The page's text. Models and architectures that have no result are shown as not gated yet."""
    by_model = {row["model"]: row for row in shape_rows}
    parts = [_HEAD, _models_table(by_model), _assumed(), _speeds(), _ARCH_HEAD, _architectures_table(arch_rows)]
    parts += [_failures(arch_rows)]
    return "\n".join(part for part in parts if part)


def _models_table(by_model: dict[str, Row]) -> str:
    head = (
        "model", "in llama.cpp", "MoE layers", "experts, top", "shared expert", "one expert MB", "roadmap", "exact",
        "F16", "INT8", "FP8", "KB/token F16 · INT8", "backbone GiB", "1,000 experts GiB", "devices 16 · 32 · 64 GiB",
    )  # fmt: skip
    rows = []
    for shape in MODELS:
        needs, found = needs_of_shape(shape), by_model.get(shape.name)
        counts = (recommended(needs, size * GIB, CONTEXT) for size in (16, 32, 64))
        rows.append(
            (
                f"{shape.name} ({shape.params / 1e9:.0f} B)",
                f"`{shape.arch}`",
                f"{shape.layers} of {shape.blocks}",
                f"{shape.n_expert}, {shape.k}",
                "yes" if shape.shared else "no",
                f"{(found['bytes_per_expert'] if found else shape.expert_bytes) / 1e6:.1f} {shape.expert_type}",
                f"{shape.size_mb:g}" if shape.size_mb else NONE,
                *_verdict(found),
                f"{memory_of(needs, CONTEXT).total / GIB:.1f}",
                f"{1000 * needs.expert_bytes / GIB:.1f}",
                " · ".join(str(count) if count else NONE for count in counts),
            )
        )
    return _table(head, rows)


def _verdict(found: Row | None) -> tuple[str, ...]:
    if found is None:
        return ("not gated yet", NONE, NONE, NONE, NONE)
    if found["error"] and not found["identical"]:
        return (found["error"], NONE, NONE, NONE, NONE)
    cosines, sizes = found["layer_cosine"], found["token_bytes"]
    return (
        "yes" if found["passed"] else found["error"],
        *(_cosine(cosines.get(key)) for key, _ in _WIRES),
        f"{sizes['f16'] / 1000:.1f} · {sizes['int8'] / 1000:.1f}",
    )


def _assumed() -> str:
    lines = [f"- {shape.name}: {needs_of_shape(shape).assumed}." for shape in MODELS]
    return _ASSUMED + "\n".join(lines) + "\n"


def _speeds() -> str:
    """What three devices of 64 GiB make of each, where they can; else the least number of them."""
    rows = []
    for shape in MODELS:
        needs = needs_of_shape(shape)
        count = max(3, recommended(needs, 64 * GIB, CONTEXT))
        found = make_plan(needs, parse_devices([f"{count}x64G"], 0.02), CONTEXT)
        near, far = found.speeds[0].tokens_s, found.speeds[1].tokens_s
        cells = (f"{near[0]:.2g} · {near[2]:.2g}", f"{far[0]:.2g} · {far[2]:.2g}") if found.fits else (NONE, NONE)
        trips = f"{found.trips} of {needs.n_sites}" if found.fits else NONE
        remote = f"{found.remote[1].tokens_s[0]:.2g} · {found.remote[1].tokens_s[2]:.2g}"
        rows.append((shape.name, f"{count} × 64 GiB", trips, *cells, remote))
    head = ("model", "devices", "round trips", "20 ms", "80 ms", "80 ms, every expert elsewhere")
    return (
        "At most so many tokens/s of one generation, one token per step · two (drafts), with whole layers kept on the\n"
        "backbone while its memory lasts:\n\n"
    ) + _table(head, rows)


def _architectures_table(rows: Sequence[Row]) -> str:
    head = ("architecture", "variants passed", "types passed", "exact", "F32", "F16", "INT8", "FP8", "taken back")
    table = []
    for arch in ARCHITECTURES:
        mine = [row for row in rows if row["arch"] == arch]
        if not mine:
            table.append((f"`{arch}`", "not gated yet", *([NONE] * 7)))
            continue
        passed = [row for row in mine if row["passed"]]
        if not passed:
            table.append((f"`{arch}`", "none, see below", *([NONE] * 7)))
            continue
        variants = list(dict.fromkeys(row["variant"] for row in passed))
        types = list(dict.fromkeys(row["type"] for row in passed))
        lowest = {key: min(row["layer_cosine"][key] for row in passed) for key in ("partial_f32", "f16", "int8", "fp8")}
        table.append(
            (
                f"`{arch}`",
                ", ".join(variants),
                ", ".join(types),
                "yes" if all(row["identical"] for row in passed) else "no",
                f"{lowest['partial_f32']:.7f}",
                *(_cosine(lowest[key]) for key, _ in _WIRES),
                ", ".join(dict.fromkeys(_rollback(row["rollback"]) for row in passed if row["rollback"])) or NONE,
            )
        )
    return _table(head, table)


def _rollback(said: str) -> str:
    return {"exact": "yes", "refused": "no"}.get(said, said)


def _failures(rows: Sequence[Row]) -> str:
    failed = [row for row in rows if not row["passed"]]
    if not failed:
        return ""
    lines = [f"- `{row['arch']}` {row['variant']} {row['type']}: {row['error']}" for row in failed]
    return "### What did not pass, or could not be built, with the error\n\n" + "\n".join(lines) + "\n"


def _cosine(value: float | None) -> str:
    """Rounded down: a figure never looks better than it is."""
    return NONE if value is None else f"{int(value * 1e5) / 1e5:.5f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def load(path: Path) -> list[Row]:
    """Rows of a file of results; none where there is no file."""
    rows: list[Row] = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return rows


def keep(path: Path, rows: Sequence[Row]) -> None:
    """One row a line, so that changes can be read; times are left out."""
    lines = [json.dumps({key: value for key, value in row.items() if key != "seconds"}) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Keep new results, if any are given, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--architectures", type=Path, help="output of swarmnode gate --arch all --json")
    parser.add_argument("--shapes", type=Path, help="output of swarmnode gate --shape all --json")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 for an old page")
    arguments = parser.parse_args(argv)
    if arguments.architectures is not None:
        keep(ARCH_FILE, load(arguments.architectures))
    if arguments.shapes is not None:
        keep(SHAPE_FILE, load(arguments.shapes))
    text = page(load(ARCH_FILE), load(SHAPE_FILE))
    if arguments.check:
        return int(not PAGE.is_file() or PAGE.read_text("utf-8") != text)
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
