"""What the founder says of the model: its bytes, who goes before whom, and that nothing hostile widens a wire."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.coordination.messages import MAX_VERDICT
from swarmnode.errors import BadMessage, GateFailed, ModelError, UsageError
from swarmnode.gate import best_wires, gate_failure, load_verdict, save_verdict, whose_verdict, wires_allowed
from swarmnode.gate.known_verdicts import keep_verdict, known_verdict
from swarmnode.gate.told_verdict import keep_told, told_file, told_verdict
from swarmnode.gate.verdict import FORMAT, SAFE, Verdict
from swarmnode.gate.verdict_bytes import MAX_PLAIN, check_verdict, pack_verdict, unpack_verdict
from swarmnode.gate.verdict_file import bound_of
from swarmnode.onboard import ModelPack
from tests.swarmnode.gate.samples import site, verdict

SWARM = "k" * 52


@pytest.fixture
def pack(demo_pack: ModelPack, tmp_path: Path) -> ModelPack:
    """The shipped model as a member has it from its swarm."""
    return ModelPack(tmp_path, demo_pack.manifest, None, told_verdict=told_file(tmp_path, SWARM))


def fitting(pack: ModelPack, *, int8: float = 0.9999, **changed: Any) -> Verdict:
    sites = [site(one.layer, one.d_in, one.d_out, int8=int8, fp8=int8) for one in pack.manifest.sites]
    return msgspec.structs.replace(verdict(*sites, bound=bound_of(pack)), **changed)


class TestBytes:
    def test_there_and_back(self, pack: ModelPack) -> None:
        """All that decides; what the founder's files are called and what it could not read stays there."""
        found = fitting(pack, text="diary.txt", not_exact="", not_local="/home/anna/m.gguf: no llama.cpp")
        data = unpack_verdict(pack_verdict(found))
        assert b"diary" not in data
        assert b"anna" not in data
        told = check_verdict(data, bound_of(pack), pack.manifest.sites)
        assert told == msgspec.structs.replace(found, text="", not_local="")

    def test_a_hundred_layers_are_told_and_four_thousand_are_not(self) -> None:
        assert len(pack_verdict(verdict(*(site(layer) for layer in range(100))))) < MAX_VERDICT / 4
        with pytest.raises(BadMessage, match="at most 262144 are told"):
            pack_verdict(verdict(*(site(layer) for layer in range(4096))))

    @pytest.mark.parametrize(
        ("packed", "why"),
        [
            (b"garbage", "damaged"),
            (zlib.compress(b"{}")[:-1], "cut short"),
            (zlib.compress(b"{}") + b"more", "cut short"),
            (zlib.compress(bytes(MAX_PLAIN + 1)), f"more than {MAX_PLAIN} bytes"),
            (bytes(MAX_VERDICT + 1), f"at most {MAX_VERDICT}"),
        ],
    )
    def test_what_is_not_packed_is_one_line(self, packed: bytes, why: str) -> None:
        with pytest.raises(BadMessage, match=why) as caught:
            unpack_verdict(packed)
        assert "\n" not in str(caught.value)

    @given(st.binary(max_size=300))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_garbage_allows_nothing_and_is_one_line(self, pack: ModelPack, data: bytes) -> None:
        for packed in (data or b"x", zlib.compress(data)):
            is_new, why = keep_told(pack, packed)
            assert (is_new, told_verdict(pack)) == (False, None)
            assert why
            assert "\n" not in why


