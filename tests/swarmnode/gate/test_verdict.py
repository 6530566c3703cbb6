"""Which types follow from a verdict; and that no file allows what its figures do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.dispatch.codec import WireName
from swarmnode.errors import GateFailed, ModelError, UsageError
from swarmnode.gate import best_wires, gate_failure, load_verdict, save_verdict, wires_allowed
from swarmnode.gate.coding import Pair
from swarmnode.gate.known_verdicts import keep_verdict
from swarmnode.gate.verdict import MAX_SITES, SAFE, VERIFIED, LocalFigures, SiteFigures, Verdict, printable
from swarmnode.gate.verdict_bytes import MAX_BYTES
from swarmnode.gate.verdict_file import bound_of, check_writable
from swarmnode.onboard import ModelPack
from tests.swarmnode.gate.samples import PAIRS, site, unmeasured, verdict


class TestWires:
    def test_everything_passes(self) -> None:
        found = verdict(site(), site(1))
        for out, back in PAIRS:
            assert found.site_wires(out, back) == {0: (out, back), 1: (out, back)}
        assert found.best() == {0: ("int8", "int8"), 1: ("int8", "int8")}
        assert [found.passed(wire) for wire in ("f32", "f16", "int8", "fp8")] == [""] * 4

    def test_one_layer_falls_back(self) -> None:
        found = verdict(site(), site(5, int8=0.99))
        assert found.site_wires("int8", "int8") == {0: ("int8", "int8"), 1: ("f16", "f16")}
        assert found.site_wires("int8", "f32") == {0: ("int8", "f32"), 1: ("f16", "f32")}
        assert found.passed("int8") == ""
        assert found.best() == {0: ("fp8", "fp8"), 1: ("fp8", "fp8")}

    def test_no_layer_has_it(self) -> None:
        found = verdict(site(fp8=0.99), site(1, fp8=0.98))
        assert found.passed("fp8") == "no layer's cosine is 0.9985 both ways (best 0.99000)"
        assert found.site_wires("fp8", "fp8") == {0: ("f16", "f16"), 1: ("f16", "f16")}

    def test_f16_that_fails_is_f32(self) -> None:
        found = verdict(site(f16=0.99, int8=0.99, fp8=0.99), site(1))
        assert found.site_wires("f16", "f16") == {0: SAFE, 1: ("f16", "f16")}
        assert found.site_wires("fp8", "f16")[0] == SAFE

    def test_logits_that_fail_take_the_whole_pair(self) -> None:
        found = verdict(site(), bad={("int8", "int8"): {"kl": 2e-3}, ("fp8", "fp8"): {"broken": 1}})
        assert found.used(("int8", "int8")) in (("int8", "f16"), ("f16", "int8"))
        assert found.passed("int8") == "KL 2.00e-03 > 1.00e-03"
        assert found.passed("fp8") == "NaN or infinity in 1 rows"
        assert found.best() == {0: ("int8", "fp8")} or found.best() == {0: ("fp8", "int8")}

    def test_no_pair_passes(self) -> None:
        found = verdict(site(), bad={pair: {"argmax_confident": 0.9} for pair in PAIRS})
        assert found.used(("int8", "fp8")) == SAFE
        assert found.site_wires("int8", "fp8") == {0: SAFE}
        assert found.best() == {0: SAFE}
        assert "clear argmax" in found.passed("f16")
        assert found.passed("f32") == ""

    def test_pairs_with_f32_are_held_to_those_with_f16(self) -> None:
        found = verdict(site(), bad={("f16", "int8"): {"kl": 1.0}})
        assert found.site_wires("f32", "int8") == {0: ("f32", "f16")}
        assert found.site_wires("int8", "f32") == {0: ("int8", "f32")}

    def test_figures_decide_not_what_the_file_says_was_run(self) -> None:
        good = verdict(site(int8=0.9))
        forged = msgspec.structs.replace(
            good, pairs=tuple(msgspec.structs.replace(p, wires=((p.out, p.back),)) for p in good.pairs)
        )
        assert "cosine 0.90000 with INT8/INT8" in forged.objection(("int8", "int8"))
        assert forged.site_wires("int8", "int8") == {0: ("f16", "f16")}
        few = msgspec.structs.replace(good, positions=512)
        assert few.site_wires("f16", "f16") == {0: SAFE}
        assert "512 positions only" not in few.objection(SAFE)
        other = verdict(site())
        swapped = msgspec.structs.replace(
            other, pairs=tuple(msgspec.structs.replace(p, wires=(("int8", "int8"),)) for p in other.pairs)
        )
        assert "was measured in its place" in swapped.objection(("f16", "f16"))

    @given(
        st.lists(st.tuples(st.floats(0.99, 1), st.floats(0.99, 1), st.floats(0.99, 1)), min_size=1, max_size=4),
        st.dictionaries(
            st.sampled_from(PAIRS),
            st.fixed_dictionaries({"kl": st.floats(0, 2e-3), "argmax_confident": st.floats(0.99, 1)}),
        ),
        st.sampled_from(PAIRS),
    )
    def test_nothing_is_coarser_than_wanted_or_than_its_cosine(
        self, layers: list[tuple[float, float, float]], bad: dict[Pair, dict[str, float]], wanted: Pair
    ) -> None:
        order = ["f32", "f16", "int8", "fp8"]
        sites = [site(i, f16=f16, int8=int8, fp8=fp8) for i, (f16, int8, fp8) in enumerate(layers)]
        found = verdict(*sites, bad=bad)
        for wires in (found.site_wires(*wanted), found.best()):
            assert list(wires) == list(range(len(sites)))
            for index, pair in wires.items():
                measured = tuple("f16" if wire == "f32" else wire for wire in pair)
                assert pair == SAFE or "f32" in pair or sites[index].lowest_of(measured) >= 0.9985  # type: ignore[arg-type]
        for pair in found.site_wires(*wanted).values():
            for one, most in zip(pair, wanted, strict=True):
                assert one == most or order.index(one) < min(order.index(most), 2)


@pytest.fixture
def pack(demo_pack: ModelPack, tmp_path: Path) -> ModelPack:
    """The shipped model's pack in a folder of its own, without its files."""
    return ModelPack(tmp_path, demo_pack.manifest, demo_pack.source)


