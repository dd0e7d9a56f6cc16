"""The resources of the hosted control API, as the server sends them and the client reads them.

Money is in dollars, times are RFC 3339 in UTC, durations are in seconds. The examples of fields are those of the API's
description. The client ignores unknown fields, so that an older one reads what a newer server sends.
"""

import json
import re
import tomllib
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, WithJsonSchema

T = TypeVar("T")

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME)]
_ULID = "01JD3K5T7WQ8M2N4P6R8S0V2X4"
RunId = Annotated[str, Field(examples=[f"run_{_ULID}"])]
ProjectId = Annotated[str, Field(examples=[f"proj_{_ULID}"])]
KeyId = Annotated[str, Field(examples=[f"key_{_ULID}"])]
RequestId = Annotated[str, Field(examples=[f"req_{_ULID}"])]
WebhookId = Annotated[str, Field(examples=[f"hook_{_ULID}"])]
UploadId = Annotated[str, Field(examples=[f"upl_{_ULID}"])]
Timestamp = Annotated[str, Field(examples=["2026-11-22T08:00:00Z"])]
PoolName = Annotated[str, Field(examples=["lab"])]
GroupName = Annotated[str, Field(examples=["group-1"])]
ProviderName = Annotated[str, Field(examples=["spot"])]
AccountSeconds = Annotated[dict[str, float], Field(examples=[{"decode": 31.2, "idle": 2.0}])]
_CONFIG = {"run": {"name": "frozenlake", "steps": 100}, "model": {"checkpoint": ".cache/frozenlake-base"}}
ShownConfig = Annotated[dict[str, Any], Field(examples=[_CONFIG])]


def _integral(value: object) -> object:
    """To JSON 1.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_NO_TEXT = "has half of a pair of surrogates, which is no text"


def _is_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


CONFIG_VALUES, CONFIG_DEPTH, NUMBER_MAX = 10_000, 32, 1e15
TOML_MAX = 2**16
"""Characters of a configuration that comes as TOML."""


def _bounded(config: dict[str, Any]) -> dict[str, Any]:
    """Refuse what no configuration has and what would cost much to look at. Raises `ValueError`."""
    left: list[tuple[str, Any, int]] = [("config", config, 0)]
    count = 0
    while left:
        place, value, depth = left.pop()
        count += 1 + (len(value) if isinstance(value, (dict, list)) else 0)
        if count > 2 * CONFIG_VALUES:
            raise ValueError(f"found more than {CONFIG_VALUES} keys and values; allowed: as many")
        if depth > CONFIG_DEPTH:
            raise ValueError(f"{place[:100]}: is nested more than {CONFIG_DEPTH} levels deep; allowed: as many")
        texts = tuple(value) if isinstance(value, dict) else (value,)
        if not all(_is_text(text) for text in texts if isinstance(text, str)):
            raise ValueError(f"{place}: {_NO_TEXT}".encode(errors="replace").decode())
        if isinstance(value, dict):
            left += [(f"{place[:200]}.{str(key)[:100]}", inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [(f"{place[:200]}.{number}", inner, depth + 1) for number, inner in enumerate(value)]
        elif isinstance(value, float) and not abs(value) <= NUMBER_MAX:
            raise ValueError(f"{place}: found {value:g}; allowed: numbers from {-NUMBER_MAX:g} to {NUMBER_MAX:g}")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{place}: found a whole number of more than 64 bits; allowed: at most as many")
    return config


def _sections(config: object) -> object:
    """The sections of a configuration, also where they come as the text of a TOML file. Raises `ValueError`."""
    if not isinstance(config, str):
        return config
    if len(config) > TOML_MAX:
        raise ValueError(f"found TOML of {len(config)} characters; allowed: {TOML_MAX} at most")
    try:
        return json.loads(json.dumps(tomllib.loads(config)))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is no TOML: {error}") from None
    except TypeError:
        raise ValueError("has a date or a time; allowed: texts in their place") from None
    except RecursionError:
        raise ValueError(f"is nested more than {CONFIG_DEPTH} levels deep; allowed: as many") from None


_SECTIONS_SCHEMA = {
    "anyOf": [
        {"type": "object", "additionalProperties": True},
        {"type": "string", "maxLength": TOML_MAX, "description": "the text of a TOML file"},
    ]
}
RunSections = Annotated[
    dict[str, Any], BeforeValidator(_sections), AfterValidator(_bounded), WithJsonSchema(_SECTIONS_SCHEMA, "validation")
]
Whole = Annotated[int, BeforeValidator(_integral), Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
YesNo = Annotated[bool, Field(strict=True)]
"""What bodies have: JSON's own kinds, so that `true` is no number, and `"1"` neither."""
Gpus = Annotated[Whole, Field(ge=0, le=1_000_000)]
Usd = Annotated[Number, Field(ge=0, le=1e9, allow_inf_nan=False)]
Budget = Annotated[Usd, Field(gt=0)]
Caps = Annotated[dict[Name, Gpus], Field(max_length=32, examples=[{"spot": 2}])]
Labels = Annotated[
    dict[Name, Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")]],
    Field(max_length=32, examples=[{"team": "agents"}]),
]
UnixUser = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]


