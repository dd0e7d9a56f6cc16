"""Worlds in which everything goes wrong that can, on virtual time: of the core, a pool, and the production shell."""
