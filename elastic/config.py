"""The run's configuration: one TOML file, validated, with errors that name the key and what is allowed."""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from elastic.protocol.endpoint import Address, bare_host, is_loopback, is_wildcard
from elastic.protocol.proxies import without_password
from elastic.system.given import expanded, read_text
from elastic.system.installed import found_point, installed, load_point
from elastic.system.named_code import ALLOWED, MAY_NAME_CODE, CodeUnusable, parsed, placed
from elastic.system.plain_values import shown

T = TypeVar("T", bound=BaseModel)


class ConfigProblem(NamedTuple):
    """One fault of a configuration: the key, from section to section, and what was found and what is allowed.

    `where` is the file, the option or whatever else it comes from.
    """

    detail: str
    key: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, ".".join(self.key), self.detail) if part)


class ConfigError(ValueError):
    """The configuration cannot be used; the message has a line for each problem."""

    def __init__(self, *problems: ConfigProblem | str) -> None:
        super().__init__(*problems)
        self.problems = tuple(ConfigProblem(one) if isinstance(one, str) else one for one in problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


def _not_empty(found: object) -> object:
    if found == "":  # Which would mean the working directory.
        raise ValueError("must be a path; `.` is the working directory")
    return found


GivenPath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(expanded)]


def given_path(name: str) -> Path:
    """The path that somebody typed. Raises `ConfigError`."""
    try:
        return expanded(Path(name))
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


LONGEST_S = 31_536_000
"""A year: no time that a configuration sets is longer, and all of them are counted in nanoseconds of 64 bits."""


class _Section(BaseModel):
    # A process builds what it validates: most of a run's need a section or two.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @field_validator("*")
    @classmethod
    def _within_a_year(cls, value: Any, info: ValidationInfo) -> Any:
        """Whether a time is one that can be counted: `_s` ends the names of times, `_per_s` those of rates."""
        name = info.field_name or ""
        is_time = name.endswith("_s") and not name.endswith("_per_s")
        if is_time and isinstance(value, float) and value > LONGEST_S:
            raise ValueError(f"must be at most {LONGEST_S} seconds, a year")
        return value


def _address(text: str) -> str:
    return text and str(Address.parse(text, 0)).removesuffix(":0")


FAR_RESUME_TIMEOUT_S = 30.0
"""Beyond loopback a link may be away for as long, and its worker is waited for."""


class RunConfig(_Section):
    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="name of the run, with which its directory begins",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="what all that is drawn is drawn from")
    steps: int = Field(60, ge=0, description="training steps; 0 where the policy is only evaluated")
    budget_usd: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="what the run may cost in all, its trainer and the calls of functions included: it stops in time",
    )
    caps: dict[str, Annotated[int, Field(ge=0, le=1_000_000)]] = Field(
        {}, description="most GPUs to hold at once as the run begins, by provider; `elastic cap` sets others later"
    )
    directory: GivenPath = Field(Path("runs"), description="where runs keep their journal, checkpoints and report")
    host: Annotated[str, AfterValidator(bare_host)] = Field(
        "127.0.0.1", description="address on which workers join; beyond loopback they speak TLS 1.3"
    )
    port: int = Field(0, ge=0, le=65535, description="port on which workers join; 0 takes a free one")
    advertise: Annotated[str, AfterValidator(_address)] = Field(
        "",
        description="host, or host:port, under which workers elsewhere reach `host` and `port`, if another",
    )
    certificate: GivenPath | None = Field(
        None, description="TLS certificate (PEM, followed by what it was issued by); else the run makes its own"
    )
    certificate_key: GivenPath | None = Field(None, description="the certificate's private key (PEM)")
    orchestrator_timeout_s: float = Field(
        60.0, gt=0, description="how long workers and the trainer go on without their orchestrator, which may come back"
    )
    pass_env: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\*?$")], ...] = Field(
        (), description="further environment variables for workers and reward functions, by name; NAME* for several"
    )

    @property
    def beyond_loopback(self) -> bool:
        """Whether workers may be on other machines: what passes is encrypted then."""
        return not is_loopback(self.host)

    @property
    def advertised_host(self) -> str:
        """The host of `advertise`, without a port; empty where nothing is advertised."""
        return self.advertise and Address.parse(self.advertise, 0).host

    @model_validator(mode="after")
    def _reachable(self) -> "RunConfig":
        if is_wildcard(self.host) and not self.advertise:
            raise ValueError(
                f"run.advertise is missing: nobody can dial run.host = {self.host}; name the address of this machine "
                "that workers reach (--advertise HOST)"
            )
        if (self.certificate is None) != (self.certificate_key is None):
            raise ValueError("run.certificate and run.certificate_key belong together; only one of them is given")
        return self


class ModelConfig(_Section):
    checkpoint: GivenPath = Field(description="Hugging Face checkpoint directory of the base policy")


OUTSIDE = "outside"
"""The environment that is none: agents outside of the run drive its trajectories."""
PLAYED_BY_ROWS = AGENT, CHAT = "agent", "chat"
PLAYED = (AGENT, CHAT, "gymnasium", "openenv", "reasoning-gym", "verifiers")
"""Environments whose episodes are users' code, in env workers."""
DRIVEN = (OUTSIDE, *PLAYED)
"""Environments whose trajectories are played through fronts."""
PINNED = ("temperature", "top_p", "top_k")
"""Settings of sampling that a run can keep from agents."""
NO_LIMIT_TURNS = 1_000_000
"""The turns of a trajectory that is driven from outside, where nothing else is said."""


HubName = Annotated[str, Field(pattern=r"^hf:[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")]
"""The name of a data set in the Hugging Face Hub, with `hf:` before it."""


class DataConfig(_Section):
    """Rows that episodes of kinds `agent` and `chat` are about: one for each group, by its place among those of its
    environment, or as a curriculum chooses."""

    source: HubName | GivenPath = Field(
        union_mode="left_to_right", description="rows: FILE.jsonl, FILE.parquet, or hf:NAME of Hugging Face's hub"
    )
    subset: str = Field("", description="of a data set of the hub: which of its configurations")
    split: str = Field("train", min_length=1, description="of a data set of the hub: which of its splits")
    prompt: str = Field("prompt", min_length=1, description="column with the prompt; may be dotted")
    answer: str = Field("", description="column with the answer, if there is one; may be dotted")
    columns: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="columns that functions get; by default all"
    )
    order: str = Field(
        "shuffled",
        description="in which rows come, each once in a pass: `shuffled`, `in_order`, `by_difficulty` (first those "
        "whose rewards are neither all 0 nor all 1), or a curriculum that is installed",
    )
    order_settings: dict[str, Any] = Field({}, description="the curriculum's own keys")
    rows: int | None = Field(
        None, ge=1, description="how many there are; counted as the run begins, where its order has to know"
    )


class ProcessLimitsConfig(_Section):
    """Limits of each process of an environment. They are no boundary: a process still has its user's rights."""

    memory_gb: float | None = Field(None, gt=0, le=1e6, description="address space, in GiB; no limit unless said")
    cpu_s: float | None = Field(None, gt=0, description="CPU time, after which it is killed; no limit unless said")
    files: int = Field(8192, ge=64, le=1_000_000, description="open files and connections")


class EnvironmentConfig(_Section):
    """One environment of a run. Its share of the groups is its `ratio` over the sum of all."""

    name: str = Field(
        "frozenlake",
        description="what it is called in figures and logs, once in a run: letters, digits, _ and -",
    )
    kind: str = Field("", description="which environment it is, of those installed; its `name` unless given")
    ratio: float = Field(1.0, ge=0, le=1e6, description="its share of the groups, beside the ratios of the others")
    redundancy: float = Field(
        1.0,
        ge=1,
        le=4,
        description="times the members of a group that begin: the first that finish are taken, others are cut off; 1 "
        "is off",
    )
    step_timeout_s: float = Field(
        30.0,
        gt=0,
        description="an environment that takes longer is given up; an env worker that says nothing for longer is ended",
    )
    start_timeout_s: float = Field(
        120.0, gt=0, description="longest time in which an env worker loads its code and data, and dials the run"
    )
    processes: int = Field(
        1, ge=1, le=256, description="env workers: processes that play its episodes, unless the run's own loop does"
    )
    python: GivenPath | None = Field(
        None, description="interpreter of env workers, with Elastic in its environment; else the run's own"
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="deaths of an env worker in a row, by its own fault, that a run survives",
    )
    container: str = Field(
        "",
        max_length=255,
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._:/@-]*)?$",
        description="image of containers, by docker or podman, in which env workers run; empty: in none",
    )
    network: Literal["none", "host"] = Field(
        "none", description="of its containers: none, so that they reach the model alone, or this machine's"
    )
    limits: ProcessLimitsConfig = Field(default_factory=ProcessLimitsConfig)  # type: ignore[arg-type]
    settings: dict[str, Any] = Field(default_factory=dict, description="the environment's own keys")
    data: DataConfig | None = Field(None, description="rows that its episodes are about; for kinds `agent` and `chat`")

    @model_validator(mode="after")
    def _of_a_kind(self) -> "EnvironmentConfig":
        if not self.kind:
            object.__setattr__(self, "kind", self.name)  # It is frozen, and this is still its making.
        return self

    @model_validator(mode="after")
    def _network_of_containers(self) -> "EnvironmentConfig":
        if self.network != "none" and not self.container:
            raise ValueError(f"network is of containers, and there are none (found {self.network!r}): set container")
        return self

    @model_validator(mode="after")
    def _played_by_rows(self) -> "EnvironmentConfig":
        if self.data is None and self.kind == CHAT:
            raise ValueError(f"environment.data is missing, which has the prompts of an environment of kind {CHAT!r}")
        return self

    def members(self, group_size: int) -> int:
        """How many members of a group begin, of which as many as it has are taken."""
        return math.ceil(round(self.redundancy * group_size, 9))


