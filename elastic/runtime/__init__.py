"""One live run: it journals each event, tells the core, and carries out the core's commands.

An effect that cannot be taken back happens only when the journal has its cause.
"""
