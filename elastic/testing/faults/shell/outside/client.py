"""A trainer outside and its clients: they ask for turns, offer weights, pause, abort, vanish and ask again.

They speak to fronts by what fronts' doors speak to (`elastic.front.doors.served`), outlive all of the run's processes,
and check what they are given:

- Every request is answered, with all of its tokens, each of the version that it is said to be of. One that ends early
  was aborted while it was under way.
- No token is of an older version than had been answered when its request was made.
- What is answered to an offer is a version with that directory's weights, or with later ones.
- No request that is made while turns are held has tokens before they are not.
- What no run can serve is refused.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from elastic.core.types import Nanoseconds
from elastic.front.doors.base import (
    DoorRefused,
    PauseMode,
    ServedModelFacts,
    TokenAnswer,
    TokenChoice,
    TokenRequest,
    VersionRun,
    WeightsOffer,
)
from elastic.front.doors.served import LinkedRun
from elastic.runtime.episodes import stable_hash
from elastic.testing.faults.shell.agents.fronts import FrontGone, LinkedFront, ReplacedFronts
from elastic.testing.faults.shell.models import STOP, VOCABULARY, logprob_of, turn_tokens
from elastic.testing.faults.shell.outside.directories import OutsideDirectories
from elastic.testing.faults.shell.outside.plan import OutsidePlan

T = TypeVar("T")

HOLD_S = 20.0
"""Longest that a call waits for its first token, or for the run."""
AGAIN_S = 0.05, 1.0
LOST_ONE_IN = 16
"""Answers of which one is lost with its front, before it was written."""
PAUSES_S = 0.05, 0.5, 2.0
VANISH_S = 0.01, 1.0
REST_S = 8.0
"""The length of a rest of all clients at once: leases go back meanwhile in some worlds."""
MODEL = "policy"
PROMPTS = 4
"""How many prompts have a long beginning in common, each, with a session of their own."""
SHARED_TOKENS = 40
CLOSE = 1e-3
"""Log-probabilities travel in single precision."""
NEVER_NS = 10**30


class DoorFront(LinkedFront):
    """A front, by what its doors have of the run."""

    def __init__(self) -> None:
        super().__init__()
        facts = ServedModelFacts(
            name=MODEL, max_model_len=4096, vocab_size=VOCABULARY, dtype="bfloat16", created_s=0, turns_max=4096
        )
        self.run = LinkedRun(self.link, _NoText, facts, frozenset({STOP}), HOLD_S)


class _NoText:
    """`elastic.front.rendering.reading.Decoding`: what tokens say is of no interest here."""

    def feed(self, ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


@dataclass(eq=False)
class _Spell:
    """A time in which turns may be aborted, or are held, from when that was asked for."""

    began_ns: Nanoseconds
    ended_ns: Nanoseconds = NEVER_NS


class OutsideClient:
    """`found` is told of what must not be."""

    def __init__(
        self,
        plan: OutsidePlan,
        chance: Random,
        directories: OutsideDirectories,
        now_ns: Callable[[], Nanoseconds],
        found: Callable[[str], None],
    ) -> None:
        self.answered = 0
        """Requests that were answered."""
        self._plan = plan
        self._chance = chance
        self._directories = directories
        self._now_ns = now_ns
        self._found = found
        self.fronts = ReplacedFronts(DoorFront)
        self._version = 0
        """The newest that was answered to an offer."""
        self._written = 0
        self._lost = set[int]()
        """The seeds of requests whose answer was lost once, before it was written."""
        self._aborts: list[_Spell] = []
        self._aborting: list[_Spell] = []
        """The spells of offers that are not answered."""
        self._hold: _Spell | None = None
        """Since when no new turn begins, while that is so."""
        self._rests_until_ns = 0
        self._over = False
        self._prompts = [self._said(SHARED_TOKENS) for _ in range(PROMPTS)]

    def _said(self, tokens: int) -> list[int]:
        return [self._chance.randrange(1, VOCABULARY) for _ in range(tokens)]

    async def live(self) -> None:
        """Until all directories are offered and nothing goes wrong any more, and a little longer."""
        self.fronts.begin()
        await asyncio.gather(self._train(), *(self._ask_on() for _ in range(self._plan.askers)))

    async def _surely(self, ask: Callable[[LinkedRun], Coroutine[Any, Any, T]]) -> T:
        """Ask until there is an answer. Raises `DoorRefused` where asking again cannot help."""
        while True:
            front = self._chance.choice(self.fronts.all)
            try:
                return await front.attended(ask(front.run))
            except FrontGone:
                pass
            except DoorRefused as refused:
                if not refused.again:
                    raise
            await asyncio.sleep(self._chance.uniform(*AGAIN_S))

    # Requests

    async def _ask_on(self) -> None:
        while not self._over:
            await self._ask()
            if self._chance.random() < 1 / 4:
                await asyncio.sleep(self._chance.choice(PAUSES_S))
            if (rest_ns := self._rests_until_ns - self._now_ns()) > 0:
                await asyncio.sleep(rest_ns / 1e9)
        await self._ask()

    def _request(self) -> TokenRequest:
        chance, known = self._chance, self._chance.randrange(PROMPTS)
        shared = chance.random() < 1 / 2
        seed = chance.randrange(2**32)
        return TokenRequest(
            prompt_ids=[*(self._prompts[known] if shared else ()), *self._said(3)],
            choices=chance.choice((1, 1, 1, 2, 3)),
            max_tokens=chance.randint(1, self._plan.max_tokens),
            temperature=1.0,
            seed=seed,
            session=f"session {known}" if shared and chance.random() < 1 / 2 else "",
            key=f"key {seed}" if chance.random() < 1 / 4 else "",
        )

    async def _ask(self) -> None:
        """Make a request, perhaps vanish in the middle of it, and make it again."""
        request, first_ns, first_version = self._request(), self._now_ns(), self._version
        held = self._hold
        began_version = first_version
        answer, cut_off = None, False
        if self._chance.random() < 1 / 6:
            answer = await self._for_a_while(request)
            if answer is None:
                await asyncio.sleep(self._chance.choice(PAUSES_S))
                if self._chance.random() < 1 / 4:
                    return

        async def generate(run: LinkedRun) -> TokenAnswer:
            nonlocal began_version, cut_off
            began_version = first_version if request.key or cut_off else self._version
            try:
                return await self._generated(run, request)
            except asyncio.CancelledError:  # By the end of the front.
                cut_off = True
                raise

        try:
            answer = answer or await self._surely(generate)
        except DoorRefused as refused:
            self._found(f"a request is refused: {refused}")
            return
        self.answered += 1
        generated = any(choice.ids for choice in answer.choices)
        if held is not None and held.ended_ns == NEVER_NS and generated:
            self._found("a request that was made while turns were held has tokens, and they still are")
        if len(answer.choices) != request.choices:
            self._found(f"{len(answer.choices)} choices of {request.choices}")
        for number, choice in enumerate(answer.choices):
            self._check_choice(request, number, choice, began_version, first_ns)

    async def _generated(self, run: LinkedRun, request: TokenRequest) -> TokenAnswer:
        """The answer, unless its front ends before it was written."""
        with ExitStack() as answering:
            answer = await run.generate(request, answering)
            assert request.seed is not None
            if request.seed % LOST_ONE_IN == 0 and request.seed not in self._lost:
                self._lost.add(request.seed)
                raise FrontGone
            return answer

    async def _for_a_while(self, request: TokenRequest) -> TokenAnswer | None:
        """Make the request, and leave before it is answered, or not."""
        asking = asyncio.create_task(self._surely(lambda run: self._generated(run, request)), name="request")
        await asyncio.wait([asking], timeout=self._chance.uniform(*VANISH_S))
        asking.cancel()
        await asyncio.wait([asking])
        return None if asking.cancelled() else asking.result()

    def _check_choice(
        self, request: TokenRequest, number: int, choice: TokenChoice, least: int, asked_ns: Nanoseconds
    ) -> None:
        assert request.max_tokens is not None
        assert request.seed is not None
        expected = turn_tokens(stable_hash(request.seed, number), request.max_tokens)
        if choice.ids != expected[: len(choice.ids)]:
            self._found(f"a request has the tokens {choice.ids}, and not {expected}")
        whole = "stop" if expected[-1] == STOP else "length"
        if choice.finish == "abort":
            if not any(asked_ns <= spell.ended_ns for spell in self._aborts):
                self._found("a request was aborted, and nobody had asked for that since it was made")
        elif choice.finish != whole or len(choice.ids) != len(expected):
            self._found(f"a request has ended by {choice.finish!r} after {len(choice.ids)} of {len(expected)} tokens")
        for version in choice.versions:
            if version < least:
                self._found(f"a token is of version {version}, and {least} was answered before its request was made")
        if len(choice.versions) != len(choice.ids) or len(choice.logprobs) != len(choice.ids):
            self._found(f"{len(choice.ids)} tokens have {len(choice.versions)} versions")
            return
        at = len(request.prompt_ids)
        for place, (token, version, logprob) in enumerate(
            zip(choice.ids, choice.versions, choice.logprobs, strict=True)
        ):
            if abs(logprob - logprob_of(version, token, at + place)) > CLOSE:
                self._found(f"a token is said to be of version {version}, and is of another one")
        for run in choice.runs:
            if run.label and int(run.label) > self._directories.served[run.version]:
                self._found(f"version {run.version} is called {run.label}, and is {self._directories.served}")

    # Weights

    async def _train(self) -> None:
        chance, plan = self._chance, self._plan
        for _ in range(plan.offered):
            await asyncio.sleep(chance.uniform(0, 2 * plan.end_s / plan.offered))
            await chance.choice((self._step, self._step, self._step, self._pause_alone, self._offer_unfit))()
            if chance.random() < 1 / 8:
                self._rests_until_ns = self._now_ns() + round(REST_S * 1e9)
        if (left_ns := round(plan.end_s * 1e9) - self._now_ns()) > 0:
            await asyncio.sleep(left_ns / 1e9)
        await self._step()
        self._over = True

    async def _step(self) -> None:
        """Offer new weights as some trainer does: with a pause around it or without, and with aborts or without."""
        mode = self._chance.choice((None, None, *PauseMode))
        if mode is not None:
            await self._pause(mode)
        directory = await self._written_anew()
        if not self._plan.lasting and self._chance.random() < 1 / 4:
            directory = await self._gave_up(directory)
        for _ in range(self._chance.choice((1, 1, 1, 2))):
            await self._offer(directory)
        if self._plan.lasting:
            self._directories.remove(directory)
        if mode is not None:
            await self._resume()

    async def _written_anew(self) -> Path:
        self._written += 1
        name = f"step_{self._written}" if self._plan.lasting else "latest"
        await self._directories.write(self._directories.root / name, self._written)
        return self._directories.root / name

    async def _gave_up(self, directory: Path) -> Path:
        """Offer, leave before that is answered or not, and write the next weights over these."""
        offering = asyncio.create_task(self._offer(directory), name="offer")
        await asyncio.wait([offering], timeout=self._chance.uniform(*VANISH_S))
        offering.cancel()
        await asyncio.wait([offering])
        return await self._written_anew()

    async def _offer(self, directory: Path) -> None:
        number, abort = self._written, self._chance.random() < 1 / 4
        offer = WeightsOffer(directory=directory, label=str(number), abort_running=abort, lasting=self._plan.lasting)
        if abort:
            self._aborting.append(self._spell())
        try:
            served: VersionRun = await self._surely(lambda run: run.offer(offer))
        except DoorRefused as refused:
            self._found(f"the offer of {directory.name} is refused: {refused}")
            return
        for spell in self._aborting:  # Of offers that were left, too: they go on, and this one came behind them.
            spell.ended_ns = self._now_ns()
        self._aborting.clear()
        known = self._directories.served.get(served.version, -1)
        if known < number:
            self._found(f"weights {number} were answered to be version {served.version}, which is weights {known}")
        self._version = max(self._version, served.version)

    async def _offer_unfit(self) -> None:
        """Offer what cannot be served."""
        self._written += 1
        directory = self._directories.root / f"unfit_{self._written}"
        self._directories.write_unfit(directory, self._written)
        try:
            await self._surely(lambda run: run.offer(WeightsOffer(directory=directory, label=str(self._written))))
        except DoorRefused:
            return
        self._found(f"{directory.name} is served, which nobody can")

    async def _pause_alone(self) -> None:
        await self._pause(self._chance.choice(tuple(PauseMode)))
        await asyncio.sleep(self._chance.choice(PAUSES_S))
        if self._chance.random() < 1 / 2:
            spell = self._spell()
            await self._surely(lambda run: run.abort_all())
            spell.ended_ns = self._now_ns()
        await self._resume()

    async def _pause(self, mode: PauseMode) -> None:
        spell = self._spell() if mode is PauseMode.ABORT else None
        await self._surely(lambda run: run.pause(mode))
        if spell is not None:
            spell.ended_ns = self._now_ns()
        self._hold = _Spell(self._now_ns())

    async def _resume(self) -> None:
        assert self._hold is not None
        self._hold.ended_ns, self._hold = self._now_ns(), None
        await self._surely(lambda run: run.resume())

    def _spell(self) -> _Spell:
        self._aborts.append(spell := _Spell(self._now_ns()))
        return spell
