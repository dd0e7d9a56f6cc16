"""Loggers that people read curves in: what a run's journal says of each step, once, in each of them."""

from elastic.report.tracking.delivery import Delivery, Logger, LoggerDown, TrackedRow, TrackedRun, TrackedSample
from elastic.report.tracking.following import Tracking, follow
from elastic.report.tracking.loggers import LOGGERS, check_loggers, logger_named
from elastic.report.tracking.rows import StepSource
from elastic.report.tracking.samples import SampleBounds