class _Resource(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _RequestBody(BaseModel):
    """A body that somebody sends: unknown keys are refused, so that a misspelt one is not ignored."""

    model_config = ConfigDict(extra="forbid")


class AccessRole(StrEnum):
    """What a member may do in a project; each may do all that the one before may."""

    VIEWER = "viewer"
    RUNNER = "runner"
    ADMIN = "admin"


Role = Annotated[AccessRole, Field(examples=["runner"])]


class RunPhase(StrEnum):
    """A summary of a hosted run's conditions."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


ENDED = frozenset({RunPhase.STOPPED, RunPhase.FINISHED, RunPhase.FAILED})
"""Phases that a run leaves only by being resumed."""
ALIVE = frozenset({RunPhase.STARTING, RunPhase.RUNNING, RunPhase.STOPPING})
"""Phases in which a run has a process."""


class Condition(_Resource):
    """One thing that holds of a run, does not, or is not known. `reason` is for programs, `message` for people."""

    type: str = Field(examples=["CapacityAvailable"])
    status: Literal["True", "False", "Unknown"] = Field(examples=["False"])
    reason: str = Field(examples=["Preempted"])
    message: str = Field(examples=["its workers were taken away; the trainer goes on alone"])
    lastTransitionTime: Timestamp
    observedGeneration: int


class ProviderFigures(_Resource):
    """One provider's part of a run right now. `gpus` are all that it holds or has asked for; `deaths` are
    leases that ended neither in order nor by a preemption, `replaced` how many of them another followed."""

    ready: int = 0
    booting: int = 0
    gpus: int = 0
    running_turns: int = 0
    capacity_turns: int = 0
    tokens: int = 0
    preemptions: int = 0
    deaths: int = 0
    replaced: int = 0
    usd: float = 0.0
    usd_per_hour: float = 0.0


class BudgetFigures(_Resource):
    """How a run's budget stands, as its core says. `committed_usd` is what the run costs if it is stopped now."""

    budget_usd: float
    committed_usd: float
    used_share: float
    warned: bool
    ends_in_s: float | None


class MetricEstimate(_Resource):
    """A mean over `tasks` tasks, and its standard error, null where there is but one task."""

    mean: float
    error: float | None
    tasks: int


class EvaluationFigures(_Resource):
    """What a run's last evaluation came to: avg@k and pass@k of all tasks. `best_version` is the best so far, where the
    run keeps it."""

    version: int
    timed_out: bool
    metrics: dict[str, MetricEstimate]
    best_version: int | None


class FigureCondition(_Resource):
    """Something that keeps a run from working at full speed now, as its process says."""

    type: str
    reason: str
    message: str


class RunFigures(_Resource):
    """How far a run is: the newest sample of its journal, and its last evaluation."""

    step: int = 0
    steps: int = 0
    elapsed_s: float = 0.0
    success_rate: float | None = None
    last_success_rate: float | None = None
    mean_reward: float | None = None
    last_mean_reward: float | None = None
    tokens_per_s: float = 0.0
    preemptions: int = 0
    usd: float = 0.0
    trajectories_running: int = 0
    queued_turns: int = 0
    trainer: str = ""
    phase: str = Field(default="", examples=["running"])
    cpu_share: float = 0.0
    core_share: float = 0.0
    flush_interval_s: float = 0.0
    late_share: float | None = None
    pacing_holds: bool = True
    providers: dict[str, ProviderFigures] = Field(
        default={},
        examples=[{"spot": {"ready": 2, "booting": 1, "tokens": 40312, "usd": 0.31, "usd_per_hour": 5.32}}],
    )
    conditions: list[FigureCondition] = []
    budget: BudgetFigures | None = None
    evaluation: EvaluationFigures | None = None


class HostedRun(_Resource):
    """A run on the server. `generation` counts changes of what is wanted of it; conditions name the one they saw."""

    id: RunId
    object: Literal["run"] = "run"
    project: ProjectId
    name: str = Field(examples=["frozenlake"])
    phase: RunPhase = Field(examples=["running"])
    conditions: list[Condition]
    generation: int
    providers: list[str] = Field(examples=[["serving", "spot"]])
    figures: RunFigures
    budget_usd: float | None = None
    caps: dict[str, int] = Field(default={}, examples=[{"spot": 2}])
    labels: dict[str, str] = Field(default={}, examples=[{"team": "agents"}])
    restarts: int
    max_restarts: int
    cause: str = ""
    created_at: Timestamp
    created_by: KeyId
    started_at: str | None = None
    ended_at: str | None = None


class HostedRunDetail(HostedRun):
    """A run with its whole configuration, which names files as submissions do. `differences` are the values that are
    not the defaults, by their keys, such as `run.steps`; `created_by_name` is the person's or the key's name."""

    created_by_name: str = Field(default="", examples=["ada@example.com"])
    config: ShownConfig
    differences: dict[str, Any] = {}


class Submission(_RequestBody):
    """A run to be started: the sections of a configuration file, and the providers to use of it."""

    config: RunSections = Field(examples=[_CONFIG])
    providers: list[Name] = Field(default=[], max_length=32, examples=[["serving", "spot"]])
    project: str | None = Field(
        default=None, max_length=64, description="for keys of no project: where the run belongs"
    )
    max_restarts: Whole = Field(default=10, ge=0, le=1000, description="times that its process may die and be resumed")
    budget_usd: Budget | None = None
    caps: Caps = Field(default={}, description="most GPUs at once, by provider")
    labels: Labels = {}


class SubmissionExample(_Resource):
    """A submission that this server takes as it is; null where it has no base policy, and `says` how to make one."""

    object: Literal["submission_example"] = "submission_example"
    submission: dict[str, Any] | None = Field(examples=[{"config": _CONFIG, "providers": ["serving", "spot"]}])
    says: str = Field(examples=["frozenlake-base is a base policy of this server"])


class WouldAcquire(_Resource):
    """What a run would hold of one provider at most, and what that costs."""

    provider: ProviderName
    max_workers: int
    gpus_per_worker: int
    usd_per_gpu_hour: float | None
    usd_per_hour_max: float | None


class DryRun(_Resource):
    """What would be run, and at which price: nothing has been started or kept.

    A price that only a vendor could say is null; `usd_per_hour_max` is the sum of those that are known.
    """

    object: Literal["dry_run"] = "dry_run"
    config: ShownConfig
    would_acquire: list[WouldAcquire]
    would_call: dict[str, Any] | None
    usd_per_hour_max: float
    warnings: list[str]


class RunChange(_RequestBody):
    """What of a run may be edited; what is left out stays."""

    budget_usd: Budget | None = None
    caps: Caps | None = None
    labels: Labels | None = None


class StopRequest(_RequestBody):
    """How a run is to be stopped: after a checkpoint, or with `force` at once."""

    force: YesNo = False


class ResumeRequest(_RequestBody):
    """With what a run is to go on."""

    budget_usd: Budget | None = None
    steps: Whole | None = Field(default=None, ge=1, le=2**31, description="train up to this many steps")


class RunBudget(_Resource):
    """What a run may cost, what it has cost, and when the rest is gone with what it holds.

    `committed_usd` is what it costs if it is stopped now; unknown without a budget, and before the run has begun.
    """

    object: Literal["budget"] = "budget"
    run: RunId
    budget_usd: float | None
    allotted_usd: float | None = Field(default=None, description="of its project's budget, so far; null without one")
    usd: float
    usd_per_hour: float
    committed_usd: float | None
    warned: bool
    ends_in_s: float | None


class Listed(_Resource, Generic[T]):
    """A page of a list, newest first. The next one begins `starting_after` the id of the last entry."""

    object: Literal["list"] = "list"
    url: str = Field(examples=["/v1/…"])
    data: list[T]
    has_more: bool


class ListedOfRun(Listed[T]):
    """A list that a run's journals tell. `unreadable` is what of them cannot be read, each with its file: what stands
    before that is in the list."""

    unreadable: list[str] = []


class RunEvent(_Resource):
    """Something that happened in a run. `id` is its place, after which a stream can be taken up again."""

    id: str
    type: str
    at_s: float
    data: dict[str, Any]


class LogLine(_Resource):
    """A line of a run's logs; `id` is where it ends in its file."""

    id: str
    line: str


class EnvironmentMetrics(_Resource):
    """What one of several environments came to during a step. `trajectories` were scored."""

    trajectories: int
    failed: int
    success_rate: float | None
    mean_reward: float | None
    groups_trained: int
    groups_dropped: int


class StepMetrics(_Resource):
    """One finished training step; by `environments`, too, where the run has several.

    Lengths are in policy tokens, of its trajectories that are over; ages in versions, of the tokens that it trained.
    """

    step: int
    at_s: float
    duration_s: float
    success_rate: float | None
    mean_reward: float | None
    tokens_mean: float | None = None
    tokens_max: int | None = None
    truncated_share: float | None = None
    failed_share: float | None = None
    age_mean: float | None = None
    age_max: int | None = None
    groups_trained: int
    groups_dropped: int
    trainer: dict[str, float | None]
    environments: dict[str, EnvironmentMetrics] = {}


class EvaluatedEnvironment(_Resource):
    """One environment's part of an evaluation, of so many `tasks`. Of their episodes so many `finished` with a reward,
    `failed`, or were `cut_off` as time was up."""

    tasks: int
    finished: int
    failed: int
    cut_off: int
    metrics: dict[str, MetricEstimate]


class EvaluationMetrics(_Resource):
    """The evaluation of a weights version: avg@k and pass@k of all tasks, and of each environment's. One that
    `timed_out` has what it had by then; the `best` version is so by the metric that the run keeps the best by, or by
    the mean reward."""

    version: int
    at_s: float
    duration_s: float
    timed_out: bool
    best: bool
    metrics: dict[str, MetricEstimate]
    environments: dict[str, EvaluatedEnvironment]


class Metrics(_Resource):
    """A run's series: finished steps, evaluations, and how it stood at moments in between."""

    object: Literal["metrics"] = "metrics"
    run: RunId
    steps: list[StepMetrics]
    evaluations: list[EvaluationMetrics] = []
    samples: list[RunFigures]
    unreadable: list[str] = Field(default=[], description="what of the journals cannot be read, each with its file")


class HostedAgents(_Resource):
    """Where agents reach a run that they drive, and the keys that they show: a driver's, to who may write runs, and
    that of who only chats with its policy."""

    object: Literal["agents"] = "agents"
    run: RunId
    base_url: str = Field(description="OPENAI_BASE_URL")
    driver: str | None = None
    key: str | None = Field(default=None, description="OPENAI_API_KEY of this driver, which opens trajectories")
    viewer_key: str = Field(description="OPENAI_API_KEY for chats, of which nothing is trained")


class HostedTrajectory(_Resource):
    """A trajectory that is over: its reward, or the cause of its failure.

    `rewards` are the parts of its reward by name, where it has several; `metrics` are what its environment measured
    besides.
    """

    id: str = Field(examples=["s41g3m2"])
    object: Literal["trajectory"] = "trajectory"
    step: int
    group: str = Field(examples=["s41g3"])
    environment: str = ""
    reward: float | None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    cause: str
    turns: int
    policy_tokens: int
    truncated: bool
    started_s: float
    ended_s: float


class Passage(_Resource):
    """Where a text stands in what a message says, thinks, or asks of a tool: as it was `found` there, with what is
    around it. `branch` is that of its context, 0 for the first one."""

    role: str = Field(examples=["assistant"])
    branch: int = 0
    before: str = Field(examples=["I "])
    found: str = Field(examples=["Walk"])
    after: str = Field(examples=[" to the left."])


class FoundTrajectory(HostedTrajectory):
    """A trajectory that has a text, with the first passages that do."""

    passages: list[Passage]


class TrajectorySearch(Listed[FoundTrajectory]):
    """A part of a search, which goes on `starting_after` its `searched_to`.

    In it so many trajectories were `searched`; of these, `textless` ones have no text, as their tokens are kept no
    longer. `no_text` says why nothing can be searched, empty where it can.
    """

    searched: int
    textless: int
    searched_to: str = Field(examples=["s41g3m2"])
    no_text: str = ""


class HostedCall(_Resource):
    """A call of a tool. `arguments` are as the model wrote them."""

    name: str
    arguments: str


class HostedMessage(_Resource):
    """What somebody said: `tokens` of a context, from `start` on. Long texts lack their middle, and say so there.

    `role` is system, user, assistant or tool, or another that the checkpoint's template knows. Of what the policy said
    its reasoning and its calls stand apart, if the run reads them. `by_policy` says that the policy sampled it.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: list[HostedCall] = []
    by_policy: bool
    start: int
    tokens: int


class HostedContext(_Resource):
    """What the policy has read and said in a row, token by token. `trained` marks its own tokens.

    `pieces` are the texts of the tokens, `text` that of all; both, and `messages`, are null without a tokenizer.
    `policy` is the name by which an agent asked for them, empty for the model's own, and `policy_reward` is that of
    this policy. `left_out_tokens` and `left_out_messages` at the end of a long context are not shown.
    """

    policy: str = ""
    policy_reward: float | None = None
    token_ids: list[int]
    trained: list[bool]
    logprobs: list[float]
    versions: list[int]
    left_out_tokens: int = 0
    text: str | None = Field(default=None, examples=["^SFD"])
    pieces: list[str] | None = None
    messages: list[HostedMessage] | None = None
    left_out_messages: int = 0


class HostedBranch(HostedContext):
    """A further context of a trajectory. It has its first `shared_tokens` in common with one before it."""

    branch: int
    shared_tokens: int


class HostedTrajectoryDetail(HostedTrajectory, HostedContext):
    """A trajectory with what was said in its first context and in its further `branches`. `task` is what its driver
    opened it with, as JSON. `no_text` says why there is no text, empty where there is."""

    task: str = ""
    branches: list[HostedBranch] = []
    left_out_branches: int = 0
    no_text: str = ""


class Checkpoint(_Resource):
    """A checkpoint of the trainer."""

    id: str = Field(examples=["00000040"])
    object: Literal["checkpoint"] = "checkpoint"
    version: int
    bytes: int
    created_at: Timestamp


class HostedWorker(_Resource):
    """A worker that a run has, or had, with its GPU time by account.

    `ready_s` is when it first had weights, `notice_s` when its end was known, and `cause` why its lease ended, empty
    while it has not. One that was `lost` was taken away, or left because its time was over.
    """

    id: str = Field(examples=["spot-l9-0"])
    object: Literal["worker"] = "worker"
    lease: str = Field(examples=["spot-l9"])
    provider: ProviderName
    gpus: int
    usd_per_gpu_hour: float
    opened_s: float
    ready_s: float | None = None
    notice_s: float | None = None
    closed_s: float | None
    cause: str = ""
    lost: bool = False
    accounts_s: AccountSeconds


class HostedLease(_Resource):
    """A lease that a run has, or had: its workers, what it cost, and its GPU time by account."""

    id: str = Field(examples=["spot-l9"])
    object: Literal["lease"] = "lease"
    provider: ProviderName
    workers: list[str] = Field(examples=[["spot-l9-0"]])
    gpus: int
    opened_s: float
    closed_s: float | None
    usd: float
    cause: str = Field(examples=["preempted"])
    accounts_s: AccountSeconds = {}


class OfferMoment(_Resource):
    """What a provider offered from a moment of the run on: so many leases, and `replacements` besides."""

    at_s: float
    available: int
    replacements: int = 0
    usd_per_gpu_hour: float


class HostedOffers(_Resource):
    """What a provider has offered a run over time. Of many changes evenly spaced ones are told, and the last one."""

    id: ProviderName
    object: Literal["offers"] = "offers"
    gpus_per_lease: int
    moments: list[OfferMoment]


class ProviderKind(_Resource):
    """A kind of provider that is installed, and how it is doing in the runs that go on."""

    id: str = Field(examples=["spot-replay"])
    object: Literal["provider"] = "provider"
    settings: dict[str, Any] = Field(description="JSON schema of what a configuration may say of it")
    gpus: int | None = Field(default=None, description="that all runs share by their projects' weights, where limited")
    runs: int
    ready: int
    booting: int
    preemptions: int
    usd_per_hour: float


class HostedNode(_Resource):
    """A node: its kind with site and price, the job that computes on it, and where its time went.

    One that has `joined` is of another machine, and may be drained; one that is `draining` goes once no job needs it.
    """

    name: str
    phase: str
    kind: str
    site: str
    usd_per_gpu_hour: float
    group: GroupName | None
    account: str
    accounts_s: AccountSeconds
    job: str | None
    joined: bool = False
    draining: bool = False


class HostedGroup(_Resource):
    """Jobs that take turns on nodes; their steps last `cycle_s`, of at most `limit_s`."""

    name: str
    members: list[str]
    rollout: list[str]
    train: list[str]
    cycle_s: float
    limit_s: float
    usd_per_hour: float


class HostedPermit(_Resource):
    """A job's permit to compute. `phase` is that of its cycle, or "both"."""

    number: int
    job: str
    phase: str
    nodes: list[str]
    since_s: float
    left_s: float
    recalled: bool


class HostedWait(_Resource):
    """Something that a job waits for, and for how long yet."""

    what: str
    key: str
    since_s: float
    left_s: float


class HostedTurn(_Resource):
    """A job's turn on a node, which is over."""

    node: str
    job: str
    since_s: float
    until_s: float


class HostedPool(_Resource):
    """Devices that jobs share, phase by phase. `away`: its process does not answer now, and is started again.

    `nodes`, `groups`, `permits` and `waits` are of those that `elastic pool status --json` has; of other projects' jobs
    there is no more than that they are there.
    """

    id: PoolName
    object: Literal["pool"] = "pool"
    away: bool
    now_s: float | None = None
    usd: float | None = None
    usd_per_hour: float | None = None
    nodes: list[HostedNode] = []
    groups: list[HostedGroup] = []
    permits: list[HostedPermit] = []
    waits: list[HostedWait] = []


class HostedJob(_Resource):
    """A job on a pool. `slo` is the largest slowdown that it accepts, `planned_slowdown` that of its group's cycle."""

    id: str = Field(examples=[f"job_{_ULID}"])
    object: Literal["job"] = "job"
    pool: PoolName
    project: ProjectId | None = Field(description="null for one that was not submitted here")
    state: str = Field(examples=["running"])
    reason: str = Field(examples=["its residents are up"])
    queue_place: int | None = Field(
        default=None, description="its place, from 1, among those that wait for room, or for their project's quota"
    )
    beyond_quota: bool = Field(default=False, description="whether it waits for its project's quota, as `reason` says")
    slo: float
    planned_slowdown: float | None
    steps: int
    steps_done: int
    group: GroupName | None
    rollout: list[str]
    train: list[str]
    moves: int
    resubmissions: int
    usd: float
    usd_alone: float = Field(default=0.0, description="what its steps would have cost on nodes of its own, as planned")
    saved_if_left_usd_per_hour: float


class JobSubmission(_RequestBody):
    """A run that is to be a job of a pool: what it asks for is in its `job` section. Scripts are not taken here."""

    config: RunSections = Field(
        examples=[{**_CONFIG, "job": {"slo": 1.5, "rollout_memory_gb": 2.0, "train_memory_gb": 4.0}}]
    )
    providers: list[Name] = Field(
        default=[], max_length=32, description="its own besides the pool; not planned with", examples=[["spot"]]
    )
    slo: Number | None = Field(default=None, ge=1, le=1e6, allow_inf_nan=False, description="in place of job.slo")
    project: str | None = Field(
        default=None, max_length=64, description="for keys of no project: where the job belongs"
    )


class HostedPlace(_Resource):
    """A place for a job: in a group, or in a new one where it is null. Its `members` are told to keys of no project."""

    group: GroupName | None
    how: str
    rollout: list[str]
    new_rollout: int
    new_train: int
    usd_per_hour: float
    cycle_s: float
    planned_slowdown: float
    members: list[str] | None = None


class HostedRefusal(_Resource):
    """Why a job cannot join a group."""

    group: GroupName
    reason: str
    needed: float
    allowed: float


class JobPlacement(_Resource):
    """Where a job would go now, and for each group why not. `placement` is null where it would be queued (`why`)."""

    object: Literal["job_placement"] = "job_placement"
    pool: PoolName
    slo: float
    placement: HostedPlace | None
    refusals: list[HostedRefusal]
    why: str


class Project(_Resource):
    """What runs, keys and files belong to; one sees nothing of another."""

    id: ProjectId
    object: Literal["project"] = "project"
    name: str = Field(examples=["agents"])
    unix_user: str | None
    created_at: Timestamp


class QuotaUse(_Resource):
    """What a project uses of its quota. `allotted_usd` is what its runs have cost and may spend without asking again.

    `usd_per_hour` is what was spent over the last hour; at this rate the budget, and what may be spent today, end in
    so many seconds."""

    runs: int
    gpus: dict[str, int]
    usd: float
    allotted_usd: float
    usd_today: float
    allotted_today_usd: float
    usd_per_hour: float
    budget_ends_in_s: float | None
    day_ends_in_s: float | None
    warned: list[str]


class ProjectQuota(_Resource):
    """What a project may have at once, and may spend. What is null, or of a provider that is not named, has no limit.

    `gpus` is by kind of provider; `trainer` stands for the devices of its runs' trainers."""

    object: Literal["quota"] = "quota"
    project: ProjectId
    gpus: dict[str, int]
    runs: int | None
    usd_per_day: float | None
    budget_usd: float | None
    weight: float
    use: QuotaUse


class QuotaChange(_RequestBody):
    """What of a quota may be edited; what is left out stays, null lifts a limit."""

    gpus: dict[Name, Gpus] | None = Field(
        default=None, max_length=64, description="all of them: a provider that is left out has no limit"
    )
    runs: Annotated[Whole, Field(ge=0, le=100_000)] | None = Field(default=None, description="runs at once")
    usd_per_day: Usd | None = Field(default=None, description="from midnight to midnight, in UTC")
    budget_usd: Usd | None = Field(default=None, description="in all, what its runs have cost so far included")
    weight: Annotated[Number, Field(gt=0, le=1_000, allow_inf_nan=False)] | None = Field(
        default=None, description="its part of capacity that is shared, beside other projects' weights"
    )


class ProviderChange(_RequestBody):
    """How many GPUs of this kind there are for all runs of the server together; null where nobody need share."""

    gpus: Gpus | None


Days = Annotated[Whole, Field(ge=0, le=36_500)]


class RetentionPolicy(_Resource):
    """For how many days after the end of a run, or a pool's job, what it leaves is kept: all, and parts of it apart.
    Uploads go so long after a run has last used them.

    Null is for ever, and in a project's policy as the server's says. Without its checkpoints, or its trajectories, a
    run cannot go on; its report stays."""

    object: Literal["retention"] = "retention"
    scope: ProjectId
    runs_days: int | None
    trajectories_days: int | None
    checkpoints_days: int | None
    logs_days: int | None
    uploads_days: int | None


class RetentionChange(_RequestBody):
    """What of a policy may be edited; what is left out stays."""

    runs_days: Days | None = None
    trajectories_days: Days | None = None
    checkpoints_days: Days | None = None
    logs_days: Days | None = None
    uploads_days: Days | None = None


class RetentionItem(_Resource):
    """What of one run would go."""

    run: RunId
    name: str = Field(examples=["frozenlake"])
    project: ProjectId
    ended_at: Timestamp
    removes: list[str] = Field(examples=[["checkpoints", "logs"]])
    bytes: int


class RetentionJob(_Resource):
    """What of one job of a pool would go."""

    job: str = Field(examples=[f"job_{_ULID}"])
    pool: PoolName
    project: ProjectId
    ended_at: Timestamp
    removes: list[str] = Field(examples=[["checkpoints", "logs"]])
    bytes: int


class RetentionUpload(_Resource):
    """An upload that would go, since nobody has used it, or nothing has come of it, for long."""

    upload: UploadId
    name: str = Field(examples=["frozenlake"])
    project: ProjectId
    state: Literal["open", "ready"]
    last_used_at: Timestamp
    bytes: int


class RetentionPlan(_Resource):
    """What would go now, the oldest first. `runs` counts all of them, `bytes` is of what is named."""

    object: Literal["retention_plan"] = "retention_plan"
    runs: int
    bytes: int
    items: list[RetentionItem]
    jobs: list[RetentionJob] = []
    uploads: list[RetentionUpload] = []


class NewProject(_RequestBody):
    name: Name = Field(examples=["agents"])
    unix_user: UnixUser | None = Field(
        default=None,
        description="whose processes its runs are; needs a runner that is root",
        examples=["elastic-agents"],
    )


class ProjectChange(_RequestBody):
    name: Name | None = Field(default=None, examples=["agents-2"])
    unix_user: UnixUser | None = None


Email = Annotated[str, Field(pattern=r"^[!-?A-~]{1,64}@[A-Za-z0-9.-]{1,180}$")]


class ProjectMember(_Resource):
    """A person in a project. `source` says whether an admin made them a member, or a claim as they signed in."""

    id: str = Field(examples=[f"mem_{_ULID}"])
    object: Literal["member"] = "member"
    project: ProjectId
    email: str | None = Field(examples=["ada@example.com"])
    name: str = Field(examples=["Ada"])
    role: Role
    source: Literal["given", "sign-in"]
    created_at: Timestamp


class NewMember(_RequestBody):
    email: Email = Field(examples=["ada@example.com"])
    role: Role = AccessRole.RUNNER


class MemberChange(_RequestBody):
    role: Role


class ApiKey(_Resource):
    """A key, without its secret. One of no project may do what it may in all of them.

    One of a `member` is a person's, and never does more than their role allows by now.
    """

    id: KeyId
    object: Literal["key"] = "key"
    name: str = Field(examples=["frozenlake"])
    project: ProjectId | None
    member: str | None = None
    role: Role
    scopes: list[str]
    hint: str = Field(examples=["elastic_3f9a…"])
    created_at: Timestamp
    expires_at: str | None
    revoked_at: str | None


class CreatedKey(ApiKey):
    """A key just made. `secret` is shown this once; a repeated request is answered without it."""

    secret: str | None = Field(examples=["elastic_3f9a…"])


class NewKey(_RequestBody):
    name: Name = Field(examples=["frozenlake"])
    role: Role = AccessRole.RUNNER
    project: str | None = Field(
        default=None, max_length=64, description="for keys of no project: where the new one belongs"
    )
    server_wide: YesNo = Field(default=False, description="of no project; only such a key may make one")
    scopes: list[str] = Field(
        default=[], max_length=64, description="actions it is limited to; all of its role's unless given"
    )
    expires_in_s: Whole | None = Field(default=None, ge=1, le=10 * 366 * 86_400)


class NewOwnKey(_RequestBody):
    """A person's key for the project that they are signed in to."""

    name: Name = Field(examples=["frozenlake"])
    role: Role | None = Field(default=None, description="one's own unless given; never more")
    scopes: list[str] = Field(default=[], max_length=64, description="actions it is limited to")
    expires_in_s: Whole = Field(default=90 * 86_400, ge=1, le=366 * 86_400)
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        default=None, description="of a secret that somebody has made already, so that no answer has to bring it"
    )


