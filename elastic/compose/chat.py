"""What answers `elastic chat`: a run's spare credit by its fronts, or an engine here with the run's last checkpoint."""

import itertools
import json
import queue
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import httpx

from elastic.compose.agents import stop_token_ids
from elastic.compose.checkpoints import checkpoints, policy_of
from elastic.compose.plan import read_model_config
from elastic.config import Config, ConfigError, FrontConfig
from elastic.core.types import TURN_ENDS, SamplingParameters, WeightMode
from elastic.engine import create_engine
from elastic.engine.base import GenerateRequest, RolloutEngine, TokenChunk
from elastic.front.asked import ServedModel
from elastic.front.choices import Choice
from elastic.protocol.http_clients import sync_client
from elastic.protocol.openai.answers import ParsedAnswer
from elastic.protocol.proxies import through
from elastic.protocol.tls import own_authority
from elastic.weights.source import TensorSource

CONNECT_S = 10.0
SILENCE_S = 300.0
"""A run that says nothing for so long is gone: well above what `front.hold_s` is, within which it refuses what it has
not begun to answer. An answer that has begun says something every 20 s."""

Message = Mapping[str, Any]
Told = Callable[[str], None]


class ChatFailed(Exception):
    """There is no answer; the message says why."""


class ChatRefused(ChatFailed):
    """What is asked cannot be answered."""


class ChatSettings(NamedTuple):
    """Settings of an answer; None leaves the choice to the side that answers."""

    max_tokens: int | None = None
    temperature: float | None = None


class ChatPiece(NamedTuple):
    """What comes next of an answer; its last piece alone has a `finish`, and how many tokens there were."""

    content: str = ""
    reasoning: str = ""
    finish: str = ""
    prompt_tokens: int = 0
    tokens: int = 0