def fitting(pack: ModelPack, make: Callable[..., Verdict] = verdict, **given: Any) -> Verdict:
    sites = [site(one.layer, one.d_in, one.d_out, **given.pop(f"layer{one.layer}", {})) for one in pack.manifest.sites]
    return make(*sites, bound=bound_of(pack), **given)


class TestAllowed:
    def test_without_a_verdict(self, pack: ModelPack) -> None:
        assert wires_allowed(pack, "f16", "f32") == ({}, [])
        for out, back, name in (("int8", "f16", "INT8"), ("f16", "fp8", "FP8"), ("int8", "fp8", "INT8")):
            with pytest.raises(UsageError, match=f"^{name} on the wire needs a gate that this model passed: run ") as e:
                wires_allowed(pack, out, back)  # type: ignore[arg-type]  # literals of a tuple
            assert f"swarmnode gate {pack.source} (not gated yet)" in str(e.value)
        wires, notes = best_wires(pack)
        assert wires == dict.fromkeys(range(4), ("f16", "f16"))
        assert notes == [f"F16 on the wire (not gated yet); for less, run swarmnode gate {pack.source}"]

    def test_who_has_no_experts_is_told_another_way(self, pack: ModelPack) -> None:
        joined = ModelPack(pack.path, pack.manifest, None)
        with pytest.raises(UsageError, match=r"copy that pack's verdict\.json to .*verdict\.json") as caught:
            wires_allowed(joined, "int8", "int8")
        assert "\n" not in str(caught.value)

    def test_all_as_wanted(self, pack: ModelPack) -> None:
        save_verdict(pack, fitting(pack))
        assert wires_allowed(pack, "int8", "fp8") == ({}, [])
        assert wires_allowed(pack, "f32", "f32") == ({}, [])
        wires, notes = best_wires(pack)
        assert wires == dict.fromkeys(range(4), ("int8", "int8"))
        assert notes == ["INT8/INT8 on the wire, as this model's gate allows"]

    def test_layers_that_cannot(self, pack: ModelPack) -> None:
        save_verdict(pack, fitting(pack, layer1={"int8": 0.99}, layer3={"int8": 0.98}))
        wires, notes = wires_allowed(pack, "int8", "int8")
        assert wires == {1: ("f16", "f16"), 3: ("f16", "f16")}
        assert notes == ["F16/F16 on the wire at layers 1, 3: layer cosine down to 0.98000 with INT8/INT8"]

    def test_a_model_that_cannot(self, pack: ModelPack) -> None:
        bad: dict[Pair, dict[str, float]] = {
            ("fp8", "fp8"): {"kl": 0.01},
            ("fp8", "f16"): {"kl": 0.01},
            ("f16", "fp8"): {"dnll": 0.01},
        }
        save_verdict(pack, fitting(pack, bad=bad))
        wires, notes = wires_allowed(pack, "fp8", "fp8")
        assert wires == dict.fromkeys(range(4), ("f16", "f16"))
        assert notes == [
            "FP8/FP8 does not pass this model's gate (KL 1.00e-02 > 1.00e-03)",
            "F16/F16 on the wire at every layer",
        ]

    def test_f16_is_held_to_a_verdict_too(self, pack: ModelPack) -> None:
        save_verdict(pack, fitting(pack, layer0={"f16": 0.99, "int8": 0.9, "fp8": 0.9}))
        wires, notes = wires_allowed(pack, "f16", "f16")
        assert wires == {0: SAFE}
        assert notes == ["F32/F32 on the wire at layer 0: layer cosine down to 0.99000 with F16/F16"]


