"""What a node is told: flags, environment and a TOML file become one frozen NodeConfig, once, at the edge.

Precedence: a flag, then SWARMNODE_… in the environment (typer reads both), then the file. Nothing here starts anything.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import platformdirs

from swarmnode.coordination.view_rules import ALLOW_VIEW, AllowView
from swarmnode.errors import UsageError
from swarmnode.membership import Ticket
from transport.config import TransportConfig
from transport.emulation import LinkEmulation
from transport.errors import LocalFault
from transport.identity import PeerId
from transport.log_format import FORMATS, LEVELS, LogFormat
from transport.proto.relay_url import parse_relay_url
from transport.udp_socket import any_host

Role = Literal["backbone", "worker", "both"]
Address = tuple[str, int]
WireWish = Literal["f32", "f16", "int8", "fp8", "auto"]
MAX_THREADS = 512  # what ggml's thread pool takes
MAX_PARALLEL = 64  # generations at once: each has its own context window in memory
WIRE_WISHES: tuple[WireWish, ...] = ("f32", "f16", "int8", "fp8", "auto")
ROLES: tuple[Role, ...] = ("backbone", "worker", "both")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([kmgt]?)(?:i?b)?", re.ASCII)

FILE_KEYS = frozenset(  # options of `up`; written with dashes or underscores
    [
        "name",
        "model",
        "experts",
        "role",
        "listen",
        "peers",
        "relays",
        "relay_ca",
        "port_mapping",
        "advertise",
        "open",
        "mode",
        "wire",
        "threads",
        "context",
        "batch",
        "quic",
        "emulate",
        "local_experts",
        "device",
        "gpu_layers",
        "source",
        "ticket",
        "memory",
        "replicas",
        "lan",
        "speculate",
        "parallel",
        "lanes",
        "force",
        "allow_view",
        "metrics",
        "log_format",
        "log_level",
    ]
)
FILE_LISTS = frozenset(["advertise", "peers", "relays"])  # several values each
FILE_ALIASES = {"peer": "peers", "relay": "relays"}  # as the options are called; one value will do


def default_state_dir() -> Path:
    """Where a node keeps its key and its slices unless told otherwise."""
    return Path(os.environ.get("SWARMNODE_STATE") or platformdirs.user_state_path("swarmnode"))


def default_cache_dir() -> Path:
    """Where packs of GGUF files given directly are kept."""
    return Path(os.environ.get("SWARMNODE_CACHE") or platformdirs.user_cache_path("swarmnode"))


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A peer and where to reach it, written PEERID@HOST:PORT; PEERID alone is reached through the relays."""

    peer: PeerId
    address: Address | None = None

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """UsageError with the form it should have."""
        peer, at, address = text.partition("@")
        try:
            return cls(PeerId.parse(peer), parse_address(address) if at else None)
        except LocalFault as error:
            form = "write PEERID@HOST:PORT, as the other node prints it, or PEERID alone with a --relay"
            raise UsageError(f"peer {text[:80]!r}: {error}; {form}") from None

    @property
    def addresses(self) -> list[Address]:
        """Where to dial it directly."""
        return [self.address] if self.address is not None else []

    def __str__(self) -> str:
        return str(self.peer) if self.address is None else f"{self.peer}@{format_address(self.address)}"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node, complete and checked.

    A node of a swarm (`swarm`) founds it with a model, or joins with a `ticket`, by what it remembers, or through an
    open door; `memory` is then what it gives to experts, in bytes, None for a share of what is free, and `replicas` how
    many copies of an expert its founder wants on workers. Other nodes are wired by hand: `experts`, None for a pure
    backbone, and `peers`. `mode` "exact" returns every expert's raw F32 row (the local run's bits),
    "partial" one weighted sum per worker and token. `wires` are the types of x on the way out and of the answers on the
    way back; "auto" is the cheapest that the gate passed. `speculate` is what drafts tokens: "ngram", a small GGUF of
    the same vocabulary, or "off"; None is "ngram" where bits need not be the local run's. `parallel` generations run at
    once, spread over `lanes` llama contexts; `batch` tokens of a prompt go in one step, 0 for what suits the link (and
    512 in exact mode). `device` is where experts are computed: "auto" (a GPU where llama.cpp was built for one), "cpu",
    or ggml's name of a device. `force`: run the model even where its gate failed.
    `allow_view`: which members may see this node's status (coordination/view_rules.py).
    `metrics` is where Prometheus may read the node's figures, None for nowhere; `log_format` and `log_level` are as in
    transport/log_format.py.
    """

    state_dir: Path
    name: str
    role: Role
    model: Path | None
    swarm: bool = False
    ticket: Ticket | None = None
    memory: int | None = None
    replicas: int = 2
    lan: bool = True
    experts: str | None = None
    source: Path | None = None
    listen: Address = ("127.0.0.1", 0)
    peers: tuple[PeerAddress, ...] = ()
    open: bool = False
    mode: Literal["exact", "partial"] = "exact"
    wires: tuple[WireWish, WireWish] = ("f32", "f32")
    speculate: Path | Literal["ngram", "off"] = "off"
    parallel: int = 1
    lanes: int = 1
    threads: int = 1
    context: int = 0
    batch: int = 0
    local_experts: bool = True
    gpu_layers: int = 0
    device: str = "auto"
    force: bool = False
    allow_view: AllowView = "founder"
    metrics: Address | None = None
    log_format: LogFormat = "text"
    log_level: str = "warning"
    transport: TransportConfig = field(default_factory=TransportConfig)

    @property
    def is_backbone(self) -> bool:
        """Does it generate?"""
        return self.role != "worker"

    @property
    def is_worker(self) -> bool:
        """Does it serve experts?"""
        return self.role != "backbone"

    @property
    def founds_swarm(self) -> bool:
        """Is it the one that brings the model, and plans?"""
        return self.swarm and self.model is not None


def build_config(given: Mapping[str, Any], file: Path | None, *, state_dir: Path) -> NodeConfig:
    """Merge flags (those not None) over the file. UsageError names the first value that cannot be meant."""
    values = dict(_read_file(file)) if file is not None else {}
    values.update({k: v for k, v in given.items() if v is not None and v != []})
    model, experts = values.get("model"), values.get("experts")
    if model is not None and not str(model).strip():
        raise UsageError("--model is empty: give a GGUF or a model pack, or leave it out")
    ticket = Ticket.parse(str(values["ticket"])) if values.get("ticket") else None
    swarm = _is_of_a_swarm(values, ticket, state_dir)
    founds = swarm and bool(model)
    invited = ticket.invitation.role if ticket is not None else "worker"
    joins_as = "backbone" if invited == "backbone" else "worker"
    named = values.get("role") or ("worker" if experts else joins_as if swarm and not founds else "backbone")
    role = next((r for r in ROLES if r == named), None)
    if role is None:
        raise UsageError(f"--role {named}: say backbone, worker or both")
    if swarm and (experts or values.get("peers")):
        what = "--experts" if experts else "--peer"
        raise UsageError(f"{what} wires nodes by hand; a node of a swarm is told by its founder: leave {what} out")
    if founds and role == "worker":
        raise UsageError("--role worker with --model: who brings the model generates; a worker needs a ticket only")
    if role == "backbone" and experts:
        raise UsageError(f"--role backbone with --experts {experts}: a backbone serves none; say --role both")
    if role != "backbone" and not experts and not swarm:
        raise UsageError("a worker needs --experts: all · 2/3 · 0-4,9 · 0:0-4;2:1,3")
    mode = str(values.get("mode", "exact"))
    if mode not in ("exact", "partial"):
        raise UsageError(f"--mode {mode}: say exact or partial")
    wires = parse_wires(str(values.get("wire", "f32")))
    if mode == "exact" and wires != ("f32", "f32"):
        raise UsageError("--mode exact needs --wire f32: nothing else gives the local run's bits; say --mode partial")
    parallel = _number(values, "parallel", 1, 1, MAX_PARALLEL)
    try:
        emulation = LinkEmulation.parse(str(values["emulate"])) if values.get("emulate") else None
        relays = tuple(parse_relay_url(str(url)).text for url in values.get("relays", ()))
        transport = TransportConfig(
            engine=str(values.get("quic", "qh3")),
            emulation=emulation,
            relays=relays,
            relay_ca=authorities(values["relay_ca"]) if values.get("relay_ca") else None,
            port_mapping=bool(values.get("port_mapping", True)),
            advertise=_advertised(values.get("advertise", ())),
        )
    except LocalFault as error:
        raise UsageError(str(error)) from None
    source = values.get("source")
    peers = tuple(PeerAddress.parse(str(p)) for p in values.get("peers", ()))
    for known in peers:
        if known.address is None and not relays:
            raise UsageError(f"--peer {known.peer.short}…: give its address, PEERID@HOST:PORT, or a --relay URL")
    return NodeConfig(
        state_dir=state_dir,
        name=str(values.get("name") or _host_name())[:64],
        role=role,
        model=_path(model, "model") if model else None,
        swarm=swarm,
        ticket=ticket,
        memory=parse_size(values["memory"], "memory") if values.get("memory") is not None else None,
        replicas=_number(values, "replicas", 2, 1, 8),
        lan=bool(values.get("lan", True)),
        experts=str(experts) if experts else None,
        source=_path(source, "source") if source else None,
        listen=_listen(values.get("listen"), peers, transport, swarm=swarm),
        peers=peers,
        open=bool(values.get("open", False)),
        mode="exact" if mode == "exact" else "partial",
        wires=wires,
        speculate=_speculate(values.get("speculate"), mode),
        parallel=parallel,
        lanes=_lanes(values, parallel),
        threads=_number(values, "threads", _default_threads(), 1, MAX_THREADS),
        context=_number(values, "context", 0, 0, 1 << 24),
        batch=_number(values, "batch", 0, 0, 1 << 16),
        local_experts=bool(values.get("local_experts", True)),
        device=str(values.get("device", "auto")),
        gpu_layers=_number(values, "gpu_layers", 0, 0, 1 << 16),
        force=bool(values.get("force", False)),
        allow_view=_allow_view(values),
        metrics=_metrics(values.get("metrics")),
        log_format="json" if _one_of(values, "log_format", "text", FORMATS) == "json" else "text",
        log_level=_one_of(values, "log_level", "warning", LEVELS),
        transport=transport,
    )


def parse_address(text: str) -> Address:
    """HOST:PORT or [IPV6]:PORT."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise UsageError(f"address {text!r}: write HOST:PORT, for example 127.0.0.1:4433 or [::1]:4433")
    return host, int(port)


