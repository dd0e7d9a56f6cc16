"""Released clients that people's agents speak with, against a live run whose workers are killed.

Each is in an environment of its own with its own pins (`_client_environments.py`), and plays a script as its users
write it (`_clients/`): whole and streamed, with a tool that is called and answered. All of them drive one run, whose
policy is made by hand so that it calls tools (`_scripted_policy.py`). While a client plays, a worker that generates an
answer for it is killed with SIGKILL; `moved` are its turns that went on elsewhere.

A call passes where the client got what its own schema demands, and what it got is, token for token or as text, a turn
of the run's journal that was trained as it is there. `wrong` says of the others why not. `--quick` measures the clients
that are installed, three at a time, as far as its time goes, and kills two workers in all; `--install` makes the
environments of those that are not there.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks import HERE
from benchmarks._agents import AgentsRun, Sampling, played, trained
from benchmarks._client_environments import CLIENTS, ReleasedClient, install, python_of, why_missing
from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._scripted_policy import write_scripted_policy
from elastic.core.ids import lease_of, parse_agent_id, parse_turn
from elastic.core.types import TrajectoryId, TurnId
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.protocol.http_clients import sync_client
from elastic.runtime.journal import JournalError, MoveRow, RunDirectory
from elastic.system.processes import inherited
from tests.proof import trajectories

MODEL, GROUP = "scripted", "clients"
RUN = (
    "run.steps=1",
    "rollout.groups=1",
    "rollout.max_failed_share=1",
    "front.tool_parser=hermes",
    "seeding.policy=fixed",
    "seeding.window_s=0",
    "seeding.bound_workers=false",
    "providers.reserved.max_workers=2",
    "engine.max_context_tokens=8192",
    "environment.settings.deadline_s=3600",
    "environment.settings.idle_s=3600",
)
CLIENT_TIMEOUT_S = 180.0
NO_TIME = "--quick had no time left for it"
LOOK_S = 0.1
STRIKES_MAX = 3
"""How often a worker is killed for a client, until a turn of its has moved: one may be over just then."""


class PlayPace(NamedTuple):
    """So many clients play at once, workers are killed so often for each of them and for all, and none but the
    first begins so many seconds after these."""

    at_once: int
    kills: int = STRIKES_MAX
    kills_in_all: int = 1000
    begin_s: float = math.inf


FULL = PlayPace(at_once=1)
QUICK = PlayPace(at_once=3, kills=1, kills_in_all=2, begin_s=12.0)
TURN = re.compile(r"(\d+-\d+-\d+)-(\d+)$")
"""What ends the ids of answers, in each dialect."""


class Player:
    """A client at play, and what it has said of its calls."""

    def __init__(self, name: str, client: ReleasedClient, said: Path, opened: Sequence[Mapping[str, Any]]) -> None:
        self.name, self.client = name, client
        self._opened = [one["id"] for one in opened]
        self._said, self._key = said, opened[0]["key"] if opened else ""
        self.strikes, self.wrong = 0, list[str]()
        self.struck: TurnId | None = None
        """The turn for which a worker was killed last."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, run: AgentsRun, policy: Path) -> None:
        url = run.url()
        key = self._key or run.driver_key(GROUP)
        alone = {"NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
        told = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "CLIENT_ROOT": url,
            "CLIENT_POLICY": str(policy),
            "CLIENT_DRIVER_KEY": run.driver_key(GROUP) if self.client.opens else "",
            "CLIENT_GROUP": GROUP,
        }
        self._said.mkdir()
        with (self._said / "out").open("wb") as out, (self._said / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [str(python_of(self.name)), str(HERE / "_clients" / f"{self.client.script}.py")],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self._said,
                env={**inherited(), **alone, **told, "HOME": str(self._said), "PATH": os.environ["PATH"]},
            )

    def over(self) -> bool:
        assert self.process is not None
        code = self.process.poll()
        if code:
            self.wrong = [f"the client has ended with {code}: {(self._said / 'err').read_text()[-1500:]}"]
        return code is not None

    def trajectories(self) -> dict[str, TrajectoryId]:
        """As the journal names them, by the ids that agents have: those that were opened for it, and by it."""
        own = [*self._opened, *(call["trajectory"] for call in self.calls())]
        return {one: TrajectoryId(str(parse_agent_id(one))) for one in own if one}

    def calls(self) -> list[dict[str, Any]]:
        if self.process is None:
            return []
        lines = (self._said / "out").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"what": ')]


