"""Measures a model's cost profile on its device, at activation."""

import platform
import re
import time
from collections.abc import Callable, Generator, Sequence
from hashlib import blake2b
from itertools import product
from pathlib import Path

import msgspec
import structlog
import torch

from elastic.config import EngineConfig
from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.engine.coserving.profile import CostProfile, CostProfileError, Grid, ProfileRange, read_profile
from elastic.engine.coserving.runner import PagedRunner
from elastic.engine.model.config import Qwen3Config
from elastic.engine.torch import pacing
from elastic.engine.torch.scheduler import Work, load_of

SHORTEST_PREFILL = 8
REPEATS = 3

_log = structlog.get_logger(__name__)


def model_name(config: Qwen3Config, dtype: torch.dtype) -> str:
    """Tells models of different shape or dtype apart; weights do not matter to cost."""
    digest = blake2b(msgspec.json.encode(config), digest_size=6).hexdigest()
    return f"{digest}-{str(dtype).removeprefix('torch.')}"


def device_name(device: torch.device, settings: EngineConfig) -> str:
    """A device that is paced is another one."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.node()} {platform.machine()} {settings.threads} threads"
    if settings.pacing is None:
        return name
    return f"{name} paced {blake2b(settings.pacing.model_dump_json().encode(), digest_size=4).hexdigest()}"


def profile_path(directory: Path, model: str, device: str) -> Path:
    """A file for each model on each device, so that hosts may share a directory."""
    return directory / f"{model}-{re.sub('[^a-z0-9]+', '-', device.lower())}.json"


def kept_profile(path: Path | None, model: str, device: str, settings: EngineConfig) -> CostProfile | None:
    """The profile on file; None where there is none, or it cannot be used."""
    if path is None or not path.exists():
        return None
    try:
        return read_profile(path, model, device, _reach(settings))
    except CostProfileError as error:
        _log.warning("measuring a new cost profile", reason=str(error))
        return None


def measuring(
    runner: PagedRunner, model: str, device: str, settings: EngineConfig
) -> Generator[None, None, CostProfile]:
    """Time the runner on made-up sequences, one forward pass at each step, and return the profile.

    Prefill is measured up to one chunk an iteration, decode up to the largest batch. A paced engine takes at
    least its modelled time. All sequences lie in the runner's spare block, so that no memory is needed.
    """
    most_tokens, most_sequences, longest = _reach(settings)
    counts = _spread(SHORTEST_PREFILL, most_tokens)
    starts = sorted({0, longest // 2, longest})
    batches = _spread(1, most_sequences)
    contexts = sorted({min(128, longest), longest // 2, longest})

    def prefill(count: int, start: int) -> list[Work]:
        start = max(0, min(start, longest - count))
        return [Work(runner.made_up_sequence(start, start + count), count)]

    def decode(batch: int, context: int) -> list[Work]:
        return [Work(runner.made_up_sequence(context, context + 1), 1) for _ in range(batch)]

    def grid(
        xs: Sequence[int], ys: Sequence[int], make: Callable[[int, int], list[Work]]
    ) -> Generator[None, None, Grid]:
        costs: dict[tuple[int, int], Nanoseconds] = {}
        for x, y in product(xs, ys):
            work = make(x, y)
            modelled_s = sum(pacing.costs(load_of(work), settings.pacing)) if settings.pacing else 0.0
            costs[x, y] = max((yield from _timed(runner, work)), int(modelled_s * NS_PER_S))
        return Grid(tuple(xs), tuple(ys), tuple(tuple(costs[x, y] for y in ys) for x in xs))

    yield from _timed(runner, decode(1, contexts[0]))
    prefills = yield from grid(counts, starts, prefill)
    decodes = yield from grid(batches, contexts, decode)
    return CostProfile(model=model, device=device, prefill=prefills, decode=decodes)


def _reach(settings: EngineConfig) -> ProfileRange:
    longest = settings.max_context_tokens - 1
    return ProfileRange(min(settings.prefill_chunk_tokens, longest), settings.max_batch, longest)


def _timed(runner: PagedRunner, work: list[Work]) -> Generator[None, None, Nanoseconds]:
    """The quickest of a few forward passes: what the host's own hiccups add is for the online correction."""
    times: list[int] = []
    for _ in range(REPEATS):
        yield
        started_ns = time.perf_counter_ns()
        runner.forward(work).sum().item()  # waits for the device
        times.append(time.perf_counter_ns() - started_ns)
    return min(times)


def _spread(first: int, last: int) -> list[int]:
    """From `first` to `last` by fours."""
    points = {min(first, last), last}
    while first < last:
        points.add(first)
        first *= 4
    return sorted(points)