OF_TRAINING, DATA_OF_TRAINING = ("ratio", "redundancy"), ("order", "order_settings", "rows")
"""Keys of an environment, and of its data, that say how it is trained on."""


class SplitConfig(EnvironmentConfig):
    """An environment that is evaluated, and never trained on. With `like` it has the keys of that environment of the
    run, but for those that it gives itself and those that say how it is trained on."""

    ratio: float = Field(0.0, ge=0, description="0: no group of training is of it")
    tasks: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="number of tasks, from the first on; by default all rows of a file, or `evaluation.tasks`",
    )

    @model_validator(mode="after")
    def _never_trained_on(self) -> "SplitConfig":
        data = self.data
        said: dict[str, object] = {key: getattr(self, key) for key in OF_TRAINING}
        said |= {f"data.{key}": getattr(data, key) for key in DATA_OF_TRAINING} if data is not None else {}
        defaults = {key: SplitConfig.model_fields[key].default for key in OF_TRAINING}
        defaults |= {f"data.{key}": DataConfig.model_fields[key].default for key in DATA_OF_TRAINING}
        if idle := {key: value for key, value in said.items() if value != defaults[key]}:
            found = ", ".join(f"{key} = {value!r}" for key, value in idle.items())
            raise ValueError(f"says how a split is trained on, which it never is (found {found}): leave it out")
        return self


class StopWhenConfig(_Section):
    """When a run ends before its last step."""

    metric: str = Field(description="metric of evaluations that is looked at")
    at_least: float | None = Field(None, description="the run ends once it is so high")
    no_better_for: int | None = Field(
        None, ge=1, description="the run ends after this many evaluations in a row without a better one"
    )

    @model_validator(mode="after")
    def _says_when(self) -> "StopWhenConfig":
        if self.at_least is None and self.no_better_for is None:
            raise ValueError("says no end; allowed: at_least, no_better_for, or both")
        return self


BY_PLACE = ("reasoning-gym", "verifiers")
"""Environments whose tasks follow from the group's place: those of an evaluation would be those of training."""


TOGETHER = "all"
"""What all environments of an evaluation together are called, beside their names."""


class EvaluationConfig(_Section):
    """The policy is measured, between steps, on tasks that are the same each time. Nothing of it is trained on."""

    every: int = Field(10, ge=0, description="steps from one evaluation to the next; 0: only at the start and the end")
    at_start: bool = Field(True, description="evaluate the policy that the run begins with")
    at_end: bool = Field(True, description="evaluate the policy that the run ends with")
    samples: int = Field(4, ge=1, le=1024, description="episodes of each task")
    k: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="values of k for pass@k; by default 1 and `samples`"
    )
    tasks: int = Field(64, ge=1, le=1_000_000, description="tasks of each environment, where rows do not say how many")
    environments: tuple[str, ...] = Field(
        (),
        description="the run's environments that are evaluated, on tasks that training never has; without `splits` all",
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="of sampling, whatever `rollout.pin` says; 0 takes the likeliest token"
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="share of probability from which tokens are drawn; by default all"
    )
    max_tokens: int | None = Field(None, ge=1, description="most tokens of a turn; by default those of `rollout`")
    timeout_s: float = Field(1800.0, gt=0, le=LONGEST_S, description="after it an evaluation ends with what it has")
    overlap: bool = Field(
        False, description="begin the next step during an evaluation; its update waits for the evaluation's end"
    )
    keep_best: str = Field(
        "", description="metric that chooses the best version, whose checkpoint is kept; empty: none is kept"
    )
    stop_when: StopWhenConfig | None = Field(None, description="ends the run by what evaluations have come to")
    splits: tuple[SplitConfig, ...] = Field(
        (),
        description="environments that are evaluated alone: keys of `environment`, `tasks`, and `like`, an environment "
        "of the run whose keys it has besides",
    )

    @property
    def passes(self) -> tuple[int, ...]:
        """The k of pass@k, in order."""
        return tuple(sorted(set(self.k or (1, self.samples))))

    @model_validator(mode="after")
    def _fits_together(self) -> "EvaluationConfig":
        if self.passes[-1] > self.samples:
            raise ValueError(
                f"k must be at most samples = {self.samples}, the episodes of a task (found {self.passes[-1]})"
            )
        if not (self.every or self.at_start or self.at_end):
            raise ValueError("every is 0, and neither at_start nor at_end is wanted: nothing would ever be evaluated")
        return self


REFILL_MOST = 2


class RolloutConfig(_Section):
    groups: int = Field(16, ge=0, description="groups a step; 0 where others train (`elastic serve-rollouts`)")
    group_size: int = Field(8, ge=2, description="trajectories a group")
    max_turns: int = Field(16, ge=1, description="turns after which a trajectory is truncated")
    max_tokens_per_turn: int = Field(16, ge=1, description="most tokens that the policy generates in a turn")
    temperature: float = Field(1.0, gt=0, description="of sampling, and of the log-probabilities that are trained on")
    pin: tuple[Literal["temperature", "top_p", "top_k"], ...] = Field(
        PINNED, description="what of sampling agents do not choose: `temperature` is the one above, the others are off"
    )
    staleness_bound: int = Field(
        0,
        ge=0,
        description="versions that a trained token may be older than the trainer: 0 is synchronous, 1 one step off",
    )
    staleness_drop: Literal["group", "token"] = Field(
        "group",
        description="what is not trained on of a group with tokens beyond that bound: the whole `group`, or each such "
        "`token`",
    )
    max_failed_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="the run fails if a larger share of its trajectories has failed over ten steps, or in all there "
        "were; 1 never",
    )
    refill: bool = Field(
        True,
        description="a member of a group that infrastructure has failed is replaced by a further one, while others of "
        "the step are under way",
    )
    refill_most: int = Field(REFILL_MOST, ge=1, description="times that a member may be replaced so")
    dynamic_sampling: bool = Field(
        False, description="launch groups until as many as are wanted have rewards that differ (DAPO)"
    )
    dynamic_sampling_most: float = Field(
        6.0, ge=1, description="with dynamic sampling: times the wanted groups that a step may launch"
    )

    @model_validator(mode="after")
    def _cancels_nothing(self) -> "RolloutConfig":
        if not self.refill and self.refill_most != REFILL_MOST:
            raise ValueError(f"refill_most needs refill = true: no member is replaced (found {self.refill_most})")
        if self.staleness_drop == "token" and self.staleness_bound == 0:
            raise ValueError(
                "staleness_drop = 'token' needs staleness_bound of at least 1: no token of a synchronous run is older "
                "than the trainer's (found 0)"
            )
        return self


_PLAIN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$|^$"
_NAME_OF_OWN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


