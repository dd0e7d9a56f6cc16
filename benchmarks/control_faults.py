"""A server and its runner, killed with SIGKILL again and again while runs are submitted, followed and go on.

Every submission is repeated under its Idempotency-Key until it is acknowledged; every run is followed by a stream of
its events. At the end each acknowledged run must be there and finished, begun once, and told whole, event by event.

- `runs_lost`: acknowledged, and not finished; `submissions_lost`: acknowledged, and not in the list.
- `runs_doubled`: of one submission several runs, or of one run several processes. No run is killed here.
- `events_lost`: in a run's journal, and not told, not told once, or not in order.
- `poisoned`: of one project webhooks whose hosts no resolver takes, traces that unpack to much, processes that
  real-time signals end, receivers that never answer; the processes and loops of the server that these ended, and the
  longest that another project waited for a message or for the check of a submission.
- `adopted_s_max`: from a kill until the next runner had adopted every process that lived, without the time that an
  interpreter takes to start.
"""

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._hosted import CONFIG, HostedSite, Part
from benchmarks._poisons import poisoned
from benchmarks._waiting import until
from elastic.protocol.api import HostedRun, RunPhase
from elastic.protocol.api_client import ApiError, Client, ClientError
from elastic.server.runner.loop import LOCK
from elastic.system.sqlite import open_sqlite

SEED = 18
KILLS, KILLS_QUICK = 100, 20
QUICK_S = 10.0
"""How long kills go on at most with `--quick`."""
JOB_S, JOB_QUICK_S = (5.0, 40.0), (2.0, 6.0)
EVERY_S = 0.1
RUNS_AT_ONCE = 12
SUBMITTERS = 4
BETWEEN_S = 0.2
ON_THE_WAY_UP = 0.25
"""Share of kills that do not wait until what was killed last is up again."""
WAIT_S = 1.5
"""Longest from the moment that a kill waits for to the kill."""
END_TIMEOUT_S = 120.0


@dataclass
class Submitter:
    """Submits runs for as long as it may, and follows each; notes what was acknowledged and told."""

    site: HostedSite
    acknowledged: dict[str, str] = field(default_factory=dict[str, str])
    """The run by its submission's label."""
    told: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    over: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def following(self) -> int:
        """Runs whose streams have not ended."""
        return sum(thread.is_alive() for thread in self.threads)

    def run(self) -> None:
        with Client(self.site.url, self.site.secret) as client:
            while not self.over.is_set():
                if self.following >= RUNS_AT_ONCE:
                    time.sleep(0.05)
                    continue
                label = f"submission-{next(self.numbers)}"
                if (made := self._submitted(client, label)) is None:
                    return
                self.acknowledged[label] = made.id
                self.told[made.id] = []
                follower = threading.Thread(target=self._follow, args=(made.id,), daemon=True)
                self.threads.append(follower)
                follower.start()
                time.sleep(BETWEEN_S)

    def _submitted(self, client: Client, label: str) -> HostedRun | None:
        while not self.given_up.is_set():
            try:
                return client.submit(CONFIG, ["spot"], idempotency_key=label, labels={"submission": label})
            except ApiError as error:
                if error.problem.status != 503:
                    raise
            except ClientError:
                time.sleep(0.05)
        return None

    def _follow(self, run: str) -> None:
        with Client(self.site.url, self.site.secret) as client:
            while not self.given_up.is_set():
                told = self.told[run]
                try:
                    for event in client.events(run, told[-1] if told else ""):
                        if event.id:
                            told.append(event.id)
                    return
                except ClientError:
                    time.sleep(0.05)