def parse_wires(text: str) -> tuple[WireWish, WireWish]:
    """The types of rows on the wire, OUT/BACK, or one name for both ways. UsageError names what is known."""
    out, slash, back = text.lower().partition("/")
    found = [next((wish for wish in WIRE_WISHES if wish == name), None) for name in (out, back if slash else out)]
    if found[0] is None or found[1] is None or (slash and "auto" in found):
        raise UsageError(f"--wire {text[:40]}: give one of {', '.join(WIRE_WISHES)}, or two types as OUT/BACK")
    return found[0], found[1]


def _lanes(values: Mapping[str, Any], parallel: int) -> int:
    lanes = _number(values, "lanes", min(2, parallel), 1, MAX_PARALLEL)
    if lanes > parallel:
        raise UsageError(f"--lanes {lanes}: more contexts than generations at once; give --parallel {lanes} too")
    return lanes


def _speculate(value: Any, mode: str) -> Path | Literal["ngram", "off"]:
    """Drafts change the shape of batches, and so bits: not where the local run's are promised, unless asked for."""
    if value is None:
        return "off" if mode == "exact" else "ngram"
    if value in ("ngram", "off"):
        return "ngram" if value == "ngram" else "off"
    path = _path(value, "speculate")
    if not path.is_file():
        raise UsageError(
            f"--speculate {value}: say ngram, off, or give the GGUF of a small model of the same vocabulary"
        )
    return path


