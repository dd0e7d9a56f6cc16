"""A fault of one job is its own affair, live: its processes die and hang beside a job that shares their devices.

Two jobs take turns on a pool's nodes, engines and training paced. One of them, the victim, is struck again and again:

- `rollout_resident`, `trainer_resident`: SIGKILL within its slice on that node; of rollouts every third time while it
  is parked. `orchestrator`: SIGKILL for its run's process. Neither is survived within a placement: the
  job has failed, and is resubmitted from its checkpoint.
- `hang`: SIGSTOP for a resident within its slice, on either side in turn. `residency`: a script grows beyond what it
  declared.
- `node_agent`: SIGKILL for a node agent of the victim, which then has nodes of its own, as the other has. `pool`:
  SIGKILL for the pool's process.

A step of the other job that ends after a stroke and before the next counts for it. The next stroke falls once the
victim has done a step again, and the other job `STEPS_BETWEEN` more.

- `others_slowdown`: the mean of these steps over the median of those before the first stroke; `others_longest` is the
  longest of them over that.
- `others_identical_share`: the other job's trajectories that are, token for token, those of a run alone, unpaced.
- `device_free_s`: from the death, for `hang` from the stroke, or the deadline where that comes first, until the
  victim's permit is over and its process is gone: then the device is the next job's. Strokes at times at which the
  victim had no device do not count.
- `recovered_s`: from the stroke until the end of a phase that the victim began after it and finished.
- `leftovers`: processes that are there once the pool has stopped.

`killed_of_three` (not with `--quick`; Weave's Fig. 19) has three jobs on one node of each kind. One of them is killed,
has failed, and is resubmitted by command after `AWAY_STEPS` steps of the others. For each of the three times,
`before`, `without` and `after`: `step_s`, the median of each job's steps, and `order_kept_share`, the share of rollout
phases whose job also had that place in the round before. `returned_s` is from the resubmission to the end of the first
step.
"""

import contextlib
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks import HERE
from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._configurations import written
from benchmarks._pools import LivePool, Moment, example, left_over, live_pool, moments
from benchmarks._runs import elastic, sets
from benchmarks._shapes import write_policy
from benchmarks._waiting import until
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.types import PhaseKind
from elastic.runtime.journal import RunDirectory, TrajectoryRow
from tests.proof import same_episode, trajectories

VICTIM, OTHER, THIRD = "victim", "other", "third"
SEEDS = {VICTIM: 1, OTHER: 2, THIRD: 3}
SHARED_NODES = ("rollout_resident", "trainer_resident", "orchestrator", "pool", "hang")
KINDS = (*SHARED_NODES, "node_agent", "residency")
QUICK_KINDS = ("rollout_resident", "trainer_resident")
FULL_KILLS, QUICK_KILLS = 10, 1
CALM_STEPS = {True: 2, False: 6}
QUICK_STEPS_ALONE = 16
"""So many steps a quick session's other job hardly ever does."""
STEPS_BETWEEN = 4
THREE, AWAY_STEPS = "killed_of_three", 8
WITHIN_S = 240.0
LIMITS = {"notice_s": 4, "park_s": 4, "measure_s": 0.5}


@dataclass
class Stroke:
    """One blow to a job. Times are the pool's, in seconds; `due_s` is from when the device is to be free."""

    kind: str
    at_s: float
    permit: int | None
    pid: int = 0
    due_s: float | None = None
    gone_s: float | None = None


@dataclass
class Told:
    """What a session came to."""

    strokes: list[Stroke]
    past: Sequence[Moment]
    others: Mapping[str, Path]
    leftovers: int = 0


