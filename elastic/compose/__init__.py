"""The composition root: reads a configuration, picks policies, providers and environment, and wires a run.

The only room that knows everybody. Commands of the command line end here.
"""