class Answerer(Protocol):
    """Answers chats. Closing an answer's iterator stops the answer."""

    version: int | None
    """The version of the weights, where it is known."""

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Iterator[ChatPiece]:
        """Raises `ChatFailed`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class SpareCreditAnswers:
    """Has the run's fronts at `base_url` answer, for a viewer's `key`. `authority` is a file with what their
    certificate was issued by, if clients do not know that."""

    version: int | None = None

    def __init__(self, base_url: str, key: str, authority: Path | None = None, silence_s: float = SILENCE_S) -> None:
        """Raises `HttpSettingsError`."""
        self._url = f"{base_url}/chat/completions"
        self._client = sync_client(
            base_url,
            by_proxy=True,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
            **({} if authority is None else {"verify": _trusting(authority)}),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Iterator[ChatPiece]:
        body: dict[str, Any] = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        body |= {name: value for name, value in settings._asdict().items() if value is not None}
        try:
            with self._client.stream("POST", self._url, json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    refused = ChatRefused if answer.status_code < 500 else ChatFailed
                    raise refused(_error_of(answer.read()) or f"the run answers with status {answer.status_code}")
                yield from _pieces(answer.iter_lines())
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            said = str(error) or type(error).__name__
            raise ChatFailed(f"the run is not reached at {self._url}: {said}{through(self._url)}") from error
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            raise ChatFailed(f"the run is gone, and this answer with it: {said}{through(self._url)}") from error


class EngineAnswers:
    """Answers with an engine in this process, which ends with it."""

    def __init__(self, config: Config, model: ServedModel, engine: RolloutEngine, version: int) -> None:
        self.version: int | None = version
        self._config = config
        self._model = model
        self._engine = engine
        self._chunks: queue.SimpleQueue[TokenChunk] = queue.SimpleQueue()
        self._numbers = itertools.count()
        engine.start(self._sink)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def load(self, source: TensorSource) -> None:
        self._engine.load_version(source, WeightMode.FINISH)

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Iterator[ChatPiece]:
        model, renderer = self._model, self._model.renderer
        try:
            prompt = renderer.prompt(messages, None, {})
        except ValueError as error:
            raise ChatRefused(str(error)) from error
        room = model.context_tokens - len(prompt)
        if room < 1:
            raise ChatRefused(f"the chat has {len(prompt)} tokens; the context holds {model.context_tokens}")
        ends = {*renderer.stop_token_ids, *stop_token_ids(self._config)}
        front = self._config.front or FrontConfig()  # type: ignore[call-arg]
        most = min(settings.max_tokens or front.chat_tokens_max, room)
        temperature = self._config.rollout.temperature if settings.temperature is None else settings.temperature
        request = GenerateRequest(
            request_id=f"chat/{next(self._numbers)}",
            token_ids=prompt,
            start=0,
            sampling=SamplingParameters(
                max_new_tokens=most,
                noise_seed=secrets.randbits(62),
                stop_token_ids=tuple(sorted(ends)),
                temperature=temperature,
            ),
        )
        reader = None if renderer.plain(False) else renderer.reader(prompt, None)
        choice = Choice(model.tokenizer.decoder(), reader, silent=frozenset(ends))
        self._engine.submit([request])
        try:
            for chunk in self._of(request.request_id):
                said, _ = choice.take(chunk.token_ids, ())
                yield _piece(said)
                if chunk.finish is not None:
                    yield _piece(choice.rest())._replace(
                        finish=chunk.finish, prompt_tokens=len(prompt), tokens=len(choice.ids)
                    )
        finally:
            self._engine.abort([request.request_id])

    def _of(self, request_id: str) -> Iterator[TokenChunk]:
        """The chunks of this answer up to its last; those of former ones are left."""
        while True:
            chunk = self._chunks.get()
            if chunk.request_id != request_id:
                continue
            if chunk.finish not in (None, *TURN_ENDS):
                raise ChatFailed(f"the engine has not ended the answer: {chunk.detail or chunk.finish}")
            yield chunk
            if chunk.finish is not None:
                return

    def _sink(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            self._chunks.put(chunk)


def live_answers(config: Config, run_dir: Path, base_url: str, key: str) -> SpareCreditAnswers:
    """Return what answers for a living run on this machine. Raises `ConfigError`, and `HttpSettingsError`."""
    own = config.run.certificate is None
    front = config.front or FrontConfig()  # type: ignore[call-arg]
    silence_s = max(SILENCE_S, 2 * front.hold_s)
    return SpareCreditAnswers(base_url, key, own_authority(run_dir) if own else None, silence_s)


def checkpoint_answers(config: Config, run_dir: Path, told: Told) -> EngineAnswers:
    """Start an engine here with the last checkpoint of a run that is over; `told` hears what that is at.

    Raises `ConfigError` for a run without a checkpoint, a model that cannot chat, and an engine that cannot start here.
    """
    from elastic.front.process import served_model

    paths = checkpoints(run_dir)
    if not paths:
        every = config.trainer.checkpoint_every_steps
        raise ConfigError(
            f"run {run_dir.name} has no checkpoint: it makes one every {every} steps (trainer.checkpoint_every_steps) "
            "and at its end"
        )
    model = served_model(config, config.front or FrontConfig())  # type: ignore[call-arg]
    try:
        model.renderer.prompt([{"role": "user", "content": "?"}], None, {})
    except ValueError as error:
        raise ConfigError(f"run {run_dir.name}: {error}; `elastic runs trajectories` shows what it does") from error
    told(f"reading {paths[-1].name}")
    import torch

    from elastic.engine.model.stored import CheckpointError, float32_names, stored_tensors

    try:
        float32 = float32_names(stored_tensors(config.model.checkpoint))
        weights = {
            name: tensor.to(torch.float32 if name in float32 else torch.bfloat16).contiguous()
            for name, tensor in policy_of(config, paths[-1])
        }
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    version = int(paths[-1].stem)
    engine = config.engine.model_copy(update={"pacing": None})
    told(f"starting the engine ({engine.kind})")
    try:
        made = create_engine(read_model_config(config), engine)
    except ConfigError:
        raise
    except Exception as error:  # Whatever an engine needs may be missing here.
        raise _cannot_start(engine.kind, error) from error
    answers = EngineAnswers(config, model, made, version)
    try:
        told(f"loading the weights of step {version}")
        answers.load(TensorSource(version, weights))
    except Exception as error:
        made.close()
        raise _cannot_start(engine.kind, error) from error
    except BaseException:
        made.close()
        raise
    return answers


def _cannot_start(kind: str, error: Exception) -> ConfigError:
    said = str(error) or type(error).__name__
    return ConfigError(
        f"engine.kind: {kind!r} cannot start here: {said}; allowed: one that can (--set engine.kind=KIND)"
    )


def _trusting(authority: Path) -> Any:
    import ssl

    context = ssl.create_default_context(cafile=str(authority))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _pieces(lines: Iterator[str]) -> Iterator[ChatPiece]:
    """The pieces of a stream of a chat. Raises `ChatFailed` for one that ends before its answer does."""
    finish, prompt_tokens, tokens = "", 0, 0
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line:
            continue
        if data == "[DONE]":
            yield ChatPiece(finish=finish, prompt_tokens=prompt_tokens, tokens=tokens)
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatFailed(event["error"]["message"])
        if usage := event.get("usage"):
            prompt_tokens, tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event["choices"]:
            delta = choice["delta"]
            finish = choice.get("finish_reason") or finish
            piece = ChatPiece(
                delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
            )
            if piece.content or piece.reasoning:
                yield piece
    raise ChatFailed("the run is gone, and this answer with it")


def _error_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _piece(said: ParsedAnswer | str) -> ChatPiece:
    return ChatPiece(said) if isinstance(said, str) else ChatPiece(said.content, said.reasoning)