class Session:
    """A pool with two jobs at work, one of which is struck."""

    def __init__(self, pool: LivePool, rng: random.Random, *, quick: bool) -> None:
        self.pool, self._rng, self._quick = pool, rng, quick
        self.strokes: list[Stroke] = []
        self._count = 0

    def until(self, done: Callable[[dict[str, Any]], object], what: str, every_s: float = 0.2) -> dict[str, Any]:
        return self.pool.until(what, done, WITHIN_S, every_s)

    def steps(self, more: Mapping[str, int], what: str) -> None:
        """Wait until jobs have done so many steps more than now."""
        before = _steps(self.pool.status())
        self.until(
            lambda now: all(_steps(now).get(job, 0) >= before.get(job, 0) + count for job, count in more.items()), what
        )

    def inject(self, kind: str) -> None:
        """One stroke, and what it takes until the next may fall."""
        self._count += 1
        stroke = self._struck(kind)
        self.strokes.append(stroke)
        print(f"{stroke.at_s:8.2f} s: {kind} {stroke.pid}", file=sys.stderr, flush=True)
        if kind == "hang":
            stroke.gone_s = self._gone(stroke.pid)
        self.steps({VICTIM: 1, OTHER: 1}, f"the victim's next step after {kind}")
        if not self._quick:
            self.steps({OTHER: STEPS_BETWEEN}, f"the other's steps after {kind}")

    def _struck(self, kind: str) -> Stroke:
        match kind:
            case "rollout_resident":
                parked = self._count % 3 == 0
                return self._hit(kind, signal.SIGKILL, self._resident("rollout"), None if parked else "rollout")
            case "trainer_resident":
                return self._hit(kind, signal.SIGKILL, self._resident("train"), "train")
            case "hang":
                phase = "rollout" if self._count % 2 else "train"
                return self._hit(kind, signal.SIGSTOP, self._resident(phase), phase)
            case "orchestrator":
                phase = "rollout" if self._count % 2 else "train"
                return self._hit(kind, signal.SIGKILL, lambda: _job(self.pool.status())["pid"], phase)
            case "pool":
                return self._hit(kind, signal.SIGKILL, lambda: self.pool.status()["pid"], "")
            case "node_agent":
                side = "rollout" if self._count % 2 else "train"
                return self._hit(kind, signal.SIGKILL, lambda: self._node_agent(side), "")
            case _:
                raise ValueError(kind)

    def _resident(self, phase: str) -> Callable[[], int]:
        what = "a rollout resident" if phase == "rollout" else "a trainer"

        def residents() -> list[psutil.Process]:
            return example.victims(what, self.pool.directory, [_job(self.pool.status())])

        return lambda: until(f"{what} of the victim", residents, WITHIN_S, 0.1)[0].pid

    def _node_agent(self, phase: str) -> int:
        status = self.pool.status()
        names = _job(status)[phase]
        return next(node["node_agent"]["pid"] for node in status["nodes"] if node["name"] in names)

    def _hit(self, kind: str, number: signal.Signals, pid_of: Callable[[], int], phase: str | None) -> Stroke:
        """Send a signal to a process: while the victim has a permit of this phase, has none (None), or at any time."""
        pid = pid_of()
        share = self._rng.uniform(0.02, 0.15)  # A turn of training may last no longer than its update is paced to.

        def fits(status: dict[str, Any]) -> bool:
            if phase == "":
                return True
            permit = next((permit for permit in status["permits"] if permit["job"] == VICTIM), None)
            if phase is None or permit is None:
                return phase is None and permit is None
            return permit["phase"] == phase and not permit["recalled"] and status["now_s"] - permit["since_s"] >= share

        while True:
            status = self.until(fits, f"a turn of the victim for {kind}", 0.05)
            asked_s, now_s = time.monotonic(), status["now_s"]
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pid = pid_of()
                continue
            at_s = now_s + time.monotonic() - asked_s
            self._clock = time.monotonic() - at_s
            permit = next((permit["number"] for permit in status["permits"] if permit["job"] == VICTIM), None)
            return Stroke(kind, at_s, permit if phase else None, pid)

    def _gone(self, pid: int) -> float:
        """When the process has ended, by the pool's time."""
        until("the end of a process that hangs", lambda: not _lives(pid), WITHIN_S, 0.005)
        return time.monotonic() - self._clock


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _job(status: Mapping[str, Any]) -> dict[str, Any]:
    return next(job for job in status["jobs"] if job["name"] == VICTIM)


def _steps(status: Mapping[str, Any]) -> dict[str, int]:
    return {job["name"]: job["steps_done"] for job in status["jobs"]}


def submitted(pool: LivePool, directory: Path, policy: Path, name: str, *settings: str) -> Path:
    return pool.submit(configured(directory, policy, name), name, directory / "runs", settings)


def configured(directory: Path, policy: Path, name: str, trainers: int = 0, resubmissions: int = 100) -> Path:
    """The configuration of a job that survives so many losses of its trainer, and is resubmitted so often."""
    return written(
        directory / f"{name}.toml",
        "isolated",
        policy=policy,
        run={"name": name, "seed": SEEDS[name], "directory": str(directory / "runs")},
        trainer={"max_restarts": trainers},
        job={"max_resubmissions": resubmissions},
    )


