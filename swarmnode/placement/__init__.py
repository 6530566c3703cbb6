"""Who holds which experts: routing statistics, expert-parallel load balancing, and the planner for a swarm.

Pure throughout: arrays in, arrays out. `eplb` is the published algorithm for equal devices; `planner` is what a swarm
of unequal ones over a WAN uses, with `routing` (counts from real routing), `coactivation` (a site shared by several
workers), `hot_set` (which experts are worth the nearest memory) and `estimate` (what a placement costs a token).
"""
