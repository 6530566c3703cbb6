"""How a relay's clients come back after it restarts: `python -m swarmnode.bench.relay_restart [--clients 1000]`.

Real links (transport.relay_link) in this process, the relay in another. It is ended twice: by SIGTERM, which tells the
clients when to return, and by SIGKILL, which tells nothing; each time it starts again at once. Counted: logins in each
second after the end, as a share of all clients, and how long until all are back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnode.bench.command import Result, not_negative, parser, run_command
from swarmnode.bench.command import count as at_least_one
from swarmnode.bench.relay_process import RelayProcess
from transport.identity import Identity
from transport.proto.relay_url import parse_relay_url
from transport.relay_link import RelayLink
from transport.relay_session import RelayLinkConfig

STARTED_AT_ONCE = 32
WAIT_SECONDS = 90.0
SPREAD_KNOWN = 25.0  # one ping interval: every client has heard of the spread that suits the number of clients


@dataclass
class Clients:
    """All links, and when each came up."""

    links: list[RelayLink] = field(default_factory=list)
    ups: list[float] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, url: str, count: int) -> None:
        """Connect them all, some at a time."""
        while len(self.links) < count:
            for _ in range(min(STARTED_AT_ONCE, count - len(self.links))):
                link = RelayLink(
                    parse_relay_url(url), Identity.generate(), RelayLinkConfig(), _nothing, self._state, _nothing
                )
                self.links.append(link)
                link.start()
            await self.all_up()

    def _state(self, _url: str, up: bool, _reason: str) -> None:
        if up:
            self.ups.append(asyncio.get_running_loop().time())
        self.changed.set()

    async def all_up(self) -> None:
        """Wait for it. Raises TimeoutError."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not all(link.up for link in self.links):
                self.changed.clear()
                await self.changed.wait()


def _nothing(*_: object) -> None:
    pass


async def run(count: int, settle: float) -> dict[str, Any]:
    """{clients, terminated: {peak_share_per_s, all_back_s, per_second}, killed: the same}."""
    loop = asyncio.get_running_loop()
    relay, clients = RelayProcess(), Clients()
    await relay.start()
    result: dict[str, Any] = {"clients": count}
    try:
        await clients.open(relay.url, count)
        for name, how in (("terminated", signal.SIGTERM), ("killed", signal.SIGKILL)):
            await asyncio.sleep(settle)
            clients.ups.clear()
            began = loop.time()
            await relay.end(how)
            await relay.start()
            await clients.all_up()
            seconds = Counter(int(at - began) for at in clients.ups)
            result[name] = {
                "peak_share_per_s": round(max(seconds.values()) / count, 3),
                "all_back_s": round(loop.time() - began, 1),
                "per_second": [seconds[second] for second in range(max(seconds) + 1)],
            }
    finally:
        await asyncio.gather(*(link.close() for link in clients.links))
        await relay.end()
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    made = parser("python -m swarmnode.bench.relay_restart", __doc__)
    made.add_argument("--clients", type=at_least_one, default=1000)
    made.add_argument("--settle", type=not_negative, default=SPREAD_KNOWN, help="seconds before each restart")

    def measure(given: argparse.Namespace) -> Result:
        logging.getLogger("transport").setLevel(logging.CRITICAL)
        return asyncio.run(run(given.clients, given.settle))

    return run_command(made, arguments, measure, lambda result, _given: print(json.dumps(result)))


if __name__ == "__main__":
    raise SystemExit(main())
