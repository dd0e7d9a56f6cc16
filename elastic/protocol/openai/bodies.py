"""Bodies of requests for answers, as OpenAI's clients send them, with vLLM's additions.

`read` makes a request of a body. It takes what a server serves, passes over what changes no answer, and refuses by its
name what would make another answer than the server's. Fields that nobody here knows are passed over too, unless the
server is `strict`. A null field is a missing one.
"""

import re
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from elastic.protocol.front_messages import DIGEST_BYTES
from elastic.protocol.openai.errors import FrontError

CHOICES_MAX = 128
STOPS_MAX = 64
STOP_CHARS_MAX = 4096
STOP_IDS_MAX = 64
MESSAGES_MAX = 16_384
TOOLS_MAX = 1024
NAME_CHARS_MAX = 512
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
MaybeName: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
"""A name that may be empty."""
INTEGER_MAX = 2**63 - 1
ROLES = ("system", "developer", "user", "assistant", "tool")
HOW_TO_ANSWER = ("stream", "stream_options")
"""Fields that say how an answer comes, and change nothing of it."""

_OWN_TEMPLATE_KWARGS = {
    "messages",
    "tools",
    "documents",
    "chat_template",
    "tokenize",
    "return_dict",
    "return_tensors",
    "add_generation_prompt",
    "continue_final_message",
}

AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)]
Integer: TypeAlias = Annotated[int, msgspec.Meta(ge=-INTEGER_MAX - 1, le=INTEGER_MAX)]
TokenIds: TypeAlias = list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]
StopIds: TypeAlias = Annotated[TokenIds, msgspec.Meta(max_length=STOP_IDS_MAX)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=STOP_CHARS_MAX)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What a client wants of sampling; None where it says nothing."""

    n: Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)] = 1
    max_tokens: AtLeastOne | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Integer | None = None
    stop: Text | Annotated[list[Text], msgspec.Meta(max_length=STOPS_MAX)] | None = None
    stop_token_ids: StopIds = []
    ignore_eos: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class AnswerFields(SamplingFields, kw_only=True):
    """How a client wants its answer, and of which sampling."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    return_token_ids: bool = False
    session_id: MaybeName | None = None

    @property
    def most_tokens(self) -> int | None:
        """Return the most tokens of an answer."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        return bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(AnswerFields, kw_only=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None
    return_tokens_as_token_ids: bool = False

    def __post_init__(self) -> None:
        self.prompts()

    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt, as text or as token ids. Raises `ValueError`."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], str):
            return converted(prompt, list[str], "prompt")
        if prompt and isinstance(prompt[0], list):
            return converted(prompt, list[TokenIds], "prompt")
        return [converted(prompt, TokenIds, "prompt")]


class Called(msgspec.Struct):
    name: Name
    arguments: str = ""


class CalledTool(msgspec.Struct):
    """A call of a tool, in a message of the assistant's."""

    function: Called
    id: MaybeName | None = None
    type: str = "function"


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct):
    """A message of a chat; what more it has is passed over."""

    role: str
    content: str | list[ContentPart] | None = None
    name: MaybeName | None = None
    tool_calls: Annotated[list[CalledTool], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    tool_call_id: MaybeName | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Called | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text or part.refusal or "" for part in self.content)


class FunctionTool(msgspec.Struct):
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    function: FunctionTool
    type: str = "function"


class ChatRequest(AnswerFields, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool = False
    return_tokens_as_token_ids: bool = False
    tools: Annotated[list[Tool], msgspec.Meta(max_length=TOOLS_MAX)] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None

    def __post_init__(self) -> None:
        check_tool_choice(self.tool_choice)
        for number, message in enumerate(self.messages):
            _check_message(message, f"messages.{number}")
        for number, tool in enumerate(self.tools):
            _check_tool(tool, f"tools.{number}")
        check_template_kwargs(self.chat_template_kwargs)

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class TokensRequest(AnswerFields, kw_only=True):
    """vLLM's `/inference/v1/generate`: token ids in, token ids out. Its `sampling_params` stand here as fields."""

    token_ids: Annotated[TokenIds, msgspec.Meta(min_length=1)]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None
    request_id: MaybeName | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """vLLM's `/tokenize`. Without a `prompt` it is a chat, whose fields are those of `ChatRequest`."""

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: TokenIds


class TrajectoryRequest(msgspec.Struct, kw_only=True):
    """A driver asks for a trajectory: `task` is JSON of its own, `group` a name that it gives to those of one start."""

    task: Any = None
    group: Name
    session_ids: Annotated[list[Name], msgspec.Meta(max_length=64)] = []


class RewardRequest(msgspec.Struct, kw_only=True):
    """What a trajectory is worth, or its branches of one `policy` are."""

    reward: float
    policy: Name | None = None


class EndRequest(msgspec.Struct, kw_only=True):
    """The agent is done. With a `cause` the trajectory has failed; `metrics` are numbers of the driver's own."""

    cause: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    metrics: Annotated[
        dict[Annotated[str, msgspec.Meta(min_length=1, max_length=64)], float], msgspec.Meta(max_length=64)
    ] = {}


class SessionRequest(msgspec.Struct, kw_only=True):
    session_id: Name


RequestT = TypeVar("RequestT", bound=msgspec.Struct)

CONSTRAINED: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "thinking_token_budget": (),
}
"""Fields that change the distribution that is sampled from, with the values that do not."""

