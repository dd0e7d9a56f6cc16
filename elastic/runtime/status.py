"""What a run looks like right now: one snapshot for the terminal, for `--json`, and for the journal's samples."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from elastic.core.agreement import Mismatch
from elastic.core.types import NS_PER_S, BudgetForecast, Nanoseconds, RunWarning


class ProviderStatus(msgspec.Struct, kw_only=True):
    """One provider at one moment. `tokens` counts accepted tokens since the run began; `gpus` are all that is asked for
    or held, what is on its way back included. `deaths` are leases that
    ended neither in order nor by a preemption, `replaced` how many of them another lease followed."""

    ready: int = 0
    booting: int = 0
    other: int = 0
    gpus: int = 0
    capacity_turns: int = 0
    running_turns: int = 0
    tokens: int = 0
    leases_ended: int = 0
    preemptions: int = 0
    deaths: int = 0
    replaced: int = 0
    paced_iterations: int = 0
    """The iterations of its workers' engines whose time was modelled."""
    late_iterations: int = 0
    """Those of them that took longer than modelled."""
    usd: float = 0.0
    usd_per_hour: float = 0.0


class LostPlays(msgspec.Struct, kw_only=True):
    """How often trajectories of an environment were begun again, and the tokens that these had sampled."""

    times: int = 0
    tokens: int = 0


class EnvironmentStatus(msgspec.Struct, kw_only=True):
    """One environment of a run since it began. `groups` have begun; `cut_off` members ran still as their groups had
    enough. Trajectories were `begun_again` whose env workers were gone. What either had sampled is lost."""

    groups: int = 0
    cut_off: int = 0
    begun_again: int = 0
    lost_tokens: int = 0


class EnvironmentStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one environment came to during a step, as the run's own figures are. `trajectories` were scored."""

    trajectories: int = 0
    failed: int = 0
    success_rate: float | None = None
    mean_reward: float | None = None
    groups_trained: int = 0
    groups_dropped: int = 0


class EvaluationStatus(msgspec.Struct, kw_only=True):
    """The evaluation that is under way: of its `episodes` so many have ended."""

    version: int
    episodes: int
    ended: int


class RunCondition(msgspec.Struct, frozen=True, kw_only=True):
    """Something that keeps the run from working at full speed now: its kind, a reason of one word, and a message."""

    type: str
    reason: str
    message: str


class UpstreamModelStatus(msgspec.Struct, kw_only=True):
    """Calls of one model elsewhere that are over. Tokens are those that the upstream has told; `bounded` calls, of
    which nobody knows what they came to, are counted as the dearest that they could be."""

    calls: int
    failed: int
    bounded: int
    prompt_tokens: int
    answer_tokens: int
    duration_s: float
    usd: float


class UpstreamStatus(msgspec.Struct, kw_only=True):
    """Calls of models elsewhere since the run began. Those that are `open` may cost `held_usd` at the most."""

    calls: int
    calls_max: int
    open: int
    usd: float
    held_usd: float
    usd_max: float | None
    models: dict[str, UpstreamModelStatus]


class ServingStatus(msgspec.Struct, kw_only=True):
    """What a run that others train serves: the version, what its trainer calls that, and how many requests' turns are
    at workers and are not. `held`: those that wait are held there."""

    version: int
    label: str = ""
    running: int
    waiting: int
    held: bool = False