def _metrics(value: Any) -> Address | None:
    if not value:
        return None
    try:
        return parse_address(str(value))
    except UsageError as error:
        raise UsageError(f"--metrics: {error}") from None


def _allow_view(values: Mapping[str, Any]) -> AllowView:
    value = _one_of(values, "allow_view", "founder", ALLOW_VIEW)
    return next(known for known in ALLOW_VIEW if known == value)


def _one_of(values: Mapping[str, Any], key: str, default: str, known: Sequence[str]) -> str:
    value = str(values.get(key, default))
    if value not in known:
        raise UsageError(f"--{key.replace('_', '-')} {value[:40]}: say {', '.join(known[:-1])} or {known[-1]}")
    return value


def authorities(value: Any) -> Path:
    """The file of --relay-ca. UsageError when no certificate can be read from it."""
    import ssl  # noqa: PLC0415  only where such a file is given

    path = _path(value, "relay-ca")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        why = "no certificate in PEM form is in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise UsageError(f"--relay-ca {path}: {why}") from None
    return path


def format_address(address: Address) -> str:
    """The inverse of `parse_address`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback_host(host: str) -> bool:
    """Does this name or literal mean this machine alone?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reachable_host(host: str) -> str:
    """What to tell others of a socket bound to "any address": the address of the interface with the default route.

    Nothing is sent: connecting a UDP socket only asks the routing table (192.0.2.1 is reserved for documentation).
    """
    if host not in ("0.0.0.0", "::"):
        return host
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        found: str = probe.getsockname()[0]
        return found
    return host


