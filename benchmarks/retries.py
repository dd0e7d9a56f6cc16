"""Agents whose calls break and are made again: each turn is generated once, and each answer is what is trained.

A run that agents drive goes on, with its fronts, a dedicated worker and the trainer's device as processes. Harnesses
with OpenAI's client of both majors (`make test-clients` sets up their environments; without these httpx asks again as
they do) play conversations in it (`_harness.py`), half of the calls streamed. Meanwhile, at seeded moments, workers,
fronts and the orchestrator are killed with SIGKILL, `elastic run --resume` goes on, and the connections of agents are
cut under way. Then, while only workers are killed, calls are made whose bodies are equal to ones that were answered.

`turns_asked` counts the calls of the harnesses, `turns_generated` the turns of which a token was accepted, by the
journals of all incarnations. `duplicates` are those of them that no call has an answer of, and positions that were
accepted again. `lost` counts calls whose answer is not, token for token, that of a turn of its own, as the journals
have it and as it was trained. `torn` counts streams that broke before their answer was whole, and were asked for again.
"""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import HERE, ROOT
from benchmarks._agents import MODEL, AgentsRun, Sampling, played, trained, wrongly_trained
from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._harness import HarnessSettings, MadeCall
from benchmarks._processes import program
from elastic.core.ids import parse_turn
from elastic.runtime.journal import RunDirectory
from tests.proof import trajectories

SEED = 7
CLIENTS = ("openai2", "openai3")
MEMBERS = 4
RUN = ("seeding.policy=fixed", "seeding.window_s=0", f"rollout.group_size={MEMBERS}")
KINDS: Mapping[str, int] = {"connections": 4, "front": 3, "worker": 2, "orchestrator": 1}
"""How often each is struck, of all strikes."""
HARNESS_TIMEOUT_S = 1200.0


class Storm(NamedTuple):
    """`groups` of conversations, of so many turns each, while something is struck every so often; then one group whose
    members make one call and so many equal ones."""

    groups: int
    turns: int
    equal: int
    every_s: tuple[float, float]
    kinds: Sequence[str]
    """What is struck in order; seeded choices where it is empty."""


FULL = Storm(groups=24, turns=10, equal=25, every_s=(1.0, 5.0), kinds=())
QUICK = Storm(groups=2, turns=5, equal=1, every_s=(0.8, 1.2), kinds=("connections", "front", "worker", "orchestrator"))


