"""What a front serves, as OpenAPI 3.1, made of the structures that its bodies are read into."""

import importlib.metadata
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from elastic.protocol.anthropic.bodies import MessagesRequest
from elastic.protocol.openai.answers import EVENT_STREAM
from elastic.protocol.openai.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EndRequest,
    RewardRequest,
    SamplingFields,
    SessionRequest,
    TokenIds,
    TokenizeRequest,
    TrajectoryRequest,
)
from elastic.protocol.openai.errors import JSON_TYPE
from elastic.protocol.openai.responses import ResponseRequest

DESCRIPTION = """Agents ask for answers here, and drivers open trajectories and reward them (docs/agents.md).

Routes of agents are also served below `/t/{trajectory or key}` and `/sessions/{session}`. Fields that are not listed
are passed over unless they would change the answer: then they are refused.
"""
REFUSED = (400, 401, 402, 403, 404, 405, 408, 409, 410, 413, 421, 422, 429, 500, 502, 503, 504)
KEYS: Mapping[str, Any] = {
    "key": {"type": "http", "scheme": "bearer", "description": "a trajectory's key, a driver's, or a viewer's"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
AGENTS, DRIVERS = "agents", "drivers"


class TokensBody(msgspec.Struct, kw_only=True):
    """vLLM's `/inference/v1/generate`."""

    token_ids: TokenIds
    sampling_params: SamplingFields = msgspec.field(default_factory=SamplingFields)
    model: str | None = None
    stream: bool = False
    request_id: str | None = None


class _Operation(NamedTuple):
    """`answers` are the fields that a whole answer has at least; an operation that `streams` may answer by events."""

    summary: str
    tag: str
    body: type[msgspec.Struct] | None = None
    answers: tuple[str, ...] = ()
    streams: bool = False
    open: bool = False
    text: bool = False


_STREAMED = ("id", "model")
_STATUS = ("id", "group", "state", "turns", "tokens", "branches", "reward", "cause")
OPERATIONS: Mapping[tuple[str, str], _Operation] = {
    ("/v1/chat/completions", "post"): _Operation(
        "Chat", AGENTS, ChatRequest, (*_STREAMED, "choices", "usage"), streams=True
    ),
    ("/v1/completions", "post"): _Operation(
        "Complete prompts", AGENTS, CompletionRequest, (*_STREAMED, "choices", "usage"), streams=True
    ),
    ("/v1/responses", "post"): _Operation(
        "Respond to items", AGENTS, ResponseRequest, (*_STREAMED, "output", "usage"), streams=True
    ),
    ("/v1/messages", "post"): _Operation(
        "Answer messages, as Anthropic's API does", AGENTS, MessagesRequest, (*_STREAMED, "content"), streams=True
    ),
    ("/v1/messages/count_tokens", "post"): _Operation(
        "Count the tokens of messages", AGENTS, MessagesRequest, ("input_tokens",)
    ),
    ("/inference/v1/generate", "post"): _Operation(
        "Generate token ids", AGENTS, TokensBody, ("request_id", "choices", "usage"), streams=True
    ),
    ("/tokenize", "post"): _Operation("Tokens of a text or of a chat", AGENTS, TokenizeRequest, ("tokens",)),
    ("/detokenize", "post"): _Operation("The text of tokens", AGENTS, DetokenizeRequest, ("prompt",)),
    ("/v1/models", "get"): _Operation("List the models", AGENTS, None, ("object", "data")),
    ("/v1/models/{name}", "get"): _Operation("Show a model", AGENTS, None, ("id", "max_model_len")),
    ("/health", "get"): _Operation("Whether the run is there", AGENTS, open=True),
    ("/metrics", "get"): _Operation("Metrics of the run, in Prometheus' text format", DRIVERS, text=True),
    ("/trajectories", "post"): _Operation("Open a trajectory", DRIVERS, TrajectoryRequest, ("id", "key", "base_url")),
    ("/trajectories/{id}", "get"): _Operation("Show a trajectory", DRIVERS, None, _STATUS),
    ("/trajectories/{id}/reward", "post"): _Operation("Reward a trajectory", DRIVERS, RewardRequest, _STATUS),
    ("/trajectories/{id}/end", "post"): _Operation("End a trajectory", DRIVERS, EndRequest, _STATUS),
    ("/trajectories/{id}/sessions", "post"): _Operation(
        "Bind a session to a trajectory", DRIVERS, SessionRequest, _STATUS
    ),
}


def description() -> bytes:
    """The document, as JSON."""
    bodies = [operation.body for operation in OPERATIONS.values() if operation.body is not None]
    refs, schemas = msgspec.json.schema_components(
        list(dict.fromkeys(bodies)), ref_template="#/components/schemas/{name}"
    )
    by_body = dict(zip(dict.fromkeys(bodies), refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method] = _described(path, operation, by_body)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Elastic, for agents",
                "version": importlib.metadata.version("elastic-rl"),
                "description": DESCRIPTION,
            },
            "paths": paths,
            "components": {"schemas": {**schemas, "Error": _ERROR}, "securitySchemes": KEYS},
        }
    )


_ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}


def _described(path: str, operation: _Operation, by_body: Mapping[Any, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    if operation.answers:
        whole = {JSON_TYPE: {"schema": {"type": "object", "required": list(operation.answers)}}}
    if operation.text:
        whole["text/plain"] = {"schema": {"type": "string"}}
    if operation.streams:
        whole[EVENT_STREAM] = {"schema": {"type": "string"}}
    refused = {"description": "Not done", "content": {JSON_TYPE: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    told: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {"200": {"description": "Done", "content": whole}, **{str(one): refused for one in REFUSED}},
    }
    if operation.open:
        told["responses"] = {"200": {"description": "It is"}, "503": {"description": "It is not"}}
    else:
        told["security"] = [{name: []} for name in KEYS]
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        told["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    if operation.body is not None:
        # A driver's body whose fields may all be left out may be left out itself.
        required = operation.tag == AGENTS or any(field.required for field in msgspec.structs.fields(operation.body))
        told["requestBody"] = {"required": required, "content": {JSON_TYPE: {"schema": by_body[operation.body]}}}
    return told
