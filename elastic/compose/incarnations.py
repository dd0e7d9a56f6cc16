"""A run's incarnations: what its journals tell of the past ones, and how the next one begins."""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
import structlog

from elastic.compose.agents import agent_limits
from elastic.compose.checkpoints import checkpoints
from elastic.compose.evaluation import planned_evaluation
from elastic.compose.plan import RunPlan, resolve
from elastic.compose.runs import config_replaced
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import Config, ConfigError, validate
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core import saved_state
from elastic.core.digest import digest
from elastic.core.evaluation import best_version, deciding_values
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.core.saved_state import StateError
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.types import NS_PER_S, Nanoseconds, PolicyFault
from elastic.protocol import wire
from elastic.runtime import orchestrator, states
from elastic.runtime.agents import notes
from elastic.runtime.agents.upstream import UpstreamAccount
from elastic.runtime.journal import (
    CONTINUES,
    JOIN,
    PUBLISHER,
    RELAY,
    SIMULATED,
    UNEXPECTED,
    CallRow,
    EvaluationRow,
    JournalError,
    JournalReader,
    RunDirectory,
    SqliteJournal,
    StateRow,
    StepRow,
    StoredRun,
)
from elastic.runtime.recollection import Recollection, gone_on
from elastic.runtime.trainer import kept_steps
from elastic.system.boot_clock import Began
from elastic.system.outages import Outage

log = structlog.get_logger(__name__)


@dataclass
class FinalStatus:
    """How an incarnation ends, for its journal."""

    status: str = UNEXPECTED

    def conclude(self, failed: str, stopped: str = "") -> None:
        """The run has ended by itself; `failed` is the cause of failure and `stopped` why it was stopped, both empty
        for success."""
        self.status = f"failed: {failed}" if failed else f"stopped: {stopped}" if stopped else "finished"


@contextlib.contextmanager
def journaled(journal: SqliteJournal, scheduler: Scheduler) -> Iterator[FinalStatus]:
    """Writes into the journal how the incarnation ended, in any case, and closes it."""
    ending = FinalStatus()
    try:
        yield ending
    except Outage:  # It is no end of the run, which another process takes up once that has passed.
        raise
    except Exception as error:
        ending.status = f"failed: {error}"
        raise
    finally:
        journal.meta("digest", digest(scheduler))
        journal.meta("status", ending.status)
        journal.close()


