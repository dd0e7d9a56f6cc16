"""Makes the scheduler's inputs: the run's plan, its limits and its policies."""

from msgspec import UNSET

from elastic.compose.data import curricula
from elastic.compose.evaluation import planned_evaluation
from elastic.compose.nanoseconds import in_nanoseconds
from elastic.compose.plan import TRAINER_PROVIDER, RunPlan
from elastic.config import LOSSES, Config
from elastic.core.patience import TIMES_MOST
from elastic.core.policy import (
    BalancingPolicy,
    Policies,
    ProvisioningPolicy,
    ReplacementPolicy,
    RoutingPolicy,
    SeedingPolicy,
    SelectionPolicy,
)
from elastic.core.types import NS_PER_S, Limits, Plan, PlannedEnvironment, StalenessDrop
from elastic.worker.trainer import seeding_engines
from policies.balancing import ContinuousBalancing
from policies.departure import UseNotice
from policies.provisioning import HoldForRollouts, MarginalValue, TakeWhatIsOffered
from policies.replacement import EarlyReplacement
from policies.routing import AffinityRouting, PinnedRouting, TurnWiseRouting
from policies.sampling import DynamicSampling, FixedBatch
from policies.seeding import AdaptiveWindow, FixedWindow
from policies.selection import EveryGroup, NonZeroVariance

SLOW_TOKENS_PER_S = 30
"""Decode speed of a turn of a large model in a full batch, on a moderate device."""

ANY_STALENESS = 10**9
"""The bound where nothing is trained on: turns go on with whatever their workers serve."""

ANSWER_GRACE_S = 2.0
"""A function pool kills a call that is out of time and says so; only one that does not is given up without it."""


def run_plan(plan: RunPlan) -> Plan:
    doors = plan.config.doors
    return Plan(
        steps=plan.config.run.steps,
        groups=plan.config.rollout.groups,
        group_size=plan.config.rollout.group_size,
        staleness_bound=plan.config.rollout.staleness_bound if doors is None else ANY_STALENESS,
        staleness_drop=StalenessDrop(plan.config.rollout.staleness_drop),
        minibatches=plan.config.trainer.updates_per_step,
        trainer_provider=TRAINER_PROVIDER,
        mismatch_max=plan.config.trainer.mismatch_max,
        max_failed_share=plan.config.rollout.max_failed_share,
        driven_outside=plan.driven_outside,
        environments=tuple(
            PlannedEnvironment(
                name=one.config.name,
                ratio=one.config.ratio,
                members=one.config.members(plan.config.rollout.group_size),
            )
            for one in plan.environments
        ),
        refill_most=plan.config.rollout.refill_most if plan.config.rollout.refill else 0,
        evaluation=planned_evaluation(plan.config),
        idle_ns=UNSET if doors is None else round(doors.idle_s * NS_PER_S),
        own_loss="" if plan.config.trainer.loss in LOSSES else plan.config.trainer.loss,
    )


def limits(config: Config) -> Limits:
    """The core's limits. The times of [scheduler] have the same names there, and nanoseconds for seconds."""

    def ns(seconds: float) -> int:
        return round(seconds * NS_PER_S)

    return in_nanoseconds(
        Limits,
        config.scheduler,
        resume_timeout_ns=ns(config.resume_timeout_s),
        train_timeout_ns=ns(config.trainer.order_timeout_s),
        max_pending=config.engine.max_pending,
        balance_interval_ns=ns(config.balancing.interval_s),
        score_timeout_ns=ns(config.rewards.timeout_s + ANSWER_GRACE_S),
        score_retry_ns=ns(config.rewards.retry_base_s),
        score_attempts_max=config.rewards.max_retries + 1,
        scorings_max=config.rewards.concurrency,
        trainer_restarts_max=config.trainer.max_restarts,
        catch_up_timeout_ns=ns(config.trainer.checkpoint_every_steps * config.trainer.step_timeout_s),
    )