def main(parsed: Arguments) -> Figures:
    chance = random.Random(parsed.seed)
    kills: list[tuple[float, Part]] = []
    with HostedSite.up(*(JOB_QUICK_S if parsed.quick else JOB_S), EVERY_S) as site:
        submitter = Submitter(site)
        try:
            submitting = [threading.Thread(target=submitter.run, daemon=True) for _ in range(SUBMITTERS)]
            for thread in submitting:
                thread.start()
            began_s = time.monotonic()
            wanted = KILLS_QUICK if parsed.quick else parsed.kills
            while len(kills) < wanted and not (parsed.quick and time.monotonic() - began_s > QUICK_S):
                parts: list[Part] = chance.choice((["api"], ["runner"], ["runner"], ["api", "runner"]))
                if chance.random() > ON_THE_WAY_UP:
                    _wait_for_work(site, submitter)
                time.sleep(WAIT_S * chance.random())
                for part in parts:
                    kills.append((time.time(), part))
                    site.kill(part)
                for part in parts:
                    site.start(part)
            submitter.over.set()
            figures: Figures = {
                "kills": len(kills),
                **_checked(site, submitter, submitting),
                "adopted_s_max": _adopted_s(site, kills),
            }
        finally:
            submitter.given_up.set()
    with HostedSite.up(*JOB_QUICK_S, EVERY_S) as site:
        figures["poisoned"] = poisoned(site)
    return figures


def _wait_for_work(site: HostedSite, submitter: Submitter) -> None:
    """Until the runner has claimed the runs, and the API has acknowledged a submission or has as many as it may."""
    lock, pid, before = site.server_home / LOCK, str(site.processes["runner"].pid), len(submitter.acknowledged)

    def at_work() -> bool:
        accepted = len(submitter.acknowledged) > before or submitter.following >= RUNS_AT_ONCE
        return accepted and lock.exists() and lock.read_text() == pid

    until("work", at_work, END_TIMEOUT_S, 0.02, must=False)


def _checked(site: HostedSite, submitter: Submitter, submitting: list[threading.Thread]) -> dict[str, int]:
    end_s = time.monotonic() + END_TIMEOUT_S
    for threads in (submitting, submitter.threads):
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
    with Client(site.url, site.secret) as client:
        while True:
            found = {run.id: run for run in client.runs()}
            if all(run.phase is RunPhase.FINISHED for run in found.values()) or time.monotonic() > end_s:
                break
            time.sleep(0.2)
    known = list(submitter.acknowledged.values())
    labels = Counter(run.labels["submission"] for run in found.values())
    unfinished = [run for run in known if run in found and found[run].phase is not RunPhase.FINISHED]
    return {
        "submissions": len(known),
        "runs_lost": len(unfinished),
        "runs_doubled": sum(count - 1 for count in labels.values()) + sum(_begun(site, run) > 1 for run in known),
        "submissions_lost": sum(run not in found for run in known),
        "events": sum(map(len, submitter.told.values())),
        "events_lost": sum(_untold(site, run, submitter.told[run]) for run in known),
    }


def _begun(site: HostedSite, run: str) -> int:
    try:
        return len((site.server_home / "runs" / run / "begun").read_text().splitlines())
    except OSError:
        return 0


def _untold(site: HostedSite, run: str, told: list[str]) -> int:
    """Events of the run's journals that were not told once and in order."""
    written: list[str] = []
    for path in sorted((site.server_home / "runs" / run).glob("journal*.sqlite")):
        with contextlib.closing(open_sqlite(path, "ro")) as journal:
            (name,) = journal.execute("SELECT value FROM meta WHERE key = 'incarnation'").fetchone()
            written += [f"{name}-{seq}" for (seq,) in journal.execute("SELECT seq FROM events ORDER BY seq")]
    if told == written:
        return 0
    return len(set(written) - set(told)) or max(1, abs(len(told) - len(written)))


def _adopted_s(site: HostedSite, kills: list[tuple[float, Part]]) -> float | None:
    """The longest time from a runner's kill until another one had adopted the last of what lived."""
    kills_s = [at_s for at_s, part in kills if part == "runner"]
    held_since_s: dict[int, float] = {}
    waits: list[float] = []
    for line in site.logged("runner"):
        at_s = _unix_s(line["timestamp"])
        if line["event"] == "adopted" and line["pid"] in held_since_s:
            # A runner that was killed on its way up adopted nothing: the wait is counted from the first such kill.
            waits += [at_s - kill_s for kill_s in kills_s if held_since_s[line["pid"]] < kill_s < at_s][:1]
        if line["event"] in ("begun", "adopted"):
            held_since_s[line["pid"]] = at_s
    return max(waits, default=None)


def _unix_s(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--seed", type=int, default=SEED, help="of when what is killed"),
        option("--kills", type=int, default=KILLS, help="without --quick"),
    )
