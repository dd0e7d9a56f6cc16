"""One request of a peer's, and what answers it: a route of a door, with the peer's shape of refusals."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response

from elastic.front.doors.base import DoorRefused, ServedRun
from elastic.front.doors.roots import WeightsRoots
from elastic.protocol.openai import bodies
from elastic.protocol.openai.errors import JSON_TYPE, FrontError

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class DoorCall(NamedTuple):
    """`body` has the fields that say something; `own_url` is where the peer has reached the front.

    `decode` makes text of token ids. `answering` ends once the peer has its answer, or has left without.
    """

    run: ServedRun
    roots: WeightsRoots
    decode: Callable[[list[int]], Awaitable[str]]
    body: Mapping[str, Any]
    query: QueryParams
    headers: Headers
    own_url: str
    answering: ExitStack

    def read(self, kind: type[BodyT]) -> BodyT:
        """The body as of a kind; fields that it does not have are passed over. Raises `FrontError`."""
        return bodies.read(kind, self.body, bodies.CONTROL)


Refuse = Callable[[FrontError], Response]


class DoorRoute(NamedTuple):
    """A route that a door opens. One of `control` takes the run's control key."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    answer: Callable[[DoorCall], Awaitable[Response]]
    refuse: Refuse = FrontError.response
    control: bool = True


def json(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON_TYPE)


def result_refused(error: FrontError) -> Response:
    """In the shape of SGLang's control, and of AReaL's."""
    return _refused(error, {"success": False, "message": error.said})


def adapter_refused(error: FrontError) -> Response:
    """In the shapes of vLLM and of SGLang at once, whose adapters are loaded by a path of the same name."""
    return _refused(error, {"success": False, "error_message": error.said, "error": error.told()})


def _refused(error: FrontError, told: Mapping[str, Any]) -> Response:
    return Response(msgspec.json.encode(told), error.status, error.headers(), JSON_TYPE)


def refusal(refused: DoorRefused) -> FrontError:
    """What a peer is told of what the run does not do: 503 where asking again can help, and 4xx where it cannot."""
    status = 503 if refused.again else 404 if refused.missing else 400
    code = "invalid_value" if status == 400 and refused.param else None
    return FrontError(status, str(refused), refused.param or None, code, retry_after_s=refused.retry_after_s)
