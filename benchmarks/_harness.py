"""A harness of agents, as somebody else has it: conversations by OpenAI's client, and all that breaks is asked again.

    python benchmarks/_harness.py '{"client": "openai", "url": …}'

Runs under any interpreter that has httpx, and openai where that is the client; the last line of its standard output is
a JSON list of the calls that it made (`MadeCall`). Each second call is streamed. A stream that breaks is asked for
again, with the idempotency key of the first time. A whole answer is asked for again by the client, as it does by
itself, and by the harness where the client gives up.
"""

import asyncio
import importlib
import json
import random
import sys
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import httpx

T = TypeVar("T")

PAUSE_S = 0.2
TIMEOUT_S = 120.0
CLIENT_RETRIES = 2
"""How often OpenAI's client asks again by itself."""


@dataclass
class HarnessSettings:
    """`groups` trajectories of `members` each are played, `at_once` groups at a time, with `turns` calls each.

    `equal` of these have the body of the call before them, whose answer has been delivered.
    """

    client: str
    url: str
    key: str
    model: str
    groups: list[str]
    members: int
    turns: int
    equal: int = 0
    at_once: int = 2
    seed: int = 0


@dataclass
class MadeCall:
    """A call that came to a whole answer: the turn's name, its tokens, and how many streams were torn before it."""

    turn: str
    ids: list[int]
    streamed: bool
    torn: int = 0
    equal: bool = False


@dataclass
class Said:
    """An answer."""

    id: str
    text: str
    ids: list[int]


class Broken(Exception):
    """The call came to no answer, and may be made again."""


class Torn(Broken):
    """Its stream broke."""


class AgentClient(Protocol):
    async def whole(self, key: str, body: dict[str, Any]) -> Said: ...

    async def streamed(self, key: str, body: dict[str, Any], once: str) -> Said: ...


class OpenAIClient:
    """OpenAI's own, of whichever version is installed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._openai = importlib.import_module("openai")
        # What breaks a stream is one of the transport's errors in openai 2, and one of its own in openai 3.
        self._breaks = (self._openai.APIError, httpx.TransportError)
        self._clients: dict[str, Any] = {}

    def _client(self, key: str) -> Any:
        if key not in self._clients:
            self._clients[key] = self._openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key=key, timeout=TIMEOUT_S)
        return self._clients[key]

    async def whole(self, key: str, body: dict[str, Any]) -> Said:
        try:
            answer = await self._client(key).chat.completions.create(extra_body=own(body), **usual(body))
        except self._openai.APIStatusError as error:
            raise broken(error.status_code, str(error)) from error
        except self._openai.APIConnectionError as error:
            raise Broken(str(error)) from error
        (choice,) = answer.choices
        return finished(Said(answer.id, choice.message.content or "", choice.token_ids), choice.finish_reason)

    async def streamed(self, key: str, body: dict[str, Any], once: str) -> Said:
        said, finish, began = Said("", "", []), None, False
        try:
            chunks = await self._client(key).chat.completions.create(
                stream=True, extra_body=own(body), extra_headers={"Idempotency-Key": once}, **usual(body)
            )
            began = True
            async for chunk in chunks:
                (choice,) = chunk.choices
                said = Said(chunk.id, said.text + (choice.delta.content or ""), said.ids + choice.token_ids)
                finish = choice.finish_reason
        except self._openai.APIStatusError as error:
            raise broken(error.status_code, str(error)) from error
        except self._breaks as error:
            raise (Torn if began else Broken)(str(error)) from error
        return finished(said, finish)


class HttpxClient:
    """Asks again as OpenAI's client does, where that is not installed."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    async def whole(self, key: str, body: dict[str, Any]) -> Said:
        tries = 0
        while True:
            headers = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(tries)}
            try:
                told = await self._client.post("/v1/chat/completions", json=body, headers=headers)
                if told.status_code != 200:
                    raise broken(told.status_code, told.text)
                break
            except (httpx.TransportError, Broken) as error:
                if tries == CLIENT_RETRIES:
                    raise Broken(str(error)) from error
            tries += 1
            await asyncio.sleep(PAUSE_S * 2**tries)
        answer = told.json()
        (choice,) = answer["choices"]
        return finished(Said(answer["id"], choice["message"]["content"], choice["token_ids"]), choice["finish_reason"])

    async def streamed(self, key: str, body: dict[str, Any], once: str) -> Said:
        said, finish, began = Said("", "", []), None, False
        headers = {"authorization": f"Bearer {key}", "idempotency-key": once}
        try:
            async with self._client.stream(
                "POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers
            ) as stream:
                if stream.status_code != 200:
                    raise broken(stream.status_code, (await stream.aread()).decode())
                began = True
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise Torn(chunk["error"]["message"])
                        (choice,) = chunk["choices"]
                        text = said.text + (choice["delta"].get("content") or "")
                        said = Said(chunk["id"], text, said.ids + choice["token_ids"])
                        finish = choice["finish_reason"]
        except httpx.TransportError as error:
            raise (Torn if began else Broken)(str(error)) from error
        return finished(said, finish)