class TestFile:
    def test_there_and_back(self, pack: ModelPack) -> None:
        found = fitting(pack)
        save_verdict(pack, found)
        assert load_verdict(pack) == found

    @pytest.mark.parametrize("what", ["model", "backbone", "recipes", "engine", "codec"])
    def test_another_one_does_not_count(self, pack: ModelPack, what: str) -> None:
        found = fitting(pack)
        bound = msgspec.structs.replace(found.bound, **{what: "d" * 64})
        save_verdict(pack, msgspec.structs.replace(found, bound=bound))
        why = load_verdict(pack)
        assert isinstance(why, str)
        assert why.startswith("its verdict is of another ")
        with pytest.raises(UsageError, match="another"):
            wires_allowed(pack, "int8", "int8")

    def test_damaged_files(self, pack: ModelPack) -> None:
        found = fitting(pack)
        broken = [
            b"",
            b"{}",
            b"[" * 100_000,
            b"\xff" * 100,
            msgspec.json.encode(found)[:-1],
            msgspec.json.encode(found).replace(b'"int8"', b'"int4"'),
            msgspec.json.encode(found).replace(b'"kl":', b'"more":1,"kl":'),
            msgspec.json.encode(msgspec.structs.replace(found, format=4)),
            msgspec.json.encode(msgspec.structs.replace(found, sites=(unmeasured(), *found.sites[1:]))),
            msgspec.json.encode(found).replace(b'"differ":0', b'"differ":-1', 1),
            msgspec.json.encode(found).replace(b'"local_differ":0', b'"local_differ":1e400'),
            msgspec.json.encode(found).replace(b'"version":"1.2.3"', b'"version":"' + b"9" * 301 + b'"'),
            msgspec.json.encode(msgspec.structs.replace(found, sites=found.sites[1:])),
            msgspec.json.encode(msgspec.structs.replace(found, sites=(site(d_in=7), *found.sites[1:]))),
            msgspec.json.encode(found).replace(b'"f32/f32"', b'"f32/f23"', 1),
            b" " * (MAX_BYTES + 1),
        ]
        for data in broken:
            pack.verdict_file.write_bytes(data)
            why = load_verdict(pack)
            assert isinstance(why, str)
            assert "\n" not in why
        pack.verdict_file.unlink()
        pack.verdict_file.mkdir()
        assert "cannot be read" in str(load_verdict(pack))
        with pytest.raises(ModelError):
            save_verdict(pack, found)

    def test_what_an_earlier_version_wrote(self, pack: ModelPack) -> None:
        """Without some fields of today's, with one that is gone; one line, and the model is as one never gated."""
        old = msgspec.to_builtins(fitting(pack))
        for name in ("version", "exact_positions", "local_differ", "partial"):
            del old[name]
        pack.verdict_file.write_bytes(msgspec.json.encode(old | {"format": 1, "identical": False}))
        assert load_verdict(pack) == "its verdict is of another version (format 1, not 3)"
        assert gate_failure(pack, force=False) == ""
        wires, notes = best_wires(pack)
        assert set(wires.values()) == {("f16", "f16")}
        assert "of another version" in notes[0]

    @given(st.data())
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_no_bytes_break_it_or_allow_int8_with_a_bad_cosine(self, pack: ModelPack, data: st.DataObject) -> None:
        whole = bytearray(msgspec.json.encode(fitting(pack, layer2={"int8": 0.9, "fp8": 0.9})))
        for _ in range(data.draw(st.integers(1, 6))):
            at = data.draw(st.integers(0, len(whole) - 1))
            whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        pack.verdict_file.write_bytes(bytes(whole))
        found = load_verdict(pack)
        if not isinstance(found, str):
            for index, pair in found.site_wires("int8", "int8").items():
                assert pair == SAFE or found.sites[index].lowest_of(pair) >= 0.9985
            found.best()
        assert "\n" not in gate_failure(pack, force=True)

    def test_the_largest_verdict_fits(self, pack: ModelPack) -> None:
        sites = [site(layer) for layer in range(64)]
        size = len(msgspec.json.encode(verdict(*sites)))
        assert size / len(sites) * MAX_SITES < MAX_BYTES

    def test_a_wire_name_is_one_of_four(self) -> None:
        names: tuple[WireName, ...] = ("f32", "f16", "int8", "fp8")
        assert {wire for pair in PAIRS for wire in pair} == set(names)


