"""How models write reasoning: a grammar for each of vLLM's `--reasoning-parser` that is known here. Pure.

Blank space around reasoning is no part of anything.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from elastic.front.rendering.incoming import Findings, Grammar, Incoming, Reading, Show, Withheld

THINK, THOUGHT = "<think>", "</think>"

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALLED, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
_HEADER = re.compile(
    rf"({re.escape(START)}\s*assistant|{re.escape(CHANNEL)}\s*\w+|to=[^\s<]+|{re.escape(CONSTRAIN)}\s*\w*|json|\s)*"
)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Situation(NamedTuple):
    """Where an answer begins, and what is looked for in it.

    prompt: the text that ends its prompt; None if that is not known.
    calls: whether calls of tools are looked for.
    call: what these begin with; empty where nothing says so.
    """

    prompt: str | None
    calls: bool = False
    call: str = ""

    @property
    def within(self) -> bool | None:
        """Whether the prompt leaves off within reasoning; None if that is not known."""
        return None if self.prompt is None else ends_in_reasoning(self.prompt)


class ReasoningFormat(NamedTuple):
    """`markers` are tokens that the grammar reads; other special tokens are no text. `reads_calls` says that it reads
    calls of tools, too."""

    grammar: Callable[[Situation], Grammar]
    markers: tuple[str, ...]
    reads_calls: bool = False


def ends_in_reasoning(prompt: str) -> bool:
    """Whether a prompt whose end is this text leaves off within reasoning."""
    return prompt.rfind(THINK) > prompt.rfind(THOUGHT) and not prompt[prompt.rfind(THINK) + len(THINK) :].strip()


def _think(opened: bool | None, call: str = "") -> Grammar:
    """Reasoning up to `</think>`, which may begin with `<think>`.

    opened: whether the answer begins within reasoning; None if that is not known. Then an answer that does not begin
    with `<think>` is held back until `</think>` shows that it began with reasoning.
    call: ends reasoning that nothing else ends.
    """

    def grammar(text: Incoming, found: Findings) -> Reading[None]:
        blank = yield from text.blank()
        if (yield from text.take(THINK)):
            within: bool | None = True
        else:
            within = opened
        if within is None:
            before, closed = yield from text.until(THOUGHT)
            if closed:
                found.reasoning(before.strip())
            else:
                found.content(blank + before)
        elif within:
            yield from text.blank()
            closed = yield from _thought(text, found, call)
        else:
            found.content(blank)
            closed = ""
        if closed:
            yield from text.blank()
        yield from text.show_until(found.content)

    return grammar


def _thought(text: Incoming, found: Findings, call: str) -> Reading[str]:
    """Reasoning up to its end. Returns the marker that has ended it."""
    show = Withheld(found.reasoning)
    marker = yield from text.show_until(show, THOUGHT, *filter(None, (call,)))
    if marker != call or not call:
        return marker
    # A call that was thought of, or one behind reasoning that was not ended.
    rest, closed = yield from text.until(THOUGHT)
    if closed:
        show(call + rest)
    else:
        found.content(call + rest)
    return closed


# Harmony: messages with a header each, in channels.


def _harmony(situation: Situation) -> Grammar:
    """Messages, as gpt-oss writes them: `<|channel|>analysis<|message|>…<|end|><|start|>assistant…`.

    The prompt ends within the first one's header, or behind it. What nobody reads stays content with its header.
    """
    prompt = situation.prompt or ""
    start = prompt[prompt.rfind(START) :] if START in prompt else f"{START}assistant"

    def grammar(text: Incoming, found: Findings) -> Reading[None]:
        head, within, _ = start.partition(MESSAGE)
        said = ""
        while within or not (yield from text.ended()):
            if not within:
                said, marker = yield from text.until(MESSAGE)
                if not marker:
                    found.content(said)
                    return
                head += said
            yield from _message(text, found, head, said and said + MESSAGE, situation.calls)
            head, said, within = "", "", ""

    return grammar


def _message(text: Incoming, found: Findings, head: str, said: str, reads_calls: bool) -> Reading[None]:
    """A message behind its header. `said` is what of that is the answer's own."""
    channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
    kind, name = channel[1] if channel else "", recipient[1] if recipient else ""
    show: Show = found.content
    if not _HEADER.fullmatch(head):
        found.content(said)
    elif name.startswith(FUNCTIONS) and reads_calls:
        blank = yield from text.blank()
        if (yield from text.take("{")):
            text.give_back("{")
            found.call(name.removeprefix(FUNCTIONS))
            show = Withheld(found.arguments)
        else:
            found.content(said + blank)
    elif kind == "analysis":
        yield from text.blank()
        show = Withheld(found.reasoning)
    elif name or kind not in ("final", "commentary"):
        found.content(said)
    if (yield from text.show_until(show, END, CALLED, RETURN, START)) == START:
        text.give_back(START)


def _qwen3(situation: Situation) -> Grammar:
    return _think(situation.within, situation.call)


def _deepseek_r1(situation: Situation) -> Grammar:
    """An answer of R1's begins with reasoning, unless the prompt has closed it."""
    return _think(situation.within is not False)


def _deepseek_v3(situation: Situation) -> Grammar:
    return _think(situation.within)


_TAGS = (THINK, THOUGHT)
HARMONY = ReasoningFormat(_harmony, (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALLED, RETURN), reads_calls=True)

REASONING_PARSERS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(_deepseek_r1, _TAGS),
    "deepseek_v3": ReasoningFormat(_deepseek_v3, _TAGS),
    "deepseek_v4": ReasoningFormat(_deepseek_v3, _TAGS),
    "glm45": ReasoningFormat(_qwen3, _TAGS),
    "glm47": ReasoningFormat(_qwen3, _TAGS),
    "openai_gptoss": HARMONY,
    "qwen3": ReasoningFormat(_qwen3, _TAGS),
}
"""By vLLM's names."""