@dataclass(frozen=True)
class Beside:
    """What goes on at the same time as a session begins."""

    policy: Callable[[], Path]
    """Waits until it is written."""
    others: Callable[[], object] = lambda: None
    """Waits until nothing else computes here, before the steps that count."""


@contextlib.contextmanager
def at_work(
    directory: Path, beside: Beside, rng: random.Random, *, own_nodes: bool, trainers: int, quick: bool
) -> Iterator[tuple[Session, dict[str, Path]]]:
    """Both jobs have done their calm steps."""
    nodes = 2 if own_nodes else 1
    with live_pool(directory, "solo" if own_nodes else "ours", nodes, nodes, LIMITS) as pool:
        policy, place = beside.policy(), directory / "runs"
        files = {name: (configured(directory, policy, name, trainers), ()) for name in (VICTIM, OTHER)}
        runs = pool.submit_at_once(files, place)
        session = Session(pool, rng, quick=quick)
        session.until(lambda now: all(count >= 1 for count in _steps(now).values()), "the first steps")
        beside.others()
        session.steps(dict.fromkeys(runs, CALM_STEPS[quick]), "the calm steps")
        yield session, runs


def struck(directory: Path, beside: Beside, kinds: Sequence[str], kills: int, seed: int, *, quick: bool) -> Told:
    """A session in which strokes of these kinds fall, all of the first, then all of the next."""
    own_nodes = kinds == ["node_agent"]
    # An incarnation that died has not told of its trainer's end: the next one loses a trainer by that.
    trainers = 0 if "trainer_resident" in kinds else 10 * kills
    rng = random.Random(seed)
    with at_work(directory, beside, rng, own_nodes=own_nodes, trainers=trainers, quick=quick) as (session, runs):
        for kind in kinds:
            for _ in range(kills):
                session.inject(kind)
        pool = session.pool
    others = runs if kinds == ["pool"] else {OTHER: runs[OTHER]}
    return Told(session.strokes, moments(pool), others, left_over(directory))


def outgrown(directory: Path, policy: Path, kills: int, *, quick: bool) -> Told:
    """A session in which a script is ended each time for what it holds, and submitted again."""
    with live_pool(directory, "ours", 1, 1, LIMITS) as pool:
        runs = {OTHER: submitted(pool, directory, policy, OTHER)}
        config, grows = written(directory / f"{VICTIM}.toml", "growing"), directory / "grow"
        arguments = ["jobs", "submit", str(config), "--name", VICTIM, "--pool", str(pool.directory), "--json"]
        elastic(*arguments, "--", sys.executable, str(HERE / "_growing.py"), str(grows))
        session = Session(pool, random.Random(0), quick=quick)
        session.until(lambda now: all(count >= 1 for count in _steps(now).values()), "the first steps")
        session.steps({OTHER: CALM_STEPS[quick]}, "the calm steps")
        for _ in range(kills):
            before = _job(pool.status())["resubmissions"]
            grows.touch()
            session.until(lambda now, before=before: _job(now)["resubmissions"] > before, "the end of what has grown")
            grows.unlink()
            # A script counts its steps from 0 on once it is submitted again.
            session.until(lambda now: any(one["job"] == VICTIM for one in now["permits"]), "the victim's next turn")
            session.steps({OTHER: 1 if quick else STEPS_BETWEEN}, "steps after that")
    past = moments(pool)
    strokes = [
        Stroke("residency", moment.at_s, _held(past, number), due_s=moment.at_s)
        for number, moment in enumerate(past)
        if any(isinstance(command, c.KillResident) and command.job == VICTIM for command in moment.commands)
    ]
    return Told(strokes, past, runs, left_over(directory))


