"""The ctypes mirror fits the installed library, and a mirror that does not is found out."""

from __future__ import annotations

import ctypes
import os

import pytest

from swarmnode.compute import ggml, layout
from swarmnode.compute.device import choose_device, devices
from swarmnode.compute.ggml_enums import GLU_OPS
from swarmnode.errors import EngineError, LayoutMismatch


def test_the_mirror_fits_the_pinned_library() -> None:
    layout.check.__wrapped__()
    assert ggml.installed_version() == ggml.MIRROR_VERSION
    assert ggml.engine_build() == f"llama-cpp-python {ggml.MIRROR_VERSION}"


FIELDS = list(ggml.TensorStruct._fields_)


def _swapped(first: str, second: str) -> type[ctypes.Structure]:
    names = [field[0] for field in FIELDS]
    order = list(FIELDS)
    a, b = names.index(first), names.index(second)
    order[a], order[b] = order[b], order[a]
    return type("Swapped", (ctypes.Structure,), {"_fields_": order})


@pytest.mark.parametrize(
    "pair",
    [
        ("ne", "nb"),
        ("op_params", "flags"),
        ("view_src", "view_offs"),
        ("type", "op"),
        ("data", "extra"),
        ("op", "flags"),
    ],
)
def test_a_moved_field_is_found_and_both_versions_named(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "TensorStruct", _swapped(*pair))
    monkeypatch.setattr(ggml, "installed_version", lambda: "9.9.9")
    with pytest.raises(LayoutMismatch) as raised:
        layout.check.__wrapped__()
    assert ggml.MIRROR_VERSION in str(raised.value)
    assert "9.9.9" in str(raised.value)


def test_a_struct_of_another_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = type("Longer", (ctypes.Structure,), {"_fields_": [*FIELDS, ("new", ctypes.c_void_p)]})
    monkeypatch.setattr(ggml, "TensorStruct", longer)
    with pytest.raises(LayoutMismatch, match="sizeof"):
        layout.check.__wrapped__()


def test_a_renumbered_enumeration_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "GLU_OPS", ("GEGLU", "REGLU", *GLU_OPS[2:]))
    with pytest.raises(LayoutMismatch, match="GLU op 0"):
        layout.check.__wrapped__()


def test_a_device_is_found_by_kind_and_by_name() -> None:
    cpu = choose_device("cpu")
    assert cpu.is_cpu
    assert choose_device(cpu.name) == cpu
    assert choose_device("auto") in [device for _, device in devices()]
    with pytest.raises(EngineError, match="no device 'abacus' here; this build of llama-cpp-python computes on CPU"):
        choose_device("abacus")


def test_idle_threads_do_not_spin() -> None:
    assert os.environ["OMP_WAIT_POLICY"]