def _upstream(url: str) -> str:
    """A base URL without what stands at its end in some clients: slashes, and `/v1`."""
    if not url:
        return ""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"must be a URL ({error})") from None
    host = parts.hostname or ""
    if parts.username is not None or parts.password is not None:
        raise ValueError("must have no credentials in it; front.upstream_key_env names the variable that has the key")
    allowed = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))
    plain = url.isascii() and url.isprintable() and " " not in url and "\\" not in url
    if not (allowed and plain and host) or port == 0 or parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError("must be https://HOST[:PORT][/PATH], or http:// to this machine, without a query")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class FrontConfig(_Section):
    """Where agents outside of the run reach it, and how their messages become tokens."""

    host: Annotated[str, AfterValidator(bare_host)] = Field(
        "127.0.0.1", description="address on which fronts serve agents; beyond loopback they speak TLS 1.3"
    )
    port: int = Field(0, ge=0, le=65535, description="port on which fronts serve agents; 0 takes a free one")
    processes: int = Field(2, ge=1, le=64, description="processes that serve agents")
    hold_s: float = Field(60.0, gt=0, description="longest that a call waits for its first token; then it is a 503")
    model_name: str = Field(
        "",
        max_length=256,
        pattern=r"^(/?[A-Za-z0-9._][A-Za-z0-9._:-]*(/[A-Za-z0-9._][A-Za-z0-9._:-]*)*)?$",
        description="the model's name for agents, or the path that a trainer elsewhere calls it by; empty: that of the "
        "checkpoint's directory",
    )
    policies: tuple[Annotated[str, Field(pattern=_NAME_OF_OWN)], ...] = Field(
        (), max_length=64, description="further names of the model, each for a policy with rewards of its own"
    )
    upstream: Annotated[str, AfterValidator(_upstream)] = Field(
        "", description="base URL of an API to which calls of other models' names go, such as OpenAI's; empty: none do"
    )
    upstream_key_env: str = Field(
        "",
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$",
        description="variable of the orchestrator's environment that has the upstream's key; empty: it needs none",
    )
    upstream_calls_max: int = Field(100_000, ge=0, description="most calls of the upstream in the whole run")
    upstream_usd_max: float | None = Field(
        None, ge=0, le=1e9, description="most that they may cost in the whole run, by the two prices below"
    )
    upstream_usd_per_million_in: float = Field(
        0.0, ge=0, le=1e6, description="price of a million prompt tokens there, of the dearest model that is called"
    )
    upstream_usd_per_million_out: float = Field(
        0.0, ge=0, le=1e6, description="price of a million tokens of answers there, of the dearest model"
    )
    upstream_context_tokens: int = Field(
        131_072,
        ge=1,
        le=100_000_000,
        description="most tokens of a prompt there, and of an answer to a call without max_tokens",
    )
    upstream_timeout_s: float = Field(600.0, gt=0, le=86_400, description="longest that a call of the upstream takes")
    upstream_concurrency: int = Field(
        64, ge=1, le=4096, description="calls of the upstream at once; further ones wait, up to hold_s"
    )
    upstream_answer_mb: float = Field(64.0, gt=0, le=1024, description="largest answer of the upstream, in MiB")
    renderer: str = Field(
        "auto",
        pattern=_PLAIN_NAME,
        description="what makes tokens of messages: `template`, or a renderer of the package `renderers`",
    )
    tool_parser: str = Field(
        "",
        pattern=_PLAIN_NAME,
        description="how tool calls are read, as vLLM's --tool-call-parser; empty: as is known of the model",
    )
    reasoning_parser: str = Field(
        "",
        pattern=_PLAIN_NAME,
        description="how reasoning is read, as vLLM's --reasoning-parser; empty: as is known of the model",
    )
    trajectory_turns_max: int = Field(4096, ge=1, description="most turns of a trajectory, limits of rollout aside")
    open_turns_max: int = Field(4096, ge=1, description="most turns that agents wait for at once; beyond it is a 429")
    chats_max: int = Field(
        8,
        ge=0,
        le=1024,
        description="most chats that spare credit answers at once, for `elastic chat` and viewers' keys; 0 for none",
    )
    chat_tokens_max: int = Field(2048, ge=1, description="most tokens of a chat's answer")
    body_mb: float = Field(64.0, gt=0, le=1024, description="largest body of a call, in MiB")
    connections: int = Field(4096, ge=1, description="connections of agents that a process serves at once")

    @model_validator(mode="after")
    def _fits_together(self) -> "FrontConfig":
        twice = [name for name in dict.fromkeys(self.policies) if self.policies.count(name) > 1]
        if twice:
            raise ValueError(f"policies must be different names (found {twice[0]!r} twice)")
        if self.upstream_key_env and not self.upstream:
            raise ValueError(
                f"upstream_key_env needs upstream, to which the key goes (found {self.upstream_key_env!r})"
            )
        if self.upstream_usd_max is not None and not (
            self.upstream_usd_per_million_in or self.upstream_usd_per_million_out
        ):
            raise ValueError(
                "upstream_usd_max needs upstream_usd_per_million_in and upstream_usd_per_million_out, or nothing costs "
                f"anything (found {self.upstream_usd_max})"
            )
        return self


DOORS = ("prime-rl", "trl", "slime", "areal", "skyrl")
"""The trainers of other people that a run can be opened to."""
IMPORTED = "imported"
"""The kind of trainer of such a run."""


class DoorsConfig(_Section):
    """What other people's trainers may do with a run that `elastic serve-rollouts` has begun."""

    names: tuple[Literal["prime-rl", "trl", "slime", "areal", "skyrl"], ...] = Field(
        DOORS, min_length=1, description="the trainers whose routes are open"
    )
    roots: tuple[str, ...] = Field(
        (), description="DIR, or THEIRS=OURS where trainers call it otherwise: offered weights are below"
    )
    plain: tuple[str, ...] = Field(
        (), description="networks, such as 10.0.0.0/8, whose peers need neither TLS nor a key, for control too"
    )
    adapts: bool = Field(False, description="adapters to the base are offered, else whole models")
    idle_s: float = Field(600.0, gt=0, description="time without a request after which leases are given back")


class TrainerPacingConfig(_Section):
    """A modelled device for training: a group takes at least its tokens at this speed, prompts included."""

    train_tokens_per_s: float = Field(gt=0, description="tokens a second that the modelled device trains on")
    update_s: float = Field(0.0, ge=0, description="seconds that the step to the next version takes at least")


class OverlongBufferConfig(_Section):
    """DAPO's soft penalty of long trajectories."""

    len: int = Field(ge=1, description="tokens before `max_resp_len` over which the penalty grows")
    penalty_factor: float = Field(1.0, ge=0, description="reward that a trajectory of that length loses")
    max_resp_len: int = Field(
        ge=1, description="sampled tokens of a trajectory at which the whole penalty is due; it grows on beyond"
    )

    @model_validator(mode="after")
    def _begins_at_a_length(self) -> "OverlongBufferConfig":
        if self.len > self.max_resp_len:
            raise ValueError(
                f"len must be at most max_resp_len = {self.max_resp_len}, or it begins before the first token "
                f"(found {self.len})"
            )
        return self


DISTILLATION = "distillation"
LOSSES = ("grpo", "gspo", "cispo", DISTILLATION)


def _loss(name: str) -> str:
    if name not in LOSSES:
        try:
            parsed(name)
        except ValueError:
            raise ValueError(f"must be one of {', '.join(LOSSES)}, or code: {ALLOWED}") from None
    return name


def low_high(text: str) -> tuple[float, float]:
    """The bounds of an importance weight or a ratio, given as "low_high". Raises `ValueError`."""
    try:
        low, high = map(float, text.split("_"))
    except ValueError:
        low, high = math.nan, math.nan
    if not 0 <= low < 1 < high < math.inf:
        raise ValueError('must be a number, or "low_high" with low below 1 and high above it, such as "0.5_5"')
    return low, high


def _threshold(found: float | str) -> float | str:
    if isinstance(found, str):
        low_high(found)
    elif not 1 <= found < math.inf:
        raise ValueError('must be at least 1, or "low_high", such as "0.5_5"')
    return found


def _rs_threshold(found: float | str | None) -> float | str | None:
    if isinstance(found, str):
        low_high(found)
    elif found is not None and not 0 < found < math.inf:
        raise ValueError('must be above 0, or "low_high", such as "0.5_5"')
    return found


RejectionStatistic: TypeAlias = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


