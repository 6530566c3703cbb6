"""The swarms that `wan.py` measures: processes of this machine behind an emulated link, direct or over a relay alone.

    direct              a backbone and workers on 127.0.0.1, wired by hand
    relay               the backbone speaks IPv6 only and the workers IPv4 only: the relay between them is all they have
    with experts kept   a founder with a budget of its own, and members that hold the rest; it begins with what the
                        router chose in an earlier run (`learn_routing`), as a founder that has served for a while

The link is emulated on the backbone's side, below QUIC, for every path: its whole round trip and its rate each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swarmnode.bench.relay_process import RelayProcess
from swarmnode.bench.swarm_start import all_started
from swarmnode.demo import BATCH, CONTEXT
from swarmnode.errors import SwarmnodeError, UsageError
from swarmnode.local_swarm import FoundedSwarm, LocalSwarm, NodeProcess
from swarmnode.onboard import ModelPack
from transport.identity import Identity

PathName = Literal["direct", "relay"]
PATIENCE_S = 120.0  # until members hold the experts: over a slow link they are fetched through it
LEARN_TOKENS = 24  # after each prompt: its own tokens are most of what is learnt from
_POLL_S = 0.1
_SIZES = ("--context", str(CONTEXT), "--batch", str(BATCH))
_KINDS = {"direct": "loopback", "relay": "relay"}


@dataclass(frozen=True, slots=True)
class SwarmSetting:
    """One swarm. `mbit` None is without a limit; `flags` are the backbone's; `kept` is the share of all experts' bytes
    that the backbone may hold itself, 0 for none; `threads` are each node's."""

    rtt_ms: float
    mbit: float | None = None
    path: PathName = "direct"
    workers: int = 1
    flags: tuple[str, ...] = ()
    kept: float = 0.0
    threads: int = 1

    @property
    def emulation(self) -> list[str]:
        """The flag of `up` for the link, if there is anything to emulate."""
        parts = [f"rtt={self.rtt_ms:g}ms"] if self.rtt_ms else []
        parts += [f"rate={self.mbit:g}mbit"] if self.mbit is not None else []
        return ["--emulate", ",".join(parts)] if parts else []


@contextlib.asynccontextmanager
async def wan_swarm(
    folder: Path, pack: ModelPack, setting: SwarmSetting, routing: bytes | None = None
) -> AsyncIterator[NodeProcess]:
    """Start it all, yield the backbone when every expert is held and the path is the one that was asked for, end it.

    `routing` is what a founder knows of the router's choices. SwarmnodeError where something does not come up.
    """
    async with contextlib.AsyncExitStack() as stack:
        relay: RelayProcess | None = None
        if setting.path == "relay":
            if not has_ipv6():
                raise UsageError("the relay path needs IPv6 on loopback: it is what parts the two nodes here")
            relay = await stack.enter_async_context(RelayProcess())
        make = _founded if setting.kept else _wired
        backbone = await make(stack, folder, pack, setting, relay, routing)
        await _comes_true(backbone, setting)
        yield backbone


async def learn_routing(folder: Path, pack: ModelPack, prompts: Sequence[str]) -> bytes:
    """What a founder notes of the router's choices while it goes on with these prompts, without any delay."""
    async with wan_swarm(folder, pack, SwarmSetting(0.0, kept=1e-3, flags=("--mode", "partial"))) as founder:
        for prompt in prompts:
            request = {"prompt": prompt, "max_tokens": LEARN_TOKENS, "ignore_end": True}
            async for _event in founder.generate(request):
                pass
        await founder.stop()  # which saves them
    return _routing_file(folder).read_bytes()


async def _wired(
    stack: contextlib.AsyncExitStack,
    folder: Path,
    pack: ModelPack,
    setting: SwarmSetting,
    relay: RelayProcess | None,
    _routing: bytes | None,
) -> NodeProcess:
    swarm = await stack.enter_async_context(LocalSwarm(folder, pack.path))
    of_backbone: list[str] = []
    of_worker: list[str] = []
    if relay is not None:
        network = ["--relay", relay.url, "--no-port-mapping"]
        own = str(_identity(folder, "backbone"))
        of_worker = [*network, "--peer", own]
        of_backbone = [*network, "--listen", "[::1]:0"]
    shares = [f"{i + 1}/{setting.workers}" for i in range(setting.workers)]
    flags = [*of_backbone, *setting.emulation, "--no-local-experts", *_SIZES, *setting.flags]
    await swarm.start(shares, flags, of_worker, threads=setting.threads)
    return swarm.backbone


async def _founded(
    stack: contextlib.AsyncExitStack,
    folder: Path,
    pack: ModelPack,
    setting: SwarmSetting,
    relay: RelayProcess | None,
    routing: bytes | None,
) -> NodeProcess:
    manifest = pack.manifest
    whole = sum(manifest.expert_bytes(site.index) * site.n_expert for site in manifest.sites)
    if routing is not None:
        _routing_file(folder).parent.mkdir(parents=True, exist_ok=True)
        _routing_file(folder).write_bytes(routing)
    swarm = await stack.enter_async_context(FoundedSwarm(folder, pack.path, threads=setting.threads))
    network = ["--relay", relay.url, "--no-port-mapping"] if relay is not None else []
    flags = ["--memory", str(int(whole * setting.kept)), "--replicas", "1", *_SIZES, *setting.emulation]
    common = ["--no-lan", "--threads", str(setting.threads)]
    listen = "[::1]:0" if relay is not None else "127.0.0.1:0"
    arguments = ["--model", str(pack.path), *network, "--listen", listen, *common, *flags, *setting.flags]
    founder = await NodeProcess.start("founder", folder, arguments)
    swarm.nodes["founder"] = founder
    swarm.ticket = (await founder.wait_for("ticket"))["ticket"]
    memory = ["--memory", str(int(whole * 1.5 / setting.workers))]
    await all_started(swarm.join(f"worker-{i + 1}", *memory) for i in range(setting.workers))
    return founder


async def _comes_true(backbone: NodeProcess, setting: SwarmSetting) -> None:
    """Wait until every worker is there with experts, on the right path, and the plan, if there is one, is complete."""
    kind, seen = _KINDS[setting.path], "nobody"

    def complete(status: dict[str, Any]) -> bool:
        workers = [peer for peer in status["peers"] if peer["experts"]]
        if setting.kept and not _planned(status, workers):
            return False
        # A plan may leave a worker without experts where the rest has room for everything.
        enough = bool(workers) if setting.kept else len(workers) == setting.workers
        return enough and all(peer["path"] == kind for peer in workers)

    try:
        async with asyncio.timeout(PATIENCE_S):
            while not complete(status := await backbone.status()):
                seen = ", ".join(f"{p['name']} ({p['path']}, {p['experts']} experts)" for p in status["peers"]) or seen
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise SwarmnodeError(f"after {PATIENCE_S:g} s the swarm is not complete on path {kind}: {seen}") from None


def _planned(status: dict[str, Any], workers: Sequence[dict[str, Any]]) -> bool:
    plan = status["swarm"]["plan"]
    if not plan or plan["uncovered"]:
        return False
    held = {peer["peer"]: peer["experts"] for peer in workers}
    return all(held.get(peer, 0) >= count for peer, count in plan["workers"].items())


def _routing_file(folder: Path) -> Path:
    return folder / "founder" / "routing.bin"


def _identity(folder: Path, name: str) -> object:
    """A node's key exists before the node, as for a user who has started it once."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    return Identity.load_or_create(folder / name / "identity.key").peer_id


def has_ipv6() -> bool:
    """Does loopback have IPv6? The relay path needs it."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
