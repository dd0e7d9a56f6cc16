"""Models around the production code, each exact and small: an engine, a trainer's arithmetic, an environment."""

import asyncio
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel

from elastic.core.types import (
    Account,
    Capabilities,
    FinishReason,
    LogprobCheck,
    Nanoseconds,
    TrajectoryId,
    WeightMode,
    WorkerId,
)
from elastic.engine.base import NO_VERSION, ChunkSink, EngineStatistics, GenerateRequest, TokenChunk
from elastic.engine.model.stored import CheckpointError
from elastic.environments.base import StepResult
from elastic.protocol import wire
from elastic.protocol.sampled import ids_of
from elastic.system.host import here
from elastic.system.parking import Switch
from elastic.testing.faults.shell.ranks import TrainerRanks, dealt, gathered
from elastic.weights.client import WeightsClient
from elastic.weights.errors import VersionSuperseded
from elastic.weights.source import PullReport, RelaySource, WeightsSource
from elastic.worker.trainer.batches import by_member, without_overtaken
from elastic.worker.trainer.checkpoint import Counters
from functions.base import Call, CallOutcome, FunctionRaised, FunctionTimedOut, Meter

STOP = 0
SHARE_BYTES = 256
"""Bytes of a keyframe that one request of an engine reads, so that small keyframes need several requests too."""
VOCABULARY = 64


def drawn(*parts: object) -> int:
    """Return 64 bits that depend on the arguments alone."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big")


def turn_tokens(noise_seed: int, longest: int) -> list[int]:
    """Return the tokens of a turn, independent of the worker. The stop token is last, unless the turn is cut."""
    length = 1 + drawn(noise_seed, "length") % longest
    tokens = [1 + drawn(noise_seed, place) % (VOCABULARY - 1) for place in range(length)]
    if drawn(noise_seed, "stops") % 4:
        tokens[-1] = STOP
        return tokens
    return [1 + drawn(noise_seed, place) % (VOCABULARY - 1) for place in range(longest)]


PROOF_TOKENS = 8


def logprob_of(version: int, token: int, place: int) -> float:
    """Return the log-probability that the weights of a version give the token at this place of its trajectory.

    Those of different versions are about a nat apart in the mean.
    """
    return -3.0 * (drawn(version, token, place) % 1000) / 1000


def proof_of(version: int, logprob: Callable[[int, int, int], float] = logprob_of) -> list[float]:
    """The log-probabilities by which a version is known, as a device gives them."""
    return [logprob(version, place, place) for place in range(PROOF_TOKENS)]


SKIPPED = "skipped"
"""How all groups of a step together are called that were compared and not trained on."""


class TrainedGroup(NamedTuple):
    """What a trainer has made of a group: what it found of each worker's tokens, the workers of whose tokens it has
    trained on some, whose tokens it took each trajectory's to be, its members with their rewards, and the versions of
    the tokens that it has trained on."""

    checks: Mapping[WorkerId, LogprobCheck]
    trained_on: frozenset[WorkerId] = frozenset()
    origins: Mapping[TrajectoryId, list[tuple[WorkerId, int]]] = {}
    members: Mapping[TrajectoryId, float] = {}
    versions: frozenset[int] = frozenset()


class Impostor(Enum):
    """What an engine generates with that does not use the weights which it has put in force."""

    FORMER = "former"
    ZEROS = "zeros"
    NOISE = "noise"


@dataclass
class ModelDevice:
    """The faults of a worker's device: until when its engine stands still, is slow, or belongs to its owner.

    `now_ns` is the world's time. An `honest` device announces no credit while it belongs to its owner.
    """

    now_ns: Callable[[], Nanoseconds]
    hangs_until_ns: Nanoseconds = 0
    slow_until_ns: Nanoseconds = 0
    slowness: float = 1.0
    serves: Impostor | None = None
    """What it generates with in place of its weights."""
    holds: bool = False
    """Whether its engine says that all turns wait, and gets on with none."""
    begins_elsewhere: bool = False
    brings_every: int = 1
    """How many of its iterations bring one token."""
    held_until_ns: Nanoseconds = 0
    fails: type[Exception] | None = None
    """The error that the next load of weights raises, after a while."""
    fails_after_s: float = 0.0
    rots: bool = False
    """Whether a bit of the weights is about to change."""
    honest: bool = True

    def hangs(self) -> bool:
        return self.now_ns() < self.hangs_until_ns

    def load(self) -> None:
        """Raise the failure that the world has planned for this load, after `fails_after_s`; return at once if there
        is none."""
        fails, self.fails = self.fails, None
        if fails is not None:
            here().sleep(self.fails_after_s)
            raise fails("the device fails")

    def takes(self) -> float:
        """Return by what factor the device is slower than normal."""
        return self.slowness if self.now_ns() < self.slow_until_ns else 1.0

    # `elastic.engine.base.DeviceShare`, of a device whose owner takes it now and then

    def logprob(self, version: int, token: int, place: int) -> float:
        """Return the log-probability of a token that the engine says to be of this version."""
        match self.serves:
            case Impostor.FORMER:
                return logprob_of(version - 1, token, place)
            case Impostor.ZEROS:
                return -math.log(VOCABULARY)
            case Impostor.NOISE:
                return logprob_of(version, token, place) + logprob_of(-1, token, place)
            case None:
                return logprob_of(version, token, place)

    def capacity_turns(self, most: int) -> int:
        return 0 if self.honest and self.hold_back() else most

    def acquire_iteration(self) -> int:
        return 0

    def hold_back(self) -> bool:
        return self.now_ns() < self.held_until_ns


class LoadWatch:
    """Watches how a worker's engine gets its weights; this one is nobody's."""

    def pulls(self, source: RelaySource) -> AbstractContextManager[None]:
        """A context: while it lasts, the worker pulls the version that it was told to pull."""
        return nullcontext()

    def applied(self, source: RelaySource, bits: bytes) -> None:
        """The worker has put `bits` in force as the version that it was told to pull."""

    def unsound(self) -> None:
        """The worker has found that its weights have changed by themselves, and pulls them again."""

    def failed(self, began_ns: Nanoseconds) -> None:
        """A load has failed that began at `began_ns` of the world's time."""