class ProjectSecret(_Resource):
    """A secret of a project, without its value: its `id` is the variable that runs have it in."""

    id: str = Field(examples=["HF_TOKEN"])
    object: Literal["secret"] = "secret"
    project: ProjectId
    updated_at: Timestamp


def _text(secret: SecretStr) -> SecretStr:
    if not _is_text(secret.get_secret_value()):
        raise ValueError(_NO_TEXT)
    return secret


class SecretValue(_RequestBody):
    value: Annotated[SecretStr, AfterValidator(_text)] = Field(min_length=1, max_length=32_768, examples=["**********"])


class ProjectCredentials(_Resource):
    """A project's credentials for a vendor, without their fields: its `id` is the vendor."""

    id: Literal["aws", "modal"]
    object: Literal["credentials"] = "credentials"
    project: ProjectId
    updated_at: Timestamp


def _fits(pattern: str) -> AfterValidator:
    """Make a check that the whole text of a secret fits the pattern."""

    def check(secret: SecretStr) -> SecretStr:
        if re.fullmatch(pattern, secret.get_secret_value()) is None:
            raise ValueError(f"does not fit {pattern}")
        return secret

    return AfterValidator(check)


class AwsCredentials(_RequestBody):
    """What AWS gives for an access key; `session_token` for a temporary one."""

    access_key_id: str = Field(pattern=r"^[A-Z0-9]{16,128}$", examples=["AKIAIOSFODNN7EXAMPLE"])
    secret_access_key: Annotated[SecretStr, _fits("[A-Za-z0-9/+=]{16,128}")] = Field(
        examples=["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"]
    )
    session_token: Annotated[SecretStr, _fits("[A-Za-z0-9/+=]{16,8192}")] | None = None
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")] | None = Field(
        default=None, description="where no configuration names one"
    )


