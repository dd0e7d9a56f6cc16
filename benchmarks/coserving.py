"""Rollouts on a live serving device: how much of its idle time they use, and what that costs serving's users.

A serving and a rollout model of different shapes, with random weights, share the device of one co-serving executor,
whose thread is bound to core 0; its OpenAI-compatible front, the rollout load and, in a process of its own, the
load generator are on core 1. Serving's load is the Azure conversation and code traces together (2023), lengths
scaled to the host, arrivals so that serving alone keeps the device busy for a fifth of the mean window (density 1);
the pool is so large that serving alone peaks at 60 % of it in the three windows. SLOs are 1.6 × the P99 of serving
alone, as ROSE's are.

Rollouts are a closed loop of multi-turn trajectories with growing prefixes; turns that are given back are sent
again with what was accepted, since here there is no other worker to take them. How many trajectories a device gets
is capped as in ROSE's Appendix A: with twice as many, the memory that a cut leaves them holds half a batch.

A window's idle utilisation is the rollout tokens per second of policy `elastic` over those of the device alone,
measured just before, divided by the share of time that serving alone leaves idle; `harvest_share` is that of the worst
window. It is the product of `time` and `speed`. `time` is the rollouts' part of the idle time; `speed` is their tokens
per second of their own time over that of the device alone. `speed` falls below 1 where memory or slack allow smaller
batches only, and where turns are computed again; it rises above 1 where turns that wait for serving fill batches.
`time` is bounded by 1, except that rollouts make serving's batches fuller and so quicker. On a device of their own,
rollouts use `time_alone`: the rest is the executor's decisions, and environments that all rest at once.

`--device cuda` shares a GPU between models of Qwen3's shapes with random weights, for the same requests; this mode has
never been run.

The full mode takes 2.8 hours; `--window-s 15` has all of it in some 30 minutes.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from heapq import merge
from pathlib import Path
from random import Random
from statistics import mean, median

import msgspec
import torch

from benchmarks._common import Arguments, Figures, Measured, benchmark
from benchmarks._shapes import ON_A_DEVICE
from benchmarks._shared_device import (
    CONTEXT,
    CORES,
    LEASE_S,
    OTHER_CORE,
    PAGE_BYTES,
    ROLLOUTS_ALONE,
    SERVING_ALONE,
    DeviceOfTwo,
    DeviceUse,
    Sharing,
)
from elastic.core.device_sharing import Slo
from elastic.core.types import NS_PER_S
from elastic.engine.coserving.blocks import LeasedBlocks
from elastic.engine.coserving.load import RequestRecord, Targets, report, violated_minutes
from elastic.engine.coserving.service import percentile
from elastic.engine.coserving.swapping import Swapping
from elastic.engine.kv import KvLayout, PagePool
from elastic.engine.kv.slab import SlabBackend
from policies.admission import ExclusiveAdmission, NoAdmission, SloAdmission
from policies.kvmemory import FineGrainedMemory, PreemptiveMemory, StaticPartition
from traces import data_path
from traces.serving import ServingRequest, read_serving_trace, scaled, window_at

MS = 1_000_000
SLO_FACTOR = 1.6
BUSY_SHARE, BUSY_TOLERANCE = 0.2, 0.02
PEAK_SHARE = 0.6
MOST_PROMPT, MOST_OUTPUT = 208, 40
LENGTH_SCALE = 1 / 16
ROOMY_PAGES, LEAST_PAGES = 1024, 2 * CONTEXT // 16
"""For serving's peak to be seen; and so many that both models have room for a whole sequence."""
FRONT_MARGIN = 0.9
"""The part of a target that the executor may use; HTTP and the client's own delay need the rest."""
LONGEST_SHARE = 0.75
VIOLATION_WINDOW_S = 5.0
POLICIES = (
    "serving_alone",
    "elastic",
    "static_partition",
    "no_prefix_cache",
    "no_admission",
    "ttft_only",
    "tpot_only",
    "reload",
)
COMPARED = POLICIES[:2]
"""At every density; the others are baselines."""


@dataclass(frozen=True)
class CoservingPlan:
    window_s: float
    calibrations: int
    alone_s: float
    densities: tuple[float, ...]
    windows: tuple[str, ...]
    pool_operations: int
    extras: bool
    baselines_at: tuple[float, ...] | None = None
    """Densities at which the baselines run; None: at all."""
    paced: bool = False
    device: str = "cpu"
    serving_model: str = "tiny-serving"
    rollout_model: str = "tiny-rollouts"

    def policies(self, density: float) -> tuple[str, ...]:
        return POLICIES if self.baselines_at is None or density in self.baselines_at else COMPARED


