from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from swarmnode.cli.up import up
from swarmnode.config import (
    FILE_KEYS,
    NodeConfig,
    PeerAddress,
    _read_file,
    build_config,
    format_address,
    parse_address,
    reachable_host,
)
from swarmnode.errors import UsageError
from transport.identity import Identity
from transport.udp_socket import any_host

PEER = Identity.generate(bytes(32)).peer_id


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        f'model = "a.gguf"\nexperts = "1/2"\nthreads = 3\nmode = "partial"\nwire = "f16"\nopen = true\n'
        f'listen = "[::]:4433"\npeers = ["{PEER}@10.0.0.1:4433"]\nemulate = "rtt=10ms"\n'
    )
    config = build_config({"threads": 5, "experts": None, "peers": []}, file, state_dir=tmp_path)
    assert (config.threads, config.experts, config.mode, config.open) == (5, "1/2", "partial", True)
    assert config.wires == ("f16", "f16")
    assert config.role == "worker"
    assert config.listen == ("::", 4433)
    assert config.peers == (PeerAddress(PEER, ("10.0.0.1", 4433)),)
    assert config.transport.emulation is not None
    assert config.transport.emulation.rtt == 0.01


def test_roles() -> None:
    def config(**given: object):  # type: ignore[no-untyped-def]
        return build_config({"model": "m", **given}, None, state_dir=Path())

    assert config().is_backbone
    assert not config().is_worker
    assert config(experts="all").is_worker
    assert not config(experts="all").is_backbone
    both = config(experts="all", role="both")
    assert both.is_worker
    assert both.is_backbone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 3\nthreads = 'x'", "--threads x"),
        ("color = 'red'", "unknown key color; known: advertise, .*, log-format, log-level, "),
        ("log-format = 'text'\nlog_format = 'json'", "log_format is there twice, under two names"),
        ("relay = 'http://a'\nrelays = []", "relays is there twice"),
        ("model = 'm'\nrelay = 8080", "'8080' is no relay URL"),
        ("state = 's'", "unknown key state"),
        ("model = ", "cannot be read as TOML"),
        ("model = 'm'\npeers = 'p'", "peers is a list"),
        ("model = 'm'\nopen = 1", "open is true or false"),
        ("model = 'm'\nport_mapping = 'no'", "port_mapping is true or false"),
        ("model = 'm'\nrelays = 'https://relay.example'", "relays is a list"),
        ("model = 'm'\nadvertise = '11.5.5.5:1'", "advertise is a list"),
        ("model = 'm'\nrelays = [8080]", "'8080' is no relay URL"),
        ("model = 'm'\nrole = 'backbone'\nexperts = 'all'", "say --role both"),
        ("model = '~nobody-of-that-name/m'", "--model"),
        ("model = 'm'\nsource = \"a\\u0000b\"", "no file has such a name"),
        ("model = 'm'\nthreads = 513", "1 to 512"),
        ("model = 'm'\nmode = 'fast'", "say exact or partial"),
    ],
)
def test_files_that_cannot_be_meant(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        build_config({}, file, state_dir=tmp_path)


def test_a_file_takes_every_option_of_up_by_its_name(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_bytes(Identity.generate().certificate_pem)
    texts = {
        "model": "m",
        "memory": "1G",
        "relay": "http://127.0.0.1:1",
        "relay-ca": str(authority),
        "listen": "127.0.0.1:1",
        "role": "both",
        "metrics": "127.0.0.1:9464",
        "log-format": "json",
        "emulate": "rtt=1ms",
        "mode": "partial",
    }
    wanted = {"log_format": "json", "log_level": "debug", "gpu_layers": 3, "local_experts": False, "lan": False}
    numbers = {"log-level": "debug", "gpu-layers": 3, "local_experts": False, "lan": False, "port-mapping": False}
    file = tmp_path / "node.toml"
    file.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in {**texts, **numbers}.items()))
    config = build_config({}, file, state_dir=tmp_path)
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.transport.relays == ("http://127.0.0.1:1",)
    on_the_command_line_alone = {"config", "state", "headless", "as_json", "stop_on_eof"}
    for name in set(inspect.signature(up).parameters) - on_the_command_line_alone:
        for key in {name.strip("_"), name.strip("_").replace("_", "-")}:
            file.write_text(f"{key} = {'[]' if name in ('peer', 'relay', 'advertise') else 'false'}")
            assert set(_read_file(file)) <= FILE_KEYS


