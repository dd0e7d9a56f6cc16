"""Runs on disk: found, claimed by one process at a time, and remembered."""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from elastic.compose import incarnations
from elastic.compose.incarnations import PastIncarnations, past_incarnations
from elastic.compose.plan import resolve
from elastic.compose.processes import worker_ticket
from elastic.compose.relay import weights_relay
from elastic.compose.runs import claimed, is_claimed, load_run_config, new_run_dir
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import Config, ConfigError, JournalConfig, validate
from elastic.core.scheduler import Scheduler
from elastic.protocol.endpoint import Endpoint
from elastic.runtime.gateway import GatewayError
from elastic.runtime.journal import DirectoryStore, JournalError, RunDirectory, SqliteJournal, StepRow
from elastic.system.host import Host, on
from elastic.weights.relay import open_relay
from elastic.weights.rights import RelayRights
from providers.base import ProviderContext, WorkerTicket, worker_environment
from tests.journal_rows import step_record


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate({"run": {"name": "r", "directory": str(tmp_path)}, "model": {"checkpoint": "base"}})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_runs_are_found_by_name_path_or_latest(config: Config, tmp_path: Path) -> None:
    runs = [new_run_dir(config) for _ in range(3)]
    for age, run in enumerate(runs):
        os.utime(run / "config.json", (age, age))
    store = DirectoryStore(tmp_path)
    assert [run.path for run in store.runs()] == runs
    assert store.find("latest").path == runs[-1]
    assert store.find(runs[0].name).path == runs[0]
    assert DirectoryStore(Path("elsewhere")).find(str(runs[1])).path == runs[1]
    assert load_run_config(runs[0]) == config
    with pytest.raises(ConfigError, match=f"no run 'x'.*{runs[2].name}"):
        store.find("x")


def test_a_run_is_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        claimed(tmp_path),
        pytest.raises(ConfigError, match="still going on in another process"),
        claimed(tmp_path),
    ):
        pass
    with claimed(tmp_path):
        pass


def test_who_looks_whether_a_run_is_claimed_is_not_in_its_way(tmp_path: Path) -> None:
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_claimed(tmp_path)

    with ThreadPoolExecutor(2) as lookers:
        for _ in range(2):
            lookers.submit(look)
        try:
            for _ in range(25):
                with claimed(tmp_path):
                    pass
        finally:
            over.set()


def test_past_incarnations_is_what_the_journal_says(run: RunDirectory) -> None:
    assert past_incarnations(run) == PastIncarnations()
    with live(run, providers="serving,spot", status="finished") as journal:
        journal.append(StepRow(step=6, t_ns=1, record=step_record(6), success_rate=None, trainer={}))
    past = past_incarnations(run)
    assert past == PastIncarnations(providers=("serving", "spot"), status="finished", steps_done=7)


def test_what_hardly_began_says_nothing_of_the_past(run: RunDirectory) -> None:
    for said in ({"providers": "spot"}, {"providers": "serving"}, {}):
        with live(run, **said):
            pass
    assert past_incarnations(run).providers == ("serving",)
    (run.path / "journal.3.sqlite").unlink()
    assert past_incarnations(run).providers == ("serving",)


def test_a_simulated_run_cannot_go_on(run: RunDirectory) -> None:
    with live(run, providers="spot", simulated="{}"):
        pass
    with pytest.raises(ConfigError, match=r"journal\.sqlite: a simulated run; only live ones can go on"):
        past_incarnations(run)


