"""Live runs with real processes, real kills and a tiny policy, held against their journals."""

import asyncio
import io
import re
from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from elastic.compose.incarnations import replay
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.ids import parse_turn, provider_of
from elastic.core.scheduler import Scheduler
from elastic.environments.base import StepResult
from elastic.protocol.sampled import ids_of
from elastic.report import causes, summarise
from elastic.runtime.journal import JournalReader, MoveRow, RunDirectory, SampleRow, StepRow, TrajectoryRow

pytestmark = pytest.mark.slow


class Evidence:
    """What a journal shows when a fresh core decides it all again."""

    def __init__(self, reader: JournalReader, scheduler: Scheduler) -> None:
        self.accepted: dict[str, list[int]] = {}
        self.trained: Counter[str] = Counter()
        self.dropped: dict[str, str] = {}
        for t_ns, event, frame in reader.entries():
            for command in scheduler.handle(event, t_ns):
                match command:
                    case c.AcceptTokens():
                        assert frame is not None
                        said = list(frame.said())
                        for turn, place in zip(command.turns, command.chunks, strict=True):
                            tokens = self.accepted.setdefault(turn, [])
                            assert said[place][0].start == len(tokens), f"{turn} is not gapless"
                            tokens += said[place][1]
                    case c.TrainGroup():
                        self.trained.update(command.trajectories)
                    case c.DropGroup():
                        self.dropped[command.group] = command.reason
                    case _:
                        pass
        self.digest = digest(scheduler)


def evidence_of(run: Any) -> tuple[Evidence, list[TrajectoryRow]]:
    scheduler = run.scheduler
    fresh = Scheduler(scheduler.plan, scheduler.limits, scheduler.policies, 0)
    reader = run.journal()
    try:
        return Evidence(reader, fresh), reader.rows(TrajectoryRow)
    finally:
        reader.close()


def policy_tokens(turns: dict[str, list[int]], trajectory: str) -> list[list[int]]:
    own = {parse_turn(turn)[1]: tokens for turn, tokens in turns.items() if turn.startswith(f"{trajectory}/")}
    return [own[n] for n in sorted(own)]


def batches_by_provider(run: Any) -> dict[str, set[int]]:
    """The `max_batch` that each provider's workers came with."""
    reader = run.journal()
    found: dict[str, set[int]] = {}
    try:
        for _, event in reader.events_of("WorkerJoined"):
            found.setdefault(provider_of(event.worker), set()).add(event.capabilities.max_batch)
    finally:
        reader.close()
    return found


@pytest.mark.nightly
async def test_nothing_is_lost_when_workers_are_killed(live, live_config) -> None:
    config = live_config()
    config.providers["spot"]["engine"] = {"max_batch": 3}
    run = await live(config, ("serving", "spot"), kills=2)
    assert run.outcome.failed == ""
    assert run.kills == 2
    assert batches_by_provider(run) == {"trainer": {4}, "serving": {4}, "spot": {3}}

    proof, trajectories = evidence_of(run)
    assert len(trajectories) == 2 * 4 * 4
    for row in trajectories:
        assert row.cause == ""
        token_ids, prompt = ids_of(row.token_ids), 3
        for tokens in policy_tokens(proof.accepted, row.trajectory):
            assert token_ids[prompt : prompt + len(tokens)] == tokens
            prompt += len(tokens) + 2
        assert prompt - 2 == len(token_ids)
    assert proof.trained
    assert set(proof.trained.values()) == {1}

    reader = run.journal()
    meta, steps, moves = reader.meta(), reader.rows(StepRow), reader.rows(MoveRow)
    ended = [event for _, event in reader.events_of("LeaseEnded") if isinstance(event, e.LeaseEnded)]
    granted = [event for _, event in reader.events_of("LeaseGranted") if isinstance(event, e.LeaseGranted)]
    reader.close()
    assert meta["status"] == "finished"
    assert [step.step for step in steps] == [0, 1]
    assert moves
    assert proof.digest == digest(run.scheduler) == digest(replay(RunDirectory(run.run_dir))) == meta["digest"]
    assert sorted(event.lease for event in granted) == sorted(event.lease for event in ended)
    assert not run.scheduler.leases.leases
    assert all(book.closed_ns is not None for book in run.scheduler.ledger.books.values())
    assert run.scheduler.ledger.imbalance_ns() == 0


