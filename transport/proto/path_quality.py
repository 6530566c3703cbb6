"""Whether one direct path deserves its tier: loss and goodput, demotion and return. PURE.

Not RTT and not whether the path is alive (path.py). Packets that QUIC reports and small pings both count as samples;
only the owner knows when they mean something (the path is alive, no switch a moment ago). Called by path.py.

  good      loss > 5 % over ≥ 50 packets without the worst sample, and in ≥ 3 samples (one standard deviation beyond,
            so that 2 % are never taken for 5 %); goodput under half of the relay's in 3 samples in a row; loss ≥ 3 % in
            4 samples in a row at full speed (not on a LAN, nor when the relay is known to be little faster)
                                                                                     → demoted for 30 s, doubling
            the peer has left the path for its loss, and ours do not contradict     → the same
  demoted   the time is over                                                       → training: 50 pings, 0.1 s apart
  training  loss ≤ 2 %                                                             → good
            more                                                                   → demoted, twice as long
"""

from __future__ import annotations

from collections import deque
from math import inf, sqrt

from transport.proto.path_config import PathConfig


class Quality:
    """Of one path. `demoted` says why it lost its tier, "" while it has it."""

    def __init__(self, config: PathConfig) -> None:
        self._config = config
        self._window: deque[tuple[float, int, int]] = deque()  # time, sent, lost
        self._sent = self._lost = 0
        self._slow = 0  # goodput samples in a row under the limit
        self._policed = 0  # samples in a row that lost at full speed
        self._hold = config.demote_hold
        self._until = inf  # when the training starts
        self._promoted_at = -inf
        self._train = 0  # pings yet to send
        self._train_next = inf
        self._train_answers = self._train_misses = 0
        self._farewells = 0  # pings yet to send that tell the peer
        self.farewell_due = inf
        self.goodput: float | None = None  # B/s, smoothed over saturated seconds
        self.goodput_at = -inf
        self.demoted = ""

    @property
    def loss(self) -> float:
        """Share of packets lost in the window, 0–1; 0 while it holds too few."""
        return self._lost / self._sent if self._sent >= self._config.loss_packets else 0.0

    @property
    def due(self) -> float:
        """When `poll` has something to do."""
        return min(self._until, self._train_next)

    @property
    def training(self) -> bool:
        """Whether pings of the train are under way."""
        return bool(self._train or self._train_answers or self._train_misses)

    def count(self, sent: int, lost: int, now: float) -> None:
        """Packets sent since the last sample and packets found lost."""
        lost = min(lost, sent) if sent else 0
        if not sent:
            return
        config, window = self._config, self._window
        window.append((now, sent, lost))
        self._sent += sent
        self._lost += lost
        while window:
            at, first_sent, first_lost = window[0]
            too_old = now - at > config.loss_memory
            spare = self._sent - first_sent >= config.loss_packets and len(window) > config.loss_samples
            if not (too_old or (now - at > config.loss_window and spare) or len(window) > 256):
                break
            window.popleft()
            self._sent -= first_sent
            self._lost -= first_lost
        if not self.demoted and self._loses():
            self._demote(f"loses {round(100 * self.loss)} %", now)
            # What is lost towards one side is missing on the other: its answers, its acknowledgements. It cannot know
            # as soon as we do, and would take our silence here for a disturbance.
            self._farewells, self.farewell_due = self._config.farewells, now

    def follow(self, now: float) -> None:
        """The peer has left the path for its loss: so do we, unless enough of our own packets say otherwise."""
        contradicted = self._sent >= self._config.loss_packets and self._lost <= self._config.loss_limit * self._sent
        if not self.demoted and not contradicted:
            self._demote("loses, says the peer", now)

    def poll_farewell(self, now: float) -> bool:
        """Whether a ping is to be sent now that tells the peer that we left."""
        if now < self.farewell_due:
            return False
        self._farewells -= 1
        self.farewell_due = now + self._config.farewell_gap if self._farewells else inf
        return True

    def told(self) -> None:
        """Such a ping was answered."""
        self._farewells, self.farewell_due = 0, inf

    def _loses(self) -> bool:
        limit, least = self._config.loss_limit, self._config.loss_packets
        if self._lost <= limit * self._sent:
            return False
        _, worst_sent, worst_lost = max(self._window, key=lambda sample: sample[2])
        sent, lost = self._sent - worst_sent, self._lost - worst_lost
        bad = sum(lost > limit * sent for _, sent, lost in self._window)
        enough = bad >= self._config.loss_samples and self._sent >= least
        return enough and lost > limit * sent + sqrt(limit * (1 - limit) * sent)

    def carried(self, goodput: float, loss: float, relay_goodput: float | None, now: float) -> None:
        """B/s of a second in which the sender was never idle, and the share of its packets that were lost (0 where
        nobody polices). `relay_goodput`: what a relay carries, as remembered; 0 for a relay itself."""
        config = self._config
        self.goodput = goodput if self.goodput is None else 0.5 * (self.goodput + goodput)
        self.goodput_at = now
        if self.demoted:
            return
        relay = inf if relay_goodput is None else relay_goodput
        is_slow = relay < inf and goodput < config.goodput_share * relay
        is_policed = loss >= config.busy_loss and goodput * config.busy_gain < relay
        self._slow = self._slow + 1 if is_slow else 0
        self._policed = self._policed + 1 if is_policed else 0
        if self._slow >= config.goodput_samples:
            self._demote(f"carries {_rate(self.goodput)}, the relay {_rate(relay)}", now)
        elif self._policed >= config.busy_samples:
            self._demote(f"loses {round(100 * loss)} % at full speed", now)

    def forget(self) -> None:
        """The path was dead or the network is another one: what was lost then says nothing."""
        self._window.clear()
        self._sent = self._lost = self._slow = self._policed = 0

    def taint(self, now: float) -> None:
        """The path is in doubt: what was lost a moment ago was lost by that."""
        while self._window and self._window[-1][0] > now - self._config.taint:
            _, sent, lost = self._window.pop()
            self._sent -= sent
            self._lost -= lost

    def poll(self, now: float) -> bool:
        """Whether a ping of the train is to be sent now; its fate comes back by `trained`."""
        if now >= self._until:
            self._until = inf
            self._train, self._train_next = self._config.train_pings, now
        if now < self._train_next:
            return False
        self._train -= 1
        self._train_next = now + self._config.train_gap if self._train else inf
        return True

    def trained(self, answered: bool, now: float) -> None:
        """What became of a ping of the train."""
        if not self.training:
            return
        config = self._config
        self._train_answers += answered
        self._train_misses += not answered
        allowed = config.loss_back * config.train_pings
        if self._train_misses > allowed:
            self._end_train()
            self._hold_down(now)
        elif self._train_answers + self._train_misses >= config.train_pings:
            self._end_train()
            self.demoted = ""
            self._promoted_at = now
            self.forget()

    def _demote(self, why: str, now: float) -> None:
        if now - self._promoted_at > 10 * self._hold:  # it was good for long: an old story
            self._hold = self._config.demote_hold
        self.demoted = why
        self._hold_down(now)

    def _hold_down(self, now: float) -> None:
        self._until = now + self._hold
        self._hold = min(2 * self._hold, self._config.demote_cap)

    def _end_train(self) -> None:
        self._train, self._train_next = 0, inf
        self._train_answers = self._train_misses = 0


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.1f} MB/s"
