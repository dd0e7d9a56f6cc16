"""The simulator that users see: a run, or many jobs on a pool, on modelled devices and virtual time."""
