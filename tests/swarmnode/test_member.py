"""A founder's view of its swarm, with what a hostile or unlucky neighbour may do to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from swarmnode.authority import FILE_NAME, SwarmAuthority
from swarmnode.bulk.source import PeerSource
from swarmnode.config import build_config
from swarmnode.discovery.record import PeerRecord
from swarmnode.errors import JoinRefused
from swarmnode.membership.documents import Certificate
from swarmnode.node import Node
from swarmnode.onboard import ModelPack
from swarmnode.swarm_part import SwarmPart
from transport.identity import Identity

from .helpers import Events, poll


@contextlib.asynccontextmanager
async def founder(folder: Path, pack: ModelPack) -> AsyncIterator[tuple[SwarmPart, Events]]:
    settings = {"listen": "127.0.0.1:0", "lan": False, "threads": 1, "context": 256, "batch": 128, "memory": "1K"}
    events = Events()
    node = Node(build_config({"model": pack.path, **settings}, None, state_dir=folder), events)
    try:
        await node.start()
        await events.wait("ticket")
        assert node.swarm is not None
        yield node.swarm, events
    finally:
        await node.close()


class LeavingSource:
    """A source whose member goes while this node ends."""

    received_bytes = 0

    def __init__(self, part: SwarmPart) -> None:
        self.part, self.closed = part, False

    async def close(self) -> None:
        self.closed = True
        self.part.member._sources.popitem()


async def test_damaged_books_are_told_once_and_what_is_mended_counts(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with founder(tmp_path, demo_pack) as (part, events):
        path = tmp_path / "swarm" / FILE_NAME
        good = path.read_bytes()
        path.write_bytes(b"{")
        await events.wait("discovery-problem")
        for damage in (b"{ ", b"{  "):  # other files, the same damage
            path.write_bytes(damage)
            assert part.judge(Identity.generate().peer_id, "join", b"") is not None
        path.write_bytes(good)
        command = SwarmAuthority(tmp_path / "swarm")
        revoked = command.revoke(command.invite()[0].id, expel=True)

        async def known() -> bool:
            return part.entry.membership.revocations == revoked

        await poll(known)  # nothing has ended that looks
        told = [event["error"] for event in events.seen if event["event"] == "discovery-problem"]
        assert len(told) == len(set(told))
        assert "damaged" in told[0]


async def test_a_worker_that_calls_itself_a_backbone_is_none(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with founder(tmp_path, demo_pack) as (part, _):
        authority, membership, member = part.entry.authority, part.entry.membership, part.member
        assert authority is not None
        for certified, says, generates in (
            ("worker", "both", False),
            ("worker", "backbone", False),
            ("any", "worker", False),
            ("any", "backbone", True),
            ("backbone", "both", True),
        ):
            peer = Identity.generate().peer_id
            record = PeerRecord(membership.swarm, peer, seq=1, role=says)
            assert not member.generates(record)  # nobody has seen a certificate
            certificate = authority.certify(peer, certified)  # type: ignore[arg-type]  # a role
            assert membership.judge_certificate(peer, certificate.encode(), certificate.issued) is None
            assert member.generates(record) == generates


async def test_sources_may_go_while_a_member_says_goodbye(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with founder(tmp_path, demo_pack) as (part, _):
        sources = [LeavingSource(part) for _ in range(3)]
        for source in sources:
            part.member._sources[Identity.generate().peer_id] = cast("PeerSource", source)
    assert all(source.closed for source in sources)


async def test_who_is_refused_after_the_gate_hears_why_at_once(
    tmp_path: Path, demo_pack: ModelPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with founder(tmp_path / "founder", demo_pack) as (part, _):
        authority = part.entry.authority
        assert authority is not None
        ticket = await part.standing_ticket()

        def taken(*_: object) -> Certificate:
            raise JoinRefused("somebody else was quicker: this ticket is used up")

        monkeypatch.setattr(authority, "redeem", taken)
        settings = {"ticket": str(ticket), "listen": "127.0.0.1:0", "lan": False, "threads": 1, "memory": "2M"}
        newcomer = Node(build_config(settings, None, state_dir=tmp_path / "newcomer"), Events())
        try:
            async with asyncio.timeout(8):  # the founder's patience is 15 s
                with pytest.raises(JoinRefused, match="somebody else was quicker"):
                    await newcomer.start()
        finally:
            await newcomer.close()
