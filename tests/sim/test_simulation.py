"""Simulated runs: the same journal and report as live ones, the same history from the same seed, clear refusals."""

import gzip
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.compose.incarnations import replay
from elastic.compose.plan import resolve
from elastic.compose.runs import new_run_dir
from elastic.config import Config, ConfigError, load_config
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.types import NS_PER_S, EndCause, WeightMode
from elastic.report import as_markdown, summarise
from elastic.runtime.journal import RunDirectory, TurnRow
from elastic.simulation import run as simulation
from elastic.simulation.calibration import CalibrationError, profile_run
from elastic.simulation.performance import SimulationError
from providers.markets import ReservedMarket
from traces import TraceError
from traces.sessions import read_session_trace

SPOT = "time_s,event,instance_id\n0,add,a\n0,add,b\n4,remove,a\n6,add,c\n9,remove,b\n"

ROLLOUT = {"groups": 3, "group_size": 4, "max_turns": 4, "max_tokens_per_turn": 64}


def config(directory: Path, **sections: object) -> Config:
    trace = directory / "spot.csv"
    trace.write_text(SPOT)
    body = {
        "run": {"steps": 2, "directory": str(directory / "runs"), "seed": 3},
        "model": {"checkpoint": str(directory)},
        "rollout": ROLLOUT,
        "trainer": {"updates_per_step": 1},
        "seeding": {"reserved_engines": 5},
        "engine": {"pacing": {"prefill_tokens_per_s": 8000, "decode_step_s": {1: 0.014, 16: 0.024}}},
        "providers": {
            "spot": {"trace": str(trace), "max_workers": 2, "usd_per_gpu_hour": 2.0},
            "reserved": {"max_workers": 3},
            "serverless": {"max_workers": 2, "cold_start_s": 1.0, "lease_s": 12.0, "usd_per_gpu_hour": 3.0},
        },
    }
    return Config.model_validate(body | sections)


PLAIN = simulation.Experiment()
PLANNER = Path(__file__).parents[2] / "examples" / "planner.toml"


def simulate(
    directory: Path, experiment: simulation.Experiment = PLAIN, provider: str = "spot", **sections: object
) -> Path:
    settings = config(directory, **sections)
    plan = resolve(settings, [provider], "test")
    outcome = simulation.simulate(plan, new_run_dir(settings), experiment)
    assert outcome.failed == ""
    return outcome.run_dir


def events(run_dir: Path) -> list[tuple[int, e.Event]]:
    with RunDirectory(run_dir).newest_journal() as journal:
        return list(journal.events())


def books_balance(run_dir: Path) -> bool:
    return summarise(RunDirectory(run_dir)).ledger_imbalance_ns == 0


def test_a_simulated_run_is_reported_as_one(tmp_path: Path) -> None:
    summary = summarise(RunDirectory(simulate(tmp_path)))
    assert summary.simulated
    assert summary.outcome == "finished"
    assert len(summary.steps) == 2
    assert summary.ledger_imbalance_ns == 0
    assert summary.total.preemptions == 2
    assert summary.total.tokens >= sum(row.trajectories for row in summary.steps)
    assert "Simulated" in as_markdown(summary)


def test_same_seed_same_history(tmp_path: Path) -> None:
    first, second = simulate(tmp_path), simulate(tmp_path)
    assert events(first) == events(second)
    other = simulate(tmp_path, run={"steps": 2, "directory": str(tmp_path / "runs"), "seed": 4})
    assert events(first) != events(other)


def test_its_journal_replays_to_the_same_state(tmp_path: Path) -> None:
    run_dir = simulate(tmp_path)
    with RunDirectory(run_dir).newest_journal() as journal:
        wanted = journal.meta()["digest"]
    assert digest(replay(RunDirectory(run_dir))) == wanted


def test_turn_lengths_of_another_run(tmp_path: Path) -> None:
    first = simulate(tmp_path)
    again = simulate(tmp_path, simulation.Experiment(turns=str(first)))
    assert simulation.recorded_episodes(RunDirectory(first)) == simulation.recorded_episodes(RunDirectory(again))


