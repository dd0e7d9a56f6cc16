"""What becomes of the time between the notice that an instance will be taken back and its end (RLBoost §4.2).

Simulated with the real core and a spot market: 16 turns at once on each of two instances, which take from seconds to
five minutes (about a minute at the median), against a queue that is always full, and a third instance that takes what
moves. One instance after the other is taken back with the notice that the key says, in seconds. `useful_share` is the
share of the notice's device time that went into prefill and decode of tokens that were accepted; null where there is no
notice. `turns_finished_in_place` ended on the instance after its notice came, those `turns_moved` went on elsewhere.
`tokens_lost` were generated there and accepted from nobody; without notice what a worker has not sent yet goes with it,
as it must, and is not counted.

`live` is the same with notices of 0 and 10 s on real processes, paced, with turns of seconds; figures there are of few
instances, on a machine that does other things.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._configurations import configuration, endless
from benchmarks._live import live_run, run_to_end
from benchmarks._shapes import write_policy
from elastic.compose.plan import resolve
from elastic.core import events as e
from elastic.core.types import NS_PER_S, Account, EndCause
from elastic.environments.frozenlake import FrozenLake, FrozenLakeSettings
from elastic.runtime.journal import JournalReader, MoveRow, RunDirectory, TurnRow
from elastic.runtime.status import RunStatus
from elastic.simulation import run as simulation
from providers.base import Provider
from providers.markets import SpotSettings
from providers.spot import SpotProvider

NOTICES_S = (0, 30, 120)
LIVE_NOTICES_S = (0, 10)
LIFE_S, LIVE_LIFE_S, QUICK_LIFE_S = 500, 24, 18
USEFUL = (Account.PREFILL, Account.DECODE)


class GivenNotice(NamedTuple):
    """Of one instance, in the run's time; where it got none, both are when its worker fell silent."""

    worker: str
    given_ns: int
    deadline_ns: int


def market(directory: Path, lives: int, life_s: int, apart_s: int) -> Path:
    """Three instances from the beginning, two of which are taken back in turn; each is followed by another."""
    rows = ["time_s,event,instance_id", "0,add,stays"]
    events: list[tuple[int, str]] = []
    for slot in range(2):
        for number in range(lives):
            name, begun_s = f"i{slot}-{number}", number * life_s + slot * apart_s * (number > 0)
            events += [(begun_s, f"add,{name}"), ((number + 1) * life_s + slot * apart_s - 1, f"remove,{name}")]
    rows += [f"{at_s},{event}" for at_s, event in sorted(events)]
    path = directory / "market.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def spot(trace: Path, notice_s: int) -> Mapping[str, str | int]:
    return {"trace": str(trace), "max_workers": 3, "notice_s": notice_s}


def simulated(directory: Path, notice_s: int, lives: int) -> Figures:
    config = configuration(
        *("unseeded", "all-capacity", "notice", "notice-simulated"),
        policy="none",
        providers={"spot": spot(market(directory, lives, LIFE_S, 250), notice_s)},
    )
    plan = resolve(config, ["spot"], "notice")
    run = RunDirectory(directory / "run")
    run.path.mkdir()
    end_s = lives * LIFE_S + 250.0 + notice_s
    seen = [0.0]

    def observe(status: RunStatus) -> None:
        seen[0] = status.elapsed_s

    simulation.simulate(plan, run.path, simulation.Experiment(), observe=observe, stopped=lambda: seen[0] > end_s)
    with run.newest_journal() as journal:
        return checked(journal, notice_s)


