"""A simulated run's journal as a live run's has it: with made-up token ids in its frames, and with saved states."""

import itertools
from collections.abc import Sequence

import msgspec

from elastic.compose.incarnations import BEGAN, replay
from elastic.compose.plan import resolve
from elastic.compose.runs import save_run_config
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.scheduler import Scheduler
from elastic.core.types import Chunks
from elastic.protocol import wire
from elastic.protocol.sampled import pack_ids, pack_logprobs
from elastic.runtime import states
from elastic.runtime.journal import RUNNING, RunDirectory, event_row, frame_row
from elastic.runtime.recollection import Recollection
from elastic.runtime.trainer import kept_steps
from elastic.system.boot_clock import Began

TOKEN, LOGPROB = 5, -0.5


class _Enough(Exception):
    pass


def retell(config: Config, providers: Sequence[str], simulated: RunDirectory, run: RunDirectory, events: int) -> None:
    """Write the first `events` of the simulated run as a journal of `run`, which has died then.

    Beside each checkpoint that its trainer would have kept there is the run's state; the checkpoints are empty.
    """
    save_run_config(run.path, config)
    notes = {
        "run": run.name,
        "config": config.model_dump_json(),
        "providers": ",".join(providers),
        "status": RUNNING,
        BEGAN: msgspec.json.encode(Began.now()).decode(),
    }
    journal = run.begin_journal(config.journal, waits=True, notes=notes)
    stepped: list[tuple[int, int]] = []

    def write(t_ns: int, event: e.Event, _: object, commands: Sequence[c.Command]) -> None:
        if journal.events == events:
            raise _Enough
        accepted = next((command for command in commands if isinstance(command, c.AcceptTokens)), None)
        if isinstance(event, e.TokensReceived) and accepted is not None:
            journal.append(frame_row(event, _frame(event.chunks), accepted, t_ns))
        else:
            journal.append(event_row(event, t_ns))
        if isinstance(event, e.WeightsPublished) and event.version % config.trainer.checkpoint_every_steps == 0:
            stepped.append((journal.events, event.version))

    try:
        replay(simulated, write)
    except _Enough:
        pass
    finally:
        journal.close()
    if journal.events != events:
        raise ValueError(f"the simulated run has {journal.events} events, not {events}")
    _save_states(config, providers, run, stepped[-states.KEEP :])


def _frame(chunks: Chunks) -> wire.Tokens:
    tokens = sum(chunks.counts)
    return wire.Tokens(chunks, pack_ids([TOKEN] * tokens), pack_logprobs([LOGPROB] * tokens))


def _save_states(
    config: Config, providers: Sequence[str], run: RunDirectory, stepped: Sequence[tuple[int, int]]
) -> None:
    plan = resolve(config, providers, str(run.path))
    scheduler = Scheduler(run_plan(plan), limits(config), policies(config), 0)
    recollection, heard = Recollection(scheduler, kept_steps(config)), 0
    with run.newest_journal() as journal:
        entries = journal.entries()
        for events, version in stepped:
            recollection.hear(itertools.islice(entries, events - heard))
            heard = events
            saved = states.SavedRun(
                journal=journal.path.name,
                events=events,
                t_ns=scheduler.now_ns,
                digest=digest(scheduler),
                state=recollection.saved(),
            )
            states.write(run.path / states.CHECKPOINTS, version, saved)
            (run.path / states.CHECKPOINTS / f"{version:08d}.safetensors").touch()
