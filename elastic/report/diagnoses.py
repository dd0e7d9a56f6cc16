"""What went wrong in a run, in the report's first lines: few rules, silent where nothing did.

Each rule is a pure function of what the journal keeps. Rules about a trend compare the medians of a figure over the
first third of the steps that have it and over the last third (`THIRD_STEPS`). Each threshold stands below with its
reason.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from statistics import median

import msgspec

from elastic.core.outcomes import shortened
from elastic.report import units
from elastic.report.batches import Parted
from elastic.report.learning import StepLearning
from elastic.report.usage import Usage
from elastic.system.plain_values import printable

THIRD_STEPS = 3
"""Steps that a third has at the least: of a run with fewer than nine no trend is told from chance."""

ENTROPY_LOW_NATS = 0.1
"""A token has hardly an alternative: one of two is taken in 49 of 50 cases."""
ENTROPY_FELL_TO = 0.25
"""The share of its first entropy to which a collapsed policy's has fallen. A policy that began as sure has not
collapsed."""
SCORE_ENOUGH = 0.9
"""A policy that gets nearly all there is to get may be sure of itself."""
SCORE_RISES = 0.05
"""A score that rises by less from one third to another stands still: chance alone moves the medians of some hundred
trajectories by so much."""

MISMATCH_GREW_BY = 3.0
"""Numerics alone give a figure that stays where it began, give or take a half."""
MISMATCH_MEAN_NATS = 0.03
"""With the same weights: what engines in bfloat16 are from a trainer in float32 is below 0.02."""
MISMATCH_KL_NATS = 0.02
"""A KL of x is that of ratios which spread by √2x: here by 0.2, which is what PPO's clip leaves alone."""

LENGTH_GREW_BY = 1.5
"""Answers that think longer as they get better grow, too; of these only such count as are paid for being long."""
LENGTH_PAYS = 0.5
"""Correlation within groups, where members differ in nothing but what was sampled: a quarter of a reward's variance
goes with length."""
LENGTH_DOUBLED = 2.0
"""Growth for which a reward that stands still is no return."""

UNSOLVED_SHARE = 0.5
"""The share of the last third's groups that were unsolved: more than every other group was generated in vain."""
SOLVED_SHARE = 0.5
"""The share of the first third's groups that were solved: the tasks were easy before anything was learnt."""
COMPARED_GROUPS = 12
"""Groups below which a share of them is chance."""

FAILED_SHARE = 0.05
"""The share of members that have failed: one in twenty leaves every third group of eight a member short."""
FAILED_MEMBERS = 5
"""Members below which a share of them is chance."""

BILL_SHARE = 0.1
"""The least share of the bill that a provider must have for its price to be remarked on."""
LEAST_GPU_S = 600.0
"""GPU time of a provider that is long enough to judge it by: of less the first starts are a large part."""
DEARER_BY = 3.0
"""Factor of the other paid providers' price of a token: the kinds of one device's prices differ by less."""
OVERHEAD_SHARE = 0.25
"""The least share of overhead in a provider's GPU time. With less, a provider is dear by its price alone, which was
known before."""


class DiagnosisKind(StrEnum):
    """What a rule looks for."""

    ENTROPY_COLLAPSE = "entropy_collapse"
    MISMATCH_GROWTH = "mismatch_growth"
    LENGTH_AGAINST_REWARD = "length_against_reward"
    GROUPS_WITHOUT_SIGNAL = "groups_without_signal"
    FAILED_MEMBERS = "failed_members"
    REFILLED_MEMBERS = "refilled_members"
    DROPPED_LONG = "dropped_long"
    POOR_PROVIDER = "poor_provider"


