"""Rollouts on a live serving device: one executor, two models, serving first. Source: ROSE §4.1."""