class ModalCredentials(_RequestBody):
    """What `modal token new` makes."""

    token_id: str = Field(pattern=r"^ak-[A-Za-z0-9]{1,64}$", examples=["ak-abc123"])
    token_secret: Annotated[SecretStr, _fits("as-[A-Za-z0-9]{1,64}")] = Field(examples=["as-EXAMPLE"])
    environment: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None


VENDORS: dict[str, type[AwsCredentials] | type[ModalCredentials]] = {"aws": AwsCredentials, "modal": ModalCredentials}


def revealed(credentials: AwsCredentials | ModalCredentials) -> str:
    """Return credentials as JSON with their secrets."""
    values = credentials.model_dump(exclude_none=True).items()
    return json.dumps({key: one.get_secret_value() if isinstance(one, SecretStr) else one for key, one in values})


def concealed(name: str, secret: str) -> list[str]:
    """Return the texts in the secret of this name that nobody is to read: of a vendor's credentials all but the place
    that they are for."""
    if name not in VENDORS:
        return [secret]
    return [value for key, value in json.loads(secret).items() if key not in ("region", "environment")]


UPLOAD_SCHEME = "upload:"
"""Begins what a submission calls an upload by: `upload:ID`, or `upload:ID/FILE`."""

UploadPath = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}){0,7}$",
        description="where in the upload it lies",
        examples=["model.safetensors"],
    ),
]


