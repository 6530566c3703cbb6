"""Members that ask each other for their status: who is answered, and what an unlucky or dishonest one may do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from swarmnode.config import build_config
from swarmnode.coordination.messages import (
    HEADER_BYTES,
    Message,
    StatusRefused,
    StatusTold,
    StatusWanted,
    decode,
    encode,
)
from swarmnode.coordination.view_rules import ALLOW_VIEW, AllowView
from swarmnode.dashboard.fake import fake_status
from swarmnode.errors import ControlError, UsageError
from swarmnode.local_swarm import FoundedSwarm, NodeProcess
from swarmnode.member import Member
from swarmnode.member_view import MemberView
from swarmnode.onboard import ModelPack
from transport.identity import Identity, PeerId

from .coordination.test_view_rules import MATRIX
from .helpers import poll

View = StatusWanted | StatusTold | StatusRefused
OWN, OTHER = (Identity.generate(bytes([i + 40]) * 32).peer_id for i in range(2))


class Wire:
    """Two members and the link between them, every message as bytes. `answer` replaces the second one."""

    def __init__(
        self, allow: AllowView = "members", *, founder: PeerId | None = None, n_peers: int = 3, linked: bool = True
    ) -> None:
        self.sent: list[View] = []  # to OWN
        self.answer: Callable[[View], None] | None = None
        self.linked = linked
        self.visited: list[PeerId] = []
        self.views = {
            peer: MemberView(
                cast("Member", self._member(peer, other)),
                name,
                allow,
                lambda one: one == founder,
                lambda: fake_status(5, n_peers),
                [],
            )
            for peer, other, name in ((OWN, OTHER, "desk"), (OTHER, OWN, "laptop"))
        }

    def _member(self, own: PeerId, other: PeerId) -> object:
        return SimpleNamespace(
            records=lambda: [SimpleNamespace(peer=other, name="laptop" if own == OWN else "desk")],
            membership=SimpleNamespace(own=own),
            mesh=SimpleNamespace(
                up=lambda: [other] if self.linked else [],
                send=lambda peer, message: self._send(own, peer, message),
                visit=self._visit,
                leave=self.visited.remove,
                problem=lambda _peer: "no route to it",
            ),
        )

    def _visit(self, peer: PeerId) -> None:
        self.visited.append(peer)

    def _send(self, sender: PeerId, to: PeerId, message: Message) -> bool:
        again = decode(encode(message)[HEADER_BYTES:])
        assert isinstance(again, StatusWanted | StatusTold | StatusRefused)
        if to == OWN:
            self.sent.append(again)
        if to == OTHER and self.answer is not None:
            self.answer(again)
        elif self.linked:
            asyncio.get_running_loop().call_soon(self.views[to].message, sender, again)
        return self.linked

    def has_sent(self, count: int) -> Callable[[], Awaitable[bool]]:
        async def check() -> bool:
            return len(self.sent) >= count

        return check

    async def is_dialling(self) -> bool:
        return bool(self.visited)

    def tell(self, message: View) -> None:
        """OTHER says this to OWN."""
        asyncio.get_running_loop().call_soon(self.views[OWN].message, OTHER, message)


@pytest.mark.parametrize("allow", ALLOW_VIEW)
@pytest.mark.parametrize("is_founder", [True, False])
async def test_the_matrix_of_who_sees_whom(allow: AllowView, is_founder: bool) -> None:
    wire = Wire(allow, founder=OWN if is_founder else None)
    if MATRIX[allow, is_founder]:
        status = await wire.views[OWN].status_of("laptop")
        assert status.peer == str(OTHER)
        assert status.peers == fake_status(5, 3).peers
        return
    with pytest.raises(ControlError, match=rf"laptop \({OTHER.short}\) does not show .*--allow-view {allow}$"):
        await wire.views[OWN].status_of("laptop")
    assert all(isinstance(one, StatusRefused) for one in wire.sent)


async def test_all_that_ask_at_once_get_one_answer_and_soon_after_they_wait() -> None:
    wire = Wire()
    together = await asyncio.gather(*(wire.views[OWN].status_of("laptop") for _ in range(20)))
    assert len(wire.sent) == 1
    assert all(one is together[0] for one in together)
    began = asyncio.get_running_loop().time()
    await wire.views[OWN].status_of("laptop")
    assert asyncio.get_running_loop().time() - began > 0.5
    assert [type(one) for one in wire.sent] == [StatusTold, StatusTold]  # it was not asked too early


async def test_whoever_floods_with_questions_gets_one_answer_and_one_refusal() -> None:
    wire = Wire()
    for number in range(1, 1000):
        wire.views[OTHER].message(OWN, StatusWanted(number))
    await poll(wire.has_sent(2))
    await asyncio.sleep(0)
    kinds = {type(one): one for one in wire.sent}
    assert len(wire.sent) == 2
    refused = kinds[StatusRefused]
    assert isinstance(refused, StatusRefused)
    assert refused.again_s > 0


async def test_a_refusal_for_now_is_waited_for() -> None:
    wire = Wire()
    wire.views[OTHER]._pace.answered(OWN, 0, asyncio.get_running_loop().time() - 0.7)  # an asker that was killed
    assert (await wire.views[OWN].status_of("laptop")).peer == str(OTHER)
    assert [type(one) for one in wire.sent] == [StatusRefused, StatusTold]


async def test_a_member_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.member_view.ANSWER_S", 0.05)
    wire = Wire()
    wire.answer = lambda _question: None  # as an older version does: what it does not know it skips
    with pytest.raises(ControlError, match="has not answered for 0 s: is it suspended, gone, or too old"):
        await wire.views[OWN].status_of("laptop")
    assert not wire.views[OWN]._asked


async def test_only_the_answer_to_the_question_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.member_view.ANSWER_S", 0.05)
    wire = Wire()
    wire.answer = lambda question: wire.tell(StatusRefused(question.number + 1, "another one"))
    wire.views[OWN].message(OTHER, StatusTold(1, b"never asked for"))
    with pytest.raises(ControlError, match="has not answered"):
        await wire.views[OWN].status_of("laptop")


@pytest.mark.parametrize("data", [b"", b"garbage", zlib.compress(b"\x80")])
async def test_an_answer_that_is_none_is_one_line(data: bytes) -> None:
    wire = Wire()
    wire.answer = lambda question: wire.tell(StatusTold(question.number, data))
    with pytest.raises(ControlError, match=r"laptop \(.*\) answered what is not understood") as no:
        await wire.views[OWN].status_of("laptop")
    assert "\n" not in str(no.value)


async def test_a_member_that_goes_while_it_is_asked_is_said_to_be_gone() -> None:
    wire = Wire()

    def goes(_question: View) -> None:
        asyncio.get_running_loop().call_soon(wire.views[OWN].link, OTHER, False)

    wire.answer = goes
    async with asyncio.timeout(3):
        with pytest.raises(ControlError, match="is gone: its connection ended before it had answered"):
            await wire.views[OWN].status_of("laptop")


async def test_a_member_without_a_link_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(linked=False)
    asking = asyncio.create_task(wire.views[OWN].status_of("laptop"))
    await poll(wire.is_dialling)
    wire.linked = True
    wire.views[OWN].link(OTHER, True)
    assert (await asking).peer == str(OTHER)
    assert not wire.visited
    monkeypatch.setattr("swarmnode.member_view.LINK_S", 0.05)
    with pytest.raises(ControlError, match=r"laptop \(.*\) cannot be reached: no route to it"):
        await Wire(linked=False).views[OWN].status_of("laptop")


async def test_a_node_that_ends_asks_no_more() -> None:
    wire = Wire()
    wire.answer = lambda _question: None
    asking = asyncio.create_task(wire.views[OWN].status_of("laptop"))
    await asyncio.sleep(0)
    await wire.views[OWN].close()
    with pytest.raises(asyncio.CancelledError):
        await asking


def test_who_may_see_a_node_is_configured(tmp_path: Path) -> None:
    model, file = tmp_path / "m.gguf", tmp_path / "node.toml"
    file.write_text('allow_view = "members"\n')
    assert build_config({"model": model}, None, state_dir=tmp_path).allow_view == "founder"
    assert build_config({"model": model}, file, state_dir=tmp_path).allow_view == "members"
    assert build_config({"model": model, "allow_view": "nobody"}, file, state_dir=tmp_path).allow_view == "nobody"
    with pytest.raises(UsageError, match="--allow-view friends: say members, founder or nobody"):
        build_config({"model": model, "allow_view": "friends"}, None, state_dir=tmp_path)


# ---- real processes


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarmnode", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


async def asked(node: NodeProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run, *arguments, "--state", str(node.state))


@pytest.mark.slow
async def test_a_founder_sees_its_members_and_they_see_what_is_allowed(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with FoundedSwarm(tmp_path, demo_pack.path) as swarm:
        founder = await swarm.found("--context", "256", "--batch", "128", "--memory", "1K")
        laptop = await swarm.join("laptop", "--memory", "2M")
        await swarm.join("open", "--memory", "2M", "--allow-view", "members")

        async def complete() -> bool:
            here = (await founder.status())["swarm"]["members"], (await laptop.status())["swarm"]["members"]
            return [len(members) for members in here] == [2, 2]

        await poll(complete)
        seen = await asked(founder, "dashboard", "--peer", "laptop", "--once", "--size", "100x30")
        assert seen.returncode == 0, seen.stderr
        assert seen.stdout.splitlines()[0].startswith(" swarmnode laptop · worker of ")
        assert f"id {laptop.peer[:8]}" in seen.stdout
        told = await asked(founder, "status", "--peer", laptop.peer[:8], "--json")
        assert told.returncode == 0, told.stderr
        status = json.loads(told.stdout)
        assert (status["peer"], status["name"], status["left_out"]) == (laptop.peer, "laptop", "")
        assert str(tmp_path) not in told.stdout
        assert swarm.ticket not in told.stdout
        other = await asked(laptop, "status", "--peer", "OPEN")
        assert "open (worker)" in other.stdout, other.stderr

        picture = tmp_path / "still.svg"
        refused = await asked(laptop, "dashboard", "--peer", "founder", "--svg", str(picture))
        assert refused.returncode == 1
        assert not picture.exists()
        assert refused.stderr == (
            f"swarmnode: founder ({founder.peer[:8]}) does not show its status to this node: "
            "it runs with --allow-view founder\n"
        )
        missing = await asked(laptop, "status", "--peer", "attic")
        assert (missing.returncode, missing.stdout) == (1, "")
        assert missing.stderr.startswith("swarmnode: no member 'attic' is here: there are ")


@pytest.mark.slow
async def test_a_node_of_no_swarm_has_nobody_to_show(tmp_path: Path, demo_pack: ModelPack) -> None:
    arguments = ["--model", str(demo_pack.path), "--experts", "0-1", "--listen", "127.0.0.1:0", "--threads", "1"]
    node = await NodeProcess.start("alone", tmp_path, arguments)
    try:
        done = await asked(node, "status", "--peer", "laptop")
        assert done.returncode == 1
        assert done.stderr.startswith("swarmnode: this node is in no swarm, or is coming in")
    finally:
        await node.stop()