def test_nothing_coarser_passes_where_f16_does_not() -> None:
    found = verdict(site(), site(1), bad={("f16", "f16"): {"dnll": -0.0076}})
    for pair in VERIFIED:
        assert "F16" in found.objection(pair) or pair == ("f16", "f16")
        assert found.objection(pair)
        assert found.used(pair) == SAFE
    assert set(found.best().values()) == {SAFE}


def test_a_text_that_says_nothing_does_not_undo_what_is_known(pack: ModelPack) -> None:
    bad = fitting(pack, bad={("f16", "f16"): {"kl": 1.0}})
    good = fitting(pack)
    assert keep_verdict(pack, bad) == ""
    assert keep_verdict(pack, good) == ""
    assert "with an earlier text the model passed" in keep_verdict(pack, bad)
    assert load_verdict(pack) == good


class TestLayersThatDidNotFit:
    def test_they_have_f16_at_most_and_so_has_the_model(self) -> None:
        found = verdict(site(), site(1, f16=0.99, int8=0.9, fp8=0.9), unmeasured(2))
        assert found.best() == {0: ("f16", "f16"), 1: SAFE, 2: ("f16", "f16")}
        for out, back in PAIRS:
            finer = ("f32" if out == "f32" else "f16", "f32" if back == "f32" else "f16")
            assert found.used((out, back)) == finer
            got = found.site_wires(out, back)
            assert (got[0], got[2]) == (finer, finer)
        assert found.site_wires("int8", "int8")[1] == SAFE
        assert found.passed("int8") == "not measured"
        assert (found.identical, found.failure) == (True, "")

    def test_allowed(self, pack: ModelPack) -> None:
        sites = pack.manifest.sites
        figures = [site(sites[0].layer), *(unmeasured(one.layer) for one in sites[1:])]
        save_verdict(pack, verdict(*figures, bound=bound_of(pack)))
        wires, notes = wires_allowed(pack, "int8", "int8")
        assert wires == dict.fromkeys(range(4), ("f16", "f16"))
        assert notes == [
            "INT8/INT8 does not pass this model's gate (not measured)",
            "F16/F16 on the wire at every layer",
        ]
        assert wires_allowed(pack, "f16", "f16") == ({}, [])

    def test_it_does_not_undo_what_is_known(self, pack: ModelPack) -> None:
        whole = fitting(pack)
        figures = [unmeasured(one.layer) for one in pack.manifest.sites]
        assert keep_verdict(pack, whole) == ""
        assert keep_verdict(pack, verdict(*figures, bound=bound_of(pack)))
        assert load_verdict(pack) == whole


