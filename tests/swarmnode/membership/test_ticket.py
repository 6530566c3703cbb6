"""The text that people copy: fixed text, round trips, and every way in which a copy goes wrong."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import BadTicket
from swarmnode.membership import BootstrapPeer, Invitation, Ticket
from swarmnode.membership.ticket import MAX_BYTES, MAX_PASTED, MAX_TEXT, looks_like_ticket
from tests.swarmnode.membership.people import INVITATION, PEER, SECRET, STRANGER, SWARM

TICKET = Ticket(
    INVITATION,
    SECRET,
    ("https://r.example",),
    (
        BootstrapPeer(PEER, (("192.0.2.1", 4433), ("2001:db8::1", 4433), ("node.example", 1))),
        BootstrapPeer(SWARM.peer_id),
    ),
)
TEXT = (
    "swarm1aear2a5ba677htqqxyoxbxiy45f4bglh4tldbg5fbvpr3xegmqjfkmnyaebagbafaydqqaaaaaagwsosaaaaaaadaeaiqkzvbphkkd7kdi"
    "w7d54fjxmnhuxb5xbj72wuzn5aamll5o62ictq7ub7rhsmwttzhcnianelsdcqx7v3tsd76wetqsheazp7d567aqrceirceirceirceirceirceir"
    "ceirceirceirceirceirceirceairnb2hi4dthixs64romv4gc3lqnrsqfuckwizhik5uvm5bg2f5iyk6jzwqejflogqbnoxykifdglexpbzxamcm"
    "aaacaeivcbraaeg3qaaaaaaaaaaaaaaaaaabcfiqaddon5sgkltfpbqw24dmmuaaca5ba677htqqxyoxbxiy45f4bglh4tldbg5fbvpr3xegmqjfk"
    "mnyaciwzhho"
)
HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{1,8}){0,3}", fullmatch=True),
)
PEERS = st.builds(
    BootstrapPeer,
    st.sampled_from([PEER, STRANGER]),
    st.lists(st.tuples(HOSTS, st.integers(1, 65535)), max_size=6).map(tuple),
)
URLS = st.sampled_from(["https://relay.example", "http://127.0.0.1:8080", "https://cdn.example/some/path"])


def text_of(data: bytes) -> str:
    """A ticket's text around data that has a right checksum."""
    whole = data + hashlib.sha256(b"swarm ticket" + data).digest()[:4]
    return "swarm1" + base64.b32encode(whole).decode().rstrip("=").lower()


def body_of(ticket: Ticket) -> bytes:
    body = str(ticket)[6:].upper()
    return base64.b32decode(body + "=" * (-len(body) % 8))[:-4]


def test_fixed_text() -> None:
    assert str(TICKET) == TEXT
    assert Ticket.parse(TEXT) == TICKET


def test_a_usual_ticket_fits_into_a_few_lines() -> None:
    usual = Ticket(INVITATION, SECRET, ("https://relay.example.org",), (BootstrapPeer(PEER, (("192.0.2.1", 4433),)),))
    assert len(str(usual)) < 400


def test_a_terminal_may_break_it_and_a_form_may_capitalise_it() -> None:
    broken = "\r\n  ".join(TEXT[at : at + 80] for at in range(0, len(TEXT), 80))
    assert Ticket.parse(f"  {broken.upper()}\t\n") == TICKET


def test_the_secret_is_not_shown_to_debuggers() -> None:
    assert SECRET.hex() not in repr(TICKET)
    assert repr(SECRET) not in repr(TICKET)


def test_a_ticket_proves_that_one_has_it() -> None:
    proof = Ticket.parse(TEXT).prove(PEER)
    assert proof.is_genuine
    assert proof.invitation == INVITATION


@given(st.lists(URLS, max_size=3).map(tuple), st.lists(PEERS, max_size=4).map(tuple))
def test_what_is_written_is_read(relays: tuple[str, ...], peers: tuple[BootstrapPeer, ...]) -> None:
    ticket = Ticket(INVITATION, SECRET, relays, peers)
    assert Ticket.parse(str(ticket)) == ticket


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "the ticket is empty"),
        (" \n", "the ticket is empty"),
        ("swa", "cut short after 3 characters"),
        ("swarm1", "cut short after 6 characters"),
        ("swarm1aear2a", "cut short"),
        (TEXT[:-1], "cut short: 461 of 462 characters"),
        (TEXT[:-200], "cut short: 262 of 462 characters"),
        (TEXT + TEXT[6:], "more than one ticket"),
        (TEXT[:100] + ("a" if TEXT[100] != "a" else "b") + TEXT[101:], "mistyped"),
        (TEXT[:100] + "8" + TEXT[101:], "has only the characters a-z and 2-7, this has '8'"),
        (TEXT[:100] + "é" + TEXT[101:], "has only the characters a-z and 2-7, this has 'é'"),
        (TEXT.replace("swarm1", "swarm2"), "of version 2, this program reads version 1"),
        (text_of(b"\x07" + body_of(TICKET)[1:]), "of version 7, this program reads version 1"),
        ("swarm1" + "a" * MAX_TEXT, f"at most {MAX_TEXT} characters"),
        ("swarm1" * MAX_PASTED, f"at most {MAX_TEXT} characters"),
        (" " * MAX_PASTED + TEXT, f"at most {MAX_TEXT} characters"),
        ("model.gguf", "is no ticket"),
        (str(PEER), "is no ticket"),
        ("swarmx" + TEXT[6:], "is no ticket"),
    ],
)
def test_one_line_for_every_bad_copy(text: str, line: str) -> None:
    with pytest.raises(BadTicket) as caught:
        Ticket.parse(text)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("at", range(6, len(TEXT), 7))
