"""Worlds of one or two jobs in a pool: their orchestrators, the pool's process, its node agents and their residents,
all as production code on virtual time.

Models are engines, the trainer's arithmetic, environments and relays as in `faults.shell`, and how processes are
started, watched and killed: a node agent's children, and what the pool's process starts.
"""