class TestFailure:
    def test_nothing_is_said_of_what_passed_or_was_not_measured(self) -> None:
        assert verdict(site()).failure == ""
        assert msgspec.structs.replace(verdict(site()), local_differ=None).failure == ""
        assert msgspec.structs.replace(verdict(site()), local_differ=None).identical is None
        assert msgspec.structs.replace(verdict(site()), exact_positions=0, local_differ=None).identical is None
        assert verdict(site(int8=0.9, fp8=0.9)).failure == ""

    def test_bits(self) -> None:
        differs = msgspec.structs.replace(site(7), exact_rows=128, differ=3)
        found = verdict(site(), differs, msgspec.structs.replace(site(8), exact_rows=128, differ=128))
        assert found.identical is False
        assert found.failure.endswith("bits: layer 7 is the first that differs, in 3 of 128 rows")
        found = msgspec.structs.replace(verdict(site()), local_differ=5)
        assert found.identical is False
        assert "the logits differ at 5 of 128 positions" in found.failure

    def test_partial_sums_and_f16(self) -> None:
        assert "cosine 0.9999980 of partial sums in F32" in verdict(site(f32=0.999998)).failure
        bad: dict[Pair, dict[str, float]] = {("f16", "f16"): {"kl": 0.5}}
        assert verdict(site(), bad=bad).failure == "KL 5.00e-01 > 1.00e-03"

    def test_who_may_run_it(self, pack: ModelPack) -> None:
        assert gate_failure(pack, force=False) == ""  # never gated
        save_verdict(pack, fitting(pack))
        assert gate_failure(pack, force=False) == ""
        save_verdict(pack, fitting(pack, bad={("f16", "f16"): {"kl": 0.5}}))
        with pytest.raises(GateFailed, match=r"model failed its gate: KL .*another --text .*--force") as caught:
            gate_failure(pack, force=False)
        assert "\n" not in str(caught.value)
        assert "KL 5.00e-01" in gate_failure(pack, force=True)
        save_verdict(pack, msgspec.structs.replace(fitting(pack), local_differ=1))
        with pytest.raises(GateFailed, match="update swarmnode and llama-cpp-python"):
            gate_failure(pack, force=False)
        other = msgspec.structs.replace(fitting(pack).bound, engine="another")
        save_verdict(pack, msgspec.structs.replace(fitting(pack), local_differ=1, bound=other))
        assert gate_failure(pack, force=False) == ""  # it says nothing of this engine

    def test_other_bits_are_kept_whatever_was_known(self, pack: ModelPack) -> None:
        bad = msgspec.structs.replace(fitting(pack), local_differ=1)
        assert keep_verdict(pack, fitting(pack)) == ""
        assert keep_verdict(pack, bad) == ""
        assert load_verdict(pack) == bad


class TestOtherBitsStay:
    """What is known of exact mode is undone by a comparison that passed, and by nothing less."""

    def test_logits(self, pack: ModelPack) -> None:
        bad = msgspec.structs.replace(fitting(pack), local_differ=3)
        assert keep_verdict(pack, bad) == ""
        without = msgspec.structs.replace(fitting(pack), exact_positions=0, local_differ=None, not_exact="on a GPU")
        staged = exact(fitting(pack), 0, 1, 2, 3, local_differ=None)
        sites = tuple(msgspec.structs.replace(one, local=LocalFigures()) for one in bad.sites)
        alone = msgspec.structs.replace(fitting(pack), sites=sites)
        for lesser in (without, staged, alone):
            assert lesser.failure == ""
            why = keep_verdict(pack, lesser)
            assert "the logits differ at 3 of 128 positions, with every layer the same, as was found before" in why
            assert "\n" not in why
            assert load_verdict(pack) == bad
            with pytest.raises(GateFailed):
                gate_failure(pack, force=False)
        assert keep_verdict(pack, fitting(pack)) == ""
        assert gate_failure(pack, force=False) == ""

    def test_a_layer(self, pack: ModelPack) -> None:
        good = exact(fitting(pack), 0, 1, 2, 3)
        sites = list(good.sites)
        sites[2] = msgspec.structs.replace(sites[2], differ=5)
        bad = msgspec.structs.replace(good, sites=tuple(sites))
        assert keep_verdict(pack, bad) == ""
        assert "layer 2 is the first that differs" in keep_verdict(pack, exact(fitting(pack), 0, 1))
        assert load_verdict(pack) == bad
        assert keep_verdict(pack, exact(fitting(pack), 0, 1, 2, local_differ=None)) == ""
        assert gate_failure(pack, force=False) == ""


