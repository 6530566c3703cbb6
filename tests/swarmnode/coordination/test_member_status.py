"""What of a status other members see, how it is cut, and what garbage does."""

from __future__ import annotations

import contextlib
import json
import math
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode import control
from swarmnode.coordination.member_status import (
    HIDDEN,
    MAX_COUNT,
    MAX_ENTRIES,
    MAX_PLAIN,
    MAX_TEXT,
    MAX_TIME,
    SHOWN_EVENTS,
    for_members,
    pack_status,
    unpack_status,
)
from swarmnode.coordination.messages import MAX_STATUS
from swarmnode.dashboard.fake import fake_status
from swarmnode.dashboard.layout import compose
from swarmnode.dashboard.model import Model
from swarmnode.dashboard.ui import Ui
from swarmnode.errors import BadMessage
from swarmnode.event_lines import TROUBLE
from swarmnode.status import EventStatus, GenerationStatus, NodeStatus, PeerStatus, SwarmStatus
from swarmnode.tables import node_table

SECRET = "/home/ann/My Models/big.gguf"
PLAN = {"why": "a worker came", "workers": {"abc": 4}, "local": 3, "uncovered": 0, "step_ms": None, "has_file": True}


def packed(value: Any) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(value))


def plain(n_peers: int = 3, **changes: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(fake_status(9, n_peers)), **changes}


def test_a_status_survives_the_wire() -> None:
    status = fake_status(40, 200)
    assert status.swarm is not None
    status = msgspec.structs.replace(status, swarm=msgspec.structs.replace(status.swarm, plan=PLAN))
    told = unpack_status(pack_status(status))
    assert told.swarm is not None
    assert told.swarm.plan == {**PLAN, "round_trips_per_token": 0.0, "workers_per_token": 0.0}
    assert msgspec.structs.replace(told, swarm=status.swarm) == status


def test_two_hundred_peers_of_a_large_model_fit_whole() -> None:
    status = fake_status(40, 200)
    scattered = ",".join(str(e) for e in range(0, 64, 3))  # 22 of 256 experts in each of 60 layers
    peers = [
        msgspec.structs.replace(peer, holdings={str(layer): scattered for layer in range(60)}) for peer in status.peers
    ]
    one = msgspec.structs.replace(status, peers=peers)
    told = unpack_status(pack_status(one))
    assert told.left_out == ""
    assert told.peers == peers


@pytest.mark.parametrize(("n_peers", "holdings"), [(3000, 40), (20_000, 0)])
def test_a_status_that_is_too_large_is_cut_and_says_so(n_peers: int, holdings: int) -> None:
    status = fake_status(40, n_peers)
    peers = [
        msgspec.structs.replace(
            peer,
            holdings={str(layer): f"{layer}-{i % 90 + layer}" for layer in range(holdings)},
            reason=f"why {i} {i * i}",
        )
        for i, peer in enumerate(status.peers)
    ]
    data = pack_status(msgspec.structs.replace(status, peers=peers))
    assert len(data) <= MAX_STATUS
    told = unpack_status(data)
    assert told.peer == status.peer
    if holdings:
        assert "which experts peers hold" in told.left_out
    assert f"{n_peers - len(told.peers)} of {n_peers} peers" in told.left_out
    assert 0 < len(told.peers) < n_peers


def test_whatever_is_large_something_is_left() -> None:
    huge = {str(layer): "0-7," * 1000 for layer in range(4096)}
    told = unpack_status(pack_status(msgspec.structs.replace(fake_status(4, 10), holdings=huge)))
    assert told.left_out == "everything but the node's own figures"
    assert told.peer == fake_status(4, 1).peer


