"""A model's parts from other nodes: manifest, backbone file and experts, verified, from several sources at once.

`frames.py` is the protocol, `server.py` answers, `provider.py` is what it answers from, `source.py` and `download.py`
ask, `schedule.py` decides who is asked for what, `fetcher.py` fills a slice store. Knows nothing of dispatch.
"""
