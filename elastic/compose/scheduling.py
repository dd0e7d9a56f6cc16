"""Makes the scheduler's inputs: the run's plan, its limits and its policies."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from elastic.compose.data import curricula
from elastic.compose.evaluation import planned_evaluation
from elastic.compose.named_policies import AUTO, NO_POLICY, named_policy, refuse_settings
from elastic.compose.nanoseconds import in_nanoseconds
from elastic.config import LOSSES, Config, PolicyConfig
from elastic.core.patience import TIMES_MOST
from elastic.core.policy import Policies
from elastic.core.types import NS_PER_S, Limits, Plan, PlannedEnvironment, StalenessDrop
from elastic.worker.trainer import seeding_engines

if TYPE_CHECKING:
    from elastic.compose.plan import RunPlan

TRAINER_PROVIDER = "trainer"

SLOW_TOKENS_PER_S = 30
"""Decode speed of a turn of a large model in a full batch, on a moderate device."""

ANY_STALENESS = 10**9
"""The bound where nothing is trained on: turns go on with whatever their workers serve."""

ANSWER_GRACE_S = 2.0
"""A function pool kills a call that is out of time and says so; only one that does not is given up without it."""


def run_plan(plan: "RunPlan") -> Plan:
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


WORDS: Mapping[str, Sequence[str]] = {
    "routing": (),
    "provisioning": (),
    "balancing": (NO_POLICY,),
    "seeding": (AUTO, NO_POLICY),
    "holding": (AUTO, NO_POLICY),
    "replacement": (AUTO, NO_POLICY),
    "departure": (AUTO, NO_POLICY),
    "selection": (AUTO,),
    "sampling": (AUTO,),
}
"""The decisions that a section of the configuration names a policy for, and what it takes in place of a policy's name:
`auto`, by which the configuration's other keys decide it, and `none`."""


def policies(config: Config, where: str = "the run's configuration") -> Policies:
    """The run's policies. Raises `ConfigError` for one that is not installed, and for settings that are not its own."""
    return Policies(
        **{decision: _decided(decision, config, where) for decision in WORDS}, curricula=curricula(config, where)
    )


def _decided(decision: str, config: Config, where: str) -> Any:
    """The policy that a section names; None where there is to be none."""
    section: PolicyConfig = getattr(config, decision)
    words = WORDS[decision]
    name = _when_unnamed(decision, config) if section.policy == AUTO and AUTO in words else section.policy
    own = _own_keys(decision, name, config)
    if name == NO_POLICY and decision == "seeding":
        name = "fixed"
    elif name == NO_POLICY and NO_POLICY in words:
        refuse_settings(section.settings, where, decision)
        return None
    return named_policy(
        decision,
        name,
        {**own, **section.settings},
        where=where,
        key=(decision, "policy"),
        settings_key=(decision, "settings"),
        others=words,
    )


def _when_unnamed(decision: str, config: Config) -> str:
    """The policy that the configuration's other keys ask for."""
    match decision:
        case "seeding":
            return "adaptive"
        case "holding":
            return "rollouts" if config.provisioning.hold == "rollouts" else NO_POLICY
        case "replacement":
            return "early" if config.provisioning.successor_margin > 0 else NO_POLICY
        case "departure":
            return "use_notice"
        case "selection":
            # Dynamic sampling looks at rewards alone, as DAPO does.
            by_rewards = config.rollout.dynamic_sampling or not config.trainer.learns_from_equal_rewards
            return "non_zero_variance" if by_rewards else "every_group"
        case _:
            return "dynamic" if config.rollout.dynamic_sampling else "fixed"


def _own_keys(decision: str, name: str, config: Config) -> Mapping[str, Any]:
    """What the configuration's own keys say to a policy of ours."""
    provisioning = config.provisioning
    match decision, name:
        case "routing", "affinity":
            return {"hardware": config.routing.hardware}
        case "balancing", "continuous":
            return {"plateau_share": config.balancing.plateau_share}
        case "seeding", "adaptive":
            return _adaptive(config)
        case "seeding", "fixed":
            return {"duration_ns": round(config.seeding.window_s * NS_PER_S)}
        case "seeding", "none":
            return {"duration_ns": 0}
        case "provisioning", "marginal_value":
            return {"usd_per_hour_saved": provisioning.usd_per_hour_saved}
        case "replacement", "early":
            return {"margin": provisioning.successor_margin} if provisioning.successor_margin > 0 else {}
        case "selection", "non_zero_variance":
            return {"epsilon": config.trainer.advantage_epsilon}
        case "sampling", "dynamic":
            return {"most": config.rollout.dynamic_sampling_most}
        case _:
            return {}


def _adaptive(config: Config) -> Mapping[str, Any]:
    s = config.seeding
    return {
        "initial_ns": round(s.window_s * NS_PER_S),
        "rate": s.rate,
        "longest_ns": round(s.longest_window_s * NS_PER_S),
        "remembers": s.memory,
        "bounds_workers": s.bound_workers,
        "reserved_engines": s.reserved_engines or _reserved_engines(config),
    }


def _reserved_engines(config: Config) -> int:
    """N_resv: the engines on the trainer's GPUs, or these in workers of the smallest size that any provider has
    (RLBoost §4.1)."""
    if engines := seeding_engines(config):
        return engines
    sizes = [int(settings.get("gpus_per_worker", 1)) for settings in config.providers.values()]
    return max(1, config.trainer.gpus // min(sizes, default=1))
