"""Which UDP payload one path is known to carry: padded pings up a ladder, and a watch for black holes. PURE.

RFC 8899 in small. Not which pings are small and when (path.py), which is also who calls.

  search   a padded ping of every rung above the known size at once, three rounds; the largest answer counts at once.
           One of 1200 bytes goes along until something of that size has passed; if nothing does, the path is narrow
           and carries pieces of 600 bytes: RFC 9000 asks for 1200, but tunnels in tunnels exist
  found    rungs remain: the search is repeated after 30 s, doubling
  watch    while datagrams beyond 1200 bytes are sent: a padded ping of the known size every 0.5 s; two of them lost
           while a small one passed → 1200 at once, and a search after 30 s, doubling
"""

from __future__ import annotations

from math import inf

from transport.proto.path_config import NARROW_SIZE, SIZE_RUNGS, UNPROBED_SIZE, PathConfig


class SizeSearch:
    """Of one direct path. `size` in bytes of UDP payload."""

    def __init__(self, max_size: int, config: PathConfig) -> None:
        self._config = config
        self._rungs = [rung for rung in SIZE_RUNGS if rung <= max_size]
        self._tries = 0
        self._pending: set[int] = set()
        self._search_at = inf
        self._gap = config.size_search_gap
        self._check_at = inf
        self._lost_checks = 0
        self._first_lost_at = -inf
        self._floor_passed = max_size == 0  # something of 1200 bytes has; a relay carries everything
        self.size = UNPROBED_SIZE
        self.wants_small = False  # a padded ping was lost: a small one must tell whether the path is alive

    @property
    def due(self) -> float:
        """When `poll` has something to send."""
        return min(self._search_at, self._check_at)

    def allow(self, max_size: int, now: float) -> None:
        """The path may carry up to `max_size` after all."""
        more = [rung for rung in SIZE_RUNGS if rung <= max_size]
        if len(more) > len(self._rungs):
            self._rungs = more
            self._search_at = now

    def search(self, now: float) -> None:
        """Start from what every path should carry: the path is new, or the network is."""
        self.size, self._floor_passed = UNPROBED_SIZE, False
        self._tries, self._gap, self._lost_checks = 0, self._config.size_search_gap, 0
        self._pending.clear()
        self._search_at, self._check_at = now, inf

    def pause(self) -> None:
        """The path does not answer: nothing is measured on it."""
        self._search_at = self._check_at = inf
        self._pending.clear()
        self._lost_checks = 0

    def resume(self, now: float) -> None:
        """The path answers again after a doubt: the size found so far holds, what was not found is looked for."""
        self._tries = 0
        if self.size < max(self._rungs, default=UNPROBED_SIZE):
            self._search_at = now

    def sent_big(self, now: float) -> None:
        """A datagram beyond 1200 bytes goes out."""
        if self._check_at == inf and self.size > UNPROBED_SIZE:
            self._check_at = now + self._config.size_check_gap

    def poll(self, now: float, big_lately: bool) -> list[int]:
        """Sizes of the padded pings to send now. `big_lately`: big datagrams were sent since the last check."""
        sizes: list[int] = []
        if now >= self._search_at:
            self._search_at = inf
            self._tries += 1
            sizes = [rung for rung in self._rungs if rung > self.size]
            if not self._floor_passed:
                sizes.insert(0, UNPROBED_SIZE)
            self._pending = set(sizes)
        if now >= self._check_at:
            self._check_at = now + self._config.size_check_gap if big_lately else inf
            if self._check_at < inf and self.size > UNPROBED_SIZE and self.size not in sizes:
                sizes.append(self.size)
        return sizes

    def answered(self, size: int, now: float) -> None:
        """A padded ping came back."""
        if size == self.size:
            self._lost_checks = 0
        self.size = max(self.size, size)
        self._floor_passed |= size >= UNPROBED_SIZE
        self._settle(size, now, lost=False)

    def missed(self, size: int, sent_at: float, now: float) -> None:
        """A padded ping did not come back."""
        if size == self.size > UNPROBED_SIZE and size not in self._pending:
            self._lost_checks += 1
            if self._lost_checks == 1:
                self._first_lost_at = sent_at
                self.wants_small = True
        self._settle(size, now, lost=True)

    def small_answered(self, sent_at: float, now: float) -> bool:
        """A small ping sent at `sent_at` came back; True when that proves a black hole for big ones."""
        if self._lost_checks < 2 or sent_at < self._first_lost_at:
            return False
        self.size, self._tries, self._lost_checks = UNPROBED_SIZE, 0, 0
        self._check_at = inf
        self._later(now)
        return True

    def _settle(self, size: int, now: float, lost: bool) -> None:
        if size not in self._pending:
            return
        self._pending.discard(size)
        self._pending = {rung for rung in self._pending if rung > self.size or not self._floor_passed}
        if self._pending:
            return
        if not self._floor_passed and self._tries >= self._config.size_tries:
            self.size = NARROW_SIZE
        if self._floor_passed and self.size >= max(self._rungs, default=UNPROBED_SIZE):
            self._tries = 0
        elif self._tries < self._config.size_tries:
            self._search_at = now
        else:
            self._tries = 0
            self._later(now)

    def _later(self, now: float) -> None:
        self._search_at = now + self._gap
        self._gap = min(2 * self._gap, self._config.size_search_cap)
