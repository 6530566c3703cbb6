"""Checks a site before anything is built from it: an interpreter of recipes over widths instead of numbers.

Everything a step yields is a float32 row per (token, expert) pair, so its shape is one number. Each op of
the whitelist has a rule that takes the widths of its sources and its params and returns the width of its
result, or raises RecipeError. The rules are at least as strict as the GGML_ASSERTs of the ops they guard,
because a failed GGML_ASSERT ends the process. Pure; called by `recipe.check_site`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from swarmnode.compute.ggml_enums import F32, GLU_OPS, MATMUL_TYPES, PRECISIONS, UNARY_OPS
from swarmnode.compute.ggml_types import BLOCK_TYPES
from swarmnode.compute.recipe import Site, Step
from swarmnode.errors import RecipeError

MAX_STEPS = 64  # the longest recipe seen (SITU with scales) has 16
MAX_TENSORS = 16
MAX_NAME = 63  # GGML_MAX_NAME less its terminating zero
MAX_WIDTH = 1 << 17  # the widest seen is Llama 4's merged gate_up, 16,384
MAX_EXPERTS = 1 << 14  # 512 is the most that llama.cpp builds (LLAMA_MAX_EXPERTS)
MAX_SLICE_BYTES = 1 << 32

_SOURCE = re.compile(r"x|[st](?:0|[1-9][0-9]?)")
_UNARY = frozenset(range(len(UNARY_OPS))) - {UNARY_OPS.index("XIELU")}  # XIELU takes params that no expert FFN uses
_GLU_LIMIT = frozenset({GLU_OPS.index("SWIGLU_OAI"), GLU_OPS.index("SWIGLU_CLAMP")})
_GLU_ALPHA = GLU_OPS.index("SWIGLU_OAI")

Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], int]]


@dataclass(frozen=True, slots=True)
class _Row:
    """One float32 row of `width` per pair; which inputs it depends on."""

    width: int
    from_x: bool
    by_expert: bool


@dataclass(frozen=True, slots=True)
class _Stack:
    """An expert tensor: `ne` of one expert's slice."""

    ne: tuple[int, ...]
    ggml_type: int


_Value: TypeAlias = _Row | _Stack


def float_param(word: int) -> float:
    """The float32 whose bits an op_params word holds."""
    value: float = struct.unpack("<f", struct.pack("<I", word & 0xFFFFFFFF))[0]
    return value


def check(site: Site, shapes: Shapes) -> tuple[int, ...]:
    """See `recipe.check_site`. Returns the width of each step's rows."""
    _check_bounds(site)
    stacks = [_check_tensor(name, shapes, site) for name in site.tensors]
    rows: list[_Row] = []
    for number, step in enumerate(site.recipe.steps):
        where = f"site {site.index} (layer {site.layer}), step {number} {step.op[:20]!r}"
        rule = _RULES.get(step.op)
        if rule is None:
            raise RecipeError(f"{where}: not on the whitelist of operations; this node's version cannot run it")
        try:
            rows.append(rule(step, [_resolve(s, site, stacks, rows) for s in step.sources]))
        except _Refused as refusal:
            raise RecipeError(f"{where}: {refusal}") from None
    last = rows[-1]
    if last.width != site.d_out:
        raise RecipeError(f"site {site.index}: the recipe yields rows of {last.width}, d_out is {site.d_out}")
    if not (last.from_x and last.by_expert):
        raise RecipeError(f"site {site.index}: the output does not depend on both x and the chosen expert")
    return tuple(row.width for row in rows)