@pytest.mark.parametrize("text", ["127.0.0.1:4433", "[::1]:0", "example.org:65535"])
def test_addresses_round_trip(text: str) -> None:
    assert format_address(parse_address(text)) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:65536", "::1:80", "host:-1", "host:8o"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text)


def test_where_to_listen_follows_where_the_peers_are() -> None:
    def listen(*peers: str, given: str | None = None) -> tuple[str, int]:
        flags = {"model": "m", "listen": given, "peers": [f"{PEER}@{peer}" for peer in peers]}
        return build_config(flags, None, state_dir=Path()).listen

    assert listen() == (any_host(), 0)  # a founder: others are to join it
    assert listen("127.0.0.1:9", "[::1]:9") == ("127.0.0.1", 0)
    assert listen("127.0.0.1:9", "10.0.0.1:9") == (any_host(), 0)
    assert listen("10.0.0.1:9", given="[::]:4433") == ("::", 4433)
    with pytest.raises(UsageError, match=r"reaches this machine only, not 10\.0\.0\.1:"):
        listen("10.0.0.1:9", given="127.0.0.1:0")


def test_where_to_listen_follows_where_the_relays_are() -> None:
    def listen(*relays: str, given: str | None = None) -> tuple[str, int]:
        flags = {"model": "m", "experts": "all", "listen": given, "relays": list(relays)}
        return build_config(flags, None, state_dir=Path()).listen

    assert listen("http://127.0.0.1:8080", "http://localhost") == ("127.0.0.1", 0)
    assert listen("http://127.0.0.1:8080", "https://relay.example") == (any_host(), 0)
    with pytest.raises(UsageError, match=r"reaches this machine only, not relay\.example"):
        listen("https://relay.example", given="127.0.0.1:0")


