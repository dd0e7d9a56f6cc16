"""`elastic run --remote`: a run is submitted to a server, and followed."""

from pathlib import Path
from typing import Any

import msgspec

from elastic.cli.output import EXIT_FAILED, EXIT_STOPPED, console, emit, say
from elastic.cli.remote import detaching, server
from elastic.cli.run import show_plan, what_next_remotely
from elastic.compose.plan import Acquisition, RewardCalls
from elastic.config import ConfigError, apply_override, read_sections
from elastic.protocol.api import UPLOAD_SCHEME, HostedRun, RunPhase
from elastic.protocol.api_client import Client
from elastic.report import Summary, closing_table
from elastic.system.given import expanded
from elastic.system.named_code import in_file

_OURS_ALONE = ("directory",)
"""Keys of [run] that say where this machine keeps its runs, and mean nothing to a server."""


def submit(
    config: Path, providers: list[str], overrides: list[str], *, dry_run: bool, detach: bool, as_json: bool
) -> int:
    """Submit a run and follow it to its end; Ctrl-C only leaves it alone. Returns the exit code."""
    raw = _sections(config, overrides)
    with server() as client:
        raw = _code_sent(client, raw, config.parent)
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


def _code_sent(client: Client, value: Any, folder: Path) -> Any:
    """The configuration with uploads in the place of the files whose code it names."""
    if isinstance(value, dict):
        return {key: _code_sent(client, inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_code_sent(client, inner, folder) for inner in value]
    code = in_file(value)
    if code is None or code.place.startswith(UPLOAD_SCHEME):
        return value
    try:
        file = folder / expanded(Path(code.place))
        made = client.upload(file, file.name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{code}: {error}") from error
    return f"{UPLOAD_SCHEME}{made.id}/{file.name}:{code.name}"


def _show_dry_run(client: Client, raw: dict[str, Any], providers: list[str], *, as_json: bool) -> None:
    plan = client.dry_run(raw, providers)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    rows = [Acquisition(**row.model_dump()) for row in plan.would_acquire]
    calls = None if plan.would_call is None else msgspec.convert(plan.would_call, RewardCalls)
    show_plan(plan.config, rows, calls, plan.warnings, as_json=as_json)


def follow_to_end(client: Client, run: str, *, as_json: bool) -> int:
    """Show a run's progress until it has ended, then what it came to; the exit code is as of a run on disk.

    Its process has said itself how it ended, as the log's last line shows, unless it died.
    """
    logs, go_on = what_next_remotely(run)
    last = ""
    with detaching(run):
        for line in client.logs(run):
            last = line.line
            say(last)
        ended = _ended(client, run)
    if ended.figures.step or ended.phase is RunPhase.FINISHED:
        _conclude(client, run, as_json=as_json)
    told = go_on in last
    if ended.phase is RunPhase.STOPPED:
        if not told:
            say(f"stopped{f': {ended.cause}' if ended.cause else ''}; {go_on}")
        return EXIT_STOPPED
    if ended.phase is RunPhase.FAILED:
        if not told:
            say(f"error: the run failed: {ended.cause}")
            say(f"hint: {logs}; {go_on}")
        return EXIT_FAILED
    return 0


def _ended(client: Client, run: str) -> HostedRun:
    """The run, once the server has seen its end."""
    for event in client.events(run):
        if event.type == "run.ended":
            break
    return client.run(run)


def _conclude(client: Client, run: str, *, as_json: bool) -> None:
    page = f"{client.url}/v1/runs/{run}/report?format=html"
    report = client.report(run)
    if as_json:
        emit(report | {"report": page})
    else:
        shown = console()
        shown.print(closing_table(msgspec.convert(report, Summary, strict=False)))
        shown.print(f"report: {page}", soft_wrap=True, highlight=False)
