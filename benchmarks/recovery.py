"""How fast turns go on elsewhere when their worker is killed, frozen or cut off, and whether the living are spared.

A real orchestrator drives real worker processes with paced engines (the examples' model, untrained) over loopback,
under a load of turns that never ebbs. What happened is read off the run's journal, by replaying it through a fresh
core; the state that the replay ends in must be the run's own.

- Kills: SIGKILL of a worker under running turns. `kill_redispatch_s` runs from the signal to the moment when the
  last of its turns was dispatched again; turns whose last tokens were already on their way count as finished.
- Freezes and black holes: SIGSTOP of a worker, or a TCP proxy before it that forwards nothing any more in either
  direction and closes nothing. `…_fenced_s` runs from then until the core fences the worker. Then both may speak
  again for a while, before their provider gets round to ending the lease; `spoke_after_fence` says how many sent
  bytes towards the orchestrator in that time, `accepted_after_fence` how many tokens it took from them.
- False fences: unpaced workers compete for all the processors for ten minutes, and nobody disturbs them. A worker
  of any run that is fenced without having been disturbed counts, `false_disconnects` are broken connections.

`--engine vllm` has kills alone, of workers that are vLLMs: of the worker, of vLLM's process beside it, and of the
engine core in that process (which then ends by a fault of its own, SIGSEGV). `…_redispatch_s` are as above;
`…_elsewhere_s_p50` runs from the signal to a turn's first token from elsewhere, the median of all turns that moved.
`lost_turns` neither ended nor went on, `lost_tokens` were accepted and generated again. Where vLLM is not installed:
`skipped_because`.

Everything shares this machine's processors, so a time here holds the machine's own delays too. `--quick` has fewer
incidents and a watch of seconds; `false_fence_minutes` and the counts say what was measured.
"""

import asyncio
import math
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import ClassVar

import msgspec
import psutil
from pydantic import ConfigDict

from benchmarks._common import Arguments, Figures, Measured, benchmark, option, skipped_without_vllm
from benchmarks._configurations import configuration
from benchmarks._live import Capacity, LiveRun, live_run, replay, reserved
from benchmarks._paced import LimitedSettings, LimitedTask
from benchmarks._shapes import write_policy
from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.fleet import Worker
from elastic.core.types import NS_PER_S, Nanoseconds, TurnId, WorkerId
from elastic.protocol.endpoint import Endpoint
from providers.base import Emit, ProviderSettings
from providers.processes import LocalWorkers
from providers.reserved import ReservedProvider
from tests.bad_link import BadLink

PROMPT_TOKENS = 24
OBSERVATION_TOKENS = 4
TURN_TOKENS = 64
TRAJECTORIES_PER_S = 10
"""More than the engines get done: a run's one step never ends, so that there are always turns to run."""

BUSY_TURNS = 3
"""Begun turns that make a worker worth disturbing."""
RECLAIM_DELAY_S = 1.5
"""How long a provider takes to end the lease of a worker that was fenced: time to speak out of turn."""
READY_TIMEOUT_S = 120.0
FENCE_TIMEOUT_S = 30.0


class LinkedSettings(ProviderSettings):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    links: dict[str, BadLink]
    """By the provider's name, once it has begun."""


class _SlowlyReclaimed(LocalWorkers):
    async def give_back(self) -> None:
        await asyncio.sleep(RECLAIM_DELAY_S)
        await super().give_back()


class LinkedProvider(ReservedProvider):
    """A worker behind a link, whose lease takes a while to end."""

    Settings: ClassVar[type[ProviderSettings]] = LinkedSettings
    workers_type = _SlowlyReclaimed

    async def start(self, emit: Emit) -> None:
        assert isinstance(self.settings, LinkedSettings)
        self._link = self.settings.links[self.name] = BadLink(self.context.endpoint.address)
        self.context = msgspec.structs.replace(self.context, endpoint=Endpoint(await self._link.start()))
        await super().start(emit)

    async def aclose(self) -> str:
        left = await super().aclose()
        await self._link.aclose()
        return left


@dataclass(frozen=True)
class Incident:
    """A worker was disturbed at `at_ns` while it held `turns` (each under its attempt)."""

    worker: WorkerId
    at_ns: Nanoseconds
    turns: dict[TurnId, int]

    @classmethod
    def now(cls, run: LiveRun, worker: Worker) -> "Incident":
        live = run.orchestrator.scheduler.turns.live
        return cls(worker.id, run.orchestrator.now_ns(), {turn: live[turn].attempt for turn in worker.turns})