class ClientStage:
    """The run, its driver, and the clients at play."""

    def __init__(self, run: AgentsRun, policy: Path) -> None:
        self.run, self.policy = run, policy
        url, headers = run.url(), {"authorization": f"Bearer {run.driver_key(GROUP)}"}
        self._driver = sync_client(url, by_proxy=False, base_url=url, headers=headers, timeout=60)

    def begin(self) -> Mapping[str, Any]:
        return self.run.until("a trajectory", self._begun)

    def _begun(self) -> Mapping[str, Any] | None:
        with contextlib.suppress(httpx.TransportError):
            answer = self._driver.post("/trajectories", json={"group": GROUP})
            return answer.json() if answer.status_code == 200 else None
        return None

    def end(self, trajectory: str, **how: Any) -> None:
        if not how:
            self._driver.post(f"/trajectories/{trajectory}/reward", json={"reward": 1.0}).raise_for_status()
        self._driver.post(f"/trajectories/{trajectory}/end", json=how).raise_for_status()

    def play(self, players: Sequence[Player], pace: PlayPace) -> None:
        """Each of them, unless there is no time to begin."""
        began_s = time.monotonic()
        waiting, playing = list(players), list[Player]()
        started_s: dict[str, float] = {}
        try:
            while waiting or playing:
                while waiting and len(playing) < pace.at_once:
                    player = waiting.pop(0)
                    if time.monotonic() - began_s > pace.begin_s:
                        continue
                    player.start(self.run, self.policy)
                    started_s[player.name] = time.monotonic()
                    playing.append(player)
                time.sleep(LOOK_S)
                self.run.ended()
                self._kill_some(playing, pace)
                for player in [player for player in playing if player.over()]:
                    playing.remove(player)
                for player in playing:
                    if time.monotonic() - started_s[player.name] > CLIENT_TIMEOUT_S:
                        player.wrong = [f"the client was not done within {CLIENT_TIMEOUT_S:g} s"]
                        assert player.process is not None
                        player.process.kill()
        finally:
            for player in playing:
                if player.process is not None:
                    player.process.kill()

    def _kill_some(self, playing: Sequence[Player], pace: PlayPace) -> None:
        """Kill a worker that generates for clients of which no turn has moved yet."""
        if self.run.kills["worker"] >= pace.kills_in_all:
            return
        moved, open_on = self._looked()
        for player in playing:
            mine = set(player.trajectories().values())
            if player.strikes >= pace.kills or any(parse_turn(turn)[0] in mine for turn in moved):
                continue
            turn = next((turn for turn in open_on if parse_turn(turn)[0] in mine), None)
            if turn is not None and player.struck not in open_on:
                self.run.kill_processes("worker", self.run.recorded(f"{lease_of(open_on[turn])}.json"))
                player.strikes += 1
                player.struck = turn
                return

    def _looked(self) -> tuple[set[TurnId], dict[TurnId, str]]:
        """The turns that have moved, and those that are under way by their workers."""
        moved, open_on = set[TurnId](), dict[TurnId, str]()
        with contextlib.suppress(JournalError), RunDirectory(self.run.run_dir).journals() as journals:
            for journal in journals:
                moved |= {row.turn for row in journal.rows(MoveRow)}
                for frame in journal.frames():
                    for turn, chunk in zip(frame.turns, frame.tokens.chunks, strict=True):
                        if turn:
                            open_on[turn] = frame.worker
                            if chunk.finish:
                                del open_on[turn]
        return moved, open_on


