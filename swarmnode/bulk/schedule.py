"""Who is asked for which expert next, when several sources have parts of what is wanted.

Pure: `now` (seconds, any clock that only grows) is an argument. The rules:

- The rarest expert first (fewest sources), so that what one node alone has is spread before that node is gone; among
  equally rare ones a site at a time, from a site and an expert that depend on `seed`: nodes that fetch the same things
  at the same time begin at different ends and can serve each other.
- A source has about a second's worth of its own measured rate in flight, and begins with one expert: fast ones get
  more. All in flight together are bounded too: that is what a crash may cost.
- Nobody is asked for what another is already sending. So that the last expert does not hang on a slow source, it gets
  none that the others would have finished much earlier.
- A source that failed is left alone for a while that doubles; what it was asked for goes elsewhere. One that fails
  many times in a row, or sent bytes that are not what they should be, is banned for good.

Caller: `fetcher.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Held = Mapping[int, int] | None  # site -> bitmap; None: everything

HORIZON_S = 1.0  # of a source's rate, in flight: many round trips, so that the pipe is full, and yet soon done
WINDOW_MIN = 1 << 20  # bytes a source may always grow to: a rate measured with small experts far away is too low
MAX_IN_FLIGHT = 256  # experts asked of one source at a time
RATE_MEMORY_S = 4.0  # busy seconds after which older measurements count half
RARE = 4  # experts that this many sources have are all equally common
BACKOFF_S, MAX_BACKOFF_S = 0.5, 15.0  # the maximum is below any caller's patience
BUSY_S = 1.0  # a source that is busy is asked again after this
MAX_FAILURES = 8  # in a row, then it is banned
DRAG_S, DRAG_FACTOR = 1.0, 2.0  # a source drags when it would be done later than the others by this
OVERDUE_S, OVERDUE_FACTOR = 60.0, 8.0  # an order this late, measured by its source's own rate, goes elsewhere


@dataclass(frozen=True, slots=True)
class Order:
    """An expert to be asked of a source; `size` bytes."""

    source: str
    site: int
    expert: int
    size: int


@dataclass(slots=True)
class _SourceState:
    held: Held = None
    is_offered: bool = False
    window: int = 0  # bytes that may be in flight; 0: one expert, whatever its size
    orders: dict[Order, float] = field(default_factory=dict)  # when each was made
    in_flight: int = 0  # bytes of `orders`
    last_event: float = 0.0  # when it began to be busy, or delivered last
    busy_s: float = 0.0
    busy_bytes: float = 0.0
    failures: int = 0
    last_error: str = ""
    blocked_until: float = 0.0
    avoid: dict[int, int] = field(default_factory=dict)  # site -> experts that it failed to deliver

    @property
    def rate(self) -> float:
        """Bytes per second; 0 when nothing is known."""
        return self.busy_bytes / self.busy_s if self.busy_s > 0 else 0.0


class FetchSchedule:
    """See the module. Every expert is pending, ordered, received (not stored yet), or stored."""

    def __init__(
        self, wanted: Mapping[int, int], sizes: Mapping[int, int], *, in_flight_bytes: int, seed: int = 0
    ) -> None:
        """`wanted`: site -> bitmap. `sizes`: site -> bytes of one expert. `in_flight_bytes`: of all orders, received
        ones included; one expert is always allowed."""
        self._pending = {site: mask for site, mask in sorted(wanted.items()) if mask}
        self._sizes = dict(sizes)
        self._cap = in_flight_bytes
        self._in_flight = 0
        self._orders = 0
        self._pending_bytes = sum(mask.bit_count() * sizes[site] for site, mask in self._pending.items())
        sites = list(self._pending)
        turn = seed % len(sites) if sites else 0
        self._site_order = sites[turn:] + sites[:turn]
        self._start = {site: seed % mask.bit_length() for site, mask in self._pending.items()}
        self._levels: list[dict[int, int]] = []  # by rarity: site -> bitmap
        self._sources: dict[str, _SourceState] = {}
        self.banned: dict[str, str] = {}  # source -> why

    @property
    def is_done(self) -> bool:
        """Whether everything is stored."""
        return not self._pending and not self._orders

    @property
    def in_flight(self) -> int:
        """How many experts are ordered or received, and not stored."""
        return self._orders

    def offer(self, held: Mapping[str, Held]) -> None:
        """Who has what now. A source that is not named any more is asked nothing until it is named again."""
        changed = False
        for name, state in self._sources.items():
            if name not in held and state.is_offered:
                state.is_offered = False
                changed = True
        for name, masks in held.items():
            if name in self.banned:
                continue
            state = self._sources.setdefault(name, _SourceState())
            if not state.is_offered:
                state.is_offered, state.failures = True, 0
            elif masks == state.held:
                continue
            state.held = None if masks is None else dict(masks)
            changed = True
        if changed:
            self._rank()

    def next(self, now: float) -> list[Order]:
        """The orders to be placed now; they count as placed."""
        placed: list[Order] = []
        passed: set[str] = set()
        while self._pending and (not self._in_flight or self._in_flight < self._cap):
            name = self._freest(now, passed)
            if name is None:
                break
            state = self._sources[name]
            found = self._pick(name, state, now)
            if found is None or not self._fits(state, self._sizes[found[0]]):
                passed.add(name)
                continue
            order = Order(name, *found, self._sizes[found[0]])
            if not state.orders:
                state.last_event = now
            state.orders[order] = now
            state.in_flight += order.size
            self._in_flight += order.size
            self._orders += 1
            self._take(order.site, order.expert)
            placed.append(order)
        return placed

    def received(self, order: Order, now: float) -> None:
        """An order's bytes are here; they are in flight until `stored` or `corrupt`."""
        state = self._sources[order.source]
        state.busy_s += max(now - state.last_event, 1e-6)
        state.busy_bytes += order.size
        state.last_event = now
        if state.busy_s > RATE_MEMORY_S:
            state.busy_s /= 2
            state.busy_bytes /= 2
        # Doubles per round trip until the source's own rate is the limit.
        limit = max(WINDOW_MIN, int(state.rate * HORIZON_S))
        state.window = min(max(state.window, state.in_flight) + order.size, limit)
        state.failures = 0
        self._close(state, order)

    def stored(self, order: Order) -> None:
        """A received order is verified and kept."""
        self._orders -= 1
        self._in_flight -= order.size

    def failed(self, order: Order, now: float, why: str, *, not_held: bool = False, busy: bool = False) -> bool:
        """An order will not be delivered, or was given up; True when its source is banned for it."""
        state = self._sources[order.source]
        self._close(state, order)
        self._return(order)
        if busy:
            state.blocked_until = max(state.blocked_until, now + BUSY_S)
            return False
        avoided = state.avoid.get(order.site, 0)
        state.avoid[order.site] = avoided | 1 << order.expert
        if not_held and not avoided >> order.expert & 1:
            return False  # it was forgotten in the meantime; claimed again, and again absent, it is a failure
        state.last_error = why
        state.window = 0
        if now >= state.blocked_until:  # not one of many that failed together
            state.failures += 1
            state.blocked_until = now + min(MAX_BACKOFF_S, BACKOFF_S * 2**state.failures)
            if state.failures >= MAX_FAILURES:
                return self.ban(order.source, f"failed {state.failures} times in a row, last: {why}")
        return False

    def corrupt(self, order: Order, why: str) -> bool:
        """A received order is not what it should be; True when its source is banned now (it may have been before)."""
        self._return(order)
        return self.ban(order.source, why)

    def ban(self, source: str, why: str) -> bool:
        """Ask a source nothing any more; False where that is so already."""
        if source in self.banned:
            return False
        self.banned[source] = why
        self._sources[source].is_offered = False
        self._rank()
        return True

    def overdue(self, now: float) -> list[Order]:
        """Orders that are much too late and that another source has too: to be given up by the caller."""
        late = []
        for name, state in self._sources.items():
            due_s = OVERDUE_S + (OVERDUE_FACTOR * state.in_flight / state.rate if state.rate else 0.0)
            for order, since in state.orders.items():
                if now - since > due_s and any(self._others(name, order.site, order.expert, now)):
                    late.append(order)
        return late

    def orders(self, source: str) -> list[Order]:
        """What was asked of a source and has not come."""
        return list(self._sources[source].orders) if source in self._sources else []

    def unobtainable(self) -> dict[int, int]:
        """Site -> bitmap of what is pending and nobody has."""
        found = {}
        for site, mask in self._pending.items():
            rest = mask
            for state in self._sources.values():
                rest &= ~_mask(state, site)
            if rest:
                found[site] = rest
        return found

    def pending(self) -> dict[int, int]:
        """Site -> bitmap of what nobody is asked for."""
        return dict(self._pending)

    def last_errors(self) -> dict[str, str]:
        """Source -> its last failure, of those that failed last and are not banned."""
        return {
            name: state.last_error
            for name, state in self._sources.items()
            if state.failures and state.last_error and name not in self.banned
        }

    # -- inside

    def _rank(self) -> None:
        """Sort all experts by how many sources have them."""
        masks = [state for state in self._sources.values() if state.is_offered]
        self._levels = [{} for _ in range(RARE)]
        for site in self._site_order:
            at_least = [0] * (RARE + 1)  # [n]: had by at least n + 1
            for state in masks:
                held = _mask(state, site)
                for n in range(RARE - 1, 0, -1):
                    at_least[n] |= at_least[n - 1] & held
                at_least[0] |= held
            for n in range(RARE):
                exactly = at_least[n] & ~at_least[n + 1] if n + 1 < RARE else at_least[n]
                if exactly:
                    self._levels[n][site] = exactly

    def _freest(self, now: float, passed: set[str]) -> str | None:
        """The source that would be done first with what it was asked, and may be asked more."""
        best: tuple[float, float, str] | None = None
        for name, state in self._sources.items():
            if name in passed or not state.is_offered or now < state.blocked_until:
                continue
            if len(state.orders) >= MAX_IN_FLIGHT or (state.orders and state.in_flight >= state.window):
                continue
            rate = state.rate
            # Unknown ones come first: one expert shows what they can do.
            key = (state.in_flight / rate, -rate, name) if rate else (-1.0, 0.0, name)
            if best is None or key < best:
                best = key
        return None if best is None else best[2]

    def _fits(self, state: _SourceState, size: int) -> bool:
        if self._in_flight and self._in_flight + size > self._cap:
            return False
        return not state.orders or state.in_flight + size <= state.window

    def _pick(self, name: str, state: _SourceState, now: float) -> tuple[int, int] | None:
        """The rarest pending expert that a source has, first of those that it has not failed to deliver."""
        for again in (False, True):
            for level in self._levels:
                for site, mask in level.items():
                    usable = mask & self._pending.get(site, 0) & _mask(state, site)
                    usable &= state.avoid.get(site, 0) if again else ~state.avoid.get(site, 0)
                    if usable:
                        expert = _first_from(usable, self._start[site])
                        return None if self._drags(name, state, site, expert, now) else (site, expert)
        return None

    def _drags(self, name: str, state: _SourceState, site: int, expert: int, now: float) -> bool:
        """Would the others have this one, and everything else, much earlier?"""
        if not state.rate:
            return False
        size = self._sizes[site]
        others = [other for other in self._others(name, site, expert, now) if other.rate]
        if not others:
            return False
        all_rates = sum(s.rate for s in self._sources.values() if s.is_offered and now >= s.blocked_until)
        whole_s = (self._pending_bytes + self._in_flight) / all_rates
        other_s = min((other.in_flight + size) / other.rate for other in others)
        return (state.in_flight + size) / state.rate > DRAG_S + DRAG_FACTOR * max(whole_s, other_s)

    def _others(self, name: str, site: int, expert: int, now: float) -> Iterator[_SourceState]:
        """Other sources that can be asked for an expert now."""
        for other_name, other in self._sources.items():
            usable = other_name != name and other.is_offered and now >= other.blocked_until
            if usable and (_mask(other, site) & ~other.avoid.get(site, 0)) >> expert & 1:
                yield other

    def _take(self, site: int, expert: int) -> None:
        self._pending_bytes -= self._sizes[site]
        self._pending[site] &= ~(1 << expert)
        if not self._pending[site]:
            del self._pending[site]

    def _return(self, order: Order) -> None:
        self._orders -= 1
        self._in_flight -= order.size
        self._pending_bytes += order.size
        self._pending[order.site] = self._pending.get(order.site, 0) | 1 << order.expert

    def _close(self, state: _SourceState, order: Order) -> None:
        del state.orders[order]
        state.in_flight -= order.size


def _mask(state: _SourceState, site: int) -> int:
    """What an offered source has of a site."""
    if not state.is_offered:
        return 0
    return -1 if state.held is None else state.held.get(site, 0)


def _first_from(mask: int, start: int) -> int:
    """The first bit at or after `start`, going round."""
    high = mask >> start << start
    chosen = high or mask
    return (chosen & -chosen).bit_length() - 1
