"""The core's vocabulary: identifiers, states and the small value types that events and commands carry.

Tokens are opaque here: the core knows (attempt, start, count), never ids. Times are integer nanoseconds on
the clock of whichever shell drives the core; the core itself never reads one.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import chain, repeat
from typing import Annotated, TypeAlias

import msgspec

Nanoseconds: TypeAlias = int
LeaseId: TypeAlias = str
WorkerId: TypeAlias = str
TrajectoryId: TypeAlias = str
TurnId: TypeAlias = str

NS_PER_S = 1_000_000_000

INTEGER_MAX = 2**53 - 1
"""The largest integer from outside: databases, JSON readers and floats all hold it exactly."""
TEXT_MAX = 4096
"""Characters of a text that a person is to read, or of a name."""
DEVICE_SPEED_MAX = 1e9
"""TFLOPS or GB/s of one worker: far above any device, so that a speed beyond it is no speed."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Speed: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=DEVICE_SPEED_MAX)]
NOISE_MAX = 0.5
"""The most noise, in nats, that an engine may declare: other weights differ by more."""


class PolicyFault(Exception):
    """A policy or a simulated market has failed, or has answered what its contract does not allow. The message has what
    was found and what is allowed."""


class Account(StrEnum):
    """The accounts of a GPU-nanosecond; each is in exactly one (docs/design.md, "A GPU-second")."""

    BOOTING = "booting"
    LOADING = "loading"
    APPLYING = "applying"
    IDLE = "idle"
    ASLEEP = "asleep"
    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"
    TRAINING = "training"
    SERVING = "serving"
    DRAINING = "draining"
    PARKED = "parked"
    SWITCHING = "switching"
    LOST = "lost"
    UNATTRIBUTED = "unattributed"


OVERHEAD_ACCOUNTS = frozenset(
    {
        Account.BOOTING,
        Account.LOADING,
        Account.APPLYING,
        Account.RECOMPUTE,
        Account.SWITCHING,
        Account.LOST,
        Account.UNATTRIBUTED,
    }
)
"""What counts as allocation overhead: time paid for that a fixed, never-failing device would not have spent.

RECOMPUTE is prefill that is paid again because a turn has moved. What an engine computes again of its own accord, since
its KV cache was full or its weights are new, is PREFILL: no capacity was lost, and a fixed device would pay it too.
SWITCHING is what parking and resuming take where jobs share a device.
"""
SHARED_ACCOUNTS = frozenset({Account.PARKED, Account.SWITCHING})
"""Accounts that only devices shared by jobs have."""
UNPRICED_ACCOUNTS = frozenset({Account.PARKED})
"""Time in which the device was others' to use and pay for: the worker lay in host memory."""


class LeaseState(StrEnum):
    REQUESTED = "requested"
    GRANTED = "granted"
    RELEASING = "releasing"
    ENDED = "ended"
    REFUSED = "refused"


class WorkerState(StrEnum):
    BOOTING = "booting"
    LOADING = "loading"
    READY = "ready"
    ASLEEP = "asleep"
    DRAINING = "draining"
    DETACHED = "detached"
    GONE = "gone"


class TurnState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    MOVING = "moving"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class GroupState(StrEnum):
    RUNNING = "running"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class ScoringState(StrEnum):
    """A trajectory on its way to a reward that a function computes."""

    QUEUED = "queued"
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    SCORED = "scored"
    UNAVAILABLE = "unavailable"


class InfrastructureCause(StrEnum):
    """Why a trajectory came to no reward through no doing of its own; every other cause is the episode's.

    An episode's own causes are those of its environment, of its agent and of what it said: an environment that raises,
    hangs or breaks its contract, a prompt without room for a turn, a reward that is no number.
    """

    ENGINE = "engine error"
    """Engines of several workers have failed with the same turn."""
    CAPACITY = "no capacity"
    """There was no worker that could take a turn, for too long."""
    PROGRESS = "no progress"
    """No worker that could take a turn has made a place for it, for too long."""
    REWARD = "reward unavailable"
    """Every attempt at its reward has failed in a way in which another one could have helped."""


class StalenessDrop(StrEnum):
    """What is not trained on of a group with tokens that the trainer has left behind by more than the bound."""

    GROUP = "group"
    TOKEN = "token"
    """These tokens; the group itself only once all of its tokens are."""


class WorkerRole(StrEnum):
    """TRAINER is the trainer's own device, which generates only inside a seeding window."""

    TRAINER = "trainer"
    DEDICATED = "dedicated"
    ELASTIC = "elastic"


