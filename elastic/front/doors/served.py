"""The run behind a front's doors, over the front's link to it (`elastic.front.doors.base.ServedRun`)."""

import asyncio
import hashlib
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import msgspec

from elastic.core.ids import agent_id, parse_turn
from elastic.front.choices import Choice
from elastic.front.doors.base import (
    DoorRefused,
    PauseMode,
    ServedModelFacts,
    ServingState,
    TokenAnswer,
    TokenChoice,
    TokenRequest,
    VersionRun,
    WeightsOffer,
)
from elastic.front.link import ChoiceOver, LinkLost, RunLink, TokensCame, TurnInbox
from elastic.front.rendering.reading import Decoding
from elastic.protocol.front_messages import (
    CHOICES_MAX,
    DIGEST_BYTES,
    AbortTurns,
    AgentCall,
    AgentCaller,
    AskServing,
    CutTurn,
    Declined,
    FromFront,
    HoldTurns,
    LookUp,
    OfferWeights,
    OpenTurns,
    ServingTold,
    SettleTurn,
    TurnOver,
    TurnsTaken,
    VersionServed,
    WantedSampling,
)
from elastic.protocol.offers import OfferedWeights, look_of, source_of_offer
from elastic.protocol.sampled import ids_of, logprobs_of, pack_ids

ROUTE = "request"
NAMES_KEPT = 4096
"""The most names of adapters that are kept: each version may have a name of its own."""
NAMES_SAID = 3
NOBODY = AgentCaller()
"""A caller is let in at the door: the run does not ask again."""

AnswerT = TypeVar("AnswerT")


class _Sampled:
    """One choice as its tokens come. `versions` has as many as there are tokens."""

    def __init__(self, stream: int, choice: Choice) -> None:
        self.stream = stream
        self.choice = choice
        self.versions: list[int] = []
        self.cut = False
        self.settled = False
        self.finish = ""

    def take(self, came: TokensCame) -> None:
        ids = ids_of(came.ids)
        self.versions += [came.version] * len(ids)
        self.choice.take(ids, logprobs_of(came.logprobs))

    def runs(self, labels: dict[int, str]) -> tuple[VersionRun, ...]:
        runs: list[VersionRun] = []
        for version in self.versions[: len(self.choice.ids)]:
            if runs and runs[-1].version == version:
                runs[-1] = msgspec.structs.replace(runs[-1], tokens=runs[-1].tokens + 1)
            else:
                runs.append(VersionRun(version=version, tokens=1, label=labels.get(version, "")))
        return tuple(runs)


class _OpenRequest:
    """A request, and as whom it is asked for: once the run has its turns by the name that they have there."""

    def __init__(self, request: TokenRequest, call: AgentCall) -> None:
        self.request = request
        self.call = call
        self.caller = NOBODY