def test_a_past_that_cannot_be_read_is_not_forgotten(run: RunDirectory) -> None:
    (run.path / "journal.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"journal\.sqlite: .*moved away"):
        past_incarnations(run)


class TestNextLife:
    @pytest.fixture
    def run(self, config: Config) -> RunDirectory:
        run = RunDirectory(new_run_dir(config))
        with live(run, providers="spot", status="first"):
            pass
        return run

    @pytest.fixture
    def changed(self, config: Config) -> Config:
        return config.model_copy(update={"run": config.run.model_copy(update={"steps": 7})})

    def test_has_a_journal_of_its_own(self, run: RunDirectory, changed: Config) -> None:
        for name in ("second", "third"):
            begun = incarnations.next_incarnation(run, changed, scheduler(changed))
            with begun as past, live(run, providers="spot", status=name):
                pass
            assert past.providers == ("spot",)
        assert journals(run) == {
            "journal.sqlite": "first",
            "journal.2.sqlite": "second",
            "journal.3.sqlite": "third",
        }
        assert load_run_config(run.path).run.steps == 7
        assert kept_in(run) == {"config.json", "start", *journals(run)}

    @pytest.mark.parametrize("came_to", ["journal.2.sqlite", "journal.2.sqlite-wal", ""])
    def test_leaves_no_trace_if_it_cannot_begin(
        self, run: RunDirectory, config: Config, changed: Config, came_to: str
    ) -> None:
        def refused() -> None:
            with incarnations.next_incarnation(run, changed, scheduler(changed)):
                if came_to:
                    (run.path / came_to).write_text("second")
                raise GatewayError("port in use")

        with pytest.raises(GatewayError):
            refused()
        assert journals(run) == {"journal.sqlite": "first"}
        assert load_run_config(run.path) == config
        assert kept_in(run) == {"config.json", "start", "journal.sqlite"}

    def test_is_kept_once_it_has_begun(self, run: RunDirectory, changed: Config) -> None:
        begun = scheduler(changed)
        begun._run.version = 3

        def broken_off() -> None:
            with incarnations.next_incarnation(run, changed, begun), live(run, providers="spot", status="second"):
                raise JournalError("disk full")

        with pytest.raises(JournalError):
            broken_off()
        assert journals(run) == {"journal.sqlite": "first", "journal.2.sqlite": "second"}
        assert load_run_config(run.path) == changed

    def test_on_a_full_disk_the_former_configuration_stands(
        self, run: RunDirectory, config: Config, changed: Config
    ) -> None:
        """Whatever cannot be written, and whenever: the configuration is the old or the new one, and whole."""

        def resume() -> None:
            with incarnations.next_incarnation(run, changed, scheduler(changed)):
                pass

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with on(Host(fsync=full)), pytest.raises(ConfigError, match="No space left"):
            resume()
        assert load_run_config(run.path) == config
        assert kept_in(run) == {"config.json", "start", "journal.sqlite"}


class TestJournalsOfARun:
    def names(self, run: RunDirectory) -> list[str]:
        return [path.name for path in run.journal_paths()]

    def test_are_in_the_order_of_its_lives(self, run: RunDirectory) -> None:
        for number in (1, 2, 10):
            assert run.next_journal_path().name == ("journal.sqlite" if number == 1 else f"journal.{number}.sqlite")
            (run.path / f"journal.{number}.sqlite".replace(".1.", ".")).touch()
            if number == 2:
                (run.path / "journal.9.sqlite").touch()
        (run.path / "journal.2.sqlite-wal").touch()
        (run.path / "journal.x.sqlite").touch()
        assert self.names(run) == ["journal.sqlite", "journal.2.sqlite", "journal.9.sqlite", "journal.10.sqlite"]

    def test_no_journal_is_named(self, run: RunDirectory) -> None:
        with pytest.raises(JournalError, match=r"journal\.sqlite: no such journal"):
            run.newest_journal()
        with pytest.raises(JournalError, match=r"journal\.sqlite: no such journal"), run.journals():
            pass


@contextmanager
def live(run: RunDirectory, **meta: str) -> Iterator[SqliteJournal]:
    """The run's next incarnation, with `meta` as its journal's notes."""
    journal = run.begin_journal(JournalConfig.model_validate({}))
    try:
        for key, value in meta.items():
            journal.meta(key, value)
        yield journal
    finally:
        journal.close()


def kept_in(run: RunDirectory) -> set[str]:
    """Files of the run, without what SQLite keeps beside a journal that is read."""
    return {path.name for path in run.path.iterdir() if not path.name.endswith(("-wal", "-shm"))}


def journals(run: RunDirectory) -> dict[str, str]:
    with run.journals() as journals:
        return {journal.path.name: journal.meta()["status"] for journal in journals}


def scheduler(config: Config) -> Scheduler:
    plan = resolve(config, [], "test")
    return Scheduler(run_plan(plan), limits(config), policies(config), 0)


async def test_a_runs_weights_are_served_again_where_they_were(tmp_path: Path, config: Config) -> None:
    config = config.model_copy(update={"weights": config.weights.model_copy(update={"relay": "http"})})
    async with weights_relay(config, tmp_path, rights=RelayRights("owner")) as (url, _, rights):
        assert rights is not None
        rights.issue("w", "token")
        with closing(open_relay(url, "owner")) as relay:
            await asyncio.to_thread(relay.put, "k", b"content")
    address = url.removeprefix("http://")
    async with weights_relay(config, tmp_path, address, RelayRights("owner")) as (again, _, rights):
        assert again == url
        assert rights is not None
        rights.issue("w", "token")
        with closing(open_relay(url, "token")) as relay:
            assert await asyncio.to_thread(relay.get, "k") == b"content"
        with pytest.raises(GatewayError, match=f"cannot serve weights on {address}: .*in use"):
            async with weights_relay(config, tmp_path, address):
                pass


def with_relay(config: Config, relay: str) -> Config:
    return Config.model_validate(config.model_dump() | {"weights": {"relay": relay}})


async def test_a_run_leaves_nothing_on_a_relay_elsewhere(tmp_path: Path, config: Config) -> None:
    shared, run_dir = tmp_path / "shared", tmp_path / "lake-1"
    for _ in range(2):
        async with weights_relay(with_relay(config, shared.as_uri()), run_dir) as (local, far, rights):
            assert (far, rights) == (local, None)
            assert local.startswith(f"{shared.as_uri()}/lake-1-"), "with what only this run's secret gives"
            with closing(open_relay(local)) as relay:
                await asyncio.to_thread(relay.put, "versions/1/blob", b"content")
        assert not [path for path in shared.rglob("*") if path.is_file()]


async def test_a_relay_of_no_kind_that_is_there_is_named(tmp_path: Path, config: Config) -> None:
    with pytest.raises(GatewayError, match=r"weights.relay: relay gs://bucket/.*: allowed are .*ray://"):
        async with weights_relay(with_relay(config, "gs://bucket"), tmp_path):
            pass
    with pytest.raises(ValueError, match=r"relay"):
        with_relay(config, "carrier pigeon")


@pytest.mark.parametrize("told", ["", "soon", "-1"])
def test_a_worker_waits_as_long_for_an_orchestrator_as_its_provider_says(
    monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    context = ProviderContext(
        run="r",
        run_dir=Path(),
        endpoint=Endpoint("h:1"),
        worker_command=(),
        now_ns=lambda: 0,
        acquire_timeout_s=1,
        release_timeout_s=1,
        orchestrator_timeout_s=7.5,
    )
    given = dict(worker_environment(context, WorkerTicket("w", "token")))
    given["ELASTIC_ORCHESTRATOR_TIMEOUT_S"] = told or given["ELASTIC_ORCHESTRATOR_TIMEOUT_S"]
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if told:
        with pytest.raises(ConfigError, match=f"ELASTIC_ORCHESTRATOR_TIMEOUT_S takes seconds .found '{told}'"):
            worker_ticket("other:2")
        return
    ticket = worker_ticket("other:2")
    assert (ticket.endpoint.address, ticket.run, ticket.worker, ticket.token) == ("other:2", "r", "w", "token")
    assert ticket.wait_s == 7.5


def test_the_environments_of_a_mix_are_resolved_each_by_its_kind() -> None:
    entries = [{"name": "small", "kind": "frozenlake", "ratio": 3}, {"name": "frozenlake", "settings": {"sizes": [5]}}]
    raw = {"model": {"checkpoint": "base"}, "environments": entries}
    plan = resolve(validate(Config, raw, "test"), [], "test")
    assert plan.token_level == ("small", "frozenlake")
    assert [(one.name, one.ratio) for one in run_plan(plan).environments] == [("small", 3.0), ("frozenlake", 1.0)]
    sizes = [one["settings"]["sizes"] for one in plan.resolved()["environments"]]
    assert sizes == [[4], [5]]
    for wrong, told in (
        ({"name": "a", "kind": "chess"}, "environments.1.kind: unknown environment 'chess'"),
        ({"name": "chess"}, "environments.1.name: unknown environment 'chess'"),
        ({"name": "a b", "kind": "frozenlake"}, "environments.1.name: found 'a b'"),
        ({"name": "a", "kind": "frozenlake", "settings": {"size": 4}}, "environments.1.settings.size: unknown key"),
        (
            {"name": "a", "kind": "frozenlake", "data": {"source": "r.jsonl"}},
            "environments.1.data: found for kind 'frozenlake'; allowed for kinds 'agent' and 'chat'",
        ),
        ({"name": "a", "kind": "chess", "data": {"source": "r.jsonl"}}, "environments.1.kind: unknown environment"),
        (
            {"name": "a", "kind": "openenv", "start_timeout_s": 60, "settings": {"image": "a:1"}},
            "environments.1.settings.start_s: found 90, and its env workers have 60 s to start in; allowed: up to that",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            resolve(validate(Config, raw | {"environments": [entries[0], wrong]}, "test"), [], "test")
        assert told in str(refused.value)
