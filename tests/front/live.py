"""A live run that agents drive, with its fronts and workers as processes, and an agent that repeats what breaks."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

REPEAT_S = 0.1
BUSY = (429, 503)


class Answer(NamedTuple):
    """A whole answer; `torn` are the ends of the streams that broke before it."""

    turn: str
    text: str
    ids: list[int]
    logprobs: list[float]
    torn: list[Exception]


class Agent:
    """Plays one trajectory: its messages are a conversation, to which each whole answer is added."""

    def __init__(self, client: httpx.AsyncClient, id: str, key: str, **body: Any) -> None:
        self.client, self.id, self.key = client, id, key
        self.messages: list[dict[str, Any]] = []
        self.port: int | None = None
        """Of the connection on which a stream comes."""
        self._body = {"logprobs": True, "return_token_ids": True, "ignore_eos": True, **body}

    @classmethod
    async def begin(cls, client: httpx.AsyncClient, driver_key: str, group: str, **body: Any) -> "Agent":
        begun = await repeated(
            lambda: client.post("/trajectories", json={"task": {}, "group": group}, headers=bearer(driver_key))
        )
        return cls(client, begun["id"], begun["key"], **body)

    async def say(self, text: str, *, stream: bool) -> Answer:
        """The whole answer to another message; a call that breaks is made again."""
        self.messages.append({"role": "user", "content": text})
        torn: list[Exception] = []
        while True:
            try:
                answer = await (self._streamed if stream else self._whole)()
                break
            except httpx.TransportError as error:
                torn.append(error)
            except Busy:
                pass
            await asyncio.sleep(REPEAT_S)
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer._replace(torn=torn)

    async def told(self, what: str, **body: Any) -> dict[str, Any]:
        return await repeated(
            lambda: self.client.post(f"/trajectories/{self.id}/{what}", json=body, headers=bearer(self.key))
        )

    async def _whole(self) -> Answer:
        said = await self.client.post(
            "/v1/chat/completions", json={**self._body, "messages": self.messages}, headers=bearer(self.key)
        )
        answer = checked(said.status_code, said.text)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return Answer(turn_of(answer), choice["message"]["content"], choice["token_ids"], logprobs, [])

    async def _streamed(self) -> Answer:
        body = {**self._body, "messages": self.messages, "stream": True}
        text, ids, logprobs, finish, last = "", list[int](), list[float](), None, ""
        answer: dict[str, Any] = {}
        self.port = None
        async with self.client.stream("POST", "/v1/chat/completions", json=body, headers=bearer(self.key)) as stream:
            if stream.status_code != 200:
                checked(stream.status_code, (await stream.aread()).decode())
            async for line in stream.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if (last := line.removeprefix("data: ")) == "[DONE]":
                    break
                answer = json.loads(last)
                assert "error" not in answer, answer
                (choice,) = answer["choices"]
                text += choice["delta"].get("content") or ""
                ids += choice["token_ids"]
                logprobs += [token["logprob"] for token in choice["logprobs"]["content"]]
                finish = choice["finish_reason"]
                self.port = stream.extensions["network_stream"].get_extra_info("client_addr")[1]
        assert finish in ("stop", "length"), "a stream has ended cleanly before its answer did"
        assert last == "[DONE]"
        return Answer(turn_of(answer), text, ids, logprobs, [])


class Busy(Exception):
    """The run can say nothing now: the client is to come back."""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def turn_of(answer: dict[str, Any]) -> str:
    return answer["id"].removeprefix("chatcmpl-").replace("-", "/")


def checked(status: int, text: str) -> dict[str, Any]:
    if status in BUSY:
        raise Busy(text)
    assert status == 200, (status, text)
    return json.loads(text)


async def repeated(post: Callable[[], Any]) -> dict[str, Any]:
    """The answer to a call that is made again until there is one."""
    while True:
        with contextlib.suppress(httpx.TransportError, Busy):
            said = await post()
            return checked(said.status_code, said.text)
        await asyncio.sleep(REPEAT_S)