async def live(directory: Path, notice_s: int, lives: int, life_s: int) -> Figures:
    kinds, policy = ("unseeded", "all-capacity", "notice", "notice-live"), write_policy(directory / "policy")
    config = endless(*kinds, policy=policy, turns=8, engine={"max_pending": 2})
    settings = SpotSettings.model_validate(spot(market(directory, lives, life_s, life_s // 2), notice_s))
    providers = {"spot": (cast("type[Provider]", SpotProvider), settings)}
    lake = FrozenLakeSettings(sizes=(8,))
    async with live_run(config, directory / "run", providers, FrozenLake, lake) as run:
        end_ns = round((lives * life_s + life_s // 2 + notice_s + 1) * NS_PER_S)
        await run.until("the last end", lambda: run.orchestrator.now_ns() > end_ns, 600.0)
    with RunDirectory(directory / "run").newest_journal() as journal:
        return checked(journal, notice_s)


def checked(journal: JournalReader, notice_s: int) -> Figures:
    events = list(journal.events())
    notices = found(events, noticed=notice_s > 0)
    turns, moves = journal.rows(TurnRow), journal.rows(MoveRow)
    useful_ns = total_ns = lost = 0
    for notice in notices:
        before, after = accounts_at(events, notice)
        if notice.deadline_ns > notice.given_ns:
            total_ns += notice.deadline_ns - notice.given_ns
            useful_ns += sum(after.get(account, 0) - before.get(account, 0) for account in USEFUL)
        lost += tokens_lost(events, notice.worker) if notice_s else 0
    since = {notice.worker: notice.given_ns for notice in notices}
    return {
        "turns_finished_in_place": sum(t.worker in since and t.finished_ns >= since[t.worker] for t in turns),
        "turns_moved": sum(m.from_worker in since and m.left_ns >= since[m.from_worker] for m in moves),
        "tokens_lost": lost,
        "useful_share": useful_ns / total_ns if total_ns else None,
    }


def found(events: list[tuple[int, e.Event]], *, noticed: bool) -> list[GivenNotice]:
    """Of the instances that were taken back once they served, each with its notice where they are `noticed`."""
    given = {event.lease: (t_ns, event.deadline_ns) for t_ns, event in events if isinstance(event, e.LeaseNotice)}
    ready = {event.worker for _, event in events if isinstance(event, e.WeightsApplied)}
    silent = {event.worker: t_ns for t_ns, event in events if isinstance(event, e.WorkerDisconnected)}
    notices: list[GivenNotice] = []
    for t_ns, event in events:
        if isinstance(event, e.LeaseEnded) and event.cause is EndCause.PREEMPTED and event.lease in ready:
            end_ns = min(t_ns, silent.get(event.lease, t_ns))
            at_ns, deadline_ns = given.get(event.lease, (end_ns, end_ns)) if noticed else (end_ns, end_ns)
            notices.append(GivenNotice(event.lease, at_ns, t_ns if deadline_ns is None else deadline_ns))
    return notices


def accounts_at(
    events: list[tuple[int, e.Event]], notice: GivenNotice
) -> tuple[Mapping[Account, int], Mapping[Account, int]]:
    """What the worker said last before its notice, and at its end."""
    before: Mapping[Account, int] = {}
    after: Mapping[Account, int] = {}
    for t_ns, event in events:
        if isinstance(event, e.WorkerReported) and event.worker == notice.worker:
            after = event.accounts_ns
            if t_ns <= notice.given_ns:
                before = event.accounts_ns
    return before, after


def tokens_lost(events: list[tuple[int, e.Event]], worker: str) -> int:
    """Those that the worker says it generated, and that never came."""
    said = came = 0
    for _, event in events:
        if isinstance(event, e.WorkerReported) and event.worker == worker:
            said = max(said, event.decoded_tokens)
        elif isinstance(event, e.TokensReceived) and event.worker == worker:
            came += sum(chunk.count for chunk in event.chunks)
    return max(0, said - came)


def main(arguments: Arguments) -> Figures:
    lives = 2 if arguments.quick else 20
    figures: Figures = {}
    for notice_s in NOTICES_S:
        with tempfile.TemporaryDirectory() as name:
            figures[str(notice_s)] = simulated(Path(name), notice_s, lives)
    figures["live"] = {}
    for notice_s in LIVE_NOTICES_S:
        lives, life_s = (1, QUICK_LIFE_S) if arguments.quick else (4, LIVE_LIFE_S)
        with tempfile.TemporaryDirectory() as name:
            measured = None
            if notice_s or not arguments.quick:
                measured = run_to_end(live(Path(name), notice_s, lives, life_s))
            figures["live"][str(notice_s)] = measured
    return figures


if __name__ == "__main__":
    benchmark(__doc__, main)
