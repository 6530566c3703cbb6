"""What members show each other of their nodes: asks and answers over the members' links. A shell.

    answering   StatusWanted from a member → StatusTold or StatusRefused, by view_rules.py
    asking      `status_of`, for `status --peer` and `dashboard --peer`: this machine's node asks the member

Loop thread only. Made by `swarm_part.py`, which hands it the messages and tells it of links.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence

import msgspec

from swarmnode.coordination.member_status import for_members, pack_status, unpack_status
from swarmnode.coordination.messages import StatusRefused, StatusTold, StatusWanted
from swarmnode.coordination.view_rules import (
    ANSWER_S,
    LINK_S,
    MAX_PAUSE_S,
    TRIES,
    AllowView,
    Pace,
    chosen_member,
    why_not_shown,
)
from swarmnode.discovery.record import shown_name
from swarmnode.errors import BadMessage, ControlError
from swarmnode.member import Member
from swarmnode.status import NodeStatus
from transport.identity import PeerId


class MemberView:
    """See the module. `status` makes a snapshot; `private` are paths of this machine that nobody is told."""

    def __init__(
        self,
        member: Member,
        own_name: str,
        allow: AllowView,
        is_founder: Callable[[PeerId], bool],
        status: Callable[[], NodeStatus],
        private: Sequence[str],
    ) -> None:
        self._member, self._own_name = member, own_name
        self._allow, self._is_founder, self._status, self._private = allow, is_founder, status, tuple(private)
        self._tasks: set[asyncio.Task[None]] = set()
        # answering
        self._pace = Pace()
        self._answering: set[PeerId] = set()
        self._packed: asyncio.Task[bytes] | None = None  # the last snapshot, for all who ask within a second
        self._packed_at = 0.0
        # asking
        self._numbers = itertools.count(1)
        self._asked: dict[PeerId, tuple[int, asyncio.Future[StatusTold | StatusRefused]]] = {}
        self._under_way: dict[PeerId, asyncio.Task[NodeStatus]] = {}  # whoever asks meanwhile gets the same answer
        self._again_at: dict[PeerId, float] = {}
        self._links_changed = asyncio.Event()

    async def status_of(self, wanted: str) -> NodeStatus:
        """The status of the member that a user names. Raises UsageError, ControlError."""
        members = [(record.peer, shown_name(record.name)) for record in self._member.records()]
        peer = chosen_member(wanted, members, self._member.membership.own, self._own_name)
        name = next((f"{name} ({peer.short})" for known, name in members if known == peer and name), peer.short)
        asking = self._under_way.get(peer)
        if asking is None:
            asking = asyncio.create_task(self._ask(peer, name), name=f"status of {peer.short}")
            self._under_way[peer] = asking
            asking.add_done_callback(lambda task: self._asking_done(peer, task))
        return await asyncio.shield(asking)

    def message(self, peer: PeerId, message: StatusWanted | StatusTold | StatusRefused) -> None:
        """A message of a member. Raises BadMessage."""
        if isinstance(message, StatusWanted):
            self._wanted(peer, message.number)
            return
        number, answer = self._asked.get(peer, (0, None))
        if answer is not None and message.number == number and not answer.done():
            answer.set_result(message)

    def link(self, peer: PeerId, up: bool) -> None:
        """A link has come or gone."""
        self._links_changed.set()
        _, answer = self._asked.get(peer, (0, None))
        if not up and answer is not None and not answer.done():
            answer.set_exception(ControlError("its connection ended before it had answered"))

    async def close(self) -> None:
        """Ask and answer no more."""
        tasks = [*self._tasks, *self._under_way.values(), *([self._packed] if self._packed is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- answering

    def _wanted(self, peer: PeerId, number: int) -> None:
        now = asyncio.get_running_loop().time()
        wait_s = self._pace.wait_s(peer, now)
        if peer in self._answering or wait_s > 0:
            if self._pace.warns(peer):
                self._refuse(peer, number, "asked too often", max(wait_s, 0.1))
            return
        why = why_not_shown(self._allow, self._is_founder(peer))
        if why is not None:
            self._pace.answered(peer, 0, now)
            self._refuse(peer, number, why)
            return
        self._answering.add(peer)
        task = asyncio.create_task(self._answer(peer, number), name=f"status for {peer.short}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, peer: PeerId, number: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._packed is None or loop.time() - self._packed_at >= 1.0:
                self._packed_at = loop.time()
                self._packed = asyncio.create_task(self._pack(), name="status for members")
            packed = await asyncio.shield(self._packed)
        except Exception as error:  # the member hears of it, and the node lives on
            self._pace.answered(peer, 0, loop.time())
            self._refuse(peer, number, f"its status could not be made: {type(error).__name__}")
            return
        finally:
            self._answering.discard(peer)
        again_s = self._pace.answered(peer, len(packed), loop.time())
        self._member.mesh.send(peer, StatusTold(number, packed, again_s))

    async def _pack(self) -> bytes:
        status = self._status()
        return await asyncio.to_thread(lambda: pack_status(for_members(status, self._private)))

    def _refuse(self, peer: PeerId, number: int, why: str, again_s: float = 0.0) -> None:
        self._member.mesh.send(peer, StatusRefused(number, why, again_s))

    # ---- asking

    async def _ask(self, peer: PeerId, name: str) -> NodeStatus:
        loop = asyncio.get_running_loop()
        for tries_left in reversed(range(TRIES)):
            await asyncio.sleep(min(MAX_PAUSE_S, self._again_at.get(peer, 0.0) - loop.time()))
            await self._reach(peer, name)
            told = await self._exchange(peer, name)
            self._again_at[peer] = loop.time() + told.again_s
            if isinstance(told, StatusTold):
                try:
                    status = await asyncio.to_thread(unpack_status, told.status)
                except BadMessage as error:
                    raise ControlError(f"{name} answered what is not understood: {error}") from None
                return msgspec.structs.replace(status, peer=str(peer))  # who it is, it does not decide
            if not told.again_s or not tries_left:
                raise ControlError(f"{name} does not show its status to this node: {told.why}")
        raise AssertionError("unreachable")

    async def _exchange(self, peer: PeerId, name: str) -> StatusTold | StatusRefused:
        number = next(self._numbers)
        answer: asyncio.Future[StatusTold | StatusRefused] = asyncio.get_running_loop().create_future()
        self._asked[peer] = number, answer
        try:
            if not self._member.mesh.send(peer, StatusWanted(number)):
                raise ControlError("its connection has ended")
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise ControlError(
                f"{name} has not answered for {ANSWER_S:.0f} s: is it suspended, gone, or too old to know the question?"
            ) from None
        except ControlError as error:
            raise ControlError(f"{name} is gone: {error}") from None
        finally:
            del self._asked[peer]

    async def _reach(self, peer: PeerId, name: str) -> None:
        """A link to the member: in a large swarm not everybody has one to everybody."""
        mesh = self._member.mesh
        if peer in mesh.up():
            return
        mesh.visit(peer)
        try:
            async with asyncio.timeout(LINK_S):
                while peer not in mesh.up():
                    self._links_changed.clear()
                    await self._links_changed.wait()
        except TimeoutError:
            why = mesh.problem(peer)
            raise ControlError(f"{name} cannot be reached{f': {why}' if why else f' within {LINK_S:.0f} s'}") from None
        finally:
            mesh.leave(peer)

    def _asking_done(self, peer: PeerId, task: asyncio.Task[NodeStatus]) -> None:
        self._under_way.pop(peer, None)
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # whoever asked may have gone meanwhile
        now = asyncio.get_running_loop().time()
        self._again_at = {one: at for one, at in self._again_at.items() if at > now}
