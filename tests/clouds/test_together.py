"""One run on a serving cluster, EC2 and Modal at once: one report with all of them, by the servers' own records."""

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _crashes
from benchmarks._shapes import write_policy
from elastic.report import as_markdown, summarise
from elastic.runtime.journal import JournalError, RunDirectory
from tests.clouds.aws_server.cloud import cloud
from tests.clouds.together import EXAMPLE, ONE_OF_EACH, local_clouds, sets

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(600)]

PATIENCE_S = 240.0
SETTINGS = (
    "run.steps=100000",
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.max_turns=4",
    "seeding.window_s=0",
    "seeding.bound_workers=false",
    'provisioning.policy="take_all"',
    "scheduler.boot_timeout_s=240",
    "engine.max_batch=4",
    "engine.max_context_tokens=512",
    'engine.pacing={prefill_tokens_per_s=8000, decode_step_s={"1"=0.03, "16"=0.04}}',
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A run of the example with an untrained policy, ended at the latest with the test."""
    started: list[Any] = []

    def run(names: str, sections: Mapping[str, Mapping[str, Any]], *more: str) -> Any:
        policy = write_policy(tmp_path / "policy")
        settings = sets(sections, f"model.checkpoint={policy}", *SETTINGS, *more)
        started.append(_crashes.CrashingRun(tmp_path / "runs", [str(EXAMPLE), "--providers", names, *settings]))
        return started[-1]

    yield run
    for one in started:
        one.discard()


def tokens(run: Any) -> dict[str, int]:
    try:
        return {name: usage.tokens for name, usage in summarise(RunDirectory(run.run_dir)).providers.items()}
    except (JournalError, ValueError):
        return {}


def until_all_have_given(run: Any, names: set[str]) -> None:
    run.until("tokens of all", lambda: {name for name, n in tokens(run).items() if n} >= names, PATIENCE_S)


def ended(run: Any) -> Any:
    """Its summary, once it has been stopped as by ^C."""
    run.process.send_signal(signal.SIGINT)
    run.process.wait(PATIENCE_S)
    return summarise(RunDirectory(run.run_dir))


def adds_up(summary: Any, names: set[str]) -> None:
    assert summary.providers.keys() == names | {"trainer"}
    assert summary.ledger_imbalance_ns == 0
    for usage in (summary.total, *summary.providers.values()):
        assert sum(usage.accounts_s.values()) == pytest.approx(usage.gpu_s, abs=1e-6)
    assert summary.usd == pytest.approx(sum(usage.usd for usage in summary.providers.values()), abs=1e-8)
    alone = {one.provider: one for one in summary.alone}
    assert alone.keys() == names
    rollouts = sum(summary.providers[name].tokens for name in names)
    mean = sum(one.usd * summary.providers[name].tokens / rollouts for name, one in alone.items())
    assert mean == pytest.approx(summary.usd, rel=1e-6)
    markdown = as_markdown(summary)
    for title in ("Providers", "GPU time by account", "What each provider would have cost alone"):
        assert f"## {title}" in markdown


def test_a_serving_cluster_and_ec2_are_on_one_report(start: Callable[..., Any], tmp_path: Path) -> None:
    names = {"serving", "ec2"}
    with cloud(tmp_path / "aws", boot_s=0.5) as aws:
        sections = {"serving": ONE_OF_EACH["serving"], "ec2": aws.settings(max_workers=1)}
        run = start("serving,ec2", sections)
        until_all_have_given(run, names)
        summary = ended(run)
        adds_up(summary, names)
        assert summary.providers["serving"].usd == 0
        assert summary.providers["ec2"].usd == pytest.approx(aws.books.usd(), rel=1e-3)
        assert aws.living() == []


def test_instances_that_never_join_are_ended_others_are_had_and_the_report_says_why(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    with cloud(tmp_path / "aws", boot_s=0.5) as aws:
        deaf = aws.machines.deaf = {min(aws.books.capacity)}
        run = start("ec2", {"ec2": aws.settings(max_workers=1, retry_s=600.0)}, "scheduler.boot_timeout_s=30")
        until_all_have_given(run, {"ec2"})
        summary = ended(run)
        (lost,) = [one for one in summary.lease_ends if one.cause == "boot_timeout"]
        assert f"{min(deaf)[0]} in {min(deaf)[1]}" in lost.detail
        assert "get-console-output" in as_markdown(summary)
        (silent,) = [one for one in aws.books.rented.values() if one.pool in deaf]
        assert silent.ended_s is not None
        assert 20 < silent.ended_s - silent.began_s < 120
        assert aws.living() == []
        assert summary.providers["ec2"].usd == pytest.approx(aws.books.usd(), rel=1e-3)


def test_a_serving_cluster_ec2_and_modal_are_on_one_report(start: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("modal")
    names = {"serving", "ec2", "modal"}
    with local_clouds(tmp_path) as clouds:
        run = start("serving,ec2,modal", clouds.sections)
        until_all_have_given(run, names)
        summary = ended(run)
        adds_up(summary, names)
        assert summary.providers["ec2"].usd == pytest.approx(clouds.aws.books.usd(), rel=1e-3)
        theirs = [one["usd"] for one in clouds.modal.record()["containers"] if one["run"].startswith(run.run_dir.name)]
        assert summary.providers["modal"].usd == pytest.approx(sum(theirs), rel=1e-3)
        assert clouds.aws.living() == []
        assert clouds.modal.running() == []
