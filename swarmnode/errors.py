"""Every error swarmnode raises on purpose. The command line prints `str(error)` as its one line.

SwarmnodeError                  exit code 1
├── UsageError                  exit code 2: the caller's flags or configuration
│   └── BadTicket               a text that is no ticket: empty, cut short, mistyped, of another version
├── MembershipError             belonging to a swarm
│   ├── JoinRefused             the swarm's authority does not let this node in, with the reason
│   └── SwarmFilesDamaged       a file below STATE/swarm cannot be used or written
├── ModelError                  a file is not what it should be
│   ├── NotGguf                 not a GGUF file, or one this version cannot read
│   ├── DenseModel              a GGUF without routed experts
│   ├── BrokenModel             its own figures contradict each other, or its tensors hold what is no number
│   ├── UnknownArchitecture     this llama.cpp does not know it
│   ├── TruncatedFile           shorter than its own header says
│   ├── CorruptSlice            an expert's bytes do not have the manifest's SHA-256
│   ├── DownloadFailed          a web server does not give a file's bytes
│   │   └── SourceChanged       it gives another file than before
│   ├── GateFailed              the gate found that a model does not run as it should
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
│       ├── BadDocument         bytes that are no certificate, proof or list of a swarm, or not genuine ones
│       ├── BadMessage          bytes that are no message between members
│       ├── BadRecord           bytes that are no peer's record of itself
│       ├── HelloMismatch       other protocol version, model, recipe or engine build
│       ├── CallRefused         it answered "no", with its reason
│       └── BadAnswer           wrong shape, NaN, Inf
├── FetchError                  getting a model's parts from other nodes
│   ├── BadBulkFrame            bytes that are no request and no answer of the bulk protocol
│   ├── SourceFailed            one source did not deliver
│   └── FetchFailed             nobody delivers what is wanted
├── BadPlacement                arguments that no placement of experts can have
├── ControlError                talking to a node of this machine
│   ├── NoNode                  none is running there
│   └── NodeSilent              it runs, and does not answer in time
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


class BadTicket(UsageError):
    """A text that is no ticket."""


class MembershipError(SwarmnodeError):
    """Belonging to a swarm."""


class JoinRefused(MembershipError):
    """The swarm's authority does not let this node in."""


class SwarmFilesDamaged(MembershipError):
    """A file below STATE/swarm cannot be used or written."""


class ModelError(SwarmnodeError):
    """A model file, pack or slice is not what it should be."""


class NotGguf(ModelError):
    """Not a GGUF file."""


class DenseModel(ModelError):
    """A GGUF without routed experts."""


class BrokenModel(ModelError):
    """A GGUF whose metadata and tensors contradict each other, or that llama.cpp cannot be given."""


class UnknownArchitecture(ModelError):
    """A model of an architecture that the installed llama.cpp does not know."""


class TruncatedFile(ModelError):
    """A file shorter than its own header says."""


class CorruptSlice(ModelError):
    """An expert's bytes do not have the SHA-256 the manifest names."""


class DownloadFailed(ModelError):
    """A web server does not give a file's bytes."""


class SourceChanged(DownloadFailed):
    """The file behind an address is another one than before."""


class GateFailed(ModelError):
    """The gate found that this model does not give the local run's output over a swarm."""


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


class BadDocument(PeerFault):
    """Bytes that are no certificate, proof or list of a swarm, or whose signature is not its own."""


class BadMessage(PeerFault):
    """Bytes that are no message between members of a swarm."""


class BadRecord(PeerFault):
    """Bytes that are no peer's signed record of itself."""


class HelloMismatch(PeerFault):
    """Another protocol version, model, recipe or engine build. Names both values."""

    def __init__(self, what: str, ours: object, theirs: object) -> None:
        self.what, self.ours, self.theirs = what, ours, theirs
        super().__init__(f"{what} differs: here {ours}, there {theirs}; run the same version and model pack on both")


class CallRefused(PeerFault):
    """The worker answered "no", with its reason."""


class BadAnswer(PeerFault):
    """An answer with a wrong shape, NaN or Inf."""


class FetchError(SwarmnodeError):
    """Getting a model's parts from other nodes."""


class BadBulkFrame(FetchError):
    """Bytes that are no request and no answer of the bulk protocol."""


class SourceFailed(FetchError):
    """One source did not deliver.

    `not_held`: it says that it has no such thing (any more). `busy`: it asks to be asked later. `corrupt`: what it
    sent is not what was asked for. Otherwise it was lost, silent, or broke off.
    """

    def __init__(self, message: str, *, not_held: bool = False, busy: bool = False, corrupt: bool = False) -> None:
        self.not_held, self.busy, self.corrupt = not_held, busy, corrupt
        super().__init__(message)


class FetchFailed(FetchError):
    """Nobody delivers what is wanted."""


class BadPlacement(SwarmnodeError, ValueError):
    """Arguments that no placement of experts can have: shapes, counts, damaged routing statistics."""


class ControlError(SwarmnodeError):
    """Talking to a node of this machine."""


class NoNode(ControlError):
    """No node is running there."""


class NodeSilent(ControlError):
    """It runs, and does not answer in time."""


class Cancelled(SwarmnodeError):
    """The user ended it."""
