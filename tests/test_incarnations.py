"""What a run's journals say of where it was: read whole, torn, damaged, in part, and with another configuration."""

import contextlib
import functools
import itertools
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.compose import incarnations
from elastic.compose.execution import execute
from elastic.compose.incarnations import (
    BEGAN,
    MAY_DIFFER,
    PreviousIncarnation,
    check_same,
    past_incarnations,
    previous_incarnation,
    replay,
    scheduler_of,
)
from elastic.compose.plan import resolve
from elastic.compose.runs import claimed, load_run_config
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import Config, ConfigError, load_config, validate
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.ledger import NANO_USD_PER_USD, DeviceBook
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.types import NS_PER_S, Account, Capabilities, EndCause, Offer, WorkerRole
from elastic.runtime import states
from elastic.runtime.journal import (
    CONTINUES,
    BookRow,
    EventRow,
    JournalError,
    JournalReader,
    JournalRecord,
    NullJournal,
    RunDirectory,
    StateRow,
    event_row,
    forget_former,
)
from elastic.runtime.journal.records import TABLES
from elastic.runtime.ports import Ports
from elastic.runtime.recollection import Recollection, gone_on
from elastic.runtime.recorder import JournalRecorder
from elastic.runtime.run import Run
from elastic.runtime.trainer import kept_steps
from elastic.simulation import run as simulation
from elastic.system.boot_clock import Began
from elastic.system.host import Host, on
from tests.retold import retell

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "frozenlake.toml"
PROVIDERS = ("serving", "spot")
SETTINGS = ("run.steps=5", "rollout.groups=4", "rollout.group_size=3", "trainer.checkpoint_every_steps=2")
SHARE = 0.9
"""Of the run's events that are there when it dies."""


@pytest.fixture(scope="session")
def config() -> Config:
    return load_config(EXAMPLE, SETTINGS)


@pytest.fixture(scope="session")
def retold(tmp_path_factory: pytest.TempPathFactory, config: Config) -> Callable[[float], RunDirectory]:
    """A run that was killed after this share of its events, with the states that it had saved."""
    simulated = RunDirectory(tmp_path_factory.mktemp("simulated"))
    simulation.simulate(resolve(config, PROVIDERS, "test"), simulated.path, simulation.Experiment())

    def made(share: float) -> RunDirectory:
        run = RunDirectory(tmp_path_factory.mktemp("died") / "run")
        run.path.mkdir()
        retell(config, PROVIDERS, simulated, run, round(share * events(simulated.path / "journal.sqlite")))
        return run

    return made


@pytest.fixture(scope="session")
def died(retold: Callable[[float], RunDirectory]) -> Path:
    """In its last step."""
    run = retold(SHARE)
    assert len(list(run.path.glob("checkpoints/*.state"))) == states.KEEP
    return run.path


