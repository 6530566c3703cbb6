"""Tiny random models of every architecture of llama.cpp that has routed experts, and the gate they all pass through."""
