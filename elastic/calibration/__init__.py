"""Profiles for `elastic simulate`, measured: an engine by driving it, everything around it by a run's journal."""

from elastic.calibration.engine import measure_engine, profile_engine
from elastic.calibration.numbers import DEFAULT_BASE, Base, CalibrationError, EngineNumbers, Measured
from elastic.calibration.run import find_live_run, profile_run