class LossConfig(_Section):
    """What every kind of trainer minimises. Keys are verl's, where it has them."""

    loss: Annotated[str, AfterValidator(_loss)] = Field(
        "grpo",
        description="grpo; gspo: a ratio a sequence; cispo: clipped weights that leave no token out; distillation: "
        "towards `reference`; or code of one's own, FILE.py:NAME or MODULE:NAME, which the trainer alone loads",
        json_schema_extra=MAY_NAME_CODE,
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        Field("token-mean", description="how the losses of a mini-batch's tokens become one")
    )
    loss_scale_factor: float | None = Field(
        None, gt=0, description="tokens over which `seq-mean-token-sum-norm` divides the sum of each sequence"
    )
    clip_ratio_low: float = Field(
        0.2, gt=0, le=1, description="PPO's clip: importance ratios below 1 - this (at 1: none) …"
    )
    clip_ratio_high: float = Field(0.28, gt=0, description="… and above 1 + this give no gradient (DAPO)")
    clip_ratio_c: float = Field(
        3.0, gt=1, description="dual clip: importance ratio above which a negative advantage gives no gradient"
    )
    adv_estimator: Literal["grpo", "rloo"] = Field(
        "grpo", description="rewards less their group's mean, or, undivided, less the mean of its others (rloo)"
    )
    norm_adv_by_std_in_grpo: bool = Field(
        True, description="with `grpo` divide advantages by the standard deviation of their group's rewards"
    )
    advantage_epsilon: float = Field(
        1e-6, gt=0, description="beside a group's standard deviation; rewards that differ by less are equal"
    )
    mask_truncated: bool = Field(
        False, description="give no gradient for trajectories that a limit of turns or tokens has ended"
    )
    bypass_mode: bool = Field(
        True,
        description="take the log-probabilities with which tokens were sampled for those that ratios are to; false: "
        "the trainer's own, with the weights at the step's beginning",
    )
    rollout_is: Literal["token", "sequence"] | None = Field(
        None,
        description="with bypass_mode = false: weigh tokens by the trainer's probability over the engine's, each by "
        "its own or by its sequence's",
    )
    rollout_is_threshold: Annotated[float | str, AfterValidator(_threshold)] = Field(
        2.0,
        description="largest importance weight of tokens more than one version old; with `rollout_is` of all, or "
        '"low_high": tokens outside are masked',
    )
    rollout_rs: RejectionStatistic | None = Field(
        None,
        description="with bypass_mode = false: mask tokens or sequences whose divergence between trainer and engine is "
        "beyond `rollout_rs_threshold`",
    )
    rollout_rs_threshold: Annotated[float | str | None, AfterValidator(_rs_threshold)] = Field(
        None, description='most of it; of k1 a ratio\'s bounds, "low_high", or a number for 1 over it and it'
    )
    reference: GivenPath | None = Field(
        None,
        description="frozen policy, as `model.checkpoint`, that `kl_coefficient` and `distillation` look at; unset: "
        "for the former `model.checkpoint` itself",
    )
    kl_coefficient: float = Field(0.0, ge=0, description="times the KL to `reference` (k3) in the loss of each token")
    entropy_coefficient: float = Field(0.0, ge=0, description="times the entropy, taken from the loss of each token")
    overlong_buffer: OverlongBufferConfig | None = Field(
        None, description="take from the rewards of long trajectories before they are compared (DAPO)"
    )

    @model_validator(mode="after")
    def _cancels_nothing(self) -> "LossConfig":
        if (self.loss_scale_factor is None) != (self.loss_agg_mode != "seq-mean-token-sum-norm"):
            factor = "no factor" if self.loss_scale_factor is None else f"{self.loss_scale_factor:g}"
            raise ValueError(
                "loss_scale_factor and loss_agg_mode = 'seq-mean-token-sum-norm' belong together (found "
                f"{factor} and {self.loss_agg_mode!r})"
            )
        for key in ("rollout_is", "rollout_rs"):
            if self.bypass_mode and (found := getattr(self, key)) is not None:
                raise ValueError(
                    f"{key} needs bypass_mode = false: with it both of the policies that {key} compares are the "
                    f"engine's (found {found!r})"
                )
        if self.rollout_is is None and isinstance(self.rollout_is_threshold, str):
            raise ValueError(
                f'rollout_is_threshold = "low_high" needs rollout_is, of which these are the bounds (found '
                f"{self.rollout_is_threshold!r}; without it a number of at least 1)"
            )
        if (self.rollout_rs is None) != (self.rollout_rs_threshold is None):
            found = (
                f"no statistic and {self.rollout_rs_threshold!r}"
                if self.rollout_rs is None
                else f"{self.rollout_rs!r} and no threshold"
            )
            raise ValueError(f"rollout_rs and rollout_rs_threshold belong together (found {found})")
        one_sided = self.rollout_rs is not None and not self.rollout_rs.endswith("k1")
        if one_sided and isinstance(self.rollout_rs_threshold, str):
            raise ValueError(
                f"rollout_rs_threshold must be a number for {self.rollout_rs}, which is never below 0 (found "
                f"{self.rollout_rs_threshold!r})"
            )
        two_sided = self.rollout_rs is not None and not one_sided
        if two_sided and isinstance(self.rollout_rs_threshold, float) and self.rollout_rs_threshold <= 1:
            raise ValueError(
                f"rollout_rs_threshold must be above 1 for {self.rollout_rs}, whose ratio is kept between one over it "
                f"and it (found {self.rollout_rs_threshold})"
            )
        if self.loss == DISTILLATION and self.reference is None:
            raise ValueError("loss = 'distillation' needs reference, the policy that is distilled")
        if self.reference is not None and not self.has_reference:
            raise ValueError(
                f"reference needs kl_coefficient above 0, or loss = 'distillation': nothing looks at it otherwise "
                f"(found {str(self.reference)!r})"
            )
        return self

    @property
    def has_reference(self) -> bool:
        return self.kl_coefficient > 0 or self.loss == DISTILLATION

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Whether a group can have a gradient where its members' rewards do not differ."""
        return self.has_reference or self.entropy_coefficient > 0 or self.overlong_buffer is not None


PARTS_OF_AN_ORDER = 4
"""What a trainer's ranks do one after the other for an update at most: step, give weights, publish, save."""


class TrainerConfig(LossConfig):
    """What every kind of trainer has.

    Beside its keys stand sections, named by kinds of trainers, with what is a trainer's own: its `Settings` say what
    that is, and the process that uses them validates them (`elastic.worker.trainer`).
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]] = Field(init=False)  # type: ignore[assignment]

    kind: str = Field(
        "embedded", description="which trainer, of those installed; its own keys are in the section `trainer.KIND`"
    )
    learning_rate: float = Field(2e-4, gt=0, description="of AdamW, once it is warm")
    warmup_updates: int = Field(5, ge=0, description="updates over which the learning rate grows to its value")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate once it is warm: it stays, or falls until the run's last update"
    )
    schedule_final_share: float = Field(
        0.0, ge=0, le=1, description="of `learning_rate`, to which `linear` and `cosine` fall"
    )
    updates_per_step: int = Field(2, ge=1, description="optimiser updates a step; groups split in launch order")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.99), description="decay of AdamW's first and second moments"
    )
    adam_epsilon: float = Field(1e-8, gt=0, description="added to the denominator of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW, decoupled; norms and biases do not decay")
    gradient_clip: float = Field(1.0, gt=0, description="largest norm of a gradient; longer ones are scaled to it")
    mismatch_max: float = Field(
        0.2,
        gt=0,
        description="mean |log-ratio| between a worker's log-probabilities and the trainer's with the same weights, in "
        "nats, beyond which its tokens are not trained on and it is fenced; what its engine declares comes on top",
    )
    micro_batch_tokens: int = Field(
        16_384, ge=1, description="most tokens in one forward and backward pass, padding included"
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads that the trainer computes with")
    checkpoint_every_steps: int = Field(
        5, ge=1, description="steps from one checkpoint to the next; the last has one, too"
    )
    pacing: TrainerPacingConfig | None = Field(
        None, description="a modelled device, as `[engine.pacing]` is for rollouts"
    )
    usd_per_gpu_hour: float = Field(10.47, ge=0, le=1e6, description="price of a GPU of the trainer's device")
    billing: Literal["exact", "second", "minute", "hour"] = Field(
        "exact", description="how its device is billed: by exact time, or by each begun second, minute or hour"
    )
    max_restarts: int = Field(
        3, ge=0, description="losses of the trainer's device that a run survives: another one begins at its checkpoint"
    )
    gpus: int = Field(
        1, ge=1, description="of the trainer's device; in live runs one, or with kind `transformers` a rank on each"
    )
    step_timeout_s: float = Field(300.0, gt=0, description="longest time from a step's last group to its weights")
    engine: dict[str, Any] = Field(
        default_factory=dict, description="settings of the engine that seeds on its device that differ from [engine]"
    )

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """The trainers' own settings, by kind, as they were found."""
        return self.__pydantic_extra__

    @property
    def order_timeout_s(self) -> float:
        """How long a run waits for an order to be carried out before it fails. Of several ranks each part of an order
        may take `step_timeout_s`: they end by themselves if it takes longer, and others go on."""
        return self.step_timeout_s * (1 if self.gpus == 1 else PARTS_OF_AN_ORDER + 1)


class PolicyConfig(_Section):
    """The policy that makes a decision, by the name under which it is installed (`elastic.policies`,
    `DECISION.NAME`)."""

    policy: str = Field(
        "auto", description="a policy that is installed; auto: as the configuration's other keys say; none: nobody"
    )
    settings: dict[str, Any] = Field({}, description="the policy's own keys")


class SeedingConfig(PolicyConfig):
    """How long the trainer's device generates at a step's start (RLBoost Alg. 1)."""

    policy: str = Field(
        "auto",
        description="how the window is chosen: adaptive, fixed, or another that is installed; none: the device never "
        "generates; auto: none for a pool's job, whose turns on a training node are for training, else adaptive",
    )
    window_s: float = Field(1.0, ge=0, description="the window; with `adaptive` that of the first step")
    longest_window_s: float = Field(300.0, ge=0, description="upper end of the window, with `adaptive`")
    rate: float = Field(4.0, ge=1, description="η: differences in idle time are divided by this")
    memory: bool = Field(True, description="take a window up again when the capacity returns that it was found under")
    bound_workers: bool = Field(
        True,
        description="acquire no more workers than make steps shorter (N_prem); in the first step `reserved_engines`",
    )
    reserved_engines: int | None = Field(
        None,
        ge=1,
        description="engines of a worker's size that the trainer's device is divided into while it generates (N_resv); "
        "unless set, by its GPUs",
    )


class RoutingConfig(PolicyConfig):
    """Where turns go: `static` pins a trajectory to a worker, `turn_wise` follows load, `affinity` prefixes first."""

    policy: str = Field(
        "affinity",
        description="affinity: the worker that has the turn's prefix, unless it would wait there and not elsewhere; "
        "turn_wise: the least loaded one; static: where the trajectory's first turn was; or another that is installed",
    )
    hardware: bool = Field(True, description="weigh what devices declare against what tasks need (with `affinity`)")


