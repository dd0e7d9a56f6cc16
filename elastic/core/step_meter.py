"""Where a step's time goes: the trainer's own, and that of the workers that help it. Source: RLBoost §4.1."""

from dataclasses import dataclass

from elastic.core.types import Nanoseconds


@dataclass(slots=True)
class StepMeter:
    """Sums up to `at_ns`. What was seen at a look holds until the following one."""

    at_ns: Nanoseconds
    training: bool = False
    waiting: bool = False
    workers: int = 0
    train_ns: Nanoseconds = 0
    train_wait_ns: Nanoseconds = 0
    worker_ns: int = 0

    def look(self, now_ns: Nanoseconds, *, training: bool, waiting: bool, workers: int) -> None:
        """Record from `now_ns` on: whether the trainer works or waits, and how many other workers help."""
        if (training, waiting, workers) != (self.training, self.waiting, self.workers):
            self.add_up(now_ns)
            self.training, self.waiting, self.workers = training, waiting, workers

    def add_up(self, now_ns: Nanoseconds) -> None:
        passed_ns = now_ns - self.at_ns
        self.train_ns += passed_ns * self.training
        self.train_wait_ns += passed_ns * self.waiting
        self.worker_ns += passed_ns * self.workers
        self.at_ns = now_ns