CLIENTS: dict[str, Callable[[str], AgentClient]] = {"openai": OpenAIClient, "httpx": HttpxClient}
OWN = ("return_token_ids", "ignore_eos")
"""Fields of a body that are no parameters of OpenAI's client."""


def own(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in OWN}


def usual(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in OWN}


def broken(status: int, said: str) -> Broken:
    """Raises `RuntimeError` for a status that no repetition helps against."""
    if status < 500 and status not in (408, 409, 429):
        raise RuntimeError(f"{status}: {said}")
    return Broken(said)


def finished(said: Said, finish: str | None) -> Said:
    """Raises `RuntimeError` where an answer was cut, and ended as if it had not been."""
    if finish not in ("stop", "length"):
        raise RuntimeError(f"the answer {said.id} has ended well, with {len(said.ids)} tokens and finish {finish!r}")
    return said


class Harness:
    def __init__(self, settings: HarnessSettings) -> None:
        self.settings = settings
        self.calls: list[MadeCall] = []
        self._client = CLIENTS[settings.client](settings.url)
        self._control = httpx.AsyncClient(base_url=settings.url, timeout=TIMEOUT_S, trust_env=False)
        self._at_once = asyncio.Semaphore(settings.at_once)
        self._rng = random.Random(settings.seed)

    async def play(self) -> list[MadeCall]:
        async with asyncio.TaskGroup() as playing:
            for group in self.settings.groups:
                playing.create_task(self._group(group))
        return self.calls

    async def _group(self, group: str) -> None:
        async with self._at_once, asyncio.TaskGroup() as members:
            for member in range(self.settings.members):
                members.create_task(self._trajectory(group, member))

    async def _trajectory(self, group: str, member: int) -> None:
        settings = self.settings
        begun = await self._told(
            "/trajectories", settings.key, {"task": {"member": member}, "group": group}, uuid.uuid4().hex
        )
        trajectory, key = begun["id"], begun["key"]
        messages: list[dict[str, Any]] = []
        for number in range(settings.turns):
            equal = number >= settings.turns - settings.equal
            if not equal:
                messages.append({"role": "user", "content": f"{group}/{member}: what is {number} + {number}?"})
            said = await self._asked(key, messages, streamed=number % 2 == 1, equal=equal)
            if number + 1 < settings.turns - settings.equal:
                messages.append({"role": "assistant", "content": said.text})
        await self._told(f"/trajectories/{trajectory}/reward", key, {"reward": self._rng.random()})
        await self._told(f"/trajectories/{trajectory}/end", key, {})

    async def _asked(self, key: str, messages: list[dict[str, Any]], *, streamed: bool, equal: bool) -> Said:
        body = {"model": self.settings.model, "messages": messages, "return_token_ids": True, "ignore_eos": True}
        once, torn = uuid.uuid4().hex, 0
        while True:
            try:
                said = await (self._client.streamed(key, body, once) if streamed else self._client.whole(key, body))
                break
            except Torn:
                torn += 1
            except Broken:
                pass
            await asyncio.sleep(PAUSE_S)
        turn = said.id.removeprefix("chatcmpl-").replace("-", "/")
        self.calls.append(MadeCall(turn, said.ids, streamed, torn, equal))
        return said

    async def _told(self, path: str, key: str, body: dict[str, Any], once: str = "") -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}", **({"idempotency-key": once} if once else {})}

        async def told() -> dict[str, Any]:
            try:
                answer = await self._control.post(path, json=body, headers=headers)
            except httpx.TransportError as error:
                raise Broken(str(error)) from error
            if answer.status_code != 200:
                raise broken(answer.status_code, answer.text)
            return answer.json()

        return await again(told)


async def again(call: Callable[[], Awaitable[T]]) -> T:
    """What a call comes to that is made until it comes to something."""
    while True:
        try:
            return await call()
        except Broken:
            await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    calls = asyncio.run(Harness(HarnessSettings(**json.loads(sys.argv[1]))).play())
    print(json.dumps([asdict(call) for call in calls]))
