"""A process that fetches a model's experts from peers, for tests that kill it.

python fetch_child.py PACK STORE SITES PEERID@PORT... prints a line per progress, and "done". LIMIT=BYTES in the
environment bounds the size of its files, as a full disk would; it then prints the one line of the error.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from swarmnode.bulk.fetcher import Fetcher
from swarmnode.bulk.frames import LANE
from swarmnode.bulk.source import PeerSource
from swarmnode.errors import SwarmnodeError
from swarmnode.model.manifest import load_manifest
from swarmnode.model.store import SliceStore
from transport.endpoint import Endpoint
from transport.identity import Identity, PeerId


async def main(pack: str, folder: str, sites: str, *peers: str) -> None:
    manifest = load_manifest(Path(pack) / "manifest.json")
    wanted = {int(site): range(manifest.sites[int(site)].n_expert) for site in sites.split(",")}
    async with await Endpoint.bind(Identity.generate(os.urandom(32)), listen=("127.0.0.1", 0)) as endpoint:
        sources = []
        for peer in peers:
            name, port = peer.split("@")
            connection = await endpoint.dial(PeerId.parse(name), [("127.0.0.1", int(port))], lane=LANE)
            sources.append(await PeerSource.open(connection, manifest))
        if "LIMIT" in os.environ:
            import resource

            limit = int(os.environ["LIMIT"])
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with SliceStore(folder, manifest) as store:
            fetcher = Fetcher(
                store, manifest, wanted, lambda: sources, lambda *figures: print(*figures, flush=True), patience_s=20
            )
            try:
                await fetcher.run()
            except SwarmnodeError as error:
                print("error", error, flush=True)
            else:
                print("done", flush=True)
        for source in sources:
            await source.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
