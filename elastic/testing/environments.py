"""What the conformance suite of environments needs: a run and a policy that stand in, and the kinds under test.

A stand-in run gives trajectories to a real env worker over a run's socket, serves a policy whose answers are told
beforehand, and keeps what it hears. What an answer says is what users' code then does (`elastic.testing.misbehaviour`).
"""

import asyncio
import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from elastic.environments.run_link import KEY_VARIABLE
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.protocol import front_messages as m
from elastic.protocol.connection import ConnectionLost, over_socket
from elastic.protocol.http_server import serving
from elastic.protocol.run_connection import PeerConnection
from elastic.protocol.run_control import private_socket
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.sampled import pack_ids
from elastic.protocol.sockets import listening_socket

MODEL = "tiny"
SECRETS = RunSecrets(b"stand-in".ljust(32))
DRIVER_KEY = SECRETS.driver_key("stand_in")
BODY_BYTES_MAX = 4 * 1024 * 1024
"""The most bytes of a call: the stand-in refuses more, as fronts do beyond a limit of theirs."""
LINE_CHARACTERS = 20_000
WORDS = 256
"""The vocabulary of token-level environments under test: bytes."""

_AnsweredEpisodes: TypeAlias = dict[int, "asyncio.Future[m.EpisodeAnswered | m.EpisodeFailed]"]
"""By number, what answers the last order."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentUnderTest:
    """A kind whose users' code calls `behave` with what the policy has answered, and returns what that returns.

    `write` puts that code, and rows where the kind has any, in a folder, and returns the keys of `[environment]`; where
    `big`, its tasks have `BIG_CHARACTERS`. `python` is the interpreter that has its package.
    """

    name: str
    write: Callable[[Path, bool], Mapping[str, Any]]
    python: Path = Path(sys.executable)
    label: str = ""
    token_level: bool = False
    """Whether it is one that speaks token ids: those of a text are its bytes. At `truncate` it is not done."""

    def __str__(self) -> str:
        return self.label or self.name


@dataclass
class Heard:
    """What an env worker has said of a trajectory."""

    said: str
    """The policy's answer in it, after it has called a tool if it has one to call."""
    cut: bool = False
    tool: tuple[str, str] | None = None
    """The name and the arguments of the tool that its first answer calls."""
    refuses_reward: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the policy was asked."""
    rewards: list[float] = field(default_factory=list)
    ended: m.EndTrajectory | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def cause(self) -> str:
        assert self.ended is not None
        return self.ended.cause


class StandInRun:
    """A run in `directory`, whose policy's tokenizer is in `checkpoint`. Times are the loop's."""

    def __init__(self, directory: Path, checkpoint: Path, environment: Mapping[str, Any]) -> None:
        self.directory = directory
        self.heard_s = 0.0
        """When the env worker said anything last."""
        self.connections = 0
        self.unusable = ""
        """Why the env worker cannot play, as it has said."""
        self.prompts: dict[str, list[Any]] = {}
        """By trajectory: what its calls had as prompts."""
        self.tools: dict[str, Any] = {}
        """By trajectory: the tools that its last call had."""
        self.sampled: dict[str, list[list[int]]] = {}
        """By trajectory: the tokens of the policy's answers, where calls asked for tokens."""
        self._tokenizer = Tokenizer(checkpoint)
        self._trajectories: dict[str, Heard] = {}
        self._due: asyncio.Queue[str] = asyncio.Queue()
        self._sessions: dict[str, str] = {}
        self._url = ""
        self._waiting: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []
        directory.mkdir(parents=True)
        sections = {
            "run": {"name": "stand-in", "seed": 7},
            "model": {"checkpoint": str(checkpoint)},
            "front": {"model_name": MODEL},
            "environment": environment,
        }
        (directory / "config.json").write_text(json.dumps(sections))

    def play(self, said: str, **more: Any) -> Heard:
        """Have another trajectory played, in which the policy gives this answer. All are of different groups."""
        heard = Heard(said, **more)
        name = f"{len(self._trajectories)}/0/0"
        self._trajectories[name] = heard
        self._due.put_nowait(name)
        return heard

    def again(self, heard: Heard) -> None:
        """Have a trajectory played once more."""
        self._due.put_nowait(next(name for name, one in self._trajectories.items() if one is heard))

    def named(self, heard: Heard) -> str:
        return next(name for name, one in self._trajectories.items() if one is heard)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """A context. Raises `AssertionError` at its end for what no env worker may say."""
        door = private_socket(self.directory, m.SOCKET)
        door.listen(8)
        door.setblocking(False)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self._serve(scope, receive, send)

        async with serving(app, listening_socket("127.0.0.1", 0, 64)) as url:
            self._url = f"{url}/v1"
            self._spawn(self._accept(door))
            try:
                yield
            finally:
                for task in self._waiting:
                    task.cancel()
                await asyncio.gather(*self._waiting, return_exceptions=True)
                door.close()
            if self._errors:
                raise self._errors[0]

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._waiting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)

    async def _accept(self, door: Any) -> None:
        while True:
            end, _ = await asyncio.get_running_loop().sock_accept(door)
            end.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_recv(end, 1)
                connection = await over_socket(end, m.RUN_SIDE, "an env worker")
            except BaseException:
                end.close()
                raise
            self._spawn(self._talk(connection))

    async def _talk(self, connection: PeerConnection) -> None:
        self.connections += 1
        episodes: _AnsweredEpisodes = {}
        with contextlib.ExitStack() as over:
            over.callback(connection.abort)
            over.enter_context(contextlib.suppress(ConnectionLost))
            hello = await connection.receive()
            assert isinstance(hello, m.DriverHello)
            assert hello.key == DRIVER_KEY
            connection.send(m.FrontWelcome(m.FRONT_VERSION, "stand-in"))
            while True:
                message = await connection.receive()
                self.heard_s = asyncio.get_running_loop().time()
                if isinstance(message, m.BeginTrajectory):
                    self._spawn(self._give(connection, message.request))
                elif isinstance(message, m.EnvironmentUnusable):
                    self.unusable = message.cause
                    return
                elif isinstance(message, m.EpisodesHosted):
                    self._spawn(self._give_episodes(connection, episodes))
                elif isinstance(message, m.EpisodeAnswered | m.EpisodeFailed):
                    episodes[message.episode].set_result(message)
                elif not isinstance(message, m.DriverBeat):
                    connection.send(self._answer(message))

    async def _give(self, connection: PeerConnection, request: int) -> None:
        """Nobody else is given what was due to an env worker that is gone."""
        name = await self._due.get()
        number = int(name.partition("/")[0])
        if connection.open:
            begun = m.TrajectoryBegun(
                request, name, number=number, place=number, key=SECRETS.agent_key(name, 0), base_url=self._url
            )
            connection.send(begun)
        else:
            self._due.put_nowait(name)

    async def _give_episodes(self, connection: PeerConnection, episodes: "_AnsweredEpisodes") -> None:
        while connection.open:
            name = await self._due.get()
            if connection.open:
                episodes[len(episodes)] = asyncio.get_running_loop().create_future()
                self._spawn(self._play_episode(connection, episodes, len(episodes) - 1, self._trajectories[name]))
            else:
                self._due.put_nowait(name)

    async def _play_episode(
        self, connection: PeerConnection, episodes: "_AnsweredEpisodes", number: int, heard: Heard
    ) -> None:
        """Its only turn is what the policy says."""

        async def asked(order: m.ResetEpisode | m.StepEpisode | m.TruncateEpisode) -> m.EpisodeAnswered | None:
            answered = episodes[number] = asyncio.get_running_loop().create_future()
            connection.send(order)
            answer = await answered
            if isinstance(answer, m.EpisodeFailed):
                heard.ended = m.EndTrajectory(0, m.AgentCaller(), answer.cause)
            return None if isinstance(answer, m.EpisodeFailed) else answer

        answer = await asked(m.ResetEpisode(number, number, WORDS))
        if answer is not None:
            heard.asked.set()
            answer = await asked(m.StepEpisode(number, pack_ids(list(heard.said.encode()))))
        if answer is not None and not answer.done:
            answer = await asked(m.TruncateEpisode(number))
        if answer is not None:
            heard.rewards.append(answer.reward)
            heard.ended = m.EndTrajectory(0, m.AgentCaller(), truncated=heard.cut)
        connection.send(m.CloseEpisode(number))
        heard.over.set()

    def _answer(self, message: m.FromFront) -> m.FromRun:
        match message:
            case m.BindSession():
                name = self._of(message.caller)
                self._sessions[message.session] = name
            case m.GiveReward():
                name = self._of(message.caller)
                if self._trajectories[name].refuses_reward:
                    return m.Declined(message.request, 409, "reward_given", "the trajectory has the reward 0.5")
                self._trajectories[name].rewards.append(message.reward)
            case m.EndTrajectory():
                name = self._of(message.caller)
                assert self._trajectories[name].ended is None, "it was ended before"
                self._trajectories[name].ended = message
                self._trajectories[name].over.set()
            case _:
                raise AssertionError(f"{message} is nothing that an env worker says")
        status = m.TrajectoryStatus(trajectory=name, group=name, state="open", turns=0, tokens=0, branches=0)
        return m.TrajectoryShown(message.request, status)

    def _of(self, caller: m.AgentCaller) -> str:
        return caller.named.replace("-", "/")

    # The policy

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            part = await receive()
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        status, answer = self._answered(scope, body)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _answered(self, scope: Any, body: bytes) -> tuple[int, Any]:
        route = scope["path"]
        if route.endswith("/models"):
            card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "elastic", "max_model_len": 8192}
            return 200, {"object": "list", "data": [card]}
        name = self._asking({key.decode(): value.decode() for key, value in scope["headers"]})
        if name is None:
            return 404, _error("trajectory_not_found", "no trajectory or session has this name")
        if len(body) > BODY_BYTES_MAX:
            return 413, _error("too_large", f"the body has more than {BODY_BYTES_MAX} bytes")
        asked, heard = json.loads(body), self._trajectories[name]
        heard.asked.set()
        self.prompts.setdefault(name, []).append(asked.get("messages", asked.get("token_ids")))
        self.tools[name] = asked.get("tools", [])
        reason = "length" if heard.cut else "stop"
        if route.endswith("/chat/completions"):
            calls = heard.tool if len(self.prompts[name]) == 1 else None
            return 200, _completion(heard.said, reason) if calls is None else _calling(*calls)
        if route.endswith("/inference/v1/generate"):
            ids = self._tokenizer.encode(heard.said)
            ids += [] if heard.cut else [min(self._tokenizer.eos_token_ids)]
            self.sampled.setdefault(name, []).append(ids)
            return 200, _generated(ids, reason)
        return 404, _error("not_found", f"nothing is at {route}")

    def _asking(self, headers: Mapping[str, str]) -> str | None:
        """The trajectory that a call is of: by its own key, or by a session of the driver's."""
        key = headers.get("authorization", "").removeprefix("Bearer ")
        caller = SECRETS.caller_of(key)
        if caller is not None and caller.trajectory:
            return caller.trajectory
        if DRIVER_KEY not in (key, headers.get("x-api-key")):
            return None
        session = headers.get("x-session-id", "")
        named = session.replace("-", "/")
        return self._sessions.get(session) or (named if named in self._trajectories else None)