class UploadFile(_RequestBody):
    """A file of an upload, with the size and the SHA-256 that it must have."""

    path: UploadPath
    bytes: Whole = Field(ge=0, le=2**44)
    sha256: str = Field(
        pattern=r"^[0-9a-f]{64}$", examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
    )


class Upload(_Resource):
    """Files in a project's storage. `missing` are the checksums of those still to come; then it is ready, for good."""

    id: UploadId
    object: Literal["upload"] = "upload"
    project: ProjectId
    name: str = Field(examples=["frozenlake"])
    state: Literal["open", "ready"]
    bytes: int
    files: list[UploadFile]
    missing: list[str]
    created_by: KeyId
    created_at: Timestamp


class NewUpload(_RequestBody):
    """An upload to come: a checkpoint, or data."""

    name: Name = Field(examples=["frozenlake"])
    files: list[UploadFile] = Field(min_length=1, max_length=2_000)
    project: str | None = Field(default=None, max_length=64, description="for keys of no project: where it belongs")


WebhookEvent = Literal[
    "run.running",
    "run.restarting",
    "run.stopped",
    "run.finished",
    "run.failed",
    "run.budget_warning",
    "job.finished",
    "job.failed",
    "job.cancelled",
    "job.rejected",
    "project.budget_warning",
]
"""What a webhook may be told: a run is in another phase, a job of a pool is over, or most of a budget is used."""
WEBHOOK_EVENTS: tuple[str, ...] = get_args(WebhookEvent)
WebhookUrl = Annotated[str, Field(min_length=8, max_length=2_000, examples=["https://example.com/elastic"])]
WebhookEvents = Annotated[
    list[WebhookEvent],
    Field(min_length=1, max_length=len(WEBHOOK_EVENTS), examples=[["run.finished", "run.failed"]]),
]


