"""What our relays' directories say: which records there are, by whom, on which relay, and when a record is gone. PURE.

Not the frames (relay_frames) and not the sending (transport/relay_directory, which alone uses this). A publisher's
record may be on several relays, and is gone when none has it any more. `now` is monotonic, in seconds.

    a relay says a record is gone    → that relay has it no more
    its ttl ends                     → the same: a relay that is down says nothing
    the relay is back                → what it does not say again within RESYNC is not there any more; its publisher
                                       has to find the relay again, too
    we left the relay                → what it had counts for LEFT: who was on no other relay is about to be there

Everything from a relay is hostile: MAX_RECORDS by topic and relay, topics that nobody asked for are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transport.proto.relay_frames import PUBLISH_BURST, PUBLISH_RATE, Record

MAX_RECORDS = 2048
RESYNC = 30.0
LEFT = 15.0
SLACK = 1.0  # relays round a ttl up, and their last word may come late


@dataclass(frozen=True, slots=True)
class Change:
    """News of one publisher's record under a topic; `blob` None: gone."""

    topic: bytes
    key: bytes
    blob: bytes | None


@dataclass(slots=True)
class _Known:
    blob: bytes  # that was told last
    until: dict[str, float] = field(default_factory=dict)  # by relay


class RecordBook:
    """The records of the topics that are watched."""

    def __init__(self) -> None:
        self._topics: dict[bytes, dict[bytes, _Known]] = {}
        self._counts: dict[tuple[str, bytes], int] = {}  # records by relay and topic

    @property
    def topics(self) -> list[bytes]:
        """What is watched."""
        return list(self._topics)

    @property
    def empty(self) -> bool:
        """Whether no record is known."""
        return not self._counts

    def watch(self, topic: bytes) -> None:
        """Begin with nothing known."""
        self._topics[topic] = {}

    def unwatch(self, topic: bytes) -> None:
        """Forget the topic."""
        self._topics.pop(topic, None)
        self._counts = {where: count for where, count in self._counts.items() if where[1] != topic}

    def heard(self, url: str, record: Record, now: float) -> Change | None:
        """A relay has said this; what is to be told of it."""
        known = self._topics.get(record.topic)
        if known is None:
            return None
        entry = known.get(record.key)
        if not record.ttl_s:
            return self._drop(url, record.topic, record.key) if entry is not None and url in entry.until else None
        until = now + record.ttl_s + SLACK
        if entry is not None and url in entry.until:
            entry.until[url] = until
        else:
            count = self._counts.get((url, record.topic), 0)
            if count >= MAX_RECORDS:
                return None
            self._counts[url, record.topic] = count + 1
            if entry is None:
                known[record.key] = _Known(record.blob, {url: until})
                return Change(record.topic, record.key, record.blob)
            entry.until[url] = until
        if entry.blob == record.blob:
            return None
        entry.blob = record.blob
        return Change(record.topic, record.key, record.blob)

    def relay_up(self, url: str, now: float) -> None:
        """A new session with this relay: it says anew what it has."""
        self._cap(url, now + RESYNC)

    def relay_left(self, url: str, now: float) -> None:
        """We have closed the link because nobody needs it."""
        self._cap(url, now + LEFT)

    def expire(self, now: float) -> list[Change]:
        """What is gone by now."""
        over = [
            (url, topic, key)
            for topic, known in self._topics.items()
            for key, entry in known.items()
            for url, until in entry.until.items()
            if until <= now
        ]
        changes = [self._drop(*where) for where in over]
        return [change for change in changes if change is not None]

    def _cap(self, url: str, until: float) -> None:
        for known in self._topics.values():
            for entry in known.values():
                if url in entry.until:
                    entry.until[url] = min(entry.until[url], until)

    def _drop(self, url: str, topic: bytes, key: bytes) -> Change | None:
        known = self._topics[topic]
        entry = known[key]
        del entry.until[url]
        self._counts[url, topic] -= 1
        if not self._counts[url, topic]:
            del self._counts[url, topic]
        if entry.until:
            return None
        del known[key]
        return Change(topic, key, None)


class PublishPace:
    """How often one session may publish: a little less than the relay takes, whose clock sees bursts that ours did not
    make."""

    __slots__ = ("_at", "_saved")

    RATE = PUBLISH_RATE * 0.75
    BURST = PUBLISH_BURST - 2

    def __init__(self, now: float) -> None:
        self._saved, self._at = self.BURST, now

    def take(self, now: float) -> bool:
        """Whether one may go now; then it has gone."""
        if self.wait(now):
            return False
        self._saved -= 1
        return True

    def wait(self, now: float) -> float:
        """Seconds until `take` is true; 0 when it is."""
        self._saved = min(self.BURST, self._saved + max(0.0, now - self._at) * self.RATE)
        self._at = now
        return 0.0 if self._saved >= 1 else (1 - self._saved) / self.RATE + 1e-6
