"""Helpers for tests of engines, of this distribution and of others."""
