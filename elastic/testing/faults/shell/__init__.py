"""The production shell under faults: a run's own gateway, journal, rollout loops and workers on virtual time.

Each simulated process has an event loop of its own; all loops share one clock, and connections are in memory. Only
engines, the trainer's arithmetic, environments and providers are models. A killed process is not stepped any more, so
that not even its `finally` blocks run. One seed gives one history.
"""