ELSEWHERE = 5
LOADS_MAX = 8
"""Loads under way or just finished in one worker."""


class ModelEngine:
    """`elastic.engine.base.RolloutEngine` that makes a token of each running turn in each iteration of `step_s`."""

    def __init__(
        self,
        now_ns: Callable[[], Nanoseconds],
        device: ModelDevice,
        max_batch: int,
        max_pending: int,
        step_s: float,
        watch: LoadWatch,
    ) -> None:
        self.capabilities = Capabilities(
            engine="model", replayable_sampling=True, max_context_tokens=4096, device="model", max_batch=max_batch
        )
        self._now_ns = now_ns
        self._watch = watch
        self._began: deque[tuple[RelaySource, Nanoseconds]] = deque(maxlen=LOADS_MAX)
        """Loads, and when, by the world's time."""
        self._client = WeightsClient(share_bytes=SHARE_BYTES)
        self._tensors: Mapping[str, object] = {}
        self._rotten = False
        """Whether some of them are not what was pulled, and nobody has found that yet."""
        self._device = device
        self._max_batch = max_batch
        self._max_pending = max_pending
        self._step_s = step_s
        self._requests: dict[str, tuple[GenerateRequest, list[int], int]] = {}
        """Each with its tokens and how far it has come; the first `max_batch` run."""
        self._fresh: set[str] = set()
        self._version: int | None = None
        self.proof: Sequence[float] = ()
        """`elastic.engine.base.Provable`."""
        self._asleep = False
        self._iterating: asyncio.TimerHandle | None = None
        self._iterations = self._decoded = self._prompt = 0
        self._accounts: dict[Account, int] = {}
        self._account = Account.LOADING
        self._idle = Account.LOADING
        self._since_ns = now_ns()
        self.closed = False

    def start(self, sink: ChunkSink) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            if request.request_id not in self._requests:
                tokens = turn_tokens(request.sampling.noise_seed, request.sampling.max_new_tokens)
                # A Byzantine worker may have gone on beyond the turn's end.
                tokens += [STOP] * (request.start + 1 - len(tokens))
                self._requests[request.request_id] = (request, tokens, request.start)
                self._fresh.add(request.request_id)
        self._go_on()

    def abort(self, request_ids: Sequence[str]) -> None:
        ended = [self._requests.pop(name) for name in request_ids if name in self._requests]
        if ended:
            self._sink([self._last(request, at) for request, _, at in ended])
        self._go_on()

    def _last(self, request: GenerateRequest, at: int) -> TokenChunk:
        self._fresh.discard(request.request_id)
        return TokenChunk(request.request_id, at, [], [], NO_VERSION, FinishReason.ABORTED)

    def prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        self._rot()
        self._began.append((source, self._device.now_ns()))
        try:
            with self._watch.pulls(source):
                return self._client.stage(source, timeout_s)
        except Exception:
            self._failed(source)
            raise

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        try:
            self._device.load()
            if isinstance(source, RelaySource):
                self._tensors = self._client.apply(source).tensors
                if not self._rotten:
                    self._watch.applied(source, bits_of(self._tensors))
        except VersionSuperseded:
            raise
        except Exception:
            self._failed(source)
            raise
        self._version, self.proof = source.version, proof_of(source.version, self._device.logprob)
        return 0.0

    def _failed(self, source: WeightsSource) -> None:
        for load, began_ns in self._began:
            if load is source:
                self._watch.failed(began_ns)

    def audit(self) -> bool:
        self._rot()
        sound = self._client.audit()
        self._rotten &= sound  # What is found is replaced by the next pull.
        if not sound:
            self._watch.unsound()
        return sound

    def _rot(self) -> None:
        if self._device.rots and self._tensors:
            self._device.rots, self._rotten = False, True
            tensor: Any = next(iter(self._tensors.values()))
            tensor.view(torch.int16)[0] ^= 1

    def sleep(self) -> None:
        self.abort(list(self._requests))
        self._asleep = True
        self._go_on()

    def wake(self) -> None:
        self._asleep = False
        self._go_on()

    def set_idle_account(self, account: Account) -> None:
        self._idle = account
        self._go_on()

    def statistics(self) -> EngineStatistics:
        self._meter()
        executing = 0 if self._asleep or self._device.holds else min(self._max_batch, len(self._requests))
        return EngineStatistics(
            pending=len(self._requests) - executing,
            executing=executing,
            capacity_turns=0 if self._asleep else self._max_batch + self._max_pending,
            kv_blocks_used=0,
            kv_blocks_total=1,
            prefix_hit_tokens=0,
            prompt_tokens=self._prompt,
            decoded_tokens=self._decoded,
            progress=self._iterations,
            accounts_ns=dict(self._accounts),
            weights_version=self._version,
            asleep=self._asleep,
            received_bytes=self._client.received_bytes,
        )

    def close(self) -> None:
        self.closed = True
        self._client.close()
        if self._iterating is not None:
            self._iterating.cancel()

    def _go_on(self) -> None:
        self._meter()
        busy = bool(self._requests) and not self._asleep and self._version is not None
        self._account = Account.ASLEEP if self._asleep else Account.DECODE if busy else self._idle
        if busy and self._iterating is None and not self.closed:
            self._iterating = self._loop.call_later(self._step_s * self._device.takes(), self._iterate)

    def _meter(self) -> None:
        now_ns = self._now_ns()
        self._accounts[self._account] = self._accounts.get(self._account, 0) + now_ns - self._since_ns
        self._since_ns = now_ns

    def _iterate(self) -> None:
        self._iterating = None
        if self._asleep or self._version is None:
            return
        if self._device.hangs():
            self._go_on()
            return
        self._iterations += 1
        if self._device.holds or self._iterations % self._device.brings_every:
            self._go_on()
            return
        chunks: list[TokenChunk] = []
        for name, (request, tokens, at) in list(self._requests.items())[: self._max_batch]:
            token, fresh = tokens[at], name in self._fresh
            self._fresh.discard(name)
            self._decoded += 1
            finish = None
            if at + 1 == len(tokens):
                finish = FinishReason.STOP if token == STOP else FinishReason.LENGTH
                del self._requests[name]
            else:
                self._requests[name] = (request, tokens, at + 1)
            prefilled = len(request.token_ids) if fresh else 0
            self._prompt += prefilled
            place = len(request.token_ids) - request.start + at
            logprob = self._device.logprob(self._version, token, place)
            at += ELSEWHERE if self._device.begins_elsewhere else 0
            chunks.append(TokenChunk(name, at, [token], [logprob], self._version, finish, 0, prefilled))
        self._sink(chunks)
        self._go_on()


