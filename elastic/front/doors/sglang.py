"""What peers ask that know SGLang, slime and AReaL: `/generate`, an engine's control, and a router's workers.

The router is the front itself, which lists itself as its one worker.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from starlette.responses import PlainTextResponse, Response

from elastic.front.doors.base import PauseMode, ServingState, TokenAnswer, TokenChoice, TokenRequest, WeightsOffer
from elastic.front.doors.calls import DoorCall, json
from elastic.front.doors.requests import check_numbers, check_wanted, finish_of, routing_of, version_name
from elastic.front.doors.vllm import PathText
from elastic.protocol.openai import bodies
from elastic.protocol.openai.bodies import STOPS_MAX, AtLeastOne, Integer, StopIds, Text, TokenIds
from elastic.protocol.openai.errors import FrontError

OWN_WORKER = "front"
"""The id of the one worker that the front lists as a router."""
HTTP_PORTS = {"http": 80, "https": 443}
MAX_NEW_TOKENS = 128
"""SGLang's own default."""

# Requests.


class SglangSampling(msgspec.Struct, kw_only=True):
    """SGLang's `sampling_params`."""

    max_new_tokens: AtLeastOne = MAX_NEW_TOKENS
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    sampling_seed: Integer | None = None
    stop: Text | Annotated[list[Text], msgspec.Meta(max_length=STOPS_MAX)] | None = None
    stop_token_ids: StopIds = []
    ignore_eos: bool = False
    no_stop_trim: bool = False


class GenerateBody(msgspec.Struct, kw_only=True):
    input_ids: Annotated[TokenIds, msgspec.Meta(min_length=1)]
    sampling_params: dict[str, Any] = {}
    return_logprob: bool = False
    lora_path: str | None = None


_SAMPLING = bodies.Terms(
    {
        **bodies.CONSTRAINED,
        "n": (1,),
        "min_new_tokens": (0,),
        "json_schema": (),
        "regex": (),
        "ebnf": (),
        "custom_params": ({},),
        "stop_regex": ([],),
    }
)
_BODY = bodies.Terms(
    {
        "text": (),
        "stream": (False,),
        "logprob_start_len": (-1,),
        "top_logprobs_num": (0,),
        "token_ids_logprob": ([],),
        "return_hidden_states": (False,),
        "custom_logit_processor": ("",),
    }
)


async def generate(call: DoorCall) -> Response:
    """`/generate` of one prompt of token ids."""
    check_wanted(call.body)
    body = bodies.read(GenerateBody, call.body, _BODY)
    wanted = _sampling(body.sampling_params)
    session, key = routing_of(call.headers)
    request = TokenRequest(
        prompt_ids=body.input_ids,
        model=body.lora_path or "",
        max_tokens=wanted.max_new_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        seed=wanted.sampling_seed,
        stop=(wanted.stop,) if isinstance(wanted.stop, str) else tuple(wanted.stop or ()),
        stop_token_ids=tuple(wanted.stop_token_ids),
        ignore_eos=wanted.ignore_eos,
        session=session,
        key=key,
    )
    answer = await call.run.generate(request, call.answering)
    return json(told(answer, shows_logprobs=body.return_logprob, keeps_stop=wanted.no_stop_trim))


def _sampling(fields: Mapping[str, Any]) -> SglangSampling:
    custom = bodies.converted(fields.get("custom_params") or {}, dict[str, Any], "sampling_params.custom_params")
    if custom.get("return_top_p_token_ids"):
        raise FrontError(
            400,
            "sampling_params.custom_params: which tokens top_p has kept is not told; set slime's --rollout-top-p to 1",
            "sampling_params.custom_params",
            "unsupported_parameter",
        )
    return bodies.read(SglangSampling, fields, _SAMPLING, "sampling_params")


def told(answer: TokenAnswer, *, shows_logprobs: bool, keeps_stop: bool) -> dict[str, Any]:
    """The answer to a request of one choice. `keeps_stop`: its text has the stop string that ended it."""
    [choice] = answer.choices
    check_numbers(choice)
    last = choice.runs[-1] if choice.runs else answer.now
    meta: dict[str, Any] = {
        "id": answer.id,
        "finish_reason": _finish(choice),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": len(choice.ids),
        "weight_version": version_name(last),
    }
    if shows_logprobs:
        pairs = zip(choice.ids, choice.logprobs, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for token, logprob in pairs]
    stop = choice.stopped_by if keeps_stop and isinstance(choice.stopped_by, str) else ""
    return {"text": choice.text + stop, "output_ids": choice.ids, "meta_info": meta}


def _finish(choice: TokenChoice) -> dict[str, Any]:
    finish = finish_of(choice)
    if finish == "length":
        return {"type": "length", "length": len(choice.ids)}
    if finish == "abort":
        return {"type": "abort", "message": "Abort: the run was told to end its turns"}
    matched = choice.stopped_by
    return {"type": "stop", "matched": choice.ids[-1] if matched is None and choice.ids else matched}