def _check_bounds(site: Site) -> None:
    def within(what: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise RecipeError(f"site {site.index}: {what} is {value}, must be {low} to {high}")

    within("index", site.index, 0, 1 << 20)
    within("layer", site.layer, 0, 1 << 20)
    within("d_in", site.d_in, 1, MAX_WIDTH)
    within("d_out", site.d_out, 1, MAX_WIDTH)
    within("n_expert", site.n_expert, 1, MAX_EXPERTS)
    within("n_used", site.n_used, 1, site.n_expert)
    within("number of tensors", len(site.tensors), 1, MAX_TENSORS)
    within("number of steps", len(site.recipe.steps), 1, MAX_STEPS)
    if len(set(site.tensors)) != len(site.tensors):
        raise RecipeError(f"site {site.index}: a tensor is named twice")
    if site.recipe.weights not in ("after", "before"):
        raise RecipeError(f'site {site.index}: weights must be "after" or "before"')


def _check_tensor(name: str, shapes: Shapes, site: Site) -> _Stack:
    where = f"site {site.index}: tensor {name[:MAX_NAME]!r}"
    if not 0 < len(name.encode(errors="replace")) <= MAX_NAME:
        raise RecipeError(f"{where}: a tensor name has 1 to {MAX_NAME} bytes")
    if name not in shapes:
        raise RecipeError(f"{where}: the model has no such expert tensor")
    ne, ggml_type = shapes[name]
    ne = ne or (1,)  # a tensor of one value per expert: its slice has no dimension left
    block = BLOCK_TYPES.get(ggml_type)
    if block is None or ggml_type not in MATMUL_TYPES:
        raise RecipeError(f"{where}: ggml type {ggml_type} cannot be computed with")
    if len(ne) > 2 or not all(1 <= n <= MAX_WIDTH for n in ne) or ne[0] % block.elements:
        raise RecipeError(f"{where}: impossible shape {list(ne)} of type {block.name}")
    if math.prod(ne) // block.elements * block.bytes > MAX_SLICE_BYTES:
        raise RecipeError(f"{where}: one expert's slice would exceed {MAX_SLICE_BYTES} bytes")
    return _Stack(ne, ggml_type)


class _Refused(Exception):
    """A rule says no; `check` adds where."""


def _resolve(source: str, site: Site, stacks: Sequence[_Stack], rows: Sequence[_Row]) -> _Value:
    if _SOURCE.fullmatch(source) is None:
        raise _Refused(f"source {source[:10]!r} is neither x, s<step> nor t<tensor>")
    if source == "x":
        return _Row(site.d_in, from_x=True, by_expert=False)
    values: Sequence[_Value] = stacks if source[0] == "t" else rows
    number = int(source[1:])
    if number >= len(values):
        raise _Refused(f"source {source} does not exist yet")
    return values[number]


def _rows(sources: Sequence[_Value], *counts: int) -> list[_Row]:
    """All sources as rows, exactly one of `counts` of them."""
    rows = [s for s in sources if isinstance(s, _Row)]
    if len(rows) != len(sources) or len(rows) not in counts:
        raise _Refused(f"takes {' or '.join(map(str, counts))} rows as sources")
    return rows


def _words(step: Step, most: int) -> list[int]:
    """The params padded with the zeros that were cut, at most `most` of them, each an int32."""
    if len(step.params) > most:
        raise _Refused(f"takes at most {most} params, has {len(step.params)}")
    if not all(-(1 << 31) <= word < 1 << 31 for word in step.params):
        raise _Refused("a param is no int32")
    return [*step.params, *[0] * (most - len(step.params))]


def _mul_mat_id(step: Step, sources: Sequence[_Value]) -> _Row:
    match sources:
        case [_Stack(ne=(k, m)), _Row(width=width, from_x=from_x)] if k == width:
            accumulate, hint, unused, source = _words(step, 4)
            if accumulate not in PRECISIONS or source not in PRECISIONS or hint or unused:
                raise _Refused("params are not precisions")
            return _Row(m, from_x=from_x, by_expert=True)
    raise _Refused("takes an expert matrix [k, m] and rows of k")


def _add_id(step: Step, sources: Sequence[_Value]) -> _Row:
    _words(step, 0)
    match sources:
        case [_Row() as row, _Stack(ne=(width,), ggml_type=kind)] if width == row.width and kind == F32:
            return _Row(width, row.from_x, by_expert=True)
    raise _Refused("takes rows and a float32 expert bias of the same width")


def _get_rows(step: Step, sources: Sequence[_Value]) -> _Row:
    _words(step, 0)
    match sources:
        case [_Stack(ne=(width,), ggml_type=kind)] if kind == F32:
            return _Row(width, from_x=False, by_expert=True)
    raise _Refused("takes a float32 expert vector")


def _glu(step: Step, sources: Sequence[_Value]) -> _Row:
    rows = _rows(sources, 1, 2)
    op, swapped, alpha_word, limit_word = _words(step, 4)
    alpha, limit = float_param(alpha_word), float_param(limit_word)
    if not 0 <= op < len(GLU_OPS) or swapped not in (0, 1):
        raise _Refused(f"unknown GLU {op}, swapped {swapped}")
    if not math.isfinite(alpha) or not math.isfinite(limit) or limit < 0:
        raise _Refused(f"alpha {alpha} and limit {limit} must be finite, the limit not negative")
    if (alpha_word and op != _GLU_ALPHA) or (limit_word and op not in _GLU_LIMIT):
        raise _Refused(f"{GLU_OPS[op]} has no alpha or limit")
    if len(rows) == 2:
        if rows[0].width != rows[1].width or swapped:
            raise _Refused("takes two rows of the same width, not swapped")
        return _merge(rows[0].width, rows)
    if rows[0].width % 2:
        raise _Refused(f"cannot halve a row of {rows[0].width}")
    return _merge(rows[0].width // 2, rows)


def _binary(step: Step, sources: Sequence[_Value]) -> _Row:
    _words(step, 0)
    first, second = _rows(sources, 2)
    if second.width not in (first.width, 1):
        raise _Refused(f"rows of {first.width} and {second.width} do not go together")
    return _merge(first.width, [first, second])


def _unary(step: Step, sources: Sequence[_Value]) -> _Row:
    (op,) = _words(step, 1)
    if op not in _UNARY:
        raise _Refused(f"unknown unary operation {op}")
    return _rows(sources, 1)[0]


def _clamp(step: Step, sources: Sequence[_Value]) -> _Row:
    low, high = map(float_param, _words(step, 2))
    if not low <= high:  # also refuses NaN; infinities are meant
        raise _Refused(f"cannot clamp to {low} … {high}")
    return _rows(sources, 1)[0]


def _scale(step: Step, sources: Sequence[_Value]) -> _Row:
    if not all(math.isfinite(float_param(word)) for word in _words(step, 2)):
        raise _Refused("scale and bias must be finite")
    return _rows(sources, 1)[0]


def _view(step: Step, sources: Sequence[_Value]) -> _Row:
    first, length = _words(step, 2)
    (row,) = _rows(sources, 1)
    if first < 0 or length < 1 or first + length > row.width:
        raise _Refused(f"elements {first} … {first + length} of a row of {row.width}")
    return _Row(length, row.from_x, row.by_expert)


def _same(step: Step, sources: Sequence[_Value]) -> _Row:
    _words(step, 0)
    return _rows(sources, 1)[0]


def _merge(width: int, rows: Sequence[_Row]) -> _Row:
    return _Row(width, any(r.from_x for r in rows), any(r.by_expert for r in rows))


_RULES: dict[str, Callable[[Step, Sequence[_Value]], _Row]] = {
    "MUL_MAT_ID": _mul_mat_id,
    "ADD_ID": _add_id,
    "GET_ROWS": _get_rows,
    "GLU": _glu,
    "ADD": _binary,
    "SUB": _binary,
    "MUL": _binary,
    "DIV": _binary,
    "UNARY": _unary,
    "CLAMP": _clamp,
    "SCALE": _scale,
    "VIEW": _view,
    "CONT": _same,
    "SQR": _same,
}
WHITELIST = frozenset(_RULES)