class Webhook(_Resource):
    """A URL that is told what becomes of runs and jobs of a project, without the secret that signs its messages."""

    id: WebhookId
    object: Literal["webhook"] = "webhook"
    project: ProjectId
    url: str = Field(examples=["https://example.com/elastic"])
    events: list[str] = Field(examples=[["run.finished", "run.failed"]])
    enabled: bool
    disabled_because: str
    circuit: Literal["closed", "open", "half-open"] = Field(
        description="open: its receiver fails, and nothing is sent until `next_probe_at`; half-open: one is a probe"
    )
    failures: int = Field(description="attempts in a row that failed")
    next_probe_at: str | None
    created_at: Timestamp


class CreatedWebhook(Webhook):
    """A webhook just made. `secret` is shown this once; a repeated request is answered without it."""

    secret: str | None = Field(examples=["whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"])


class NewWebhook(_RequestBody):
    url: WebhookUrl
    events: WebhookEvents = ["run.stopped", "run.finished", "run.failed"]
    project: str | None = Field(
        default=None, max_length=64, description="for keys of no project: whose runs it is told of"
    )


class WebhookChange(_RequestBody):
    """What of a webhook may be edited; what is left out stays."""

    url: WebhookUrl | None = None
    events: WebhookEvents | None = None
    enabled: YesNo | None = None


