"""Runs on a server: the same commands, and the same output, as for runs on disk."""

import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
import typer
from rich.table import Table

from elastic.cli.account import KEY_VARIABLE, Login, account_path, connected, forget_account, save_account
from elastic.cli.control import cap_of, cap_words, dollars
from elastic.cli.output import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    bad_input,
    console,
    duration,
    emit,
    say,
    tell,
)
from elastic.cli.report import show_rows
from elastic.cli.run import show_plan
from elastic.compose.plan import Acquisition, RewardCalls
from elastic.config import ConfigError, apply_override, read_sections
from elastic.protocol.api import ENDED, HostedRun, RunBudget, RunChange, RunPhase
from elastic.protocol.api_client import ApiError, Client, ClientError
from elastic.report import Summary, as_markdown, closing_table
from elastic.system.signals import INTERRUPT, handled

_OURS_ALONE = ("directory",)
"""Keys of [run] that say where this machine keeps its runs, and mean nothing to a server."""
SECRET_PREFIX = "elastic_"
LOGIN_POLL_S, LOGIN_TIMEOUT_S = 2.0, 600.0
_BAD_INPUT = (400, 404, 409, 412, 422)


def is_hosted(name: str) -> bool:
    """Whether this is the id of a run on a server."""
    return name.startswith("run_")


@contextmanager
def server() -> Iterator[Client]:
    """The server that this user is logged in to; what it refuses ends the program with one message."""
    with connected() as client:
        try:
            yield client
        except ApiError as error:
            _refused(error)
        except ClientError as error:
            say(f"error: {error}")
            raise SystemExit(EXIT_FAILED) from None


def _refused(error: ApiError) -> NoReturn:
    problem = error.problem
    lines = [f"{_key(one.pointer)}: {one.detail}" for one in problem.errors or ()] or [problem.detail or problem.title]
    if problem.status == 401:
        lines = [f"{lines[0]}; `elastic api login URL` takes another key"]
    if problem.status in _BAD_INPUT:
        bad_input("\n".join(lines))
    say(f"error: {lines[0]}")
    raise SystemExit(EXIT_FAILED)


def _key(pointer: str) -> str:
    """A JSON pointer as the configuration file says it."""
    return pointer.removeprefix("#/config/").removeprefix("#/").replace("/", ".") or "the configuration"


# elastic api

LOGIN_PATIENCE_S = 3.0
"""A URL that was mistyped is to be said soon."""


def login_command(url: str, *, with_key: bool) -> None:
    """Have somebody sign in, or ask for a key; try it, and keep it."""
    url = url if "://" in url else f"http://{url}"
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        key = "" if with_key else _signed_in_key(url)
    key = key or typer.prompt("key", hide_input=True, err=True)
    with Client(url, key.strip(), patience_s=LOGIN_PATIENCE_S) as client:
        try:
            me = client.me()
        except ApiError as error:
            bad_input(f"{url}: {error}")
        except ClientError as error:
            say(f"error: {error}")
            raise SystemExit(EXIT_FAILED) from None
        path = save_account(Login(client.url, key.strip()))
    say(f"logged in to {client.url} as {me.name!r}, {me.role} of {me.project or 'all projects'}; kept in {path}")


def _signed_in_key(url: str) -> str:
    """A key of whoever signs in on the server's page; empty where nobody can.

    It is made here, and the page is told its hash alone: its secret crosses nobody's hands, and the browser may be on
    another machine.
    """
    key = SECRET_PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname())[:40].strip("-._") or "terminal"
    try:
        with Client(url, "") as client:
            if client.info().sign_in is None:
                return ""
        say(f"open {url.rstrip('/')}/#/login/{digest}/{name}")
        say(f"and confirm the code {code_of(digest)}; Ctrl-C gives up")
        ends_s = time.monotonic() + LOGIN_TIMEOUT_S
        with Client(url, key) as client:
            while not _lets_in(client):
                if time.monotonic() > ends_s:
                    bad_input(f"{url}: nobody confirmed within {LOGIN_TIMEOUT_S / 60:.0f} minutes")
                time.sleep(LOGIN_POLL_S)
            return key
    except KeyboardInterrupt:
        say("nobody was logged in")
        raise SystemExit(EXIT_INTERRUPTED) from None
    except ApiError as error:
        bad_input(f"{url}: {error}")
    except ClientError as error:
        say(f"error: {error}")
        raise SystemExit(EXIT_FAILED) from None


def _lets_in(client: Client) -> bool:
    """Whether the server knows the key by now."""
    try:
        client.me()
    except ApiError as error:
        if error.kind != "unauthenticated":
            raise
        return False
    return True


def code_of(digest: str) -> str:
    """What a terminal and the page both show, for people to compare."""
    return f"{digest[:4]}-{digest[4:8]}".upper()


def logout_command() -> None:
    say(f"forgot {account_path()}" if forget_account() else "nobody was logged in")