class BalancingConfig(PolicyConfig):
    """Moving turns from overloaded to underloaded workers (RLBoost Alg. 2)."""

    policy: str = Field(
        "continuous",
        description="continuous: turns that wait move to workers that can begin them at once, and where none waits, "
        "turns under way from workers with more than `plateau_share` needs to ones with fewer; none: neither; or "
        "another that is installed",
    )
    interval_s: float = Field(
        0.25, gt=0, description="time between two looks at how turns are spread, while there are any"
    )
    plateau_share: float = Field(
        0.9, gt=0, le=1, description="share of the best throughput seen at which a batch counts as large enough"
    )


class ProvisioningConfig(PolicyConfig):
    policy: str = Field(
        "marginal_value",
        description="marginal_value: the cheapest leases first, as long as one more costs less than the rollouts that "
        "it shortens, at `usd_per_hour_saved`; take_all: all that providers offer; or another that is installed",
    )
    usd_per_hour_saved: float = Field(
        100.0, ge=0, description="what an hour of the run's time is worth, beside its bill"
    )
    hold: Literal["auto", "run", "rollouts"] = Field(
        "auto",
        description="run: leases are held for the whole run; rollouts: while there are rollouts to do, and given back "
        "between two steps', or two requests, unless getting ready again takes longer than that; auto: rollouts for a "
        "pool's job, else run",
    )
    successor_margin: float = Field(
        1.5,
        ge=0,
        description="how early the replacement of a lease that ends by time is asked for, in times of what booting and "
        "loading take; 0: when the lease has ended",
    )


class PacingConfig(_Section):
    """A modelled device: an iteration takes at least the time given here (real tokens, modelled speed)."""

    prefill_tokens_per_s: float = Field(gt=0, description="prompt tokens a second of the modelled device")
    decode_step_s: dict[int, float] = Field(
        description="batch size → seconds of one decode iteration; linear between, and beyond the last two"
    )

    @model_validator(mode="after")
    def _positive(self) -> "PacingConfig":
        if not self.decode_step_s:
            raise ValueError("needs at least one batch size")
        if any(batch < 1 or step_s <= 0 for batch, step_s in self.decode_step_s.items()):
            raise ValueError("batch sizes must be at least 1 and times positive")
        return self


class EngineConfig(_Section):
    """What every rollout engine has; the orchestrator sends it to each worker as it joins.

    Beside its keys stand sections, named by kinds of engines, with what is an engine's own: its `Settings` say what
    that is, and the process that uses them validates them (`elastic.engine`).
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]] = Field(init=False)  # type: ignore[assignment]

    kind: str = Field(
        "torch", description="which engine, of those installed; its own keys are in the section `engine.KIND`"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="what it computes on; auto takes CUDA where there is some"
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of an engine")
    max_batch: int = Field(16, ge=1, description="turns executed at once")
    max_pending: int = Field(4, ge=0, description="Θ of delayed dispatch: turns sent ahead (RLBoost Alg. 2)")
    max_context_tokens: int = Field(448, ge=2, description="most tokens of a trajectory, prompts included")
    kv_block_tokens: int = Field(16, ge=1, description="tokens in a block of the KV cache")
    kv_blocks: int = Field(
        1024,
        ge=1,
        description="blocks of the KV cache; not with `engine.vllm.gpu_memory_utilization`, or on a shared device",
    )
    prefill_chunk_tokens: int = Field(256, ge=1, description="most prompt tokens that one iteration computes")
    pacing: PacingConfig | None = Field(None, description="a modelled device, which the engine is no faster than")
    tflops: float | None = Field(None, gt=0, description="what the device computes; declared, for affinity")
    memory_gb_per_s: float | None = Field(None, gt=0, description="what its memory gives; declared, for affinity")

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """The engines' own settings, by kind, as they were found."""
        return self.__pydantic_extra__

    def overlaid(self, over: Mapping[str, Any]) -> dict[str, Any]:
        """These settings as plain data, with those of `over` in their place; sections are overlaid key by key."""
        base = self.model_dump(mode="json")
        for key, value in over.items():
            base[key] = base[key] | value if isinstance(value, dict) and key in self.sections else value
        return base


FLUSH_MIN_S, FLUSH_MAX_S = 0.001, 1.0
"""Shortest and longest that a token may stay in a worker: what many small frames cost, and what a kill loses."""


