"""Tiny random models of every architecture of llama.cpp that has routed experts, and the gate they all pass through.

`real_shapes.py` has single layers with the true shapes of known models instead. This room knows `gate`, not the other
way round.
"""
