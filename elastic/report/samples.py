"""The trajectories that a report shows: a few of them, each within bounds, and what is left out said.

The newest steps are shown, where a policy is what it has become: the best and the worst of them, those that a limit
ended, and those that failed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from elastic.protocol.api import HostedContext, HostedMessage, HostedTrajectoryDetail
from elastic.report.bounds import bounded, cut
from elastic.report.history import History
from elastic.report.trajectories import detail_of, page_of
from elastic.runtime.journal import SIMULATED, TrajectoryFilter
from elastic.system.plain_values import printable

LAST_STEPS = 3
EACH = 6
"""Trajectories of each kind."""
KINDS = ("best", "worst", "truncated", "failed")
TRAJECTORY_BYTES_MAX = 24 * 2**10
"""The most bytes of the texts of one trajectory."""
TOKENS_MAX = 2**14
"""The most tokens of one trajectory that become text."""
CONTEXTS_MAX = 8
STRETCHES_MAX = 400
"""The most stretches of one message that are told apart; the rest of its tokens is one stretch."""
LIKELY = (-0.1, -0.7, -2.3, -4.6)
"""Log-probabilities between which tokens count as alike."""


class Stretch(NamedTuple):
    """Tokens of the policy's that follow each other, which one version sampled and about as likely: `likelihood` counts
    from 0, the likeliest."""

    text: str
    version: int
    likelihood: int
    lowest_logprob: float


class SampleMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it is shown. `stretches` are of the policy's own, empty where its text is cut."""

    role: str
    by_policy: bool
    about: str
    content: str
    reasoning: str
    calls: list[str]
    stretches: list[Stretch]


