from __future__ import annotations

from typing import Any

from swarmnode.event_log import KEPT, EventLog


def test_events_are_kept_in_order_bounded_and_passed_on() -> None:
    seen: list[str] = []

    def then(event: str, **fields: Any) -> None:
        seen.append(event)

    log = EventLog(then)
    for number in range(100):
        log("note", note=f"note {number}")
    log("ready", role="worker", model="m", address="a" * 1000)
    assert len(seen) == 101
    latest = log.latest()
    assert len(latest) == KEPT
    assert [one.number for one in latest] == list(range(102 - KEPT, 102))
    assert latest[-2].text == "note 99"
    assert latest[-1].text.startswith("ready: worker of m aaa")
    assert len(latest[-1].text) <= 240


def test_who_listens_cannot_end_what_is_told_of() -> None:
    def then(event: str, **_fields: Any) -> None:
        raise OSError(28, "No space left on device")

    log = EventLog(then)
    log("note", note="one")
    log("connected")  # without the fields that its line needs
    log("note", note="two")
    assert [one.text for one in log.latest() if one.event == "note"] == ["one", "two"]


def test_tickets_are_secrets_and_progress_is_no_event() -> None:
    seen: list[str] = []
    log = EventLog(lambda event, **_fields: seen.append(event))
    log("ticket", ticket="swarm1secret")
    log("slices", done=1, total=2)
    log("holding", experts=3)
    log("holding", experts=3)
    assert seen == ["ticket", "slices", "holding", "holding"]
    assert [one.text for one in log.latest()] == ["holding 3 experts"]
