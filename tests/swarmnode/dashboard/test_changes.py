from __future__ import annotations

import msgspec

from swarmnode.dashboard.changes import changes
from swarmnode.dashboard.fake import fake_status
from swarmnode.status import EventStatus, GenerationStatus, NodeStatus


def lines(old: NodeStatus | None, new: NodeStatus) -> list[str]:
    return [text for _, text in changes(old, new)]


def test_the_first_snapshot_tells_what_there_is() -> None:
    said = lines(None, fake_status(0, 2))
    assert said[0] == "study (n0deaaaa): backbone of demo-moe"
    assert "anvil-0 (0000peer): worker on direct-lan, 32 experts; the only path on this network" in said
    assert "worker juniper-9 is here" in said


def test_nothing_new_is_nothing_said_and_figures_are_no_news() -> None:
    first = fake_status(0, 5)
    assert lines(first, first) == []
    assert lines(first, fake_status(1, 5)) == []


def test_peers_that_come_change_their_path_and_go() -> None:
    first = fake_status(0, 3)
    moved = msgspec.structs.replace(first.peers[0], path="relay", reason="no answer\x1b[2J")
    second = msgspec.structs.replace(first, peers=[moved, first.peers[1]])
    assert lines(first, second) == [
        "anvil-0 (0000peer): worker on relay, 32 experts (was direct-lan); no answer·[2J",
        "cobalt-2 (0002peer): gone",
    ]
    assert lines(second, first)[-1].startswith("cobalt-2 (0002peer): worker on punched")


def test_an_event_is_told_once_with_its_time() -> None:
    first = fake_status(0, 0)
    news = EventStatus(first.events[-1].number + 1, 12.5, "lost", "lost abc: timed out")
    second = msgspec.structs.replace(first, events=[*first.events[1:], news])
    assert list(changes(first, second)) == [(12.5, "lost abc: timed out")]
    assert lines(second, second) == []


def test_generations_begin_and_end() -> None:
    idle = msgspec.structs.replace(fake_status(0, 0), generation=GenerationStatus(False, 10, 5.0))
    busy = msgspec.structs.replace(idle, generation=GenerationStatus(True, 12, 5.0, running=1, parallel=2))
    done = msgspec.structs.replace(idle, generation=GenerationStatus(False, 40, 9.0))
    assert lines(idle, busy) == ["generating: 1 of 2 at once"]
    assert lines(busy, done) == ["generated: 40 tokens since the start, the last at 9.0/s"]


def test_a_node_that_was_started_anew_is_told_from_the_beginning() -> None:
    assert lines(fake_status(40, 1), fake_status(0, 1))[0].startswith("study (n0deaaaa)")
