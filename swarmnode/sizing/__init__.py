"""What a model needs before anybody has run it: memory, experts, round trips; and whether given devices suffice.

`needs.py` reads the figures off a GGUF's header, `shapes.py` knows the models of the roadmap without one, `plan.py`
puts either on devices. Nothing here loads a model.
"""
