"""What a burst costs after idleness: `python -m swarmnode.bench.idle`. One connection per engine, an emulated link.

The link: 50 ms round trip, 100 Mbit/s. One way of the wire is 25 ms of every figure; slow start would add a round trip
or three to 100 KB. Time from the first write to the last byte at the other side, in ms.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from swarmnode.bench.command import Result, not_negative, parser, run_command
from swarmnode.bench.command import count as at_least_one
from transport.config import TransportConfig
from transport.emulation import LinkEmulation
from transport.endpoint import Endpoint
from transport.identity import Identity

LINK = LinkEmulation(rtt=0.05, rate=12.5e6)
SIZES = (100_000, 12_288)


async def after_idle(engine: str, seconds: float, count: int) -> dict[int, list[float]]:
    """Size in bytes → milliseconds of `count` one-way transfers, each after `seconds` without any."""
    loop = asyncio.get_running_loop()
    loopback = ("127.0.0.1", 0)
    slow, plain = TransportConfig(engine=engine, emulation=LINK), TransportConfig(engine=engine)
    times: dict[int, list[float]] = {}
    async with (
        await Endpoint.bind(Identity.generate(), slow, listen=loopback) as sender,
        await Endpoint.bind(Identity.generate(), plain, listen=loopback) as receiver,
    ):
        connection = await sender.dial(receiver.peer_id, [receiver.address])
        stream = await connection.open_stream()
        await stream.write(b"\0")
        incoming = await (await receiver.accept()).accept_stream()
        await incoming.readexactly(1)
        for size in SIZES:
            times[size] = []
            for _ in range(count):
                await asyncio.sleep(seconds)
                began = loop.time()
                writing = asyncio.ensure_future(stream.write(bytes(size)))
                await incoming.readexactly(size)
                times[size].append((loop.time() - began) * 1e3)
                await writing
    return times


async def _run(seconds: float, n: int) -> Result:
    rows = []
    for engine in ("qh3", "aioquic"):
        for size, ms in (await after_idle(engine, seconds, n)).items():
            figures = {"p50_ms": round(statistics.median(ms), 1), "max_ms": round(max(ms), 1)}
            rows.append({"engine": engine, "bytes": size, **figures})
    return {"idle_s": seconds, "n": n, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    made = parser("python -m swarmnode.bench.idle", __doc__)
    made.add_argument("--idle", type=not_negative, default=10.0, help="seconds")
    made.add_argument("--count", type=at_least_one, default=10)
    return run_command(made, arguments, lambda given: asyncio.run(_run(given.idle, given.count)))


if __name__ == "__main__":
    raise SystemExit(main())
