"""Measures a model's cost profile on its device, at activation."""

import platform
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from statistics import median

import msgspec
import structlog
import torch

from elastic.core.types import Nanoseconds
from elastic.engine.base import GenerateRequest
from elastic.engine.coserving.profile import CostProfile, Grid, ProfileError, read_profile, write_profile
from elastic.engine.torch.runner import Runner
from elastic.engine.torch.scheduler import Sequence as Running
from elastic.engine.torch.scheduler import Work
from elastic.model.config import Qwen3Config

SHORTEST_PREFILL = 8
REPEATS = 3

_log = structlog.get_logger(__name__)


def model_name(config: Qwen3Config, dtype: torch.dtype) -> str:
    """Tells models of different shape or dtype apart; weights do not matter to cost."""
    digest = blake2b(msgspec.json.encode(config), digest_size=6).hexdigest()
    return f"{digest}-{str(dtype).removeprefix('torch.')}"


def device_name(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.node()} {platform.machine()} {threads} threads"


def profile_at(path: Path | None, model: str, device: str, measure: Callable[[], CostProfile]) -> CostProfile:
    """The profile on file, or a new one that is put there: also where the file is of another model or device."""
    if path is not None and path.exists():
        try:
            return read_profile(path, model, device)
        except ProfileError as error:
            _log.warning("measuring a new cost profile", reason=str(error))
    profile = measure()
    if path is not None:
        write_profile(path, profile)
    return profile


def measure_profile(
    runner: Runner,
    model: str,
    device: torch.device,
    threads: int,
    blocks: Callable[[int], list[int]],
    max_context: int,
    max_batch: int,
    chunk_tokens: int,
) -> CostProfile:
    """Time `runner` on made-up sequences. `blocks(tokens)` lends blocks for that many tokens; their content is
    overwritten. Runs in the thread that owns the device."""
    longest = max_context - 1
    counts = _spread(SHORTEST_PREFILL, min(chunk_tokens, longest), longest)
    starts = sorted({0, longest // 2, longest})
    batches = _spread(1, max_batch)
    contexts = sorted({min(128, longest), longest // 2, longest})
    tokens = [0] * max_context

    def sequence(computed: int, length: int) -> Running:
        request = GenerateRequest(
            request_id="", token_ids=[], start=0, max_new_tokens=1, stop_token_ids=(), temperature=0.0, noise_seed=0
        )
        return Running(request, tokens[:length], blocks=blocks(length), computed=computed)

    def prefill(count: int, start: int) -> list[Work]:
        start = max(0, min(start, longest - count))
        return [Work(sequence(start, start + count), count)]

    def decode(batch: int, context: int) -> list[Work]:
        return [Work(sequence(context, context + 1), 1) for _ in range(batch)]

    def grid(xs: Sequence[int], ys: Sequence[int], make: Callable[[int, int], list[Work]]) -> Grid:
        costs = tuple(tuple(_time(runner, make(x, y), device) for y in ys) for x in xs)
        return Grid(tuple(xs), tuple(ys), costs)

    _time(runner, decode(1, contexts[0]), device)
    return CostProfile(
        model=model,
        device=device_name(device, threads),
        prefill=grid(counts, starts, prefill),
        decode=grid(batches, contexts, decode),
    )


def _time(runner: Runner, work: list[Work], device: torch.device) -> Nanoseconds:
    """The median of a few forward passes."""
    times: list[int] = []
    for _ in range(REPEATS):
        started_ns = time.perf_counter_ns()
        runner.forward(work)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - started_ns)
    return int(median(times))


def _spread(first: int, *ends: int) -> list[int]:
    """From `first` on by fours, with all `ends`."""
    points = set(ends)
    while first < max(ends):
        points.add(first)
        first *= 4
    return sorted(points)
