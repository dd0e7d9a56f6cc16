"""Renderers of the `renderers` library, an optional extra: models that it knows by their published names.

A bridge of the library's goes on behind what was sampled, or declines. Control tokens in agents' texts stay text here
too: the library gets texts in which they are broken by a mark, and its tokenizer takes the mark out.
"""

import importlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.front.messages import AnyMessage, arguments_of, head_digest
from elastic.front.parsing import CallDelta, ParsedAnswer, call_id, named_call
from elastic.front.reading import AnswerParsers, AnswerReader, call_seed
from elastic.front.templates import Guards, RendererError, RenderingError, plain_messages
from elastic.front.tokenizer import ControlTextError, Tokenizer
from elastic.protocol.front_messages import ALL_IDS

OF_NO_MODEL = ("auto", "default", "custom")
SETTINGS_MAX = 16
"""Most template settings whose renderers are kept; a renderer keeps what a client has set."""


def names() -> list[str]:
    """The names of the library's renderers; none where it is not installed."""
    configs = _library("renderers.configs")
    return [] if configs is None else sorted(set(configs._CONFIG_BY_NAME) - {*OF_NO_MODEL})


def name_for(hub_name: str) -> str:
    """The renderer of a published model; empty if there is none, or the library is not installed."""
    base = _library("renderers.base") if hub_name else None  # its import is not cheap
    return "" if base is None else base.MODEL_RENDERER_MAP.get(hub_name, "")


