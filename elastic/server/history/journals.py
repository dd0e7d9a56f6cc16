"""Figures, series, workers, leases and checkpoints from a run's journals. Only reads, also while the run goes on."""

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from elastic import report
from elastic.compose import incarnations
from elastic.compose.agents import agents_url
from elastic.config import Config, ConfigError, validate
from elastic.core import events as e
from elastic.core.ledger import NANO_USD_PER_USD, DeviceBook
from elastic.core.types import NS_PER_S
from elastic.protocol.api import (
    Checkpoint,
    EnvironmentMetrics,
    EvaluationFigures,
    EvaluationMetrics,
    HostedLease,
    HostedOffers,
    HostedWorker,
    Metrics,
    OfferMoment,
    RunFigures,
    StepMetrics,
)
from elastic.protocol.endpoint import Address
from elastic.protocol.run_secrets import FILE, ROOT_BYTES, RunSecrets
from elastic.report.evaluations import evaluations_of
from elastic.report.history import History, StepExtent
from elastic.report.lanes import WorkerLane, lanes
from elastic.report.samples import Chosen
from elastic.report.usage import lease_ends
from elastic.runtime.journal import (
    AGENTS,
    CONTINUES,
    EvaluationRow,
    JournalError,
    JournalReader,
    RunDirectory,
    SampleRow,
    ShownJournal,
    StepRow,
)
from elastic.runtime.status import RunStatus
from elastic.server.clock import rfc3339
from elastic.server.history.apart import apart
from elastic.server.history.kept_events import KeepingReader
from elastic.system.tenant_files import NotAFile, as_owner, files, opened

T = TypeVar("T")
R = TypeVar("R", HostedWorker, HostedLease, HostedOffers)

MOMENTS_MAX = 500
"""The most moments of one provider's offers that are returned."""
CHECKPOINTS, SAFETENSORS = "checkpoints", ".safetensors"
CHECKPOINT_ID = "[0-9]{1,12}"
WRITTEN = ("", "-wal")
"""Suffixes of the files that SQLite writes for a journal."""
SETTLED_S = 0.1
"""File times are only accurate to milliseconds: a file written within this time may change again under the same
time."""

Version = tuple[tuple[str, int, int], ...]


def version_of(run_dir: Path) -> Version | None:
    """Return a value that changes with every write to the run's journals; None while a write is too recent to tell."""
    found: list[tuple[str, int, int]] = []
    with contextlib.suppress(NotAFile), as_owner(run_dir):
        for path in _journal_paths(run_dir):
            for suffix in WRITTEN:
                with contextlib.suppress(FileNotFoundError):
                    stat = path.with_name(path.name + suffix).stat()
                    found.append((path.name + suffix, stat.st_size, stat.st_mtime_ns))
    newest_ns = max((mtime_ns for *_, mtime_ns in found), default=0)
    return None if time.time_ns() - newest_ns < SETTLED_S * NS_PER_S else tuple(found)


def count_journals(run_dir: Path) -> int:
    """Return the number of the run's journals."""
    with contextlib.suppress(NotAFile), as_owner(run_dir):
        return len(_journal_paths(run_dir))
    return 0


def _journal_paths(run_dir: Path) -> list[Path]:
    """Return the paths of the run's journals; none where its owner may not go."""
    try:
        return list(RunDirectory(run_dir).journal_paths())
    except OSError:
        return []


@apart()
def figures_of(run_dir: Path, former: int = 0) -> RunFigures | None:
    """Return the latest status of the run from its journals, without the `former` oldest; None if they have none yet.

    Cost and tokens include what the run had when it was resumed from a checkpoint.
    """
    with contextlib.suppress(NotAFile), as_owner(run_dir):
        return _figures_of(run_dir, former)
    return None