def info_command(*, as_json: bool) -> None:
    with server() as client:
        info, me = client.info(), client.me()
    if as_json:
        emit({"url": client.url, "version": info.version} | me.model_dump(mode="json"))
        return
    console().print(f"{client.url}  elastic {info.version}")
    console().print(f"key {me.name!r}, {me.role} of {me.project or 'all projects'}: {', '.join(me.actions)}")


# elastic run --remote


def submit_command(
    config: Path, providers: list[str], overrides: list[str], *, dry_run: bool, detach: bool, as_json: bool
) -> int:
    """Submit a run and follow it to its end; Ctrl-C only leaves it alone. Returns the exit code."""
    raw = _sections(config, overrides)
    with server() as client:
        if dry_run:
            _show_dry_run(client, raw, providers, as_json=as_json)
            return 0
        run = client.submit(raw, providers)
        say(f"submitted {run.id}{'' if detach else '; Ctrl-C detaches, and it goes on'}")
        if detach:
            if as_json:
                emit(run.model_dump(mode="json"))
            return 0
        return follow_to_end(client, run.id, as_json=as_json)


def _sections(config: Path, overrides: list[str]) -> dict[str, Any]:
    """The configuration file as it stands: the server checks it, for it knows its providers and models."""
    raw = read_sections(config)
    for override in overrides:
        apply_override(raw, override)
    if isinstance(section := raw.get("run"), dict):
        raw["run"] = {key: value for key, value in section.items() if key not in _OURS_ALONE}
    return raw


def _show_dry_run(client: Client, raw: dict[str, Any], providers: list[str], *, as_json: bool) -> None:
    plan = client.dry_run(raw, providers)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    rows = [Acquisition(**row.model_dump()) for row in plan.would_acquire]
    calls = None if plan.would_call is None else msgspec.convert(plan.would_call, RewardCalls)
    show_plan(plan.config, rows, calls, plan.warnings, as_json=as_json)


def follow_to_end(client: Client, run: str, *, as_json: bool) -> int:
    """Show a run's progress until it has ended, then what it came to; the exit code is as of a run on disk."""
    with _detaching(lambda: _detached(run)):
        for line in client.logs(run):
            say(line.line)
        ended = _ended(client, run)
    if ended.figures.step or ended.phase is RunPhase.FINISHED:
        _conclude(client, run, as_json=as_json)
    go_on = f"go on with: elastic runs resume {run}"
    if ended.phase is RunPhase.STOPPED:
        say(f"stopped{f': {ended.cause}' if ended.cause else ''}; {go_on}")
        return EXIT_STOPPED
    if ended.phase is RunPhase.FAILED:
        say(f"error: the run failed: {ended.cause}")
        say(f"hint: its logs: elastic logs {run}; {go_on}")
        return EXIT_FAILED
    return 0


def _ended(client: Client, run: str) -> HostedRun:
    """The run, once the server has seen its end."""
    for event in client.events(run):
        if event.type == "run.ended":
            break
    return client.run(run)


@contextmanager
def _detaching(leave: Callable[[], NoReturn]) -> Iterator[None]:
    def left(_: int, __: FrameType | None) -> None:
        leave()

    with handled(INTERRUPT, left):
        yield


def _detached(run: str) -> NoReturn:
    say(f"detached; {run} goes on. Come back with: elastic logs {run} -f; end it with: elastic stop {run}")
    raise SystemExit(EXIT_INTERRUPTED)


def _conclude(client: Client, run: str, *, as_json: bool) -> None:
    page = f"{client.url}/v1/runs/{run}/report?format=html"
    report = client.report(run)
    if as_json:
        emit(report | {"report": page})
    else:
        shown = console()
        shown.print(closing_table(msgspec.convert(report, Summary, strict=False)))
        shown.print(f"report: {page}", soft_wrap=True, highlight=False)


# elastic runs, report, logs, stop


def latest(client: Client, name: str) -> str:
    """A run's id; `latest` is the newest."""
    if name != "latest":
        return name
    for run in client.runs():
        return run.id
    raise ConfigError(f"no run 'latest' on {client.url}; there are none")


def list_command(phase: str = "", project: str = "", *, as_json: bool) -> None:
    filters = {key: value for key, value in (("phase", phase), ("project", project)) if value}
    with server() as client:
        rows = [_row(run) for run in client.runs(**filters)][::-1]
    show_rows(rows, f"no runs on {client.url}", as_json=as_json)


def _row(run: HostedRun) -> dict[str, str]:
    status = f"{run.phase}: {run.cause}" if run.cause and run.phase in ENDED else run.phase.value
    return {
        "run": run.id,
        "started_at": run.started_at or "",
        "providers": ",".join(run.providers),
        "status": status,
    }