class Cuttable:
    """Passes connections on to a port, and cuts those that there are."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._ends: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Cuttable":
        self._thread.start()
        serving = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._pass_on, "127.0.0.1", 0, backlog=1024), self._loop
        )
        self._server = serving.result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def cut(self) -> int:
        """Cut all connections; how many there were."""

        async def cut() -> int:
            ends = len(self._ends)
            for end in list(self._ends):
                end.transport.abort()
            return ends // 2

        return asyncio.run_coroutine_threadsafe(cut(), self._loop).result()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._ends |= ends
        try:
            from_front, to_front = await asyncio.open_connection("127.0.0.1", self._to)
            ends.add(to_front)
            self._ends |= ends
            await asyncio.gather(_pump(reader, to_front), _pump(from_front, writer))
        except OSError:
            pass
        finally:
            for end in ends:
                end.transport.abort()
            self._ends -= ends


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either end is gone, which ends both."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    await writer.drain()
    writer.close()


class Harnesses:
    """Processes that play groups of a run, and the calls that they have made."""

    def __init__(self, run: AgentsRun, url: str, clients: Mapping[str, str], directory: Path) -> None:
        self.run, self.url, self.clients = run, url, clients
        self._directory = directory
        self.calls: list[MadeCall] = []
        self.by: Counter[str] = Counter()

    @contextmanager
    def playing(self, groups: int, **settings: Any) -> Iterator[Sequence["subprocess.Popen[str]"]]:
        """So many groups are played, shared out among the clients; waits for their end. Raises `RuntimeError`."""
        names = [f"{time.monotonic_ns()}-{number}" for number in range(groups)]
        started: dict[str, subprocess.Popen[str]] = {}
        said = {client: self._directory / f"{client}.json" for client in self.clients}
        with ExitStack() as ending:
            for place, (client, python) in enumerate(self.clients.items()):
                mine = HarnessSettings(
                    client=client.rstrip("23"),
                    url=self.url,
                    key=self.run.driver_key(client),
                    model=MODEL,
                    groups=names[place :: len(self.clients)],
                    members=MEMBERS,
                    seed=place,
                    **settings,
                )
                with said[client].open("w") as out:
                    command = [python, str(HERE / "_harness.py"), json.dumps(asdict(mine))]
                    started[client] = ending.enter_context(
                        program(command, stdout=out, stderr=subprocess.PIPE, text=True)
                    )
            yield list(started.values())
            for client, process in started.items():
                _, err = process.communicate(timeout=HARNESS_TIMEOUT_S)
                if process.returncode:
                    raise RuntimeError(f"the harness with {client} has failed:\n{err[-3000:]}")
                made = [MadeCall(**call) for call in json.loads(said[client].read_text().splitlines()[-1])]
                self.calls += made
                self.by[client] += len(made)


def harnesses_over(processes: Sequence["subprocess.Popen[str]"]) -> bool:
    """Whether all have ended, or any has failed."""
    ends = [process.poll() for process in processes]
    return any(ends) or None not in ends


def installed_clients() -> tuple[dict[str, str], str]:
    """The clients that there are, by interpreter; and why others are missing."""
    pythons = {name: ROOT / ".cache" / f"clients-{name}" / "bin" / "python" for name in CLIENTS}
    found = {name: str(python) for name, python in pythons.items() if python.exists()}
    missing = [name for name in CLIENTS if name not in found]
    why = f"{', '.join(missing)}: `make test-clients` sets up what has them" if missing else ""
    return found or {"httpx": sys.executable}, why


def inject(run: AgentsRun, connections: Cuttable, what: str, rng: random.Random) -> None:
    match what:
        case "connections":
            run.kills[what] += connections.cut()
        case "front":
            run.kill_processes(what, rng.sample(run.fronts(), 1) if run.fronts() else [])
        case "worker":
            run.kill_processes(what, run.workers())
        case _:
            run.kill("orchestrator")
            run.resume()


def play(directory: Path, storm: Storm) -> Figures:
    rng = random.Random(SEED)
    clients, missing = installed_clients()
    groups = storm.groups + 1
    steps = -(-groups // 5)
    with AgentsRun(directory, f"run.steps={steps}", f"rollout.groups={groups // steps}", *RUN) as run:
        with Cuttable(int(run.url().rpartition(":")[2])) as connections:
            harnesses = Harnesses(run, connections.url, clients, directory)
            with harnesses.playing(storm.groups, turns=storm.turns) as playing:
                run.until("turns under way", lambda: harnesses_over(playing) or len(run.accepted()) >= MEMBERS)
                kinds = iter(storm.kinds)
                while not harnesses_over(playing):
                    time.sleep(rng.uniform(*storm.every_s))
                    what = next(kinds, "") if storm.kinds else rng.choices(list(KINDS), list(KINDS.values()))[0]
                    if what and not harnesses_over(playing):
                        inject(run, connections, what, rng)
            with harnesses.playing(1, turns=storm.equal + 1, equal=storm.equal) as playing:
                while not harnesses_over(playing):
                    time.sleep(rng.uniform(*storm.every_s))
                    if not storm.kinds:
                        inject(run, connections, "worker", rng)
        run.wait()
        leftovers = run.leftovers()
    return {
        **checked(RunDirectory(run.run_dir), harnesses.calls),
        "equal_after_delivery": sum(call.equal for call in harnesses.calls),
        "by": dict(harnesses.by),
        "kills": dict(run.kills),
        "leftovers": len(leftovers),
        "skipped_because": missing or None,
    }


def checked(run: RunDirectory, calls: Sequence[MadeCall]) -> dict[str, int]:
    found = played(run)
    rows = trajectories(run)
    stretches = {name: {one.ids for one in trained(row)} for name, row in rows.items() if not row.cause}
    whole: set[str] = set()
    for call in calls:
        answer = found.answers.get(call.turn, Sampling((), ()))
        ids = tuple(call.ids)
        if ids and ids == answer.ids and ids in stretches.get(parse_turn(call.turn)[0], ()):
            whole.add(call.turn)
    return {
        "turns_asked": len(calls),
        "turns_generated": found.generated,
        "duplicates": found.generated - len({call.turn for call in calls}) + found.twice,
        "lost": len(calls) - len(whole),
        "torn": sum(call.torn for call in calls),
        "wrongly_trained_tokens": wrongly_trained(run, found.answers),
    }


def main(arguments: Arguments) -> Figures:
    return play(arguments.scratch, QUICK if arguments.quick else FULL)


if __name__ == "__main__":
    benchmark(__doc__, main)