def killed_of_three(directory: Path, policy: Path) -> Figures:
    """One of three jobs fails and comes back later (Weave §6.6, Fig. 19)."""
    others = (OTHER, THIRD)
    with live_pool(directory, "ours", 1, 1, LIMITS) as pool:
        for name in SEEDS:
            submitted(pool, directory, policy, name, "trainer.max_restarts=1", "job.max_resubmissions=0")
        session = Session(pool, random.Random(0), quick=False)
        session.until(lambda now: all(count >= 1 for count in _steps(now).values()), "the first steps")
        session.steps(dict.fromkeys(SEEDS, AWAY_STEPS), "steps of all three")
        os.kill(_job(pool.status())["pid"], signal.SIGKILL)
        killed_s = session.until(lambda now: _job(now)["state"] == "failed", "the victim's failure")["now_s"]
        session.steps(dict.fromkeys(others, AWAY_STEPS), "steps without it")
        elastic("jobs", "resubmit", VICTIM, "--pool", str(pool.directory), "--json")
        resubmitted_s = pool.status()["now_s"]
        session.steps({VICTIM: 1}, "the victim's first step again")
        back_s = pool.status()["now_s"]
        session.steps(dict.fromkeys(SEEDS, AWAY_STEPS), "steps of all three again")
    past = moments(pool)
    first_s = max(next(end for end, _ in steps_s(past, name)) for name in SEEDS)
    times = {
        "before": (first_s, killed_s, tuple(SEEDS)),
        "without": (killed_s, resubmitted_s, others),
        "after": (back_s, past[-1].at_s, tuple(SEEDS)),
    }
    shown: Figures = {"killed_s": killed_s, "resubmitted_s": resubmitted_s, "returned_s": back_s - resubmitted_s}
    for when, (from_s, until_s, jobs) in times.items():
        shown[when] = {
            "step_s": {
                job: median(took for end, took in steps_s(past, job) if from_s < end - took and end <= until_s)
                for job in jobs
            },
            "order_kept_share": order_kept_share(past, from_s, until_s, len(jobs)),
        }
    return shown | {"leftovers": left_over(directory)}


def order_kept_share(past: Sequence[Moment], from_s: float, until_s: float, jobs: int) -> float:
    """Of the turns with rollouts within a time, those of the job that had the turn a round of all jobs before."""
    turns = [
        command.job
        for moment in past
        if from_s <= moment.at_s <= until_s
        for command in moment.commands
        if isinstance(command, c.GrantPermit) and command.permit.phase is PhaseKind.ROLLOUT
    ]
    rounds = list(zip(turns, turns[jobs:], strict=False))
    return sum(before == after for before, after in rounds) / len(rounds)


def _held(past: Sequence[Moment], number: int) -> int | None:
    """The permit that the victim has when this has happened."""
    return next((permit.number for permit in past[number].permits.values() if permit.job == VICTIM), None)


def device_free_s(stroke: Stroke, past: Sequence[Moment]) -> float | None:
    """From when it is due. None where the victim had no device."""
    if stroke.permit is None or stroke.kind in ("pool", "node_agent"):
        return None
    due_s = stroke.at_s
    if stroke.kind == "hang":
        kills = (
            moment.at_s
            for moment in past
            if moment.at_s >= stroke.at_s and any(isinstance(command, c.KillResident) for command in moment.commands)
        )
        due_s = next(kills, stroke.at_s)
    before = [moment for moment in past if moment.at_s <= stroke.at_s]
    if stroke.kind != "residency" and (not before or stroke.permit not in before[-1].permits):
        return None
    over_s = next(moment.at_s for moment in past if moment.at_s >= stroke.at_s and stroke.permit not in moment.permits)
    return max(0.0, max(over_s, stroke.gone_s or 0.0) - due_s)


def recovered_s(stroke: Stroke, past: Sequence[Moment], jobs: Sequence[str]) -> float | None:
    """Until each of these jobs has finished a phase that began after the stroke."""
    begun: set[int] = set()
    left = set(jobs)
    for moment in past:
        if moment.at_s < stroke.at_s:
            continue
        begun.update(command.permit.number for command in moment.commands if isinstance(command, c.GrantPermit))
        event = moment.event
        if isinstance(event, e.PermitYielded) and event.finished and event.permit in begun:
            left.discard(event.job)
        if not left:
            return moment.at_s - stroke.at_s
    return None


def steps_s(past: Sequence[Moment], job: str) -> list[tuple[float, float]]:
    """When each step of a job ended, and how long it took."""
    ends = [moment.at_s for moment in past if isinstance(moment.event, e.JobProgressed) and moment.event.job == job]
    return [(end, end - begun) for begun, end in itertools.pairwise(ends)]


