"""What becomes of a vLLM that does not start, or dies: each message names the part and what would mend it, and nothing
is left behind. In the place of vLLM's process stands a stub."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic.config import EngineConfig
from elastic.core.types import Account, FinishReason, WeightMode
from elastic.engine.vllm import Vllm, VllmSettings
from elastic.engine.vllm.engine import VllmEngine
from elastic.engine.vllm.parking import ParkableVllmEngine
from elastic.system.parking import Parkable
from elastic.testing.recorder import Recorder
from elastic.weights.source import RelaySource

MODEL = {"vocab_size": 64, "max_position_embeddings": 4096}
STUB = Path(__file__).with_name("vllm_stub.py")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts an engine whose vLLM does so; whatever it leaves running is a failure."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\nexec {sys.executable} {STUB}\n")
    interpreter.chmod(0o755)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    started: list[VllmEngine] = []

    def starting(does: str, made: type[VllmEngine] = VllmEngine, **settings: object) -> VllmEngine:
        monkeypatch.setenv("STUB", does)
        own = VllmSettings.model_validate({"restart_base_s": 0.01, **settings})
        started.append(made(MODEL, EngineConfig.model_validate({"kind": "vllm"}), own, str(interpreter)))
        return started[-1]

    yield starting
    for engine in started:
        engine.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (
            "killed",
            r"vLLM's process ended as it started: signal SIGKILL \(by the system, .*memory.*fewer engine.kv_blocks",
        ),
        (
            "fails:ValueError: No available memory for the cache blocks",
            r"vLLM did not start: .*; fewer engine.kv_blocks",
        ),
        (
            "fails:ValueError: Model architectures ['Warp'] are not supported",
            r"Warp.*; model\.checkpoint must be of an",
        ),
        ("fails:ValueError: block size 16", r"block size 16; engine\.kv_block_tokens must be"),
    ],
)
def test_a_start_that_fails_says_what_would_mend_it(start, does, message):
    with pytest.raises(ValueError, match=message):
        start(does)


def test_a_start_that_hangs_is_given_up(start):
    with pytest.raises(ValueError, match=r"engine\.vllm\.start_timeout_s: vLLM did not start in 0\.5 s; .* up to 60 s"):
        start("hangs", start_timeout_s=0.5)


def test_one_death_too_many_ends_the_engine_and_every_turn_says_why(start, turn):
    recorder: Any = Recorder(start("dies", max_restarts=1), timeout_s=120.0)
    for number in range(2):
        recorder.run(turn(f"turn {number}"))
        end = recorder.end(f"turn {number}")
        assert (end.finish, end.token_ids) == (FinishReason.STALLED, [])
        assert "vLLM's process ended: exit code 3" in end.detail

    recorder.engine._watching.join(120.0)
    with pytest.raises(RuntimeError, match=r"has ended 2 times, more than engine\.vllm\.max_restarts = 1 allows"):
        recorder.engine.statistics()


def test_weights_that_come_while_another_job_has_the_gpu_are_put_in_force_as_it_comes_back(start, tmp_path):
    told = tmp_path / "told"
    engine = Recorder(start(f"obeys:{told}", ParkableVllmEngine, sleep_level=1), timeout_s=120.0).engine
    assert isinstance(engine, Parkable)
    assert (engine.park().state_bytes, engine.park().state_bytes) == (77, 0)
    for version in (2, 3):
        engine.load_version(RelaySource(version=version, relay=str(tmp_path), run="run"), WeightMode.FINISH)
        assert engine.statistics().weights_version == version
    assert told.read_text().split() == ["SleepNow"]
    assert engine.resume().state_bytes == 77
    assert told.read_text().split() == ["SleepNow", "WakeUp", "LoadVersion"]
    assert (engine.statistics().weights_version, engine.statistics().accounts_ns[Account.PARKED] > 0) == (3, True)


def test_a_process_that_dies_while_another_job_has_the_gpu_has_no_successor(start, tmp_path):
    recorder: Any = Recorder(start(f"obeys:{tmp_path / 'told'}", ParkableVllmEngine), timeout_s=120.0)
    recorder.engine.park()
    os.kill(recorder.engine.process_id, signal.SIGKILL)
    recorder.engine._watching.join(120.0)
    with pytest.raises(RuntimeError, match="has ended while another job had its device"):
        recorder.engine.statistics()


def test_deaths_long_ago_are_forgotten(start, turn):
    recorder: Any = Recorder(start("dies", max_restarts=1, restart_reset_s=0.001), timeout_s=120.0)
    for number in range(3):
        recorder.run(turn(f"turn {number}"))
        assert recorder.end(f"turn {number}").finish is FinishReason.STALLED
    recorder.engine.statistics()


def test_a_cpu_takes_new_weights_in_bfloat16_alone(start):
    with pytest.raises(ValueError, match=r"engine\.vllm\.arguments\.dtype: .*in 'float32'; allowed: 'bfloat16'"):
        start("dies", arguments={"dtype": "float32"})


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({"max_context_tokens": 5000}, {}, r"engine\.max_context_tokens: 5000 exceeds .*; allowed: up to 4096"),
        (
            {},
            {"base": "/nowhere"},
            r"engine\.vllm\.base: /nowhere has no config\.json; allowed: a checkpoint's directory",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(config, settings, message):
    with pytest.raises(ValueError, match=message):
        Vllm.create(
            MODEL, EngineConfig.model_validate({"kind": "vllm", **config}), VllmSettings.model_validate(settings)
        )


def test_an_engine_with_a_base_does_not_sleep():
    with pytest.raises(ValueError, match=r"sleep_level = 1 takes the weights from the base; allowed: 0"):
        VllmSettings.model_validate({"base": "base", "sleep_level": 1})
