"""Routes that tell tokens and ask for none: vLLM's `/tokenize` and `/detokenize`, and Anthropic's `count_tokens`.

The tokens of a chat are those that its call would have as its prompt. Where a trajectory is named, what was sampled in
it counts as it was sampled.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from elastic.front.asked import Asked, CountCall, ServedModel
from elastic.front.prompts import ChatPrompts, TurnPrompt
from elastic.front.readers import check_ids, check_model, encoded, read_body, read_chat
from elastic.protocol.front_messages import ALL_IDS, AgentCall, AgentCaller, BranchFound, LookUp
from elastic.protocol.openai import bodies
from elastic.protocol.openai.bodies import DetokenizeRequest, TokenizeRequest, invalid
from elastic.protocol.openai.errors import JSON_TYPE

NO_CALL = AgentCall("/tokenize", b"")
"""It has no turns, so that nothing is joined."""
TOLD_HERE_TOKENS = 1000


class TokenRoutes:
    """`told` is how the run answers what it is asked."""

    def __init__(
        self,
        model: ServedModel,
        renders: Executor,
        caller: Callable[[Request], AgentCaller],
        told: Callable[[Any, type[Any]], Awaitable[Any]],
    ) -> None:
        self._model = model
        self._renders = renders
        self._caller = caller
        self._told = told
        self._prompts = ChatPrompts(model, renders)

    def routes(self) -> list[BaseRoute]:
        endpoints: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]

    async def count(self, caller: AgentCaller, counted: CountCall) -> bytes:
        """The answer to `count_tokens`. Raises `FrontError`."""
        prompt = await self._prompt(caller, counted.asked, self._model.renderer.ids_before)
        return msgspec.json.encode({"input_tokens": prompt.size})

    async def _tokenize(self, request: Request) -> Response:
        caller = self._caller(request)
        asked, strings = await read_body(_read_tokenize, self._model, request, self._renders)
        ids = (await self._prompt(caller, asked, ALL_IDS)).ids if isinstance(asked, Asked) else asked
        told: dict[str, Any] = {"count": len(ids), "max_model_len": self._model.context_tokens, "tokens": ids}
        told["token_strs"] = await self._texts(ids) if strings else None
        return _json(told)

    async def _detokenize(self, request: Request) -> Response:
        self._caller(request)
        ids = await read_body(_read_detokenize, self._model, request, self._renders)
        return _json({"prompt": self._model.tokenizer.decode(ids, special=True)})

    async def _texts(self, ids: Sequence[int]) -> list[str]:
        """What each token says; of many on a thread, while streams go on."""
        if len(ids) <= TOLD_HERE_TOKENS:
            return list(map(self._model.token_text, ids))
        telling = asyncio.get_running_loop().run_in_executor
        return await telling(self._renders, lambda: list(map(self._model.token_text, ids)))

    async def _prompt(self, caller: AgentCaller, asked: Asked, ids_before: int) -> TurnPrompt:
        chat = asked.chat
        assert chat is not None
        if caller.driver and not caller.named:
            caller = msgspec.structs.replace(caller, named=asked.session)
        found = BranchFound(0, "")
        if caller.trajectory or caller.named:
            chain = await self._prompts.chain(chat)
            found = await self._told(LookUp(0, caller, NO_CALL, chain, ids_before), BranchFound)
        return await self._prompts.behind(chat, found)


def _read_tokenize(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> tuple[Asked | list[int], bool]:
    body = bodies.read(TokenizeRequest, fields, bodies.CONTROL)
    if body.prompt is None:
        return read_chat(model, headers, fields), body.return_token_strs
    check_model(model, body.model)
    return encoded(model, body.prompt), body.return_token_strs


def _read_detokenize(model: ServedModel, headers: Headers, fields: dict[str, Any]) -> list[int]:
    body = bodies.read(DetokenizeRequest, fields, bodies.CONTROL)
    check_model(model, body.model)
    if (found := len(body.tokens)) > model.context_tokens:
        raise invalid("tokens", f"found {found} token ids; allowed: as many as the context has, {model.context_tokens}")
    check_ids(model, body.tokens, "tokens")
    return body.tokens


def _json(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON_TYPE)
