"""Engines that share a trainer's devices: their turns, accounts and progress, and the trainer that makes way."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.compose.plan import resolve
from elastic.compose.scheduling import policies
from elastic.config import Config, ConfigError
from elastic.core.types import Account, FinishReason, SamplingParameters, WeightMode
from elastic.engine.base import EngineStatistics, GenerateRequest, RolloutEngine
from elastic.protocol import wire
from elastic.testing.recorder import Recorder
from elastic.weights.source import RelaySource
from elastic.worker.agent import build_engine
from elastic.worker.seeding_engines import SeveralEngines
from elastic.worker.trainer import create_trainer, seeding_engines
from elastic.worker.trainer.base import PolicyTrainer
from policies.seeding import AdaptiveWindow
from tests.worker.conftest import ScriptedEngine, generate, token_at
from tests.worker.trainer_house import GROUPS, TrainerHouse, config_of, step_of

SEEDS = {
    "trainer": {"kind": "transformers", "gpus": 4, "transformers": {"seeding": "vllm", "offload": "all"}},
    "engine": {"kind": "vllm", "device": "cpu", "vllm": {"tensor_parallel": 2}},
}


@pytest.fixture
def engines() -> list[ScriptedEngine]:
    return [ScriptedEngine(seed, version=0) for seed in range(3)]


@pytest.fixture
def together(engines: list[ScriptedEngine]) -> Iterator[Recorder]:
    recorder = Recorder(SeveralEngines(engines))
    yield recorder
    recorder.close()


def turn(number: int, tokens: int = 20) -> GenerateRequest:
    sampling = SamplingParameters(max_new_tokens=tokens, noise_seed=number, stop_token_ids=(), temperature=1.0)
    return GenerateRequest(request_id=f"t{number}", token_ids=[1, 2], start=0, sampling=sampling)


def executing(engines: list[ScriptedEngine]) -> list[int]:
    return [engine.statistics().executing for engine in engines]


def seeding(**changes: dict[str, Any]) -> Config:
    sections = {name: section | changes.get(name, {}) for name, section in SEEDS.items()}
    return Config.model_validate({"model": {"checkpoint": "base"}, **sections})


class TestWhoSeeds:
    def test_the_gpus_are_given_to_engines_of_that_many_each(self) -> None:
        assert seeding_engines(seeding()) == 2
        adaptive = policies(seeding()).seeding
        assert isinstance(adaptive, AdaptiveWindow)
        assert adaptive.reserved_engines == 2
        assert resolve(seeding(), ["spot"], "here").config.seeding.policy == "auto"

    def test_without_it_several_gpus_do_not_generate_and_one_does_as_ever(self) -> None:
        plain = seeding(trainer={"transformers": {}})
        assert seeding_engines(plain) == 0
        assert resolve(plain, ["spot"], "here").config.seeding.policy == "none"
        assert seeding_engines(Config.model_validate({"model": {"checkpoint": "base"}})) == 0

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"engine": {"kind": "torch"}}, "transformers.seeding: found 'vllm', but the trainer's engine is 'torch'"),
            ({"trainer": {"transformers": {"seeding": "vllm"}}}, "offload: found 'none' .* allowed: 'all'"),
            ({"trainer": {"gpus": 3}}, r"trainer\.gpus: found 3 .* take 2 each .* allowed: multiples"),
            ({"engine": {"device": "auto"}}, "sleep_level: found 0 .* allowed: 1, 2"),
        ],
    )
    def test_engines_that_cannot_are_refused_before_a_process_starts(
        self, changes: dict[str, dict[str, Any]], words: str
    ) -> None:
        with pytest.raises(ConfigError, match=words):
            resolve(seeding(**changes), ["spot"], "here")


class TestSeveralEngines:
    def test_turns_are_shared_out_and_none_is_begun_twice(
        self, together: Recorder, engines: list[ScriptedEngine]
    ) -> None:
        turns = [turn(number, 200) for number in range(6)]
        together.engine.submit(turns[:4])
        together.engine.submit(turns)
        assert executing(engines) == [2, 2, 2]
        together.finish(*(one.request_id for one in turns))
        for number, one in enumerate(turns):
            assert together.tokens(one.request_id) == [token_at(number, place) for place in range(200)]

    def test_an_engine_without_credit_gets_none(self, together: Recorder, engines: list[ScriptedEngine]) -> None:
        engines[1].sleep()
        together.engine.submit([turn(number, 10**6) for number in range(4)])
        assert executing(engines) == [2, 0, 2]
        together.engine.abort([f"t{number}" for number in range(4)])
        together.finish(*(f"t{number}" for number in range(4)))
        assert {together.end(f"t{number}").finish for number in range(4)} == {FinishReason.ABORTED}  # type: ignore[union-attr]

    def test_accounts_are_this_workers_time_to_the_nanosecond(self, together: Recorder) -> None:
        before = together.engine.statistics().accounts_ns
        began_ns = time.monotonic_ns()
        together.run(turn(0), turn(1))
        now = together.engine.statistics().accounts_ns
        assert sum(now.values()) - sum(before.values()) >= time.monotonic_ns() - began_ns - 10**9
        assert all(now[account] >= ns for account, ns in before.items())
        # One of three engines has had no turn.
        assert 0 < now[Account.DECODE] < now[Account.DECODE] + now[Account.IDLE] == sum(now.values())

    def test_one_that_hangs_is_seen_beside_the_others(self) -> None:
        others = [ScriptedEngine(1, version=0), Hanging(2, version=0)]
        together = Recorder(SeveralEngines(others))
        together.engine.submit([turn(number, 10**6) for number in range(2)])
        together.engine.statistics()
        stands = together.engine.statistics().progress
        together.until_tokens("t0", 50)
        assert together.engine.statistics().progress == stands
        together.engine.abort(["t1"])
        together.finish("t1")
        together.until(lambda: together.engine.statistics().progress > stands)
        together.close()

    def test_no_audit_holds_up_a_sleep(self, together: Recorder, engines: list[ScriptedEngine]) -> None:
        """It takes as long as a small share of a core takes for all weights."""
        looking, asleep = threading.Barrier(len(engines) + 1), threading.Event()

        def sound() -> bool:
            looking.wait(10)
            return asleep.wait(10)

        for engine in engines:
            engine.sound = sound
        with ThreadPoolExecutor(1) as auditing:
            audit = auditing.submit(together.engine.audit)
            looking.wait(10)
            together.engine.sleep()
            asleep.set()
            assert audit.result()

    def test_what_one_engine_fails_with_is_raised_when_all_are_through(
        self, together: Recorder, engines: list[ScriptedEngine]
    ) -> None:
        def fails(version: int) -> None:
            raise RuntimeError(f"version {version} does not fit")

        engines[0].before_load = fails
        source = RelaySource(run="r", version=7, relay="", publisher="")
        with pytest.raises(RuntimeError, match="version 7 does not fit"):
            together.engine.load_version(source, WeightMode.FINISH)
        assert [len(engine.loads) for engine in engines] == [0, 1, 1]
        assert together.engine.statistics().weights_version == 0

    def test_one_that_was_started_again_without_weights_is_given_them(self) -> None:
        engines = [ScriptedEngine(version=7), ScriptedEngine()]
        together = SeveralEngines(engines)
        assert together.statistics().weights_version is None
        together.load_version(RelaySource(run="r", version=7, relay="", publisher=""), WeightMode.FINISH)
        assert together.statistics().weights_version == 7
        assert [engine.loads for engine in engines] == [[(7, WeightMode.FINISH)]] * 2


class Hanging(ScriptedEngine):
    """One whose iterations do not count."""

    def statistics(self) -> EngineStatistics:
        return msgspec.structs.replace(super().statistics(), progress=0)


class Noted:
    """A trainer, and engines, whose use of the devices is noted in order."""

    def __init__(self, part: object, said: list[str], *names: str) -> None:
        self._part = part
        self._said = said
        self._names = names

    def __getattr__(self, name: str) -> object:
        if name in self._names:
            self._said.append(name)
        return getattr(self._part, name)


async def test_the_trainer_makes_way_for_engines_that_pull_what_it_publishes(base: Path, tmp_path: Path) -> None:
    """It is off its devices before they generate, and back once they sleep; they have its versions off the relay."""
    said: list[str] = []

    def make_engine(welcome: wire.Welcome) -> RolloutEngine:
        said.append("engines are made")
        plain = msgspec.structs.replace(welcome, engine={**welcome.engine, "kind": "torch"})
        return Noted(SeveralEngines([build_engine(plain) for _ in range(2)]), said, "sleep", "wake")  # type: ignore[return-value]

    def make_trainer(config: Config) -> PolicyTrainer:
        embedded = config.trainer.model_copy(update={"kind": "embedded", "gpus": 1})
        made = create_trainer(config.model_copy(update={"trainer": embedded}))
        return Noted(made, said, "park", "resume", "train_group", "update")  # type: ignore[return-value]

    async with TrainerHouse(config_of(base, **SEEDS), tmp_path) as house:
        house.parts |= {"make_engine": make_engine, "make_trainer": make_trainer}
        await house.ready()
        assert said == ["park", "engines are made"]
        house.send(*(generate(f"first{number}", most=8) for number in range(4)))
        for number in range(4):
            assert (await house.finished(f"first{number}")).finish is FinishReason.LENGTH
        said.clear()
        house.send(wire.Sleep())
        await house.step(1)
        house.send(wire.Wake())
        await house.first(wire.Awoke)
        group = ["resume", "train_group"]
        assert said == ["sleep", *group * GROUPS, "resume", "update", "park", "wake"]
        house.send(generate("second", most=8))
        await house.finished("second")
        assert {chunk.weights_version for chunk in house.chunks("second")} == {1}
        said.clear()
        house.send(step_of(1)[-1])  # Once more, as after a lost connection: nothing is done twice.
        await house.until(lambda: len(house.of(wire.Stepped)) == 2)
        assert said == []