class SchedulerConfig(_Section):
    """Time limits of the control plane. Every wait in it ends by one of these."""

    heartbeat_interval_s: float = Field(0.5, gt=0, description="time between two heartbeats of a worker")
    heartbeat_timeout_s: float = Field(3.0, gt=0, description="silence after which a worker is fenced")
    stall_timeout_s: float = Field(4.0, gt=0, description="no engine progress while turns execute → fenced")
    turn_stall_timeout_s: float = Field(20.0, gt=0, description="no token of a running turn → routed again")
    handover_timeout_s: float = Field(1.0, gt=0, description="wait for an aborted turn's last tokens")
    drain_timeout_s: float = Field(
        5.0,
        gt=0,
        description="how long a worker that leaves may take to hand its turns over; before a lease ends by time, how "
        "long its turns may go on, which grows with what turns take",
    )
    acquire_timeout_s: float = Field(
        60.0, gt=0, description="how long a provider may take to answer a request for a lease"
    )
    boot_timeout_s: float = Field(300.0, gt=0, description="from a lease's grant to its workers' first words")
    load_timeout_s: float = Field(60.0, gt=0, description="from the order to load weights to their being in force")
    resume_timeout_s: float = Field(
        5.0, gt=0, description="how long a disconnected worker may come back; at least 30 s beyond loopback"
    )
    release_timeout_s: float = Field(10.0, gt=0, description="how long a lease may take to be given back")
    plug_in_timeout_s: float = Field(
        60.0, gt=0, description="longest that a policy or market of another package computes; then the run ends"
    )
    queue_timeout_s: float = Field(120.0, gt=0, description="longest a turn waits for any worker; then the run fails")
    reseed_delay_s: float = Field(
        0.25, ge=0, description="how long turns find no worker before the trainer's device takes them back"
    )
    retry_base_s: float = Field(1.0, gt=0, description="first back-off after a refused lease; doubles")
    retry_max_s: float = Field(30.0, gt=0, description="longest back-off, of failed calls of a reward function, too")
    max_engine_errors: int = Field(3, ge=1, description="engine errors after which a turn is given up")
    collect: Literal["tokens", "responses"] = Field(
        "tokens", description="`responses`: workers send whole turns only, and what a lost one had begun is lost"
    )
    flush_interval_s: float = Field(
        0.03,
        ge=FLUSH_MIN_S,
        le=FLUSH_MAX_S,
        description="longest a token stays in a worker, while the orchestrator has room",
    )
    flush_interval_max_s: float = Field(
        0.25,
        ge=FLUSH_MIN_S,
        le=FLUSH_MAX_S,
        description="longest a token stays in a worker, however busy the orchestrator is",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "SchedulerConfig":
        least_s, most_s = self.flush_interval_s, self.flush_interval_max_s
        if most_s < least_s:
            raise ValueError(f"flush_interval_max_s ({most_s:g}) must be at least flush_interval_s ({least_s:g})")
        if self.heartbeat_timeout_s < 3 * self.heartbeat_interval_s:
            raise ValueError("heartbeat_timeout_s must be at least three heartbeat_interval_s")
        return self


class WeightsConfig(_Section):
    relay: str = Field(
        "directory",
        pattern=r"^(directory|http|[a-z][a-z0-9+.-]*://\S+)$",
        description="where workers on this machine read weights: directory or http, others over HTTPS either way; or "
        "the URL of a relay elsewhere, for all of them",
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="of the relay over HTTP; 0: the one after run.port if that is given, or any",
    )
    mode: Literal["finish", "recompute", "keep"] = Field(
        "finish",
        description="what a worker does with turns under way when a version comes. finish: it ends them with the old "
        "one first; recompute: they go on with the new one at once, their prefix computed anew; keep: so, too, but "
        "with the prefix as the old one left it",
    )
    pull_timeout_s: float = Field(30.0, gt=0, description="longest a pull takes, of all weights where need be")
    keep_versions: int = Field(
        4, ge=2, description="newest versions that stay on the relay; others while they are pulled"
    )
    keyframe_every: int = Field(16, ge=1, description="versions between full copies; in between are deltas")
    merge_every: int = Field(4, ge=1, description="versions that a merged delta spans; 1 for none")
    link_gbps: float = Field(0.25, gt=0, description="a worker's share of the slowest link; codecs are chosen for it")


class RewardsConfig(_Section):
    """A reward function, on processes that come when called for; without `name` rewards are the environment's own."""

    name: str = Field("", description="an installed reward function")
    pool: str = Field("local", description="on which pool of functions it runs")
    pool_settings: dict[str, Any] = Field(default_factory=dict, description="the pool's own keys")
    settings: dict[str, Any] = Field(default_factory=dict, description="the function's own keys")
    timeout_s: float = Field(10.0, gt=0, description="longest a call takes, its cold start included; then it is killed")
    max_retries: int = Field(2, ge=0, description="how often a call that failed is made again")
    retry_base_s: float = Field(0.2, gt=0, description="first back-off after a failed call; doubles")
    concurrency: int = Field(4, ge=1, description="most calls, and so processes, at once")
    idle_s: float = Field(5.0, ge=0, description="time without a call after which a process ends")
    usd_per_s: float = Field(0.0, ge=0, le=1e6, description="price of a call's time, its cold start included …")
    usd_per_call: float = Field(0.0, ge=0, le=1e6, description="… and of a call")
    pacing_s: float = Field(0.0, ge=0, description="a call takes at least this long: a real reward, a modelled speed")


class JournalConfig(_Section):
    """How the journal is written. Only "power" waits for the disk at each commit, some milliseconds each."""

    commit_interval_s: float = Field(0.05, gt=0, description="longest an event waits to be durable")
    durable_against: Literal["process", "power"] = Field(
        "process",
        description="what durable events outlive: the death of every process, or a power failure, too, which may "
        "otherwise take the last seconds",
    )
    lock_timeout_s: float = Field(30.0, gt=0, description="how long another process may hold the journal's lock")
    pending_mb: float = Field(64.0, gt=0, description="what may wait to be written, in MiB; beyond it workers wait")
    forget_mb: float = Field(
        16.0,
        gt=0,
        description="a run that serves requests keeps its state in place of what led to it after so many MiB at least",
    )


class LoggingConfig(_Section):
    """Other people's loggers that get what the journal says of each step, by a process beside the run."""

    to: tuple[Literal["trackio", "tensorboard", "wandb", "mlflow"], ...] = Field(
        (), description="which loggers; their keys are variables that `run.pass_env` names: WANDB_API_KEY"
    )
    project: str = Field(
        "elastic",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="the project, or experiment, in which the run has its own name",
    )
    samples: int = Field(
        4, ge=0, le=64, description="trajectories of each step that are sent with their messages and rewards"
    )
    sample_bytes: int = Field(16_384, ge=256, le=1_048_576, description="most bytes of a trajectory's messages")
    every_s: float = Field(2.0, ge=0.05, le=3600, description="time between two looks at the journal")


class SimulationConfig(_Section):
    """What `elastic simulate` takes where its options do not say; live runs do not look at it."""

    providers: tuple[str, ...] = Field((), description="as --providers")
    profile: str = Field("", description="as --profile NAME")
    profiles: dict[str, str] = Field(default_factory=dict, description="by provider, as --profile PROVIDER=NAME")
    numbers: dict[str, float] = Field(
        default_factory=dict, description="numbers of all profiles that are known better here, such as boot_s"
    )
    turns_from: str = Field("", description="as --turns-from")


PHASE_S_MIN, PHASE_S_MAX = 1e-6, 1e7
"""What a plan may say of a phase: no less than a microsecond, and no more than some four months."""


class JobPlanConfig(_Section):
    """How long the phases of a step last on the nodes that the job asks for, at its token limit or at a quantile."""

    rollout_s: float = Field(ge=PHASE_S_MIN, le=PHASE_S_MAX, description="a rollout phase at its longest")
    train_s: float = Field(ge=PHASE_S_MIN, le=PHASE_S_MAX, description="a training phase at its longest")
    sync_s: float = Field(
        0.0, ge=0, le=PHASE_S_MAX, description="from the end of training to the next rollouts; it holds no node"
    )
    rollout_switch_s: float = Field(0.0, ge=0, le=PHASE_S_MAX, description="to resume and to park, together")
    train_switch_s: float = Field(0.0, ge=0, le=PHASE_S_MAX, description="resuming and parking of a training phase")
    rollout_cold_s: float = Field(
        0.0, ge=0, le=PHASE_S_MAX, description="starting the rollouts' engine on its device, once in each placement …"
    )
    rollout_parks: bool = Field(True, description="… or, if it cannot park there, before every rollout")


class JobNeeds(_Section):
    """What a job asks of a pool that many jobs share, besides its phases."""

    slo: float = Field(1.5, ge=1, le=1e6, description="largest slowdown that it accepts: a step's time over that alone")
    rollout_nodes: int = Field(1, ge=1, description="rollout nodes that the job asks for")
    train_nodes: int = Field(1, ge=1, description="training nodes that it asks for")
    rollout_memory_gb: float = Field(1.0, ge=0, description="host memory that its state takes on a rollout node …")
    train_memory_gb: float = Field(1.0, ge=0, description="… and on a training node; what holds more is ended")
    train_efficiency: float = Field(
        1.0, ge=0, le=1, description="in simulations: share of each further training node that makes training faster"
    )
    restart_s: float = Field(0.0, ge=0, le=PHASE_S_MAX, description="what it takes to move it elsewhere")
    max_resubmissions: int = Field(0, ge=0, description="how often it is submitted again once it has failed")


class JobConfig(JobNeeds):
    """What the run asks of a pool that many jobs share; a run that is no pool's does not look at it."""

    max_restarts: int = Field(3, ge=0, description="deaths of its process in one placement before it has failed")
    plan: JobPlanConfig | None = Field(None, description="its phases; without it a few steps are timed first")
    plan_quantile: float | None = Field(
        None, ge=0, le=1, description="of the steps that are timed, this one; without it phases at the token limit"
    )
    files: tuple[str, ...] = Field(
        (),
        description="of a script: what of its directory a pool's nodes on other machines are sent; else all of it but "
        "what is hidden, files named *.ticket and the directories of runs, pools and nodes",
    )
    outputs: tuple[Annotated[str, Field(pattern=_NAME_OF_OWN)], ...] = Field(
        (),
        max_length=32,
        description="of a script: directories in its own whose files come back to the pool from a node on another "
        "machine, as they are written",
    )


class Config(_Section):
    """A whole run. `providers` holds each provider's own keys; its adapter validates them."""

    run: RunConfig = Field(default_factory=RunConfig)  # type: ignore[arg-type]
    model: ModelConfig
    environment: EnvironmentConfig | None = Field(
        default_factory=EnvironmentConfig,  # type: ignore[arg-type]
    )
    environments: tuple[EnvironmentConfig, ...] = Field(
        (), description="several environments, in place of `environment`: each has its keys"
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)  # type: ignore[arg-type]
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)  # type: ignore[arg-type]
    seeding: SeedingConfig = Field(default_factory=SeedingConfig)  # type: ignore[arg-type]
    routing: RoutingConfig = Field(default_factory=RoutingConfig)  # type: ignore[arg-type]
    balancing: BalancingConfig = Field(default_factory=BalancingConfig)  # type: ignore[arg-type]
    provisioning: ProvisioningConfig = Field(default_factory=ProvisioningConfig)  # type: ignore[arg-type]
    holding: PolicyConfig = Field(default_factory=PolicyConfig)  # type: ignore[arg-type]
    replacement: PolicyConfig = Field(default_factory=PolicyConfig)  # type: ignore[arg-type]
    departure: PolicyConfig = Field(default_factory=PolicyConfig)  # type: ignore[arg-type]
    selection: PolicyConfig = Field(default_factory=PolicyConfig)  # type: ignore[arg-type]
    sampling: PolicyConfig = Field(default_factory=PolicyConfig)  # type: ignore[arg-type]
    engine: EngineConfig = Field(default_factory=EngineConfig)  # type: ignore[arg-type]
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)  # type: ignore[arg-type]
    weights: WeightsConfig = Field(default_factory=WeightsConfig)  # type: ignore[arg-type]
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)  # type: ignore[arg-type]
    journal: JournalConfig = Field(default_factory=JournalConfig)  # type: ignore[arg-type]
    logging: LoggingConfig = Field(default_factory=LoggingConfig)  # type: ignore[arg-type]
    simulation: SimulationConfig = Field(default_factory=SimulationConfig)  # type: ignore[arg-type]
    job: JobConfig = Field(default_factory=JobConfig)  # type: ignore[arg-type]
    evaluation: EvaluationConfig | None = Field(None, description="how the policy is measured; without it, it is not")
    doors: DoorsConfig | None = Field(None, description="what trainers elsewhere may do; the run has none of its own")
    front: FrontConfig | None = Field(None, description="fronts for agents; an environment that needs them has them")
    providers: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="one section a provider, each of its kind"
    )

    @property
    def trained(self) -> tuple[EnvironmentConfig, ...]:
        """The environments that the run trains on, one or several."""
        return self.environments or ((self.environment,) if self.environment is not None else ())

    @property
    def mixture(self) -> tuple[EnvironmentConfig, ...]:
        """The environments of the run: those that it trains on, and then those that are evaluated alone, which have no
        share of the groups."""
        splits = () if self.evaluation is None else self.evaluation.splits
        return (*self.trained, *splits)

    def environment_section(self, number: int) -> tuple[str, ...]:
        """The key of the environment with this number in `mixture`."""
        if number >= (trained := len(self.trained)):
            return ("evaluation", "splits", str(number - trained))
        return ("environments", str(number)) if self.environments else ("environment",)

    def with_mixture(self, mixture: Sequence[EnvironmentConfig]) -> "Config":
        """The same with these environments in place of those of `mixture`."""
        trained, splits = tuple(mixture[: len(self.trained)]), tuple(mixture[len(self.trained) :])
        changed: dict[str, Any] = {"environments": trained} if self.environments else {"environment": trained[0]}
        if self.evaluation is not None:
            changed["evaluation"] = self.evaluation.model_copy(update={"splits": splits})
        return self.model_copy(update=changed)

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The environments that the policy is evaluated on, by name."""
        own = self.evaluation
        if own is None:
            return ()
        named = own.environments or (() if own.splits else tuple(one.name for one in self.trained))
        return (*named, *(split.name for split in own.splits))

    @property
    def evaluated_metrics(self) -> tuple[str, ...]:
        """The metrics of evaluations: of all tasks together, and of each environment where there are several."""
        own = self.evaluation
        if own is None:
            return ()
        metrics = (f"avg@{own.samples}", *(f"pass@{k}" for k in own.passes))
        several = self.evaluated if len(self.evaluated) > 1 else ()
        return (*metrics, *(f"{name}/{metric}" for name in several for metric in metrics))

    @property
    def served_name(self) -> str:
        """What the model is called for agents."""
        own = "" if self.front is None else self.front.model_name
        return own or self.model.checkpoint.name

    @property
    def reference(self) -> Path | None:
        """The frozen policy that the trainer compares its own with, if it does."""
        return (self.trainer.reference or self.model.checkpoint) if self.trainer.has_reference else None

    @property
    def resume_timeout_s(self) -> float:
        """How long a disconnected worker may come back."""
        least_s = FAR_RESUME_TIMEOUT_S if self.run.beyond_loopback else 0.0
        return max(self.scheduler.resume_timeout_s, least_s)

    @model_validator(mode="after")
    def _mixed(self) -> "Config":
        several = self.environments
        if several and "environment" not in self.model_fields_set:
            object.__setattr__(self, "environment", None)  # As in `_of_a_kind`.
        if several and self.environment is not None:
            raise ValueError(
                "environment and environments are both given; allowed: one of them, as [environment] is a list of one"
            )
        if not self.trained:
            raise ValueError("environments is empty; allowed: at least one environment, or [environment]")
        names = [one.name for one in several]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"environments must have names of their own (found {', '.join(map(repr, twice))} more than once)"
            )
        if several and not any(one.ratio for one in several):
            raise ValueError("environments: the ratio of every one is 0; allowed: one above 0 at least")
        if sum(one.kind == OUTSIDE for one in several) > 1:
            raise ValueError(f"environments: agents elsewhere cannot say which they play; allowed: one {OUTSIDE!r}")
        return self

    @model_validator(mode="after")
    def _serves(self) -> "Config":
        """A run trains itself, or others do, and then it has nothing of training."""
        found = {
            "rollout.groups = 0": self.rollout.groups == 0,
            f"trainer.kind = {IMPORTED!r}": self.trainer.kind == IMPORTED,
        }
        if self.doors is None:
            if said := next((words for words, holds in found.items() if holds), ""):
                raise ValueError(f"{said} is for runs that others train, which `elastic serve-rollouts` begins")
            return self
        found |= {
            "seeding.policy = 'none'": self.seeding.policy == "none",
            "trainer.checkpoint_every_steps = 1": self.trainer.checkpoint_every_steps == 1,
            f"environment.kind = {OUTSIDE!r}, alone": [one.kind for one in self.mixture] == [OUTSIDE],
            "no rewards.name": not self.rewards.name,
            "no evaluation": self.evaluation is None,
        }
        if missing := [words for words, holds in found.items() if not holds]:
            raise ValueError(f"doors needs {missing[0]}: others train, and `elastic serve-rollouts` says all of that")
        return self

    @model_validator(mode="after")
    def _evaluates(self) -> "Config":
        own = self.evaluation
        if own is None:
            if self.run.steps == 0:
                raise ValueError("run.steps must be at least 1, or there is nothing to do without evaluation (found 0)")
            return self
        trained, splits = {one.name: one for one in self.trained}, [split.name for split in own.splits]
        if twice := sorted({name for name in splits if splits.count(name) > 1 or name in trained}):
            raise ValueError(
                f"evaluation.splits must have other names than the rest (found {', '.join(map(repr, twice))} twice)"
            )
        if twice := sorted({name for name in own.environments if own.environments.count(name) > 1}):
            raise ValueError(f"evaluation.environments must name each once (found {', '.join(map(repr, twice))} twice)")
        if unknown := [name for name in own.environments if name not in trained]:
            raise ValueError(
                f"evaluation.environments must be environments of the run: {', '.join(map(repr, trained))} "
                f"(found {unknown[0]!r})"
            )
        if TOGETHER in self.evaluated and len(self.evaluated) > 1:
            raise ValueError(
                f"evaluation: {TOGETHER!r} is what all environments together are called; allowed: another name (found "
                f"{', '.join(map(repr, self.evaluated))})"
            )
        for name in self.evaluated:
            if name in splits:
                continue
            if trained[name].kind == OUTSIDE:
                raise ValueError(
                    f"evaluation.environments: {name!r} is of kind {OUTSIDE!r}, which the run does not play; allowed: "
                    "environments that it plays, or evaluation.splits"
                )
            if trained[name].data is not None or trained[name].kind in BY_PLACE:
                raise ValueError(
                    f"evaluation.environments: the tasks of {name!r} are all trained on; allowed: a split in "
                    f"[[evaluation.splits]] with like = {name!r}, and data or settings of its own"
                )
        if outside := [split.name for split in own.splits if split.kind == OUTSIDE]:
            raise ValueError(f"evaluation.splits: {outside[0]!r} is of kind {OUTSIDE!r}, which the run does not play")
        for key, metric in (("keep_best", own.keep_best), ("stop_when", own.stop_when and own.stop_when.metric)):
            if metric and metric not in self.evaluated_metrics:
                raise ValueError(
                    f"evaluation.{key}: no environment gives {metric!r}; allowed: {', '.join(self.evaluated_metrics)}"
                )
        if own.max_tokens is not None and own.max_tokens >= self.engine.max_context_tokens:
            raise ValueError(
                f"evaluation.max_tokens must be below engine.max_context_tokens = {self.engine.max_context_tokens}, "
                f"or no turn fits (found {own.max_tokens})"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        turn_tokens, context_tokens = self.rollout.max_tokens_per_turn, self.engine.max_context_tokens
        if turn_tokens >= context_tokens:
            raise ValueError(
                f"rollout.max_tokens_per_turn must be below engine.max_context_tokens = {context_tokens}, "
                f"or no turn fits (found {turn_tokens})"
            )
        kv_tokens = self.engine.kv_blocks * self.engine.kv_block_tokens
        if kv_tokens < context_tokens:
            raise ValueError(
                f"engine.kv_blocks x engine.kv_block_tokens must hold engine.max_context_tokens = {context_tokens} "
                f"(found {kv_tokens})"
            )
        if unpinned := [name for name in ("top_p", "top_k") if name not in self.rollout.pin]:
            raise ValueError(
                f"rollout.pin must name {' and '.join(unpinned)}: the trainer learns on the whole softmax, which they "
                f"would cut (found {list(self.rollout.pin)})"
            )
        if self.front is not None and (name := self.served_name) in self.front.policies:
            raise ValueError(
                f"front.policies must be other names than the model's own, which stands for the trajectory as a whole "
                f"(found {name!r}, as front.model_name says it, or the checkpoint's directory)"
            )
        if self.trainer.loss == DISTILLATION and self.rollout.dynamic_sampling:
            raise ValueError(
                "rollout.dynamic_sampling drops groups whose rewards are equal, and trainer.loss = 'distillation' "
                "looks at no rewards: leave one of them out"
            )
        if self.doors is None and self.trainer.updates_per_step > self.rollout.groups:
            raise ValueError(
                f"trainer.updates_per_step must be at most rollout.groups = {self.rollout.groups} "
                f"(found {self.trainer.updates_per_step})"
            )
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file (or a saved `.json`), apply overrides, validate.

    An override is `section.key=value`, its value in TOML syntax or else a string. Code of files (`FILE.py:NAME`) is
    relative to the configuration, wherever it stands.
    Raises `ConfigError` with one line per problem.
    """
    raw = read_sections(path)
    for override in overrides:
        apply_override(raw, override)
    try:
        raw = placed(raw, path.parent)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return validate(Config, raw, str(path))