PLACES: Mapping[DiagnosisKind, str] = {
    DiagnosisKind.ENTROPY_COLLAPSE: "Entropy by step",
    DiagnosisKind.MISMATCH_GROWTH: "Mismatch by step",
    DiagnosisKind.LENGTH_AGAINST_REWARD: "Length and reward by step",
    DiagnosisKind.GROUPS_WITHOUT_SIGNAL: "Groups without signal",
    DiagnosisKind.FAILED_MEMBERS: "Trajectories and groups",
    DiagnosisKind.REFILLED_MEMBERS: "Trajectories and groups",
    DiagnosisKind.DROPPED_LONG: "Lengths of what was trained and dropped",
    DiagnosisKind.POOR_PROVIDER: "Providers",
}
"""The title of the chart or the table that shows it."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """`says` what was found in a sentence with its figures, `advice` what to try, `place` the title of what shows it.
    `figures` are the same as numbers."""

    kind: DiagnosisKind
    says: str
    advice: str
    place: str
    figures: dict[str, float]


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What rules look at. `learning` is empty where no policy learns; `failed` members are counted by cause, those that
    were `refilled` with another one by what had failed them; `members` are all that have ended. `rollouts` are the
    providers', without the trainer's own, `usd` is the whole run's bill, and `on_demand_usd_per_gpu_hour` the price of
    GPUs that nobody takes away."""

    learning: Sequence[StepLearning]
    members: int
    failed: Mapping[str, int]
    refilled: Mapping[str, int]
    parted: Parted | None
    rollouts: Mapping[str, Usage]
    usd: float
    on_demand_usd_per_gpu_hour: float | None


def diagnoses_of(course: Course) -> list[Diagnosis]:
    """All that is found, what concerns learning first."""
    return [found for rule in RULES for found in rule(course)]


def _found(kind: DiagnosisKind, says: str, advice: str, **figures: float) -> list[Diagnosis]:
    return [Diagnosis(kind=kind, says=says, advice=advice, place=PLACES[kind], figures=figures)]


def _entropy(course: Course) -> list[Diagnosis]:
    """Hardly any entropy is left, and the score stands still below what there is to get."""
    entropies, scores = (_thirds(course.learning, _figure(name)) for name in ("entropy", "score"))
    if entropies is None or scores is None:
        return []
    first, _, last = entropies
    _, before, score = scores
    if last > ENTROPY_LOW_NATS or last > ENTROPY_FELL_TO * first:
        return []
    if score >= SCORE_ENOUGH or score - before > SCORE_RISES:
        return []
    return _found(
        DiagnosisKind.ENTROPY_COLLAPSE,
        f"Entropy collapsed: {last:.2g} nats a token in the last third of the steps, from {first:.2g} in the first, "
        f"and the mean reward stands still at {units.share(score)} of what was to be had.",
        "A trainer.entropy_coefficient, a higher trainer.clip_ratio_high or a lower trainer.learning_rate keeps a "
        "policy trying.",
        first=first,
        last=last,
        score=score,
    )


def _mismatch(course: Course) -> list[Diagnosis]:
    """Engines and trainer drift apart."""
    for name, least, words in (
        ("mismatch_mean", MISMATCH_MEAN_NATS, "the mean difference of log-probabilities with the same weights"),
        ("mismatch_kl", MISMATCH_KL_NATS, "the KL between what sampled and what was trained"),
    ):
        found = _thirds(course.learning, _figure(name))
        if found is not None and found[2] >= max(least, MISMATCH_GREW_BY * found[0]):
            first, _, last = found
            return _found(
                DiagnosisKind.MISMATCH_GROWTH,
                f"The mismatch of engines and trainer grew: {words} is {last:.2g} nats a token in the last third of "
                f"the steps, from {first:.2g} in the first.",
                "Look which source is far from the others (Log-probabilities by provider and engine); trainer."
                "bypass_mode = false with rollout_is or rollout_rs corrects or rejects what is left.",
                first=first,
                last=last,
            )
    return []