def _figures_of(run_dir: Path, former: int) -> RunFigures | None:
    paths = _journal_paths(run_dir)
    newest: RunFigures | None = None
    evaluations: dict[int, EvaluationRow] = {}
    undone_from = begun_at = math.inf
    follows = ""
    continued = False
    for number in reversed(range(len(paths))):
        with contextlib.suppress(JournalError, OSError), ShownJournal(paths[number]) as journal:
            if newest is None and number < former:
                return None
            if follows != paths[number].name:  # What came behind it began again at a checkpoint.
                undone_from, begun_at = min(undone_from, begun_at), math.inf
            for row in reversed(journal.rows(EvaluationRow)):
                if row.version <= undone_from:
                    evaluations.setdefault(row.version, row)
            begun_at, follows = min(begun_at, journal.first_step()), journal.meta().get(CONTINUES, "")
            sample = None if continued else journal.last(SampleRow)
            if sample is not None:
                earlier = RunFigures.model_validate(msgspec.to_builtins(sample.status))
                newest = earlier if newest is None else _with_earlier(newest, earlier)
            continued = newest is not None and CONTINUES in journal.meta()
    return newest and newest.model_copy(update={"evaluation": _evaluation(evaluations)})


def _evaluation(rows: Mapping[int, EvaluationRow]) -> EvaluationFigures | None:
    """The last evaluation, and the version that was the best last."""
    if not rows:
        return None
    record = rows[max(rows)].record
    return EvaluationFigures(
        version=record.version,
        timed_out=record.timed_out,
        metrics=msgspec.to_builtins(record.metrics),
        best_version=max((version for version, row in rows.items() if row.best), default=None),
    )


@apart()
def cost_nano_usd(run_dir: Path) -> int:
    """Return the most that a run can have cost according to all of its journals; 0 if they cannot be read."""
    with contextlib.suppress(JournalError, ConfigError, OSError), as_owner(run_dir):
        return incarnations.cost_nano_usd(RunDirectory(run_dir))
    return 0


def _with_earlier(figures: RunFigures, earlier: RunFigures) -> RunFigures:
    providers = dict(figures.providers)
    for name, before in earlier.providers.items():
        now = providers.get(name)
        providers[name] = (
            before.model_copy(update={"ready": 0, "booting": 0, "running_turns": 0, "usd_per_hour": 0.0})
            if now is None
            else now.model_copy(update={"tokens": now.tokens + before.tokens, "usd": now.usd + before.usd})
        )
    return figures.model_copy(update={"usd": figures.usd + earlier.usd, "providers": providers})


class Wanted(msgspec.Struct, frozen=True):
    """What of a run's series is wanted: steps after `step` and samples after `at_s`. Of more than these the last one,
    and evenly spaced ones."""

    samples_max: int
    steps_max: int = 10**9
    step: int = -1
    at_s: float = -1.0


@apart()
def metrics_json(run_dir: Path, run: str, wanted: Wanted) -> bytes:
    """As `metrics_of`, as JSON, of which the server then need make nothing."""
    return metrics_of(run_dir, run, wanted).model_dump_json().encode()


@apart()
def entries_of(run_dir: Path, read: Callable[[History], Sequence[R]]) -> Sequence[tuple[str, bytes]]:
    """Return what one of the functions here that read lists finds: each entry's id, and the entry as JSON; then, under
    no id, what of the journals cannot be read. Raises `JournalError`."""
    with history_in(run_dir, KeepingReader) as history:
        found = [(row.id, row.model_dump_json().encode()) for row in read(history)]
        return [*found, *(("", json.dumps(words).encode()) for words in history.broken)]


@apart()
def metrics_of(run_dir: Path, run: str, wanted: Wanted) -> Metrics:
    """Return the run's series. Raises `JournalError`."""
    with history_in(run_dir) as history:
        rows = _thinned(history.steps(wanted.step, wanted.steps_max), wanted.steps_max)
        shown = [row.step for row in rows]
        means, lengths, ages = history.mean_rewards(shown), history.lengths(shown), history.ages(shown)
        steps = [_step(row, means.get(row.step), lengths.get(row.step), ages.get(row.step)) for row in rows]
        samples = [status for _, status in history.samples(wanted.samples_max, math.floor(wanted.at_s * NS_PER_S))]
        evaluations, unreadable = evaluations_of(history), history.broken
    evaluated = [
        EvaluationMetrics(**msgspec.to_builtins(one), best=one.version == evaluations.best)
        for one in evaluations.versions
    ]
    return Metrics(
        run=run,
        steps=steps,
        evaluations=evaluated,
        samples=[_figures(status) for status in _thinned(samples, wanted.samples_max)],
        unreadable=unreadable,
    )


