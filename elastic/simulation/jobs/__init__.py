"""Many jobs on a simulated pool."""