def _length(course: Course) -> list[Diagnosis]:
    """Answers grow since length itself is paid for, or for nothing at all."""
    lengths, scores = (_thirds(course.learning, _figure(name)) for name in ("tokens_a_turn", "score"))
    if lengths is None or scores is None:
        return []
    pays = _thirds(course.learning, _figure("length_correlation"))
    grew, rose = lengths[2] / lengths[0] if lengths[0] > 0 else 1.0, scores[2] - scores[0]
    grown = (
        f"answers have {units.count(round(lengths[2], 1))} tokens a turn in the last third of the steps, "
        f"from {units.count(round(lengths[0], 1))} in the first"
    )
    figures = {"first": lengths[0], "last": lengths[2], "score_first": scores[0], "score_last": scores[2]}
    if grew >= LENGTH_GREW_BY and pays is not None and pays[2] >= LENGTH_PAYS:
        return _found(
            DiagnosisKind.LENGTH_AGAINST_REWARD,
            f"The reward may pay for length: {grown}, and within groups longer ones get more (correlation "
            f"{pays[2]:.2f}).",
            "Read the best trajectories of late steps; a reward that length cannot raise, or trainer.overlong_buffer, "
            "takes the reason away.",
            correlation=pays[2],
            **figures,
        )
    if grew >= LENGTH_DOUBLED and rose <= SCORE_RISES:
        return _found(
            DiagnosisKind.LENGTH_AGAINST_REWARD,
            f"Answers grow for nothing: {grown}, and the mean reward is no higher for it.",
            "Read trajectories of late steps; trainer.overlong_buffer, or trainer.loss_agg_mode = "
            '"seq-mean-token-mean", takes the reason away.',
            **figures,
        )
    return []


def _signal(course: Course) -> list[Diagnosis]:
    """Groups whose members all got the same reward have nothing to teach."""
    steps = [step for step in course.learning if step.groups]
    third = len(steps) // 3
    if third < THIRD_STEPS:
        return []
    late, early = steps[-third:], steps[:third]
    groups, unsolved = (sum(getattr(step, name) for step in late) for name in ("groups", "unsolved"))
    if groups >= COMPARED_GROUPS and unsolved >= UNSOLVED_SHARE * groups:
        return _found(
            DiagnosisKind.GROUPS_WITHOUT_SIGNAL,
            f"{units.share(unsolved / groups)} of the groups in the last third of the steps had no signal: all members "
            "got the same reward, and not the highest.",
            "Easier tasks, a curriculum over them, larger groups, or rewards for parts of a solution give members "
            "something to differ in.",
            share=unsolved / groups,
        )
    groups, solved = (sum(getattr(step, name) for step in early) for name in ("groups", "solved"))
    if groups >= COMPARED_GROUPS and solved >= SOLVED_SHARE * groups:
        return _found(
            DiagnosisKind.GROUPS_WITHOUT_SIGNAL,
            f"The tasks were easy from the beginning: all members had the highest reward in "
            f"{units.share(solved / groups)} of the groups in the first third of the steps.",
            "Harder tasks, or a curriculum that leaves out what is solved, give members something to differ in.",
            share=solved / groups,
        )
    return []


def _failures(course: Course) -> list[Diagnosis]:
    """Members that came to no reward, and were not replaced."""
    causes = _not_replaced(course)
    failed = sum(causes.values())
    if failed < FAILED_MEMBERS or failed < FAILED_SHARE * course.members:
        return []
    share = failed / course.members
    return _found(
        DiagnosisKind.FAILED_MEMBERS,
        f"{units.share(share)} of the trajectories failed, {units.count(failed)}: {_commonest(causes)}.",
        "A failure of the environment's own is not repeated: its traceback stands in the report, and its log in the "
        "run's logs.",
        share=share,
        failed=failed,
    )


def _not_replaced(course: Course) -> dict[str, int]:
    """Failed members by cause. What had failed a replaced one is the beginning of its cause."""
    causes = dict(course.failed)
    for beginning, count in course.refilled.items():
        for cause in causes:
            if cause.startswith(beginning):
                replaced = min(count, causes[cause])
                causes[cause] -= replaced
                count -= replaced
    return {cause: count for cause, count in causes.items() if count}


def _refills(course: Course) -> list[Diagnosis]:
    """Members whose place another one had to take."""
    refilled = sum(course.refilled.values())
    members = course.members + max(0, refilled - sum(course.failed.values()))
    if refilled < FAILED_MEMBERS or refilled < FAILED_SHARE * members:
        return []
    return _found(
        DiagnosisKind.REFILLED_MEMBERS,
        f"{units.share(refilled / members)} of the trajectories failed by the infrastructure and were replaced, "
        f"{units.count(refilled)}: {_commonest(course.refilled)}. What they had sampled was for nothing.",
        "Look at the engines' logs, at how long turns waited for a worker, and at the reward function's failures.",
        share=refilled / members,
        refilled=refilled,
    )


