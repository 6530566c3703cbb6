"""What members tell each other of members: little, never twice, and enough that nobody alive is ever missed."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from swarmnode.coordination.mesh import wanted_links
from swarmnode.discovery.gossip import MAX_TOLD_PER_S, TELL_S, Gossip
from swarmnode.discovery.record import RECORD_TTL_S, REISSUE_S
from tests.swarmnode.discovery.samples import identity
from transport.identity import PeerId

OWN, A, B, C, D = (identity(number).peer_id for number in range(1, 6))


def test_a_record_goes_over_a_link_once_and_never_back() -> None:
    gossip = Gossip(OWN)
    gossip.issued(b"own")
    gossip.learned(A, b"a1", 0.0, is_new=True, teller=B)
    assert gossip.share([A, B, C], (), 4, 0.5) == {A: [b"own"], B: [b"own"], C: [b"own", b"a1"]}
    gossip.repeated(A, b"a1", D)
    assert gossip.share([A, B, C, D], (), 4, 1.5) == {D: [b"own"]}
    gossip.learned(A, b"a2", 1.6, is_new=False, teller=A)
    gossip.repeated(A, b"a1", B)  # it has the old one only
    gossip.issued(b"own2")
    assert gossip.share([B], (), 4, 2.5) == {B: [b"own2", b"a2"]}
    gossip.told_everything(C)
    assert gossip.share([C], (), 4, 3.0) == {}
    assert gossip.share([D], (), 4, 1.6 + TELL_S + 0.1) == {D: [b"own2"]}  # too old by now


def test_what_is_told_is_capped_and_what_is_new_goes_first() -> None:
    gossip = Gossip(OWN)
    gossip.share([], (), 1000, 0.0)
    for number in range(1000):
        gossip.learned(PeerId(number.to_bytes(32, "big")), b"%d" % number, 0.0, is_new=number >= 990, teller=None)
    told = gossip.share([A, B, C, D], {D}, 100, 1.0)
    assert {link: len(blobs) for link, blobs in told.items()} == {A: 100, B: 100, C: 100, D: 4}
    assert set(told[A]) >= {b"%d" % number for number in range(990, 1000)}
    assert len({*told[A], *told[B], *told[C]}) >= 250  # each link another part
    assert sum(map(len, told.values())) <= MAX_TOLD_PER_S


@dataclass
class _Node:
    gossip: Gossip
    view: dict[PeerId, tuple[int, float]] = field(default_factory=dict)  # number of the record, alive until
    links: set[PeerId] = field(default_factory=set)
    heard: int = 0
    gaps: int = 0


@pytest.mark.parametrize(("members", "cap"), [(13, MAX_TOLD_PER_S), (70, 140)])
def test_a_hub_hears_little_and_yet_everybody_sees_everybody_and_no_dead_one_for_longer_than_15_s(
    members: int, cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cap so low for so few that they have to pass on most of it without the hub, as hundreds would."""
    monkeypatch.setattr("swarmnode.discovery.gossip.MAX_TOLD_PER_S", cap)
    source = random.Random(1)
    peers = [identity(number).peer_id for number in range(members)]
    hub = peers[0]
    nodes = {peer: _Node(Gossip(peer)) for peer in peers}
    for one in peers:
        for other in wanted_links(one, peers, [hub]):
            nodes[one].links.add(other)
            nodes[other].links.add(one)
    hubs = {hub} if members > 13 else set()
    order, events = itertools.count(), []
    for one in peers:
        events += [(source.uniform(0, period), next(order), kind, one) for kind, period in (("i", 3.0), ("t", 1.0))]
    heapq.heapify(events)
    arriving: dict[int, tuple[PeerId, list[bytes]]] = {}
    killed_at, end, killed, numbers = 30.0, 45.0, set(peers[-5:]), itertools.count(1)
    about: dict[bytes, tuple[PeerId, int]] = {}
    while events[0][0] < end:
        at, key, kind, one = heapq.heappop(events)
        if one in killed and at > killed_at:
            continue
        node = nodes[one]
        if kind == "i":
            blob = b"%d" % (number := next(numbers))
            about[blob] = one, number
            node.gossip.issued(blob)
            heapq.heappush(events, (at + REISSUE_S, next(order), "i", one))
        elif kind == "t":
            for link, blobs in node.gossip.share(sorted(node.links), hubs, members - 1, at).items():
                arriving[key := next(order)] = one, blobs
                heapq.heappush(events, (at + source.uniform(0.01, 0.2), key, "r", link))
            heapq.heappush(events, (at + source.uniform(1, 1.1), next(order), "t", one))
        else:
            teller, blobs = arriving.pop(key)
            node.heard += len(blobs)
            for blob in blobs:
                peer, number = about[blob]
                known, until = node.view.get(peer, (0, at))
                if number == known:
                    node.gossip.repeated(peer, blob, teller)
                elif number > known and peer != one:
                    node.gaps += until < at
                    node.view[peer] = number, at + RECORD_TTL_S
                    node.gossip.learned(peer, blob, at, is_new=not known, teller=teller)
    alive = set(peers) - killed
    for one in alive:
        view = nodes[one].view
        assert nodes[one].gaps == 0
        assert all(view[other][1] > end for other in alive - {one})
        assert all(view[other][1] <= killed_at + 15 for other in killed)
    assert nodes[hub].heard / end <= 2 * cap
