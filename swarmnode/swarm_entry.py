"""How a node gets into a swarm: as its founder, by what it remembers, with a ticket, or through a LAN's open door.

    enter   files only: which swarm, what this node has to show, whom to ask (before the endpoint is bound)
    join    asks the founder for a certificate, where there is none that counts (after it is bound)

Made by `node.py`. Who is let in is `membership/judge.py` and `authority.py`; `admit_newcomer` is the founder's side of
`join`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarmnode.authority import SwarmAuthority
from swarmnode.config import NodeConfig
from swarmnode.coordination.message_link import read_message
from swarmnode.coordination.messages import Join, JoinDeclined, Joined, encode
from swarmnode.errors import BadDocument, JoinRefused, PeerFault, SwarmnodeError, UsageError
from swarmnode.member_state import Joined as Remembered
from swarmnode.member_state import MemberState
from swarmnode.membership import JOIN_LANE, BootstrapPeer, Certificate, Credentials, Membership
from swarmnode.membership.ticket import MAX_ADDRESSES
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import TransportError
from transport.identity import PeerId
from transport.stream import Stream

FOLDER = "swarm"  # below the state folder
ANSWER_S = 15.0


@dataclass(frozen=True, slots=True)
class Entry:
    """This node's way in. `authority` is there on the founder; `bootstrap` are members to ask first."""

    membership: Membership
    state: MemberState
    authority: SwarmAuthority | None
    bootstrap: tuple[BootstrapPeer, ...]
    relays: tuple[str, ...]


async def enter(config: NodeConfig, own: PeerId, say: Callable[[str], None]) -> Entry:
    """Settle which swarm this node is in.

    Raises UsageError for a ticket of another swarm than the one it is in, JoinRefused where no open swarm is found,
    SwarmFilesDamaged.
    """
    folder = config.state_dir / FOLDER
    state = MemberState(folder)
    state.check_key(own)
    known = state.joined
    if config.founds_swarm:
        if known is not None and not SwarmAuthority.exists(folder):
            raise UsageError(
                f"this node is a member of swarm {known.swarm.short}…: swarmnode up without --model starts it there; "
                f"to found another swarm, give another --state"
            )
        authority = SwarmAuthority(folder)
        remembered = known.revocations if known is not None else None
        if remembered is not None and remembered.serial > authority.revocations.serial:
            authority.restore(remembered)
            say("the swarm's invitations were lost: tickets given out before are void; who was expelled stays out")
        membership = Membership(
            authority.swarm,
            own,
            certificate=authority.certify(own),
            revocations=authority.revocations,
            gatekeeper=authority,
        )
        met = known.peers if known is not None and known.swarm == authority.swarm else ()
        return Entry(membership, state, authority, met, config.transport.relays)
    if SwarmAuthority.exists(folder):
        raise UsageError("this node founded a swarm: start it with --model MODEL, or give another --state")
    ticket = config.ticket
    if ticket is None and known is None:
        found = await _open_swarm(say)
        return Entry(Membership(found[0], own), state, None, found[1], config.transport.relays)
    if ticket is not None:
        state.check_ticket(ticket)
    certificate = known.certificate if known is not None else None
    if config.is_backbone and certificate is not None and certificate.role == "worker":
        certificate = None  # with a better ticket it joins again
    if config.is_backbone and certificate is None and (ticket is None or ticket.invitation.role == "worker"):
        raise UsageError(f"--role {config.role} with a ticket for workers: ask for one of swarmnode ticket --role any")
    swarm = known.swarm if known is not None else ticket.swarm if ticket is not None else None
    assert swarm is not None
    membership = Membership(
        swarm,
        own,
        certificate=certificate,
        revocations=known.revocations if known is not None else None,
        proof=ticket.prove(own) if ticket is not None else None,
    )
    peers = (*(ticket.peers if ticket is not None else ()), *(known.peers if known is not None else ()))
    relays = (
        *config.transport.relays,
        *(ticket.relays if ticket is not None else ()),
        *(known.relays if known is not None else ()),
    )
    return Entry(membership, state, None, _merged(peers), tuple(dict.fromkeys(relays)))


async def join(entry: Entry, endpoint: Endpoint, name: str, role: str) -> None:
    """Become a member where this node is none yet; remembers it. Raises JoinRefused with the founder's reason."""
    membership = entry.membership
    if membership.standing(time.time()) is not None:
        certificate = await _ask_all(entry, endpoint, name, role)
        try:
            membership.adopt(certificate)
        except BadDocument as error:
            raise JoinRefused(f"the certificate that came is not good: {error}") from None
    remember(entry, ())