class Broken(RuntimeError):
    pass


FAULTY = 20
"""Of a run's environments the first so many: groups of them, since groups begin in their order."""


def ill_mannered(base: type) -> type:
    """Of the first ones every fifth cannot be made, raises, hangs at reset, hangs in a turn, or is sound.

    The others are never done: they answer each turn in a word that the policy does not know, and score what there is.
    """

    class IllMannered(base):
        made = 0

        def __init__(self, settings: Any) -> None:
            super().__init__(settings)
            self.fault = IllMannered.made % 5 if IllMannered.made < FAULTY else None
            IllMannered.made += 1
            if self.fault == 1:
                raise Broken("no lake today")

        async def reset(self, seed: int) -> list[int]:
            if self.fault == 2:
                await asyncio.Event().wait()
            return await super().reset(seed)

        async def step(self, token_ids: list[int]) -> StepResult:
            if self.fault == 3:
                raise Broken("the ice broke")
            if self.fault == 4:
                await asyncio.Event().wait()
            result = await super().step(token_ids)
            return result if self.fault == 0 else StepResult([99], False)

        async def truncate(self) -> float:
            return float(self.total % 2 == 0)

    return IllMannered


@pytest.mark.nightly
async def test_an_environments_faults_are_never_scored_and_end_no_run_that_may_have_them(
    live, live_config, parity
) -> None:
    """A live run whose environment raises, hangs and dies: each fault takes its time limit."""
    rollout = {"groups": FAULTY // 4 + 1, "max_turns": 1, "max_failed_share": 1.0}
    config = live_config(run={"steps": 1}, environment={"step_timeout_s": 0.5}, rollout=rollout)
    run = await live(config, (), environment=ill_mannered(parity))
    assert run.outcome.failed == ""
    proof, trajectories = evidence_of(run)
    assert Counter(row.cause for row in trajectories) == {
        "": 4,
        "IllMannered.step: token id 0: found 99 (int); allowed: integers from 0 to 15": 4,
        "the environment raised Broken: no lake today": 4,
        "the environment raised Broken: the ice broke": 4,
        "the environment did not answer within 0.5 s": 8,
    }
    failed = {row.trajectory for row in trajectories if row.cause}
    assert all(row.reward is None for row in trajectories if row.cause)
    assert not failed & set(proof.trained)
    faults = [reason for reason in proof.dropped.values() if "zero_variance" not in reason]
    assert len(faults) == FAULTY // 4 + 1, "at most one member of a group is left, and has nobody to be compared with"


@pytest.mark.nightly
async def test_a_run_all_of_whose_trajectories_fail_ends_as_failed_with_its_causes(live, live_config, parity) -> None:
    class Lakeless(parity):
        async def reset(self, seed: int) -> list[int]:
            raise Broken("no lake today")

    run = await live(live_config(run={"steps": 1}), (), environment=Lakeless)
    assert run.outcome.failed.startswith("16 of 16 trajectories of the last step have failed")
    summary = summarise(RunDirectory(run.run_dir))
    assert (summary.outcome, summary.cause) == ("failed", run.outcome.failed)
    console = Console(width=80, file=io.StringIO(), color_system=None)
    for part in causes(summary):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.search(r"the environment raised Broken: no lake today +16 *\n", shown)
    assert 'raise Broken("no lake today")\n' in shown, "the traceback shows where"
    with RunDirectory(run.run_dir).newest_journal() as journal:
        (warning,) = [one for row in journal.rows(SampleRow) for one in row.status.warnings]
    assert warning.message.startswith("step 0 had nothing to train on: 16 of 16 trajectories failed: the environment")
