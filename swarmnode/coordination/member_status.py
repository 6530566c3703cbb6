"""A node's status as other members of its swarm may see it: what is left out of it, its bytes, their check. Pure.

Bytes:  zlib (RFC 1950) of MessagePack of a `status.NodeStatus`, a map; at most MAX_STATUS bytes, MAX_PLAIN unpacked.

A status never has tickets, keys or prompts in it (`status.py`). Paths of this machine's files are taken out here, and
so are the events whose texts may name some. A status that is too large is cut, what matters least first, and `left_out`
says so.

What comes from another member is hostile until it is checked: bounded before it is unpacked, of the right shape, texts
printable, numbers finite and of a size that every view can show. Called by `swarmnode/member_view.py`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from swarmnode.coordination.messages import MAX_STATUS
from swarmnode.errors import BadMessage
from swarmnode.status import EventStatus, NodeStatus, SwarmStatus

MAX_PLAIN = 1 << 20  # bytes unpacked: as JSON it still fits into one line of the control channel
MAX_TEXT = 4096  # characters of one text: the ranges of 512 scattered experts fit
MAX_ENTRIES = 1 << 14  # of one list or object: no node has so many peers
MAX_COUNT = 1 << 53  # above it JSON's readers lose the last digits; no counter gets there
MAX_NUMBER = 1e15
MAX_TIME = 4e9  # seconds since 1970: the year 2096
KEPT_EVENTS = 8  # where a status is too large
HIDDEN = "(a file there)"
SHOWN_EVENTS = frozenset(
    {
        "ready", "connected", "attached", "not-attached", "lost", "path", "relay-connected", "relay-lost", "relay-left",
        "relay-failed", "stopping", "waiting-for-model", "model", "member", "member-gone", "member-expelled", "joined",
        "key-in-use", "holding", "handing-over", "plan", "quarantined",
    }
)  # fmt: skip
"""Events of the network and of the swarm. Any other may tell of files, of settings, of what failed on that machine."""

# A path of Unix or Windows, or below a home folder: not the rest of a URL, of a word or of a fraction.
_REST = r"[^\s'\",;:)]"
_PATH = rf"(?<![\w:/.\\])(?:~?/|[A-Za-z]:[\\/]|\\\\){_REST}+"


class _Plan(msgspec.Struct):
    """`coordination/lead.summary`, as views count on it."""

    workers: dict[str, int]
    local: int
    uncovered: int
    why: str = ""
    step_ms: float | None = None
    round_trips_per_token: float = 0.0
    workers_per_token: float = 0.0
    has_file: bool = False


_decoder = msgspec.msgpack.Decoder(NodeStatus)
_encoder = msgspec.msgpack.Encoder()


def for_members(status: NodeStatus, private: Sequence[str] = ()) -> NodeStatus:
    """What others may see of a status. `private` are paths of this machine, such as its home folder: one with a blank
    in it is known for a path only if it is among them."""
    known = sorted((path for path in private if len(path) > 1 and re.search(r"[/\\]", path)), key=len, reverse=True)
    paths = re.compile("|".join([*(f"{re.escape(path)}{_REST}*" for path in known), _PATH]))

    def hide(text: str) -> str:
        return paths.sub(HIDDEN, text)

    swarm, generation = status.swarm, status.generation
    return msgspec.structs.replace(
        status,
        model=_last_part(status.model),  # a path, while the file is being read
        generation=msgspec.structs.replace(generation, speculate=_last_part(generation.speculate)),
        relay_problems={url: hide(why) for url, why in status.relay_problems.items()},
        quarantined={peer: hide(why) for peer, why in status.quarantined.items()},
        peers=[msgspec.structs.replace(peer, reason=hide(peer.reason)) for peer in status.peers],
        swarm=msgspec.structs.replace(swarm, trouble=hide(swarm.trouble)) if swarm is not None else None,
        events=[
            msgspec.structs.replace(event, text=hide(event.text))
            for event in status.events
            if event.event in SHOWN_EVENTS
        ],
    )


def pack_status(status: NodeStatus) -> bytes:
    """A status as bytes, cut until they are few enough."""
    packed = _packed(status)
    for smaller in _smaller(status):
        if packed is not None:
            break
        packed = _packed(smaller)
    assert packed is not None  # the last one has nothing left that could be large
    return packed


def unpack_status(packed: bytes) -> NodeStatus:
    """A status that another member sent. Raises BadMessage."""
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(packed, MAX_PLAIN)
        if not unpacking.eof:
            raise BadMessage(f"a status that is cut short, or of more than {MAX_PLAIN} bytes")
        return _harmless(_decoder.decode(plain))
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not a status: {error}") from None


# ---- cutting


def _packed(status: NodeStatus) -> bytes | None:
    plain = _encoder.encode(status)
    if len(plain) > MAX_PLAIN:
        return None
    packed = zlib.compress(plain, 1)  # level 1: a tenth of the time of 6, a quarter larger
    return packed if len(packed) <= MAX_STATUS else None


def _smaller(status: NodeStatus) -> Iterator[NodeStatus]:
    """Ever less of a status, what a view can do without first."""
    left_out: list[str] = []

    def cut(what: str, **fields: Any) -> NodeStatus:
        nonlocal status
        left_out[:] = [one for one in left_out if one.rpartition(" ")[2] != what.rpartition(" ")[2]]
        left_out.append(what)
        status = msgspec.structs.replace(status, left_out=", ".join(left_out), **fields)
        return status

    if status.selected:
        yield cut("the choice of experts", selected={})
    if any(peer.holdings for peer in status.peers):
        peers = [msgspec.structs.replace(peer, holdings={}) for peer in status.peers]
        yield cut("which experts peers hold", peers=peers)
    if len(status.events) > KEPT_EVENTS:
        yield cut("older events", events=status.events[-KEPT_EVENTS:])
    swarm = status.swarm
    n_peers, n_members = len(status.peers), len(swarm.members) if swarm is not None else 0
    for keep in _halves(max(n_peers, n_members)):
        if keep < n_peers:
            cut(f"{n_peers - keep} of {n_peers} peers", peers=status.peers[:keep])
        if swarm is not None and keep < n_members:
            kept = msgspec.structs.replace(swarm, members=swarm.members[:keep])
            cut(f"{n_members - keep} of {n_members} members", swarm=kept)
        yield status
    yield _bare(status)


def _halves(count: int) -> Iterator[int]:
    while count > 0:
        count //= 2
        yield count


def _bare(status: NodeStatus) -> NodeStatus:
    """Hardly more than who it is."""
    swarm = status.swarm
    return NodeStatus(
        peer=status.peer, name=status.name[:64], version=status.version[:64], role=status.role[:16],
        nat=status.nat[:16], addresses=[], relays=[], model=status.model[:200], holdings={}, memory=status.memory,
        uptime_s=status.uptime_s, peers=[],
        generation=msgspec.structs.replace(status.generation, wires={}),
        served_calls=status.served_calls, served_rows=status.served_rows,
        swarm=SwarmStatus(swarm.swarm, swarm.founder, []) if swarm is not None else None,
        left_out="everything but the node's own figures",
    )  # fmt: skip


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


# ---- checking


def _harmless(status: NodeStatus) -> NodeStatus:
    """The same with printable texts and with numbers that can be shown. Raises BadMessage for a plan that is none."""
    swarm = status.swarm
    if swarm is not None and swarm.plan is not None:
        try:
            plan = msgspec.convert(swarm.plan, _Plan)
        except msgspec.ValidationError as error:
            raise BadMessage(f"not a status: the plan: {error}") from None
        swarm = msgspec.structs.replace(swarm, plan=msgspec.to_builtins(plan))
        status = msgspec.structs.replace(status, swarm=swarm)
    clean = msgspec.convert(_clean(msgspec.to_builtins(status)), NodeStatus)
    return msgspec.structs.replace(clean, events=[_in_time(event) for event in clean.events])


def _in_time(event: EventStatus) -> EventStatus:
    return msgspec.structs.replace(event, at=min(max(event.at, 0.0), MAX_TIME))


def _clean(value: Any) -> Any:
    """JSON's types, as deep as a NodeStatus."""
    cleaner = _CLEANERS.get(type(value))
    return cleaner(value) if cleaner is not None else value


def _clean_list(many: list[Any]) -> list[Any]:
    _bound(len(many))
    return [_clean(one) for one in many]


def _clean_object(named: dict[str, Any]) -> dict[str, Any]:
    _bound(len(named))
    return {_clean_text(key): _clean(one) for key, one in named.items()}


def _bound(count: int) -> None:
    if count > MAX_ENTRIES:
        raise BadMessage(f"not a status: {count} entries in one list; at most {MAX_ENTRIES}")


def _clean_text(text: str) -> str:
    text = text[:MAX_TEXT]
    return text if text.isprintable() else "".join(one if one.isprintable() else " " for one in text)


_CLEANERS: dict[type, Callable[[Any], Any]] = {
    str: _clean_text,
    int: lambda number: min(max(number, -MAX_COUNT), MAX_COUNT),
    float: lambda number: number if abs(number) <= MAX_NUMBER else 0.0,  # NaN is none of these
    list: _clean_list,
    dict: _clean_object,
}
