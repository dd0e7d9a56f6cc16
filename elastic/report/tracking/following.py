"""Bringing a run's rows to its loggers while it goes on, each logger at its own pace.

A logger that cannot be written is said to be so, once, and tried again with a back-off; the others go on.
"""

import threading
from collections.abc import Callable, Mapping

from elastic.protocol.proxies import without_password
from elastic.report.tracking.delivery import Delivery, Logger, LoggerDown
from elastic.report.tracking.rows import StepSource
from elastic.system.outages import backoff
from elastic.system.processes import told_secrets

BACK_OFF_S, BACK_OFF_MAX_S = 1.0, 60.0


class _Lane:
    """One logger, and when it is tried again."""

    def __init__(self, logger: Logger) -> None:
        self.delivery = Delivery(logger)
        self.failures = 0
        self.not_before_s = 0.0


class Tracking:
    """`say` gets each sentence about a logger, `now_s` any clock that goes on."""

    def __init__(
        self, source: StepSource, loggers: Mapping[str, Logger], say: Callable[[str], None], now_s: Callable[[], float]
    ) -> None:
        self._source = source
        self._lanes = {name: _Lane(logger) for name, logger in loggers.items()}
        self._say = say
        self._now_s = now_s
        self.written = dict.fromkeys(loggers, 0)
        """Rows, by logger, that this process has written."""
        self.left: dict[str, int] = {}
        """At the end: rows that are not known to be there, by logger that lacks any."""

    def advance(self, *, over: bool) -> None:
        """Bring what is finished now to all loggers that are to be tried now. Raises as `StepSource` does."""
        self._source.poll(over=over)
        # Those that fail come last: the others do not wait until they have failed once more.
        for name, lane in sorted(self._lanes.items(), key=lambda one: one[1].failures):
            if self._now_s() >= lane.not_before_s:
                self._advance(name, lane)

    def _advance(self, name: str, lane: _Lane) -> None:
        try:
            written = lane.delivery.advance(self._source.finished, self._source.row)
        except LoggerDown as error:
            if not lane.failures:
                self._say(f"{name} cannot be written, and is waited for: {without_secrets(str(error))}")
            lane.not_before_s = self._now_s() + backoff(lane.failures, BACK_OFF_S, BACK_OFF_MAX_S)
            lane.failures += 1
            return
        self.written[name] += written
        if lane.failures:
            self._say(f"{name} is there again")
        lane.failures = 0

    def lacking(self) -> dict[str, int]:
        """How many finished steps are not known to be in a logger, of those that lack any."""
        counts = {name: lane.delivery.lacking(self._source.finished) for name, lane in self._lanes.items()}
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        self.left = self.lacking()
        for name, lane in self._lanes.items():
            try:
                lane.delivery.close()
            except LoggerDown as error:
                self.left.setdefault(name, 0)
                self._say(f"{name} did not end in order: {without_secrets(str(error))}")
        self._source.close()


def follow(
    tracking: Tracking, over: Callable[[], bool], ended: Callable[[], bool], stop: threading.Event, every_s: float
) -> None:
    """Bring rows until the run has `ended` and all are there, or until `stop` and then what can be brought at once.

    `over` says whether the run writes no more for now; it may be taken up again until it has `ended`.
    """
    while True:
        stopped, end = stop.is_set(), ended()  # Before the rows are read: what is written after that is none's.
        tracking.advance(over=over() or end)
        if stopped or (end and not tracking.lacking()):
            break
        stop.wait(every_s)
    tracking.close()


def without_secrets(text: str) -> str:
    """The text without keys and passwords, whatever a library has put into it."""
    for secret in told_secrets():
        if secret:
            text = text.replace(secret, "[secret]")
    return " ".join(without_password(word) if "://" in word else word for word in text.split(" "))