_SAMPLING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **CONSTRAINED,
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "vllm_xargs": ({},),
    "extra_args": ({},),
    "repetition_detection": (),
}
_TEXT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **_SAMPLING_NEUTRAL,
    "skip_special_tokens": (True,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "top_logprobs": (0,),
}
_CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **_TEXT_NEUTRAL,
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
_TOKENS_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "features": (),
    "content_parts": ([],),
    "output_mode": ("tokens",),
}
_BESIDE_SAMPLING = ("model", "stream", "stream_options", "return_token_ids", "session_id", "token_ids", "request_id")
_SAMPLING = "sampling_params"

_SERVER_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "stop": ([],),
    "stop_token_ids": ([],),
    "logprobs": (False,),
    "priority": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "store": (False,),
    "continuous_usage_stats": (False,),
}
HARMLESS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "request_id", "include_obfuscation")
"""Fields that change no answer, whatever they say."""


class Terms(NamedTuple):
    """What a server makes of the fields of one kind of body.

    It takes those that it has `served` (all of the kind's, if that is None). Others must be as in `neutral`, or be
    `HARMLESS`, or unknown to a server that is not `strict`.
    """

    neutral: Mapping[str, tuple[Any, ...]]
    served: Collection[str] | None = None
    strict: bool = False


COMPLETION = Terms(_TEXT_NEUTRAL)
CHAT = Terms(_CHAT_NEUTRAL)
TOKENS = Terms(_TOKENS_NEUTRAL, _BESIDE_SAMPLING)
CONTROL = Terms({})


def strict(*served: str) -> Terms:
    """The terms of a server that serves these fields alone."""
    return Terms({**_CHAT_NEUTRAL, **_SERVER_NEUTRAL}, served, True)


def parsed(body: bytes) -> dict[str, Any]:
    """The fields of a body that say something. Raises `FrontError` for what is no object of JSON."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrontError(400, f"the body is no JSON: {error}") from None
    except RecursionError:
        raise FrontError(400, "the body nests too deeply") from None
    if not isinstance(fields, dict):
        raise FrontError(400, f"the body is {_kind(fields)}; allowed: an object of JSON")
    return {name: value for name, value in fields.items() if value is not None}


def digest(fields: Mapping[str, Any]) -> bytes:
    """What two bodies have in common that ask for the same: a BLAKE2b of 16 bytes."""
    asked = {name: value for name, value in fields.items() if name not in HOW_TO_ANSWER}
    return blake2b(encoded(asked), digest_size=DIGEST_BYTES).digest()


def encoded(value: Any) -> bytes:
    """A part of a body as JSON, however it was written. Raises `FrontError`."""
    try:
        return msgspec.json.encode(value, order="sorted")
    except RecursionError:
        raise FrontError(400, "the body nests too deeply") from None


def read(kind: type[RequestT], fields: Mapping[str, Any], terms: Terms, at: str = "") -> RequestT:
    """The request that a body of these fields is, or the part of one that is `at` a field of its own.

    Raises `FrontError`, which names what is not served.
    """
    if terms.strict and isinstance(options := fields.get("stream_options"), Mapping):
        told = _served(StreamOptions, options, terms._replace(served=("include_usage",)), "stream_options.")
        fields = {**fields, "stream_options": told}
    return converted(_served(kind, fields, terms, f"{at}." if at else ""), kind, at)


def read_tokens(fields: Mapping[str, Any]) -> TokensRequest:
    """The request that a body of vLLM's generate is. Raises `FrontError`, as `read` does."""
    sampling = converted(fields.get(_SAMPLING, {}), dict[str, Any], _SAMPLING)
    beside = _served(TokensRequest, fields, TOKENS)
    wanted = _served(TokensRequest, sampling, Terms(_SAMPLING_NEUTRAL), f"{_SAMPLING}.")
    wanted = {name: value for name, value in wanted.items() if name not in _BESIDE_SAMPLING}
    try:
        return converted(beside | wanted, TokensRequest)
    except FrontError as error:
        if error.param is None or error.param.partition(".")[0] not in wanted:
            raise
        raise invalid(f"{_SAMPLING}.{error.param}", str(error).partition(": ")[2]) from None


