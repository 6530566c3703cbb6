"""Who is in the swarm and where: signed, short-lived records of peers, and the ways by which they are heard of."""