def read_sections(path: Path) -> dict[str, Any]:
    """A TOML file, or a saved `.json`, as plain data. Raises `ConfigError`."""
    try:
        text = read_text(path)
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {path.suffix.lstrip('.').upper() or 'TOML'}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a section of keys (found {raw!r})")
    return raw


def validate(kind: type[T], raw: Mapping[str, Any], where: str, *section: str) -> T:
    """`raw` as a `kind`, or a `ConfigError` that names each key, what was found and what is allowed.

    Types are strict, by the rules for JSON: `true` and `"3"` are no numbers, but a list may stand for a tuple and a
    string for a path. `where` is the file (or whatever else it comes from), `section` what stands before the keys in
    it.
    """
    if kind is Config:
        raw = _with_fronts(_with_splits(raw, where))
    try:
        valid = kind.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(*(_problem(where, section, kind, problem) for problem in error.errors())) from error
    problems = [
        ConfigProblem(f"must be a finite number (found {number})", key, where)
        for key, number in _infinite(valid, section)
    ]
    if problems:
        raise ConfigError(*problems)
    return valid


def is_class_of_settings(kind: object) -> bool:
    """Whether this is a class with `Settings`, a model of pydantic, as a provider, an engine and a trainer have."""
    settings = getattr(kind, "Settings", None)
    return isinstance(kind, type) and isinstance(settings, type) and issubclass(settings, BaseModel)