QUICK = CoservingPlan(2.0, 3, 1.2, (1.0,), ("mean",), 60_000, False)
FULL = CoservingPlan(120.0, 4, 30.0, (1.0, 1.5, 2.0), ("mean", "burstiest", "median"), 1_000_000, True)


@dataclass(frozen=True)
class ServingGoals:
    """The targets in force, and what serving alone had."""

    targets: Targets
    ttft_alone_ms: float

    @classmethod
    def of(cls, alone: Sequence[RequestRecord]) -> "ServingGoals":
        had = report(alone)
        assert had.ttft_ms.p99 is not None
        assert had.tpot_ms.p99 is not None
        targets = Targets(ttft_ms=SLO_FACTOR * had.ttft_ms.p99, tpot_ms=SLO_FACTOR * had.tpot_ms.p99)
        return cls(targets, had.ttft_ms.p99)

    def sharing(self, policy: str, reload_ns: int) -> Sharing:
        """`reload_ns`: what it takes to load the rollout model, for the rival that gives its memory back each time.

        That one loads once serving has rested for as long as loading takes: who does not know for how long it will
        rest does at most twice the work of who does.
        """
        slo = Slo(
            ttft_ns=int(self.targets.ttft_ms * FRONT_MARGIN * MS), tpot_ns=int(self.targets.tpot_ms * FRONT_MARGIN * MS)
        )
        # A request may come the moment after an iteration has begun: that must not eat up all there is to spare.
        longest_ns = int(LONGEST_SHARE * (self.targets.ttft_ms - self.ttft_alone_ms) * MS)
        dual = SloAdmission(slo=slo, longest_ns=longest_ns)
        memory = PreemptiveMemory(lease_ns=int(LEASE_S * NS_PER_S))
        swapping = partial(Swapping, idle_ns=reload_ns, boot_ns=reload_ns)
        return {
            "serving_alone": SERVING_ALONE,
            "elastic": Sharing(dual, memory),
            "static_partition": Sharing(dual, StaticPartition(lease_ns=memory.lease_ns)),
            "no_prefix_cache": Sharing(dual, msgspec.structs.replace(memory, lease_ns=0)),
            "no_admission": Sharing(NoAdmission(), memory),
            "ttft_only": Sharing(msgspec.structs.replace(dual, tpot=False), memory),
            "tpot_only": Sharing(msgspec.structs.replace(dual, ttft=False), memory),
            "reload": Sharing(ExclusiveAdmission(), memory, swapping),
            "fine_grained": Sharing(dual, FineGrainedMemory(lease_ns=memory.lease_ns)),
        }[policy]


def typical_windows(trace: Sequence[ServingRequest], length_s: float = 120.0) -> dict[str, float]:
    """Where three windows begin, of all whole ones that follow on each other: `mean`, whose number of requests is
    nearest the average; `burstiest`, with the busiest second; `median`, whose busiest second is the median one."""
    counts: dict[int, int] = Counter()
    seconds: dict[int, Counter[int]] = {}
    for request in trace:
        window = int(request.arrival_s // length_s)
        counts[window] += 1
        seconds.setdefault(window, Counter())[int(request.arrival_s)] += 1
    # The last one is not whole.
    whole = sorted(counts)[:-1] or sorted(counts)
    peaks = {window: max(seconds[window].values()) for window in whole}
    average = mean(counts[window] for window in whole)
    middle = median(peaks.values())
    chosen = {
        "mean": min(whole, key=lambda window: abs(counts[window] - average)),
        "burstiest": max(whole, key=lambda window: peaks[window]),
        "median": min(whole, key=lambda window: abs(peaks[window] - middle)),
    }
    return {name: window * length_s for name, window in chosen.items()}


class TraceReplay:
    """The trace at a speed, in windows of `window_s`. They begin where the rule says for the trace's own speed, so that
    they are the same however fast the host turns out to be."""

    def __init__(self, window_s: float) -> None:
        self.speed = 1.0
        self._window_s = window_s
        traces = (read_serving_trace(data_path(name)) for name in ("azure-conversation", "azure-code"))
        self._trace = list(merge(*traces, key=lambda request: request.arrival_s))
        self.starts = typical_windows(self._trace, window_s)

    def requests(self, window: str, density: float) -> list[ServingRequest]:
        """What arrives in a window: at a higher density more of the trace, from the same start on."""
        speed = self.speed * density
        cut = window_at(self._trace, self.starts[window], self._window_s * speed)
        return scaled(cut, speed=speed, length=LENGTH_SCALE, most_prompt=MOST_PROMPT, most_output=MOST_OUTPUT)


async def measure(plan: CoservingPlan) -> Figures:
    if plan.device == "cpu" and OTHER_CORE in CORES:
        os.sched_setaffinity(0, {OTHER_CORE})  # the load generator inherits it
    sys.setswitchinterval(0.0005)
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as generator,
        tempfile.TemporaryDirectory() as profiles,
    ):
        models = plan.device, plan.serving_model, plan.rollout_model
        device = DeviceOfTwo(Path(profiles), generator, *models, window_s=plan.window_s, paced=plan.paced)
        return await _measure(device, plan)


