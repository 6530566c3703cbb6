"""The real relay as a process, for tests of its clients."""

from swarmnode.bench.relay_process import RelayProcess

__all__ = ["RelayProcess"]
