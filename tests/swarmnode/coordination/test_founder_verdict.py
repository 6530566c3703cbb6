"""The founder's verdict on its way: told by one side, kept by the other, with one line where something is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmnode.coordination.founder_verdict import FounderVerdict
from swarmnode.coordination.messages import MAX_VERDICT, Gated
from swarmnode.errors import BadMessage
from swarmnode.gate import save_verdict, whose_verdict
from swarmnode.gate.told_verdict import told_file, told_verdict
from swarmnode.gate.verdict import Verdict
from swarmnode.gate.verdict_bytes import pack_verdict
from swarmnode.gate.verdict_file import bound_of
from swarmnode.onboard import ModelPack
from tests.swarmnode.gate.samples import site, verdict


class Side:
    """One side, with the lines it has said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.news = FounderVerdict(self.said.append, self._spawn)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    async def done(self) -> None:
        await asyncio.gather(*self.tasks)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.coordination.founder_verdict.PAUSE_S", 0.0)


@pytest.fixture
def own(demo_pack: ModelPack, tmp_path: Path) -> ModelPack:
    """The founder's pack."""
    return ModelPack(tmp_path / "founder", demo_pack.manifest, demo_pack.source)


@pytest.fixture
def theirs(demo_pack: ModelPack, tmp_path: Path) -> ModelPack:
    """The member's."""
    return ModelPack(tmp_path, demo_pack.manifest, None, told_verdict=told_file(tmp_path, "k" * 52))


def fitting(pack: ModelPack, **changed: Any) -> Verdict:
    sites = [site(one.layer, one.d_in, one.d_out) for one in pack.manifest.sites]
    return msgspec.structs.replace(verdict(*sites, bound=bound_of(pack)), **changed)


async def test_what_the_founder_knows_is_what_the_member_goes_by(own: ModelPack, theirs: ModelPack) -> None:
    founder, member = Side(), Side()
    assert await founder.news.message(own) == Gated(bytes.fromhex(own.manifest.model_hash))
    save_verdict(own, fitting(own))
    message = await founder.news.message(own)
    member.news.heard(message)  # before the model has come
    await member.news.settle(theirs)
    assert told_verdict(theirs) == fitting(own, text="")
    member.news.heard(msgspec.structs.replace(message))  # its link came again
    assert not member.tasks
    assert not member.said
    assert not founder.said


async def test_news_while_it_runs_is_kept_and_said_once(theirs: ModelPack) -> None:
    side, model = Side(), bytes.fromhex(theirs.manifest.model_hash)
    await side.news.settle(theirs)
    for packed, said in (
        (pack_verdict(fitting(theirs)), "the founder's gate has a new verdict on this model: start this node again"),
        (b"", "the founder has no verdict on this model any more: start this node again"),
        (pack_verdict(fitting(theirs, local_differ=3)), "the founder's gate says now that the model fails (exact mode"),
        (b"garbage", "the founder's verdict is left out: it is damaged"),
    ):
        side.said.clear()
        side.news.heard(Gated(model, packed))
        await side.done()
        assert len(side.said) == 1
        assert side.said[0].startswith(said)
    assert whose_verdict(theirs).startswith("founder: exact mode")  # a failure stays


async def test_of_many_at_once_the_last_counts(theirs: ModelPack) -> None:
    side, model = Side(), bytes.fromhex(theirs.manifest.model_hash)
    await side.news.settle(theirs)
    for count in range(500):
        side.news.heard(Gated(model, b"x" * count))
    side.news.heard(Gated(model, pack_verdict(fitting(theirs))))
    await side.done()
    assert len(side.tasks) == 1
    assert len(side.said) == 1
    assert whose_verdict(theirs) == "founder"


async def test_on_another_model_it_says_nothing_of_this_one(theirs: ModelPack) -> None:
    side, model = Side(), bytes.fromhex(theirs.manifest.model_hash)
    side.news.heard(Gated(model, pack_verdict(fitting(theirs))))
    await side.news.settle(theirs)
    side.news.heard(Gated(bytes(32)))
    await side.done()
    assert side.said == ["the founder's verdict is left out: it is on another model than this node has"]
    assert whose_verdict(theirs) == "founder"


async def test_what_was_of_another_model_counts_once_that_is_the_model(theirs: ModelPack) -> None:
    """A member is told of one model, cannot have it, and is then told of another."""
    side = Side()
    side.news.heard(Gated(bytes.fromhex(theirs.manifest.model_hash), pack_verdict(fitting(theirs))))
    other = replace(theirs, manifest=msgspec.structs.replace(theirs.manifest, model_hash="ab" * 32))
    await side.news.settle(other)
    assert whose_verdict(theirs) == ""
    await side.news.settle(theirs)
    assert whose_verdict(theirs) == "founder"


async def test_a_disk_that_cannot_be_written_ends_nothing(theirs: ModelPack) -> None:
    side = Side()
    await side.news.settle(theirs)
    assert theirs.told_verdict is not None
    theirs.told_verdict.mkdir()
    side.news.heard(Gated(bytes.fromhex(theirs.manifest.model_hash), pack_verdict(fitting(theirs))))
    await side.done()
    assert [line.partition(":")[0] for line in side.said] == ["the founder's verdict is not kept"]


async def test_whoever_else_tells_one_is_named_once() -> None:
    side = Side()
    for _ in range(3):
        side.news.from_another("abcd1234")
    assert side.said == ["abcd1234 told a verdict on a model, which is left out: only the founder's counts"]


async def test_one_that_is_too_large_is_not_told(own: ModelPack, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(_verdict: Verdict) -> bytes:
        raise BadMessage(f"at most {MAX_VERDICT}")

    monkeypatch.setattr("swarmnode.coordination.founder_verdict.pack_verdict", too_large)
    save_verdict(own, fitting(own))
    side = Side()
    assert (await side.news.message(own)).verdict == b""
    assert side.said == [f"members that generate are not told of this model's gate: at most {MAX_VERDICT}"]
