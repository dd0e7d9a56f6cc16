"""A front under test, served over a real socket, with a modelled run at the other end of its link."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from elastic.front.app import AgentFront
from elastic.front.asked import ServedModel
from elastic.front.calls import CallTimes
from elastic.front.link import RunLink
from elastic.front.upstream import Upstream
from elastic.protocol.http_server import PeerLimits, serving
from elastic.protocol.run_connection import connected
from elastic.protocol.run_secrets import RunSecrets
from tests.front.modelled_run import TRAJECTORY, ModelledRun, Turn
from tests.front.small_model import EOS, small_model

SECRETS = RunSecrets(b"s" * 32)
AGENT = SECRETS.agent_key(TRAJECTORY, 1)
DRIVER = SECRETS.driver_key("tests")
HELLO = [{"role": "user", "content": "hello"}]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Served:
    """`run` is the modelled run, `client` shows the trajectory's key."""

    def __init__(self, run: ModelledRun, link: RunLink, front: AgentFront, url: str) -> None:
        self.run, self.link, self.front, self.url = run, link, front, url
        self.client = httpx.AsyncClient(base_url=url, headers=bearer(AGENT), timeout=30, trust_env=False, verify=False)

    async def chat(self, messages: Any = HELLO, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={"messages": messages, **body})

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    @contextlib.asynccontextmanager
    async def streamed(
        self, path: str = "/v1/chat/completions", headers: Any = None, **body: Any
    ) -> AsyncIterator[AsyncIterator[dict[str, Any] | str]]:
        """The events of a stream, `[DONE]` as it is."""
        body = {"stream": True, **({"messages": HELLO} if "chat" in path else {}), **body}
        async with self.client.stream("POST", path, json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield events(answer)

    async def until(self, condition) -> None:
        await self.run.until(condition)


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any] | str]:
    rest = ""
    async for text in answer.aiter_text():
        *whole, rest = (rest + text).split("\n\n")
        for event in whole:
            if event.startswith(":"):
                continue
            assert event.startswith("data: ")
            data = event.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
    assert rest == ""


def merged(chunks: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that chunks of a chat add up to, each as a whole answer has it, but for what is told of tokens."""
    choices: dict[int, dict[str, Any]] = {}
    for piece in (choice for chunk in chunks for choice in chunk["choices"]):
        choice = choices.setdefault(piece["index"], {"message": {}, "finish_reason": None})
        assert choice["finish_reason"] is None
        choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece.get("stop_reason")
        message = choice["message"]
        for name, value in piece["delta"].items():
            if name == "tool_calls":
                calls = message.setdefault(name, [])
                for call in value:
                    if (number := call.pop("index")) == len(calls):
                        assert call["id"]
                        assert call["function"]["name"]
                        calls.append(call)
                    else:
                        assert number == len(calls) - 1
                        assert set(call) == {"function"}
                        calls[number]["function"]["arguments"] += call["function"]["arguments"]
            else:
                message[name] = message.get(name, "") + value
    return choices


def says(text: str, piece: int = 3, finish: str = "stop"):
    """A turn that says this in pieces of so many tokens."""

    async def answer(run: ModelledRun, turn: Turn) -> None:
        ids = [*text.encode(), *([EOS] if finish == "stop" else [])]
        for start in range(0, len(ids), piece):
            run.tokens(turn, ids[start : start + piece])
            await asyncio.sleep(0)
        run.over(turn, finish)

    return answer


@contextlib.asynccontextmanager
async def fronted(
    directory: Path, model: ServedModel | None = None, times: CallTimes | None = None, answer: Any = None, **more: Any
) -> AsyncIterator[Served]:
    run = ModelledRun(directory, answer)
    await run.start()
    listener = socket.create_server(("127.0.0.1", 0))
    link = RunLink(partial(connected, directory, listener))
    linking = asyncio.create_task(link.run())
    with ThreadPoolExecutor(1) as renders:
        front = AgentFront(
            link=link,
            model=model or small_model(),
            secrets=SECRETS,
            base_url="http://agents.example/v1",
            times=times or CallTimes(),
            body_bytes_max=more.get("body_bytes_max", 1 << 20),
            renders=renders,
            upstream=None if (settings := more.get("upstream")) is None else Upstream(settings, link),
        )
        limits = PeerLimits(unread_timeout_s=more.get("unread_timeout_s", 30.0))
        async with serving(front.app(), listener, limits) as url:
            served = Served(run, link, front, url)
            await link.stands()
            try:
                yield served
            finally:
                await served.client.aclose()
                await front.drained(5)
                if front.upstream is not None:
                    await front.upstream.aclose()
                linking.cancel()
                await asyncio.gather(linking, return_exceptions=True)
                await run.stop()
