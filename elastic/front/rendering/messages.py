"""When two messages of chats are the same, as one digest for each prefix of a conversation.

An agent sends its whole history with each call. The run remembers digests of the histories that it has seen, so it
finds how much of a history it has as tokens. Two messages are equal if these are:

- the role (`developer` is `system`);
- the text: parts of content are joined with nothing between them, and no content is the empty text;
- of tool calls in their order: ids, names and arguments, where arguments are compared as JSON (spaces, the order of
  keys, `1.0` or `1`);
- `tool_call_id`, and the `name` of a message that is no assistant's.

Reasoning is no part of it, since agents send content alone back. Neither is an assistant's name, which agents add to
answers that had none. `as_rendered` gives a message as templates take it.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

from elastic.protocol.front_messages import DIGEST_BYTES

ROLES_ALIKE = {"developer": "system"}
DEPTH_MAX = 64
"""How deep arguments and tools may nest. A bound of our own: where Python's is met depends on who calls."""

AnyMessage: TypeAlias = Mapping[str, Any]
"""A message as the body of a call has it, of a shape that `elastic.protocol.openai` has checked."""
Messages: TypeAlias = Sequence[AnyMessage]
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tools as OpenAI's clients declare them."""


class MessageError(ValueError):
    """The message cannot be read as text."""


def head_digest(tools: Tools | None, template_kwargs: Mapping[str, Any]) -> bytes:
    """The digest of what changes a rendering besides its messages. No tools are the same as an empty list of them."""
    said = _canonical_json({"tools": list(tools or ()), "kwargs": dict(template_kwargs)})
    return blake2b(said, digest_size=DIGEST_BYTES).digest()


def chained(before: bytes, message: AnyMessage) -> bytes:
    """The digest of a conversation whose last message is this one, and `before` the digest of the others.

    Raises `MessageError` for content that is not text.
    """
    fields = [
        before,
        _utf8(role_of(message)),
        _utf8(text_of(message.get("content"))),
        _utf8(message.get("tool_call_id") or ""),
        _utf8(_name(message)),
    ]
    for call in _calls(message):
        fields += _call_fields(call)
    sizes = struct.pack(f"<{len(fields)}Q", *map(len, fields))
    return blake2b(b"".join([sizes, *fields]), digest_size=DIGEST_BYTES).digest()


def chain(head: bytes, messages: Iterable[AnyMessage]) -> list[bytes]:
    """A digest for each prefix of the messages, the shortest first."""
    digests: list[bytes] = []
    for message in messages:
        head = chained(head, message)
        digests.append(head)
    return digests


def role_of(message: AnyMessage) -> str:
    role = str(message.get("role") or "")
    return ROLES_ALIKE.get(role, role)


def text_of(content: Any) -> str:
    """The text of a message's content. Raises `MessageError` for parts that are not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(map(_text_of_part, content))
    raise MessageError(f"content is {type(content).__name__}; a text, null or a list of parts is allowed")


def texts_of(message: AnyMessage) -> list[str]:
    """The texts of a message that make its rendering long: its content, and the arguments of its calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts += [_called(call)[1] for call in _calls(message)]
    return [text for text in texts if isinstance(text, str)]


def arguments_of(arguments: Any) -> Any:
    """The arguments of a tool call as JSON's values. None at all are `{}`.

    A text that is no JSON, or nests too deeply, is left as it is.
    """
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        value = read_json(arguments)
        _even(value)
    except (ValueError, RecursionError):
        return arguments
    return value


def read_json(text: str) -> Any:
    """The value of a JSON text, without the numbers that Python adds to JSON. Raises `ValueError`, `RecursionError`."""
    return _strict.decode(text)


def as_rendered(message: AnyMessage) -> dict[str, Any]:
    """The message as chat templates take it: text as one string, arguments of tool calls as JSON's values.

    Raises `MessageError` for content that is not text.
    """
    role = role_of(message)
    plain: dict[str, Any] = {"role": role, "content": text_of(message.get("content"))}
    if role == "assistant" and (reasoning := message.get("reasoning_content") or message.get("reasoning")):
        plain["reasoning_content"] = str(reasoning)
    if calls := _calls(message):
        plain["tool_calls"] = [_call_as_rendered(call) for call in calls]
    if tool_call_id := message.get("tool_call_id"):
        plain["tool_call_id"] = tool_call_id
    if name := _name(message):
        plain["name"] = name
    return plain


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise MessageError(f"content has a part of type {kind!r}; this model reads parts of type 'text' alone")
    return text


def _name(message: AnyMessage) -> str:
    return "" if role_of(message) == "assistant" else str(message.get("name") or "")


def _calls(message: AnyMessage) -> Sequence[Mapping[str, Any]]:
    """The message's tool calls; the older `function_call` is one without an id."""
    if calls := message.get("tool_calls"):
        return calls
    call = message.get("function_call")
    return [{"function": call}] if call else []


def _called(call: Mapping[str, Any]) -> tuple[str, Any]:
    """The name of what is called, and its arguments as they came; those of a custom tool are a text."""
    if custom := call.get("custom"):
        return str(custom.get("name") or ""), _canonical_json(custom.get("input")).decode()
    function = call.get("function") or {}
    return str(function.get("name") or ""), function.get("arguments")


def _call_fields(call: Mapping[str, Any]) -> tuple[bytes, bytes, bytes]:
    """What counts of a tool call. Arguments that are no JSON begin with another byte than those that are."""
    name, given = _called(call)
    arguments = arguments_of(given)
    is_text = arguments is given and isinstance(given, str)
    said = b"t" + _utf8(given) if is_text else b"j" + _canonical_json(arguments)
    return _utf8(call.get("id") or ""), _utf8(name), said


def _call_as_rendered(call: Mapping[str, Any]) -> dict[str, Any]:
    name, given = _called(call)
    called = {"type": "function", "function": {"name": name, "arguments": arguments_of(given)}}
    return {"id": call["id"], **called} if call.get("id") else called


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _canonical_json(value: Any) -> bytes:
    """Bytes that are the same for equal values of JSON. Raises `MessageError` for what nests too deeply."""
    return _canonical.encode(_even(value)).encode()


def _even(value: Any, depth: int = 0) -> Any:
    """The value with numbers that are whole as integers: `1.0` equals `1`."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if not isinstance(value, dict | list):
        return value
    if depth == DEPTH_MAX:
        raise MessageError(f"JSON nests deeper than {DEPTH_MAX} levels")
    if isinstance(value, dict):
        return {key: _even(inner, depth + 1) for key, inner in value.items()}
    return [_even(inner, depth + 1) for inner in value]


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is too large")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_strict = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