async def _measure(device: DeviceOfTwo, plan: CoservingPlan) -> Figures:
    replay = TraceReplay(plan.window_s)
    busy_share = await _calibrate(device, plan, replay)
    # With more memory than it needs: in the pool that is sized by it, serving alone does no otherwise.
    alone = [
        await device.use(SERVING_ALONE, replay.requests(window, 1.0), ROOMY_PAGES, plan.window_s)
        for window in plan.windows
    ]
    goals = ServingGoals.of([record for use in alone for record in use.records])
    peak_pages = max(use.statistics.serving_peak_pages for use in alone)
    pages = max(round(peak_pages / PEAK_SHARE), LEAST_PAGES)

    async def under(policy: str, requests: list[ServingRequest]) -> DeviceUse:
        return await device.use(goals.sharing(policy, device.reload_ns), requests, pages, plan.window_s)

    by_density: Figures = {}
    shared: list[DeviceUse] = []
    for density in plan.densities:
        uses: dict[str, list[DeviceUse]] = {"serving_alone": alone} if density == 1 else {}
        rollouts_alone: list[DeviceUse] = []
        for policy in plan.policies(density):
            found = uses.setdefault(policy, [])
            for window in plan.windows[len(found) :]:
                if policy == "elastic":
                    rollouts_alone.append(await device.use(ROLLOUTS_ALONE, [], pages, plan.alone_s))
                found.append(await under(policy, replay.requests(window, density)))
            _say(f"density {density:g}, {policy}: {json.dumps(_policy(found, goals.targets))}")
        shared += uses["elastic"]
        by_density[f"{density:g}"] = _density(uses, goals.targets, rollouts_alone)
    extras: Figures = {}
    if plan.extras:
        burstiest = replay.requests("burstiest", 2.0)
        cuts = {"one_time": await under("elastic", burstiest), "fine_grained": await under("fine_grained", burstiest)}
        extras["cuts"] = {name: _reclaims([use]) | _policy([use], goals.targets) for name, use in cuts.items()}
        extras["lease_s"] = await _by_lease(device, plan, goals, burstiest, pages)
    reclaims = _reclaims(shared)
    provoked_ns = [] if reclaims["reclaims"] else await _provoked_reclaims(device, goals)
    return {
        "slo": {"ttft_p99_ms": goals.targets.ttft_ms, "tpot_p99_ms": goals.targets.tpot_ms},
        "density": by_density,
        **reclaims,
        **extras,
        "provoked_reclaim_ms_p50": _ms(percentile(provoked_ns, 50)),
        "reload_ms": _ms(device.reload_ns),
        "activation_ms": 1e3 * median(use.statistics.activation_s for use in shared),
        **pool_figures(plan.pool_operations),
        "calibration": {
            "speed": replay.speed,
            "busy_share": busy_share,
            "peak_pages": peak_pages,
            "pages": pages,
        },
        "device": device.description,
        "windows": {"seconds": plan.window_s, "start_s": replay.starts},
    }


async def _calibrate(device: DeviceOfTwo, plan: CoservingPlan, replay: TraceReplay) -> float:
    """Set the replay's speed such that serving alone is busy for `BUSY_SHARE`; how much of the time it is at that."""
    tried: list[tuple[float, float]] = []
    for _ in range(plan.calibrations):
        use = await device.use(SERVING_ALONE, replay.requests("mean", 1.0), ROOMY_PAGES, plan.window_s)
        busy_share = use.serving_busy_share
        _say(f"speed {replay.speed:.3f}: serving alone is busy {busy_share:.1%}")
        tried.append((replay.speed, busy_share))
        if abs(busy_share - BUSY_SHARE) <= BUSY_TOLERANCE:
            break
        # How many requests a short window holds is not in proportion to how much of the trace it takes.
        replay.speed *= min(2.0, max(0.5, BUSY_SHARE / busy_share if busy_share else 2.0))
    replay.speed, busy_share = min(tried, key=lambda pair: abs(pair[1] - BUSY_SHARE))
    return busy_share


