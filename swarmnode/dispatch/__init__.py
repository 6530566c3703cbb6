"""Calling experts on other nodes: the frames, the client that sends x, the worker that answers."""
