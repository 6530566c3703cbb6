"""The gate: is a cheaper wire good enough for this very model? Found out once, on real text, kept in its pack.

`wires.py` measures (the `gate` command), `bounds.py` judges, `verdict.py` holds the figures, `verdict_file.py` keeps
them, `allowed.py` answers what a node may use. `text.py`, `coding.py`, `experts.py` and `forward.py` are the parts of
the measurement.
"""

from __future__ import annotations

from swarmnode.gate.allowed import best_wires, wires_allowed
from swarmnode.gate.verdict import Verdict
from swarmnode.gate.verdict_file import load_verdict, save_verdict

__all__ = ["Verdict", "best_wires", "load_verdict", "save_verdict", "wires_allowed"]
