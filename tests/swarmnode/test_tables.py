from __future__ import annotations

from typing import Any

import msgspec
import pytest

from swarmnode.gate_view import GateProgress
from swarmnode.status import GenerationStatus, MemberStatus, NodeStatus, PeerStatus, SwarmStatus, TransportStatus
from swarmnode.tables import ProgressBar, node_table, peers_table, show

NODE = NodeStatus(
    peer="p" * 56,
    name="here",
    version="1",
    role="worker",
    nat="easy",
    addresses=["[fd00::2]:4433", "192.0.2.2:4433"],
    relays=["https://one.example"],
    model="m",
    holdings={},
    memory=1000,
    uptime_s=1.0,
    peers=[],
    relay_problems={"https://two.example": "cannot connect to [2001:db8::1]:443: refused"},
)
PEER = PeerStatus("q" * 56, "[/] [red]evil", "worker", "relay", "no answer at [::1]:9", 1.0, 0.0, "", 0, 0, {}, 1.0)


def shown(capsys: pytest.CaptureFixture[str], table: Any) -> str:
    show(table)
    return capsys.readouterr().out


def test_a_node_with_its_relays_and_all_of_its_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, node_table(msgspec.to_builtins(NODE)))
    assert "[fd00::2]:4433, 192.0.2.2:4433" in out
    assert "easy" in out
    assert "https://one.example" in out
    assert "https://two.example: cannot connect to [2001:db8::1]:443: refused" in out


def test_what_was_refused_is_one_line_and_none_where_nothing_was(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = TransportStatus(disco={"pings_in": 9, "forged": 0, "rationed": 0}, socket={"unknown": 0, "relay_down": 4})
    assert "refused" not in shown(
        capsys, node_table(msgspec.to_builtins(msgspec.structs.replace(NODE, transport=quiet, relay_problems={})))
    )
    disco = {"pings_in": 9, "forged": 3, "malformed": 1, "replayed": 2, "not_admitted": 17, "rationed": 5}
    refused = TransportStatus(quic={"flooded": 2}, disco=disco, socket={"unknown": 7})
    out = shown(capsys, node_table(msgspec.to_builtins(msgspec.structs.replace(NODE, transport=refused))))
    (line,) = [line for line in out.splitlines() if line.startswith("refused")]
    assert line.split(maxsplit=1)[1].strip() == (
        "3 forged, 1 malformed, 2 replayed, 17 of peers not admitted, 5 of strangers above the ration,"
        " 7 unknown datagrams, 2 that flooded"
    )


def test_what_a_peer_calls_itself_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, peers_table([msgspec.to_builtins(PEER)]))
    assert "[/] [red]evil" in out
    assert "no answer at [::1]:9" in out


def test_a_node_of_a_swarm_with_its_members_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    member = MemberStatus("m" * 56, "lap[red]top", "worker", 8 << 30, True)
    plan: dict[str, Any] = {"workers": {"m" * 56: 912}, "local": 9, "uncovered": 3}
    swarm = SwarmStatus(
        "s" * 56, True, [member], budget=4_000_000, held_bytes=1_000_000, trouble="disk full", plan=plan
    )
    status = NodeStatus("p", "n", "1", "backbone", "easy", [], [], "m", {}, 1, 1.0, [], swarm=swarm)
    show(node_table(msgspec.to_builtins(status)))
    out = capsys.readouterr().out
    assert "ssssssss, founded here" in out
    assert "mmmmmmmm lap[red]top (worker)" in out
    assert "1.0 MB of 4.0 MB used" in out
    assert "experts here: 9; mmmmmmmm: 912; elsewhere: 3" in out
    assert "disk full" in out


@pytest.mark.parametrize("kind", [ProgressBar, GateProgress])
def test_bars_are_for_terminals(
    kind: type[ProgressBar | GateProgress], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    for terminal, enabled in (("", True), ("1", False), ("1", True)):
        monkeypatch.setenv("FORCE_COLOR", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with kind(enabled=enabled) as bar:
            bar.update("backbone", 1, 4)
            bar.update("backbone", 2, 4)
            if isinstance(bar, GateProgress):
                bar.update_one("qwen3moe", 1, 2)
        out, error = capsys.readouterr()
        assert not out
        assert ("backbone" in error) == (terminal == "1" and enabled)
        assert ("qwen3moe" in error) == (terminal == "1" and enabled and kind is GateProgress)


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("", "partial mode, INT8/F16 on the wire"),
        ("own", "partial mode, INT8/F16 on the wire"),
        ("founder", "partial mode, INT8/F16 on the wire (by the founder's gate)"),
        ("founder: KL 1 > 0.001", "partial mode, INT8/F16 on the wire; failed the founder's gate: KL 1 > 0.001"),
        ("own: KL 1 > 0.001", "partial mode, INT8/F16 on the wire; failed its gate: KL 1 > 0.001"),
    ],
)
def test_whose_gate_allows_the_wire(capsys: pytest.CaptureFixture[str], verdict: str, said: str) -> None:
    generation = GenerationStatus(False, 0, 0.0, mode="partial", wires={"0": "INT8/F16"}, verdict=verdict)
    out = shown(capsys, node_table(msgspec.to_builtins(msgspec.structs.replace(NODE, generation=generation))))
    (line,) = [line for line in out.splitlines() if line.startswith("experts asked")]
    assert line.split(maxsplit=2)[2].strip() == said
