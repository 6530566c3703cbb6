"""Recipes as data: strict decoding, a stable hash, and what check_site refuses, with its reason."""

from __future__ import annotations

import re
import struct

import msgspec
import pytest

from swarmnode.bench.synthetic import swiglu_site
from swarmnode.compute.recipe import Recipe, Site, Step, check_site, recipes_hash
from swarmnode.compute.recipe_check import MAX_STEPS, MAX_WIDTH
from swarmnode.errors import RecipeError

SITE, SHAPES = swiglu_site(256, 512, 16, 4, types=(12, 12, 14))


def with_steps(*steps: Step) -> Site:
    return msgspec.structs.replace(SITE, recipe=Recipe(steps, "after"))


def test_a_site_survives_encoding_and_keeps_its_hash() -> None:
    again = msgspec.json.decode(msgspec.json.encode(SITE), type=Site)
    assert again == SITE
    assert recipes_hash([again]) == recipes_hash([SITE])


def test_the_hash_is_fixed() -> None:
    """Nodes of two versions compare this value: it may change only with the protocol."""
    site = Site(0, 3, 8, 8, 4, 2, ("a",), Recipe((Step("MUL_MAT_ID", ("t0", "x")),), "after"))
    assert recipes_hash([site]) == "77e12f884444b4d22a6d52afe89585f16fe2621cbbf5637f3faa3d89320e9f13"


def test_the_hash_depends_on_every_field_and_the_order() -> None:
    other = msgspec.structs.replace(SITE, index=1)
    hashes = {recipes_hash(sites) for sites in ([SITE], [other], [SITE, other], [other, SITE], [])}
    assert len(hashes) == 5


def test_unknown_fields_are_refused() -> None:
    data = msgspec.json.encode(SITE).replace(b'"layer":', b'"shell":"rm","layer":')
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data, type=Site)


def test_a_good_site_passes() -> None:
    check_site(SITE, SHAPES)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("d_in", 0, "d_in is 0"),
        ("d_in", 512, "expert matrix"),
        ("d_out", MAX_WIDTH + 1, "d_out is"),
        ("d_out", 512, "d_out is 512"),
        ("n_used", 17, "n_used is 17"),
        ("n_expert", 0, "n_expert is 0"),
        ("layer", -1, "layer is -1"),
        ("tensors", (), "number of tensors"),
        ("tensors", ("nope",) * 3, "named twice"),
        ("tensors", ("nope", *SITE.tensors), "no such expert tensor"),
        ("tensors", ("n" * 64,), "1 to 63 bytes"),
    ],
)
def test_bounds(field: str, value: object, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        check_site(msgspec.structs.replace(SITE, **{field: value}), SHAPES)


def bits(value: float) -> int:
    word: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return word


UP, GATE = Step("MUL_MAT_ID", ("t0", "x")), Step("MUL_MAT_ID", ("t1", "x"))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (Step("FLASH_ATTN_EXT", ("s0",)), "whitelist"),
        (Step("UNARY", ("s2",), (10,)), "does not exist yet"),
        (Step("UNARY", ("t3",), (10,)), "does not exist yet"),
        (Step("UNARY", ("y",), (10,)), "neither x"),
        (Step("UNARY", ("s0",), (17,)), "unknown unary"),  # XIELU
        (Step("UNARY", ("s0",), (99,)), "unknown unary"),
        (Step("UNARY", ("s0",), (-1,)), "unknown unary"),
        (Step("UNARY", ("s0",), (10, 1)), "at most 1 params"),
        (Step("UNARY", ("t0",), (10,)), "rows as sources"),
        (Step("GLU", ("s1", "s0"), (7,)), "unknown GLU"),
        (Step("GLU", ("s1", "s0"), (2, 1)), "not swapped"),
        (Step("GLU", ("s1", "x"), (2,)), "same width"),
        (Step("GLU", ("s1", "s0"), (3, 0, bits(float("nan")), 0)), "finite"),
        (Step("GLU", ("s1", "s0"), (6, 0, 0, bits(-1.0))), "not negative"),
        (Step("GLU", ("s1", "s0"), (2, 0, bits(1.0))), "no alpha"),
        (Step("CLAMP", ("s0",), (bits(1.0), bits(-1.0))), "clamp"),
        (Step("CLAMP", ("s0",), (bits(float("nan")), bits(1.0))), "clamp"),
        (Step("SCALE", ("s0",), (bits(float("inf")),)), "finite"),
        (Step("VIEW", ("s0",), (1, 512)), "elements 1 … 513"),
        (Step("VIEW", ("s0",), (-1, 2)), "elements -1"),
        (Step("VIEW", ("s0",)), "elements 0 … 0"),
        (Step("VIEW", ("s0",), (2**31 - 1, 2**31 - 1)), "elements"),
        (Step("VIEW", ("s0",), (2**40, 1)), "no int32"),
        (Step("MUL", ("s0", "x")), "do not go together"),
        (Step("MUL", ("s0",)), "2 rows"),
        (Step("ADD_ID", ("s0", "t0")), "expert bias"),
        (Step("GET_ROWS", ("t0",)), "expert vector"),
        (Step("MUL_MAT_ID", ("t2", "x")), "expert matrix"),
        (Step("MUL_MAT_ID", ("x", "t0")), "expert matrix"),
        (Step("MUL_MAT_ID", ("t0", "x"), (1,)), "precisions"),
    ],
)
def test_steps_that_would_end_the_process_are_refused(step: Step, reason: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(reason)) as raised:
        check_site(with_steps(UP, GATE, step), SHAPES)
    assert "step 2" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_output_must_depend_on_x_and_the_expert() -> None:
    shapes = {"w": ((8, 8), 0), "b": ((8,), 0)}
    site = Site(0, 0, 8, 8, 4, 2, tuple(shapes), Recipe((Step("SQR", ("x",)),), "after"))
    with pytest.raises(RecipeError, match="does not depend"):
        check_site(site, shapes)
    constant = (Step("GET_ROWS", ("t1",)), Step("MUL_MAT_ID", ("t0", "s0")))
    with pytest.raises(RecipeError, match="does not depend"):
        check_site(msgspec.structs.replace(site, recipe=Recipe(constant, "after")), shapes)


def test_the_number_of_steps_is_bounded() -> None:
    with pytest.raises(RecipeError, match="number of steps"):
        check_site(with_steps(*[UP] * (MAX_STEPS + 1)), SHAPES)
    with pytest.raises(RecipeError, match="number of steps"):
        check_site(with_steps(), SHAPES)


@pytest.mark.parametrize(
    "shape", [((255, 512), 12), ((256, 0), 12), ((256, 2, 2), 12), ((256, 512), 26), ((256, 512), 99)]
)
def test_impossible_tensors_are_refused(shape: tuple[tuple[int, ...], int]) -> None:
    with pytest.raises(RecipeError, match=r"impossible shape|cannot be computed"):
        check_site(SITE, {**SHAPES, SITE.tensors[0]: shape})
