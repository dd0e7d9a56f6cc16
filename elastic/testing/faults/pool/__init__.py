"""The shell of a pool among models of node agents, residents and jobs, under seeded faults."""
