"""The shell of a pool among models of keepers, residents and jobs, under seeded faults."""
