"""What the clients' scripts share. Each is a program of its own for its client's interpreter.

The base URL and the key come as their client's users give them, by environment variables. `CLIENT_POLICY` is the
policy's directory, for clients that read its tokenizer, and `CLIENT_DRIVER_KEY` is for those that open trajectories.
Each call is a line of standard output, a JSON object, as `made` notes it.
"""

import json
import os
import urllib.request
from collections.abc import Sequence
from typing import Any

MODEL = "scripted"
ROOT = os.environ["CLIENT_ROOT"]
QUESTION = "What is the sum of these numbers? "
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD = {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": ADD}]
IDS = {"return_token_ids": True}


def added(arguments: str | dict[str, Any]) -> str:
    """What the tool answers."""
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(read["a"] + read["b"])


def made(
    what: str,
    id: str | None = None,
    *,
    ids: Sequence[int] | None = None,
    text: str | None = None,
    tool: tuple[str, str | dict[str, Any]] | None = None,
    trajectory: str = "",
    **wanted: Any,
) -> None:
    """A call is over whose answer had this id, these tokens, this text and this call of a tool, as far as the client
    shows them. Of `wanted`, what is false is not as the client's own schema has it."""
    called = None if tool is None else [tool[0], json.loads(tool[1]) if isinstance(tool[1], str) else tool[1]]
    missing = [name for name, found in wanted.items() if not found]
    own = None if ids is None else list(ids)
    note = {"what": what, "id": id, "ids": own, "text": text, "tool": called, "trajectory": trajectory}
    print(json.dumps({**note, "missing": missing}), flush=True)


def begin(sessions: Sequence[str] = ()) -> dict[str, Any]:
    """Open a trajectory, as a driver."""
    return post(
        "/trajectories",
        os.environ["CLIENT_DRIVER_KEY"],
        {"group": os.environ["CLIENT_GROUP"], "session_ids": list(sessions)},
    )


def post(path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(ROOT + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def valid(answer: Any) -> bool:
    """Whether an answer of a client that checks nothing itself is what its own schema says. Raises its complaint."""
    type(answer).model_validate(answer.model_dump(exclude_unset=True))
    return True
