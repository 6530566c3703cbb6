"""Every error swarmnode raises on purpose. The command line prints `str(error)` as its one line.

SwarmnodeError                  exit code 1
├── UsageError                  exit code 2: the caller's flags or configuration
├── ModelError                  a file is not what it should be
│   ├── NotGguf                 not a GGUF file, or one this version cannot read
│   ├── DenseModel              a GGUF without routed experts
│   ├── TruncatedFile           shorter than its own header says
│   ├── CorruptSlice            an expert's bytes do not have the manifest's SHA-256
│   └── ManifestMismatch        a manifest and a file, or two manifests, disagree
├── EngineError                 llama.cpp on this machine
│   ├── LayoutMismatch          the ctypes mirror and the installed library disagree
│   ├── RecipeError             an expert recipe outside the whitelist or with impossible shapes
│   ├── TraceError              the model's graph could not be understood
│   ├── BadCall                 arguments of an engine call that do not fit the site
│   └── ComputeError            ggml or llama.cpp reported a failure
├── DispatchError               calling experts on other nodes
│   ├── NobodyHolds             no reachable node holds these experts
│   ├── CallFailed              every node that holds the experts failed or was too late
│   └── PeerFault               the other node's fault
│       ├── BadFrame            bytes that are no frame of this protocol
│       ├── HelloMismatch       other protocol version, model, recipe or engine build
│       ├── CallRefused         it answered "no", with its reason
│       └── BadAnswer           wrong shape, NaN, Inf
├── ControlError                talking to a node of this machine
│   └── NoNode                  none is running there
└── Cancelled                   the user ended it
"""

from __future__ import annotations

from collections.abc import Iterable


class SwarmnodeError(Exception):
    """Root. The message is one line: what is wrong, the values involved, what to do."""

    exit_code = 1


class UsageError(SwarmnodeError):
    """Flags or configuration that cannot be meant."""

    exit_code = 2


class ModelError(SwarmnodeError):
    """A model file, pack or slice is not what it should be."""


class NotGguf(ModelError):
    """Not a GGUF file."""


class DenseModel(ModelError):
    """A GGUF without routed experts."""


class TruncatedFile(ModelError):
    """A file shorter than its own header says."""


class CorruptSlice(ModelError):
    """An expert's bytes do not have the SHA-256 the manifest names."""


class ManifestMismatch(ModelError):
    """A manifest and a file, or two manifests, disagree."""


class EngineError(SwarmnodeError):
    """llama.cpp on this machine."""


class LayoutMismatch(EngineError):
    """The ctypes mirror of ggml's structs does not fit the installed library."""


class RecipeError(EngineError):
    """An expert recipe outside the whitelist, or with impossible shapes."""


class TraceError(EngineError):
    """The model's graph could not be understood."""


class BadCall(EngineError):
    """Arguments of an engine call that do not fit the site: a wrong shape or dtype, an index out of range."""


class ComputeError(EngineError):
    """ggml or llama.cpp reported a failure."""


class DispatchError(SwarmnodeError):
    """Calling experts on other nodes."""


class NobodyHolds(DispatchError):
    """No reachable node holds these experts."""

    def __init__(self, layer: int, experts: Iterable[int]) -> None:
        self.layer = layer
        self.experts = sorted(experts)
        ids = ", ".join(map(str, self.experts))
        super().__init__(
            f"layer {layer}: nobody reachable holds expert{'s' if len(self.experts) > 1 else ''} {ids}; "
            "start a worker that holds them (swarmnode up --experts …) or give the backbone the model file"
        )


class CallFailed(DispatchError):
    """Every node that holds the experts failed or was too late."""


class PeerFault(DispatchError):
    """The other node's fault."""


class BadFrame(PeerFault):
    """Bytes that are no frame of this protocol."""


class HelloMismatch(PeerFault):
    """Another protocol version, model, recipe or engine build. Names both values."""

    def __init__(self, what: str, ours: object, theirs: object) -> None:
        self.what, self.ours, self.theirs = what, ours, theirs
        super().__init__(f"{what} differs: here {ours}, there {theirs}; run the same version and model pack on both")


class CallRefused(PeerFault):
    """The worker answered "no", with its reason."""


class BadAnswer(PeerFault):
    """An answer with a wrong shape, NaN or Inf."""


class ControlError(SwarmnodeError):
    """Talking to a node of this machine."""


class NoNode(ControlError):
    """No node is running there."""


class Cancelled(SwarmnodeError):
    """The user ended it."""