def short_limits(config: Config) -> list[str]:
    """Return a remark on each limit that is shorter than the run's longest possible turn."""
    s, rollout = config.scheduler, config.rollout
    turn_s = rollout.max_tokens_per_turn / SLOW_TOKENS_PER_S
    whole = s.collect == "responses"
    meanings = {
        "turn_stall_timeout_s": "such a turn, heard of only at its end, is started again and again"
        if whole
        else f"it counts from the last token, and grows up to {TIMES_MOST} times with what the run measures",
        "load_timeout_s": f"it counts from the last progress, waiting for turns left out, and grows up to {TIMES_MOST} "
        "times with what the run measures",
        "queue_timeout_s": "it counts while there is no worker at all that could take a turn",
        "drain_timeout_s": "turns that do not end within it, or what they took up to now if that is more (at most "
        f"{TIMES_MOST} times as long), move when a lease ends by time",
    }
    return [
        f"scheduler.{key} = {getattr(s, key):g} is less than the {turn_s:.3g} s that a turn of "
        f"rollout.max_tokens_per_turn = {rollout.max_tokens_per_turn} takes at {SLOW_TOKENS_PER_S} tokens/s: {meaning}"
        for key, meaning in meanings.items()
        if getattr(s, key) < turn_s
    ]


def policies(config: Config) -> Policies:
    rollout = config.rollout
    return Policies(
        routing=_routing(config),
        seeding=_seeding(config),
        provisioning=_provisioning(config),
        holding=_holding(config),
        selection=_selection(config),
        balancing=_balancing(config),
        replacement=_replacement(config),
        departure=UseNotice(),
        curricula=curricula(config),
        sampling=DynamicSampling(rollout.dynamic_sampling_most) if rollout.dynamic_sampling else FixedBatch(),
    )


def _holding(config: Config) -> HoldForRollouts | None:
    return HoldForRollouts() if config.provisioning.hold == "rollouts" else None


def _selection(config: Config) -> SelectionPolicy:
    """Dynamic sampling looks at rewards alone, as DAPO does."""
    if config.trainer.learns_from_equal_rewards and not config.rollout.dynamic_sampling:
        return EveryGroup()
    return NonZeroVariance(config.trainer.advantage_epsilon)


def _replacement(config: Config) -> ReplacementPolicy | None:
    margin = config.provisioning.successor_margin
    return EarlyReplacement(margin) if margin > 0 else None


def _seeding(config: Config) -> SeedingPolicy:
    s = config.seeding
    window_ns = 0 if s.policy == "none" else round(s.window_s * NS_PER_S)
    if s.policy in ("fixed", "none"):
        return FixedWindow(window_ns)
    return AdaptiveWindow(
        window_ns,
        rate=s.rate,
        longest_ns=round(s.longest_window_s * NS_PER_S),
        remembers=s.memory,
        bounds_workers=s.bound_workers,
        reserved_engines=s.reserved_engines or _reserved_engines(config),
    )


def _reserved_engines(config: Config) -> int:
    """N_resv: the engines on the trainer's GPUs, or these in workers of the smallest size that any provider has
    (RLBoost §4.1)."""
    if engines := seeding_engines(config):
        return engines
    sizes = [int(settings.get("gpus_per_worker", 1)) for settings in config.providers.values()]
    return max(1, config.trainer.gpus // min(sizes, default=1))


def _routing(config: Config) -> RoutingPolicy:
    match config.routing.policy:
        case "static":
            return PinnedRouting()
        case "turn_wise":
            return TurnWiseRouting()
        case "affinity":
            return AffinityRouting(config.routing.hardware)


def _balancing(config: Config) -> BalancingPolicy | None:
    return ContinuousBalancing(config.balancing.plateau_share) if config.balancing.policy == "continuous" else None


def _provisioning(config: Config) -> ProvisioningPolicy:
    if config.provisioning.policy == "take_all":
        return TakeWhatIsOffered()
    return MarginalValue(config.provisioning.usd_per_hour_saved)
