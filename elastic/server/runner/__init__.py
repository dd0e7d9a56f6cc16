"""Starts runs, adopts those that live, ends them, and writes down how they stand. Each run is a process of its own."""

from elastic.server.runner.loop import RunnerBusy, RunnerLoop

__all__ = ["RunnerBusy", "RunnerLoop"]