@dataclass
class Incidents:
    kills: list[Incident] = field(default_factory=list[Incident])
    freezes: list[Incident] = field(default_factory=list[Incident])
    black_holes: list[Incident] = field(default_factory=list[Incident])
    spoke_after_fence: int = 0

    @property
    def workers(self) -> set[WorkerId]:
        return {incident.worker for incident in (*self.kills, *self.freezes, *self.black_holes)}


@dataclass
class JournaledIncidents:
    """What a replayed journal shows, up to the order to stop and (tokens of the fenced) to the very end."""

    starts: dict[TurnId, list[tuple[int, Nanoseconds]]] = field(default_factory=dict[TurnId, list[tuple[int, int]]])
    """Each turn's attempts, and when they were dispatched."""
    fences: dict[WorkerId, Nanoseconds] = field(default_factory=dict[WorkerId, int])
    disconnects: list[WorkerId] = field(default_factory=list[WorkerId])
    accepted_after_fence: int = 0
    finished: set[TurnId] = field(default_factory=set[TurnId])
    first_tokens: dict[tuple[TurnId, int], Nanoseconds] = field(default_factory=dict[tuple[TurnId, int], int])
    """When an attempt's first token was accepted."""
    lost_tokens: int = 0
    """Accepted ones that a later attempt began before."""
    failures: int = 0

    def elsewhere_s(self, kill: Incident) -> list[float]:
        """From the kill until each of its turns had a token from elsewhere."""
        firsts = [
            min(
                (t_ns for (name, attempt), t_ns in self.first_tokens.items() if name == turn and attempt > held),
                default=0,
            )
            for turn, held in kill.turns.items()
        ]
        return [(t_ns - kill.at_ns) / NS_PER_S for t_ns in firsts if t_ns]

    def lost_turns(self, kill: Incident) -> int:
        again = {turn for turn, held in kill.turns.items() if any(n > held for n, _ in self.starts[turn])}
        return len(kill.turns.keys() - again - self.finished)

    def fenced_s(self, incidents: list[Incident]) -> float | None:
        return max(((self.fences[i.worker] - i.at_ns) / NS_PER_S for i in incidents), default=None)

    def redispatch_s(self, kill: Incident) -> float | None:
        """From the kill until the last of its turns was dispatched again; None when all had finished."""
        again = [
            next((at_ns for attempt, at_ns in self.starts[turn] if attempt > held), None)
            for turn, held in kill.turns.items()
        ]
        return max(((at_ns - kill.at_ns) / NS_PER_S for at_ns in again if at_ns is not None), default=None)


def read_record(config: Config, run_dir: Path, run: LiveRun) -> JournaledIncidents:
    record, stopped = JournaledIncidents(), False
    accepted: Counter[TurnId] = Counter()
    for t_ns, event, commands in replay(config, run_dir, run.orchestrator.scheduler):
        stopped |= isinstance(event, e.StopRequested)
        record.failures += isinstance(event, e.TrajectoryFailed) and not stopped
        if isinstance(event, e.WorkerDisconnected) and not stopped:
            record.disconnects.append(event.worker)
        for command in commands:
            if isinstance(command, c.FinishTurn):
                record.finished.add(command.turn)
            if isinstance(command, c.AcceptTokens) and isinstance(event, e.TokensReceived):
                for turn, count in zip(command.turns, (event.chunks.counts[i] for i in command.chunks), strict=True):
                    accepted[turn] += count
                    if count:
                        record.first_tokens.setdefault((turn, record.starts[turn][-1][0]), t_ns)
                    record.accepted_after_fence += count if event.worker in record.fences else 0
            elif isinstance(command, c.StartTurn):
                record.starts.setdefault(command.turn, []).append((command.attempt, t_ns))
                if stopped:
                    continue
                record.lost_tokens += accepted[command.turn] - command.start
            elif isinstance(command, c.FenceWorker) and not stopped:
                record.fences.setdefault(command.worker, t_ns)
    return record


def working(policy: Path, seconds: float, turns: int, *kinds: str) -> Config:
    """A run with work for at least `seconds`, in episodes of so many turns."""
    return configuration(
        *("untimed", "recovery", *kinds),
        policy=policy,
        rollout={"groups": math.ceil(seconds * TRAJECTORIES_PER_S / 8), "max_turns": turns},
        engine={"max_context_tokens": PROMPT_TOKENS + turns * (TURN_TOKENS + OBSERVATION_TOKENS)},
    )


def steady(places: int, turns: int) -> LimitedSettings:
    lengths = {"prompts": {"": PROMPT_TOKENS}, "observations": {"": OBSERVATION_TOKENS}}
    return LimitedSettings.model_validate({**lengths, "turns": turns, "places": asyncio.Semaphore(places)})