@pytest.mark.parametrize("mode", WeightMode)
@pytest.mark.parametrize("staleness_bound", [0, 1])
def test_every_weight_mode_brings_the_same_tokens(tmp_path: Path, mode: WeightMode, staleness_bound: int) -> None:
    sections = {"weights": {"mode": mode}, "rollout": ROLLOUT | {"staleness_bound": staleness_bound}}
    run_dir = simulate(tmp_path, run={"steps": 4, "directory": str(tmp_path / "runs"), "seed": 3}, **sections)
    drawn = simulation.episodes_of(config(tmp_path), PLAIN)
    found = simulation.recorded_episodes(RunDirectory(run_dir))
    assert found
    assert found == {trajectory: drawn.episode(trajectory) for trajectory in found}


@pytest.mark.parametrize("cold_start_s", [0.0, 3.0])
@pytest.mark.parametrize("lease_s", [9.0, 12.0, 300.0])
def test_serverless_calls_end_in_time(tmp_path: Path, cold_start_s: float, lease_s: float) -> None:
    settings = {"max_workers": 2, "cold_start_s": cold_start_s, "lease_s": lease_s, "usd_per_gpu_hour": 3.0}
    run = {"steps": 6, "directory": str(tmp_path / "runs"), "seed": 3}
    run_dir = simulate(tmp_path, provider="serverless", run=run, providers={"serverless": settings})
    granted: dict[str, int] = {}
    joined: dict[str, int] = {}
    for t_ns, event in events(run_dir):
        if isinstance(event, e.LeaseGranted) and event.expires_at_ns is not None:
            granted[event.lease] = t_ns
            assert event.expires_at_ns == t_ns + round(lease_s * NS_PER_S)
        elif isinstance(event, e.WorkerJoined):
            joined[event.worker] = t_ns
        elif isinstance(event, e.LeaseEnded) and event.lease in granted:
            held_ns = t_ns - granted.pop(event.lease)
            assert held_ns <= lease_s * NS_PER_S
            assert (held_ns == lease_s * NS_PER_S) == (event.cause is EndCause.EXPIRED)
            if event.lease in joined:
                assert held_ns - (t_ns - joined[event.lease]) >= cold_start_s * NS_PER_S
    assert not granted
    assert joined
    assert books_balance(run_dir)


def test_a_lease_of_several_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReservedMarket, "workers_per_lease", 2)
    run_dir = simulate(tmp_path, provider="reserved")
    seen = [event for _, event in events(run_dir)]
    granted = [event for event in seen if isinstance(event, e.LeaseGranted) and event.lease.startswith("reserved")]
    assert [event.workers for event in granted] == [("reserved-1", "reserved-1.1")], "three workers allow one pair"
    joined = {event.worker for event in seen if isinstance(event, e.WorkerJoined)}
    assert {"reserved-1", "reserved-1.1"} <= joined
    ended = [event.lease for event in seen if isinstance(event, e.LeaseEnded)]
    assert ended.count("reserved-1") == 1
    assert books_balance(run_dir)


def test_cached_prefixes_are_journaled(tmp_path: Path) -> None:
    with RunDirectory(simulate(tmp_path, provider="reserved")).newest_journal() as journal:
        rows = journal.rows(TurnRow)
    assert all(0 <= row.cached_tokens < row.prompt_tokens * row.attempts for row in rows)
    assert sum(row.cached_tokens for row in rows) > 0


def test_sessions_and_computed_devices(tmp_path: Path) -> None:
    experiment = simulation.Experiment(profile="H100/Qwen3-8B", turns="claude-code-sessions", frame_s=0.5)
    engine = {"max_context_tokens": 65_536, "kv_blocks": 8192, "prefill_chunk_tokens": 2048}
    rollout = {"groups": 2, "group_size": 2, "max_turns": 10, "max_tokens_per_turn": 2048}
    run_dir = simulate(tmp_path, experiment, engine=engine, rollout=rollout)
    assert simulation.recorded_episodes(RunDirectory(run_dir))