class WebhookDelivery(_Resource):
    """A message to a webhook: its `id` is the same for each repetition, and its receiver's idempotency key."""

    id: str = Field(examples=[f"msg_{_ULID}"])
    object: Literal["webhook_delivery"] = "webhook_delivery"
    webhook: WebhookId
    type: str = Field(examples=["run.failed"])
    state: Literal["waiting", "delivered", "failed"]
    attempts: int
    answer: str = Field(examples=["status 200"])
    next_at: str | None
    created_at: Timestamp


class AuditEntry(_Resource):
    """An entry of the audit log: the requester, the action, and whether it was allowed."""

    id: str = Field(examples=[f"aud_{_ULID}"])
    object: Literal["audit_entry"] = "audit_entry"
    at: Timestamp
    actor: KeyId
    actor_name: str = Field(default="", description="of the person, else of the key; empty where it is known no more")
    action: str = Field(examples=["runs:write"])
    resource: str = Field(examples=[f"/v1/runs/run_{_ULID}"])
    project: ProjectId | None
    status: int = Field(examples=[201])
    request_id: RequestId


class Membership(_Resource):
    """One of the projects that a person is a member of."""

    member: str
    project: ProjectId
    project_name: str
    role: Role


class SessionChange(_RequestBody):
    project: str = Field(max_length=64, description="its id or its name", examples=["agents"])


class Me(_Resource):
    """The requester: a key, a person's key, or a person who has signed in."""

    object: Literal["me"] = "me"
    key: KeyId | None
    member: str | None = None
    name: str = Field(examples=["frozenlake"])
    project: ProjectId | None
    role: Role
    actions: list[str] = Field(examples=[["projects:read", "runs:read", "runs:write"]])
    memberships: list[Membership] = Field(default=[], description="of the person, if it is one")
    csrf_token: str | None = Field(
        default=None, description="of a signed-in browser: what its writes carry as `x-csrf-token`"
    )


class ServerInfo(_Resource):
    """What this server is."""

    object: Literal["server"] = "server"
    version: str = Field(examples=["0.1.0"])
    api: Literal["v1"] = "v1"
    sign_in: str | None = Field(default=None, description="whom people sign in with, if with anybody")


class ProblemError(_Resource):
    """One fault of a request, and where in its body it lies (a JSON pointer)."""

    pointer: str
    detail: str


class Problem(_Resource):
    """Why a request came to nothing (RFC 9457). `type` is what programs look at; docs/server.md lists them all."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    request_id: RequestId = ""
    errors: list[ProblemError] | None = None
