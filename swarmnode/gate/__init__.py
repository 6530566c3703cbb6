"""The gate: does this very model run over a swarm, and is a cheaper wire good enough? Found out once, kept in its pack.

`wires.py` measures (the `gate` command), `bounds.py` judges, `verdict.py` holds the figures, `verdict_file.py` keeps
them, `allowed.py` answers what a node may use. `text.py`, `coding.py`, `experts.py` and `forward.py` are the parts of
the measurement; `exact.py`, `worker_process.py` and `worker_child.py` those of exact mode over a real connection;
`local_run.py` is llama.cpp alone, which both are held against; `integrity.py` whether the experts are still those that
were onboarded; `options.py` how it is measured; `memory.py` and `staged.py` are for a model that does not fit into
memory; `watch.py` and `temporary.py` look after its files; `known_verdicts.py` knows a model by what it is;
`told_verdict.py` is what a swarm's founder says of it, `verdict_bytes.py` how, and whether a verdict counts here.
"""

from __future__ import annotations

from swarmnode.gate.allowed import best_wires, gate_failure, whose_verdict, wires_allowed
from swarmnode.gate.verdict import Verdict
from swarmnode.gate.verdict_file import load_verdict, save_verdict

__all__ = ["Verdict", "best_wires", "gate_failure", "load_verdict", "save_verdict", "whose_verdict", "wires_allowed"]