class FinishReason(StrEnum):
    """Why a chunk is a turn's last: the first two end the turn, the others give it back to be routed again."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    STALLED = "stalled"
    ERROR = "error"


TURN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class WeightMode(StrEnum):
    """What happens to running turns when new weights are applied (docs/design.md, "A weights version")."""

    FINISH = "finish"
    RECOMPUTE = "recompute"
    KEEP = "keep"


class LoadPhase(StrEnum):
    """The phase of a worker's ordered load of weights. WAITING: for running turns to end (`finish`)."""

    NONE = "none"
    PULLING = "pulling"
    WAITING = "waiting"
    APPLYING = "applying"


class EndCause(StrEnum):
    """Why a lease ended."""

    RELEASED = "released"
    PREEMPTED = "preempted"
    EXPIRED = "expired"
    FENCED = "fenced"
    LOST = "lost"
    BOOT_TIMEOUT = "boot_timeout"
    BARRED = "barred"
    STRUCK_OUT = "struck_out"
    """Its workers' turns brought nothing while others' did."""
    MISMATCHED = "mismatched"
    """A worker's log-probabilities were not the trainer's with the same weights."""


DEATHS = frozenset(
    {
        *(EndCause.LOST, EndCause.FENCED, EndCause.BOOT_TIMEOUT),
        *(EndCause.BARRED, EndCause.STRUCK_OUT, EndCause.MISMATCHED),
    }
)
"""Ends of leases that came neither in order nor because a provider took its capacity back."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The leases that a provider can give now; `expected_life_s` is None if unknown.

    `replacements` can be had besides what is `available`, each only in place of a lease that ends soon.
    """

    provider: str
    role: WorkerRole
    available: int
    usd_per_gpu_hour: float
    gpus_per_worker: int = 1
    workers_per_lease: int = 1
    boot_s: float = 0.0
    expected_life_s: float | None = None
    replacements: int = msgspec.field(default=0, name="successors")
    billing_ns: Nanoseconds | msgspec.UnsetType = msgspec.UNSET
    """The billing increment; begun increments count whole. Unset if leases are billed to the nanosecond."""
    least_billed_ns: Nanoseconds | msgspec.UnsetType = msgspec.UNSET
    """What is billed of a lease at the least, however short it is."""
    usd_per_gpu_hour_most: float | msgspec.UnsetType = msgspec.UNSET
    """What a lease of this offer may cost at the most, where that is known only once it is granted."""
    ending_s: float | msgspec.UnsetType = msgspec.UNSET
    """How long the provider may take to prove a lease's end, where that is longer than a release may take."""
    grant_within_s: float | msgspec.UnsetType = msgspec.UNSET
    """How long a request may wait for its grant, where it is a turn on a shared pool; so may the trainer for a
    permit."""
    by_permit: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether the run computes on the device by permit, and is parked otherwise. Of the trainer's."""

    @property
    def boot_ns(self) -> Nanoseconds:
        """The provider's declared time from the grant to the worker's process."""
        return round(self.boot_s * NS_PER_S)

    @property
    def ending_ns(self) -> Nanoseconds:
        return round((self.ending_s or 0.0) * NS_PER_S)

    @property
    def grant_within_ns(self) -> Nanoseconds:
        """0 where requests are answered at once, or not at all."""
        return round((self.grant_within_s or 0.0) * NS_PER_S)


CHUNK_TOKENS_MAX = 1 << 16
CHUNKS_MAX = 1 << 14
PROMPT_TOKENS_MAX = 2**31 - 1
"""More than any context holds."""

PromptTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=PROMPT_TOKENS_MAX)]


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some tokens of a turn: `count` of weights `version`, from position `start` on.

    `slot` is the number that the worker was given with the turn. `prefilled` prompt tokens were computed for it, and
    `cached` more found in a prefix cache. Without tokens there is no version, whatever it says.
    """

    slot: int
    start: int
    count: int
    version: int
    finish: FinishReason | None = None
    detail: str = ""
    prefilled: int = 0
    cached: int = 0


class ChunkEnd(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The chunk at `place` is the last of its attempt."""

    place: Count
    finish: FinishReason
    detail: Text = ""


class ChunkPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the chunk at `place` tells of its prompt; fields as in `Chunk`."""

    place: Count
    prefilled: PromptTokens
    cached: PromptTokens


ChunkExtras: TypeAlias = tuple[FinishReason | None, str, int, int]
"""The finish, detail, prefilled and cached tokens of a chunk."""
NO_EXTRAS: ChunkExtras = (None, "", 0, 0)


class Chunks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Chunks in columns: chunk i has `counts[i]` tokens from position `starts[i]` on, of the turn in slot `slots[i]`.

    `versions` are runs (weights version, chunks); `ends` and `prompts`, ordered by place, are of few chunks.
    """

    slots: Annotated[list[Count], msgspec.Meta(max_length=CHUNKS_MAX)]
    starts: Annotated[list[Count], msgspec.Meta(max_length=CHUNKS_MAX)]
    counts: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=CHUNK_TOKENS_MAX)]], msgspec.Meta(max_length=CHUNKS_MAX)
    ]
    versions: Annotated[
        list[tuple[Annotated[int, msgspec.Meta(ge=-1, le=INTEGER_MAX)], Count]], msgspec.Meta(max_length=CHUNKS_MAX)
    ]
    ends: Annotated[list[ChunkEnd], msgspec.Meta(max_length=CHUNKS_MAX)] = []
    prompts: Annotated[list[ChunkPrompt], msgspec.Meta(max_length=CHUNKS_MAX)] = []

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> "Chunks":
        columns = cls([], [], [], [], [], [])
        for place, chunk in enumerate(chunks):
            columns.slots.append(chunk.slot)
            columns.starts.append(chunk.start)
            columns.counts.append(chunk.count)
            run = columns.versions.pop()[1] if columns.versions and columns.versions[-1][0] == chunk.version else 0
            columns.versions.append((chunk.version, run + 1))
            if chunk.finish is not None:
                columns.ends.append(ChunkEnd(place, chunk.finish, chunk.detail))
            if chunk.prefilled or chunk.cached:
                columns.prompts.append(ChunkPrompt(place, chunk.prefilled, chunk.cached))
        return columns

    @property
    def plain(self) -> Iterator[tuple[int, int, int, int]]:
        """Slot, start, count and version of each chunk."""
        if len(self.versions) == 1:
            versions = repeat(self.versions[0][0], len(self.slots))
        else:
            versions = chain.from_iterable(repeat(version, chunks) for version, chunks in self.versions)
        return zip(self.slots, self.starts, self.counts, versions, strict=True)

    @property
    def told(self) -> Mapping[int, ChunkExtras]:
        """By place, what there is to say of a chunk beyond what `plain` does."""
        found: dict[int, ChunkExtras] = {end.place: (end.finish, end.detail, 0, 0) for end in self.ends}
        for prompt in self.prompts:
            finish, detail, _, _ = found.get(prompt.place, NO_EXTRAS)
            found[prompt.place] = finish, detail, prompt.prefilled, prompt.cached
        return found

    def __iter__(self) -> Iterator[Chunk]:
        told = self.told
        for place, (slot, start, count, version) in enumerate(self.plain):
            finish, detail, prefilled, cached = told.get(place, NO_EXTRAS)
            yield Chunk(slot, start, count, version, finish, detail, prefilled, cached)

    def __len__(self) -> int:
        return len(self.slots)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's engine declares once when it joins. Values outside the bounds do not decode."""

    engine: Text
    replayable_sampling: bool
    max_context_tokens: Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)]
    device: Text
    tflops: Speed | None = None
    memory_gb_per_s: Speed | None = None
    max_batch: Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)] | None = None
    """Turns it executes at once; what it holds beyond that waits."""
    logprob_noise: Annotated[float, msgspec.Meta(ge=0, le=NOISE_MAX)] | msgspec.UnsetType = msgspec.UNSET
    """By how much its log-probabilities may differ from the trainer's for its numerics alone: the mean |log-ratio| of
    sampled tokens, in nats. Unset where they are the trainer's own."""