class LinkedRun:
    """`hold_s` is the longest that a call waits for its first token, or for the run. `silent` are token ids that end a
    turn and are no text; `make_decoder` makes the text of the others."""

    def __init__(
        self,
        link: RunLink,
        make_decoder: Callable[[], Decoding],
        facts: ServedModelFacts,
        silent: frozenset[int],
        hold_s: float,
    ) -> None:
        self._link = link
        self._make_decoder = make_decoder
        self._facts = facts
        self._silent = silent
        self._hold_s = hold_s
        self._adapters: dict[str, None] = {}
        """The names of adapters that were heard of, the newest last."""

    @property
    def model(self) -> ServedModelFacts:
        return self._facts

    async def generate(self, request: TokenRequest, answering: ExitStack) -> TokenAnswer:
        await self._check(request)
        body = msgspec.structs.replace(request, key="", session="")
        digest = hashlib.blake2b(msgspec.msgpack.encode(body), digest_size=DIGEST_BYTES).digest()
        asked = _OpenRequest(request, AgentCall(ROUTE, digest, request.key))
        try:
            async with asyncio.timeout(self._hold_s) as holding:
                while True:
                    try:
                        await self._link.stands()
                        return await self._attempt(asked, holding, answering)
                    except LinkLost:
                        holding.reschedule(asyncio.get_running_loop().time() + self._hold_s)
        except TimeoutError:
            raise self._nothing_came() from None

    async def _check(self, request: TokenRequest) -> None:
        if request.model not in ("", self._facts.name, *self._adapters):
            known = (self._facts.name, *(await self.status()).adapters)
            if request.model not in known:
                allowed = ", ".join(map(repr, known[:1] + known[1:][-NAMES_SAID:]))
                said = f"model: found {request.model!r:.200}; allowed: {allowed}"
                raise DoorRefused(said, param="model", missing=True)
        if not 1 <= request.choices <= CHOICES_MAX:
            raise DoorRefused(f"n: found {request.choices}; allowed: from 1 to {CHOICES_MAX}", param="n")

    async def _attempt(self, asked: _OpenRequest, holding: asyncio.Timeout, answering: ExitStack) -> TokenAnswer:
        """Raises `LinkLost`: then it may be tried again, and goes on where the run has it."""
        request, inbox = asked.request, TurnInbox()
        try:
            taken = await self._joined(asked, inbox)
            if taken is None:
                self._link.leave(inbox)
                inbox = TurnInbox()
                taken = await self._opened(asked, inbox)
            asked.caller = AgentCaller(trajectory=taken.trajectory)
            sampled = {turn.choice: _Sampled(turn.stream, self._new_choice(request)) for turn in taken.turns}
            while not all(one.settled for one in sampled.values()):
                for news in await inbox.take():
                    holding.reschedule(None)
                    self._hear(sampled[news.choice], news)
            told = await self._link.ask(AskServing)
            assert isinstance(told, ServingTold)
        except BaseException:
            self._link.leave(inbox)
            raise
        answering.push(partial(self._answered, inbox))
        name, _ = parse_turn(taken.turns[0].turn)
        return TokenAnswer(
            id=agent_id(name.rpartition("/")[0]),
            choices=[self._told(request, sampled[number], told.labels) for number in sorted(sampled)],
            prompt_tokens=taken.turns[0].prompt_tokens,
            now=_now(told),
        )

    def _answered(self, inbox: TurnInbox, why_not: type[BaseException] | None, *_: object) -> None:
        """The peer has the answer, or has left before it had."""
        over = self._link.delivered if why_not is None else self._link.leave
        over(inbox)

    async def _joined(self, asked: _OpenRequest, inbox: TurnInbox) -> TurnsTaken | None:
        """The turns of the request that this one repeats, if the run still has those of all choices."""
        caller, call = asked.caller, asked.call
        found = await self._link.ask(lambda number: LookUp(number, caller, call), inbox)
        if isinstance(found, Declined):
            raise declined(found)
        if not isinstance(found, TurnsTaken):
            return None
        return found if len({turn.choice for turn in found.turns}) == asked.request.choices else None

    async def _opened(self, asked: _OpenRequest, inbox: TurnInbox) -> TurnsTaken:
        request, call = asked.request, asked.call
        sampling = WantedSampling(
            request.max_tokens,
            request.temperature,
            request.top_p,
            request.top_k,
            request.seed,
            request.stop_token_ids,
            request.ignore_eos,
        )
        ids = pack_ids(request.prompt_ids)
        opened = await self._link.ask(
            lambda number: OpenTurns(
                number, NOBODY, call, None, 0, ids, choices=request.choices, sampling=sampling, session=request.session
            ),
            inbox,
        )
        if isinstance(opened, Declined):
            raise declined(opened)
        assert isinstance(opened, TurnsTaken)
        return opened

    def _new_choice(self, request: TokenRequest) -> Choice:
        silent = self._silent | frozenset(request.stop_token_ids)
        return Choice(self._make_decoder(), None, request.stop, silent)

    def _hear(self, one: _Sampled, news: Any) -> None:
        match news:
            case TokensCame():
                one.take(news)
                if one.choice.stop is not None and not one.cut:
                    one.cut = True
                    self._link.send(CutTurn(one.stream, len(one.choice.ids)))
            case ChoiceOver():
                if not news.over.finish:
                    raise failed(news.over)
                one.choice.rest()
                one.finish = news.over.finish
                self._link.send(SettleTurn(one.stream, len(one.choice.ids)))
            case _:
                one.settled = True

    def _told(self, request: TokenRequest, one: _Sampled, labels: dict[int, str]) -> TokenChoice:
        choice, stopped_by = one.choice, None
        if choice.stop is not None:
            stopped_by = choice.stop
        elif choice.ids and choice.ids[-1] in request.stop_token_ids:
            stopped_by = choice.ids[-1]
        return TokenChoice(
            ids=choice.ids,
            logprobs=choice.logprobs,
            text=choice.said.content,
            finish="stop" if choice.stop is not None else one.finish,
            runs=one.runs(labels),
            stopped_by=stopped_by,
        )

    async def offer(self, offer: WeightsOffer) -> VersionRun:
        if offer.adapter and not self._facts.adapts:
            said = f"lora_name: found {offer.adapter!r:.200}; allowed: none, but in a run with engine.vllm.base set"
            raise DoorRefused(said, param="lora_name")
        if not offer.adapter and self._facts.adapts:
            raise DoorRefused(
                "found a whole model; allowed: adapters, by /load_lora_adapter, while engine.vllm.base is set"
            )
        if offer.adapter == self._facts.name:
            raise DoorRefused(f"lora_name: found the base's name, {offer.adapter!r:.200}", param="lora_name")
        try:
            look = await asyncio.to_thread(look_of, offer.directory)
        except OSError as error:
            raise DoorRefused(f"{offer.directory}: cannot be read ({error.strerror or error})") from error
        source = source_of_offer(OfferedWeights(str(offer.directory), offer.lasting, look))
        message = OfferWeights(0, source, f"{offer.label}\n{look}", offer.label, offer.abort_running)
        served = await self._ask(message, VersionServed, math.inf)
        return VersionRun(version=served.version, tokens=0, label=served.label)

    async def pause(self, mode: PauseMode) -> None:
        held = HoldTurns(0, held=True, wait=mode is PauseMode.WAIT, abort=mode is PauseMode.ABORT)
        await self._ask(held, ServingTold, math.inf if mode is PauseMode.WAIT else 0.0)

    async def resume(self) -> None:
        await self._ask(HoldTurns(0, held=False), ServingTold)

    async def abort_all(self) -> int:
        return (await self._ask(AbortTurns(0), ServingTold)).ended

    async def status(self) -> ServingState:
        told = await self._ask(AskServing(0), ServingTold)
        return ServingState(
            now=_now(told),
            paused=told.held,
            workers=told.workers,
            running=told.running,
            waiting=told.waiting,
            adapters=self._named(told),
        )

    def _named(self, told: ServingTold) -> tuple[str, ...]:
        """The names under which adapters were offered, as far as this front has heard."""
        if self._facts.adapts:
            for _, label in sorted(told.labels.items()):
                self._adapters.pop(label, None)
                self._adapters[label] = None
            while len(self._adapters) > NAMES_KEPT:
                del self._adapters[next(iter(self._adapters))]
        return tuple(self._adapters)

    async def _ask(self, message: Any, kind: type[AnswerT], answer_s: float = 0.0) -> AnswerT:
        """The run's answer, which is asked for again if the run is started again meanwhile. The run is waited for as
        long as calls are held, its answer so much longer. Raises `DoorRefused`."""
        while True:
            try:
                async with asyncio.timeout(self._hold_s):
                    await self._link.stands()
                async with asyncio.timeout(None if answer_s == math.inf else self._hold_s + answer_s):
                    answer = await self._link.ask(_numbered(message))
            except LinkLost:
                continue
            except TimeoutError:
                raise self._nothing_came() from None
            if isinstance(answer, Declined):
                raise declined(answer)
            assert isinstance(answer, kind)
            return answer

    def _nothing_came(self) -> DoorRefused:
        return DoorRefused(f"nothing came from the run for {self._hold_s:g} s", again=True, retry_after_s=1.0)


def _numbered(message: Any) -> Callable[[int], FromFront]:
    return lambda number: msgspec.structs.replace(message, request=number)


def _now(told: ServingTold) -> VersionRun:
    return VersionRun(version=told.version, tokens=0, label=told.labels.get(told.version, ""))


def declined(answer: Declined) -> DoorRefused:
    return DoorRefused(
        answer.message,
        again=answer.status >= 500 or answer.status == 429,
        param=answer.param,
        missing=answer.status == 404,
        retry_after_s=answer.retry_after_s,
    )


def failed(over: TurnOver) -> DoorRefused:
    """A turn that was given up can be asked for again: nothing of the request was at fault."""
    return DoorRefused(f"the turn has failed: {over.cause}", again=True, retry_after_s=over.retry_after_s)
