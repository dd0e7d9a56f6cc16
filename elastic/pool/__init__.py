"""The process of a pool of many jobs, and the keepers of its nodes: see docs/jobs.md."""
