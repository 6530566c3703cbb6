"""How much one client, one address and all together may do: token buckets, queue bounds, the reconnect spread. PURE.

Policy and arithmetic only; sessions hold these objects and act on their answers. `now` is monotonic, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum

SPREAD_MS_PER_CLIENT = 15  # 1,000 clients come back over 15 s: after a crash ≤ 10 % of them log in within any second
MIN_SPREAD_MS = 200
MAX_SPREAD_MS = 120_000  # whoever waits longer than that thinks the relay is gone


def reconnect_spread_ms(clients: int) -> int:
    """Over how long `clients` clients should spread their first try after the relay was lost."""
    return min(MAX_SPREAD_MS, max(MIN_SPREAD_MS, clients * SPREAD_MS_PER_CLIENT))


class TokenBucket:
    """`rate` tokens per second, at most `burst` saved up; rate 0: no limit.

    `ready` before `spend`: what is spent last may go into debt, so that one frame larger than the burst still passes
    and is paid for afterwards.
    """

    __slots__ = ("_burst", "_rate", "_tokens", "_updated")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._updated = now

    def ready(self, now: float) -> bool:
        """Whether anything may be spent now."""
        if self._tokens < self._burst and now > self._updated:
            self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate)
        self._updated = now
        return self._tokens > 0 or not self._rate

    def spend(self, amount: float) -> None:
        """Take `amount`; ready() was true."""
        if self._rate:
            self._tokens -= amount

    def take(self, amount: float, now: float) -> bool:
        """Spend `amount` when ready."""
        if not self.ready(now):
            return False
        self.spend(amount)
        return True

    def wait(self) -> float:
        """Seconds from the last `ready` until it is true; 0 when it was."""
        if self._tokens > 0 or not self._rate:
            return 0.0
        return -self._tokens / self._rate + 1e-6  # a hair more: at exactly 0 tokens it is not ready


class Priority(IntEnum):
    """Classes of an outbound queue; a lower number leaves first."""

    CONTROL = 0
    DISCO = 1
    RECORD = 2  # of the directory, which gives a client more only when none of it waits
    BULK = 3


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Bytes and messages that may wait for one client, by class."""

    bulk_bytes: int = 1_000_000  # 80 ms at 100 Mbit/s: more would only be stale when it arrives
    bulk_count: int = 1024
    disco_bytes: int = 64 * 1024
    disco_count: int = 256
    control_bytes: int = 16 * 1024
    control_count: int = 128
    record_bytes: int = 64 * 1024
    record_count: int = 32

    def of(self, priority: Priority) -> tuple[int, int]:
        """(bytes, count) of a class."""
        match priority:
            case Priority.CONTROL:
                return self.control_bytes, self.control_count
            case Priority.DISCO:
                return self.disco_bytes, self.disco_count
            case Priority.RECORD:
                return self.record_bytes, self.record_count
            case Priority.BULK:
                return self.bulk_bytes, self.bulk_count


class QueueTotal:
    """Bytes in the queues of all clients, and how many of them bulk may fill."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class OutboundQueue:
    """What waits for one client: control first, then disco, records, bulk; each class in order.

    A class that is full loses its OLDEST messages: bulk never displaces disco, and neither displaces control. When all
    queues together are at `total.limit`, bulk makes room in its own queue or is not taken.
    """

    __slots__ = ("_bounds", "_bytes", "_total", "_waiting", "count", "dropped", "size")

    def __init__(self, bounds: QueueBounds, total: QueueTotal) -> None:
        self._waiting: list[deque[bytes] | None] = [None] * len(Priority)  # an empty deque has 0.6 KB: made when needed
        self._bounds = tuple(bounds.of(priority) for priority in Priority)
        self._bytes = [0] * len(Priority)
        self._total = total
        self.size = 0
        self.count = 0
        self.dropped = [0] * len(Priority)  # messages by class, since the start

    def __bool__(self) -> bool:
        return self.count > 0

    def waits(self, priority: Priority) -> bool:
        """Whether anything of this class waits."""
        return self._bytes[priority] > 0

    def push(self, message: bytes, priority: Priority) -> int:
        """Queue a message; how many messages of its class were dropped for it (itself too, when it does not fit)."""
        max_bytes, max_count = self._bounds[priority]
        size = len(message)
        dropped = 0
        if size > max_bytes:
            self.dropped[priority] += 1
            return 1
        queue = self._waiting[priority]
        if queue is None:
            queue = self._waiting[priority] = deque()
        while queue and (self._bytes[priority] + size > max_bytes or len(queue) >= max_count):
            self._remove(priority, queue)
            dropped += 1
        if priority is Priority.BULK:
            while queue and self._total.used + size > self._total.limit:
                self._remove(priority, queue)
                dropped += 1
            if self._total.used + size > self._total.limit:
                self.dropped[priority] += dropped + 1
                return dropped + 1
        queue.append(message)
        self._bytes[priority] += size
        self.size += size
        self.count += 1
        self._total.used += size
        self.dropped[priority] += dropped
        return dropped

    def pop(self) -> bytes:
        """The next message to send. Raises IndexError when nothing waits."""
        for priority in Priority:
            queue = self._waiting[priority]
            if queue:
                return self._remove(priority, queue)
        raise IndexError("nothing waits in this queue")

    def clear(self) -> None:
        """Forget everything."""
        for priority in Priority:
            while queue := self._waiting[priority]:
                self._remove(priority, queue)

    def _remove(self, priority: Priority, queue: deque[bytes]) -> bytes:
        message = queue.popleft()
        size = len(message)
        self._bytes[priority] -= size
        self.size -= size
        self.count -= 1
        self._total.used -= size
        return message


class Slots:
    """At most `limit` at once per key (an IP address), and `total` in all."""

    __slots__ = ("_by_key", "limit", "total", "used")

    def __init__(self, limit: int, total: int) -> None:
        self.limit = limit
        self.total = total
        self.used = 0
        self._by_key: dict[Hashable, int] = {}

    def take(self, key: Hashable) -> bool:
        """Take one slot; False, and nothing taken, when there is none. `give` it back."""
        held = self._by_key.get(key, 0)
        if held >= self.limit or self.used >= self.total:
            return False
        self._by_key[key] = held + 1
        self.used += 1
        return True

    def give(self, key: Hashable) -> None:
        """Give back what `take` took."""
        held = self._by_key[key] - 1
        self.used -= 1
        if held:
            self._by_key[key] = held
        else:
            del self._by_key[key]


class Seldom:
    """Lets something happen at most once per `interval` seconds per key; remembers `capacity` keys, oldest go."""

    __slots__ = ("_capacity", "_interval", "_last")

    def __init__(self, interval: float, capacity: int) -> None:
        self._interval = interval
        self._capacity = capacity
        self._last: dict[Hashable, float] = {}

    def allows(self, key: Hashable, now: float) -> bool:
        """Whether it may happen now; then it counts as having happened."""
        last = self._last.get(key)
        if last is not None:
            if now - last < self._interval:
                return False
            del self._last[key]  # so that it goes to the end again
        elif len(self._last) >= self._capacity:
            del self._last[next(iter(self._last))]
        self._last[key] = now
        return True
