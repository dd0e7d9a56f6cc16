"""The server of `elastic api login`, as commands use it: what it refuses ends the program with one message."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from elastic.cli.account import account
from elastic.cli.output import EXIT_INTERRUPTED, bad_input, failed, say
from elastic.config import ConfigError
from elastic.protocol.api_client import PATIENCE_S, ApiError, Client, ClientError
from elastic.system.signals import INTERRUPT, handled

M = TypeVar("M", bound=BaseModel)

PATIENCE_VARIABLE = "ELASTIC_API_PATIENCE_S"
_BAD_INPUT = (400, 404, 409, 412, 422)


def is_hosted(name: str) -> bool:
    """Whether this is the id of a run on a server."""
    return name.startswith("run_")


@contextmanager
def server() -> Iterator[Client]:
    """The server that this user is logged in to; what it refuses ends the program with one message."""
    with _connected() as client:
        try:
            yield client
        except ApiError as error:
            _refused(error)
        except ClientError as error:
            failed(str(error))


def _connected() -> Client:
    """The server that this user is logged in to. Raises `ConfigError`."""
    found, told = account(), list[str]()

    def waits(why: str) -> None:
        if not told:
            told.append(why)
            say(f"{why}; asking again for up to {patience_s:g} s")

    patience_s = _patience()
    return Client(found.url, found.key, patience_s=patience_s, on_wait=waits)


def _patience() -> float:
    """How long a server that does not answer is asked again. Raises `ConfigError`."""
    text = os.environ.get(PATIENCE_VARIABLE, "")
    try:
        found = float(text) if text else PATIENCE_S
    except ValueError:
        found = -1.0
    if not 0.0 <= found < float("inf"):
        raise ConfigError(f"{PATIENCE_VARIABLE}: found {text!r}; allowed: seconds, such as {PATIENCE_S:g}")
    return found


def _refused(error: ApiError) -> NoReturn:
    problem = error.problem
    lines = [f"{_key(one.pointer)}: {one.detail}" for one in problem.errors or ()] or [problem.detail or problem.title]
    if problem.status == 401:
        lines = [f"{lines[0]}; `elastic api login URL` takes another key"]
    if problem.status in _BAD_INPUT:
        bad_input("\n".join(lines))
    failed(lines[0])


def _key(pointer: str) -> str:
    """A JSON pointer as the configuration file says it."""
    return pointer.removeprefix("#/config/").removeprefix("#/").replace("/", ".") or "the configuration"


def validated(model: type[M], said: Mapping[str, Any] | str, prefix: str = "") -> M:
    """What is sent to a server, from its fields or from JSON: what a server would refuse is not sent. A field that is
    wrong is named with the prefix before it."""
    try:
        return model.model_validate_json(said) if isinstance(said, str) else model.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "value"
        bad_input(f"{prefix + field.replace('_', '-') if prefix else field}: {first['msg']}")


def latest(client: Client, name: str) -> str:
    """A run's id; `latest` is the newest."""
    if name != "latest":
        return name
    for run in client.runs():
        return run.id
    raise ConfigError(f"no run 'latest' on {client.url}; there are none")


@contextmanager
def detaching(run: str) -> Iterator[None]:
    """Ctrl-C leaves the run alone, and says how to come back."""

    def left(_: int, __: FrameType | None) -> NoReturn:
        say(f"detached; {run} goes on. Come back with: elastic logs {run} -f; end it with: elastic stop {run}")
        raise SystemExit(EXIT_INTERRUPTED)

    with handled(INTERRUPT, left):
        yield
