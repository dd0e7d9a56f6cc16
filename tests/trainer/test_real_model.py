"""A real chat model on the real vLLM: trained whole and by an adapter, under kills, and what is made of it afterwards.

`make test-trainer` makes both: the environment, and the model (`make chat-model`).
"""

import json
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm", reason="the environment of `make test-vllm` is not this one: `make test-trainer`")
transformers = pytest.importorskip("transformers")

from benchmarks import _agents, _crashes, _runs  # noqa: E402
from elastic.core import events as e  # noqa: E402
from elastic.engine.base import BF16_NOISE  # noqa: E402
from elastic.runtime.journal import RunDirectory  # noqa: E402
from tests.trainer.sums import GROUP_SIZE, Sums  # noqa: E402

MODEL = Path(os.environ.get("ELASTIC_CHAT_MODEL", Path(__file__).parents[2] / ".cache/chat-model"))
STEPS = 3
TIMEOUT_S = 2400.0
START_S = 1200.0
CONFIG = f"""
[run]
name = "sums"
seed = 7
steps = {STEPS}
[model]
checkpoint = "{{checkpoint}}"
[environment]
name = "outside"
[environment.settings]
deadline_s = {TIMEOUT_S}
idle_s = {TIMEOUT_S}
[rollout]
groups = 2
group_size = {GROUP_SIZE}
max_tokens_per_turn = 12
[trainer]
kind = "transformers"
updates_per_step = 1
warmup_updates = 0
checkpoint_every_steps = 1
step_timeout_s = {START_S}
[engine]
kind = "vllm"
max_batch = 8
max_context_tokens = 256
kv_block_tokens = 32
kv_blocks = 64
[engine.vllm]
start_timeout_s = {START_S}
[front]
hold_s = 120
[scheduler]
boot_timeout_s = {START_S}
queue_timeout_s = {START_S}
load_timeout_s = 300
stall_timeout_s = 60
turn_stall_timeout_s = 120
heartbeat_timeout_s = 30
[weights]
pull_timeout_s = 120
[providers.reserved]
max_workers = 1
"""
LORA = ("trainer.transformers.lora.r=8", "trainer.transformers.lora.lora_alpha=16", "trainer.learning_rate=1e-3")
TEXT = "What is 7 + 5? Answer with the number only."

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.timeout(TIMEOUT_S + 600),
    pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="the model is not there: `make chat-model`"),
]


class Trained(NamedTuple):
    run_dir: Path
    report: dict[str, Any]
    rewards: list[float]


def train(directory: Path, checkpoint: Path, *settings: str, kills: bool) -> Trained:
    """A run to its end, under one kill of a worker and one of the trainer, while an agent asks for sums."""
    directory.mkdir()
    config = directory / "sums.toml"
    config.write_text(CONFIG.format(checkpoint=checkpoint))

    class SumsRun(_agents.AgentsRun):
        def __init__(self) -> None:
            arguments = [str(config), "--providers", "reserved", *_runs.sets(settings)]
            _crashes.FrontedRun.__init__(self, directory / "runs", arguments)

    run = SumsRun()
    try:
        sums = Sums(run.url(), run.driver_key())
        playing = threading.Thread(target=sums.play)
        playing.start()
        try:
            for step, lease in ((1, "reserved"), (2, "trainer")) if kills else ():
                run.until(f"version {step}", lambda s=step: versions(run.run_dir) >= s, TIMEOUT_S)
                run.kill_processes(lease, run.recorded(f"{lease}-*.json"))
            run.until("its end", run.ended, TIMEOUT_S)
        finally:
            sums.stop()
            playing.join()
        report = json.loads(_runs.elastic("report", str(run.run_dir), "--json"))
        return Trained(run.run_dir, report, sums.rewards)
    finally:
        run.discard()


def versions(run_dir: Path) -> int:
    """How many steps are done."""
    return max((event.version for event in told(run_dir, e.WeightsPublished)), default=0)


def told(run_dir: Path, kind: type[Any]) -> list[Any]:
    with RunDirectory(run_dir).journals() as journals:
        return [event for journal in journals for _, event in journal.events_of(kind.__name__)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("whole") / "run", MODEL, "trainer.learning_rate=1e-5", kills=True)