SHAPES = {"model.embed_tokens.weight": (16, 16), "model.layers.0.weight": (16, 24), "model.norm.weight": (9,)}
ELEMENTS = sum(math.prod(shape) for shape in SHAPES.values())


class Weights(msgspec.Struct):
    """The groups that the trainer has learnt, in order. The same order gives the same bits."""

    version: int = 0
    learnt: list[tuple[int, str, int]] = []
    """Step, group, and a checksum of the group's trajectories."""

    def copy(self) -> "Weights":
        return Weights(self.version, list(self.learnt))

    def bits(self) -> npt.NDArray[np.uint16]:
        """Return the patterns of version 0, changed by every group that was learnt."""
        bits = (np.arange(ELEMENTS) * 2654435761 >> 7).astype(np.uint16)
        for step, _, what in self.learnt:
            if step < self.version:
                drawn_bits = np.frombuffer(hashlib.blake2b(b"%d" % what).digest(), np.uint16)
                bits[drawn_bits[:16] % ELEMENTS] = drawn_bits[16:]
        return bits

    def tensors(self) -> dict[str, torch.Tensor]:
        flat = torch.from_numpy(self.bits().view(np.int16)).view(torch.bfloat16)
        parts = flat.split([math.prod(shape) for shape in SHAPES.values()])
        return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def bits_of(tensors: Mapping[str, Any]) -> bytes:
    """Return the patterns of all tensors."""
    return b"".join(tensors[name].contiguous().view(torch.int16).numpy().tobytes() for name in SHAPES)