def busy(run: LiveRun, provider: str) -> Worker | None:
    """The provider's worker with the most turns begun, if they are enough and two others could take them."""
    workers = [w for w in run.ready(provider) if w.outstanding - w.pending >= BUSY_TURNS]
    return max(workers, key=lambda w: w.outstanding, default=None) if len(run.ready()) > 2 else None


async def kill_one(run: LiveRun) -> Incident:
    worker = await run.until("a worker with running turns", lambda: busy(run, "near"), READY_TIMEOUT_S)
    process_id = run.process_id(worker)
    incident = Incident.now(run, worker)
    os.kill(process_id, signal.SIGKILL)
    await run.until(f"the end of killed {worker.id}", lambda: not worker.turns, FENCE_TIMEOUT_S)
    return incident


async def silence_one(
    run: LiveRun,
    provider: str,
    link: BadLink,
    silence: Callable[[Worker], None],
    restore: Callable[[Worker], None],
    incidents: Incidents,
) -> Incident:
    """Silence a worker with running turns until it is fenced, then let it speak until its lease has ended."""
    fleet = run.orchestrator.scheduler.fleet
    worker = await run.until("a worker with running turns", lambda: busy(run, provider), READY_TIMEOUT_S)
    incident = Incident.now(run, worker)
    silence(worker)
    try:
        await run.until(f"the fence of silent {worker.id}", lambda: not worker.connected, FENCE_TIMEOUT_S)
    finally:
        heard_bytes = link.carried_up_bytes
        restore(worker)
    await run.until(f"the end of fenced {worker.id}", lambda: worker.id not in fleet.workers, FENCE_TIMEOUT_S)
    incidents.spoke_after_fence += link.carried_up_bytes > heard_bytes
    return incident


async def disturb(policy: Path, directory: Path, kills: int, rounds: int) -> tuple[Incidents, JournaledIncidents]:
    config, run_dir, incidents = (
        working(policy, 30 + 5 * kills + 15 * rounds, 6, "paced"),
        directory / "disturbed",
        Incidents(),
    )
    far = LinkedSettings.model_validate({"links": {}})
    providers: dict[str, Capacity] = {
        "near": reserved(3),
        "stopped": (LinkedProvider, far),
        "cut": (LinkedProvider, far),
    }
    async with live_run(config, run_dir, providers, LimitedTask, steady(places=40, turns=6)) as run:

        def send(number: signal.Signals) -> Callable[[Worker], None]:
            return lambda worker: os.kill(run.process_id(worker), number)

        for _ in range(kills):
            incidents.kills.append(await kill_one(run))
        cut = far.links["cut"]
        for _ in range(rounds):
            async with asyncio.TaskGroup() as tasks:
                freeze = tasks.create_task(
                    silence_one(
                        run, "stopped", far.links["stopped"], send(signal.SIGSTOP), send(signal.SIGCONT), incidents
                    )
                )
                hole = tasks.create_task(
                    silence_one(run, "cut", cut, lambda _: cut.cut(), lambda _: cut.mend(), incidents)
                )
            incidents.freezes.append(freeze.result())
            incidents.black_holes.append(hole.result())
    return incidents, read_record(config, run_dir, run)


async def watch(
    policy: Path, directory: Path, seconds: float, workers: int = 4
) -> tuple[JournaledIncidents, float, float]:
    """Unpaced workers left alone: what happened, for how many minutes, and how busy the processors were."""
    config, run_dir = working(policy, 30 + seconds, 14), directory / "watched"
    task = steady(places=8 * workers, turns=14)
    async with live_run(config, run_dir, {"near": reserved(workers)}, LimitedTask, task) as run:
        await run.until(
            "all workers at work", lambda: sum(bool(w.turns) for w in run.ready("near")) == workers, READY_TIMEOUT_S
        )
        began_ns = run.orchestrator.now_ns()
        psutil.cpu_percent()
        await asyncio.sleep(seconds)
        minutes = (run.orchestrator.now_ns() - began_ns) / NS_PER_S / 60
        cpu_share = psutil.cpu_percent() / 100
    return read_record(config, run_dir, run), minutes, cpu_share


async def measure(directory: Path, kills: int, rounds: int, watch_s: float) -> Figures:
    policy = write_policy(directory / "policy")
    incidents, disturbed = await disturb(policy, directory, kills, rounds)
    watched, minutes, cpu_share = await watch(policy, directory, watch_s)
    times_s = [time_s for kill in incidents.kills if (time_s := disturbed.redispatch_s(kill)) is not None]
    return {
        "kill_redispatch_s_p50": median(times_s),
        "kill_redispatch_s_max": max(times_s),
        "kills": len(times_s),
        "freeze_fenced_s_max": disturbed.fenced_s(incidents.freezes),
        "blackhole_fenced_s_max": disturbed.fenced_s(incidents.black_holes),
        "freezes": len(incidents.freezes),
        "blackholes": len(incidents.black_holes),
        "spoke_after_fence": incidents.spoke_after_fence,
        "accepted_after_fence": disturbed.accepted_after_fence + watched.accepted_after_fence,
        "false_fences": len(disturbed.fences.keys() - incidents.workers) + len(watched.fences),
        "false_disconnects": sum(w not in incidents.workers for w in disturbed.disconnects) + len(watched.disconnects),
        "false_fence_minutes": round(minutes, 2),
        "watch_cpu_share": cpu_share,
    }