def _dropped(course: Course) -> list[Diagnosis]:
    if (parted := course.parted) is None:
        return []
    return _found(
        DiagnosisKind.DROPPED_LONG,
        "Long trajectories were dropped: those that were stale or failed by the infrastructure had "
        f"{parted.dropped:,.0f} tokens in the mean, those that were trained on {parted.trained:,.0f}. The run prefers "
        "short ones.",
        'rollout.staleness_drop = "token", or a higher rollout.staleness_bound, keeps long ones.',
        trained=parted.trained,
        dropped=parted.dropped,
    )


def _providers(course: Course) -> list[Diagnosis]:
    return [
        found
        for name, usage in course.rollouts.items()
        if usage.gpu_s >= LEAST_GPU_S and usage.usd > 0 and usage.usd >= BILL_SHARE * course.usd
        for others in [[one for other, one in course.rollouts.items() if other != name]]
        for found in _provider(printable(name), usage, others, course.on_demand_usd_per_gpu_hour)
    ]


def _provider(name: str, usage: Usage, others: Sequence[Usage], on_demand_usd: float | None) -> list[Diagnosis]:
    """Its tokens were far dearer than those of the others, or GPUs on demand would have been cheaper for its work."""
    said, advice = f"{name} gave little for its money: ", ""
    figures = {"usd": usage.usd, "overhead_share": usage.overhead_share}
    paid = [one for one in others if one.usd > 0 and one.tokens > 0]
    theirs = sum(one.usd for one in paid) / sum(one.tokens for one in paid) * 1e6 if paid else math.inf
    work = 1 - usage.overhead_share
    own, price = usage.usd_per_million_tokens, usage.usd_per_gpu_hour
    if own is None:
        said += f"not one token for {units.usd(usage.usd)}."
        advice = f"The logs of its workers, and how its leases ended, say why; without {name} the run is cheaper."
    elif own >= DEARER_BY * theirs:
        said += f"{units.usd(own)} a million tokens, beside {units.usd(theirs)} from the other paid ones."
        advice = f"With fewer workers of {name} (providers.{name}.max_workers) the run is cheaper."
        figures |= {"usd_per_million_tokens": own, "others_usd_per_million_tokens": theirs}
    elif on_demand_usd and price and 0 < work <= 1 - OVERHEAD_SHARE and price >= on_demand_usd * work:
        said += (
            f"{units.share(usage.overhead_share)} of its GPU time went to starting, loading, recomputing and losing "
            f"workers, so that an hour of work cost {units.usd(price / work)}; on demand it is "
            f"{units.usd(on_demand_usd)}."
        )
        advice = f"Workers of {name} that start faster or live longer, or fewer of them, leave more of it for tokens."
        figures |= {"usd_per_hour_of_work": price / work, "on_demand_usd_per_gpu_hour": on_demand_usd}
    return _found(DiagnosisKind.POOR_PROVIDER, said, advice, **figures) if advice else []


RULES: Sequence[Callable[[Course], list[Diagnosis]]] = (
    _entropy,
    _mismatch,
    _length,
    _signal,
    _failures,
    _refills,
    _dropped,
    _providers,
)


def _figure(name: str) -> Callable[[StepLearning], float | None]:
    return lambda step: getattr(step, name)


def _thirds(
    learning: Iterable[StepLearning], figure: Callable[[StepLearning], float | None]
) -> tuple[float, float, float] | None:
    """The medians over the first, the middle and the last third of the steps that have the figure; a step that sticks
    out counts for no more than another."""
    values = [value for value in map(figure, learning) if value is not None]
    third = len(values) // 3
    if third < THIRD_STEPS:
        return None
    return median(values[:third]), median(values[third:-third]), median(values[-third:])


def _commonest(causes: Mapping[str, int]) -> str:
    most = sorted(causes.items(), key=lambda one: -one[1])[:3]
    return ", ".join(f"{printable(shortened(cause))} ({units.count(count)})" for cause, count in most)