def test_no_single_mistyped_character_passes(at: int) -> None:
    for wrong in "aq27":
        if TEXT[at] != wrong:
            with pytest.raises(BadTicket):
                Ticket.parse(TEXT[:at] + wrong + TEXT[at + 1 :])


def test_the_last_character_counts_too() -> None:
    for wrong in "abcdefghijklmnopqrstuvwxyz234567":
        if wrong != TEXT[-1]:
            with pytest.raises(BadTicket, match="mistyped"):
                Ticket.parse(TEXT[:-1] + wrong)


@given(st.integers(0, 460), st.integers(1, 460))
def test_a_missing_piece_is_noticed(start: int, size: int) -> None:
    with pytest.raises(BadTicket):
        Ticket.parse(TEXT[:start] + TEXT[start + size :])


@given(st.text(max_size=80))
def test_any_text_is_a_ticket_or_one_line(text: str) -> None:
    for candidate in (text, "swarm1" + text):
        with pytest.raises(BadTicket) as caught:
            Ticket.parse(candidate)
        assert str(caught.value).isprintable()


@given(st.binary(max_size=200), st.booleans())
def test_any_data_with_a_right_checksum_is_a_ticket_or_one_line(tail: bytes, after_invitation: bool) -> None:
    head = body_of(TICKET)[3 : 3 + 150] if after_invitation else b""
    size = 3 + len(head) + len(tail) + 4
    text = text_of(b"\x01" + size.to_bytes(2, "big") + head + tail)
    line = "damaged"
    try:
        assert Ticket.parse(text).invitation == INVITATION
    except BadTicket as error:
        line = str(error)
    assert "damaged" in line or "cut short" in line
    assert line.isprintable()


def test_a_ticket_that_the_swarm_did_not_sign_is_a_forgery() -> None:
    forged = Ticket(Invitation(SWARM.peer_id, bytes(8), INVITATION.key, uses=9), SECRET)
    with pytest.raises(BadTicket, match="forgery"):
        Ticket.parse(str(forged))


@pytest.mark.parametrize(
    ("relays", "peers", "line"),
    [
        (("https://r.example",) * 4, (), "4 relays"),
        ((), (BootstrapPeer(PEER),) * 5, "5 peers"),
        ((), (BootstrapPeer(PEER, (("192.0.2.1", 1),) * 7),), "more than 6 addresses"),
        ((), (BootstrapPeer(PEER, (("192.0.2.1", 0),)),), "no port"),
        ((), (BootstrapPeer(PEER, (("a b", 1),)),), "neither a host name"),
        ((), (BootstrapPeer(PEER, (("é.example", 1),)),), "neither a host name"),
        (("ftp://r.example",), (), "no relay URL"),
        (("https://r.example/" + "a" * 300,), (), "relay URL of"),
        ((), (BootstrapPeer(PEER, (("a" * 253, 1),) * 6),) * 4, f"at most {MAX_BYTES}"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_is_made(
    relays: tuple[str, ...], peers: tuple[BootstrapPeer, ...], line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        Ticket(INVITATION, SECRET, relays, peers)


def test_the_secret_must_be_the_invitations() -> None:
    with pytest.raises(ValueError, match="not this invitation's"):
        Ticket(INVITATION, b"\x00" * 32)
    with pytest.raises(ValueError, match="32 bytes"):
        Ticket(INVITATION, b"\x00")


def test_an_interface_means_nothing_elsewhere() -> None:
    ticket = Ticket(INVITATION, SECRET, (), (BootstrapPeer(PEER, (("fe80::1%eth0", 1),)),))
    assert Ticket.parse(str(ticket)).peers[0].addresses == (("fe80::1", 1),)


@pytest.mark.parametrize(
    ("text", "meant"),
    [(TEXT, True), ("  SWARM1ABC", True), ("swarm9", True), ("model.gguf", False), ("swarm.gguf", False), ("", False)],
)
def test_a_ticket_is_told_from_a_file(text: str, meant: bool) -> None:
    assert looks_like_ticket(text) is meant