VLLM_WORKERS = 3
VLLM_START_TIMEOUT_S = 900.0
VLLM_PARTS = ("worker", "vllm_process", "engine_core")


def busy_among_all(run: LiveRun) -> Worker | None:
    """The worker with the most turns begun, if they are enough and all others are at work as well."""
    begun = {worker.id: worker.outstanding - worker.pending for worker in run.ready("near")}
    if len(begun) < VLLM_WORKERS or not all(begun.values()):
        return None
    worker = max(run.ready("near"), key=lambda worker: begun[worker.id])
    return worker if begun[worker.id] >= BUSY_TURNS else None


async def kill_part(run: LiveRun, part: str) -> Incident:
    worker = await run.until("all workers with running turns", lambda: busy_among_all(run), VLLM_START_TIMEOUT_S)
    process_id = run.process_id(worker)
    if part != "worker":
        (process_id,) = (
            child.pid
            for child in psutil.Process(process_id).children()
            if "elastic.engine.vllm.process" in child.cmdline()
        )
    incident = Incident.now(run, worker)
    os.kill(process_id, signal.SIGSEGV if part == "engine_core" else signal.SIGKILL)
    live = run.orchestrator.scheduler.turns.live
    await run.until(
        f"the turns of a killed {part} elsewhere",
        lambda: all(live[turn].attempt > held for turn, held in incident.turns.items() if turn in live),
        READY_TIMEOUT_S,
    )
    return incident


async def measure_vllm(directory: Path, kills: int, within_s: float) -> Figures:
    """As many rounds of one kill of each part as there shall be, and can be begun in time."""
    incidents: dict[str, list[Incident]] = {part: [] for part in VLLM_PARTS}
    config = working(write_policy(directory / "policy"), within_s, 6, "recovery-vllm")
    # As many turns as the others have room for.
    settings = steady(places=config.engine.max_batch * (VLLM_WORKERS - 1), turns=6)
    async with live_run(config, directory / "run", {"near": reserved(VLLM_WORKERS)}, LimitedTask, settings) as run:
        await run.until("all workers ready", lambda: len(run.ready("near")) == VLLM_WORKERS, VLLM_START_TIMEOUT_S)
        begun_ns = run.orchestrator.now_ns()
        for _ in range(kills):
            if (run.orchestrator.now_ns() - begun_ns) / NS_PER_S > within_s:
                break
            for part in VLLM_PARTS:
                incidents[part].append(await kill_part(run, part))
    record = read_record(config, directory / "run", run)
    figures: Figures = {"engine": "vllm"}
    for part, killed in incidents.items():
        times_s = [time_s for kill in killed if (time_s := record.redispatch_s(kill)) is not None]
        elsewhere_s = [time_s for kill in killed for time_s in record.elsewhere_s(kill)]
        figures |= {
            f"{part}_kills": len(killed),
            f"{part}_turns_moved": len(elsewhere_s),
            f"{part}_redispatch_s_p50": median(times_s) if times_s else None,
            f"{part}_redispatch_s_max": max(times_s, default=None),
            f"{part}_elsewhere_s_p50": median(elsewhere_s) if elsewhere_s else None,
        }
    every = [kill for killed in incidents.values() for kill in killed]
    killed_workers = {kill.worker for kill in every}
    return figures | {
        "lost_turns": sum(record.lost_turns(kill) for kill in every),
        "lost_tokens": record.lost_tokens,
        "failed_trajectories": record.failures,
        "false_fences": len(record.fences.keys() - killed_workers),
        "cpu_load": os.getloadavg()[0],
    }


def main(parsed: Arguments) -> Measured:
    if parsed.engine == "vllm" and (why := skipped_without_vllm()):
        return {"skipped_because": why}
    if parsed.engine == "vllm":
        return measure_vllm(parsed.scratch, 1 if parsed.quick else 20, parsed.within_s)
    return measure(parsed.scratch, *((5, 1, 8.0) if parsed.quick else (50, 5, 600.0)))


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--engine", choices=("torch", "vllm"), default="torch", help="of the workers that are killed"),
        option("--within-s", type=float, default=1800.0, help="with vLLM: begin no kill after so long"),
    )
