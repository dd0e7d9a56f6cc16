"""Renderers of the `renderers` library, an optional extra: models that it knows by their published names.

A bridge of the library's goes on behind what was sampled, or declines. Control tokens in agents' texts stay text here
too: the library gets texts in which they are broken by a mark, and its tokenizer takes the mark out.

Answers of the families that are known here are read by our own parsers, so that calls and reasoning stream. The
library's parsers read the others, at their end.
"""

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic.front.rendering.messages import AnyMessage, Tools, arguments_of, head_digest
from elastic.front.rendering.parsing import call_id
from elastic.front.rendering.reading import AnswerParsers, AnswerReader, Decoding, call_seed
from elastic.front.rendering.templates import Guards, RendererError, RenderingError, plain_messages
from elastic.front.rendering.tokenizer import ControlTextError, Tokenizer
from elastic.front.rendering.tool_grammars import call_of
from elastic.protocol.front_messages import ALL_IDS
from elastic.protocol.openai.answers import CallDelta, ParsedAnswer

OF_NO_MODEL = ("auto", "default", "custom")
PARSERS: Mapping[str, tuple[str, str]] = {
    "deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3"),
    "deepseek-v4": ("deepseek_v4", "deepseek_v4"),
    "glm-4.5": ("glm45", "glm45"),
    "glm-5": ("glm47", "glm47"),
    "glm-5.1": ("glm47", "glm47"),
    "glm-5.3": ("glm47", "glm47"),
    "gpt-oss": ("openai", "openai_gptoss"),
    "llama-3": ("llama3_json", ""),
    "prime-qwen3": ("qwen3_coder", "qwen3"),
    "qwen3": ("hermes", "qwen3"),
    "qwen3-vl": ("hermes", "qwen3"),
    "qwen3.5": ("qwen3_coder", "qwen3"),
    "qwen3.6": ("qwen3_coder", "qwen3"),
    "qwen3.8": ("qwen3_coder", "qwen3"),
}
"""Our parsers of tools' calls and of reasoning, by the library's names of the renderers whose answers they read."""
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


