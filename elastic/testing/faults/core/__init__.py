"""The core among models, under seeded faults: cheap, so that thousands of worlds are lived through."""
