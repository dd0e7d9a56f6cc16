"""Fronts: processes of a run that serve agents over HTTP. What agents ask is generated on the run's workers."""
