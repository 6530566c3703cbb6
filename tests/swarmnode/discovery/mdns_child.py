"""A node that is nothing but its mDNS, for tests in network namespaces: tells what it hears as lines of JSON.

python -m tests.swarmnode.discovery.mdns_child NAME NUMBER open|closed; on stdin "changed" (look at the interfaces now)
or "close" (with goodbye).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from typing import Any

from swarmnode.discovery import mdns
from swarmnode.discovery.mdns import Mdns
from swarmnode.discovery.record import PeerRecord, decode, sign
from transport import interfaces
from transport.identity import Identity, PeerId
from transport.proto.candidates import choose

SWARM = Identity.generate(bytes(32)).peer_id
PORT = 4433


def say(**event: Any) -> None:  # Any: as JSON has it
    print(json.dumps(event), flush=True)


class Teller:
    def heard(self, blob: bytes, source: str, *, lasting: bool, publisher: PeerId | None = None) -> None:
        record = decode(blob)
        say(event="heard", name=record.name, hosts=[host for host, _ in record.addresses], lasting=lasting)

    def lost(self, peer: PeerId, source: str) -> None:
        say(event="lost", peer=peer.short)


async def main(name: str, number: int, is_open: bool) -> None:
    mdns.UPDATE_S = 0.2  # what a test changes, it changes at once
    identity = Identity.generate(number.to_bytes(32, "big"))
    record = PeerRecord(SWARM, identity.peer_id, seq=0, name=name, certificate=bytes(300))
    source = Mdns(
        SWARM, identity.peer_id, port=PORT, is_open=is_open, on_problem=lambda why: say(event="problem", why=why)
    )

    def announce() -> None:
        told = choose(interfaces.addresses(), listen_host="::", port=PORT)
        current = replace(record, seq=int(time.time() * 1000), addresses=tuple(one.address for one in told))
        source.announce(sign(current, identity.sign))

    await source.start(Teller())
    announce()
    say(event="ready", peer=identity.peer_id.short)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while (line := await lines.readline()) and line != b"close\n":
        announce()
        source.network_changed()
    await source.close()
    say(event="closed")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "open"))
