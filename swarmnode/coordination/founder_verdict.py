"""The gate's verdict on the swarm's model, from the founder, who has it, to members that generate. A shell.

    telling   the founder reads what it knows when it begins to generate; `Gated` goes before `Serves` on each link, so
              whoever has been told of the model has been told of its verdict
    hearing   a member that generates keeps the founder's last word beside the model, and goes by it when it starts

That the founder says it is for `swarm_part.py` to know, which makes this and hands it the messages. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swarmnode.coordination.messages import Gated
from swarmnode.errors import BadMessage, ModelError
from swarmnode.gate.known_verdicts import known_verdict
from swarmnode.gate.told_verdict import keep_told, told_verdict
from swarmnode.gate.verdict import Verdict
from swarmnode.gate.verdict_bytes import pack_verdict
from swarmnode.onboard import ModelPack

PAUSE_S = 1.0  # between two that are looked at while the node runs


class FounderVerdict:
    """See the module. `say` takes a line for the person at this node; `spawn` owns a task."""

    def __init__(
        self, say: Callable[[str], None], spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    ) -> None:
        self._say, self._spawn = say, spawn
        self._latest: Gated | None = None
        self._seen: Gated | None = None  # the last one that was kept or left out
        self._pack: ModelPack | None = None
        self._keeping = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._told_off: set[str] = set()

    # ---- telling

    async def message(self, pack: ModelPack) -> Gated:
        """What the founder tells of its model."""
        verdict = await asyncio.to_thread(known_verdict, pack)
        model = bytes.fromhex(pack.manifest.model_hash)
        if isinstance(verdict, str):
            return Gated(model)
        try:
            return Gated(model, await asyncio.to_thread(pack_verdict, verdict))
        except BadMessage as error:
            self._say(f"members that generate are not told of this model's gate: {error}")
            return Gated(model)

    # ---- hearing

    def heard(self, message: Gated) -> None:
        """A message of the founder."""
        if message == self._latest:
            return  # a link came again
        self._latest = message
        if self._pack is not None and (self._following is None or self._following.done()):
            self._following = self._spawn(self._follow(), "the founder's verdict")

    def from_another(self, who: str) -> None:
        """Somebody else sent one: say so once."""
        if who not in self._told_off:
            self._told_off.add(who)
            self._say(f"{who} told a verdict on a model, which is left out: only the founder's counts")

    async def settle(self, pack: ModelPack) -> None:
        """Keep what has been heard about the model of this pack, before it is used. Raises ModelError."""
        if self._pack is not None and self._pack.manifest.model_hash != pack.manifest.model_hash:
            self._seen = None  # what was of another model than that one may be of this one
        self._pack = pack
        await self._keep()

    async def _follow(self) -> None:
        while self._latest is not self._seen:
            try:
                if news := await self._keep():
                    self._say(f"{news}: start this node again to go by it")
            except ModelError as error:  # a disk that is full must not end the node
                self._say(f"the founder's verdict is not kept: {error}")
            await asyncio.sleep(PAUSE_S)

    async def _keep(self) -> str:
        """What the founder's last word changes, "" for nothing."""
        async with self._keeping:
            message, pack = self._latest, self._pack
            if message is None or pack is None or message is self._seen:
                return ""
            self._seen = message
            if message.model != bytes.fromhex(pack.manifest.model_hash):
                self._say("the founder's verdict is left out: it is on another model than this node has")
                return ""
            is_new, why = await asyncio.to_thread(keep_told, pack, message.verdict)
            if why:
                self._say(f"the founder's verdict is left out: {why}")
            return _news(await asyncio.to_thread(told_verdict, pack)) if is_new else ""


def _news(verdict: Verdict | None) -> str:
    if verdict is None:
        return "the founder has no verdict on this model any more"
    if verdict.failure:
        return f"the founder's gate says now that the model fails ({verdict.failure})"
    return "the founder's gate has a new verdict on this model"