def test_nothing_of_this_machine_s_files_is_told() -> None:
    base = fake_status(3, 1)
    assert base.swarm is not None
    said = f"{SECRET}: no room on the disk; see ~/.local/state and C:\\Users\\ann\\x.gguf, then try"
    events = [
        EventStatus(i, 1.0, name, said) for i, name in enumerate(sorted(SHOWN_EVENTS | TROUBLE | {"note", "new"}))
    ]
    status = msgspec.structs.replace(
        base,
        model=SECRET,
        generation=GenerationStatus(True, 1, 2.0, speculate="/home/ann/draft.gguf"),
        relay_problems={"https://relay.example/some/path": said},
        quarantined={"abc": said},
        peers=[msgspec.structs.replace(base.peers[0], reason=said)],
        swarm=msgspec.structs.replace(base.swarm, trouble=said),
        events=events,
    )
    shown = for_members(status, ["/", "/home/ann", SECRET, "demo"])
    text = msgspec.json.encode(shown).decode()
    for secret in ("ann", "My Models", "local", "Users", "draft.gguf/", "no room on the disk /"):
        assert secret not in text, secret
    assert shown.model == "big.gguf"
    assert shown.generation.speculate == "draft.gguf"
    assert shown.swarm is not None
    assert shown.swarm.trouble == f"{HIDDEN}: no room on the disk; see {HIDDEN} and {HIDDEN}, then try"
    assert list(shown.relay_problems) == ["https://relay.example/some/path"]
    assert {event.event for event in shown.events} == SHOWN_EVENTS


@pytest.mark.parametrize(
    "text",
    [
        "direct-lan 192.168.1.7:5000, 12 ms (was relay)",
        "relay https://relay.example/some/path connected",
        "the router's answer: 3/4 lost",
        "INT8/F16",
    ],
)
def test_what_is_no_path_stays(text: str) -> None:
    status = msgspec.structs.replace(fake_status(3, 1), quarantined={"abc": text})
    assert for_members(status, ["/root", "/root/state"]).quarantined == {"abc": text}


def test_whoever_adds_a_field_decides_whether_members_see_it() -> None:
    """Everything in a status is told. A secret, a file's path or a text of the user's needs a line in `for_members`."""
    assert {field.name for field in msgspec.structs.fields(NodeStatus)} == {
        "peer", "name", "version", "role", "nat", "addresses", "relays", "model", "holdings", "memory", "uptime_s",
        "peers", "sites", "generation", "served_calls", "served_rows", "served_busy_ms", "served_kernel_ms",
        "relay_problems", "transport", "swarm", "quarantined", "events", "selected", "left_out",
    }  # fmt: skip
    assert {field.name for field in msgspec.structs.fields(SwarmStatus)} == {
        "swarm", "founder", "members", "budget", "held_bytes", "given_bytes", "taken_bytes", "trouble", "plan",
    }  # fmt: skip
    assert {field.name for field in msgspec.structs.fields(GenerationStatus)} == {
        "active", "tokens", "tokens_per_s", "running", "waiting", "parallel", "lanes", "mode", "wires", "speculate",
        "verdict",
    }  # fmt: skip
    assert {field.name for field in msgspec.structs.fields(PeerStatus)} == {
        "peer", "name", "role", "path", "reason", "rtt_ms", "loss", "relay", "up_Bps", "down_Bps", "holdings",
        "last_seen_s", "address", "experts", "calls", "rows", "failures", "suspect", "latency_ms", "bytes_out",
        "bytes_back", "in_flight", "waiting_rows",
    }  # fmt: skip


# ---- what comes from another member