class TestWhatComes:
    def test_it_counts_as_a_verdict_of_one_s_own(self, pack: ModelPack) -> None:
        with pytest.raises(UsageError, match="on the founder's machine, then start the founder again"):
            wires_allowed(pack, "int8", "int8")
        assert keep_told(pack, pack_verdict(fitting(pack))) == (True, "")
        assert wires_allowed(pack, "int8", "int8") == ({}, [])
        wires, notes = best_wires(pack)
        assert set(wires.values()) == {("int8", "int8")}
        assert notes == ["INT8/INT8 on the wire, as the founder's gate allows"]
        assert whose_verdict(pack) == "founder"
        assert gate_failure(pack, force=False) == ""

    def test_the_same_again_is_no_news(self, pack: ModelPack) -> None:
        packed = pack_verdict(fitting(pack))
        assert [keep_told(pack, packed) for _ in range(2)] == [(True, ""), (False, "")]
        assert keep_told(pack, b"") == (True, "")
        assert keep_told(pack, b"") == (False, "")
        assert whose_verdict(pack) == ""

    def test_it_stays_this_swarm_s(self, pack: ModelPack, demo_pack: ModelPack) -> None:
        """Neither the folder's own verdict, nor another swarm's, nor what this machine knows of the model."""
        keep_told(pack, pack_verdict(fitting(pack)))
        assert load_verdict(pack) == known_verdict(pack) == "not gated yet"
        plain = ModelPack(pack.path, demo_pack.manifest, None)
        other = ModelPack(pack.path, demo_pack.manifest, None, told_verdict=told_file(pack.path, "z" * 52))
        for one in (plain, other):
            assert whose_verdict(one) == ""

    def test_own_figures_go_before(self, pack: ModelPack) -> None:
        save_verdict(pack, fitting(pack, int8=0.9))
        keep_told(pack, pack_verdict(fitting(pack)))
        assert set(best_wires(pack)[0].values()) == {("f16", "f16")}
        assert whose_verdict(pack) == "own"

    def test_a_failure_of_either_refuses(self, pack: ModelPack) -> None:
        save_verdict(pack, fitting(pack))
        keep_told(pack, pack_verdict(fitting(pack, local_differ=3)))
        with pytest.raises(GateFailed, match=r"^model failed the founder's gate: .*, or give --force") as caught:
            gate_failure(pack, force=False)
        assert "\n" not in str(caught.value)
        assert "failed the founder's gate" in gate_failure(pack, force=True)
        assert whose_verdict(pack).startswith("founder: exact mode does not give")
        keep_told(pack, pack_verdict(fitting(pack)))
        keep_verdict(pack, fitting(pack, local_differ=3))
        with pytest.raises(GateFailed, match=r"^model failed its gate: "):
            gate_failure(pack, force=False)

    def test_a_failure_stays_until_a_verdict_counts(self, pack: ModelPack) -> None:
        keep_told(pack, pack_verdict(fitting(pack, local_differ=3)))
        for packed in (b"", b"garbage"):
            assert keep_told(pack, packed)[0] is False
            with pytest.raises(GateFailed):
                gate_failure(pack, force=False)
        assert keep_told(pack, pack_verdict(fitting(pack))) == (True, "")
        assert gate_failure(pack, force=False) == ""

    @pytest.mark.parametrize("what", ["model", "backbone", "recipes", "engine", "codec"])
    def test_on_something_else(self, pack: ModelPack, what: str) -> None:
        keep_told(pack, pack_verdict(fitting(pack)))
        bound = msgspec.structs.replace(bound_of(pack), **{what: "d" * 64})
        is_new, why = keep_told(pack, pack_verdict(fitting(pack, bound=bound)))
        assert is_new
        assert why.startswith("it is of another ")
        assert told_verdict(pack) is None

    @pytest.mark.parametrize(
        ("old", "new", "why"),
        [
            (b'"format":3', b'"format":4', f"it is of another version (format 4, not {FORMAT})"),
            (b'"int8"', b'"int4"', "it is damaged"),
            (b'"kl":', b'"allows":"int2","kl":', "it is damaged"),
            (b'"f32/f32"', b'"f32/f23"', "it is incomplete"),
            (b'"name":"model"', b'"name":"\\u001b[2J"', "it is damaged"),
            (b'"layer":0', b'"layer":9', "it is of other layers"),
        ],
    )
    def test_of_a_later_version_or_damaged(self, pack: ModelPack, old: bytes, new: bytes, why: str) -> None:
        data = msgspec.json.encode(fitting(pack))
        assert old in data
        assert keep_told(pack, zlib.compress(data.replace(old, new, 1))) == (False, why)
        assert set(best_wires(pack)[0].values()) == {("f16", "f16")}
        with pytest.raises(UsageError):
            wires_allowed(pack, "int8", "int8")

    @given(st.data())
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_no_bytes_allow_int8_with_a_bad_cosine(self, pack: ModelPack, data: st.DataObject) -> None:
        whole = bytearray(msgspec.json.encode(fitting(pack, int8=0.9)))
        for _ in range(data.draw(st.integers(1, 6))):
            at = data.draw(st.integers(0, len(whole) - 1))
            whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        _, why = keep_told(pack, zlib.compress(bytes(whole)))
        assert "\n" not in why
        found = told_verdict(pack)
        assert (found is None) == bool(why) or (found is not None and found.failure)
        for index, pair in best_wires(pack)[0].items():
            assert pair in (SAFE, ("f16", "f16")) or (
                found is not None and found.sites[index].lowest_of(pair) >= 0.9985
            )
        assert "\n" not in gate_failure(pack, force=True)

    def test_a_file_that_was_spoilt_counts_for_nothing(self, pack: ModelPack) -> None:
        assert pack.told_verdict is not None
        keep_told(pack, pack_verdict(fitting(pack)))
        pack.told_verdict.write_bytes(pack.told_verdict.read_bytes()[:-1])
        assert whose_verdict(pack) == ""
        pack.told_verdict.unlink()
        pack.told_verdict.mkdir()
        assert whose_verdict(pack) == ""
        with pytest.raises(ModelError):
            keep_told(pack, pack_verdict(fitting(pack)))