class PastIncarnations(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a run up to its resumption."""

    providers: tuple[str, ...] = ()
    status: str = ""
    steps_done: int = 0


def past_incarnations(run: RunDirectory) -> PastIncarnations:
    """How far a run has come. Its status is that of the newest journal that names the run's providers.

    Raises `ConfigError` for a journal that cannot be read, and for a simulated run.
    """
    past, steps_done = PastIncarnations(), 0
    try:
        for path in run.journal_paths():
            with JournalReader(path) as journal:
                meta = journal.meta()
                if SIMULATED in meta:
                    raise ConfigError(f"{journal.path}: a simulated run; only live ones can go on")
                steps_done = max([steps_done, *(row.step + 1 for row in journal.rows(StepRow))])
                if "providers" in meta:
                    providers = tuple(name for name in meta["providers"].split(",") if name)
                    past = PastIncarnations(providers=providers, status=meta.get("status", ""))
    except JournalError as error:
        raise ConfigError(f"{error}; the run goes on without this journal once it is moved away") from error
    return msgspec.structs.replace(past, steps_done=steps_done)


@contextlib.contextmanager
def next_incarnation(run: RunDirectory, config: Config, scheduler: Scheduler) -> Iterator[PastIncarnations]:
    """Put the next incarnation's configuration in place; yields what the run had done before.

    An incarnation that fails before its trainer joined leaves neither its journal nor its configuration behind.
    """
    past, journal = past_incarnations(run), run.next_journal_path()
    with config_replaced(run.path, config) as put_back:
        try:
            yield past
        except Exception:
            if scheduler.version is None:
                run.discard_journal(journal)
                put_back()
            raise


RESUMED, BEGAN = "resumed", "began"
"""Notes of a journal: with which digest of the scheduler it went on, and the run's beginning."""


class PreviousIncarnation(msgspec.Struct, frozen=True, kw_only=True):
    """The incarnation that the next one continues, as the journals tell it; `journal` is the name of its journal.

    `state` is None where nothing can be continued: then the run begins at the trainer's newest checkpoint, and what
    still holds of the former incarnations (commands, costs) is `told` to it. `functions_usd` is what functions have
    cost since the continued part began; `budget_usd` is set where the run is given another budget than it had.
    """

    journal: str = ""
    state: bytes | None = None
    digest: str = ""
    last_ns: int = 0
    notes: Mapping[str, str] = {}
    told: tuple[e.Event, ...] = ()
    functions_usd: float = 0.0
    budget_usd: float | msgspec.UnsetType | None = msgspec.UNSET

    @property
    def relay(self) -> str:
        """The address (host:port) at which weights were served, if they were."""
        return urlsplit(self.notes.get(RELAY, "")).netloc

    def notes_to_keep(self) -> dict[str, str]:
        """Notes for the next incarnation's journal."""
        if self.state is None:
            return {BEGAN: msgspec.json.encode(Began.now()).decode()}
        kept = {key: self.notes[key] for key in (BEGAN, "started_at", PUBLISHER) if key in self.notes}
        return kept | {CONTINUES: self.journal, RESUMED: self.digest}

    def taken_up(self) -> orchestrator.ResumePoint | None:
        """The saved state that the next orchestrator starts from; None if it begins anew."""
        if self.state is None:
            return None
        since_ns = msgspec.json.decode(self.notes[BEGAN], type=Began).since_ns()
        return orchestrator.ResumePoint(
            state=self.state,
            now_ns=max(since_ns, self.last_ns),
            join=self.notes.get(JOIN, ""),
            publisher=self.notes.get(PUBLISHER, ""),
            functions_usd=self.functions_usd,
            budget_usd=self.budget_usd,
        )


def previous_incarnation(run: RunDirectory, config: Config) -> PreviousIncarnation:
    """The incarnation to continue. Raises `ConfigError` for a configuration that the run cannot go on with.

    Replay begins at the newest usable saved state, and goes on with the journals' later events.
    """
    if not run.journal_paths():
        return PreviousIncarnation(told=configured_budget(config))
    try:
        version = max((int(path.stem) for path in checkpoints(run.path)), default=0)
        with run.journals() as journals:
            told = (*what_holds(journals, config), *evaluations_until(journals, config, version))
            anew = PreviousIncarnation(told=told)
            chain = _chain(journals)
            if not chain:
                return anew
            notes = _notes(run, chain)
            former = validate(Config, json.loads(notes["config"]), str(chain[-1].path))
            check_same(config, former)
            found = _recollect(run, chain)
            if found is None:
                log.warning("what the journal keeps leads nowhere; the run goes on from the trainer's checkpoint")
                return anew
            last_ns = chain[-1].last_ns()
            functions_usd = sum(call.usd for journal in chain for call in journal.rows(CallRow))
    except JournalError as error:
        raise ConfigError(f"{error}; the run goes on from its checkpoint once this journal is moved away") from error
    core = found.scheduler
    done = core.phase in (Phase.STOPPING, Phase.ENDED)
    if not _stays_failed(core, config, version) and (core.failed or (done and config.run.steps > core.plan.steps)):
        log.info("the run had ended; it goes on from the trainer's checkpoint", failed=core.failed)
        return anew
    if not found.leads_from(version):
        log.warning(
            "the journal does not lead from the newest checkpoint to where the run was; the run goes on from that",
            checkpoint=version,
            journal=core.version,
        )
        return anew
    state = found.saved()
    changed = config.run.budget_usd != former.run.budget_usd
    return PreviousIncarnation(
        journal=chain[-1].path.name,
        state=state,
        digest=digest(core),
        last_ns=max(last_ns, core.now_ns),
        notes=notes,
        functions_usd=functions_usd,
        budget_usd=config.run.budget_usd if changed else msgspec.UNSET,
    )


def _stays_failed(core: Scheduler, config: Config, version: int) -> bool:
    """Whether a run has failed with no step left to do after its checkpoint's `version`, and too many of its
    trajectories for what is allowed now."""
    ended = bool(core.failed) and version >= config.run.steps
    return ended and bool(core.outcomes.failing(config.rollout.max_failed_share))


BUDGET_KEY, CAPS_KEY = "run.budget_usd", "run.caps"
"""The ids of the commands that set the configuration's budget, and with a provider's name its caps."""


def configured_budget(config: Config) -> tuple[e.Event, ...]:
    """The events by which a run learns its configured budget as it begins."""
    usd = config.run.budget_usd
    caps = [e.CapSet(command=f"{CAPS_KEY}.{name}", provider=name, gpus=gpus) for name, gpus in config.run.caps.items()]
    return (*caps, *(() if usd is None else (e.BudgetSet(command=BUDGET_KEY, usd=usd),)))


def what_holds(journals: Sequence[JournalReader], config: Config) -> tuple[e.Event, ...]:
    """What an incarnation that goes on from none of these is told, so that commands are done once, caps hold, and the
    budget counts all that the run has cost: what was held when an incarnation died, for as long as workers outlive
    it."""
    told: list[e.Event] = []
    budget_usd, configured = None, None
    for journal in journals:
        meta = journal.meta()
        said = validate(Config, json.loads(meta["config"]), str(journal.path)) if "config" in meta else config
        configured = said.run.budget_usd
        for _, event in journal.events_of("CapSet", "BudgetSet", "StopCommanded", "Resumed"):
            match event:
                case e.BudgetSet():
                    budget_usd = event.usd
                    told.append(event)
                case e.Resumed() if event.budget_usd is not msgspec.UNSET:
                    budget_usd = event.budget_usd
                case e.StopCommanded():
                    told.append(msgspec.structs.replace(event, undone=True))
                case e.CapSet():
                    told.append(event)
                case _:
                    pass
    if config.run.budget_usd != configured:
        budget_usd = config.run.budget_usd
    costs = _costs_nano_usd(journals, config)
    if (upstream := upstream_account(journals)).granted:
        told.append(e.AgentNoted(note=notes.encode_note(upstream.carried())))
    if not told and budget_usd is None and not any(costs.values()):
        return ()
    of_providers = {name: nano_usd for name, nano_usd in costs.items() if name != OF_FUNCTIONS}
    last = e.BudgetSet(command=f"{BUDGET_KEY} of process {len(journals) + 1}", usd=budget_usd)
    return (*told, e.CostCarried(nano_usd=sum(costs.values()), of_providers=of_providers), last)


def evaluations_until(
    journals: Sequence[JournalReader], config: Config, version: int
) -> tuple[e.EvaluationsCarried, ...]:
    """What an incarnation that begins at this version is told, so that the best version before it stays the best, and
    the run ends when it would have ended. Later versions are another policy's by now. Who goes on with a run that has
    ended by its evaluations has new patience: of those before, only the best ones count.
    """
    plan = planned_evaluation(config)
    if plan is msgspec.UNSET:
        return ()
    values = dict[int, dict[str, float]]()
    for row in (row for journal in journals for row in journal.rows(EvaluationRow) if row.version <= version):
        values[row.version] = deciding_values(plan, row.record)
        if row.ends:
            metrics = {metric for known in values.values() for metric in known}
            best = {best_version({one: known.get(metric) for one, known in values.items()}) for metric in metrics}
            values = {one: known for one, known in values.items() if one in best}
    return (e.EvaluationsCarried(values=values),) if values else ()


def cost_nano_usd(run: RunDirectory) -> int:
    """The most that a run can have cost: what was held when a process of it died, for as long as workers outlive it.

    Raises `JournalError`, or `ConfigError` for a configuration that is none.
    """
    if not run.journal_paths():
        return 0
    with run.journals() as journals:
        return sum(_costs_nano_usd(journals, None).values())


def upstream_account(journals: Iterable[JournalReader]) -> UpstreamAccount:
    """All calls of models elsewhere that these journals tell of, by whichever incarnation."""
    account = UpstreamAccount()
    for journal in journals:
        for _, event in journal.events_of(e.AgentNoted.__name__):
            assert isinstance(event, e.AgentNoted)
            note = notes.decode_note(event.note)
            if isinstance(note, notes.UpstreamAsked | notes.UpstreamTold):
                account.apply(note)
    return account


OF_FUNCTIONS = ""
"""What stands for functions among providers, which have names."""


def _costs_nano_usd(journals: Sequence[JournalReader], config: Config | None) -> dict[str, int]:
    """The most that each provider has cost, and functions, among which are calls of models elsewhere."""
    elsewhere = False
    of_books: dict[tuple[str, int], tuple[str, int]] = {}
    functions_usd = 0.0
    costs = Counter[str]()
    for journal in journals:
        meta = journal.meta()
        said = validate(Config, json.loads(meta["config"]), str(journal.path)) if "config" in meta else config
        elsewhere |= said is not None and said.front is not None and bool(said.front.upstream)
        outlives_s = 0.0 if said is None else said.run.orchestrator_timeout_s
        outlived_ns = journal.last_ns() + round(outlives_s * NS_PER_S)
        for book in journal.books():
            of_books[book.worker, book.opened_ns] = book.provider, book.most_nano_usd(outlived_ns)
        for _, event in journal.events_of("StraysBilled"):
            if isinstance(event, e.StraysBilled):
                costs[event.provider] += math.ceil(event.usd * NANO_USD_PER_USD)
        functions_usd += sum(call.usd for call in journal.rows(CallRow))
    for provider, nano_usd in of_books.values():
        costs[provider] += nano_usd
    costs[OF_FUNCTIONS] += math.ceil(functions_usd * NANO_USD_PER_USD)
    if elsewhere:
        costs[OF_FUNCTIONS] += upstream_account(journals).held_nano_usd
    return costs


def _notes(run: RunDirectory, chain: Sequence[JournalReader]) -> dict[str, str]:
    """The notes of all journals; where two have the same key, the later note. Raises `ConfigError` for a journal of
    another run."""
    notes: dict[str, str] = {}
    for journal in chain:
        notes |= journal.meta()
        if notes["run"] != run.name:
            raise ConfigError(
                f"{journal.path}: the journal of run {notes['run']!r}; this directory is run {run.name!r}"
            )
    return notes


def _chain(journals: Sequence[JournalReader]) -> list[JournalReader]:
    """The newest journal and its predecessors, oldest first; empty where a predecessor is missing."""
    by_name = {journal.path.name: journal for journal in journals}
    chain: list[JournalReader] = []
    name = journals[-1].path.name if journals else ""
    while name:
        if name not in by_name:
            log.warning("a journal is missing; the run goes on from the trainer's checkpoint", journal=name)
            return []
        chain.append(by_name[name])
        name = by_name[name].meta().get(CONTINUES, "")
    return chain[::-1] if BEGAN in chain[-1].meta() else []


def _kept_states(
    run: RunDirectory, chain: Sequence[JournalReader], number: int, in_journal: StateRow | None
) -> Iterator[states.SavedRun]:
    """The states that are kept beside checkpoints, and in the journal whose events from there on are all that is
    kept: then no earlier ones. That is the journal with this `number` in the chain."""
    first = (number, 0 if in_journal is None else in_journal.events)
    names = [journal.path.name for journal in chain]
    for found in states.newest_first(run.path / states.CHECKPOINTS):
        if found.journal in names and (names.index(found.journal), found.events) >= first:
            yield found
    if in_journal is not None:
        try:
            yield states.decoded(in_journal.saved)
        except ValueError as error:
            log.warning("the journal's state not used", reason=str(error))


def _forgotten(chain: Sequence[JournalReader]) -> tuple[int, StateRow | None]:
    """The newest state in a journal of the chain, with the journal's place in it. None where all is kept."""
    for number in reversed(range(len(chain))):
        if (state := chain[number].last(StateRow)) is not None:
            return number, state
    return 0, None


def _recollect(run: RunDirectory, chain: Sequence[JournalReader]) -> Recollection | None:
    """The run as its journals have it; None where they do not keep what led there, nor a state that can be used."""
    names = [journal.path.name for journal in chain]
    kept_from, in_journal = _forgotten(chain)
    for found in _kept_states(run, chain, kept_from, in_journal):
        if found.journal in names:
            number = names.index(found.journal)
            if found.events > chain[number].last_event():
                log.warning("saved state not used", reason="the journal has not kept all that led to it")
                continue
            try:
                recollection = _begin(chain[number], found.state)
            except StateError as error:
                log.warning("saved state not used", reason=str(error))
                continue
            if digest(recollection.scheduler) == found.digest:
                _hear(recollection, chain[number], found.events)
                return _go_on(recollection, chain[number + 1 :])
            log.warning("saved state not used", reason="it leads to another digest")
    if in_journal is not None:
        return None
    recollection = _begin(chain[0])
    _hear(recollection, chain[0])
    return _go_on(recollection, chain[1:])


def _go_on(recollection: Recollection, later: Sequence[JournalReader]) -> Recollection:
    for journal in later:
        recollection = _begin(journal, recollection.saved())
        _hear(recollection, journal)
    return recollection


def _hear(recollection: Recollection, journal: JournalReader, after: int = 0) -> None:
    try:
        recollection.hear(journal.entries(after))
    except (JournalError, PolicyFault):
        raise
    except Exception as error:
        log.exception("journal not understood", journal=str(journal.path))
        raise JournalError(f"{journal.path}: it makes no sense: {type(error).__name__}: {error}") from error


def _begin(journal: JournalReader, state: bytes | None = None) -> Recollection:
    plan, scheduler = _begun(journal)
    return Recollection(scheduler, kept_steps(plan.config), state, agent_limits(plan), plan.token_level)


def scheduler_of(journal: JournalReader) -> tuple[Config, Scheduler]:
    """The configuration and a fresh scheduler of the incarnation that wrote this journal."""
    plan, scheduler = _begun(journal)
    return plan.config, scheduler


def _begun(journal: JournalReader) -> tuple[RunPlan, Scheduler]:
    meta, where = journal.meta(), str(journal.path)
    config = validate(Config, json.loads(meta["config"]), where)
    plan = resolve(config, [name for name in meta["providers"].split(",") if name], where)
    return plan, Scheduler(run_plan(plan), limits(config), policies(config), 0)


PROCESSES = ("processes", "python", "start_timeout_s", "max_restarts", "limits")
"""Keys of environments that are of their processes alone."""
MAY_DIFFER = frozenset(
    {
        *(f"environment.{key}" for key in PROCESSES),
        "run.name",
        "run.directory",
        "run.steps",
        "run.budget_usd",
        "run.caps",
        "run.host",
        "run.port",
        "run.advertise",
        "run.certificate",
        "run.certificate_key",
        "run.pass_env",
        "run.orchestrator_timeout_s",
        "trainer.max_restarts",
        "trainer.step_timeout_s",
        "trainer.usd_per_gpu_hour",
        "trainer.billing",
        "trainer.checkpoint_every_steps",
        "front",
        "weights.port",
        "rollout.max_failed_share",
        "rewards.timeout_s",
        "rewards.concurrency",
        "rewards.idle_s",
        "rewards.max_retries",
        "rewards.retry_base_s",
        "providers",
        "scheduler",
        "seeding",
        "routing",
        "balancing",
        "provisioning",
        "journal",
        "logging",
        "simulation",
    }
)
"""Sections and keys that may have other values when a run goes on: nothing sampled or trained hangs on them."""


def check_same(config: Config, former: Config) -> None:
    """Raise `ConfigError` if the continued run would differ from the run before."""
    now, before = _sections(config), _sections(former)
    for section in now.keys() - MAY_DIFFER:
        has, had = now[section] or {}, before.get(section) or {}
        for key in has or had:
            name, found, was = f"{section}.{key}", has.get(key), had.get(key)
            if found != was and name not in MAY_DIFFER:
                raise ConfigError(
                    f"--resume: {name}: found {found!r}, but the run began with {was!r}; what may differ: "
                    f"{', '.join(sorted(MAY_DIFFER))}"
                )


def _sections(config: Config) -> dict[str, Any]:
    """The sections of a configuration, and what there is of each environment but for what may differ. Their order is
    part of it: the groups of each are counted by its place."""
    sections = config.model_dump(mode="json")
    listed = sections.pop("environments")
    if listed:
        sections["environments"] = _of_each(listed)
    if (evaluation := sections["evaluation"]) is not None:
        evaluation["splits"] = _of_each(evaluation["splits"])
    return sections


def _of_each(listed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    of_each: dict[str, Any] = {one["name"]: {k: v for k, v in one.items() if k not in PROCESSES} for one in listed}
    return of_each | {"*.name": [*of_each]}


Tell: TypeAlias = Callable[[Nanoseconds, e.Event, wire.Tokens | None, Sequence[c.Command]], None]
"""Called for each replayed event with its time, the tokens that came in it, and the commands that followed."""


def replay(run: StoredRun, tell: Tell = lambda *_: None) -> Scheduler:
    """The scheduler in the state to which the run's journals lead, where one goes on from another (invariant 13).

    Where a journal keeps a state for what led to it, it begins there. Raises `ValueError` for one that cannot be used.
    """
    with run.journals() as journals:
        chain = _chain(journals) or journals[-1:]
        first, kept = _forgotten(chain)
        state = None if kept is None else states.decoded(kept.saved).state
        scheduler = scheduler_of(chain[first])[1]
        for number, journal in enumerate(chain[first:]):
            if number:
                state = saved_state.save(scheduler)
                scheduler = scheduler_of(journal)[1]
            if state is not None:
                saved_state.restore(scheduler, state)
            entries = journal.entries(0 if number or kept is None else kept.events)
            for t_ns, event, tokens in entries if journal is chain[-1] else gone_on(entries):
                tell(t_ns, event, tokens, scheduler.handle(event, t_ns))
    return scheduler