def exact(found: Verdict, *layers: int, **other: Any) -> Verdict:
    """With rows of these layers compared, all of them the same."""
    sites = [
        msgspec.structs.replace(one, exact_rows=128 if one.layer in layers else 0, differ=0) for one in found.sites
    ]
    return msgspec.structs.replace(found, sites=tuple(sites), **other)


class TestFigures:
    def test_what_cannot_be(self, pack: ModelPack) -> None:
        good = fitting(pack)
        assert good.possible
        replace = msgspec.structs.replace
        first, *rest = good.sites
        for forged in (
            replace(good, sites=(replace(first, differ=77), *rest)),
            replace(good, sites=(replace(first, exact_rows=76, differ=77), *rest)),
            replace(good, local_differ=129),
            replace(good, sites=(replace(first, local=LocalFigures(128, 129)), *rest)),
            replace(good, exact_positions=0, local_differ=1),
            replace(good, pairs=(replace(good.pairs[0], confident=2049), *good.pairs[1:])),
            replace(good, pairs=(replace(good.pairs[0], positions=4096, confident=4000), *good.pairs[1:])),
            replace(good, pairs=(*good.pairs[1:], good.pairs[1])),
            replace(good, pairs=(replace(good.pairs[0], out="f32", back="f32"), *good.pairs[1:])),
            replace(good, partial=replace(good.pairs[0], positions=4096)),
        ):
            assert not forged.possible
            save_verdict(pack, forged)
            assert load_verdict(pack) == "its verdict is damaged"

    @pytest.mark.parametrize("name", ["name", "text", "version", "not_exact", "not_local"])
    def test_control_characters(self, pack: ModelPack, name: str) -> None:
        save_verdict(pack, msgspec.structs.replace(fitting(pack), **{name: "a\x1b]0;b\x07"}))
        assert load_verdict(pack) == "its verdict is damaged"

    def test_what_a_verdict_says(self) -> None:
        assert printable("a\x1b[31m\nb" + "c" * 400) == "a?[31m?b" + "c" * 292


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes there")
def test_a_pipe_is_no_verdict(pack: ModelPack) -> None:
    os.mkfifo(pack.verdict_file)
    assert load_verdict(pack) == "its verdict cannot be read: it is no file"


def test_where_no_verdict_can_be_kept(pack: ModelPack, tmp_path: Path) -> None:
    check_writable(pack)
    assert list(pack.path.iterdir()) == []
    with pytest.raises(ModelError, match=r"none: cannot be written \(No such file or directory\), and the verdict is"):
        check_writable(ModelPack(tmp_path / "none", pack.manifest, pack.source))


