"""How the members of a swarm agree who holds which experts: messages, the coordinator's policy, a worker's agent."""