@pytest.fixture(scope="module")
def exported(whole: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported") / "policy"
    found = json.loads(_runs.elastic("export", str(whole.run_dir), "-o", str(directory), "--json"))
    assert found["step"] == STEPS
    return directory


def sound(trained: Trained) -> None:
    report = trained.report
    assert [len(report["steps"]), report["trajectories_failed"], report["ledger_imbalance_ns"]] == [STEPS, {}, 0]
    assert not report["mismatches"]
    for step in report["steps"]:
        assert step["trainer"]["updates"] == 1
        assert step["trainer"]["mismatch_mean"] < 2 * BF16_NOISE
    assert len(set(trained.rewards)) > 1


def test_it_trains_for_three_steps_under_kills(whole: Trained) -> None:
    sound(whole)
    assert versions(whole.run_dir) == STEPS
    joined = {event.worker for event in told(whole.run_dir, e.WorkerJoined)}
    assert joined == {"reserved-1", "reserved-2", "trainer-1", "trainer-2"}


def test_transformers_and_vllm_load_what_is_exported(exported: Path) -> None:
    """Both say the same of the same text, and it is not what the base said."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    chat = [{"role": "user", "content": TEXT}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]

    def said(directory: Path) -> torch.Tensor:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(-1, torch.tensor(ids)[1:, None]).squeeze(-1)

    import vllm  # pyright: ignore[reportMissingImports]

    ours = said(exported)
    assert (ours - said(MODEL)).abs().max() > 0
    model = vllm.LLM(str(exported), dtype="bfloat16", enforce_eager=True, max_model_len=256, gpu_memory_utilization=0.2)
    wanted = vllm.SamplingParams(max_tokens=12, temperature=0.0, prompt_logprobs=0)
    (found,) = model.generate([{"prompt_token_ids": ids}], wanted, use_tqdm=False)
    theirs = [place[token].logprob for place, token in zip(found.prompt_logprobs[1:], ids[1:], strict=True)]
    assert (torch.tensor(theirs) - ours).abs().mean() < 2 * BF16_NOISE
    assert found.outputs[0].text.strip()


@pytest.fixture(scope="module")
def adapted(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run whose base is the first one's policy."""
    settings = (*LORA, f"engine.vllm.base={exported}")
    return train(tmp_path_factory.mktemp("adapted") / "run", exported, *settings, kills=False)


def test_what_is_served_follows_an_adapter(adapted: Trained) -> None:
    """Three updates: each version is proven, and its tokens have the trainer's log-probabilities."""
    pytest.importorskip("peft")
    sound(adapted)
    expected = {event.version: event.proof for event in told(adapted.run_dir, e.WeightsPublished)}
    expected |= {
        joined.weights_version: joined.proof for joined in told(adapted.run_dir, e.WorkerJoined) if joined.proof
    }
    assert set(expected) >= set(range(STEPS + 1))
    proven = {event.version: event.proof for event in told(adapted.run_dir, e.WeightsApplied)}
    assert len(proven) >= STEPS
    for version, proof in proven.items():
        distances = {
            other: sum(abs(ours - theirs) for ours, theirs in zip(proof, known, strict=True)) / len(proof)
            for other, known in expected.items()
        }
        print(version, distances)
        assert distances[version] < 2 * BF16_NOISE
    assert expected[0] != expected[STEPS]


def test_an_adapter_is_exported_as_one_and_merged(adapted: Trained, exported: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for name, options in (("adapter", ()), ("merged", ("--merge",))):
        _runs.elastic("export", str(adapted.run_dir), "-o", str(tmp_path / name), *options)
    text = torch.tensor([list(range(100, 160))])

    def said(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(text).logits[0].log_softmax(-1)

    def loaded(directory: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    beside = said(peft.PeftModel.from_pretrained(loaded(exported), tmp_path / "adapter"))
    merged, base = said(loaded(tmp_path / "merged")), said(loaded(exported))
    assert (merged - beside).abs().mean() < BF16_NOISE
    assert (base - beside).abs().mean() > 0
