"""How routes answer with models: as JSON, made where the endpoint made the model.

FastAPI would validate what the endpoint has returned once more, for plain functions in another thread. Models of ours
were validated as they were made; what a route declares is there for the API's description and for the type checker.
"""

import functools
from collections.abc import Callable, Coroutine, Mapping
from inspect import iscoroutinefunction, signature
from typing import Any

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from elastic.server.api.auth import asking, identified
from elastic.server.api.writes import WriteRequest, WriteResult
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem

TRANSACTION = "tx"


class ModelRoute(APIRoute):
    """A route whose endpoint returns a model, or anything else that FastAPI knows how to answer with.

    Where it asks who the caller is, that is judged before anything of the body is read. An endpoint that takes a `tx`
    is carried out as the transaction of its `write`, and returns what that has come to.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if TRANSACTION in signature(endpoint).parameters:
            endpoint = _carried_out(endpoint, options["openapi_extra"]["x-action"])
        super().__init__(path, _answering(endpoint, options.get("status_code") or 200), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if not _asks(self.dependant):
            return handle

        async def handle_known(request: Request) -> Response:
            if "\0" in request.url.path or b"%00" in request.scope["query_string"]:
                raise ApiProblem("invalid-request", "the address has the character NUL; allowed: any other")
            request.state.requester = await identified(request)
            return await handle(request)

        return handle_known


def _asks(dependant: Dependant) -> bool:
    return dependant.call is asking or any(_asks(one) for one in dependant.dependencies)


def _carried_out(endpoint: Callable[..., WriteResult], action: str) -> Callable[..., Response]:
    """Return the endpoint without its transaction, which the request has."""

    @functools.wraps(endpoint)
    def answer(*, write: WriteRequest, **values: Any) -> Response:
        return write.carry_out(Action(action), values.get("body"), lambda tx: endpoint(write=write, tx=tx, **values))

    asked = signature(endpoint)
    others = [one for one in asked.parameters.values() if one.name != TRANSACTION]
    vars(answer)["__signature__"] = asked.replace(parameters=others, return_annotation=Response)
    return answer


def _answering(endpoint: Callable[..., Any], status: int) -> Callable[..., Any]:
    if iscoroutinefunction(endpoint):

        @functools.wraps(endpoint)
        async def answer_soon(**values: Any) -> Any:
            return _answer(await endpoint(**values), status, values)

        return answer_soon

    @functools.wraps(endpoint)
    def answer(**values: Any) -> Any:
        return _answer(endpoint(**values), status, values)

    return answer


def _answer(said: Any, status: int, values: Mapping[str, Any]) -> Any:
    if not isinstance(said, BaseModel):
        return said
    answer = Response(said.model_dump_json(), status, media_type="application/json")
    for value in values.values():
        if isinstance(value, Response):
            # An endpoint that takes a response has set headers on it, such as an ETag.
            answer.headers.raw.extend(value.headers.raw)
    return answer