class ModelTrainer:
    """`elastic.worker.trainer.base.PolicyTrainer` that learns by recording groups. `stepped` is told what it has
    learnt; `has` is told the weights of each version, and `seen` what it makes of each group. It may have several
    `ranks`."""

    def __init__(
        self,
        stepped: Callable[[Weights], None],
        has: Callable[[int, bytes], None],
        seen: Callable[[str, TrainedGroup], None] = lambda *_: None,
        mismatch_max: float = 0.2,
        proves: bool = False,
        ranks: TrainerRanks | None = None,
    ) -> None:
        self.metrics: dict[str, float] = {}
        self.unusable: Mapping[str, str] = {}
        self._weights = Weights()
        self._checks: list[LogprobCheck] = []
        self._skipped: list[wire.TrajectoryData] = []
        self._seen = seen
        self._mismatch_max = mismatch_max
        self._proves = proves
        self._ranks = ranks or TrainerRanks(1, lambda: 0)
        self._stepped = stepped
        self._has = has

    @property
    def version(self) -> int:
        return self._weights.version

    def train_group(self, group: wire.TrainGroupFrame) -> None:
        if group.step != self.version:
            raise AssertionError(f"{group.group} of step {group.step} at version {self.version}")
        self._ranks.together()
        what = drawn(*(t for d in group.trajectories for t in (d.trajectory, *ids_of(d.token_ids), d.sampled.reward)))
        self._weights.learnt.append((group.step, group.group, what))
        found = self._compare(group.trajectories)
        self._checks += found.values()
        origins: dict[TrajectoryId, list[tuple[WorkerId, int]]] = {}
        for data in group.trajectories:
            origins[data.trajectory] = origins.get(data.trajectory, []) + data.sampled.origins
        used: set[WorkerId] = set()
        for worker in {worker for parts in origins.values() for worker, _ in parts}:
            bound = group.bounds.get(worker, self._mismatch_max)
            if bound is not None and (worker not in found or found[worker].mean <= bound):
                used.add(worker)
        members = by_member(group.trajectories)
        taken = without_overtaken(group, [0.0] * len(group.trajectories))[0].trajectories
        versions = frozenset(version for data in taken for version, _ in data.sampled.versions)
        self._seen(group.group, TrainedGroup(found, frozenset(used), origins, members, versions))

    def skip_group(self, index: int, tokens: int, trajectories: Sequence[wire.TrajectoryData]) -> None:
        self._ranks.together()
        self._skipped += trajectories

    def proof(self) -> list[float]:
        return proof_of(self.version) if self._proves else []

    def take_checks(self) -> list[LogprobCheck]:
        checks, self._checks = self._checks, []
        return checks

    def _compare(self, trajectories: Sequence[wire.TrajectoryData]) -> dict[str, LogprobCheck]:
        """Compare the tokens of this version, by worker."""
        found: dict[str, LogprobCheck] = {}
        for data in trajectories:
            sampled, ids = data.sampled, ids_of(data.token_ids)
            workers = itertools.chain.from_iterable([worker] * count for worker, count in sampled.origins)
            places = sampled.trained(len(ids)).nonzero()[0].tolist()
            of_tokens = zip(
                workers, places, sampled.token_versions().tolist(), sampled.token_logprobs().tolist(), strict=True
            )
            for worker, place, version, logprob in of_tokens:
                if version == self.version:
                    far = abs(logprob_of(self.version, ids[place], place) - logprob)
                    known = found.get(worker, LogprobCheck(worker, self.version, 0, 0.0))
                    found[worker] = LogprobCheck(worker, self.version, known.tokens + 1, known.log_ratio + far)
        return found

    def update(self) -> dict[str, float]:
        self._ranks.together()
        found = self._compare(self._skipped)
        self._checks += found.values()
        self._seen(f"{SKIPPED} {self.version}", TrainedGroup(found))
        self._skipped.clear()
        self._weights.version += 1
        self._stepped(self._weights.copy())
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        self._ranks.together()
        tensors = self._weights.tensors()
        self._has(self.version, bits_of(tensors))
        return tensors

    def save(self, path: Path) -> None:
        if self._ranks.size > 1:
            counters = Counters(version=self.version, updates=self.version)
            self._ranks.save(path, counters, dealt(self._ranks.size, self._weights.learnt))
            return
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgspec.msgpack.encode(self._weights))

    def load(self, path: Path) -> None:
        if self._ranks.size > 1:
            counters, parts = self._ranks.load(path)
            self._weights = Weights(counters.version, gathered(tuple[int, str, int], parts))
            return
        try:
            self._weights = msgspec.msgpack.decode(path.read_bytes(), type=Weights)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{path}: damaged ({error})") from error

    def park(self) -> Switch:
        self._ranks.together()
        return Switch(0.0, 0)

    def resume(self) -> Switch:
        self._ranks.together()
        return Switch(0.0, 0)


