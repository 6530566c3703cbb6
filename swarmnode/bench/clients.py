"""An expert client of this process, attached to worker processes: what benchmarks use in place of a backbone node."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from swarmnode.compute.ggml import engine_build
from swarmnode.compute.recipe import recipes_hash
from swarmnode.config import PeerAddress
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.lane import dispatch_lane
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.local_swarm import NodeProcess
from swarmnode.onboard import ModelPack
from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.identity import Identity


@contextlib.asynccontextmanager
async def attached_client(
    pack: ModelPack,
    workers: Sequence[NodeProcess],
    options: DispatchOptions,
    config: TransportConfig | None = None,
) -> AsyncIterator[ExpertClient]:
    """A client of all these workers over an endpoint of its own."""
    manifest = pack.manifest
    key = ModelKey(manifest.model_hash, recipes_hash(manifest.sites), engine_build(), manifest.name)
    endpoint = await Endpoint.bind(Identity.generate(), config or TransportConfig(), listen=("127.0.0.1", 0))
    client = ExpertClient(manifest.sites, model=key, options=options)
    try:
        for node in workers:
            peer = PeerAddress.parse(node.address)
            lane = dispatch_lane(endpoint.peer_id)
            await client.attach(await endpoint.dial(peer.peer, peer.addresses, lane=lane))
        yield client
    finally:
        await client.close()
        await endpoint.close()
