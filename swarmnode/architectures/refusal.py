"""What llama.cpp itself says no to: the one failure of a tiny model that is not held against a swarm.

Raised by `discovery.py`, `tiny_model.py` and `check.py`, which alone tells it from other errors.
"""

from __future__ import annotations

import re

from swarmnode.errors import ModelError

# Words about this machine rather than about the model: memory, disk, files.
_OF_THIS_MACHINE = re.compile(r"alloc|memory|mmap|no space|failed to (open|read|seek)|read error|i/o error", re.I)


class LlamaRefused(ModelError):
    """llama.cpp cannot build or run this model."""


def refused(said: str) -> ModelError:
    """LlamaRefused with this line, unless it speaks of what this machine lacks: that excuses nothing."""
    return ModelError(said) if _OF_THIS_MACHINE.search(said) else LlamaRefused(said)
