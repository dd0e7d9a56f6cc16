"""Demonstrations that an environment brings: conversations, as tokens of which the policy's own are known."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from elastic.config import ConfigError
from elastic.environments.frozenlake_demonstrations import Demonstration
from elastic.front.rendering.renderer import TemplateRenderer
from elastic.front.rendering.templates import RenderingError
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.system.named_code import CodeUnusable, load
from elastic.system.plain_values import shown, told

ASSISTANT = "assistant"


def demonstrated(named: str, tokenizer: Path) -> list[Demonstration]:
    """What a function demonstrates, in the tokens of the tokenizer in this directory.

    It returns conversations, each a mapping with `messages`, and `tools` where there are any. Raises `ConfigError`.
    """
    renderer = TemplateRenderer(Tokenizer(tokenizer))
    try:
        given = cast("Iterable[Any]", load(named)())
        found = [_tokens(renderer, one) for one in given]
    except CodeUnusable as error:
        raise ConfigError(f"demonstrations: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"demonstrations: {named}: {told(error)}") from error
    if not any(any(one.trained) for one in found):
        raise ConfigError(f"demonstrations: {named}: found no answer of the policy's; allowed: at least one")
    return found


def _tokens(renderer: TemplateRenderer, given: Any) -> Demonstration:
    """A conversation whose answers are the policy's. Raises `ValueError`, `RenderingError`."""
    if not isinstance(given, Mapping) or "messages" not in given:
        raise ValueError(f"found {shown(given)}; allowed: a mapping with messages, and tools where there are any")
    conversation = cast("Mapping[str, Any]", given)
    messages, tools = cast("Sequence[Any]", conversation["messages"]), conversation.get("tools")
    ids: list[int] = []
    trained: list[int] = []
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = renderer.prompt(messages[:place], tools, {})
        whole = renderer.answered(messages[: place + 1], tools, {})
        if before[: len(ids)] != ids or whole[: len(before)] != before:
            raise RenderingError("the template's rendering of a beginning is not the beginning of the whole")
        said = whole[len(before) :]
        end = next((at for at, token in enumerate(said) if token in renderer.stop_token_ids), len(said) - 1) + 1
        trained += [0] * (len(before) - len(ids)) + [1] * end
        ids = before + said[:end]
    return Demonstration(ids, trained)