def figures_of(kind: str, told: Told, identical: float) -> Figures:
    strokes = [stroke for stroke in told.strokes if stroke.kind == kind]
    falls = [stroke.at_s for stroke in told.strokes]
    mine, longest = list[float](), list[float]()
    for job in told.others:
        steps = steps_s(told.past, job)
        calm_s = median(took for end, took in steps if end < falls[0])
        for stroke in strokes:
            until_s = next((at for at in falls if at > stroke.at_s), float("inf"))
            over = [took / calm_s for end, took in steps if stroke.at_s <= end < until_s]
            mine += over
            longest += [max(over)] if over else []
    free = [found for stroke in strokes if (found := device_free_s(stroke, told.past)) is not None]
    whose = list(told.others) if kind == "pool" else [VICTIM]
    recovered = [found for stroke in strokes if (found := recovered_s(stroke, told.past, whose)) is not None]
    return {
        "kills": len(strokes),
        "others_slowdown": mean(mine) if mine else None,
        "others_longest": max(longest, default=None),
        "others_identical_share": identical,
        "device_free_s_p50": median(free) if free else None,
        "device_free_s_max": max(free, default=None),
        "recovered_s_p50": median(recovered) if recovered else None,
        "recovered": len(recovered),
        "leftovers": told.leftovers,
    }


def alone(directory: Path, policy: Path, steps: Mapping[str, int]) -> dict[str, dict[str, TrajectoryRow]]:
    """What jobs say in so many steps alone, on a worker of their own at full speed."""
    found: dict[str, dict[str, TrajectoryRow]] = {}
    directory.mkdir(parents=True)
    for name, count in steps.items():
        config = configured(directory, policy, name)
        unpaced = [
            f"run.steps={count}",
            "providers.reserved={max_workers=1}",
            "engine.pacing={prefill_tokens_per_s=1e9, decode_step_s={1=1e-6}}",
            "trainer.pacing={train_tokens_per_s=1e9}",
            f"run.directory={directory}",
        ]
        elastic("run", str(config), "--providers", "reserved", "--json", *sets(unpaced))
        (run,) = (path for path in directory.iterdir() if path.is_dir())
        found[name] = whole(run)
        run.rename(directory.with_name(f"{directory.name}-{name}"))
    return found


def whole(run: Path) -> dict[str, TrajectoryRow]:
    """A run's trajectories that came to an end."""
    return {key: row for key, row in trajectories(RunDirectory(run)).items() if not row.cause}


def main(arguments: Arguments) -> Figures:
    quick = arguments.quick
    kinds = list(arguments.only or (QUICK_KINDS if quick else (*KINDS, THREE)))
    three = THREE in kinds
    kinds = [kind for kind in kinds if kind != THREE]
    kills = QUICK_KILLS if quick else FULL_KILLS
    with TemporaryDirectory() as temporary:
        place = Path(temporary).resolve()
        sessions, expected = dict[str, Told](), dict[str, dict[str, TrajectoryRow]]()
        if quick and set(kinds) <= set(SHARED_NODES) - {"pool"}:
            policy = place / "policy"
            with ThreadPoolExecutor(1) as thread:
                written = thread.submit(write_policy, policy)
                reference = thread.submit(alone, place / "alone", policy, {OTHER: QUICK_STEPS_ALONE})
                beside = Beside(written.result, reference.result)
                told = struck(place / "session", beside, kinds, kills, 1, quick=quick)
                expected = reference.result()
            sessions = dict.fromkeys(kinds, told)
        else:
            policy = write_policy(place / "policy")
            for seed, kind in enumerate(kinds, 1):
                directory = place / kind
                if kind == "residency":
                    sessions[kind] = outgrown(directory, policy, kills, quick=quick)
                else:
                    sessions[kind] = struck(directory, Beside(lambda: policy), [kind], kills, seed, quick=quick)
        said = {kind: {job: whole(run) for job, run in told.others.items()} for kind, told in sessions.items()}
        steps: dict[str, int] = {}
        for told in sessions.values():
            for job in told.others:
                done = sum(isinstance(one.event, e.JobProgressed) and one.event.job == job for one in told.past)
                steps[job] = max(steps.get(job, 1), done)
        if not expected or any(count > QUICK_STEPS_ALONE for count in steps.values()):
            expected = alone(place / "alone again", policy, steps)
        shown: Figures = {}
        for kind, told in sessions.items():
            pairs = [
                (row, expected[job].get(key))
                for job, rows in said[kind].items()
                for key, row in rows.items()
                if row.step < steps[job]
            ]
            identical = sum(same_episode(row, other) for row, other in pairs) / len(pairs)
            shown[kind] = figures_of(kind, told, identical)
        shown[THREE] = killed_of_three(place / THREE, policy) if three else None
    return {"measured": "live, on this machine; engines and training paced to modelled devices", **shown}


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--only", action="append", choices=(*KINDS, THREE), default=[], help="this kind; may be repeated"),
    )
