"""Decisions as pure functions and small classes, which run live and in simulations alike."""