class TestFailuresStay:
    """What failed is undone by a gate that measured as much, and by nothing less."""

    def test_lesser_ones(self, pack: ModelPack) -> None:
        good = fitting(pack)
        bad = fitting(pack, bad={("f16", "f16"): {"kl": 0.5}})
        assert keep_verdict(pack, bad) == ""
        some = [site(one.layer) for one in pack.manifest.sites[:2]] + [unmeasured(2), unmeasured(3)]
        for lesser, why in (
            (verdict(*some, bound=bound_of(pack)), "layer 2 was not measured"),
            (msgspec.structs.replace(good, pairs=good.pairs[:1]), "fewer pairs of types were measured"),
            (msgspec.structs.replace(good, positions=2047), "only 2047 of 2048 positions were measured"),
            (
                msgspec.structs.replace(good, sites=tuple(alone(one) for one in good.sites)),
                "layer 0 was not compared with llama.cpp",
            ),
        ):
            assert keep_verdict(pack, lesser) == (
                f"not kept: KL 5.00e-01 > 1.00e-03, as was found before, and this time {why}"
            )
            assert load_verdict(pack) == bad
            with pytest.raises(GateFailed):
                gate_failure(pack, force=False)
        assert keep_verdict(pack, good) == ""
        assert gate_failure(pack, force=False) == ""

    def test_of_partial_sums(self, pack: ModelPack) -> None:
        good = fitting(pack)
        partial = msgspec.structs.replace(good.pairs[0], out="f32", back="f32", kl=1.0)
        bad = msgspec.structs.replace(good, partial=partial)
        assert keep_verdict(pack, bad) == ""
        assert keep_verdict(pack, good).endswith("partial sums were not measured as a whole")
        better = msgspec.structs.replace(good, partial=msgspec.structs.replace(partial, kl=0.0))
        assert keep_verdict(pack, better) == ""

    def test_other_bits_are_news_even_then(self, pack: ModelPack) -> None:
        bad = fitting(pack, bad={("f16", "f16"): {"kl": 0.5}})
        assert keep_verdict(pack, bad) == ""
        wrong = msgspec.structs.replace(site(pack.manifest.sites[0].layer), local=LocalFigures(128, 128, 0.1))
        rest = [unmeasured(one.layer) for one in pack.manifest.sites[1:]]
        worse = verdict(wrong, *rest, bound=bound_of(pack))
        assert keep_verdict(pack, worse) == ""
        assert load_verdict(pack) == worse

    def test_nobody_knows_is_no_news(self, pack: ModelPack) -> None:
        good = fitting(pack)
        assert keep_verdict(pack, good) == ""
        sites = tuple(alone(one) for one in good.sites)
        unknown = msgspec.structs.replace(good, sites=sites, local_differ=None, not_local="no memory")
        assert keep_verdict(pack, unknown) == (
            "not kept: not compared with llama.cpp: no memory, and earlier the model passed"
        )
        assert load_verdict(pack) == good


def alone(of: SiteFigures) -> SiteFigures:
    """Never held against llama.cpp."""
    return msgspec.structs.replace(of, local=LocalFigures())


class TestBesideLlama:
    def test_other_rows(self) -> None:
        wrong = msgspec.structs.replace(site(5), local=LocalFigures(128, 3, 1e-7))
        found = verdict(site(), wrong)
        assert found.identical is False
        assert found.failure == "the experts of layer 5 do not give llama.cpp's own rows: 3 of 128 differ, by 1e-05 %"
        near = msgspec.structs.replace(found, exact_positions=0, local_differ=None, not_exact="on a GPU")
        assert (near.identical, near.failure, near.unverified) == (None, "", "")
        far = msgspec.structs.replace(site(5), local=LocalFigures(128, 3, 0.064))
        far_off = msgspec.structs.replace(near, sites=(site(), far))
        assert far_off.identical is False
        assert "by 6.4 %" in far_off.failure

    def test_without_any(self) -> None:
        found = verdict(site(), alone(site(1)))
        assert (found.failure, found.identical, found.unverified) == ("", None, "not compared with llama.cpp")
        assert found.site_wires("int8", "fp8") == {0: ("f16", "f16"), 1: ("f16", "f16")}
        assert found.best() == {0: ("f16", "f16"), 1: ("f16", "f16")}
        assert verdict(site(), unmeasured(1)).unverified == ""


def test_partial_sums_are_judged_as_a_whole() -> None:
    good = verdict(site())
    partial = msgspec.structs.replace(good.pairs[0], out="f32", back="f32", kl=0.0)
    replace = msgspec.structs.replace
    assert replace(good, partial=partial).failure == ""
    assert replace(good, partial=replace(partial, kl=1e6)).failure == "partial sums in F32: KL 1.00e+06 > 1.00e-03"
    assert "NaN or infinity in 1024" in replace(good, partial=replace(partial, broken=1024)).failure
    for broken in (replace(partial, argmax_confident=0.0, kl=1e6, broken=1024), partial, None):
        without = replace(good, pairs=(), partial=broken)
        assert without.failure
        assert set(without.site_wires("int8", "int8").values()) == {("f16", "f16")}
