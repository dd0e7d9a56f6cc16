"""The process of a front, as a run starts it: on an inherited socket, over several processes of its run."""

import asyncio
import json
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.tiny import EOS, write_tokenizer
from elastic.protocol.front_messages import LookUp, OpenTurns
from elastic.protocol.run_secrets import RunSecrets
from tests.front.fronted import HELLO, bearer, events, merged
from tests.front.modelled_run import TRAJECTORY, ModelledRun, Turn

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, sys
from pathlib import Path
from elastic.system.imports import importing
with importing():
    from elastic.front.process import serve_front
asyncio.run(serve_front(Path(sys.argv[1]), int(sys.argv[2])))
"""


class FrontProcess:
    def __init__(self, run: ModelledRun, tokenizer: Tokenizer, listener: socket.socket) -> None:
        self.run, self.tokenizer, self.listener = run, tokenizer, listener
        self.processes: list[asyncio.subprocess.Process] = []
        key = RunSecrets.of(run.directory).agent_key(TRAJECTORY, 1)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.client = httpx.AsyncClient(base_url=url, headers=bearer(key), timeout=30, trust_env=False, verify=False)

    async def start(self, **options) -> asyncio.subprocess.Process:
        fd = self.listener.fileno()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, str(self.run.directory), str(fd), pass_fds=(fd,), cwd=ROOT, **options
        )
        self.processes.append(process)
        return process

    def say(self, turn: Turn, text: str) -> None:
        self.run.tokens(turn, self.tokenizer.encode(text))

    def end(self, turn: Turn) -> None:
        self.run.tokens(turn, [self.tokenizer.token_id(EOS)])
        self.run.over(turn)


def begins(front: FrontProcess, text: str, ends: bool = False):
    """A turn that says this, and ends then or goes on."""

    async def answer(run: ModelledRun, turn: Turn) -> None:
        front.say(turn, text)
        if ends:
            front.end(turn)

    return answer


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[FrontProcess]:
    checkpoint, directory = tmp_path / "small-chat", tmp_path / "run"
    checkpoint.mkdir()
    directory.mkdir()
    write_tokenizer(checkpoint)
    config = {
        "model": {"checkpoint": str(checkpoint)},
        "environment": {"name": "outside"},
        "front": {"tool_parser": "hermes"},
        "run": {"orchestrator_timeout_s": 4},
    }
    (directory / "config.json").write_text(json.dumps(config))
    run = ModelledRun(directory)
    await run.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        under_test = FrontProcess(run, Tokenizer(checkpoint), listener)
        try:
            yield under_test
        finally:
            await under_test.client.aclose()
            for process in under_test.processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()
            await run.stop()


async def test_it_serves_the_checkpoint_under_its_name_and_outlives_processes_of_its_run(front):
    """A real front with the checkpoint's tokenizer, and a run that goes and comes back."""
    await front.start()
    (listed,) = (await front.client.get("/v1/models")).json()["data"]
    assert (listed["id"], listed["max_model_len"]) == ("small-chat", 448)
    await front.run.until(lambda: front.run.fds)
    front.run.answer = begins(front, "Hello")
    body = {"messages": HELLO, "stream": True}
    async with front.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        seen = events(answer)
        first = await anext(seen)
        await front.run.restart()
        await front.run.until(lambda: len(front.run.of(LookUp)) == 2)
        front.say(front.run.turns[0], ", you!")
        front.end(front.run.turns[0])
        *chunks, done = [first, *[event async for event in seen]]
    assert done == "[DONE]"
    assert merged(chunks)[0]["message"]["content"] == "Hello, you!"
    assert front.run.fds == 2


async def test_tools_are_called_by_the_parser_that_is_named(front):
    """A real front with the checkpoint's tokenizer."""
    await front.start()
    front.run.answer = begins(front, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ends=True)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    answer = await front.client.post("/v1/chat/completions", json={"messages": HELLO, "tools": tools})
    (choice,) = answer.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    messages = [*HELLO, choice["message"], result]
    await front.client.post("/v1/chat/completions", json={"messages": messages, "tools": tools})
    # The second turn stands on the first one's own tokens.
    opened = front.run.of(OpenTurns)[1]
    assert opened.tokens == len(front.run.turns[0].prompt) + len(front.run.turns[0].ids)


async def test_a_signal_lets_calls_in_work_end(front):
    """A real front, which gets a real signal."""
    process = await front.start()
    asking = asyncio.create_task(front.client.post("/v1/chat/completions", json={"messages": HELLO}))
    await front.run.until(lambda: front.run.turns)
    process.send_signal(signal.SIGTERM)
    (turn,) = front.run.turns
    front.say(turn, "Hello!")
    front.end(turn)
    assert (await asking).json()["choices"][0]["message"]["content"] == "Hello!"
    assert await process.wait() == 0


async def test_the_port_outlives_a_front(front):
    """Two real fronts at one port, of which one is killed."""
    first, second = await front.start(), await front.start()
    await front.run.until(lambda: front.run.fds == 2)
    front.run.answer = begins(front, "Hi", ends=True)
    first.kill()
    await first.wait()
    answer = await front.client.post("/v1/chat/completions", json={"messages": HELLO})
    assert answer.json()["choices"][0]["message"]["content"] == "Hi"
    assert second.returncode is None


async def test_it_ends_when_the_run_wants_no_front(front):
    """A real front: it must end by itself."""
    front.run.refusal = "another version"
    process = await front.start()
    assert await process.wait() == 0


async def test_it_ends_when_no_process_is_at_the_run_any_more(front):
    """A real front: it must end by itself."""
    process = await front.start()
    await front.run.until(lambda: front.run.fds)
    await front.run.stop()
    assert await process.wait() == 0


async def test_it_ends_with_the_runs_directory(front):
    """A real front: it must end by itself."""
    process = await front.start()
    await front.run.until(lambda: front.run.fds)
    shutil.rmtree(front.run.directory)
    assert await process.wait() == 0


async def test_a_checkpoint_without_a_tokenizer_is_named(front):
    """A real front, whose last words are read."""
    next(front.tokenizer.directory.glob("tokenizer.json")).unlink()
    process = await front.start(stderr=asyncio.subprocess.PIPE)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert "tokenizer.json" in err.decode()