class LogprobCheck(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some tokens of a worker's beside the trainer's own log-probabilities, both with the weights of `version`.

    `log_ratio` is the sum of |log-ratio| over `tokens` of them, in nats.
    """

    worker: Text
    version: Count
    tokens: Count
    log_ratio: Annotated[float, msgspec.Meta(ge=0, le=INTEGER_MAX)]

    @property
    def mean(self) -> float:
        return self.log_ratio / max(1, self.tokens)


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of a turn are drawn, the same in each of its attempts.

    The turn ends at a token of `stop_token_ids` (which is emitted), or when it has `max_new_tokens` tokens in all,
    accepted ones included. A token is drawn from the softmax of the logits over `temperature`, of which `top_k` (0 for
    all) and then `top_p` leave only the likeliest; its log-probability is that of this distribution. At a temperature
    of zero the likeliest token is taken. `noise_seed` (64 bits) stands for (run seed, step, group, member, turn): the
    Gumbel noise
    of a token is a pure function of (noise_seed, position in the turn, token id).
    """

    max_new_tokens: int
    noise_seed: int
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class WorkerKind(msgspec.Struct, frozen=True, cache_hash=True):
    """Properties that make workers alike: their provider, and what their devices declare."""

    provider: str
    tflops: float | None = None
    memory_gb_per_s: float | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The time limits and counts of the core, in nanoseconds where they are times."""

    heartbeat_timeout_ns: int
    stall_timeout_ns: int
    turn_stall_timeout_ns: int
    handover_timeout_ns: int
    drain_timeout_ns: int
    acquire_timeout_ns: int
    boot_timeout_ns: int
    load_timeout_ns: int
    resume_timeout_ns: int
    release_timeout_ns: int
    queue_timeout_ns: int
    train_timeout_ns: int
    reseed_delay_ns: int
    retry_base_ns: int
    retry_max_ns: int
    max_engine_errors: int
    max_pending: int
    """Θ of delayed dispatch: turns a worker may have that it has not begun (RLBoost Alg. 2)."""
    balance_interval_ns: int = NS_PER_S // 4
    score_timeout_ns: int = 30 * NS_PER_S
    score_retry_ns: int = NS_PER_S // 5
    """First back-off after a failed attempt to score a trajectory; doubles, up to `retry_max_ns`."""
    score_attempts_max: int = 3
    scorings_max: int = 16
    """Attempts to score a trajectory that run at once: what the function pool can take."""
    trainer_restarts_max: int = 3
    """Losses of the trainer's device that a run survives."""
    catch_up_timeout_ns: int = 0
    """How much longer than its first process another one of the trainer's may take to join: it does again what its
    checkpoint does not have."""


class PlannedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment of a run, and its share of the groups. Of a group `members` begin, as many as it has unless
    said."""

    name: str = ""
    ratio: float = 1.0
    members: int = 0


class EvaluationSet(msgspec.Struct, frozen=True, kw_only=True):
    """The first `tasks` of an environment: the policy is evaluated on them."""

    environment: str
    tasks: int


class StopRule(msgspec.Struct, frozen=True, kw_only=True):
    """A run ends once this metric of its evaluations is `at_least` so high, or, where `no_better_for` is above 0, once
    so many evaluations after the best one were not better."""

    metric: str
    at_least: float | None = None
    no_better_for: int = 0


class PlannedEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """When the policy is evaluated, and on what: `samples` episodes of each task of the `sets`.

    Versions that are multiples of `every` are evaluated, and the first and the last one where that is wanted. Besides
    the mean reward there is pass@k for each k of `passes`. With `overlap` the next step goes on beside an evaluation.
    `keep_best` is the metric by which one version is the best; empty: none is.
    """

    sets: tuple[EvaluationSet, ...]
    samples: int
    timeout_ns: Nanoseconds
    every: int = 0
    at_start: bool = True
    at_end: bool = True
    passes: tuple[int, ...] = (1,)
    overlap: bool = False
    keep_best: str = ""
    stop: StopRule | None = None

    @property
    def episodes(self) -> int:
        return self.samples * sum(one.tasks for one in self.sets)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is to do: `steps` steps in all, of which as many are done as the trainer's weights version says.

    A step takes `groups` groups, split into `minibatches` optimiser updates. `staleness_bound` is how many versions
    older than the trainer's a token may be when it is trained on: 0 is synchronous training.
    """

    steps: int
    groups: int
    group_size: int
    staleness_bound: int = 0
    staleness_drop: StalenessDrop = StalenessDrop.GROUP
    minibatches: int = 1
    trainer_provider: str = "trainer"
    mismatch_max: float = 0.2
    """Mean |log-ratio| beyond which a worker does not serve the weights that it says, beside what its engine
    declares."""
    max_failed_share: float = 1.0
    """A run fails of whose trajectories a larger share has failed in the last steps."""
    driven_outside: bool = False
    """Agents outside of the run ask for turns: what waits too long for capacity is a turn given up, not the run."""
    environments: tuple[PlannedEnvironment, ...] = (PlannedEnvironment(),)
    refill_most: int = 0
    """How many further members may come, one after the other, in the place of one that failed for an
    `InfrastructureCause`."""
    own_loss: str = ""
    """The code by which the trainer computes a loss of its user's own: what may hold it up."""
    evaluation: PlannedEvaluation | msgspec.UnsetType = msgspec.UNSET
    """Unset where the policy is not evaluated."""
    idle_ns: Nanoseconds | msgspec.UnsetType = msgspec.UNSET
    """How long leases are kept without a request, in a run without groups; unset in others."""

    @property
    def serves_requests(self) -> bool:
        """Whether turns are requests of others, and versions what others have trained: the run has no groups."""
        return self.groups == 0


class BudgetForecast(msgspec.Struct, frozen=True, kw_only=True):
    """How a budget stands. `committed_usd` is what the run costs if it is stopped now; `ends_in_s` is when it will be
    with what it holds, None where that is never."""

    budget_usd: float
    committed_usd: float
    used_share: float
    warned: bool
    ends_in_s: float | None


class RunWarning(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the run's owner is to know at once: its kind in one word, and a sentence."""

    kind: str
    message: str
