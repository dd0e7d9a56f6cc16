"""Samples of a run's status at intervals, for its journal and for those who watch."""

from collections import deque
from collections.abc import Callable, Mapping

import structlog

from elastic.core.scheduler import Scheduler
from elastic.core.types import Nanoseconds
from elastic.runtime.flushing import CoreLoad
from elastic.runtime.journal import SampleRow, SqliteJournal
from elastic.runtime.recorder import JournalRecorder
from elastic.runtime.snapshot import run_status
from elastic.runtime.status import LostPlays, RunStatus, UpstreamStatus, tokens_per_s, total_tokens

log = structlog.get_logger(__name__)

THROUGHPUT_WINDOW = 10
"""Samples over which tokens per second are averaged."""


class Sampler:
    """`cpu_share` says how busy the machine is on which the run's workers are, in [0, 1], `load` how busy the
    orchestrator is, `upstream` what calls of models elsewhere have come to, and `lost` what was played in vain."""

    def __init__(
        self,
        run: str,
        scheduler: Scheduler,
        recorder: JournalRecorder,
        journal: SqliteJournal,
        observe: Callable[[RunStatus], None],
        cpu_share: Callable[[], float] = lambda: 0.0,
        load: Callable[[], CoreLoad] = CoreLoad,
        window: int = THROUGHPUT_WINDOW,
        upstream: Callable[[], UpstreamStatus | None] = lambda: None,
        lost: Callable[[], Mapping[str, LostPlays]] = dict[str, LostPlays],
    ) -> None:
        self._run = run
        self._scheduler = scheduler
        self._recorder = recorder
        self._journal = journal
        self._observe = observe
        self._cpu_share = cpu_share
        self._load = load
        self._upstream = upstream
        self._lost = lost
        self._token_marks = deque[tuple[Nanoseconds, int]](maxlen=window)
        self.warned = 0
        """How many of the run's warnings have been in a sample."""

    def sample(self, now_ns: Nanoseconds) -> None:
        """Journal how the run stands, with the books as they are, and show it."""
        status = self.status(now_ns)
        status.warnings, self.warned = self._scheduler.warnings(self.warned), self._scheduler.warned
        for warning in status.warnings:
            log.warning(warning.message, kind=warning.kind)
        self._journal.append(SampleRow(t_ns=now_ns, status=status))
        self._journal.books(self._scheduler.ledger.books.values())
        self._observe(status)

    def status(self, now_ns: Nanoseconds) -> RunStatus:
        recorder = self._recorder
        self._token_marks.append((now_ns, total_tokens(recorder.counts)))
        return run_status(
            self._run,
            self._scheduler,
            now_ns,
            recorder.counts,
            rewards=recorder.rewards,
            last_success_rate=recorder.last_success_rate,
            last_mean_reward=recorder.last_mean_reward,
            tokens_per_s=tokens_per_s(self._token_marks),
            function_usd=recorder.function_usd,
            cpu_share=self._cpu_share(),
            load=self._load(),
            upstream=self._upstream(),
            lost=self._lost(),
            cut_tokens=recorder.cut_tokens,
        )