@pytest.mark.parametrize(
    ("experiment", "sections", "found"),
    [
        ({}, {"engine": {}}, "engine.pacing: missing"),
        ({"profile": "H9/X"}, {}, "no device 'H9'"),
        ({"turns": "nowhere"}, {}, "no run 'nowhere'"),
        ({"profile": "H100/Qwen3-8B"}, {"engine": {"max_context_tokens": 900_000, "kv_blocks": 60_000}}, "do not fit"),
        ({"profiles": {"serving": "local"}}, {}, "no provider 'serving'; allowed: trainer, spot"),
        ({"profile": "H100/Qwen3-8B:tp2"}, {}, r"trainer\.gpus: found 1, but --profile H100/Qwen3-8B:tp2 has 2 GPUs"),
        ({"profiles": {"spot": "H20/Qwen3-8B:tp4"}}, {}, r"providers\.spot\.gpus_per_worker: found 1, but .* 4 GPUs"),
        ({"profile": "H100/Qwen3-8B", "profiles": {"spot": "H20/Qwen3-14B"}}, {}, "a run has one model; found "),
        (
            {"profile": "H100/Qwen3-8B"},
            {"scheduler": {"boot_timeout_s": 60.0}},
            r"scheduler\.boot_timeout_s: 60 s, .*90 s .*trainer_boot_s",
        ),
        (
            {},
            {"scheduler": {"boot_timeout_s": 6.0}},
            r"scheduler\.boot_timeout_s: 6 s, but workers of trainer speak 6 s",
        ),
        (
            {},
            {"simulation": {"numbers": {"spot_queue_s": 60}}},
            r"scheduler\.acquire_timeout_s: 60 s, but spot .* 60 s",
        ),
        ({}, {"simulation": {"numbers": {"boots_s": 60}}}, r"simulation\.numbers\.boots_s: unknown key; allowed: "),
        ({"environment_times": True}, {}, "--environment-times: needs --turns-from RUN"),
        ({"horizon_s": math.inf}, {}, "--hours: found inf"),
        ({"frame_s": math.nan}, {}, "--frame-s: found nan"),
    ],
)
def test_what_cannot_be_simulated(
    tmp_path: Path, experiment: dict[str, Any], sections: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        simulate(tmp_path, simulation.Experiment(**experiment), **sections)


def test_no_end_is_a_failure_that_says_what_it_waits_for(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match=r"no end within 2 s of virtual time; the run waits for: .*trainer"):
        simulate(tmp_path, simulation.Experiment(horizon_s=2.0))


def test_a_run_that_only_repeats_itself_is_given_up(tmp_path: Path) -> None:
    """Prefilling takes longer than a turn may stand still: it is routed again and again."""
    pacing = {"prefill_tokens_per_s": 1, "decode_step_s": {1: 0.014}}
    with pytest.raises(SimulationError, match=r"nothing has come of the run since .*; the run waits for: "):
        simulate(
            tmp_path,
            engine={"pacing": pacing},
            rollout=ROLLOUT | {"groups": 1, "group_size": 2},
            trainer={"updates_per_step": 1, "step_timeout_s": 60},
        )


def test_no_training_in_time_is_a_failure_with_its_cause(tmp_path: Path) -> None:
    settings = config(tmp_path, trainer={"updates_per_step": 1, "step_timeout_s": 0.001})
    plan = resolve(settings, ["spot"], "test")
    outcome = simulation.simulate(plan, new_run_dir(settings), PLAIN)
    assert outcome.failed == "the trainer's device did not change between training and generating"


def joins(run_dir: Path) -> dict[str, e.WorkerJoined]:
    return {event.worker: event for _, event in events(run_dir) if isinstance(event, e.WorkerJoined)}


def test_a_provider_has_engines_of_its_own(tmp_path: Path) -> None:
    """As live: `providers.X.engine` goes before `[engine]`, in speed and in what workers declare."""
    slow = {"prefill_tokens_per_s": 800, "decode_step_s": {"1": 0.14, "16": 0.24}}
    spot = {"trace": str(tmp_path / "steady.csv"), "max_workers": 2}
    (tmp_path / "steady.csv").write_text("time_s,event,instance_id\n0,add,a\n0,add,b\n99999,remove,a\n")
    engine = {"max_batch": 3, "max_pending": 1, "tflops": 5.0, "memory_gb_per_s": 7.0, "pacing": slow}
    patience = {"turn_stall_timeout_s": 300, "stall_timeout_s": 60}
    plain = simulate(tmp_path, providers={"spot": spot}, scheduler=patience)
    slowed = simulate(tmp_path, providers={"spot": spot | {"engine": engine}}, scheduler=patience)
    declared = {name: event.capabilities for name, event in joins(slowed).items()}
    assert {c.max_batch for name, c in declared.items() if name.startswith("spot")} == {3}
    assert {(c.tflops, c.memory_gb_per_s) for n, c in declared.items() if n.startswith("spot")} == {(5.0, 7.0)}
    assert [(c.max_batch, c.tflops) for n, c in declared.items() if n.startswith("trainer")] == [(16, None)]
    assert events(slowed)[-1][0] > 1.5 * events(plain)[-1][0]


PATIENT = {"boot_timeout_s": 300, "acquire_timeout_s": 300}


def test_devices_of_two_kinds(tmp_path: Path) -> None:
    """Rollouts on H20, training on H800, as in the papers; both declare what they can do."""
    experiment = simulation.Experiment(profile="H800/Qwen3-8B", profiles={"spot": "H20/Qwen3-8B"})
    run = {"steps": 3, "directory": str(tmp_path / "runs")}
    trainer = {"updates_per_step": 1, "gpus": 8}
    declared = joins(simulate(tmp_path, experiment, scheduler=PATIENT, engine={}, run=run, trainer=trainer))
    kinds = {
        name.partition("-")[0]: (c.capabilities.tflops, c.capabilities.memory_gb_per_s) for name, c in declared.items()
    }
    assert kinds["trainer"] == (8 * 989.5, 8 * 3350)
    assert kinds.get("spot", (148, 4000)) == (148, 4000)


def test_more_devices_train_faster(tmp_path: Path) -> None:
    def trained_s(gpus: int) -> float:
        trainer = {"updates_per_step": 1, "gpus": gpus}
        numbers = {"train_tokens_per_s": 100.0, "train_group_s": 0.0}
        run_dir = simulate(tmp_path, trainer=trainer, simulation={"numbers": numbers})
        return summarise(RunDirectory(run_dir)).providers["trainer"].accounts_s["training"] / gpus

    assert trained_s(1) > 3 * trained_s(8)


def test_turns_of_a_run_with_other_limits(tmp_path: Path) -> None:
    """They are cut to this run's limits, and what stood in for what is said."""
    first = simulate(tmp_path)
    told: list[str] = []
    limits = ROLLOUT | {"groups": 5, "max_turns": 2, "max_tokens_per_turn": 8}
    settings = config(tmp_path, rollout=limits)
    plan = resolve(settings, ["spot"], "test")
    experiment = simulation.Experiment(turns=str(first))
    outcome = simulation.simulate(plan, new_run_dir(settings), experiment, note=told.append)
    assert outcome.failed == ""
    found = simulation.recorded_episodes(RunDirectory(outcome.run_dir))
    assert all(
        len(episode.turns) <= 2 and max(turn.tokens for turn in episode.turns) <= 8 for episode in found.values()
    )
    assert any("of 40 trajectories are longer than rollout.max_turns" in line for line in told)
    assert any("16 of 40 trajectories are not in the run" in line for line in told)
    summary = summarise(RunDirectory(outcome.run_dir))
    assert summary.notes == told
    assert all(line in as_markdown(summary).replace("\\_", "_") for line in told)


def test_environment_times_of_another_run(tmp_path: Path) -> None:
    slow = {"numbers": {"step_s": 3.0, "reset_s": 2.0, "environment_serial": 0}}
    first = simulate(tmp_path, simulation=slow)
    timed = simulation.recorded_episodes(RunDirectory(first), environment_times=True)
    assert {round(turn.latency_s, 6) for episode in timed.values() for turn in episode.turns} == {2.0, 3.0}
    assert all(
        turn.latency_s == 0 for e in simulation.recorded_episodes(RunDirectory(first)).values() for turn in e.turns
    )
    again = simulate(tmp_path, simulation.Experiment(turns=str(first), environment_times=True))
    assert simulation.recorded_episodes(RunDirectory(again), environment_times=True) == timed


def test_a_market_that_takes_its_time(tmp_path: Path) -> None:
    """What was asked for is granted later, or refused when it is gone by then; and everything still adds up."""
    run = {"steps": 6, "directory": str(tmp_path / "runs"), "seed": 3}
    run_dir = simulate(tmp_path, run=run, simulation={"numbers": {"spot_queue_s": 3.0}})
    seen = [(t_ns, event) for t_ns, event in events(run_dir)]
    granted = [t_ns for t_ns, event in seen if isinstance(event, e.LeaseGranted) and event.lease.startswith("spot")]
    assert granted
    assert min(granted) >= 3 * NS_PER_S
    assert books_balance(run_dir)


@pytest.mark.parametrize(
    ("spot", "found"),
    [
        ({"max_workers": 0}, "providers.spot.max_workers is 0: no worker comes from it"),
        ({"start_s": 500, "end_s": 600}, "no instance is there: no worker comes from it"),
        ({"start_s": 20, "end_s": 90}, "nothing changes: late.csv:3 is at 9 s, late.csv:4 is at 400 s"),
        ({"start_s": 0, "end_s": 999}, "the market stays as it is at 410 s, where the trace ends"),
    ],
)
def test_nothing_comes_of_nothing_and_says_so(tmp_path: Path, spot: dict[str, Any], found: str) -> None:
    trace = tmp_path / "late.csv"
    trace.write_text("time_s,event,instance_id\n0,add,a\n9,add,b\n400,remove,a\n410,remove,b\n")
    settings = config(tmp_path, providers={"spot": {"trace": str(trace), **spot}})
    plan = resolve(settings, ["spot"], "test")
    told: list[str] = []
    outcome = simulation.simulate(plan, new_run_dir(settings), PLAIN, note=told.append)
    assert outcome.failed == ""
    (line,) = told
    assert line.startswith("providers.spot")
    assert found in line


def test_a_provider_without_a_market_is_modelled_as_workers_that_stay_and_a_note_says_so(tmp_path: Path) -> None:
    told = "providers.lab: JoinedProvider names no market (market_type) by which to simulate it: its max_workers = 2"
    lab = {"kind": "joined", "max_workers": 2, "usd_per_gpu_hour": 1.5}
    run_dir = simulate(tmp_path, provider="lab", providers={"lab": lab})
    summary = summarise(RunDirectory(run_dir))
    assert [note for note in summary.notes if note.startswith(told)]
    assert summary.providers["lab"].leases == 2
    assert summary.providers["lab"].usd > 0


def test_the_planners_example(tmp_path: Path) -> None:
    overrides = ["run.steps=1", "rollout.groups=4", "rollout.group_size=4", f"run.directory={tmp_path}"]
    settings = load_config(PLANNER, overrides)
    plan = resolve(settings, settings.simulation.providers, str(PLANNER))
    outcome = simulation.simulate(plan, new_run_dir(settings), PLAIN)
    assert outcome.failed == ""
    gpus = {name: s.max_workers * s.gpus_per_worker for name, s in plan.providers.items()}
    assert settings.trainer.gpus + sum(gpus.values()) == 64
    assert books_balance(outcome.run_dir)


def test_only_live_runs_make_profiles(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="simulated"):
        profile_run(simulate(tmp_path), tmp_path / "profile.toml")


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("s,1,2", "3 fields"),
        ("s,0,2,1", "new_tokens '0'"),
        ("s,1,-2,1", "output_tokens '-2'"),
        ("s,1,2,-1", "gap_s '-1'"),
        ("s,1,2,nan", "gap_s 'nan'"),
        ("s,1,2,1\nt,1,2,1\ns,1,2,1", "session 's' again"),
    ],
)
def test_bad_sessions(tmp_path: Path, row: str, found: str) -> None:
    path = tmp_path / "sessions.csv.gz"
    path.write_bytes(gzip.compress(f"session,new_tokens,output_tokens,gap_s\n{row}\n".encode()))
    with pytest.raises(TraceError, match=found):
        read_session_trace(path)


def test_experiments_are_plain_data() -> None:
    experiment = simulation.Experiment(profile="local", profiles={"spot": "H20/Qwen3-8B"})
    assert msgspec.json.decode(msgspec.json.encode(experiment), type=simulation.Experiment) == experiment