class SampleContext(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    left_out: str
    messages: list[SampleMessage]


class SampleTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory as it is shown; `kinds` are those of `KINDS` that it is shown for."""

    id: str
    kinds: list[str]
    title: str
    about: list[str]
    contexts: list[SampleContext]


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown, and words on what is not."""

    samples: list[SampleTrajectory]
    words: str


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories to be shown, and the kinds that each is shown for."""

    details: list[HostedTrajectoryDetail]
    kinds: dict[str, list[str]]
    first_step: int
    last_step: int


def choose(history: History) -> Chosen | None:
    """Choose what of a run is shown; None where it has no trajectory, or never happened. Raises `JournalError`."""
    simulated = any(SIMULATED in segment.meta() for segment in history.segments)
    newest = [] if simulated else page_of(history, TrajectoryFilter(), "", 1)[0]
    if not newest:
        return None
    last_step = max(row.step for row in newest)
    first_step = max(0, last_step - LAST_STEPS + 1)
    kinds = dict[str, list[str]]()
    for kind in KINDS:
        for name in _wanted(history, kind, range(last_step, first_step - 1, -1)):
            kinds.setdefault(name, []).append(kind)
    details = [detail for name in kinds if (detail := detail_of(history, name, TOKENS_MAX)) is not None]
    return Chosen(details=details, kinds=kinds, first_step=first_step, last_step=last_step)


def _wanted(history: History, kind: str, steps: Sequence[int]) -> list[str]:
    """The names of some trajectories of a kind, of the newest steps that have some."""
    found = list[str]()
    for step in steps:
        wanted = TrajectoryFilter(
            step=step,
            truncated=kind == "truncated",
            failed=kind == "failed",
            order="worst" if kind == "worst" else "best" if kind == "best" else "newest",
        )
        rows, _ = page_of(history, wanted, "", EACH - len(found))
        found += [row.id for row in rows if kind not in ("best", "worst") or row.reward is not None]
        if len(found) == EACH:
            break
    return found


def samples_of(chosen: Chosen, total: int) -> Samples:
    """What is shown of the trajectories that were chosen, of so many; they have their texts by now."""
    first, last = chosen.first_step, chosen.last_step
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    words = (
        f"{len(chosen.details)} of {total:,} trajectories: of {steps} up to {EACH} of the best, of the worst, of those "
        f"that a limit ended and of those that failed. Of one at most {TRAJECTORY_BYTES_MAX // 2**10} KiB of text are "
        "shown. `elastic runs trajectories` lists all of them."
    )
    return Samples(samples=[_sample(one, chosen.kinds[one.id]) for one in chosen.details], words=words)


def _sample(detail: HostedTrajectoryDetail, kinds: list[str]) -> SampleTrajectory:
    contexts: list[HostedContext] = [detail, *detail.branches[: CONTEXTS_MAX - 1]]
    share = TRAJECTORY_BYTES_MAX // len(contexts)
    titles = ["", *(f"Branch {branch.branch}" for branch in detail.branches)]
    shared = [0, *(branch.shared_tokens for branch in detail.branches)]
    about = list(about_of(detail))
    if detail.task:
        about.append(f"task {cut(printable(detail.task), 500)}")
    if left := len(detail.branches) + 1 - len(contexts):
        about.append(f"{left} branches are not shown")
    return SampleTrajectory(
        id=detail.id,
        kinds=kinds,
        title=title_of(detail),
        about=about,
        contexts=[_context(*one, share) for one in zip(contexts, titles, shared, strict=False)],
    )


def title_of(detail: HostedTrajectoryDetail) -> str:
    """A trajectory in a line: its name and what it came to."""
    ended = f"reward {detail.reward:.4g}" if detail.reward is not None else "no reward"
    said = [
        ended,
        detail.cause,
        "truncated" if detail.truncated else "",
        f"{detail.turns} turn{'s' * (detail.turns != 1)}",
    ]
    return ", ".join([f"{detail.id}: {said[0]}", *filter(None, said[1:]), f"{detail.policy_tokens:,} tokens"])


def about_of(detail: HostedTrajectoryDetail) -> Iterator[str]:
    """What else is known of a trajectory, in words."""
    if detail.environment:
        yield f"environment {detail.environment}"
    if detail.rewards:
        yield f"rewards by part: {figures_words(detail.rewards)}"
    if detail.metrics:
        yield f"metrics: {figures_words(detail.metrics)}"
    for context in (detail, *detail.branches):
        if context.policy_reward is not None:
            yield f"policy {context.policy or 'of the model'}: reward {context.policy_reward:.4g}"
    if detail.no_text:
        yield f"there is no text: {detail.no_text}"
    if detail.left_out_branches:
        yield f"{detail.left_out_branches} branches are left out"


def figures_words(values: Mapping[str, float]) -> str:
    """Figures by name, in a line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _context(context: HostedContext, title: str, shared_tokens: int, most_bytes: int) -> SampleContext:
    messages, before = own_messages(context, shared_tokens)
    kept = bounded(messages, most_bytes)
    shown = [_message(context, one, one != former) for one, former in zip(kept, messages, strict=True)]
    named = ", ".join(filter(None, (title, f"policy {context.policy}" if context.policy else "")))
    return SampleContext(title=named, left_out=left_out_words(context, before), messages=shown)


def own_messages(context: HostedContext, shared_tokens: int) -> tuple[list[HostedMessage], int]:
    """The messages that a context does not have in common with one before it, and how many it has so. Without texts it
    is one message of all tokens."""
    if context.messages is None:
        numbers, tokens = " ".join(map(str, context.token_ids)), len(context.token_ids)
        bare = HostedMessage(role="tokens", content=numbers, by_policy=False, start=0, tokens=tokens)
        return [bare] if tokens else [], 0
    own = [one for one in context.messages if one.start + one.tokens > shared_tokens]
    return own, len(context.messages) - len(own)


def left_out_words(context: HostedContext, before: int) -> str:
    """What of a context is not shown; empty if it is all there."""
    said = [
        f"{before} messages are as in a context above" if before else "",
        f"{context.left_out_messages:,} messages at its end are left out" if context.left_out_messages else "",
        f"{context.left_out_tokens:,} tokens at its end are left out" if context.left_out_tokens else "",
    ]
    return "; ".join(filter(None, said))


def _message(context: HostedContext, message: HostedMessage, is_cut: bool) -> SampleMessage:
    return SampleMessage(
        role=message.role,
        by_policy=message.by_policy,
        about=tokens_words(context, message),
        content=message.content,
        reasoning=message.reasoning,
        calls=[f"{call.name}({call.arguments})" for call in message.tool_calls],
        stretches=[] if is_cut or not message.by_policy else _stretches(context, message),
    )


def tokens_words(context: HostedContext, message: HostedMessage) -> str:
    """How many tokens a message of the policy's has, by version, and how likely they were; empty for others."""
    if not message.by_policy or not message.tokens:
        return ""
    places = range(message.start, message.start + message.tokens)
    versions = dict[int, int]()
    for place in places:
        versions[context.versions[place]] = versions.get(context.versions[place], 0) + 1
    mean = sum(context.logprobs[place] for place in places) / message.tokens
    by_version = ", ".join(f"{tokens:,} of version {version}" for version, tokens in versions.items())
    return f"tokens: {by_version}; mean log-probability {mean:.3f}"


def likelihood(logprob: float) -> int:
    """How likely a token was, in classes: 0 is the likeliest."""
    return sum(logprob < least for least in LIKELY)


def _stretches(context: HostedContext, message: HostedMessage) -> list[Stretch]:
    found = list[Stretch]()
    for place in range(message.start, message.start + message.tokens):
        text = "" if context.pieces is None else context.pieces[place]
        logprob, version = context.logprobs[place], context.versions[place]
        alike = (version, likelihood(logprob))
        if found and ((found[-1].version, found[-1].likelihood) == alike or len(found) == STRETCHES_MAX):
            last = found[-1]
            found[-1] = last._replace(text=last.text + text, lowest_logprob=min(last.lowest_logprob, logprob))
        else:
            found.append(Stretch(text, version, alike[1], logprob))
    return found