def resolve_kind(
    config: "EngineConfig | TrainerConfig", what: str, contract: type[Any], where: str, section: tuple[str, ...]
) -> tuple[type[Any], Any]:
    """The kind that `config.kind` names in the entry-point group `elastic.{what}s`, and its own settings; the sections
    of all other kinds are looked at as well. `contract` is the protocol of such kinds.

    Raises `ConfigError` for a kind or a section that is not installed, cannot be loaded or lacks a name of the
    contract, and for settings that are not its own.
    """
    known = installed(f"elastic.{what}s")
    names = ", ".join(sorted(known)) or "none"
    if config.kind not in known:
        unknown = f"unknown {what} {config.kind!r}; installed: {names}"
        raise ConfigError(ConfigProblem(unknown, (*section, "kind"), where))
    for name in config.sections:
        if name not in known:
            keys = ", ".join(sorted(type(config).model_fields))
            unknown = f"unknown key; allowed: {keys}, and sections of: {names}"
            raise ConfigError(ConfigProblem(unknown, (*section, name), where))
    kinds: dict[str, type[Any]] = {}
    for name in {config.kind, *config.sections}:
        try:
            kinds[name] = load_point(known[name])
        except CodeUnusable as error:
            key = (*section, "kind" if name == config.kind else name)
            raise ConfigError(ConfigProblem(str(error), key, where)) from error
        named = found_point(known[name])
        lacking = [one for one in vars(contract) if not one.startswith("_") and not hasattr(kinds[name], one)]
        problem = ""
        if not is_class_of_settings(kinds[name]):
            problem = f"{named} is {shown(kinds[name])}; allowed: a class with Settings, a model of pydantic"
        elif lacking:
            allowed = f"a subclass of {contract.__module__}.{contract.__name__}"
            problem = f"{named} has no {', '.join(lacking)}; allowed: {allowed}"
        if problem:
            raise ConfigError(ConfigProblem(problem, (*section, "kind" if name == config.kind else name), where))
    settings = {
        name: validate(kind.Settings, config.sections.get(name, {}), where, *section, name)
        for name, kind in kinds.items()
    }
    return kinds[config.kind], settings[config.kind]


def _environments(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The environments that a configuration trains on, as far as they are sections."""
    several = raw.get("environments")
    found = [raw.get("environment"), *(cast("list[Any]", several) if isinstance(several, list) else ())]
    return [cast("Mapping[str, Any]", one) for one in found if isinstance(one, Mapping)]


def _with_splits(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """With each split whole that is `like` an environment of the run. Raises `ConfigError` where there is none such."""
    section = raw.get("evaluation")
    splits = section.get("splits") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(splits, list):
        return raw
    default = EnvironmentConfig.model_fields["name"].default
    known = {str(one.get("name", default)): one for one in _environments(raw) or [{}]}
    whole: list[Any] = []
    for number, split in enumerate(cast("list[Any]", splits)):
        if not isinstance(split, Mapping) or "like" not in split:
            whole.append(split)
            continue
        own = dict(cast("Mapping[str, Any]", split))
        if not isinstance(like := own.pop("like"), str) or like not in known:
            problem = f"must be an environment of the run: {', '.join(map(repr, known))} (found {like!r})"
            raise ConfigError(ConfigProblem(problem, ("evaluation", "splits", str(number), "like"), where))
        inherited = {key: value for key, value in known[like].items() if key not in OF_TRAINING}
        if isinstance(data := inherited.get("data"), Mapping):
            rows = cast("Mapping[str, Any]", data).items()
            inherited["data"] = {key: value for key, value in rows if key not in DATA_OF_TRAINING}
        whole.append({**inherited, "kind": inherited.get("kind") or like, **own})
    return {**raw, "evaluation": {**section, "splits": whole}}


def _with_fronts(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where agents drive there are fronts, and the context alone limits turns, if nothing else is said."""
    engine, rollout = (raw.get(name, {}) for name in ("engine", "rollout"))
    if not all(isinstance(section, Mapping) for section in (engine, rollout)):
        return raw
    front = raw.get("front", {} if _kinds(raw) & {*DRIVEN} else None)
    if front is None:
        return raw
    context = engine.get("max_context_tokens", EngineConfig.model_fields["max_context_tokens"].default)
    room = {"max_tokens_per_turn": context - 1} if isinstance(context, int) and context > 1 else {}
    return {**raw, "front": front, "rollout": {"max_turns": NO_LIMIT_TURNS, **room, **rollout}}


def _kinds(raw: Mapping[str, Any]) -> set[str]:
    """The kinds of the environments that a configuration names, whatever else it says."""
    section = raw.get("evaluation")
    splits = section.get("splits") if isinstance(section, Mapping) else None
    found = cast("list[Any]", splits) if isinstance(splits, list) else []
    entries = [*_environments(raw), *(cast("Mapping[str, Any]", one) for one in found if isinstance(one, Mapping))]
    return {str(one.get("kind") or one.get("name")) for one in entries}


def _infinite(value: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every infinite or undefined number with its key: TOML can say them, and no setting can mean them."""
    if isinstance(value, float) and not math.isfinite(value):
        yield key, value
    elif isinstance(value, BaseModel | Mapping):
        for name, inner in dict(value).items():
            yield from _infinite(inner, (*key, str(name)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _infinite(inner, (*key, str(index)))


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `raw`. Raises `ConfigError` for what is none."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}: expected section.key=value")
    *parents, last = key.strip().split(".")
    table: Any = raw
    for parent in parents:
        table = _inner(table, parent)
        if not isinstance(table, dict | list):
            raise ConfigError(f"--set {override}: {parent} is not a section")
    if isinstance(table, list):
        raise ConfigError(f"--set {override}: {parents[-1]} is a list; allowed: {parents[-1]}.NUMBER.KEY=VALUE")
    try:
        table[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[last] = text


def _inner(table: Any, name: str) -> Any:
    """A section of a section, which is made where there is none, or one of a list, by its number."""
    if isinstance(table, dict):
        sections = cast("dict[str, Any]", table)
        if sections.get(name) is None:
            sections[name] = {}
        return sections[name]
    listed = cast("list[Any]", table)
    return listed[int(name)] if name.isdecimal() and int(name) < len(listed) else None


def _problem(where: str, section: tuple[str, ...], kind: type[BaseModel], problem: Any) -> ConfigProblem:
    key = (*section, *map(str, problem["loc"]))
    return ConfigProblem(_complaint(kind, problem, problem["input"]), key, where)


def _complaint(kind: type[BaseModel], problem: Any, found: Any) -> str:
    match problem["type"]:
        case "extra_forbidden" | "dict_type" if _is_unknown(kind, problem):
            allowed = _siblings(kind, problem["loc"][:-1])
            near = ", ".join(get_close_matches(str(problem["loc"][-1]), allowed))
            return f"unknown key; allowed: {', '.join(allowed) or 'none'}{near and f' (near: {near})'}"
        case "missing":
            return "required but missing"
        case "model_type" | "dict_type":
            return f"must be a section of keys (found {found!r})"
        case "value_error" if isinstance(found, Mapping):
            return str(problem["ctx"]["error"])
        case "value_error":
            return f"{problem['ctx']['error']} (found {_shown(found)})"
        case _:
            return f"{problem['msg'][0].lower()}{problem['msg'][1:]} (found {_shown(found)})"


def _shown(found: object) -> str:
    """A value as an error shows it: a URL without the credentials in it."""
    return repr(without_password(found) if isinstance(found, str) else found)


def _is_unknown(kind: type[BaseModel], problem: Any) -> bool:
    """Where sections of any name are allowed, what is no section is rather a misspelt key."""
    *path, key = problem["loc"]
    return problem["type"] == "extra_forbidden" or (bool(siblings := _siblings(kind, path)) and key not in siblings)


def _siblings(kind: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    for part in (part for part in path if isinstance(part, str)):
        field = kind.model_fields.get(part)
        annotation = field.annotation if field else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        inner = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if inner is None:
            return []
        kind = inner
    return sorted(kind.model_fields)
