"""Whole screens, as text."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from swarmnode.dashboard.cells import Line, text_of
from swarmnode.dashboard.fake import fake_status
from swarmnode.dashboard.layout import compose
from swarmnode.dashboard.look import ASCII
from swarmnode.dashboard.model import Model
from swarmnode.dashboard.peers_panel import COLUMNS, columns_for
from swarmnode.dashboard.screen import Screen
from swarmnode.dashboard.ui import Overlay, Page, Ui
from swarmnode.status import EventStatus, MemberStatus, NodeStatus, PeerStatus, SwarmStatus

SIZES = [(80, 24), (120, 40), (200, 50)]


def model_of(n_peers: int, steps: int = 30) -> Model:
    model = Model()
    for step in range(steps):
        model.take(fake_status(step, n_peers), step / 4)
    return model


def texts(lines: list[Line]) -> list[str]:
    return [text_of(line) for line in lines]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("n_peers", [0, 1, 3, 200])
def test_everything_has_its_place(width: int, height: int, n_peers: int) -> None:
    lines = texts(compose(model_of(n_peers), Ui(), width, height))
    assert len(lines) == height
    assert {cell_len(line) for line in lines} == {width}
    screen = "\n".join(lines)
    for what in (
        "swarmnode study · backbone of demo-moe", f"{n_peers} peer", "NAT easy", "relays 1 of 1", "memory 512 MB",
        "tokens/s 12.0", "per step 1.50", "round trips/token 16.00", "bytes/token/layer 2.1 kB", "slowest layer 14",
        "── peers", "name", "path", "RTT ms", "loss", "up B/s", "load", "── experts ",
        "── events ", "is here", "q quit",
    ):  # fmt: skip
        assert what in screen, what
    assert ("nobody is connected yet" in screen) is (n_peers == 0)


def test_eighty_by_twenty_four() -> None:
    lines = texts(compose(model_of(2), Ui(), 80, 24))
    assert [line.rstrip() for line in lines[:12]] == [
        " swarmnode study · backbone of demo-moe                   2 peers · up 1 m 47 s",
        " id n0deaaaa   NAT easy   relays 1 of 1 https://relay.example   memory 512 MB",
        " swarm 5wa4mbbb, founded here   for experts 3.2 GB of 8.6 GB",
        "── generation ──────────────────────────────────────────────────────────────────",
        " tokens/s 12.0   ▁▁▁▁▁▁▁▁   per step 1.50   round trips/token 16.00",
        " bytes/token/layer 2.1 kB   slowest layer 14, 25.4 ms   generating 1 of 4",
        " tokens 87   mode partial, INT8/F16   drafts ngram",
        "── peers 2 · by name ───────────────────────────────────────────────────────────",
        " name↓      id       role     path       RTT ms          loss up B/s  down load",
        " anvil-0    0000peer worker   direct-lan    6.6 ▇█▇▅▂▁▂▃   0%   1.0k  2.0k    2",
        " birch-1    0001peer worker   direct-pu…   10.5 █▇▄▂▁▂▅▆ 0.1%   2.0k  4.0k    0",
        "── experts ─────────────────────────────────────────────────────────────────────",
    ]
    assert lines[-1].startswith(" q quit  ? help  s sort  / filter  Enter open  Tab page  p pause  t ticket")


@pytest.mark.parametrize("width", [80, 120])
def test_the_newest_event_is_on_every_screen_that_has_events(width: int) -> None:
    model = Model()
    status = msgspec.structs.replace(fake_status(30, 3), events=[EventStatus(9999, 1.0, "up", "the newest one")])
    model.take(status, 1.0)
    for height in range(14, 60):
        screen = "\n".join(texts(compose(model, Ui(), width, height)))
        assert "── events" in screen or height < 20, height
        assert ("the newest one" in screen) is ("── events" in screen), height


def test_what_a_wide_screen_shows_besides() -> None:
    narrow, wide, widest = ([c.title for c, _ in columns_for(width)] for width, _ in SIZES)
    assert set(narrow) < set(wide) == set(widest) == {column.title for column in COLUMNS}
    screen = "\n".join(texts(compose(model_of(8), Ui(), 200, 50)))
    assert "no direct path: both NATs change their ports" in screen
    assert "32 in 4 layers" in screen
    side_by_side = next(line for line in screen.splitlines() if "── experts" in line)
    assert "── events" in side_by_side


def test_two_hundred_peers_scroll_to_the_one_that_is_chosen() -> None:
    model = model_of(200)
    order = [row.status.peer for row in model.shown(Ui())]
    screen = "\n".join(texts(compose(model, Ui(selected=order[120]), 80, 24)))
    assert f"›{model.shown(Ui())[120].name}" in screen
    assert re.search(r"peers 200 · by name · 1\d\d–1\d\d of 200", screen)
    last = texts(compose(model, Ui(selected=order[-1]), 80, 24))
    assert any("of 200" in line and "–200 of" in line for line in last)


def test_a_peer_opened_shows_all_of_it() -> None:
    model = model_of(9)
    screen = "\n".join(texts(compose(model, Ui(selected=model.peers[3].status.peer, overlay=Overlay.PEER), 80, 24)))
    for what in ("delta-3 (0003peer)", model.peers[3].status.peer, "relay https://relay.example", "no direct path:",
                 "datagrams", "of the last minute", "layer 3: 0-7; layer 4: 0-7", "calls under way"):  # fmt: skip
        assert what in screen, what
    gone = "\n".join(texts(compose(model, Ui(selected="nobody", overlay=Overlay.PEER), 80, 24)))
    assert "this peer is gone" in gone


@pytest.mark.parametrize("overlay", [Overlay.HELP, Overlay.LEAVE])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_help_and_the_question_fit(overlay: Overlay, width: int, height: int) -> None:
    lines = texts(compose(model_of(5), Ui(overlay=overlay), width, height))
    assert {cell_len(line) for line in lines} == {width}
    assert ("PgUp" if overlay is Overlay.HELP else "y stops it") in "\n".join(lines)


def test_a_wire_that_the_founder_s_gate_allows_says_so() -> None:
    for verdict, said in (("own", "INT8/F16"), ("founder", "INT8/F16, founder's gate"), ("founder: KL", "founder: KL")):
        status = fake_status(5, 3)
        generation = msgspec.structs.replace(status.generation, verdict=verdict)
        model = Model()
        model.take(msgspec.structs.replace(status, generation=generation), 1.0)
        screen = "\n".join(texts(compose(model, Ui(), 200, 50)))
        assert said in screen
        assert ("founder" in screen) is (verdict != "own")


@pytest.mark.parametrize("page", list(Page))
def test_pages(page: Page) -> None:
    lines = texts(compose(model_of(50), Ui(page=page), 80, 24))
    assert len(lines) == 24
    if page is Page.PEERS:
        assert "1–20 of 50" in lines[1]
    if page is Page.EXPERTS:
        assert "── experts" in lines[1]
        assert lines[2].startswith("    0 ")
    if page is Page.EVENTS:
        assert "── events" in lines[1]
        assert lines[2].startswith(" 22:1")


def test_a_filter_a_pause_and_what_is_under_way_are_seen() -> None:
    model = model_of(50)
    model.set_progress(["slices ━━━━╌╌╌╌ 48 %  12 MB of 25 MB  3 MB/s  4 s left"])
    lines = texts(compose(model, Ui(filter="relay", typing=True), 80, 24))
    assert "slices ━━━━" in lines[1]
    assert "with “relay_”" in "\n".join(lines)
    assert lines[-1].startswith(" filter: relay_")
    assert texts(compose(model, Ui(paused=True), 80, 24))[-1].startswith(" paused")
    assert "no peer has “xyzzy”" in "\n".join(texts(compose(model, Ui(filter="xyzzy"), 80, 24)))
    model.set_trouble("the node has ended")
    assert "the node has ended" in texts(compose(model, Ui(), 80, 24))[-1]


def test_without_unicode() -> None:
    screen = "\n".join(texts(compose(model_of(20), Ui(), 120, 40, ASCII)))
    assert not re.search(r"[▁-█─━›↓]", screen)


HOSTILE = st.text(st.characters(codec=None), max_size=40)


@settings(max_examples=60)
@given(HOSTILE, HOSTILE, HOSTILE, st.integers(1, 220), st.integers(1, 60), st.sampled_from(list(Page)),
       st.sampled_from(list(Overlay)))  # fmt: skip
def test_whatever_peers_say_every_line_is_as_wide_as_the_screen(
    name: str, reason: str, role: str, width: int, height: int, page: Page, overlay: Overlay
) -> None:
    peer = PeerStatus("q" * 56, name, role, reason, reason, 1e12, 9.0, name, 1e30, -5.0, {name: reason}, -1.0, reason)
    event = EventStatus(1, -5.0, name, reason)
    swarm = SwarmStatus(name, True, [MemberStatus("q" * 56, name, role, 1, True)], trouble=reason)
    status = NodeStatus(
        name, name, "1", role, reason, [name, reason], [name], reason, {}, -5, 1e12, [peer], swarm=swarm,
        events=[event], relay_problems={name: reason}, quarantined={name: reason}, selected={name: reason, "0": "0f"},
    )  # fmt: skip
    model = Model()
    model.take(status, 0.0)
    lines = compose(model, Ui(selected="q" * 56, page=page, overlay=overlay), width, height)
    assert len(lines) == height
    assert {cell_len(text_of(line)) for line in lines} <= {width}
    sent = Screen().update(lines, width)
    assert not re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", sent).count(b"\x1b")
    assert not re.search(rb"[\x00-\x08\x0b-\x1a\x7f]", sent)


# ---- what is sent


def shown_by(sent: bytes, screen: dict[int, str]) -> None:
    """What a terminal that knows little more than cursor positions makes of it."""
    text = sent.decode()
    if "\x1b[2J" in text:
        screen.clear()
    for row, line in re.findall(r"\x1b\[(\d+);1H((?:[^\x1b]|\x1b\[[0-9;]*m)*)", text):
        screen[int(row) - 1] = re.sub(r"\x1b\[[0-9;]*m", "", line)


def test_only_what_differs_is_sent_and_all_of_it_arrives() -> None:
    model, screen, seen = Model(), Screen(), dict[int, str]()
    for step in range(40):
        model.take(fake_status(step, 30), step / 4)
        lines = compose(model, Ui(), 120, 40)
        sent = screen.update(lines, 120)
        shown_by(sent, seen)
        assert [seen[i] for i in range(40)] == texts(lines)
        assert sent.startswith(b"\x1b[?2026h")
        assert sent.endswith(b"\x1b[?2026l")
        assert step == 0 or b"\x1b[2J" not in sent  # nothing flickers
    assert screen.update(lines, 120) == b""
    screen.forget()
    assert len(screen.update(lines, 120)) > 120 * 40


def test_no_colour_keeps_what_is_bold_and_reversed() -> None:
    lines = compose(model_of(20), Ui(selected="0003peer" + "c" * 44), 120, 40)
    coloured, plain = Screen().update(lines, 120), Screen(colour=False).update(lines, 120)
    colours = re.compile(rb"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7])[0-9;]*m")
    assert colours.search(coloured)
    assert not colours.search(plain)
    assert b"\x1b[7m" in plain
    assert b"\x1b[1m" in plain


def test_a_status_of_a_later_version_is_read() -> None:
    from swarmnode.dashboard.attached import read_status
    from swarmnode.errors import ControlError

    value = msgspec.to_builtins(fake_status(0, 2))
    assert read_status({**value, "news": 1}).name == "study"
    with pytest.raises(ControlError, match="another version"):
        read_status({**value, "peers": 5})
    with pytest.raises(ControlError, match="another version"):
        read_status(None)
