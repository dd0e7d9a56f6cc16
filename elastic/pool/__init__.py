"""The process of a pool of many jobs, and the node agents of its nodes: see docs/jobs.md."""