def _advertised(values: Sequence[Any]) -> tuple[Address, ...]:
    try:
        return tuple(parse_address(str(value)) for value in values)
    except UsageError as error:
        raise UsageError(f"--advertise: {error}") from None


def _is_of_a_swarm(values: Mapping[str, Any], ticket: Ticket | None, state_dir: Path) -> bool:
    """With a ticket; with a model and nothing that is wired by hand; as before; or through an open door."""
    if ticket is not None:
        if values.get("model"):
            raise UsageError("a ticket and --model: the swarm has its model; leave --model out to join it")
        return True
    if values.get("model"):
        return not values.get("experts") and not values.get("peers") and values.get("role") != "worker"
    if values.get("experts") or values.get("peers"):
        raise UsageError("which model? give --model FILE (a GGUF or a model pack made by swarmnode onboard)")
    if values.get("open") or (state_dir / "swarm").is_dir():
        return True
    raise UsageError("give --model FILE to found a swarm, or the ticket that swarmnode ticket prints there to join one")


def parse_size(value: Any, what: str) -> int:
    """Bytes from a text such as 800M, 8G, 1.5 GiB or 1048576. UsageError with examples."""
    match = _SIZE.fullmatch(str(value).strip().lower())
    size = float(match[1]) * 1024 ** " kmgt".index(match[2] or " ") if match else 0.0
    if not 1 <= size < 1 << 60:
        raise UsageError(f"--{what} {str(value)[:40]}: give a size such as 800M or 8G")
    return int(size)


def _listen(given: Any, peers: Sequence[PeerAddress], transport: TransportConfig, *, swarm: bool) -> Address:
    """Where to listen: this machine only, unless told otherwise, or a peer, a relay or what we advertise is
    elsewhere, or others are to join."""
    hosts = [known.address[0] for known in peers if known.address is not None]
    hosts += [parse_relay_url(url).host for url in transport.relays]
    hosts += [host for host, _ in transport.advertise]
    elsewhere = [host for host in hosts if not is_loopback_host(host)]
    anywhere = swarm or bool(elsewhere)
    listen = parse_address(str(given)) if given is not None else (any_host() if anywhere else "127.0.0.1", 0)
    if transport.advertise and not listen[1]:
        told = format_address(transport.advertise[0])
        raise UsageError(f"--advertise {told}: give --listen with a port too, the one that a router forwards to")
    if elsewhere and is_loopback_host(listen[0]):  # only where it was given
        raise UsageError(f"--listen {given} reaches this machine only, not {elsewhere[0]}: give --listen 0.0.0.0:0")
    return listen


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as TOML: {error}") from None
    values = _by_known_keys(path, values)
    if not isinstance(values.get("peers", []), list):
        raise UsageError(f"{path}: peers is a list of PEERID@HOST:PORT")
    if not isinstance(values.get("relays", []), list):
        raise UsageError(f"{path}: relays is a list of URLs")
    if not isinstance(values.get("advertise", []), list):
        raise UsageError(f"{path}: advertise is a list of HOST:PORT")
    for key in ("open", "local_experts", "port_mapping", "lan", "force"):
        if not isinstance(values.get(key, True), bool):
            raise UsageError(f"{path}: {key} is true or false, not {values[key]!r}")
    return values


def _by_known_keys(path: Path, written: Mapping[str, Any]) -> dict[str, Any]:
    """The values under the keys that `build_config` reads. UsageError where a key is none, or is there twice."""
    values: dict[str, Any] = {}
    for key, value in written.items():
        name = key.replace("-", "_")
        known = FILE_ALIASES.get(name, name)
        if known not in FILE_KEYS:
            names = ", ".join(sorted(one.replace("_", "-") for one in FILE_KEYS))
            raise UsageError(f"{path}: unknown key {key[:40]}; known: {names}")
        if known in values:
            raise UsageError(f"{path}: {key} is there twice, under two names")
        values[known] = [value] if name in FILE_ALIASES and not isinstance(value, list) else value
    return values


def _path(value: Any, what: str) -> Path:
    text = str(value)
    try:
        if "\0" in text or len(text) > 4096:
            raise ValueError("no file has such a name")
        return Path(text).expanduser()
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--{what} {text[:80]!r}: {error}") from None


def _number(values: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"--{key.replace('_', '-')} {value}: give a whole number from {low} to {high}")
    return value


def _default_threads() -> int:
    """All cores but one: the network needs one, and OpenMP threads that wait for each other are slow."""
    return max(1, (os.cpu_count() or 2) - 1)


def _host_name() -> str:
    return socket.gethostname()
