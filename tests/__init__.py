"""Tests, and what they share with benchmarks: stand-ins, planted journals, and what a run's journals prove."""
