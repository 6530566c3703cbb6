"""Devices from texts such as "3x32G", and how much of their memory a model may have.

Pure. What is kept free (`Device.usable`): a tenth of a device's memory and at least RESERVE for its system, and what a
node's process takes. Called by `swarmnode plan`; `plan.py` puts models on them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swarmnode.errors import UsageError
from swarmnode.sizing.needs import PROCESS_BYTES

GIB: Final = 1 << 30
RESERVE: Final = 3 * GIB // 2  # what a system without other work needs
RESERVE_SHARE: Final = 0.1
MAX_DEVICES: Final = 4096
MAX_MEMORY: Final = 1 << 50
MAX_RTT_S: Final = 60.0

_DEVICE = re.compile(
    r"(?:(?P<count>[0-9]{1,30})\s*[x×*]\s*)?(?P<size>[0-9]{1,30}(?:\.[0-9]{1,3})?)\s*(?P<unit>[kmgt]?)(?P<byte>i?b)?"
    r"(?:\s*@\s*(?P<rtt>[0-9]{1,30}(?:\.[0-9]{1,3})?)\s*(?P<scale>ms|s)?)?",
    re.IGNORECASE | re.ASCII,  # without it "ſ" is an "s", and the Kelvin sign a "k"
)
_SYNTAX = "give a number and a size, such as 3x32G, 64G or 2x16G@80ms"


@dataclass(frozen=True, slots=True)
class Device:
    """A machine that may take part: its whole memory, bytes, and the round trip between it and the others."""

    name: str
    memory: int
    rtt_s: float

    @property
    def usable(self) -> int:
        """Bytes for a model, with its node's process taken off."""
        return max(0, self.memory - max(RESERVE, int(self.memory * RESERVE_SHARE)) - PROCESS_BYTES)


def parse_devices(texts: Sequence[str], rtt_s: float) -> tuple[Device, ...]:
    """Devices from texts such as "3x32G", "64G@20ms"; `rtt_s` where a text names no round trip.

    G is 2^30 bytes, as in `up --memory`, and so are GB, GiB, g, gb and gib; Gb would be bits. Raises UsageError for
    what cannot be meant.
    """
    found: list[Device] = []
    for text in texts:
        for part in text.split(","):
            found += _devices(part.strip(), rtt_s, len(found))
            if len(found) > MAX_DEVICES:
                raise UsageError(f"--devices: {len(found)} devices; {MAX_DEVICES} at most are planned for")
    if not found:
        raise UsageError(f"no devices: {_SYNTAX}")
    return tuple(found)


def _devices(text: str, rtt_s: float, before: int) -> list[Device]:
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise UsageError(f"--devices {text[:40]!r}: {_SYNTAX}")
    if match["byte"] and match["byte"][-1] == "b" and match["unit"].isupper():
        raise UsageError(f"--devices {text[:40]!r}: {match['unit']}b are bits; memory is in bytes: {_SYNTAX}")
    count = int(match["count"] or 1)
    memory = int(float(match["size"]) * 1024 ** " kmgt".index((match["unit"] or " ").lower()))
    if match["rtt"] is not None:
        rtt_s = float(match["rtt"]) / (1 if (match["scale"] or "ms").lower() == "s" else 1000)
    if not 1 <= count <= MAX_DEVICES:
        raise UsageError(f"--devices {text[:40]!r}: {count} devices; 1 to {MAX_DEVICES} can be planned for")
    if not 1 << 20 <= memory <= MAX_MEMORY:
        raise UsageError(f"--devices {text[:40]!r}: that much memory cannot be meant; {_SYNTAX}")
    if rtt_s > MAX_RTT_S:
        raise UsageError(f"--devices {text[:40]!r}: a round trip of {rtt_s:g} s is no connection")
    return [Device(f"device {before + n + 1}", memory, rtt_s) for n in range(count)]
