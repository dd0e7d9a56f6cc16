"""What peers ask that know vLLM: requests by token ids, and the control of prime-rl, TRL, SkyRL and AReaL.

A token of an answer is called `token_id:N`, whether that was asked for or not: a door has no text of a single one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from starlette.responses import Response

from elastic.front.doors.base import PauseMode, TokenAnswer, TokenChoice, TokenRequest, WeightsOffer
from elastic.front.doors.calls import DoorCall, json
from elastic.front.doors.requests import check_numbers, check_wanted, finish_of, routing_of, spans_of
from elastic.front.readers import bounded_key
from elastic.protocol.openai import answers, bodies
from elastic.protocol.openai.answers import Answered, AnswerSettings, ChoiceEnd, ChunkWriter, ParsedAnswer, Sample
from elastic.protocol.openai.bodies import AnswerFields, CompletionRequest, DetokenizeRequest
from elastic.protocol.openai.errors import JSON_TYPE, FrontError

COMPLETION = bodies.COMPLETION._replace(
    neutral={name: values for name, values in bodies.COMPLETION.neutral.items() if name != "skip_special_tokens"}
)
"""The terms of answers that are read as token ids, whatever their text has of special tokens."""
PATH_MAX = 4096

PathText = Annotated[str, msgspec.Meta(min_length=1, max_length=PATH_MAX)]

# Requests.


async def complete(call: DoorCall) -> Response:
    """`/v1/completions` of prompts of token ids."""
    check_wanted(call.body)
    body = bodies.read(CompletionRequest, call.body, COMPLETION)
    prompts = [_ids_of(prompt) for prompt in body.prompts()]
    settings = AnswerSettings(body.return_token_ids, body.logprobs is not None, as_token_ids=True)
    return await _answer(call, body, prompts, answers.COMPLETION, settings)


async def generate(call: DoorCall) -> Response:
    """`/inference/v1/generate`."""
    sampling = call.body.get("sampling_params")
    check_wanted({**sampling, **call.body} if isinstance(sampling, Mapping) else call.body)
    body = bodies.read_tokens(call.body)
    settings = AnswerSettings(body.return_token_ids, body.logprobs is not None)
    return await _answer(call, body, [body.token_ids], answers.TOKENS, settings, body.request_id or "")


def _ids_of(prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str) or not prompt:
        raise bodies.invalid("prompt", "found text, or nothing; allowed: token ids")
    return prompt


async def _answer(
    call: DoorCall,
    body: AnswerFields,
    prompts: Sequence[list[int]],
    form: answers.Format,
    settings: AnswerSettings,
    identifier: str = "",
) -> Response:
    if body.stream:
        raise FrontError(400, "stream: answers come whole here; send false", "stream", "unsupported_parameter")
    if len(prompts) * body.n > (most := call.run.model.turns_max):
        found = f"found {len(prompts)} prompts of {body.n} choices each; allowed: {most} choices at once"
        raise bodies.invalid("prompt" if len(prompts) > 1 else "n", f"{found} (front.open_turns_max)")
    session, key = routing_of(call.headers, body.session_id or "")
    asked = [
        TokenRequest(
            prompt_ids=prompt,
            model=body.model or "",
            choices=body.n,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            stop=body.stops,
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            session=session,
            key=bounded_key(f"{key}/{number}") if key and number else key,
        )
        for number, prompt in enumerate(prompts)
    ]
    found = await _generated(call, asked)
    facts = call.run.model
    writer = ChunkWriter(form, identifier or found[0].id, body.model or facts.name, facts.created_s, settings)
    told = [
        answered(choice, prompt if settings.token_ids else None)
        for prompt, answer in zip(prompts, found, strict=True)
        for choice in answer.choices
    ]
    prompt_tokens = sum(answer.prompt_tokens for answer in found)
    whole = writer.whole(told, prompt_tokens, sum(len(choice.sample.ids) for choice in told))
    return Response(whole, media_type=JSON_TYPE)


async def _generated(call: DoorCall, asked: Sequence[TokenRequest]) -> list[TokenAnswer]:
    """The answers to all requests. If one is refused the others are left."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call.run.generate(request, call.answering)) for request in asked]
    except BaseExceptionGroup as refused:
        raise refused.exceptions[0] from None
    return [task.result() for task in tasks]


def answered(choice: TokenChoice, prompt_ids: Sequence[int] | None = None) -> Answered:
    """A choice as the writers of answers take it. Raises `FrontError` for a log-probability that is no number."""
    check_numbers(choice)
    return Answered(
        ParsedAnswer(choice.text),
        Sample(choice.ids, choice.logprobs),
        ChoiceEnd(finish_of(choice), choice.stopped_by),
        prompt_ids,
        spans_of(choice.runs),
    )