@pytest.fixture
def run(died: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory(Path(shutil.copytree(died, tmp_path / "run")))


@pytest.fixture(scope="session")
def whole(died: Path) -> str:
    """The digest to which the journal leads."""
    return digest(replay(RunDirectory(died)))


def events(path: Path) -> int:
    with JournalReader(path) as journal:
        return journal.last_event()


def digests(run: RunDirectory) -> Iterator[str]:
    """Of the scheduler before the first event, and after each."""
    with run.newest_journal() as journal:
        scheduler = scheduler_of(journal)[1]
        yield digest(scheduler)
        for t_ns, event, _ in journal.entries():
            scheduler.handle(event, t_ns)
            yield digest(scheduler)


def went_on(run: RunDirectory, former: PreviousIncarnation, config: Config) -> None:
    """Another incarnation takes the run up, and dies at once."""
    run.begin_journal(config.journal, notes=_notes(run, config) | former.notes_to_keep()).close()


def _notes(run: RunDirectory, config: Config) -> dict[str, str]:
    return {"run": run.name, "config": config.model_dump_json(), "providers": ",".join(PROVIDERS)}


def test_a_run_is_taken_up_where_its_journal_leads(run: RunDirectory, config: Config, whole: str) -> None:
    """A whole simulated run is taken up three times, from journals on disk."""
    former = previous_incarnation(run, config)
    assert former.digest == whole
    assert former.state is not None
    for _ in range(3):
        went_on(run, former, config)
        former = previous_incarnation(run, config)
        assert former.digest == whole
        assert digest(replay(run)) == whole
    assert former.journal == "journal.4.sqlite"


def saved_by(recollection: Recollection, journal: str, events: int) -> StateRow:
    scheduler = recollection.scheduler
    saved = states.SavedRun(
        journal=journal,
        events=events,
        t_ns=scheduler.now_ns,
        digest=digest(scheduler),
        state=recollection.saved(),
    )
    return StateRow(events=events, saved=states.encoded(saved))


def recollecting(config: Config, state: bytes | None = None) -> Recollection:
    plan = resolve(config, PROVIDERS, "test")
    scheduler = Scheduler(run_plan(plan), limits(config), policies(config), 0)
    return Recollection(scheduler, kept_steps(config), state)


@pytest.fixture(scope="session")
def forgetting(died: Path, tmp_path_factory: pytest.TempPathFactory, config: Config) -> tuple[Path, dict[Path, str]]:
    """The same run, whose journal has forgotten twice what led to its state; and the journal's files as they were
    at each statement of that, with the digest of then."""
    old, new, seen = RunDirectory(died), RunDirectory(tmp_path_factory.mktemp("forgetting") / "run"), dict[Path, str]()
    (new.path / states.CHECKPOINTS).mkdir(parents=True)
    stands = ""

    def statement(sql: str) -> None:
        if stands:
            seen[new.path.parent / f"seen {len(seen)}" / "run"] = stands
            shutil.copytree(new.path, list(seen)[-1])

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = sqlite3.connect(*arguments, **options)
        connection.set_trace_callback(statement)
        return connection

    with old.newest_journal() as journal, on(Host(connect=connect)):
        rows, entries = journal.rows(EventRow), journal.entries()
        written = new.begin_journal(config.journal, waits=True, notes=journal.meta())
        recollection = recollecting(config)
        for number, row in enumerate(rows, 1):
            written.append(row)
            recollection.hear(itertools.islice(entries, 1))
            if number in (len(rows) // 3, 2 * len(rows) // 3):
                written.durable().result()
                stands = digest(recollection.scheduler)
                written.forget(saved_by(recollection, written.path.name, number), 0)
                written.durable().result()
                stands = ""
        written.close()
    return new.path, seen


def test_a_journal_that_forgets_leads_where_it_led(
    forgetting: tuple[Path, dict[Path, str]], config: Config, whole: str, died: Path
) -> None:
    run = RunDirectory(forgetting[0])
    assert previous_incarnation(run, config).digest == whole
    assert digest(replay(run)) == whole
    with run.newest_journal() as kept, RunDirectory(died).newest_journal() as all_of_it:
        assert len(kept.rows(EventRow)) < len(all_of_it.rows(EventRow)) / 2
        assert kept.last_event() == all_of_it.last_event()
        assert list(kept.events_of("LeaseEnded")) == list(all_of_it.events_of("LeaseEnded"))


def test_who_is_killed_while_a_journal_forgets_has_lost_nothing(forgetting: tuple[Path, dict[Path, str]]) -> None:
    _, seen = forgetting
    assert len(seen) > 10
    assert [path for path, stands in seen.items() if digest(replay(RunDirectory(path))) != stands] == []


def test_a_run_whose_state_another_program_wrote_begins_at_its_checkpoint(
    forgetting: tuple[Path, dict[Path, str]], config: Config, tmp_path: Path
) -> None:
    run = RunDirectory(Path(shutil.copytree(forgetting[0], tmp_path / "run")))
    with closing(sqlite3.connect(run.path / "journal.sqlite")) as journal:
        journal.execute("UPDATE states SET saved = x'00'")
        journal.commit()
    assert previous_incarnation(run, config).state is None


def test_former_journals_are_forgotten_once_a_later_one_has_a_state(run: RunDirectory, config: Config) -> None:
    former = previous_incarnation(run, config)
    journal = run.begin_journal(config.journal, notes=_notes(run, config) | former.notes_to_keep())
    recollection = recollecting(config, former.state)
    journal.append(event_row(e.Resumed(), former.last_ns))
    recollection.hear([(former.last_ns, e.Resumed(), None)])
    journal.forget(saved_by(recollection, journal.path.name, 1), 0)
    journal.close()
    size_bytes, stands = (run.path / "journal.sqlite").stat().st_size, digest(recollection.scheduler)
    for _ in range(2):
        forget_former([run.path / "journal.sqlite"])
        assert (run.path / "journal.sqlite").stat().st_size < size_bytes / 2
        assert previous_incarnation(run, config).digest == digest(replay(run)) == stands


@pytest.mark.parametrize("short_of_all", [0, 1])
def test_a_run_that_had_done_its_steps_has_no_more_to_do_unless_more_are_wanted(
    retold: Callable[[float], RunDirectory], config: Config, short_of_all: int
) -> None:
    """Its process was killed while it gave back what it had, or after that."""
    run = retold(1.0)
    with closing(sqlite3.connect(run.path / "journal.sqlite")) as journal:
        last = "(SELECT MAX(seq) FROM events WHERE kind = 'LeaseEnded')"
        journal.execute(f"DELETE FROM events WHERE seq >= {last} AND ?", (short_of_all,))
        journal.commit()
    core = replay(run)
    assert core.phase is (Phase.STOPPING if short_of_all else Phase.ENDED)
    assert previous_incarnation(run, config).digest == digest(core)
    more = config.model_copy(update={"run": config.run.model_copy(update={"steps": config.run.steps + 1})})
    assert previous_incarnation(run, more) == PreviousIncarnation()


def test_a_run_that_failed_by_its_trajectories_stays_failed_while_no_more_may_fail(tmp_path: Path) -> None:
    """With its last step done there is nothing left that could go better."""
    run, allowed = RunDirectory(tmp_path), "rollout.max_failed_share={}"
    changes = ("run.steps=1", "rollout.groups=1", "rollout.group_size=2", "trainer.updates_per_step=1")

    def formed(share: float) -> Config:
        return load_config(EXAMPLE, (*changes, allowed.format(share)))

    at: dict[str, Any] = {"worker": "trainer", "epoch": 1}
    capabilities = Capabilities(engine="test", replayable_sampling=True, max_context_tokens=4096, device="none")
    told = (
        e.OfferChanged(offer=Offer(provider="trainer", role=WorkerRole.TRAINER, available=1, usd_per_gpu_hour=2.0)),
        e.LeaseGranted(lease="trainer-1", workers=("trainer",), expires_at_ns=None),
        e.WorkerJoined(**at, capabilities=capabilities, weights_version=0),
        *(e.TrajectoryFailed(trajectory=f"0/0/{member}", cause="no lake today") for member in range(2)),
        e.WorkerSlept(**at),
        e.WeightsPublished(**at, version=1),
        e.LeaseEnded(lease="trainer-1", cause=EndCause.RELEASED),
    )
    notes = _notes(run, formed(0.5)) | {BEGAN: msgspec.json.encode(Began.now()).decode()}
    with closing(run.begin_journal(formed(0.5).journal, notes=notes)) as journal:
        for event in told:
            journal.append(event_row(event, 0))
    (run.path / states.CHECKPOINTS).mkdir()
    (run.path / states.CHECKPOINTS / "1.safetensors").touch()
    core = replay(run)
    assert "2 of 2 trajectories of the last step have failed" in core.failed
    for share in (0.5, 0.9):
        former = previous_incarnation(run, formed(share))
        assert former.digest == digest(core) == digest(replay(run))
        assert former.taken_up()
        went_on(run, former, formed(share))
    assert previous_incarnation(run, formed(1.0)).state is None


def test_what_the_trainer_publishes_again_takes_nothing_from_the_account_of_its_step(
    run: RunDirectory, config: Config
) -> None:
    """A trainer's next process publishes the version that it begins with; of that step the row has all."""
    appended: list[JournalRecord] = []

    class Noting(NullJournal):
        keeps = True

        def append(self, *records: JournalRecord) -> None:
            appended.extend(records)

    with run.newest_journal() as journal:
        scheduler = scheduler_of(journal)[1]
        recorder = JournalRecorder(scheduler, Noting())
        for t_ns, event, _ in journal.entries():
            recorder.recalled(t_ns, event, scheduler.handle(event, t_ns))
    for version in range(1, config.run.steps):
        recorder.published(version, {}, {"publish_s": 1.0})
    assert appended == []


def damaged(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def truncated(share: float, content: bytes) -> bytes:
    return content[: int(share * len(content))]


class TestSavedState:
    """What is no use is not used: the journal has all."""

    @pytest.fixture
    def run(self, run: RunDirectory) -> RunDirectory:
        """Counts the entries that are read of its journals since what reading began with: `heard`."""
        self.heard = 0

        def count() -> None:
            self.heard += 1

        class Counting(JournalReader):
            def entries(self, after: int = 0) -> Iterator[Any]:
                for entry in super().entries(after):
                    count()
                    yield entry

        class Counted(RunDirectory):
            @contextlib.contextmanager
            def journals(self, reader: type[JournalReader] = Counting) -> Iterator[Sequence[JournalReader]]:
                with super().journals(reader) as journals:
                    yield journals

        return Counted(run.path)

    def states(self, run: RunDirectory) -> list[Path]:
        return sorted(run.path.glob("checkpoints/*.state"))

    def test_is_where_reading_begins(self, run: RunDirectory, config: Config, whole: str) -> None:
        (saved, *_) = states.newest_first(run.path / "checkpoints")
        assert previous_incarnation(run, config).digest == whole
        assert self.heard == events(run.path / "journal.sqlite") - saved.events > 0

    def test_of_an_older_checkpoint_serves_as_well(self, run: RunDirectory, config: Config, whole: str) -> None:
        self.states(run)[-1].unlink()
        assert previous_incarnation(run, config).digest == whole
        assert self.heard < events(run.path / "journal.sqlite")

    @pytest.mark.parametrize(
        "how",
        [
            *(functools.partial(damaged, random.Random(seed)) for seed in range(2)),
            *(functools.partial(truncated, share) for share in (0.0, 0.5)),
            *(
                pytest.param(how, marks=pytest.mark.nightly)
                for how in (
                    *(functools.partial(damaged, random.Random(seed)) for seed in range(2, 6)),
                    *(functools.partial(truncated, share) for share in (0.1, 0.99)),
                )
            ),
            lambda content: msgspec.msgpack.encode(msgspec.msgpack.decode(content) | {"program": "other"}),
        ],
    )
    def test_that_is_damaged_truncated_or_of_another_program(
        self, run: RunDirectory, config: Config, whole: str, how: Callable[[bytes], bytes]
    ) -> None:
        """A whole simulated run is taken up once for each way of damage."""
        for path in self.states(run):
            path.write_bytes(how(path.read_bytes()))
        assert previous_incarnation(run, config).digest == whole
        assert self.heard == events(run.path / "journal.sqlite")

    def test_of_another_run(self, run: RunDirectory, config: Config, whole: str) -> None:
        """It is whole, and leads elsewhere."""
        for version, saved in zip((4, 2), list(states.newest_first(run.path / "checkpoints")), strict=True):
            states.write(run.path / "checkpoints", version, msgspec.structs.replace(saved, digest="another"))
        assert previous_incarnation(run, config).digest == whole
        assert self.heard == events(run.path / "journal.sqlite")

    def test_that_the_journal_has_not_kept_up_with(self, run: RunDirectory, config: Config) -> None:
        """As after a power failure: what is not in the journal did not happen."""
        first, second = sorted(saved.events for saved in states.newest_first(run.path / "checkpoints"))
        last = (first + second) // 2
        with closing(sqlite3.connect(run.path / "journal.sqlite")) as journal:
            journal.execute("DELETE FROM events WHERE seq > ?", (last,))
            journal.commit()
        (run.path / "checkpoints" / "00000004.safetensors").unlink()
        assert previous_incarnation(run, config).digest == next(itertools.islice(digests(run), last, None))
        assert self.heard == last - first


class TestJournal:
    def alter(self, run: RunDirectory, statement: str, *values: str | bytes) -> None:
        with closing(sqlite3.connect(run.path / "journal.sqlite")) as journal:
            assert journal.execute(statement, values).rowcount > 0
            journal.commit()

    @pytest.mark.parametrize("read", [previous_incarnation, lambda run, _: past_incarnations(run)])
    def test_of_a_newer_program(self, run: RunDirectory, config: Config, read: Callable[..., object]) -> None:
        self.alter(run, "UPDATE meta SET value = '99' WHERE key = 'schema_version'")
        with pytest.raises(ConfigError, match=r"journal\.sqlite: .* 99, written by another version.*moved away"):
            read(run, config)

    def test_of_another_run(self, run: RunDirectory, config: Config) -> None:
        self.alter(run, "UPDATE meta SET value = 'frozen' WHERE key = 'run'")
        with pytest.raises(ConfigError, match=r"journal\.sqlite: .*of run 'frozen'.*this directory is run 'run'"):
            previous_incarnation(run, config)

    def test_with_a_damaged_page(self, run: RunDirectory, config: Config) -> None:
        shutil.rmtree(run.path / "checkpoints")
        path = run.path / "journal.sqlite"
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] + b"\xff" * 8192 + content[len(content) // 2 + 8192 :])
        with pytest.raises(ConfigError, match=r"journal\.sqlite: .*malformed.*moved away"):
            previous_incarnation(run, config)

    def test_that_makes_no_sense(self, run: RunDirectory, config: Config) -> None:
        """Each event can be read, but of the tokens that one brought the ids are gone."""
        shutil.rmtree(run.path / "checkpoints")
        with run.newest_journal() as journal:
            told = next(event for _, event, chunks in journal.entries() if chunks)
        row = event_row(told, 0)
        first = "(SELECT MIN(seq) FROM events WHERE kind = 'frame')"
        self.alter(run, f"UPDATE events SET kind = ?, body = ? WHERE seq = {first}", row.kind, row.body)
        with pytest.raises(ConfigError, match=r"journal\.sqlite: it makes no sense: KeyError.*moved away"):
            previous_incarnation(run, config)

    @pytest.mark.parametrize("seed", range(4))
    def test_whose_tail_is_torn_leads_to_what_is_whole(
        self, died: Path, tmp_path: Path, config: Config, seed: int
    ) -> None:
        """The log of the last commits is cut at any byte, as a process that dies or a power failure leaves it."""
        rng = random.Random(seed)
        run = RunDirectory(tmp_path / "run")
        run.path.mkdir()
        journal = run.begin_journal(config.journal, notes=_notes(run, config) | PreviousIncarnation().notes_to_keep())
        with RunDirectory(died).newest_journal() as source:
            rows = source.rows(EventRow)[:300]
        for at, row in enumerate(rows):
            journal.append(row)
            if at % 7 == 0:
                journal.durable().result()
        journal.durable().result()
        killed = RunDirectory(tmp_path / "killed" / "run")
        killed.path.mkdir(parents=True)
        for path in run.path.glob("journal.sqlite*"):
            shutil.copy(path, killed.path)
        journal.close()
        log = killed.path / "journal.sqlite-wal"
        log.write_bytes(log.read_bytes()[: rng.randrange(log.stat().st_size)])
        (killed.path / "journal.sqlite-shm").unlink()
        there = events(killed.path / "journal.sqlite")
        expected = next(itertools.islice(digests(run), there, None))
        assert there < len(rows)
        assert previous_incarnation(killed, config).digest == expected

    @pytest.mark.parametrize("lost", ["journal.sqlite", "journal.2.sqlite"])
    def test_one_of_a_chain_is_missing(self, run: RunDirectory, config: Config, lost: str) -> None:
        """What it has cannot be known, so the run goes on from the trainer's checkpoint."""
        for _ in range(2):
            went_on(run, previous_incarnation(run, config), config)
        (run.path / lost).unlink()
        assert previous_incarnation(run, config) == PreviousIncarnation()

    def test_of_a_process_that_died_as_it_began(self, run: RunDirectory, config: Config, whole: str) -> None:
        """At whatever point: its journal is not there, or it is one that goes on from the last."""
        former = previous_incarnation(run, config)
        (run.path / "journal.2.sqlite.new").write_bytes(b"half of one")
        assert previous_incarnation(run, config).digest == whole
        journal = run.begin_journal(config.journal, notes=_notes(run, config) | former.notes_to_keep())
        shutil.copytree(run.path, run.path.parent / "killed" / "run")
        journal.close()
        killed = RunDirectory(run.path.parent / "killed" / "run")
        assert previous_incarnation(killed, config).digest == whole
        with killed.newest_journal() as newest:
            assert newest.meta()[CONTINUES] == "journal.sqlite"


class TestCheckpoint:
    def has(self, run: RunDirectory, *versions: int) -> None:
        for path in run.path.glob("checkpoints/*.safetensors"):
            path.unlink()
        for version in versions:
            (run.path / "checkpoints" / f"{version:08d}.safetensors").touch()

    @pytest.mark.parametrize("version", [2, 4])
    def test_that_the_journal_leads_on_from(self, run: RunDirectory, config: Config, whole: str, version: int) -> None:
        self.has(run, version)
        assert previous_incarnation(run, config).digest == whole

    def test_newer_than_the_journal(self, run: RunDirectory, config: Config) -> None:
        self.has(run, 2, 6)
        assert previous_incarnation(run, config) == PreviousIncarnation()

    def test_of_the_step_that_the_journal_has_not_ordered(self, run: RunDirectory, config: Config) -> None:
        self.has(run, 5)
        assert previous_incarnation(run, config) == PreviousIncarnation()

    def test_there_is_none_and_the_orders_are_no_longer_kept(
        self, run: RunDirectory, config: Config, whole: str
    ) -> None:
        self.has(run)
        assert previous_incarnation(run, config).digest == whole, "all orders since the base policy are kept"
        shutil.rmtree(run.path / "checkpoints")
        trainer = config.trainer.model_copy(update={"checkpoint_every_steps": 1})
        often = config.model_copy(update={"trainer": trainer})
        with closing(sqlite3.connect(run.path / "journal.sqlite")) as journal:
            journal.execute("UPDATE meta SET value = ? WHERE key = 'config'", (often.model_dump_json(),))
            journal.commit()
        assert previous_incarnation(run, often) == PreviousIncarnation()


def leaves(section: str, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    return ((section, key) for key in values)


ALL_KEYS = [
    pair
    for section, values in load_config(EXAMPLE, SETTINGS).model_dump(mode="json").items()
    if values is not None
    for pair in leaves(section, values)
]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(("section", "key"), ALL_KEYS)
def test_what_is_sampled_and_trained_hangs_on_stays_as_it_was(config: Config, section: str, key: str) -> None:
    old = getattr(config, section)
    if section == "providers":
        changed = config.model_copy(update={"providers": {name: v for name, v in old.items() if name != key}})
    else:
        changed = config.model_copy(update={section: old.model_copy(update={key: "another"})})
    if section in MAY_DIFFER or f"{section}.{key}" in MAY_DIFFER:
        check_same(changed, config)
        return
    with pytest.raises(ConfigError) as refused:
        check_same(changed, config)
    was = config.model_dump(mode="json")[section][key]
    for words in (f"{section}.{key}: found 'another'", f"began with {was!r}", *MAY_DIFFER):
        assert words in str(refused.value)


@pytest.mark.parametrize("now", [["lake"], ["pond", "lake"]])
def test_none_of_several_environments_goes_or_moves(config: Config, now: list[str]) -> None:
    lake = {"name": "lake", "kind": "frozenlake"}
    of = {"lake": lake, "pond": {**lake, "name": "pond"}}

    def having(names: Sequence[str]) -> Config:
        sections = {**config.model_dump(mode="json"), "environments": [of[name] for name in names]}
        del sections["environment"]
        return validate(Config, sections, "test")

    former = having(["lake", "pond"])
    check_same(having(["lake", "pond"]), former)
    with pytest.raises(ConfigError, match=r"environments\..*but the run began with \['lake', 'pond'\]"):
        check_same(having(now), former)


def test_nothing_may_differ_that_is_not_there() -> None:
    known = {*Config.model_fields} | {f"{section}.{key}" for section, key in ALL_KEYS}
    assert known >= MAY_DIFFER


def test_another_configuration_is_named_before_anything_is_read(run: RunDirectory, config: Config) -> None:
    (run.path / "checkpoints" / "00000004.safetensors").unlink()
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 8})})
    with pytest.raises(ConfigError, match=r"run\.seed: found 8, but the run began with 7"):
        previous_incarnation(run, other)