def test_relays_reach_the_transport_in_canonical_form(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_bytes(Identity.generate().certificate_pem)
    file = tmp_path / "node.toml"
    file.write_text(
        f'model = "m"\nrelays = ["HTTPS://Relay.Example:443/", "http://127.0.0.1:8080"]\n'
        f'relay_ca = "{authority}"\nport_mapping = false\npeers = ["{PEER}"]\n'
    )
    config = build_config({}, file, state_dir=tmp_path)
    assert config.transport.relays == ("https://relay.example", "http://127.0.0.1:8080")
    assert config.transport.relay_ca == authority
    assert not config.transport.port_mapping
    assert config.peers == (PeerAddress(PEER),)
    flags = {"relays": ["http://localhost:1"], "port_mapping": True}
    config = build_config(flags, file, state_dir=tmp_path)
    assert config.transport.relays == ("http://localhost:1",)
    assert config.transport.port_mapping
    assert build_config({"model": "m"}, None, state_dir=tmp_path).transport.relays == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peers": [str(PEER)]}, f"--peer {PEER.short}…: give its address, PEERID@HOST:PORT, or a --relay URL"),
        ({"relays": ["relay.example"]}, "'relay.example' is no relay URL; write https://relay.example or"),
        ({"relays": [""]}, "'' is no relay URL"),
        ({"relays": ["http://127.0.0.1:8080"], "relay_ca": "/no/such/file"}, "--relay-ca /no/such/file: No such file"),
        ({"relays": ["http://127.0.0.1:8080"], "relay_ca": __file__}, "no certificate in PEM form is in it"),
    ],
)
def test_relays_that_cannot_be_meant(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        build_config({"model": "m", **given}, None, state_dir=Path())


def test_what_others_are_told_of_any_address() -> None:
    assert reachable_host("10.1.2.3") == "10.1.2.3"
    assert reachable_host("0.0.0.0") != ""


def test_peer_text() -> None:
    text = f"{PEER}@127.0.0.1:9"
    assert str(PeerAddress.parse(text)) == text
    assert PeerAddress.parse(text).addresses == [("127.0.0.1", 9)]
    assert str(PeerAddress.parse(str(PEER))) == str(PEER)
    assert PeerAddress.parse(str(PEER)).addresses == []
    for bad in ("", "x", "@1:1", f"{PEER}@", f"{str(PEER)[:-1]}@1.1.1.1:1", f"{'a' * 56}@1.1.1.1:1"):
        with pytest.raises(UsageError):
            PeerAddress.parse(bad)


def test_addresses_to_advertise(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('model = "m"\nlisten = "0.0.0.0:4433"\nadvertise = ["11.5.5.5:4433", "[2001:db8::5]:4433"]\n')
    config = build_config({}, file, state_dir=tmp_path)
    assert config.transport.advertise == (("11.5.5.5", 4433), ("2001:db8::5", 4433))
    assert build_config({"advertise": ["11.6.6.6:1"]}, file, state_dir=tmp_path).transport.advertise == (
        ("11.6.6.6", 1),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"advertise": ["11.5.5.5:1"]}, "--advertise 11.5.5.5:1: give --listen with a port too"),
        ({"advertise": ["11.5.5.5:1"], "listen": "0.0.0.0:0"}, "--advertise 11.5.5.5:1: give --listen with a port"),
        ({"advertise": ["11.5.5.5"]}, "--advertise: address '11.5.5.5': write HOST:PORT"),
        ({"advertise": ["home.example:4433"]}, "home.example:4433: not an IP address"),
        ({"advertise": ["11.5.5.5:0"]}, "11.5.5.5:0: a port is 1 to 65535"),
        ({"advertise": ["0.0.0.0:4433"]}, "0.0.0.0:4433: no datagram"),
        ({"advertise": ["224.0.0.1:4433"]}, "224.0.0.1:4433: no datagram"),
        ({"advertise": ["[fe80::1]:4433"]}, "[fe80::1]:4433: link-local"),
        ({"advertise": [f"11.5.5.5:{port}" for port in range(1, 10)]}, "at most 8"),
        ({"advertise": ["11.5.5.5:1"], "listen": "127.0.0.1:4433"}, "reaches this machine only, not 11.5.5.5"),
    ],
)
def test_addresses_that_cannot_be_advertised(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        build_config({"model": "m", **given}, None, state_dir=Path())


@pytest.mark.parametrize(
    ("text", "wires"),
    [("f16", ("f16", "f16")), ("INT8/f16", ("int8", "f16")), ("auto", ("auto", "auto")), ("f32/fp8", ("f32", "fp8"))],
)
def test_wire_types_of_both_ways(text: str, wires: tuple[str, str]) -> None:
    config = build_config({"model": "m", "mode": "partial", "wire": text}, None, state_dir=Path())
    assert config.wires == wires


@pytest.mark.parametrize("text", ["f8", "f16/", "/f16", "int8/f16/f16", "", "int8//int8", "auto/f16"])
def test_unknown_wire_types_are_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"--wire .*f32, f16, int8, fp8, auto") as caught:
        build_config({"model": "m", "mode": "partial", "wire": text}, None, state_dir=Path())
    assert "\n" not in str(caught.value)


def test_drafting_is_off_where_bits_are_promised(tmp_path: Path) -> None:
    def config(**given: object) -> NodeConfig:
        return build_config({"model": "m", **given}, None, state_dir=tmp_path)

    assert config().speculate == "off"
    assert config(mode="partial").speculate == "ngram"
    assert config(mode="partial", speculate="off").speculate == "off"
    assert config(speculate="ngram").speculate == "ngram"
    draft = tmp_path / "draft.gguf"
    with pytest.raises(UsageError, match="--speculate"):
        config(speculate=str(draft))
    draft.touch()
    assert config(speculate=str(draft)).speculate == draft


def test_lanes_never_outnumber_the_generations() -> None:
    def config(**given: object) -> NodeConfig:
        return build_config({"model": "m", **given}, None, state_dir=Path())

    assert (config().parallel, config().lanes) == (1, 1)
    assert (config(parallel=4).parallel, config(parallel=4).lanes) == (4, 2)
    with pytest.raises(UsageError, match="--lanes 5"):
        config(parallel=4, lanes=5)