def parsers_of(tokenizer: Tokenizer, renderer: str, tool_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """The parsers of tools' calls and of reasoning for a checkpoint: those that are named. Where none is, those that go
    with the renderer, or for `auto` with the published model that the checkpoint says to be."""
    if tool_parser or reasoning_parser:
        return tool_parser, reasoning_parser
    return PARSERS.get(name_for(tokenizer.hub_name) if renderer == "auto" else renderer, ("", ""))


class LibraryRenderer:
    ids_before = ALL_IDS

    def __init__(self, tokenizer: Tokenizer, name: str, tool_parser: str = "", reasoning_parser: str = "") -> None:
        """Parsers that are named are used instead of those that go with the renderer. Raises `RendererError` if the
        renderer does not go with the tokenizer."""
        self._tokenizer = tokenizer
        self._parsers = AnswerParsers(tokenizer, *parsers_of(tokenizer, name, tool_parser, reasoning_parser))
        self._name = name
        self._guards = Guards(tokenizer)
        self._tokens = _LibraryTokenizer(tokenizer)
        named = self._parsers.named
        self.unread = "" if self._parsers.reads_calls or not named else "front.tool_parser names nobody who reads calls"
        self._made: dict[bytes, Any] = {}
        try:
            self._plain = self._renderer({})
        except Exception as error:  # whatever a renderer of the library's misses in a tokenizer
            raise RendererError(f"front.renderer: {name!r} does not go with {tokenizer.directory}: {error}") from error
        self.stop_token_ids = tuple(dict.fromkeys((*tokenizer.eos_token_ids, *self._plain.get_stop_token_ids())))
        self._check_text()

    @property
    def reads_reasoning(self) -> bool:
        return self._parsers.reads_reasoning or not self._parsers.named

    def prompt(
        self,
        messages: Sequence[AnyMessage],
        tools: Tools | None,
        template_kwargs: Mapping[str, Any],
    ) -> list[int]:
        return self._rendered(messages, tools, template_kwargs, generation=True)

    def answered(
        self,
        messages: Sequence[AnyMessage],
        tools: Tools | None,
        template_kwargs: Mapping[str, Any],
    ) -> list[int]:
        return self._rendered(messages, tools, template_kwargs, generation=False)

    def _rendered(self, messages: Sequence[AnyMessage], tools: Any, kwargs: Any, generation: bool) -> list[int]:
        mark, guarded = self._guards.guarded(plain_messages(messages), tools, kwargs)

        def render() -> list[int]:
            renderer = self._renderer(guarded.kwargs)
            return renderer.render_ids(guarded.messages, tools=guarded.tools, add_generation_prompt=generation)

        with self._tokens.without(mark):
            return list(self._asked(render))

    def more(
        self,
        messages: Sequence[AnyMessage],
        matched: int,
        tools: Tools | None,
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
        tools: Tools | None,
        turn: str = "",
        text: str | None = None,
    ) -> ParsedAnswer:
        if text is not None:
            return self._parsers.parser(prompt_ids, tools, turn).whole(text)
        return self.reader(prompt_ids, tools, turn).whole(token_ids)

    def parsed(self, token_ids: Sequence[int], prompt_ids: Sequence[int] | None, tools: Any, turn: str) -> ParsedAnswer:
        """What the library's own parser makes of a whole answer. One that it fails on is its text."""
        try:
            parsed = self._plain.parse_response(
                list(token_ids),
                tools=list(tools or ()) or None,
                prompt_ids=None if prompt_ids is None else list(prompt_ids),
            )
        except Exception:  # whatever a model writes
            return ParsedAnswer(self._tokenizer.decode(token_ids))
        return _answered(parsed, tools, call_seed(turn, prompt_ids))

    def reader(self, prompt_ids: Sequence[int] | None, tools: Tools | None, turn: str = "") -> AnswerReader:
        if self._parsers.named:
            return self._parsers.reader(prompt_ids, tools, turn)
        decoder = _Gathering(self._tokenizer.decoder(special=True))
        return AnswerReader(
            decoder, _AtItsEnd(decoder.ids, self._tokenizer, lambda ids: self.parsed(ids, prompt_ids, tools, turn))
        )

    def plain(self, calls_tools: bool) -> bool:
        return self._parsers.named and self._parsers.plain(calls_tools)

    def _check_text(self) -> None:
        """Raises `RendererError` for a renderer that has a tokenizer of its own: it would take our marks for text."""
        text = " ".join(self._tokenizer.control.values())
        try:
            shown = self._tokenizer.decode(self.prompt([{"role": "user", "content": text}], None, {}), special=True)
        except RenderingError as error:
            raise RendererError(f"front.renderer: {self._name!r} renders no text of a user: {error}") from error
        if text not in shown:
            raise RendererError(f"front.renderer: {self._name!r} does not render texts by the checkpoint's tokenizer")

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


class _Gathering:
    """The text of tokens, and the tokens."""

    def __init__(self, decoder: Decoding) -> None:
        self._decoder = decoder
        self.ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        self.ids += ids
        return self._decoder.feed(ids)

    def finish(self) -> str:
        return self._decoder.finish()


class _AtItsEnd:
    """For parsers that read tokens, once there are all of them. Of an answer that ends within a token, at a stop
    string, they read the tokens that are whole; the rest is content."""

    def __init__(
        self, ids: Sequence[int], tokenizer: Tokenizer, parse: Callable[[Sequence[int]], ParsedAnswer]
    ) -> None:
        self._ids = ids
        self._tokenizer = tokenizer
        self._parse = parse
        self._text: list[str] = []

    def feed(self, text: str) -> ParsedAnswer:
        self._text.append(text)
        return ParsedAnswer()

    def finish(self) -> ParsedAnswer:
        text, ids = "".join(self._text), list(self._ids)
        while not text.startswith(said := self._tokenizer.decode(ids, special=True)):
            ids.pop()
        return self._parse(ids).plus(ParsedAnswer(text[len(said) :]))


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
        call = ("", "")
        if tools and str(attempt.status) == "ok":
            given = attempt.arguments
            given = arguments_of(given) if isinstance(given, str) else given or {}
            call = call_of({"name": attempt.name, "arguments": given})
        if not call[0]:
            content.append(attempt.raw)
        else:
            calls.append(CallDelta(len(calls), attempt.id or call_id(seed, len(calls)), *call))
    return ParsedAnswer("\n".join(filter(None, content)), parsed.reasoning_content or "", tuple(calls))


def _library(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
