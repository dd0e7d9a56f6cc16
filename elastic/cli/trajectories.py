"""`elastic runs trajectories` and `trajectory`: what the policy did, of runs on disk and on a server."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
import typer
from rich.text import Text

from elastic.cli.account import run_on_disk
from elastic.cli.options import AnyRunName, AsJson, Remote, RunsDirectory
from elastic.cli.output import bad_input, console, emit
from elastic.cli.remote import is_hosted, latest, server
from elastic.cli.tables import show_listing
from elastic.core.ids import is_evaluated, is_group
from elastic.protocol.api import HostedBranch, HostedContext, HostedMessage, HostedTrajectory, HostedTrajectoryDetail
from elastic.report.history import history_of
from elastic.report.samples import about_of, figures_words, left_out_words, own_messages, title_of, tokens_words
from elastic.report.trajectories import detail_of, page_of
from elastic.runtime.journal import TrajectoryFilter
from elastic.system.plain_values import printable

NEWEST = 20
Order = Literal["newest", "best", "worst"]


def trajectories(
    name: AnyRunName = "latest",
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="List episodes of evaluations instead of trained ones.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(min=0, help="Only those of this training step, or evaluations of this version.")
    ] = None,
    group: Annotated[
        str,
        typer.Option(metavar="GROUP", help="Only those of this group, such as 3/0, or of this task, such as e10/3."),
    ] = "",
    newest: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"So many of the newest; {NEWEST} unless said.")
    ] = None,
    best: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Show this many with the highest reward.")
    ] = None,
    worst: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Show this many with the lowest reward.")
    ] = None,
    truncated: Annotated[bool, typer.Option("--truncated", help="Only those that a limit ended.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only those without a reward.")] = False,
    reward_min: Annotated[float | None, typer.Option(help="Only those with this reward or more.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="Only those with this reward or less.")] = None,
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """List a run's trajectories that are over, with their rewards and ends.

    Example: elastic runs trajectories latest --step 3 --worst 10
    """
    asked: dict[Order, int] = {
        order: count for order, count in zip(get_args(Order), (newest, best, worst), strict=True) if count is not None
    }
    if len(asked) > 1:
        bad_input(f"{', '.join(f'--{order}' for order in asked)}: found {len(asked)} of them; allowed: one")
    if group and (not is_group(group) or is_evaluated(group) is not evaluation):
        allowed = "VERSION/TASK such as e10/3" if evaluation else "STEP/NUMBER such as 3/0, with --evaluation e10/3"
        bad_input(f"--group: found {group!r}; allowed: {allowed}")
    newest_ones: tuple[Order, int] = ("newest", NEWEST)
    order, most = next(iter(asked.items()), newest_ones)
    wanted = TrajectoryFilter(
        evaluation=evaluation,
        step=step,
        group=group or None,
        reward_min=reward_min,
        reward_max=reward_max,
        truncated=truncated,
        failed=failed,
        order=order,
    )
    if remote or is_hosted(name):
        found, more = _hosted(name, wanted, most)
    else:
        with history_of(run_on_disk(directory, name)) as history:
            found, more = page_of(history, wanted, "", most)
    if as_json:
        emit({"trajectories": [one.model_dump(mode="json") for one in found], "has_more": more})
        return
    if not found:
        others = "" if evaluation else "; --evaluation lists episodes of evaluations"
        console().print(f"no trajectory that is over is like that{others}", highlight=False)
        return
    show_listing(
        ("id", "environment", "reward", "by part", "turns", "tokens", "end"),
        [_cells(one) for one in found],
        right=("reward", "turns", "tokens"),
    )
    if more:
        console().print(f"{most} are shown, and there are more: --{order} N shows so many", highlight=False)


def _hosted(name: str, wanted: TrajectoryFilter, most: int) -> tuple[list[HostedTrajectory], bool]:
    asked = msgspec.structs.asdict(wanted)
    del asked["step_end"]
    filters = {key: value for key, value in asked.items() if value is not None and value is not False}
    filters |= {key: "true" for key, value in filters.items() if value is True}
    with server() as client:
        pages = client.trajectories(latest(client, name), **filters)
        found = list(islice(pages, most + 1))
    return found[:most], len(found) > most


def _cells(one: HostedTrajectory) -> tuple[str, ...]:
    ended = ", ".join(filter(None, (one.cause, "truncated" if one.truncated else "")))
    reward = "–" if one.reward is None else f"{one.reward:.4g}"
    cells = (
        one.id,
        one.environment,
        reward,
        figures_words(one.rewards),
        str(one.turns),
        f"{one.policy_tokens:,}",
        ended,
    )
    return tuple(map(printable, cells))


def trajectory(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or path, its id, or `latest`.")],
    trajectory: Annotated[
        str, typer.Argument(metavar="TRAJECTORY", help="Its id, as `elastic runs trajectories` has it.")
    ],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Each of the policy's tokens, with its version and log-probability.")
    ] = False,
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Print what was said in a trajectory: messages, tools, rewards by part, branches.

    Example: elastic runs trajectory latest 3/0/2
    """
    if remote or is_hosted(name):
        with server() as client:
            found = client.trajectory(latest(client, name), trajectory)
    else:
        found = _on_disk(directory, name, trajectory)
    if as_json:
        emit(found.model_dump(mode="json"))
        return
    shown = console()
    for line in _lines(found, tokens=tokens):
        shown.print(line, soft_wrap=True, highlight=False)


