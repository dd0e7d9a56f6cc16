"""Simulated runs: the same journal and report as live ones, the same history from the same seed, clear refusals."""

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic import compose, simulation
from elastic.calibration import CalibrationError, profile_run
from elastic.config import Config, ConfigError
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.types import NS_PER_S, EndCause, WeightMode
from elastic.report import as_markdown, summarise
from elastic.runtime.journal import JournalReader
from elastic.sim.performance import SimulationError
from elastic.sim.performance.markets import ReservedMarket
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
        "engine": {"pacing": {"prefill_tokens_per_s": 8000, "decode_step_s": {1: 0.014, 16: 0.024}}},
        "providers": {
            "spot": {"trace": str(trace), "max_workers": 2, "usd_per_gpu_hour": 2.0},
            "reserved": {"max_workers": 3},
            "serverless": {"max_workers": 2, "cold_start_s": 1.0, "lease_s": 12.0, "usd_per_gpu_hour": 3.0},
        },
    }
    return Config.model_validate(body | sections)


PLAIN = simulation.Experiment()


def simulate(
    directory: Path, experiment: simulation.Experiment = PLAIN, provider: str = "spot", **sections: object
) -> Path:
    settings = config(directory, **sections)
    plan = compose.resolve(settings, [provider], "test")
    outcome = simulation.simulate(plan, compose.new_run_dir(settings), experiment)
    assert outcome.failed == ""
    return outcome.run_dir


def events(run_dir: Path) -> list[tuple[int, e.Event]]:
    reader = JournalReader(run_dir / "journal.sqlite")
    try:
        return list(reader.events())
    finally:
        reader.close()


def books_balance(run_dir: Path) -> bool:
    reader = JournalReader(run_dir / "journal.sqlite")
    try:
        return summarise(reader).ledger_imbalance_ns == 0
    finally:
        reader.close()


def test_a_simulated_run_is_reported_as_one(tmp_path: Path) -> None:
    reader = JournalReader(simulate(tmp_path) / "journal.sqlite")
    summary = summarise(reader)
    reader.close()
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
    reader = JournalReader(run_dir / "journal.sqlite")
    wanted = reader.meta()["digest"]
    reader.close()
    assert digest(compose.replay(run_dir)) == wanted


def test_turn_lengths_of_another_run(tmp_path: Path) -> None:
    first = simulate(tmp_path)
    again = simulate(tmp_path, simulation.Experiment(turns=str(first)))
    assert simulation.recorded_episodes(first) == simulation.recorded_episodes(again)


@pytest.mark.parametrize("mode", WeightMode)
@pytest.mark.parametrize("staleness_bound", [0, 1])
def test_every_weight_mode_brings_the_same_tokens(tmp_path: Path, mode: WeightMode, staleness_bound: int) -> None:
    sections = {"weights": {"mode": mode}, "rollout": ROLLOUT | {"staleness_bound": staleness_bound}}
    run_dir = simulate(tmp_path, run={"steps": 4, "directory": str(tmp_path / "runs"), "seed": 3}, **sections)
    drawn = simulation.episodes_of(config(tmp_path), PLAIN)
    found = simulation.recorded_episodes(run_dir)
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
    reader = JournalReader(simulate(tmp_path, provider="reserved") / "journal.sqlite")
    rows = list(reader.rows("turns"))
    reader.close()
    assert all(0 <= row["cached_tokens"] < row["prompt_tokens"] * row["attempts"] for row in rows)
    assert sum(row["cached_tokens"] for row in rows) > 0


def test_sessions_and_computed_devices(tmp_path: Path) -> None:
    experiment = simulation.Experiment(profile="H100/Qwen3-8B", turns="claude-code-sessions", frame_s=0.5)
    engine = {"max_context_tokens": 65_536, "kv_blocks": 8192, "prefill_chunk_tokens": 2048}
    rollout = {"groups": 2, "group_size": 2, "max_turns": 10, "max_tokens_per_turn": 2048}
    patience = {"boot_timeout_s": 300, "turn_stall_timeout_s": 300, "queue_timeout_s": 3600}
    run_dir = simulate(tmp_path, experiment, engine=engine, rollout=rollout, scheduler=patience)
    assert simulation.recorded_episodes(run_dir)


@pytest.mark.parametrize(
    ("experiment", "sections", "found"),
    [
        ({}, {"engine": {}}, "engine.pacing: missing"),
        ({"profile": "H9/X"}, {}, "no device 'H9'"),
        ({"turns": "nowhere"}, {}, "no run 'nowhere'"),
        ({"profile": "H100/Qwen3-8B"}, {"engine": {"max_context_tokens": 900_000, "kv_blocks": 60_000}}, "do not fit"),
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


def test_no_device_in_time_is_a_failure_with_its_cause(tmp_path: Path) -> None:
    settings = config(tmp_path, scheduler={"boot_timeout_s": 1, "acquire_timeout_s": 1})
    plan = compose.resolve(settings, ["spot"], "test")
    outcome = simulation.simulate(plan, compose.new_run_dir(settings), PLAIN)
    assert outcome.failed == "the trainer's device stopped answering (boot_timeout)"


def test_only_live_runs_make_profiles(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="simulated"):
        profile_run(simulate(tmp_path), tmp_path / "profile.toml")


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("s,1,2", "3 fields"),
        ("s,0,2,1", "'0' tokens"),
        ("s,1,-2,1", "'-2' tokens"),
        ("s,1,2,-1", "gap '-1'"),
        ("s,1,2,nan", "gap 'nan'"),
        ("s,1,2,1\nt,1,2,1\ns,1,2,1", "session 's' again"),
    ],
)
def test_bad_sessions(tmp_path: Path, row: str, found: str) -> None:
    path = tmp_path / "sessions.csv.gz"
    path.write_bytes(gzip.compress(f"session,new_tokens,output_tokens,gap_s\n{row}\n".encode()))
    with pytest.raises(TraceError, match=found):
        read_session_trace(path)


def test_experiments_are_plain_data() -> None:
    experiment = simulation.Experiment(profile="local")
    assert msgspec.json.decode(msgspec.json.encode(experiment), type=simulation.Experiment) == experiment