class RunStatus(msgspec.Struct, kw_only=True):
    """The run at one moment. Success rates are shares of scored trajectories with a reward above 0; mean rewards are of
    the same trajectories.

    `cpu_share` is that of the whole machine. `late_share` is that of the paced iterations which took longer than
    modelled, None where nothing is paced; where it passes `LATE_SHARE_MAX`, `pacing_holds` is false.
    """

    run: str
    phase: str
    step: int
    steps: int
    elapsed_s: float
    success_rate: float | None
    last_success_rate: float | None
    mean_reward: float | None = None
    last_mean_reward: float | None = None
    trajectories_running: int
    queued_turns: int
    tokens_per_s: float
    preemptions: int
    usd: float
    cpu_share: float
    core_share: float = 0.0
    """The share of one core that the orchestrator's own thread takes."""
    flush_interval_s: float = 0.0
    """How often workers send tokens now. What they have not sent is lost with their process."""
    late_share: float | None = None
    pacing_holds: bool
    trainer: str
    providers: dict[str, ProviderStatus]
    caps: dict[str, int] = {}
    """The most GPUs that may be held, by provider, where that is limited."""
    budget: BudgetForecast | None = None
    conditions: list[RunCondition] = []
    mismatches: list[Mismatch] = []
    warnings: list[RunWarning] = []
    """Those since the sample before."""
    upstream: UpstreamStatus | None = None
    """None where agents can call no models elsewhere."""
    environments: dict[str, EnvironmentStatus] = {}
    refilled: dict[str, int] = {}
    """Trajectories in whose place another one came, in the whole run, by what had failed them."""
    evaluation: EvaluationStatus | msgspec.UnsetType = msgspec.UNSET
    serving: ServingStatus | msgspec.UnsetType = msgspec.UNSET
    """The serving side of a run that others train."""


def tokens_at_risk(tokens_per_s: float, flush_interval_s: float) -> int:
    """The most tokens that are lost if all workers are killed at one moment."""
    return math.ceil(tokens_per_s * flush_interval_s)


def core_words(core_share: float, flush_interval_s: float, tokens_per_s: float) -> str:
    """How busy the orchestrator is, and what comes of it."""
    return (
        f"core {core_share:.0%}, tokens every {1000 * flush_interval_s:.0f} ms: killed workers lose "
        f"{tokens_at_risk(tokens_per_s, flush_interval_s)} at the most"
    )


def upstream_words(upstream: UpstreamStatus) -> str:
    """What calls of models elsewhere have come to, and how far from their bounds they are."""
    most = "" if upstream.usd_max is None else f" of ${upstream.usd_max:.2f}"
    models = ", ".join(f"{name} {model.calls}" for name, model in upstream.models.items())
    return (
        f"models elsewhere: {upstream.calls} of {upstream.calls_max} calls, {upstream.open} open, "
        f"${upstream.usd:.4f}{most} spent and up to ${upstream.held_usd:.4f} held{models and f' ({models})'}"
    )


def refilled_words(refilled: Mapping[str, int]) -> str:
    """How many trajectories were replaced by further ones, and why."""
    causes = ", ".join(f"{cause} {count}" for cause, count in refilled.items())
    return f"trajectories replaced within their groups: {sum(refilled.values())} ({causes})"


PROVIDER_STOPPED = "ProviderStopped"
LATE_SHARE_MAX = 0.05
"""Above this share of late iterations, paced engines run below the speed that they model."""
CPU_SATURATED_SHARE = 0.85
"""Above this, several engines on one machine compete for it and stop adding up as separate devices would."""


class ProviderCounts(Protocol):
    """A shell's counts for one provider since the run began. The core forgets past leases."""

    tokens: int
    leases_ended: int
    preemptions: int
    deaths: int
    replaced: int
    paced_iterations: int
    late_iterations: int


def success_rate(rewards: Sequence[float]) -> float | None:
    """The share of rewards above 0; None where nothing has been scored."""
    return sum(reward > 0 for reward in rewards) / len(rewards) if rewards else None


def mean_reward(rewards: Sequence[float]) -> float | None:
    return sum(rewards) / len(rewards) if rewards else None


def late_share(counts: Iterable[ProviderCounts]) -> float | None:
    """The share of the paced iterations that took longer than modelled; None where nothing is paced."""
    paced = late = 0
    for count in counts:
        paced += count.paced_iterations
        late += count.late_iterations
    return late / paced if paced else None


def tokens_per_s(marks: Sequence[tuple[Nanoseconds, int]]) -> float:
    """The mean rate from the first to the last of `marks`: times, and tokens counted until then."""
    (first_ns, first), (last_ns, last) = marks[0], marks[-1]
    return (last - first) * NS_PER_S / (last_ns - first_ns) if last_ns > first_ns else 0.0


def total_tokens(counts: Mapping[str, ProviderCounts]) -> int:
    return sum(count.tokens for count in counts.values())