def _on_disk(directory: Path, name: str, trajectory: str) -> HostedTrajectoryDetail:
    from elastic.report.texts import Reading, with_texts

    run = run_on_disk(directory, name)
    with history_of(run) as history:
        found, meta = detail_of(history, trajectory), history.segments[-1].meta()
        if found is None:
            there = ", ".join(one.id for one in page_of(history, TrajectoryFilter(), "", 5)[0]) or "none"
            bad_input(f"no trajectory {trajectory!r} in {run.name} that is over; the newest are: {there}")
    (detail,) = with_texts([found], Reading.of(json.loads(meta.get("config", "{}"))))
    return detail


def _lines(found: HostedTrajectoryDetail, *, tokens: bool) -> Iterator[Text]:
    """What people read. All that was said is indented, so that none of it looks like what is told of it."""
    yield Text(printable(title_of(found)), style="bold")
    for words in about_of(found):
        yield Text(printable(words))
    if found.task:
        yield Text(f"task {printable(found.task)}")
    yield from _context_lines(found, 0, tokens=tokens)
    for branch in found.branches:
        yield Text("")
        policy = f", policy {branch.policy}" if branch.policy else ""
        yield Text(printable(f"branch {branch.branch}{policy}"), style="bold")
        yield from _context_lines(branch, branch.shared_tokens, tokens=tokens)


def _context_lines(context: HostedContext | HostedBranch, shared_tokens: int, *, tokens: bool) -> Iterator[Text]:
    messages, before = own_messages(context, shared_tokens)
    if left := left_out_words(context, before):
        yield Text(left, style="dim")
    for message in messages:
        yield Text("")
        yield Text.assemble((printable(message.role), "bold"), (f"  {tokens_words(context, message)}", "dim"))
        if tokens and (message.by_policy or context.messages is None):
            yield from _token_lines(context, message)
            continue
        yield from _indented(message.reasoning, "dim italic")
        yield from _indented(message.content)
        for call in message.tool_calls:
            yield from _indented(f"calls {call.name}({call.arguments})", "bold")


def _indented(text: str, style: str = "") -> Iterator[Text]:
    return (Text(f"  {printable(line)}", style=style) for line in text.split("\n")) if text else iter(())


def _token_lines(context: HostedContext, message: HostedMessage) -> Iterator[Text]:
    yield Text(f"  {'place':>7} {'version':>7} {'log-prob':>9} {'id':>7}  text", style="dim")
    for place in range(message.start, message.start + message.tokens):
        if not (message.by_policy or context.trained[place]):
            continue
        piece = "" if context.pieces is None else printable(json.dumps(context.pieces[place], ensure_ascii=False))
        version, logprob, number = context.versions[place], context.logprobs[place], context.token_ids[place]
        yield Text(f"  {place:>7} {version:>7} {logprob:>9.4f} {number:>7}  {piece}")