class LibraryRenderer:
    ids_before = ALL_IDS

    def __init__(self, tokenizer: Tokenizer, name: str, parsers: AnswerParsers) -> None:
        """Parsers that are named are used instead of the library's. Raises `RendererError` if the renderer does not go
        with the tokenizer."""
        self._tokenizer = tokenizer
        self._parsers = parsers
        self._name = name
        self._guards = Guards(tokenizer)
        self._tokens = _LibraryTokenizer(tokenizer)
        self._made: dict[bytes, Any] = {}
        try:
            self._plain = self._renderer({})
        except Exception as error:  # whatever a renderer of the library's misses in a tokenizer
            raise RendererError(f"front.renderer: {name!r} does not go with {tokenizer.directory}: {error}") from error
        self.stop_token_ids = tuple(dict.fromkeys((*tokenizer.eos_token_ids, *self._plain.get_stop_token_ids())))

    @property
    def reads_calls(self) -> bool:
        return self._parsers.reads_calls or not self._parsers.named

    def prompt(
        self,
        messages: Sequence[AnyMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> list[int]:
        mark, guarded = self._guards.guarded(plain_messages(messages), tools, template_kwargs)
        with self._tokens.without(mark):
            return list(
                self._asked(
                    lambda: self._renderer(guarded.kwargs).render_ids(
                        guarded.messages, tools=guarded.tools, add_generation_prompt=True
                    )
                )
            )

    def more(
        self,
        messages: Sequence[AnyMessage],
        matched: int,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        so_far: Sequence[int],
        answer_tokens: int,
    ) -> list[int] | None:
        if not 0 < matched < len(messages) or messages[matched - 1].get("role") != "assistant":
            return [] if 0 < matched == len(messages) and answer_tokens == 0 else None
        cut = max(len(so_far) - answer_tokens, 0)
        before, answer = list(so_far[:cut]), list(so_far[cut:])
        mark, guarded = self._guards.guarded(plain_messages(messages[matched:]), tools, template_kwargs)
        with self._tokens.without(mark):
            found = self._asked(
                lambda: self._renderer(guarded.kwargs).bridge_to_next_turn(
                    before, answer, guarded.messages, tools=guarded.tools
                )
            )
        whole = None if found is None else list(found.token_ids)
        return whole[len(so_far) :] if whole is not None and whole[: len(so_far)] == [*before, *answer] else None

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        turn: str = "",
        text: str | None = None,
    ) -> ParsedAnswer:
        if self._parsers.named or text is not None:
            if text is not None:
                return self._parsers.parser(prompt_ids, tools, turn).whole(text)
            reader = self._parsers.reader(prompt_ids, tools, turn)
            return reader.feed(token_ids).plus(reader.finish())
        parsed = self._plain.parse_response(
            list(token_ids),
            tools=list(tools or ()) or None,
            prompt_ids=None if prompt_ids is None else list(prompt_ids),
        )
        return _answered(parsed, tools, call_seed(turn, prompt_ids))

    def reader(
        self, prompt_ids: Sequence[int] | None, tools: Sequence[Mapping[str, Any]] | None, turn: str = ""
    ) -> AnswerReader:
        if self._parsers.named:
            return self._parsers.reader(prompt_ids, tools, turn)
        return _WholeReader(self, prompt_ids, tools, turn)

    def plain(self, calls_tools: bool) -> bool:
        return self._parsers.named and self._parsers.plain(calls_tools)

    def _renderer(self, kwargs: Mapping[str, Any]) -> Any:
        key = head_digest(None, kwargs)
        if key not in self._made:
            if len(self._made) >= SETTINGS_MAX:
                self._made.clear()
            base, configs = importlib.import_module("renderers.base"), importlib.import_module("renderers.configs")
            self._made[key] = base.create_renderer(
                self._tokens, configs.config_from_name(self._name), chat_template_kwargs=dict(kwargs) or None
            )
        return self._made[key]

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except ControlTextError as error:
            raise RenderingError(str(error)) from error
        except (
            Exception
        ) as error:  # renderers of the library's fail in their own ways on messages that they do not take
            said = str(error) or type(error).__name__
            raise RenderingError(f"the renderer {self._name!r} does not take these messages: {said}") from error


class _WholeReader:
    """For parsers that read an answer at its end."""

    def __init__(self, renderer: LibraryRenderer, prompt_ids: Sequence[int] | None, tools: Any, turn: str) -> None:
        self._renderer = renderer
        self._given = prompt_ids, tools, turn
        self._ids: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> ParsedAnswer:
        self._ids += token_ids
        return ParsedAnswer()

    def finish(self) -> ParsedAnswer:
        return self._renderer.parse(self._ids, *self._given)


class _Without(threading.local):
    mark = ""


class _LibraryTokenizer:
    """A tokenizer as the library wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._without = _Without()
        self.name_or_path = tokenizer.hub_name
        self.chat_template = tokenizer.template
        self.eos_token_id = next(iter(tokenizer.eos_token_ids), None)
        self.unk_token_id = self._id(tokenizer.named.get("unk_token"))
        self.all_special_tokens = list(tokenizer.special.values())

    def without(self, mark: str) -> "_Marked":
        """Meanwhile, this mark is taken out of texts."""
        return _Marked(self._without, mark)

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._tokenizer.encode_coded(self._tokenizer.coded(text, broken_by=self._without.mark))

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, special=not skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._id(tokens) if isinstance(tokens, str) else [self._id(token) for token in tokens]

    def _id(self, token: str | None) -> int | None:
        found = None if token is None else self._tokenizer.token_id(token)
        return getattr(self, "unk_token_id", None) if found is None else found


class _Marked:
    def __init__(self, without: _Without, mark: str) -> None:
        self._without = without
        self._mark = mark

    def __enter__(self) -> None:
        self._without.mark = self._mark

    def __exit__(self, *_: object) -> None:
        self._without.mark = ""


def _answered(parsed: Any, tools: Any, seed: bytes) -> ParsedAnswer:
    """Attempts at calls that went wrong stay content, and so do all where there are no tools."""
    content, calls = [parsed.content or ""], []
    for attempt in parsed.tool_calls:
        call = None
        if tools and str(attempt.status) == "ok":
            given = attempt.arguments
            call = named_call(attempt.name, arguments_of(given) if isinstance(given, str) else given or {})
        if call is None:
            content.append(attempt.raw)
        else:
            calls.append(CallDelta(len(calls), attempt.id or call_id(seed, len(calls)), *call))
    return ParsedAnswer("\n".join(filter(None, content)), parsed.reasoning_content or "", tuple(calls))


def _library(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