def _served(kind: type[msgspec.Struct], fields: Mapping[str, Any], terms: Terms, where: str = "") -> dict[str, Any]:
    """Those of the fields that are the kind's and are served. Raises `FrontError` for one that is not to be had."""
    known = kind.__struct_fields__
    served = known if terms.served is None else terms.served
    told: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name in served:
            told[name] = value
        elif name in terms.neutral:
            if not any(_is(value, one) for one in terms.neutral[name]):
                raise _refusal(where + name, terms.neutral[name], name in CONSTRAINED)
        elif terms.strict and name not in HARMLESS:
            raise _refusal(where + name, (), False)
    return told


def _is(value: Any, neutral: Any) -> bool:
    """Whether a value says what the neutral one does: `true` is no number."""
    return value == neutral and (isinstance(neutral, bool) or not isinstance(value, bool))


def _refusal(param: str, neutral: tuple[Any, ...], constrained: bool) -> FrontError:
    said = "not supported by this server" + (f", but as {neutral[-1]!r}" if neutral else "")
    if constrained:
        said += "; log-probabilities would be those of another distribution than the policy's"
    return FrontError(400, f"{param}: {said}", param, "unsupported_parameter")


def check_tool_choice(value: Any) -> None:
    if value not in ("auto", "none"):
        raise FrontError(
            400,
            f"tool_choice: found {quoted(value)}; allowed: 'auto' or 'none', since a call that is forced is sampled "
            "from another distribution than the policy's",
            "tool_choice",
            "unsupported_parameter",
        )


def _check_message(message: Message, where: str) -> None:
    if message.role not in ROLES:
        raise invalid(f"{where}.role", f"found {quoted(message.role)}; allowed: {', '.join(ROLES)}")
    if not isinstance(message.content, list):
        return
    for number, part in enumerate(message.content):
        at = f"{where}.content.{number}"
        if part.type not in ("text", "refusal"):
            raise invalid(f"{at}.type", f"found {quoted(part.type)}; this model reads parts of type 'text' alone")
        if (part.text if part.type == "text" else part.refusal) is None:
            raise invalid(f"{at}.{part.type}", "is missing")


def _check_tool(tool: Tool, where: str) -> None:
    if tool.type != "function":
        raise invalid(f"{where}.type", f"found {quoted(tool.type)}; allowed: 'function'")
    if tool.function.parameters is not None:
        check_schema(tool.function.parameters, f"{where}.function.parameters")


def chat_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function as a chat's tool; what is None is left out."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    if taken := sorted(_OWN_TEMPLATE_KWARGS & kwargs.keys()):
        raise invalid(f"chat_template_kwargs.{taken[0]}", "is the server's own to say")


_SCHEMA_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Refuse what cannot be a JSON schema of a function's parameters."""
    if schema and schema.get("type", "object") != "object":
        raise invalid(f"{where}.type", f"found {quoted(schema['type'])}; a function's parameters are of type 'object'")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise invalid(f"{where}.properties", f"found {_kind(properties)}; allowed: an object")
    for name, inner in properties.items():
        at = f"{where}.properties.{name}"
        if not isinstance(inner, Mapping | bool):
            raise invalid(at, f"found {_kind(inner)}; allowed: a JSON schema")
        types = inner.get("type", []) if isinstance(inner, Mapping) else []
        for one in types if isinstance(types, list) else [types]:
            if one not in _SCHEMA_TYPES:
                raise invalid(f"{at}.type", f"found {quoted(one)}; allowed: {', '.join(_SCHEMA_TYPES)}")
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise invalid(f"{where}.required", "must be a list of names")


def invalid(param: str, said: str) -> FrontError:
    """The refusal of a field's value."""
    return FrontError(400, f"{param}: {said}", param, "invalid_value")


_AT = re.compile(r"^(?P<said>.*?)(?: - at `\$?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")


def converted(value: Any, kind: Any, at: str = "") -> Any:
    """The value as of a kind. Raises `FrontError`, which names the field; `at` is that of the value."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        assert found is not None
        said = found["said"]
        path = ".".join(part for part in (at, _dotted(found["path"] or "")) if part)
        if missing := _MISSING.match(said):
            path, said = ".".join(part for part in (path, missing["name"]) if part), "is missing"
        raise invalid(path or "body", said[0].lower() + said[1:]) from None
    except RecursionError:
        raise FrontError(400, "the body nests too deeply") from None


def _dotted(path: str) -> str:
    """`messages.0.role` of msgspec's `.messages[0].role`."""
    return path.replace("[", ".").replace("]", "").strip(".")


def quoted(value: Any) -> str:
    """What was found, short enough for an error."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _kind(value: Any) -> str:
    return {list: "a list", dict: "an object", str: "a text", bool: "a truth value"}.get(type(value), "a number")
