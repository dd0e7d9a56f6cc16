"""A run in memory, on the other side of a front's doors: its turns are held, go on, are aborted, and have versions.

Token N of an answer to a prompt of P tokens is P + N, and its log-probability minus a thousandth of that, so a test can
tell what it was given.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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

CONTEXT_TOKENS = 256
TURNS_MAX = 16
LOGPROB_OF = -0.001


class MemoryTurn:
    def __init__(self, request: TokenRequest, most: int) -> None:
        self.request = request
        self.most = most
        self.ids: list[int] = []
        self.versions: list[int] = []
        self.aborted = False
        self.running = False


class MemoryRun:
    """Offers are taken if their directory is there and has a file of safetensors. Turns stop at `gate` tokens, as if
    that was as far as their worker has come."""

    def __init__(self, name: str = "policy") -> None:
        self.model = ServedModelFacts(
            name=name,
            max_model_len=CONTEXT_TOKENS,
            vocab_size=1000,
            dtype="bfloat16",
            created_s=1,
            turns_max=TURNS_MAX,
        )
        self.paused = False
        self.gate: int | None = None
        self.offers: list[WeightsOffer] = []
        self.requests: list[TokenRequest] = []
        self.pauses: list[PauseMode] = []
        self.given = self.left = 0
        """Requests whose clients had the whole answer, and those whose clients have vanished before."""
        self.refuses: DoorRefused | None = None
        """What every call is refused with."""
        self.refused = 0
        self.taken: list[dict[str, torch.Tensor]] = []
        """The tensors of each offer."""
        self.files: list[int] = []
        """In how many files they were."""
        self.labels = [""]
        self.adapters: dict[str, None] = {}
        self._turns: list[MemoryTurn] = []
        self._changed = asyncio.Condition()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(condition)

    async def open_gate(self) -> None:
        self.gate = None
        await self._say()

    @property
    def reached(self) -> int:
        """How many turns have come to the gate."""
        return sum(turn.running and len(turn.ids) == self.gate for turn in self._turns)

    async def generate(self, request: TokenRequest, answering: ExitStack) -> TokenAnswer:
        await self._check(request)
        self.requests.append(request)
        turn = MemoryTurn(request, min(request.max_tokens or CONTEXT_TOKENS, CONTEXT_TOKENS - len(request.prompt_ids)))
        self._turns.append(turn)
        await self._say()
        try:
            await self._play(turn)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self._turns.remove(turn)
            await self._say()
        answering.push(self._over)
        return self._answer(turn)

    def _over(self, why_not: type[BaseException] | None, *_: object) -> None:
        self.given += why_not is None
        self.left += why_not is not None

    async def _check(self, request: TokenRequest) -> None:
        await self._refuse()
        if request.model and request.model not in (self.model.name, *self.adapters):
            raise DoorRefused(f"no model {request.model!r} was offered", param="model", missing=True)
        if len(request.prompt_ids) >= CONTEXT_TOKENS:
            raise DoorRefused(f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, …")

    async def _play(self, turn: MemoryTurn) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: turn.aborted or not self.paused)
        turn.running = True
        while len(turn.ids) < turn.most and not turn.aborted:
            if self.gate is not None and len(turn.ids) >= self.gate:
                await self._say()
                async with self._changed:
                    await self._changed.wait_for(lambda: turn.aborted or self.gate is None)
                continue
            turn.ids.append(len(turn.request.prompt_ids) + len(turn.ids))
            turn.versions.append(len(self.labels) - 1)
            await asyncio.sleep(0)

    def _answer(self, turn: MemoryTurn) -> TokenAnswer:
        finish = "abort" if turn.aborted else "length"
        stop = next((one for one in turn.request.stop_token_ids if one in turn.ids), None)
        if stop is not None:
            del turn.ids[turn.ids.index(stop) + 1 :]
            finish = "stop"
        choice = TokenChoice(
            ids=turn.ids,
            logprobs=[LOGPROB_OF * token for token in turn.ids],
            text=" ".join(map(str, turn.ids)),
            finish=finish,
            runs=tuple(self._version(number, turn.versions.count(number)) for number in sorted({*turn.versions})),
            stopped_by=stop,
        )
        return TokenAnswer(
            id=f"{len(self.requests)}/0",
            choices=[choice] * turn.request.choices,
            prompt_tokens=len(turn.request.prompt_ids),
            now=self._version(),
            cached_tokens=2,
        )

    def _version(self, number: int = -1, tokens: int = 0) -> VersionRun:
        number = len(self.labels) - 1 if number < 0 else number
        return VersionRun(version=number, tokens=tokens, label=self.labels[number])

    async def offer(self, offer: WeightsOffer) -> VersionRun:
        await self._refuse()
        if not any(offer.directory.glob("*.safetensors")):
            raise DoorRefused(f"{offer.directory}: has no weights", missing=not offer.directory.is_dir())
        self.offers.append(offer)
        self.files.append(len(list(offer.directory.glob("*.safetensors"))))
        self.taken.append(tensors_of(offer.directory))
        self.labels.append(offer.label)
        if offer.adapter:
            self.adapters[offer.adapter] = None
        if offer.abort_running:
            await self.abort_all()
        return self._version()

    async def pause(self, mode: PauseMode) -> None:
        await self._refuse()
        self.pauses.append(mode)
        self.paused = True
        await self._say()
        if mode is PauseMode.ABORT:
            await self.abort_all()
        if mode is PauseMode.WAIT:
            await self.until(lambda: not any(turn.running for turn in self._turns))

    async def resume(self) -> None:
        self.paused = False
        await self._say()

    async def abort_all(self) -> int:
        for turn in self._turns:
            turn.aborted = True
        await self._say()
        return len(self._turns)

    async def status(self) -> ServingState:
        await self._refuse()
        running = sum(turn.running for turn in self._turns)
        return ServingState(
            now=self._version(),
            paused=self.paused,
            workers=1,
            running=running,
            waiting=len(self._turns) - running,
            adapters=tuple(self.adapters),
        )

    async def _refuse(self) -> None:
        if self.refuses is not None:
            self.refused += 1
            await self._say()
            raise self.refuses

    async def _say(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint; where it has an index, those that this names, each from its shard."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        shards = {name: load_file(directory / name) for name in {*places.values()}}
        return {name: shards[shard][name] for name, shard in places.items()}
    [file] = directory.glob("*.safetensors")
    return load_file(file)


def offered(root: Path, name: str, value: float = 0.0) -> Path:
    """A directory with weights below a root."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.full((2, 2), value)}, directory / "model.safetensors")
    return directory