def measure(names: Sequence[str], pace: PlayPace, directory: Path) -> Figures:
    """What came of each client's calls."""
    policy = write_scripted_policy(directory / MODEL)
    members = max(2, sum(CLIENTS[name].trajectories for name in names))
    with AgentsRun(directory, *RUN, f"rollout.group_size={members}", f"model.checkpoint={policy}") as run:
        stage = ClientStage(run, policy)
        players: list[Player] = []
        for name in names:
            client = CLIENTS[name]
            opened = [] if client.opens else [stage.begin()]
            players.append(Player(name, client, directory / f"said-{name}".replace(" ", "-"), opened))
        stage.play(players, pace)
        for player in players:
            for trajectory in player.trajectories():
                stage.end(trajectory, **({} if player.process else {"cause": "nobody plays it"}))
        for _ in range(members - sum(len(player.trajectories()) for player in players)):
            stage.end(stage.begin()["id"], cause="nobody plays it")
        run.wait()
    return dict(zip(names, checked(RunDirectory(run.run_dir), players, Tokenizer(policy)), strict=True))


def checked(run: RunDirectory, players: Sequence[Player], tokenizer: Tokenizer) -> Iterator[Figures]:
    answers, rows = played(run).answers, trajectories(run)
    with run.journals() as journals:
        moved = {row.turn for journal in journals for row in journal.rows(MoveRow)}
    for player in players:
        if player.process is None:
            yield {"calls": None, "passed": None, "skipped_because": NO_TIME}
            continue
        mine = set(player.trajectories().values())
        own = {turn: answer for turn, answer in answers.items() if parse_turn(turn)[0] in mine}
        whole = {name: {one.ids for one in trained(rows[name])} for name in mine if name in rows}
        calls, wrong = player.calls(), list(player.wrong)
        left = dict(own)
        faults = [(call["what"], fault(call, left, whole, tokenizer)) for call in calls]
        wrong += [f"{what}: {why}" for what, why in faults if why]
        made = len(calls) + len(player.wrong)
        yield {
            "calls": made,
            "passed": made - len(wrong),
            "kills": player.strikes,
            "moved": len(moved & set(own)),
            "wrong": wrong,
            "skipped_because": None,
        }


def fault(
    call: Mapping[str, Any],
    left: dict[TurnId, Sampling],
    whole: Mapping[TrajectoryId, set[tuple[int, ...]]],
    tokenizer: Tokenizer,
) -> str:
    """Why a call does not pass; empty if it does. `left` are the turns that no call has had yet."""
    if call["missing"]:
        return f"not as the client's schema has it: {', '.join(call['missing'])}"
    if call["ids"] is None and call["text"] is None and call["tool"] is None:
        return ""
    named = TURN.search(call["id"] or "")
    turns = [TurnId(f"{parse_agent_id(named[1])}/{named[2]}")] if named else list(left)
    for turn in turns:
        if turn in left and same(call, left[turn], tokenizer):
            ids = left.pop(turn).ids
            return "" if ids in whole.get(parse_turn(turn)[0], ()) else f"{turn} was not trained as it is journaled"
    return f"no turn of the journal that is left ({', '.join(left)}) has what the client got: {call}"


def same(call: Mapping[str, Any], answer: Sampling, tokenizer: Tokenizer) -> bool:
    """Whether a client has got this answer, as far as it shows what it got."""
    text = tokenizer.decode(answer.ids)
    if call["ids"] is not None and tuple(call["ids"]) != answer.ids:
        return False
    if call["text"] is not None and call["text"].strip() != text.strip():
        return False
    if call["tool"] is not None:
        name, arguments = call["tool"]
        found = re.fullmatch(r"\s*<tool_call>(.*)</tool_call>\s*", text, re.DOTALL)
        return found is not None and json.loads(found[1]) == {"name": name, "arguments": arguments}
    return bool(answer.ids)


def main(arguments: Arguments) -> Figures:
    chosen = arguments.client or list(CLIENTS)
    missing = {name: why for name in chosen if (why := install(name) if arguments.install else why_missing(name))}
    there = [name for name in chosen if name not in missing]
    found: Figures = {}
    if there:
        found = measure(there, QUICK if arguments.quick else FULL, arguments.scratch)
    skipped = {name: {"calls": None, "passed": None, "skipped_because": why} for name, why in missing.items()}
    return {name: {**found, **skipped}[name] for name in chosen}


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--install", action="store_true", help="make the environments that are not there"),
        option("--client", action="append", default=[], choices=list(CLIENTS), help="only this one; repeats"),
    )