def show(status: NodeStatus) -> None:
    """All that is done with it: both views, and JSON."""
    model = Model()
    model.take(status, 1.0)
    model.take(status, 2.0)
    compose(model, Ui(), 120, 40)
    node_table(json.loads(json.dumps(msgspec.to_builtins(status))))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        zlib.compress(b""),
        zlib.compress(b"\x91" * 100_000),
        zlib.compress(msgspec.msgpack.encode({})),
        zlib.compress(msgspec.msgpack.encode(plain()))[:-9],
        packed(plain(peers="many")),
        packed(plain(peers=[{"peer": 1}])),
        packed(plain(swarm={"swarm": "s", "founder": True, "members": [], "plan": {"workers": 3}})),
        packed(plain(swarm={"swarm": "s", "founder": True, "members": [], "plan": {"local": b"x"}})),
        packed(plain(name=b"\xff")),
        packed(plain(addresses=[""] * (MAX_ENTRIES + 1))),
        packed(plain(relay_problems={str(i): "" for i in range(MAX_ENTRIES + 1)})),
        zlib.compress(msgspec.msgpack.encode(plain()).replace(b"study", b"st\xffdy")),
    ],
    ids=range(14),
)
def test_what_is_no_status_is_refused(data: bytes) -> None:
    with pytest.raises(BadMessage, match=r"not a status|cut short"):
        unpack_status(data)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zlib.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage, match=f"more than {MAX_PLAIN} bytes"):
            unpack_status(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_PLAIN
    finally:
        tracemalloc.stop()


def test_the_largest_status_fits_into_a_line_of_the_control_channel() -> None:
    peer = {"peer": "", "name": "", "role": "", "path": "", "reason": "", "rtt_ms": 0.1, "loss": 0.1, "relay": "",
            "up_Bps": 0.1, "down_Bps": 0.1, "holdings": {}, "last_seen_s": 0.1}  # fmt: skip
    base = plain(0, events=[], selected={}, sites=[])
    count = (MAX_PLAIN - len(msgspec.msgpack.encode(base))) // len(msgspec.msgpack.encode(peer)) - 1
    for peers in ([peer] * count, [{**peer, "reason": '"' * (MAX_TEXT - 1)}] * (MAX_PLAIN // (MAX_TEXT + 200))):
        status = unpack_status(packed({**base, "peers": peers}))
        line = msgspec.json.encode({"event": "status", "status": status})
        assert len(line) < control.MAX_LINE


def test_numbers_and_texts_are_made_harmless() -> None:
    bad = "desk\x1b[2J\n\u202eevil"
    peers = [{**plain(1)["peers"][0], "name": bad, "rtt_ms": math.nan, "loss": -math.inf, "rows": (1 << 64) - 1}]
    events = [
        {"number": 1, "at": 1e12, "event": bad, "text": bad},
        {"number": 2, "at": -1e9, "event": "x", "text": ""},
    ]
    status = unpack_status(
        packed(plain(name=bad, uptime_s=math.inf, memory=-(1 << 63), peers=peers, events=events, holdings={bad: bad}))
    )
    assert status.name == "desk [2J  evil"
    assert status.holdings == {"desk [2J  evil": "desk [2J  evil"}
    assert (status.uptime_s, status.memory) == (0.0, -MAX_COUNT)
    assert (status.peers[0].rtt_ms, status.peers[0].loss, status.peers[0].rows) == (0.0, 0.0, MAX_COUNT)
    assert [event.at for event in status.events] == [MAX_TIME, 0.0]
    show(status)


def test_what_a_later_version_adds_is_ignored_and_what_an_earlier_one_lacks_has_its_default() -> None:
    later = plain(dreams=["sheep"])
    earlier = plain()
    for name in ("events", "selected", "left_out", "quarantined"):
        del earlier[name]
    assert unpack_status(packed(later)) == fake_status(9, 3)
    assert unpack_status(packed(earlier)).events == []


@given(st.binary(max_size=300))
def test_garbage_never_gets_further_than_bad_message(body: bytes) -> None:
    for data in (body, zlib.compress(body)):
        with contextlib.suppress(BadMessage):
            unpack_status(data)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(
    st.sampled_from(sorted(plain())), VALUES, st.sampled_from(["", "peers", "events", "swarm", "generation", "sites"])
)
def test_whatever_stands_in_a_field_it_is_refused_or_can_be_shown(field: str, value: Any, within: str) -> None:
    whole = plain(2)
    inner = whole[within] if within else whole
    for one in inner if isinstance(inner, list) else [inner]:
        keys = sorted(one)
        one[keys[sum(map(ord, field)) % len(keys)]] = value
    with contextlib.suppress(BadMessage):
        show(unpack_status(packed(whole)))
