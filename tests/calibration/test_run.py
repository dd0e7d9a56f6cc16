"""Profiles of journaled runs: what was seen is measured, what was not is an estimate that says why."""

import itertools
import random
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import pytest

from elastic.compose.evaluating import run_to_evaluate
from elastic.compose.plan import resolve
from elastic.compose.runs import claimed, new_run_dir, save_run_config
from elastic.config import Config
from elastic.core import events as e
from elastic.core.ids import parse_turn
from elastic.core.ledger import DeviceBook
from elastic.core.types import NS_PER_S, Account, Capabilities, Chunk, Chunks, EndCause, Offer, WorkerRole
from elastic.runtime.journal import CallRow, DirectoryStore, PullRow, RunDirectory, TurnRow, event_row
from elastic.simulation import run as simulation
from elastic.simulation.calibration import CalibrationError, EngineNumbers, profile_run
from elastic.simulation.performance.profile import Number, ProfileError, load_profile
from functions.base import CallOutcome

Timed = tuple[float, e.Event]
RATES = {"prefill_tokens_per_s": 5000.0, 1: 0.010, 8: 0.018}
PACING = {"prefill_tokens_per_s": 5000, "decode_step_s": {1: 0.010, 8: 0.018}}
CAPABILITIES = Capabilities(engine="torch", replayable_sampling=True, max_context_tokens=128, device="cpu")
BOOK = {"lease": "trainer-1", "worker": "trainer-1", "provider": "trainer", "gpus": 1, "nano_usd_per_gpu_hour": 0}
BUSY_PARTS = ((Account.PREFILL, 0.25), (Account.DECODE, 0.75))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A run on disk with this journal."""
    numbers = itertools.count(1)

    def run(
        config: Config,
        events: Iterable[Timed] = (),
        *,
        status: str = "finished",
        turns: Sequence[TurnRow] = (),
        pulls: Sequence[PullRow] = (),
        calls: Sequence[CallRow] = (),
        trained_s: float = 0.0,
        **meta: str,
    ) -> Path:
        run_dir = tmp_path / "runs" / f"run-{next(numbers)}"
        run_dir.mkdir(parents=True)
        save_run_config(run_dir, config)
        journal = RunDirectory(run_dir).begin_journal(config.journal)
        for t_s, event in events:
            journal.append(event_row(event, round(t_s * NS_PER_S)))
        for row in (*turns, *pulls, *calls):
            journal.append(row)
        trained_ns = round(trained_s * NS_PER_S)
        book = BOOK | {"opened_ns": 0, "cursor_ns": trained_ns, "accounts_ns": {"training": trained_ns}}
        journal.books([msgspec.convert(book, DeviceBook)])
        meta |= {"config": config.model_dump_json(), "providers": "spot"}
        for key, value in (meta | {"status": status}).items():
            journal.meta(key, value)
        journal.close()
        return run_dir

    return run


def reports(worker: str, count: int, *, overhead_s: float = 0.0, served: bool = False) -> list[Timed]:
    """Heartbeats of an engine that has `RATES`, with all the frames between them."""
    drawn = random.Random(worker)
    turns = itertools.count()
    accounts = {account: 0 for account, _ in BUSY_PARTS} | {Account.IDLE: 0}
    progress = decoded = prompts = hits = 0
    found: list[Timed] = []
    for beat in range(count + 1):
        if beat:
            iterations, batch = drawn.randint(15, 30), drawn.uniform(1, 8)
            firsts, cached = drawn.randint(0, 10), drawn.randint(0, 50)
            prefilled = firsts * drawn.randint(5, 60)
            decode_s = RATES[1] + (RATES[8] - RATES[1]) * (batch - 1) / 7
            busy_s = iterations * (decode_s + overhead_s) + prefilled / RATES["prefill_tokens_per_s"]
            for account, share in BUSY_PARTS:
                accounts[account] += round(busy_s * share * NS_PER_S)
            accounts[Account.IDLE] += NS_PER_S // 10
            if served:
                accounts[Account.SERVING] = accounts.get(Account.SERVING, 0) + NS_PER_S
            progress += iterations
            decoded += round(iterations * batch) + firsts
            prompts, hits = prompts + prefilled + cached, hits + cached
            chunks = [Chunk(next(turns), 0, 1, 0) for _ in range(firsts)]
            again = [Chunk(chunk.slot, 1, 1, 0) for chunk in chunks]
            found.append((beat - 0.1, e.TokensReceived(worker=worker, epoch=1, chunks=Chunks.of(chunks + again))))
        found.append((beat, report(worker, progress, decoded, prompts, hits, dict(accounts))))
    return found


def report(
    worker: str, progress: int, decoded: int, prompts: int, hits: int, accounts: dict[Account, int]
) -> e.WorkerReported:
    return e.WorkerReported(
        worker=worker,
        epoch=1,
        capacity_turns=4,
        pending=0,
        executing=1,
        progress=progress,
        accounts_ns=accounts,
        decoded_tokens=decoded,
        prompt_tokens=prompts,
        prefix_hit_tokens=hits,
    )


def lifetime(worker: str, granted_s: float, joined_s: float, left_s: float, ended_s: float) -> list[Timed]:
    return [
        (granted_s, e.LeaseGranted(lease=worker, workers=(worker,))),
        (joined_s, e.WorkerJoined(worker=worker, epoch=1, capabilities=CAPABILITIES, weights_version=None)),
        (left_s, e.WorkerDisconnected(worker=worker, epoch=1, goodbye=True)),
        (ended_s, e.LeaseEnded(lease=worker, cause=EndCause.RELEASED)),
    ]


def in_order(*parts: Iterable[Timed]) -> list[Timed]:
    return sorted(itertools.chain(*parts), key=lambda timed: timed[0])


def turn(name: str, requested_s: float, finished_s: float, prompt: int = 20, tokens: int = 8) -> TurnRow:
    requested_ns, finished_ns = round(requested_s * NS_PER_S), round(finished_s * NS_PER_S)
    return TurnRow(
        turn=name,
        trajectory=parse_turn(name)[0],
        requested_ns=requested_ns,
        first_token_ns=requested_ns,
        finished_ns=finished_ns,
        prompt_tokens=prompt,
        tokens=tokens,
        attempts=1,
        cached_tokens=0,
        worker="spot-1",
    )


def pull(worker: str, version: int, size_bytes: int, pull_s: float, apply_s: float) -> PullRow:
    return PullRow(
        t_ns=version * NS_PER_S,
        worker=worker,
        version=version,
        bytes=size_bytes,
        pull_s=pull_s,
        apply_s=apply_s,
        error="",
    )


TURNS = [
    turn("0/0/0/0", 10.0, 11.0),
    turn("0/0/1/0", 10.5, 11.0),
    turn("0/0/0/1", 11.25, 12.0, prompt=30),
    turn("0/0/1/1", 11.25, 12.0, prompt=30),
]
PULLS = [pull("spot-1", 0, 1000, 0.5, 0.25), pull("spot-1", 1, 100, 0.125, 0.0625), pull("spot-2", 1, 1000, 0.75, 0.25)]
OFFER = Offer(provider="serving", role=WorkerRole.TRAINER, available=1, usd_per_gpu_hour=0.0)
EVERYTHING = (
    lifetime("trainer-1", 0.0, 5.0, 90.0, 90.5),
    lifetime("spot-1", 6.0, 9.0, 80.0, 80.25),
    lifetime("serving-1", 6.0, 6.5, 80.0, 80.25),
    [(4.0, e.OfferChanged(offer=OFFER))],
    [
        (60.0, e.GroupTrained(worker="trainer", epoch=1, group="0/0")),
        (60.5, e.WeightsPublished(worker="trainer", epoch=1, version=1)),
    ],
)
SPOT = {"providers": {"spot": {"boot_delay_s": 1.0}}}


def test_everything_that_a_run_shows_is_measured(configured, write, tmp_path: Path) -> None:
    config = configured(SPOT, pacing=PACING)
    events = in_order(*EVERYTHING, reports("spot-1", 30, overhead_s=0.002))
    run_dir = write(config, events, turns=TURNS, pulls=PULLS, trained_s=2.5)
    path = tmp_path / "machine.toml"
    measured = profile_run(run_dir, path)
    expected = {
        "prefill_tokens_per_s": 5000,
        "kv_tokens": 1024,
        "boot_s": 2.0,
        "serving_start_s": 4.0,
        "serving_boot_s": 0.5,
        "trainer_boot_s": 5.0,
        "exit_s": 0.25,
        "keyframe_bytes": 1000,
        "delta_bytes": 100,
        "first_load_s": 0.625,
        "load_s": 0.125,
        "apply_s": 0.0625,
        "update_s": 0.5,
        "train_tokens_per_s": 2 * 38 / 2.0,
        "reset_s": 0.5,
        "step_s": 0.25,
        "environment_serial": 1.0,
    }
    assert {key: measured.numbers[key].value for key in expected} == pytest.approx(expected)
    assert not set(expected) & set(measured.estimates)
    assert measured.numbers["overhead_s"].source
    assert measured.numbers["overhead_s"].value > 0
    assert {batch: number.value for batch, number in measured.decode_step_s.items()} == PACING["decode_step_s"]
    assert {"context_s", "link_bytes_per_s", "relay_bytes_per_s", "train_group_s"} <= set(measured.estimates)
    assert load_profile(str(path)).boot_s == 2.0


def test_nothing_that_a_run_does_not_show_is_called_measured(configured, write, tmp_path: Path) -> None:
    """Neither zero nor what another provider or an earlier pull took stands in for it without a word."""
    run_dir = write(
        configured(pacing=PACING), lifetime("trainer-1", 0.0, 5.0, 90.0, 90.5)[:2], turns=TURNS[:1], pulls=PULLS[:1]
    )
    path = tmp_path / "machine.toml"
    measured = profile_run(run_dir, path)
    seen = {"prefill_tokens_per_s", "kv_tokens", "trainer_boot_s", "keyframe_bytes", "first_load_s"}
    assert {key for key, number in measured.numbers.items() if number.source} == {*seen, "environment_serial"}
    for key, number in measured.estimates.items():
        assert number.low is not None, key
        assert number.high is not None, key
        assert number.low <= number.value <= number.high, key
        assert number.estimate, key
    local = load_profile("local")
    for key in ("boot_s", "serving_boot_s", "serving_start_s", "exit_s", "step_s", "reset_s", "overhead_s", "update_s"):
        assert measured.numbers[key].value == getattr(local, key)
        assert "does not show it" in measured.numbers[key].estimate
        assert "profile local" in measured.numbers[key].estimate
    assert "no worker pulled twice" in measured.numbers["delta_bytes"].estimate
    load_profile(str(path))


def test_engines_quicker_than_their_pacing_have_no_measured_overhead(configured, write, tmp_path: Path) -> None:
    events = reports("spot-1", 20, overhead_s=-0.004)
    measured = profile_run(write(configured(pacing=PACING), events, turns=TURNS), tmp_path / "machine.toml")
    overhead = measured.numbers["overhead_s"]
    assert (overhead.value, overhead.low) == (0.0, 0.0)
    assert overhead.high == pytest.approx(0.004, rel=0.5)
    assert "less, an iteration, than their pacing" in overhead.estimate


def test_an_unpaced_engine_is_fitted_to_what_its_workers_reported(configured, write, tmp_path: Path) -> None:
    """Neither a co-served device nor the trainer's tells of the spot workers' engines."""
    busy = [reports(worker, 40) for worker in ("spot-1", "spot-2")]
    others = [reports("serving-1", 40, overhead_s=0.5, served=True), reports("trainer-1", 40, overhead_s=0.5)]
    path = tmp_path / "machine.toml"
    measured = profile_run(write(configured(), in_order(*busy, *others), turns=TURNS), path)
    profile = load_profile(str(path))
    assert profile.prefill_tokens_per_s == pytest.approx(5000, rel=0.05)
    assert profile.kv_tokens == 1024
    for batch, step_s in profile.decode_step_s.items():
        assert step_s == pytest.approx(0.010 + 0.008 * (batch - 1) / 7, rel=0.02)
    assert "fitted to 80 reports of run-1" in measured.numbers["prefill_tokens_per_s"].source
    assert {"context_s", "overhead_s"} <= set(measured.estimates)


def test_too_few_reports_ask_for_the_engine_itself(configured, write, tmp_path: Path) -> None:
    run_dir = write(configured(), reports("spot-1", 5), turns=TURNS)
    path = tmp_path / "machine.toml"
    with pytest.raises(CalibrationError, match=r"run-1: 5 reports of busy engines are too few.*--engine CONFIG"):
        profile_run(run_dir, path)
    assert not path.exists()
    engine = EngineNumbers(
        prefill_tokens_per_s=Number(700.0, source="elsewhere"),
        decode_step_s={1: Number(0.5, source="elsewhere")},
        context_s=Number(0.0, source="elsewhere"),
        overhead_s=Number(0.0, source="elsewhere"),
        kv_tokens=Number(900.0, source="elsewhere"),
    )
    profile_run(run_dir, path, engine=engine)
    assert load_profile(str(path)).prefill_tokens_per_s == 700
    assert load_profile(str(path)).decode_step_s == {1: 0.5}


def test_calls_of_a_warm_function_are_measured(configured, write, tmp_path: Path) -> None:
    config = configured({"rewards": {"name": "frozenlake"}}, pacing=PACING)
    calls = [
        CallRow(
            t_ns=0,
            function="frozenlake",
            key=key,
            outcome=outcome,
            queued_s=0,
            cold_start_s=cold_s,
            duration_s=s,
            usd=0,
        )
        for key, outcome, cold_s, s in (
            ("a", CallOutcome.OK, 2.0, 9.0),
            ("b", CallOutcome.OK, 0.0, 0.25),
            ("c", CallOutcome.TIMED_OUT, 0.0, 8.0),
        )
    ]
    measured = profile_run(write(config, calls=calls), tmp_path / "machine.toml")
    assert measured.numbers["reward_s"].value == 0.25
    none = profile_run(write(config), tmp_path / "machine.toml")
    assert none.numbers["reward_s"].estimate


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ("failed: no device came", "failed: no device came; only a run that went well"),
        ("running", "it ended unexpectedly"),
    ],
)
def test_a_run_that_did_not_go_well_is_refused(configured, write, tmp_path: Path, status: str, found: str) -> None:
    path = tmp_path / "machine.toml"
    with pytest.raises(CalibrationError, match=found):
        profile_run(write(configured(pacing=PACING), status=status), path)
    assert not path.exists()


def test_a_run_that_goes_on_is_refused(configured, write, tmp_path: Path) -> None:
    run_dir = write(configured(pacing=PACING), status="running")
    with claimed(run_dir), pytest.raises(CalibrationError, match="still going on"):
        profile_run(run_dir, tmp_path / "machine.toml")


def test_an_interrupted_run_is_said_to_be_one(configured, write, tmp_path: Path) -> None:
    run_dir = write(configured(pacing=PACING), status="failed: interrupted", pulls=PULLS)
    measured = profile_run(run_dir, tmp_path / "machine.toml")
    assert "(interrupted)" in measured.numbers["keyframe_bytes"].source


def test_another_base_and_one_that_is_not_there(configured, write, tmp_path: Path) -> None:
    run_dir, path = write(configured(pacing=PACING)), tmp_path / "machine.toml"
    measured = profile_run(run_dir, path, base="H100/Qwen3-8B")
    boot = measured.numbers["boot_s"]
    assert (boot.value, boot.low, boot.high) == (60.0, 6.0, 600.0)
    assert "profile H100/Qwen3-8B" in boot.estimate
    with pytest.raises(ProfileError, match="nosuch"):
        profile_run(run_dir, path, base="nosuch")


def test_latest_passes_over_simulated_runs(configured, write, tmp_path: Path) -> None:
    """Unless there is nothing else, or they count, too."""
    store = DirectoryStore(tmp_path / "runs")
    simulated = write(configured(pacing=PACING), simulated="{}")
    assert store.find("latest").path == simulated
    live = write(configured(pacing=PACING))
    newest = write(configured(pacing=PACING), simulated="{}")
    assert store.find("latest").path == live == run_to_evaluate(store, "latest").path
    assert store.find("latest", simulated=True).path == newest
    assert store.find(simulated.name).path == simulated
    with pytest.raises(CalibrationError, match="simulated run"):
        profile_run(simulated, tmp_path / "machine.toml")


def test_the_profile_of_a_run_simulates_it(configured, write, tmp_path: Path) -> None:
    """An unpaced run: without its profile it could not be simulated."""
    market = tmp_path / "market.csv"
    market.write_text("time_s,event,instance_id\n0,add,a\n86400,remove,a\n")
    config = configured({"providers": {"spot": {"trace": str(market), "max_workers": 1, "usd_per_gpu_hour": 2.0}}})
    path = tmp_path / "machine.toml"
    profile_run(write(config, in_order(*EVERYTHING, reports("spot-1", 40)), turns=TURNS, pulls=PULLS), path)
    plan = resolve(config, ["spot"], "test")
    outcome = simulation.simulate(plan, new_run_dir(config), simulation.Experiment(profile=str(path)))
    assert outcome.failed == ""
    assert tomllib.loads(path.read_text()).keys() >= {"boot_s", "decode_step_s"}