async def detokenize(call: DoorCall) -> Response:
    """`/detokenize`, which SkyRL's client asks for the text of what it was answered."""
    body = call.read(DetokenizeRequest)
    words = call.run.model.vocab_size
    if foreign := [token for token in body.tokens if token >= words]:
        raise bodies.invalid("tokens", f"token id {foreign[0]} is not in the vocabulary (0 to {words - 1})")
    return json({"prompt": await call.decode(body.tokens)})


# Control.


class UpdateWeightsBody(msgspec.Struct, kw_only=True):
    """prime-rl's. `update_info` is vLLM's own, of weights that come by NCCL."""

    weight_dir: PathText | None = None
    update_info: object = None


class AdapterBody(msgspec.Struct, kw_only=True):
    lora_name: bodies.Name
    lora_path: PathText


class ArealUpdateBody(msgspec.Struct, kw_only=True):
    model_path: PathText


async def pause(call: DoorCall) -> Response:
    """`/pause?mode=keep|wait|abort`; vLLM's own default is `abort`."""
    said = call.query.get("mode", PauseMode.ABORT)
    if said not in list(PauseMode):
        raise bodies.invalid("mode", f"found {bodies.quoted(said)}; allowed: {', '.join(PauseMode)}")
    await call.run.pause(PauseMode(said))
    return json({"status": "paused"})


async def resume(call: DoorCall) -> Response:
    await call.run.resume()
    return json({"status": "resumed"})


async def is_paused(call: DoorCall) -> Response:
    return json({"is_paused": (await call.run.status()).paused})


async def update_weights(call: DoorCall) -> Response:
    """prime-rl's `/update_weights`, and that of `elastic.integrations.trl`."""
    body = call.read(UpdateWeightsBody)
    if body.weight_dir is None:
        raise FrontError(
            400,
            "weight_dir: weights come as a directory alone, and none by NCCL; set prime-rl's [weight_broadcast] type "
            "= 'filesystem', give TRL's AsyncGRPOTrainer weight_transfer=elastic.integrations.trl.ElasticWeights(…), "
            "or train a LoRA adapter with SkyRL",
            "weight_dir",
            "unsupported_parameter",
        )
    directory = call.roots.ours(body.weight_dir, "weight_dir")
    await call.run.offer(WeightsOffer(directory=directory, label=directory.name, lasting=True))
    return json({"status": "ok"})


async def load_adapter(call: DoorCall) -> Response:
    """The loading of a LoRA adapter by all peers: what vLLM, prime-rl, SkyRL and SGLang answer."""
    body = call.read(AdapterBody)
    directory = call.roots.ours(body.lora_path, "lora_path")
    await call.run.offer(WeightsOffer(directory=directory, label=body.lora_name, adapter=body.lora_name))
    return json(
        {
            "status": "ok",
            "success": True,
            "lora_name": body.lora_name,
            "loaded_adapters": {body.lora_name: body.lora_path},
            "error_message": "",
        }
    )


async def unload_adapter(call: DoorCall) -> Response:
    """An older adapter's name leads to the newest as long as the run lasts, so nothing is to be done."""
    call.read(_NamedAdapter)
    return json({"status": "ok"})


class _NamedAdapter(msgspec.Struct, kw_only=True):
    lora_name: bodies.Name


async def reset_prefix_cache(call: DoorCall) -> Response:
    """Engines keep no prefix of other weights than those that they serve."""
    return json({"success": True})


async def finish_session(call: DoorCall) -> Response:
    """Sessions are affinity alone: there is nothing of one to be forgotten."""
    return json({"status": "ok"})


async def get_world_size(call: DoorCall) -> Response:
    return json({"world_size": call.run.model.world_size})


async def areal_pause(call: DoorCall) -> Response:
    """AReaL's server ends all requests with what they have, and its client stamps its own version on that."""
    await call.run.pause(PauseMode.ABORT)
    return json({"success": True, "message": "Generation paused and all requests aborted"})


async def areal_resume(call: DoorCall) -> Response:
    await call.run.resume()
    return json({"success": True, "message": "Generation continued"})


async def areal_update(call: DoorCall) -> Response:
    body = call.read(ArealUpdateBody)
    directory = call.roots.ours(body.model_path, "model_path")
    offer = WeightsOffer(directory=directory, label=directory.name, abort_running=True, lasting=True)
    version = await call.run.offer(offer)
    return json({"success": True, "message": f"version {version.version} is served"})
