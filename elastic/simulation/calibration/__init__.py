"""Profiles for `elastic simulate`, measured: an engine by driving it, everything around it by a run's journal."""

from elastic.simulation.calibration.engine import measure_engine, profile_engine
from elastic.simulation.calibration.numbers import DEFAULT_BASE, Base, CalibrationError, EngineNumbers, Measured
from elastic.simulation.calibration.run import profile_run