def _thinned(rows: Sequence[T], most: int) -> list[T]:
    stride = -(-len(rows) // most) if rows else 1
    return [*rows[:-1][::stride], *rows[-1:]]


def _figures(status: RunStatus) -> RunFigures:
    return RunFigures.model_validate(msgspec.to_builtins(status))


def _step(
    row: StepRow, mean_reward: float | None, lengths: StepExtent | None, ages: tuple[float, int] | None
) -> StepMetrics:
    over = 0 if lengths is None else lengths.over
    age_mean, age_max = ages or (None, None)
    return StepMetrics(
        tokens_mean=None if lengths is None else lengths.tokens / over,
        tokens_max=None if lengths is None else lengths.tokens_max,
        truncated_share=None if lengths is None else lengths.truncated / over,
        failed_share=None if lengths is None else lengths.failed / over,
        age_mean=age_mean,
        age_max=age_max,
        step=row.step,
        at_s=row.t_ns / NS_PER_S,
        duration_s=row.record.duration_ns / NS_PER_S,
        success_rate=row.success_rate,
        mean_reward=mean_reward,
        groups_trained=row.record.groups_trained,
        groups_dropped=row.record.groups_dropped,
        trainer=row.trainer,
        environments={
            name: EnvironmentMetrics.model_validate(msgspec.to_builtins(one)) for name, one in row.environments.items()
        },
    )


def workers_of(history: History) -> list[HostedWorker]:
    """Return every worker that the run has or had, newest first. Raises `JournalError`."""
    books = history.books()
    # No lease counts as one that ran out of time until it has.
    found = {lane.worker: lane for lane in lanes(history, books, lease_ends(history, books), history.end_ns, 0)}
    return [_worker(book, found[book.worker]) for book in reversed(books)]


def _worker(book: DeviceBook, lane: WorkerLane) -> HostedWorker:
    return HostedWorker(
        id=book.worker,
        lease=book.lease,
        provider=book.provider,
        gpus=book.gpus,
        usd_per_gpu_hour=book.nano_usd_per_gpu_hour / NANO_USD_PER_USD,
        opened_s=book.opened_ns / NS_PER_S,
        ready_s=lane.ready_s,
        notice_s=lane.notice_s,
        closed_s=None if book.closed_ns is None else book.closed_ns / NS_PER_S,
        cause=lane.cause,
        lost=lane.lost,
        accounts_s={str(account): ns / NS_PER_S for account, ns in book.accounts_ns.items()},
    )


def leases_of(history: History) -> list[HostedLease]:
    """Return every lease that the run has or had, newest first. Raises `JournalError`."""
    books, end_ns = history.books(), history.end_ns
    causes = {end.lease: end.cause for end in lease_ends(history, books)}
    by_lease: dict[str, list[DeviceBook]] = {}
    for book in books:
        by_lease.setdefault(book.lease, []).append(book)
    return [_lease(lease, its, causes.get(lease, ""), end_ns) for lease, its in reversed(by_lease.items())]


def _lease(lease: str, books: Sequence[DeviceBook], cause: str, end_ns: int) -> HostedLease:
    closed = [book.closed_ns for book in books]
    ended_ns = None if None in closed else max(ns for ns in closed if ns is not None)
    return HostedLease(
        id=lease,
        provider=books[0].provider,
        workers=[book.worker for book in books],
        gpus=sum(book.gpus for book in books),
        opened_s=min(book.opened_ns for book in books) / NS_PER_S,
        closed_s=None if ended_ns is None else ended_ns / NS_PER_S,
        usd=sum(book.cost_nano_usd(end_ns) for book in books) / NANO_USD_PER_USD,
        cause=cause,
        accounts_s=_gpu_seconds(books),
    )


def _gpu_seconds(books: Sequence[DeviceBook]) -> dict[str, float]:
    found: dict[str, float] = {}
    for book in books:
        for account, ns in book.accounts_ns.items():
            found[str(account)] = found.get(str(account), 0.0) + book.gpus * ns / NS_PER_S
    return found


def offers_of(history: History) -> list[HostedOffers]:
    """Return what each provider has offered the run over time, by their names. Raises `JournalError`."""
    told: dict[str, tuple[int, list[OfferMoment]]] = {}
    last: dict[str, dict[str, float]] = {}
    for t_ns, event in history.events_of(e.OfferChanged):
        offer = event.offer
        gpus, moments = told.get(offer.provider, (0, []))
        now = {
            "available": offer.available,
            "replacements": offer.replacements,
            "usd_per_gpu_hour": offer.usd_per_gpu_hour,
        }
        if now != last.get(offer.provider):
            last[offer.provider] = now
            moments.append(OfferMoment.model_validate({"at_s": t_ns / NS_PER_S, **now}))
        told[offer.provider] = max(gpus, offer.gpus_per_worker * offer.workers_per_lease), moments
    return [
        HostedOffers(id=name, gpus_per_lease=gpus, moments=_thinned(moments, MOMENTS_MAX))
        for name, (gpus, moments) in sorted(told.items())
    ]


@apart()
def report_of(run_dir: Path, form: Literal["json", "html", "markdown"], chosen: Chosen | None = None) -> bytes | None:
    """Return a report on the run; None before it has a journal. `chosen` are the trajectories that its page shows.
    Raises `JournalError`."""
    if not count_journals(run_dir):
        return None
    with as_owner(run_dir):
        summary = report.summarise(RunDirectory(run_dir))
    if form == "json":
        return json.dumps(report.as_json(summary), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return (report.as_html(summary, chosen=chosen) if form == "html" else report.as_markdown(summary)).encode()


def checkpoints_of(run_dir: Path) -> list[Checkpoint]:
    """Return the trainer's checkpoints, newest first."""
    found: list[Checkpoint] = []
    for name, stat in reversed(files(run_dir, CHECKPOINTS, SAFETENSORS)):
        id_ = name.removesuffix(SAFETENSORS)
        if re.fullmatch(CHECKPOINT_ID, id_):
            created_at = rfc3339(stat.st_mtime_ns // 1_000) or ""
            found.append(Checkpoint(id=id_, version=int(id_), bytes=stat.st_size, created_at=created_at))
    return found


@apart()
def agents_of(run_dir: Path, driver: str) -> tuple[str, str, str] | None:
    """Return where the run serves agents, and the keys that this driver and viewers show there; None where it serves
    none.

    Raises `JournalError`, and `OSError`.
    """
    with contextlib.suppress(NotAFile), as_owner(run_dir):
        served, config, path = "", "", run_dir
        for path in _journal_paths(run_dir):
            with contextlib.suppress(JournalError, OSError), JournalReader(path) as journal:
                meta = journal.meta()
                served, config = meta.get(AGENTS, served), meta["config"]
        if served:
            with opened(run_dir, FILE) as file:
                secrets = RunSecrets(file.read(ROOT_BYTES))
            base_url = agents_url(validate(Config, json.loads(config), path.name), Address.parse(served))
            return base_url, secrets.driver_key(driver), secrets.viewer_key()
    return None


@contextlib.contextmanager
def history_in(run_dir: Path, reader: type[JournalReader] = ShownJournal) -> Iterator[History]:
    """Return the run's history, its journals read so; empty before it has one. Raises `JournalError`."""
    directory = RunDirectory(run_dir)
    with as_owner(run_dir):
        if not directory.journal_paths():
            yield History(directory.name, [])
            return
        with directory.journals(reader) as journals:
            yield History(directory.name, journals)