# Control.


class PauseBody(msgspec.Struct, kw_only=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class UpdateBody(msgspec.Struct, kw_only=True):
    model_path: PathText
    weight_version: bodies.Name | None = None
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors"] = "auto"


class AbortBody(msgspec.Struct, kw_only=True):
    abort_all: bool = False


class WorkerBody(msgspec.Struct, kw_only=True):
    url: PathText
    worker_type: Literal["regular"] = "regular"


async def pause(call: DoorCall) -> Response:
    """`/pause_generation`, which ends running requests unless it says another mode, as SGLang's does."""
    mode = call.read(PauseBody).mode
    await call.run.pause(PauseMode.ABORT if mode == "abort" else PauseMode.KEEP)
    return json({"message": "Generation paused successfully.", "status": "ok"})


async def resume(call: DoorCall) -> Response:
    await call.run.resume()
    return json({"message": "Generation continued successfully.", "status": "ok"})


async def update_weights(call: DoorCall) -> Response:
    """`/update_weights_from_disk`."""
    body = call.read(UpdateBody)
    directory = call.roots.ours(body.model_path, "model_path")
    label = body.weight_version or directory.name
    offer = WeightsOffer(directory=directory, label=label, abort_running=body.abort_all_requests, lasting=True)
    version = await call.run.offer(offer)
    return json({"success": True, "message": f"version {version.version} is served", "num_paused_requests": 0})


async def weight_version(call: DoorCall) -> Response:
    return json({"weight_version": version_name((await call.run.status()).now)})


async def flush_cache(call: DoorCall) -> Response:
    """Engines keep no prefix of other weights than those that they serve."""
    return PlainTextResponse("Cache flushed.\n")


async def abort(call: DoorCall) -> Response:
    if not call.read(AbortBody).abort_all:
        raise bodies.invalid("abort_all", "must be true: a request alone ends as its client leaves")
    await call.run.abort_all()
    return Response()


async def loads(call: DoorCall) -> Response:
    """`/v1/loads`, whatever its `include` names."""
    return json({"loads": [{"dp_rank": 0, **_load(await call.run.status())}]})


def _load(status: ServingState) -> dict[str, int]:
    return {
        "num_running_reqs": status.running,
        "num_waiting_reqs": status.waiting,
        "num_total_reqs": status.running + status.waiting,
    }


async def workers(call: DoorCall) -> Response:
    """What a router has: the front itself, where the peer has reached it."""
    worker = {"id": OWN_WORKER, "url": call.own_url, "worker_type": "regular", "is_healthy": True}
    return json({"workers": [worker], "total": 1})


async def add_worker(call: DoorCall) -> Response:
    """The front has itself already, and no other engine."""
    url = call.read(WorkerBody).url
    if _place(url) != _place(call.own_url):
        raise bodies.invalid(
            "url",
            f"found {bodies.quoted(url)}; this router has no engine but itself, {call.own_url}: name it by the same "
            "address in --rollout-external-engine-addrs and in --sglang-router-ip",
        )
    return json({"status": "accepted", "worker_id": OWN_WORKER, "url": url})


def _place(url: str) -> tuple[str, int | None]:
    """The host and the port of an address; neither, if it is none."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port or HTTP_PORTS.get(parts.scheme)
    except ValueError:
        return "", None


async def remove_worker(call: DoorCall) -> Response:
    """Peers take out their engines as they end; the front stays."""
    return json({"status": "accepted", "worker_id": OWN_WORKER})


# What a server says of itself.


async def server_info(call: DoorCall) -> Response:
    """What slime compares with its own settings, and TRL's client looks up (`vllm_config`)."""
    facts = call.run.model
    status = await call.run.status()
    return json(
        {
            "model_path": facts.name,
            "served_model_name": facts.name,
            "context_length": facts.max_model_len,
            "dtype": facts.dtype,
            "tp_size": facts.world_size,
            "pp_size": 1,
            "ep_size": 1,
            "dp_size": 1,
            "num_gpus": facts.world_size,
            "disaggregation_mode": "null",
            "enable_memory_saver": False,
            "enable_return_routed_experts": False,
            "weight_version": version_name(status.now),
            "vllm_config": {
                "model_config": {
                    "model": facts.name,
                    "dtype": f"torch.{facts.dtype}",
                    "max_model_len": facts.max_model_len,
                    "logprobs_mode": "processed_logprobs",
                },
                "parallel_config": {"tensor_parallel_size": facts.world_size, "data_parallel_size": 1},
                "weight_transfer_config": None,
                "lora_config": None,
            },
        }
    )


async def healthy(call: DoorCall) -> Response:
    """`/health_generate`: whether the run answers."""
    await call.run.status()
    return Response()