def remember(entry: Entry, met: tuple[BootstrapPeer, ...]) -> None:
    """Write down the certificate, and where members may be found after a restart, by the founder too: its port, and
    with it every address that they know, may be another one then."""
    certificate = entry.membership.certificate
    if certificate is None:
        return
    peers = _merged((*met, *entry.bootstrap))
    entry.state.save(Remembered(certificate, entry.relays, peers, entry.membership.revocations))


async def admit_newcomer(entry: Entry, connection: Connection) -> str:
    """The founder's side: judge, certify, answer. Returns the newcomer's name, "" where it was refused."""
    stream: Stream | None = None
    try:
        async with asyncio.timeout(ANSWER_S):
            stream = await connection.accept_stream()
            asked = await read_message(stream)
            if not isinstance(asked, Join) or entry.authority is None:
                raise JoinRefused("this node lets nobody in: ask the swarm's founder")
            shown = Credentials.decode(asked.credentials).document
            proof = None if isinstance(shown, Certificate) else shown
            certificate = await asyncio.to_thread(entry.authority.redeem, proof, connection.peer)
            await stream.write(encode(Joined(certificate.encode())))
            await stream.finish()
            await connection.wait_closed()  # the newcomer ends it
        return asked.name or connection.peer.short
    except (SwarmnodeError, TransportError, TimeoutError) as error:
        await _refuse(connection, stream, str(error) or "nothing was asked in time")
        return ""


async def _refuse(connection: Connection, stream: Stream | None, why: str) -> None:
    """Say why on the stream that was asked on, where the newcomer waits for its answer."""
    if stream is None:
        await connection.close(0, why[:200])
        return
    try:
        async with asyncio.timeout(ANSWER_S):
            await stream.write(encode(JoinDeclined(why[:500])))
            await stream.finish()
            await connection.wait_closed()
    except (TransportError, TimeoutError):
        await connection.close(0, why[:200])


async def _ask_all(entry: Entry, endpoint: Endpoint, name: str, role: str) -> Certificate:
    why = entry.membership.standing(time.time()) or ""
    problems: list[str] = []
    for known in entry.bootstrap:
        try:
            return await _ask(entry, endpoint, known, name, role)
        except (SwarmnodeError, TransportError, TimeoutError) as error:
            text = str(error) or "no answer in time"
            problems.append(text.removeprefix(f"peer {known.peer} "))
    if not entry.bootstrap:
        raise JoinRefused(f"{why}: nobody to ask is known")
    raise JoinRefused(f"cannot join swarm {entry.membership.swarm.short}…: {'; '.join(dict.fromkeys(problems))}")


async def _ask(entry: Entry, endpoint: Endpoint, known: BootstrapPeer, name: str, role: str) -> Certificate:
    connection = await endpoint.dial(known.peer, known.addresses, lane=JOIN_LANE)
    try:
        async with asyncio.timeout(ANSWER_S):
            stream = await connection.open_stream()
            await stream.write(encode(Join(entry.membership.credentials(JOIN_LANE), name[:64], role)))
            answer = await read_message(stream)
        match answer:
            case Joined(certificate):
                return Certificate.decode(certificate)
            case JoinDeclined(why):
                raise JoinRefused(why)
            case _:
                raise PeerFault(f"{known.peer.short} answered the wish to join with something else")
    finally:
        await connection.close()


async def _open_swarm(say: Callable[[str], None]) -> tuple[PeerId, tuple[BootstrapPeer, ...]]:
    """The open swarm on this LAN. Raises JoinRefused where there is none or more than one."""
    from swarmnode.discovery.mdns import browse_open  # noqa: PLC0415  zeroconf, where it is used only

    found = await browse_open(on_problem=say)
    if not found:
        raise JoinRefused("no open swarm was found on this network: start one with swarmnode up --model F --open")
    if len(found) > 1:
        names = ", ".join(f"{one.swarm.short}… ({one.members[0].name})" for one in found if one.members)
        raise JoinRefused(f"several open swarms are on this network: {names}; join one with a ticket")
    founders = sorted(found[0].members, key=lambda record: record.role == "worker")
    return found[0].swarm, tuple(BootstrapPeer(r.peer, tuple(r.addresses[:MAX_ADDRESSES])) for r in founders)


def _merged(peers: tuple[BootstrapPeer, ...]) -> tuple[BootstrapPeer, ...]:
    """One entry per peer, the first mention's place, all its addresses."""
    merged: dict[PeerId, BootstrapPeer] = {}
    for known in peers:
        before = merged.get(known.peer, BootstrapPeer(known.peer))
        addresses = tuple(dict.fromkeys((*before.addresses, *known.addresses)))[:MAX_ADDRESSES]
        merged[known.peer] = replace(before, addresses=addresses)
    return tuple(merged.values())
