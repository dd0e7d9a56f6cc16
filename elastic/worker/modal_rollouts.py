"""Rollout workers in Modal's containers: one call is one lease."""
