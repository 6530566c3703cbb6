"""What commands may ask of the running node over its control channel (`control.py`). Called by `node.py`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from swarmnode.backbone.session import GenerateRequest, GenerateResult
from swarmnode.config import PeerAddress
from swarmnode.control import Json, Send
from swarmnode.errors import ControlError, UsageError
from swarmnode.node_status import node_sites, node_status
from swarmnode.pings import checked_numbers, chosen_peer, ping_peer
from swarmnode.status import NodeStatus
from swarmnode.tickets import TicketTerms

if TYPE_CHECKING:
    from swarmnode.node import Node


class Operations:
    """Answers one operation after the other, each with events to `send`; see control.ControlServer."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def answer(self, op: str, arguments: Json, send: Send) -> None:
        """Carry out an operation. Raises SwarmnodeError, which the client gets."""
        match op:
            case "status":
                await send({"event": "status", "status": msgspec.to_builtins(node_status(self._node))})
            case "member-status":
                status = await self._member_status(str(arguments.get("peer", "")))
                await send({"event": "status", "status": msgspec.to_builtins(status)})
            case "peers":
                await send({"event": "peers", "peers": msgspec.to_builtins(node_status(self._node).peers)})
            case "generate":
                await self._generate(arguments, send)
            case "ping":
                await self._ping(arguments, send)
            case "ticket":
                await send({"event": "ticket", **await self._ticket(arguments)})
            case _:
                raise ControlError(f"this node does not know the operation {op!r}; is the command another version?")

    async def _member_status(self, wanted: str) -> NodeStatus:
        swarm = self._node.swarm
        if swarm is None or not hasattr(swarm, "view"):
            raise ControlError("this node is in no swarm, or is coming in: --peer shows another member of its swarm")
        return await swarm.view.status_of(wanted)

    async def _generate(self, arguments: Json, send: Send) -> None:
        runner = self._node.runner
        if runner is None:
            raise UsageError("this node does not generate: ask one that brought the model, or has --role backbone")
        try:
            request = msgspec.convert(arguments.get("request"), GenerateRequest, str_keys=True)
        except msgspec.ValidationError as error:
            raise UsageError(f"the request is not understood: {error}") from None
        stream = runner.stream(request)
        async with contextlib.aclosing(stream):
            async for event in stream:
                if isinstance(event, GenerateResult):
                    sites = [msgspec.to_builtins(site) for site in node_sites(self._node)]
                    await send({"event": "result", "result": msgspec.to_builtins(event), "sites": sites})
                else:
                    await send({"event": "token", **msgspec.to_builtins(event)})

    async def _ticket(self, arguments: Json) -> Json:
        swarm = self._node.swarm
        if swarm is None or not self._node.is_ready:
            raise ControlError("this node is in no swarm, or still starting: swarmnode up --model FILE founds one")
        try:
            wanted = msgspec.convert(arguments, TicketTerms, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"the request is not understood: {error}") from None
        made = await swarm.ticket(wanted.expires_s, wanted.uses, wanted.role)
        return {"ticket": str(made), "id": made.invitation.label, "expires": made.invitation.expires}

    async def _ping(self, arguments: Json, send: Send) -> None:
        """Ping a peer of this node, named by its id or the beginning of it, until `count` is reached or nobody asks."""
        node = self._node
        if not hasattr(node, "endpoint"):
            raise ControlError("this node is still starting; ask again when it is ready")
        known = {c.peer: PeerAddress(c.peer) for c in node.endpoint.connections()}
        known |= {one.peer: one for one in node.config.peers}
        target = chosen_peer(str(arguments.get("peer", "")), list(known.values()), node.endpoint.peer_id)
        pings = ping_peer(node.endpoint, target, *checked_numbers(arguments.get("count"), arguments.get("interval")))
        async with contextlib.aclosing(pings):
            async for result in pings:
                await send({"event": "ping", **msgspec.to_builtins(result)})