def show_command(name: str, *, as_json: bool) -> None:
    with server() as client:
        run = client.run(latest(client, name))
        budget = client.budget(run.id)
    if as_json:
        emit(run.model_dump(mode="json") | {"budget": budget.model_dump(mode="json", exclude={"object", "run"})})
        return
    shown, figures = console(), run.figures
    shown.print(f"{run.id}  {run.name}  {run.phase}{f': {run.cause}' if run.cause else ''}", highlight=False)
    shown.print(
        f"step {figures.step}/{figures.steps}  {figures.tokens_per_s:,.0f} tokens/s  ${figures.usd:.4f}  "
        f"preemptions {figures.preemptions}  restarts {run.restarts}",
        highlight=False,
    )
    if budget.budget_usd is not None or budget.allotted_usd is not None:
        shown.print(_budget_words(budget), highlight=False)
    table = Table(box=None, header_style="dim")
    for column in ("condition", "status", "reason", "since", "message"):
        table.add_column(column)
    for one in run.conditions:
        table.add_row(one.type, one.status, one.reason, one.lastTransitionTime, one.message)
    shown.print(table)


def _budget_words(budget: RunBudget) -> str:
    words = [f"${budget.usd:.2f} spent"]
    if budget.committed_usd is not None:
        words.append(f"${budget.committed_usd:.2f} if it is stopped now")
    words.append("no budget of its own" if budget.budget_usd is None else f"budget ${budget.budget_usd:.2f}")
    if budget.allotted_usd is not None:
        words.append(f"${budget.allotted_usd:.2f} allotted by its project")
    if budget.ends_in_s is not None:
        words.append(f"ends in {duration(budget.ends_in_s)} with what it holds")
    return "  ".join(words)


def logs_command(name: str, source: str, tail: int | None, *, follow: bool) -> None:
    with server() as client:
        run = latest(client, name)
        with _detaching(lambda: _detached(run)):
            for line in client.logs(run, source=source, tail=tail, follow=follow):
                typer.echo(line.line)


def stop_command(name: str, *, force: bool, as_json: bool) -> None:
    with server() as client:
        run = client.stop(latest(client, name), force=force)
    tell(run, f"{run.id} is stopping; go on with: elastic runs resume {run.id}", as_json=as_json)


def cap_hosted_command(name: str, cap: str, *, as_json: bool) -> None:
    provider, gpus = cap_of(cap)
    with server() as client:
        run = client.run(latest(client, name))
        kept = {key: most for key, most in run.caps.items() if key != provider}
        changed = client.change(run.id, RunChange(caps=kept if gpus is None else {**kept, provider: gpus}))
    tell(changed, f"run {changed.id} holds {cap_words(gpus)} of {provider}; what exceeds that drains", as_json=as_json)


def budget_hosted_command(name: str, budget: str, *, as_json: bool) -> None:
    usd = dollars(budget)
    if not usd:
        raise ConfigError(f"elastic budget: found {budget!r}; allowed on a server: more than 0 dollars")
    with server() as client:
        changed = client.change(latest(client, name), RunChange(budget_usd=usd))
    tell(changed, f"run {changed.id} never costs more than ${usd:.2f} in all", as_json=as_json)


def resume_command(name: str, steps: int | None, budget_usd: float | None, *, as_json: bool) -> None:
    with server() as client:
        run = client.resume(latest(client, name), steps=steps, budget_usd=budget_usd)
    tell(run, f"{run.id} goes on; follow it with: elastic logs {run.id} -f", as_json=as_json)


def delete_command(name: str) -> None:
    with server() as client:
        client.delete(name)
    say(f"deleted {name}")


def events_command(name: str, after: str, *, follow: bool) -> None:
    """One JSON object a line."""
    with server() as client:
        run = latest(client, name)
        with _detaching(lambda: _detached(run)):
            for event in client.events(run, after, follow=follow):
                typer.echo(event.model_dump_json())


def lines_command(what: Callable[[Client, str], Any], name: str) -> None:
    """Whatever `what` yields of a run, one JSON object a line."""
    with server() as client:
        for one in what(client, latest(client, name)):
            typer.echo(one.model_dump_json())


def trajectory_command(name: str, trajectory: str, *, as_json: bool) -> None:
    with server() as client:
        found = client.trajectory(latest(client, name), trajectory)
    if as_json:
        emit(found.model_dump(mode="json"))
        return
    ended = f"reward {found.reward:g}" if found.reward is not None else found.cause
    say(f"{found.id}  step {found.step}  {ended}  {found.turns} turns  {found.policy_tokens} tokens of the policy's")
    typer.echo(found.text if found.text is not None else " ".join(map(str, found.token_ids)))


def report_command(name: str, output: Path | None, *, markdown: bool, as_json: bool) -> None:
    with server() as client:
        run = latest(client, name)
        report = client.report(run)
        if as_json:
            emit(report)
            return
        summary = msgspec.convert(report, Summary, strict=False)
        if markdown:
            typer.echo(as_markdown(summary))
            return
        console().print(closing_table(summary))
        if output is None:
            console().print(f"report: {client.url}/v1/runs/{run}/report?format=html", soft_wrap=True, highlight=False)
        else:
            output.write_text(client.report_text(run, "html"), encoding="utf-8")
            console().print(f"report: {output}", soft_wrap=True, highlight=False)