class NoSettings(BaseModel):
    pass


class ModelFailure(Enum):
    """What can go wrong with an environment or a function."""

    RAISES = "raises"
    HANGS = "hangs"


def scored(token_ids: Sequence[int]) -> float:
    """Return the reward that a function gives a trajectory."""
    return float(drawn("score", *token_ids) % 2)


class ModelPool:
    """`functions.base.FunctionPool` whose calls take a moment. A repeated call gets the same answer."""

    def __init__(self, meter: Meter, failure: Callable[[], ModelFailure | None]) -> None:
        self._meter = meter
        self._failure = failure
        self._answers: dict[str, float] = {}

    async def start(self) -> None:
        pass

    async def invoke(self, key: str, payload: Any, timeout_s: float) -> float:
        began_s = asyncio.get_running_loop().time()
        try:
            return await self._called(key, payload, timeout_s)
        finally:
            took_s = asyncio.get_running_loop().time() - began_s
            times_s = {"queued_s": 0.0, "cold_start_s": 0.0, "duration_s": took_s}
            self._meter(Call(function="model", key=key, outcome=CallOutcome.OK, usd=0.0, **times_s))

    async def _called(self, key: str, payload: Any, timeout_s: float) -> float:
        await asyncio.sleep(0.01 + drawn(key) % 50 / 1000)
        match self._failure():
            case ModelFailure.RAISES:
                raise FunctionRaised(f"{key}: it is out of order")
            case ModelFailure.HANGS:
                await asyncio.sleep(timeout_s)
                raise FunctionTimedOut(f"{key}: no answer within {timeout_s:g} s")
            case None:
                return self._answers.setdefault(key, scored(payload["token_ids"]))

    def most_usd(self, timeout_s: float) -> float:
        return 0.0

    async def aclose(self) -> None:
        pass


class ModelEnvironment:
    """An environment with as many turns as the seed says. Its answers depend on the tokens that it gets."""

    Settings: ClassVar[type[BaseModel]] = NoSettings
    vocabulary: ClassVar[tuple[str, ...]] = tuple(str(number) for number in range(VOCABULARY))
    stop_token_ids: ClassVar[tuple[int, ...]] = (STOP,)

    def __init__(self, settings: BaseModel, failure: "Callable[[], ModelFailure | None]" = lambda: None) -> None:
        self._told: list[int] = []
        self._failure = failure

    async def reset(self, seed: int) -> list[int]:
        await asyncio.sleep(0.01)
        await self._fail_or_hang()
        return self.begin(seed)

    async def step(self, token_ids: list[int]) -> StepResult:
        await asyncio.sleep(0.005 + drawn(self._seed, len(self._told)) % 20 / 1000)
        await self._fail_or_hang()
        return self.answer(token_ids)

    async def _fail_or_hang(self) -> None:
        match self._failure():
            case ModelFailure.RAISES:
                raise RuntimeError("the environment is out of order")
            case ModelFailure.HANGS:
                await asyncio.get_running_loop().create_future()
            case None:
                pass

    def begin(self, seed: int) -> list[int]:
        self._seed, self._turns = seed, 1 + drawn(seed, "turns") % 3
        return [1 + drawn(seed, place) % (VOCABULARY - 1) for place in range(5)]

    def answer(self, token_ids: list[int]) -> StepResult:
        self._told += token_ids
        self._turns -= 1
        done = self._turns == 0
        reward = float(drawn(*self._told) % 2)
        return StepResult([] if done else [1 + drawn(*self._told, "said") % (VOCABULARY - 1)] * 3, done, reward)

    async def truncate(self) -> float:
        return 0.0

    async def aclose(self) -> None:
        if self._failure() is ModelFailure.RAISES:
            raise RuntimeError("the environment is out of order")
