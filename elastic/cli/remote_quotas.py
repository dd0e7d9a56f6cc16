"""Quotas, shared capacity and retention on a server: shown and set."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from rich.table import Table

from elastic.cli.output import console, duration, emit
from elastic.cli.remote import server
from elastic.cli.tables import show_listing
from elastic.protocol.api import ProjectQuota, ProviderChange, QuotaChange, RetentionChange


def providers_command(*, as_json: bool) -> None:
    with server() as client:
        found = client.providers()
    rows = [(r.id, _gpus(r.gpus), str(r.runs), str(r.ready), str(r.booting), f"{r.usd_per_hour:.2f}") for r in found]
    _show(("kind", "GPUs to share", "runs", "ready", "booting", "$/h"), rows, found, as_json=as_json)


def _gpus(gpus: int | None) -> str:
    return "" if gpus is None else str(gpus)


def _show(
    columns: Sequence[str], rows: Sequence[Sequence[str]], objects: Sequence[BaseModel], *, as_json: bool
) -> None:
    if as_json:
        emit({"data": [one.model_dump(mode="json", exclude={"settings"}) for one in objects]})
        return
    show_listing(columns, rows)


def quota_command(project: str, changes: Mapping[str, Any], gpus: Mapping[str, int | None], *, as_json: bool) -> None:
    with server() as client:
        if changes or gpus:
            kept = {**client.quota(project).gpus, **gpus} if gpus else {}
            said = {**changes, **({"gpus": {k: n for k, n in kept.items() if n is not None}} if gpus else {})}
            quota = client.change_quota(project, QuotaChange(**said))
        else:
            quota = client.quota(project)
    if as_json:
        emit(quota.model_dump(mode="json"))
    else:
        _show_quota(quota)


def _show_quota(quota: ProjectQuota) -> None:
    use = quota.use
    table = Table(box=None, header_style="dim")
    for column in ("", "used", "of", ""):
        table.add_column(column)
    table.add_row("runs at once", str(use.runs), _limit(quota.runs))
    for kind in sorted(quota.gpus.keys() | use.gpus.keys()):
        table.add_row(f"GPUs of {kind}", str(use.gpus.get(kind, 0)), _limit(quota.gpus.get(kind)))
    for what, used, allotted, limit, ends_in_s in (
        ("today", use.usd_today, use.allotted_today_usd, quota.usd_per_day, use.day_ends_in_s),
        ("in all", use.usd, use.allotted_usd, quota.budget_usd, use.budget_ends_in_s),
    ):
        words = f"${allotted:.2f} allotted" + ("" if ends_in_s is None else f"; ends in {duration(ends_in_s)}")
        table.add_row(what, f"${used:.2f}", "no limit" if limit is None else f"${limit:.2f}", words)
    console().print(table)
    console().print(f"${use.usd_per_hour:.2f} an hour lately; weight {quota.weight:g}", highlight=False)


def _limit(limit: int | None) -> str:
    return "no limit" if limit is None else str(limit)


def capacity_command(kind: str, gpus: int | None, *, as_json: bool) -> None:
    with server() as client:
        provider = client.change_provider(kind, ProviderChange(gpus=gpus))
    if as_json:
        emit(provider.model_dump(mode="json", exclude={"settings"}))
    else:
        words = "as many GPUs as there are" if gpus is None else f"{gpus} GPUs"
        console().print(f"all runs together hold {words} of {kind}", highlight=False)


def retention_command(project: str | None, changes: Mapping[str, Any], *, dry_run: bool, as_json: bool) -> None:
    with server() as client:
        policy = (
            client.retention(project) if not changes else client.change_retention(project, RetentionChange(**changes))
        )
        plan = client.retention_plan(project) if dry_run else None
    if as_json:
        emit((plan or policy).model_dump(mode="json"))
    elif plan is None:
        for name in RetentionChange.model_fields:
            days = getattr(policy, name)
            kept = f"{days} days" if days is not None else "for ever" if project is None else "as the server's"
            console().print(f"{name.removesuffix('_days')}: {kept}", highlight=False)
    else:
        rows = [(one.run, one.name, one.ended_at, ", ".join(one.removes), f"{one.bytes:,}") for one in plan.items]
        _show(("run", "name", "ended", "removes", "bytes"), rows, plan.items, as_json=False)
        if plan.uploads:
            rows = [(one.upload, one.name, one.last_used_at, one.state, f"{one.bytes:,}") for one in plan.uploads]
            _show(("upload", "name", "last used", "state", "bytes"), rows, plan.uploads, as_json=False)
        words = f"{plan.runs} runs and {len(plan.uploads)} uploads, {plan.bytes:,} bytes"
        console().print(f"{words}; nothing was removed", highlight=False)