def _density(by_policy: dict[str, list[DeviceUse]], targets: Targets, rollouts_alone: Sequence[DeviceUse]) -> Figures:
    """The figures of one density; the idle utilisation is that of the policy `elastic`."""
    serving_alone = by_policy["serving_alone"]
    utilisations = [
        _utilisation(*outcomes)
        for outcomes in zip(by_policy["elastic"], serving_alone, rollouts_alone, strict=True)
        if outcomes[-1].rollout_rate
    ]
    return {
        "policies": {policy: _policy(outcomes, targets) for policy, outcomes in by_policy.items()},
        "harvest_share": min((utilisation["share"] for utilisation in utilisations), default=None),
        "harvest_by_window": utilisations,
        "serving_alone_busy_share": [outcome.serving_busy_share for outcome in serving_alone],
        "rollout_alone_tokens_per_s": [outcome.rollout_rate for outcome in rollouts_alone],
    }


def _utilisation(shared: DeviceUse, serving_alone: DeviceUse, rollouts_alone: DeviceUse) -> dict[str, float]:
    idle_share = 1 - serving_alone.serving_busy_share
    time = shared.rollout_busy_share / idle_share
    share = shared.rollout_rate / rollouts_alone.rollout_rate / idle_share
    return {
        "share": share,
        "time": time,
        "speed": share / time if time else 0.0,
        "time_alone": rollouts_alone.rollout_busy_share,
    }


def _policy(outcomes: Sequence[DeviceUse], targets: Targets) -> Figures:
    """The worst window's latencies, all windows' minutes, the mean rate."""
    reports = [report(outcome.records, targets) for outcome in outcomes]
    return {
        "ttft_p99_ms": _worst([result.ttft_ms.p99 for result in reports]),
        "tpot_p99_ms": _worst([result.tpot_ms.p99 for result in reports]),
        "itl_p99_ms": _worst([result.itl_ms.p99 for result in reports]),
        "violated_minutes": sum(violated_minutes(o.records, targets, VIOLATION_WINDOW_S) for o in outcomes),
        "rollout_tokens_per_s": mean(o.rollout_rate for o in outcomes),
        "goodput_share": sum(record.meets(targets) for o in outcomes for record in o.records)
        / max(1, sum(len(o.records) for o in outcomes)),
        "turns_given_back": sum(outcome.given_back for outcome in outcomes),
        "failed": sum(result.failed for result in reports),
    }


def _reclaims(uses: Sequence[DeviceUse]) -> Figures:
    """How often memory was taken back from rollouts, and how long that took."""
    reclaims_ns = [ns for use in uses for ns in use.statistics.reclaims_ns]
    return {
        "reclaims": len(reclaims_ns),
        "reclaim_ms_p50": _ms(percentile(reclaims_ns, 50)),
        "reclaim_ms_p99": _ms(percentile(reclaims_ns, 99)),
    }


async def _by_lease(
    device: DeviceOfTwo, plan: CoservingPlan, goals: ServingGoals, requests: list[ServingRequest], pages: int
) -> Figures:
    """The lease sweep of ROSE's Table 4."""
    figures: Figures = {}
    for factor in (1, 2, 5, 10):
        sharing = goals.sharing("elastic", device.reload_ns)
        sharing.memory = msgspec.structs.replace(sharing.memory, lease_ns=int(factor * LEASE_S * NS_PER_S))
        use = await device.use(sharing, requests, pages, plan.window_s)
        figures[f"{factor * LEASE_S:g}"] = _policy([use], goals.targets)
    return figures


async def _provoked_reclaims(device: DeviceOfTwo, goals: ServingGoals) -> list[int]:
    """Where the load was too tame for any pressure: one burst on a pool that is just large enough for it. These stand
    apart, since no trace has that burst."""
    burst = [ServingRequest(0.8, MOST_PROMPT, 8) for _ in range(6)]
    use = await device.use(goals.sharing("elastic", device.reload_ns), burst, 100, 1.5)
    return list(use.statistics.reclaims_ns)


