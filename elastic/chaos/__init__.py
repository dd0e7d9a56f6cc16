"""The production shell under faults: a run's own gateway, journal, rollout loops and workers on virtual time.

Each simulated process has an event loop of its own, and all of them one clock; connections are in memory. Only engines,
the trainer's arithmetic, environments and providers are models. A process that is killed is not stepped any more, so
that nothing of it runs, not even a `finally`. One seed gives one history.
"""