async def test_a_run_is_taken_up_by_one_process(run: RunDirectory, config: Config) -> None:
    plan = resolve(config, PROVIDERS, "test")
    before = sorted(run.path.rglob("*"))
    with claimed(run.path), pytest.raises(ConfigError, match="still going on in another process"):
        await execute(plan, run.path, resume=True)
    assert sorted(run.path.rglob("*")) == sorted({*before, run.path / "lock"})


async def test_on_a_full_disk_a_run_stays_as_it_was(died: Path, config: Config, whole: str, small_disk: Path) -> None:
    run = RunDirectory(Path(shutil.copytree(died, small_disk / "run")))
    ballast = small_disk / "ballast"
    plan = resolve(config, PROVIDERS, "test")
    for spare_kib in (0, 4, 32):
        fill(ballast, spare_kib)
        with pytest.raises((ConfigError, JournalError), match=r"disk/run/.*(full|No space left)"):
            await execute(plan, run.path, resume=True)
        ballast.unlink()
        assert previous_incarnation(run, config).digest == whole
        assert load_run_config(run.path) == config
        assert [path.name for path in run.journal_paths()] == ["journal.sqlite"]


def fill(ballast: Path, spare_kib: int) -> None:
    """All of the disk but so much."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    os.truncate(ballast, max(0, ballast.stat().st_size - spare_kib * 1024))


class TestCommands:
    """What a run was told from outside holds for whoever takes it up."""

    CAP = e.CapSet(command="cap", provider="spot", gpus=1)
    STOP = e.StopCommanded(command="stop", reason="enough")

    @staticmethod
    def tell(run: RunDirectory, *told: e.Event) -> None:
        """The journal ends with these events."""
        with run.newest_journal() as journal:
            last_ns = journal.last_ns()
        rows = [event_row(event, last_ns + number) for number, event in enumerate(told)]
        with closing(sqlite3.connect(run.path / "journal.sqlite")) as journal:
            journal.executemany(
                "INSERT INTO events (t_ns, kind, body) VALUES (?, ?, ?)", [(r.t_ns, r.kind, r.body) for r in rows]
            )
            journal.commit()

    @staticmethod
    def keep(run: RunDirectory, *books: DeviceBook) -> None:
        """The journal has these books."""
        table = TABLES[BookRow]
        with closing(sqlite3.connect(run.path / "journal.sqlite")) as journal:
            table.insert(journal, [table.kept(BookRow(worker=book.worker, book=book)) for book in books])
            journal.commit()

    @staticmethod
    def core_of(former: PreviousIncarnation, run: RunDirectory) -> Scheduler:
        assert former.state is not None
        with run.newest_journal() as journal:
            scheduler = scheduler_of(journal)[1]
        anything: dict[str, Any] = {}
        for name in Ports.__slots__:
            anything[name] = Anything()
        Run(scheduler, lambda _: Ports(**anything)).restore(former.state)
        return scheduler

    def test_a_run_that_was_stopped_before_it_had_a_trainer_goes_on(self) -> None:
        """That its request was withdrawn then is no reason to give up."""
        lease = "trainer-1"
        said = [e.StopRequested(reason="Ctrl-C"), e.LeaseRefused(lease=lease, reason="withdrawn")]
        left = [event for _, event, _ in gone_on([(0, event, None) for event in said])]
        assert left == [e.Resumed(), e.LeaseRefused(lease=lease, reason="withdrawn", withdrawn=True)]

    def test_of_a_stop_only_its_id_is_left(self, run: RunDirectory, config: Config) -> None:
        after = e.CapSet(command="after", provider="serving", gpus=2)
        self.tell(run, self.CAP, self.STOP, after)
        core = self.core_of(previous_incarnation(run, config), run)
        assert (core.phase, core.stopped, core.failed) == (Phase.RUNNING, "", "")
        assert list(core.controls.commands) == ["cap", "stop", "after"]
        assert core.controls.caps == {"spot": 1, "serving": 2}

    def test_a_run_whose_budget_was_exhausted_goes_on_with_more(self, run: RunDirectory, config: Config) -> None:
        self.tell(run, e.BudgetSet(command="budget", usd=1e-6), e.Tick(), e.BudgetExhausted(cause="spent"))
        former = previous_incarnation(run, config)
        assert former.budget_usd is msgspec.UNSET
        core = self.core_of(former, run)
        assert (core.phase, core.stopped) == (Phase.RUNNING, "")
        more = config.model_copy(update={"run": config.run.model_copy(update={"budget_usd": 1e6})})
        assert previous_incarnation(run, more).budget_usd == 1e6
        now_ns = core.now_ns + 1
        out = core.handle(e.Resumed(budget_usd=1e6), now_ns) + core.handle(e.Tick(), now_ns + 1)
        assert not any(isinstance(command, c.ExhaustBudget) for command in out)
        again = core.handle(e.BudgetSet(command="less", usd=1e-6), now_ns + 2) + core.handle(e.Tick(), now_ns + 3)
        assert any(isinstance(command, c.ExhaustBudget) for command in again)

    def test_who_begins_anew_is_told_what_holds_and_what_was_paid(self, run: RunDirectory, config: Config) -> None:
        self.tell(run, e.BudgetSet(command="budget", usd=5.0), self.CAP, self.STOP)
        self.keep(run, *replay(run).ledger.books.values())
        with run.journals() as journals:
            told = incarnations.what_holds(journals, config)
            bill = sum(book.cost_nano_usd(journals[-1].last_ns()) for book in journals[-1].books())
        *commands, carried, last = told
        undone = msgspec.structs.replace(self.STOP, undone=True)
        assert commands == [e.BudgetSet(command="budget", usd=5.0), self.CAP, undone]
        assert isinstance(carried, e.CostCarried)
        assert carried.nano_usd >= bill > 0
        assert sum(carried.of_providers.values()) == carried.nano_usd
        assert last == e.BudgetSet(command="run.budget_usd of process 2", usd=5.0)

    @pytest.mark.parametrize("charged_s", [0, 60])
    def test_what_a_provider_said_that_it_charges_is_carried_and_not_time_times_price(
        self, run: RunDirectory, charged_s: int
    ) -> None:
        """More than a lease's time, where a minimum is billed, and nothing where the provider took it back."""
        before = incarnations.cost_nano_usd(run)
        book = DeviceBook("far-1", "far-1", "far", 8, 3600 * NANO_USD_PER_USD, 0, 0)
        book.add(Account.IDLE, 20 * NS_PER_S)
        book.closed_ns, book.charged_ns = book.cursor_ns, charged_s * NS_PER_S
        self.keep(run, book)
        assert incarnations.cost_nano_usd(run) - before == 8 * charged_s * NANO_USD_PER_USD

    def test_a_run_that_was_told_nothing_is_told_nothing(self, run: RunDirectory, config: Config) -> None:
        with run.journals() as journals:
            assert incarnations.what_holds(journals, config) == ()


class Anything:
    """Stands for ports of which nothing matters here."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None