def pool_figures(operations: int) -> Figures:
    """Pages of one buffer mapped and taken back per second, and what mapped pages of two layouts hold nothing in, at
    random: free blocks, and tails that no block fits into."""
    total, page_bytes = 512, 4096
    pool = PagePool(SlabBackend(total, page_bytes))
    space = pool.space()
    started_s = time.perf_counter()
    for _ in range(operations // (2 * total)):
        pages = [space.map()[0] for _ in range(total)]
        for page in pages:
            space.unmap(page)
    elapsed_s = time.perf_counter() - started_s
    done = operations // (2 * total) * 2 * total

    pool = PagePool(SlabBackend(total, page_bytes))
    random = Random(0)
    layouts = [
        KvLayout(page_bytes=page_bytes, slot_bytes=slot_bytes, layers=layers, block_tokens=4)
        for layers, slot_bytes in ((3, 64), (2, 128))
    ]
    models = [
        LeasedBlocks(
            pool.space(),
            layout,
            total,
            0,
            lambda: 0,
            lambda: pool.free,
            lambda count: contextlib.nullcontext(),
            lambda page, index: None,
        )
        for layout in layouts
    ]
    held: list[tuple[LeasedBlocks, list[int]]] = []
    moved = 0
    free_shares: list[float] = []
    while moved < operations:
        model = random.choice(models)
        count = random.randint(1, 40)
        if held and (random.random() < 0.45 or count > model.available):
            owner, blocks = held.pop(random.randrange(len(held)))
            owner.release(blocks)
            owner.trim()
            moved += len(blocks)
        elif count <= model.available:
            held.append((model, model.allocate(count)))
            moved += count
        mapped_bytes = sum(model.pages for model in models) * page_bytes
        used_bytes = sum(model.used * layout.block_bytes for model, layout in zip(models, layouts, strict=True))
        free_shares.append(1 - used_bytes / mapped_bytes if mapped_bytes else 0.0)
    pool.check()
    for model in models:
        model.check()
    return {
        "pool_ops_per_s": done / elapsed_s,
        "fragmentation_share": mean(free_shares[len(free_shares) // 2 :]),
        "fragmentation_block_operations": moved,
    }


def _worst(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / MS


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def replaced(plan: CoservingPlan, parsed: argparse.Namespace) -> CoservingPlan:
    """The plan with what the command line changes."""
    if parsed.window_s:
        shorter = parsed.window_s / plan.window_s
        plan = replace(plan, window_s=parsed.window_s, alone_s=max(2.0, plan.alone_s * shorter))
    models = ("tiny-serving", "tiny-rollouts") if parsed.device == "cpu" else ("qwen3-1.7b", "qwen3-0.6b")
    return replace(
        plan,
        densities=tuple(parsed.densities or plan.densities),
        windows=tuple(parsed.windows or plan.windows),
        baselines_at=None if parsed.baselines_at is None else tuple(parsed.baselines_at),
        extras=plan.extras and not parsed.no_extras,
        paced=parsed.paced,
        device=parsed.device,
        serving_model=parsed.serving_model or models[0],
        rollout_model=parsed.rollout_model or models[1],
    )


def there(device: str) -> str:
    """Read a device that this machine has."""
    if device == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("cuda: there is none here")
    return device


def add_options(options: argparse.ArgumentParser) -> None:
    add = options.add_argument
    add("--window-s", type=float, help="length of each window (default: 120, quick 2)")
    add("--densities", type=float, nargs="+", help="of arrivals (default: 1 1.5 2, quick 1)")
    add("--baselines-at", type=float, nargs="*", help="densities at which the baselines run, too (default: all)")
    add("--windows", nargs="+", choices=FULL.windows, help="which windows of the trace (default: all)")
    add("--no-extras", action="store_true", help="without the kinds of cuts and the lease sweep")
    add("--paced", action="store_true", help="a modelled device: iterations take at least its time")
    add("--device", type=there, choices=PAGE_BYTES, default="cpu")
    for model in ("serving", "rollout"):
        add(f"--{model}-model", choices=ON_A_DEVICE, help="its shape (default: tiny; on a GPU Qwen3's)")


def main(parsed: Arguments) -> Measured:
    return measure(replaced(QUICK if parsed.quick else FULL, parsed))


if __name__ == "__main__":
    benchmark(__doc__, main, add_options)