class EnvWorkerUnderTest:
    """An env worker's process."""

    def __init__(self, run: StandInRun, under_test: EnvironmentUnderTest, extra: Sequence[Path] = ()) -> None:
        self.log = run.directory / "worker.log"
        command = [str(under_test.python), "-m", "elastic.cli", "env-worker", str(run.directory)]
        command += ["--environment", under_test.name]
        places = os.pathsep.join(map(str, (run.directory.parent, *extra)))
        environment = {**os.environ, KEY_VARIABLE: DRIVER_KEY, "PYTHONPATH": places}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    async def ended(self) -> int:
        """Wait for its end, and for its last words; returns its status."""
        status = await asyncio.to_thread(self._process.wait)
        with self.log.open("rb") as log:
            await asyncio.to_thread(fcntl.flock, log, fcntl.LOCK_SH)
        return status

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def words(self) -> str:
        """What it has said, but for lines that are too long to be read."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if len(line) < LINE_CHARACTERS)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def _calling(name: str, arguments: str) -> dict[str, Any]:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    answer = _completion("", "tool_calls")
    answer["choices"][0]["message"]["tool_calls"] = [call]
    return answer


def _completion(said: str, reason: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": said}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
    }


def _generated(ids: Sequence[int], reason: str) -> dict[str, Any]:
    content = [{"token": f"token_id:{one}", "token_id": one, "logprob": -1.0, "top_logprobs": []} for one in ids]
    choice = {"index": 0, "token_ids": list(ids), "finish_reason": reason, "logprobs": {"content": content}}
    return {"request_id": "generate-tokens-0", "model": MODEL, "output_mode": "tokens", "choices": [choice]}
