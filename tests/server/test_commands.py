"""The command line on a server: whatever can be made, seen and taken away has its command; secrets are told once."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sqlalchemy as sa
from typer.main import get_command

from elastic.cli.app import app, main
from elastic.cli.run import tell_end, what_next_remotely
from elastic.cli.submission import follow_to_end
from elastic.compose.execution import RunOutcome
from elastic.protocol.api import AccessRole, LogLine, ProviderFigures, RunFigures, RunPhase
from elastic.server.store import jobs
from elastic.server.store.tables import runs
from tests.pool.stand_in import POOL, StandIn
from tests.report.chat_run import ChatRun
from tests.server.conftest import Site, Submission, served

Elastic = Callable[..., str]
NO_RUN = "run_01JD3K5T7WQ8M2N4P6R8S0V2X4"


@pytest.fixture
def elastic(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Elastic]:
    """`elastic` with these arguments, as the server's first admin: what it printed on standard output."""
    monkeypatch.setenv("COLUMNS", "300")
    with served(site.app) as url:
        monkeypatch.setenv("ELASTIC_API_URL", url)
        monkeypatch.setenv("ELASTIC_API_KEY", site.admin)

        def run(*arguments: object, code: int = 0) -> str:
            with pytest.raises(SystemExit) as exit_:
                main([str(argument) for argument in arguments])
            out, err = capsys.readouterr()
            assert (exit_.value.code or 0) == code, err
            return out if not code else err

        yield run


def commands(command: Any, name: str = "elastic") -> Iterator[tuple[str, Any]]:
    yield name, command
    for inner, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {inner}")


def test_every_command_shows_an_example_of_itself() -> None:
    """Groups that list something show one of theirs in their own help, and a few commands have two names."""
    for name, command in commands(get_command(app)):
        shown = (command.help or "").partition("Example: ")[2]
        assert command.hidden or name == "elastic" or name.partition("elastic ")[2].split()[-1] in shown, name


def test_a_key_from_making_to_revoking(elastic: Elastic, site: Site) -> None:
    secret = elastic(
        "keys", "create", "nightly", "--project", "ours", "--role", "viewer", "--scope", "runs:read"
    ).strip()
    assert site.client(secret).get("/v1/me").json()["actions"] == ["runs:read"]
    (found,) = [key for key in json.loads(elastic("keys", "list", "--json")) if key["name"] == "nightly"]
    assert (found["project"], found["role"]) == (site.projects["ours"], "viewer")
    assert secret not in elastic("keys", "list")
    other = json.loads(elastic("keys", "create", "other", "--server-wide", "--expires-days", 1, "--json"))
    assert (other["project"], other["secret"] is None, other["expires_at"] is None) == (None, False, False)
    elastic("keys", "revoke", "nightly")
    assert site.client(secret).get("/v1/me").status_code == 401
    assert "0 keys are called 'nightly'" in elastic("keys", "revoke", "nightly", code=2)
    elastic("keys", "revoke", other["id"])
    assert "role: found 'boss'" in elastic("keys", "create", "x", "--role", "boss", code=2)
    assert "--mine" in elastic("keys", "create", "x", "--mine", "--project", "ours", code=2)
    assert "of no person" in elastic("keys", "list", "--mine", code=2)


def test_secrets_and_webhooks(elastic: Elastic, tmp_path: Path) -> None:
    """Each command over HTTP to a real server."""
    (tmp_path / "token").write_text("s3cr3t\n")
    elastic("secrets", "set", "HF_TOKEN", "--from-file", tmp_path / "token", "--project", "ours")
    assert [one["id"] for one in json.loads(elastic("secrets", "list", "--project", "ours", "--json"))] == ["HF_TOKEN"]
    assert "path" in elastic("secrets", "set", "PATH", "--from-file", tmp_path / "token", "--project", "ours", code=2)
    elastic("secrets", "delete", "HF_TOKEN", "--project", "ours")
    assert json.loads(elastic("secrets", "list", "--project", "ours", "--json")) == []
    fields = {"token_id": "ak-1", "token_secret": "as-s3cr3t"}
    (tmp_path / "modal.json").write_text(json.dumps(fields))
    elastic("secrets", "set-vendor", "modal", "--from-file", tmp_path / "modal.json", "--project", "ours")
    assert "as-s3cr3t" not in (kept := elastic("secrets", "list-vendors", "--project", "ours", "--json"))
    assert [one["id"] for one in json.loads(kept)] == ["modal"]
    assert "allowed: aws, modal" in elastic("secrets", "set-vendor", "gcp", "--from-file", tmp_path / "token", code=2)
    (tmp_path / "modal.json").write_text(json.dumps({**fields, "profile": "x"}))
    refused = elastic("secrets", "set-vendor", "modal", "--from-file", tmp_path / "modal.json", code=2)
    assert "profile" in refused
    assert "as-s3cr3t" not in refused
    elastic("secrets", "delete-vendor", "modal", "--project", "ours")
    url = "https://example.com/elastic"
    made = json.loads(elastic("webhooks", "add", url, "--event", "run.failed", "--project", "ours", "--json"))
    assert made["secret"].startswith("whsec_")
    assert made["secret"] not in elastic("webhooks", "list", "--json")
    assert json.loads(elastic("webhooks", "disable", made["id"], "--json"))["enabled"] is False
    assert json.loads(elastic("webhooks", "enable", made["id"], "--json"))["enabled"] is True
    sent = json.loads(elastic("webhooks", "test", made["id"], "--json"))
    assert [one["id"] for one in json.loads(elastic("webhooks", "deliveries", made["id"], "--json"))] == [sent["id"]]
    elastic("webhooks", "delete", made["id"])
    assert "events" in elastic("webhooks", "add", url, "--event", "run.nothing", code=2)


@pytest.mark.parametrize("died", [False, True])
def test_how_a_followed_run_failed_is_told_once(capsys: pytest.CaptureFixture[str], died: bool) -> None:
    """By its process, in words for a user of the server, or by the server where the process died."""
    log: list[str] = []
    if not died:
        outcome = RunOutcome(run_dir=Path("/srv") / NO_RUN, failed="no lake", interrupted=False)
        assert tell_end(outcome, *what_next_remotely(NO_RUN)) == 1
        log = capsys.readouterr().err.splitlines()

    class Followed:
        def logs(self, _: str) -> Iterator[LogLine]:
            return (LogLine(id=str(number), line=line) for number, line in enumerate(log))

        def events(self, _: str) -> Iterator[Any]:
            return iter(())

        def run(self, _: str) -> Any:
            return SimpleNamespace(figures=RunFigures(), phase=RunPhase.FAILED, cause="no lake")

    assert follow_to_end(cast("Any", Followed()), NO_RUN, as_json=False) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: the run failed: no lake",
        f"hint: its logs: elastic logs {NO_RUN}; go on with: elastic runs resume {NO_RUN}",
    ]


def test_the_audit_log_and_projects(elastic: Elastic) -> None:
    elastic("projects", "set", "ours", "--name", "agents")
    assert "agents" in elastic("projects", "list")
    assert "--unix-user" in elastic("projects", "set", "agents", "--unix-user", "Not A User", code=2)
    (entry,) = json.loads(elastic("audit", "-n", 1, "--json"))
    assert (entry["action"], entry["status"]) == ("server:write", 200)


def test_runs_under_their_names(elastic: Elastic, site: Site, submission: Submission) -> None:
    client = site.member(AccessRole.RUNNER)
    run = client.post("/v1/runs", json=submission()).json()["id"]
    assert run in elastic("runs", "list", "--phase", "pending", "--project", "ours")
    assert run not in elastic("runs", "list", "--phase", "running")
    elastic("cap", run, "spot=0")
    elastic("budget", run, "12.50")
    shown = client.get(f"/v1/runs/{run}").json()
    assert (shown["caps"], shown["budget_usd"]) == ({"spot": 0}, 12.5)
    elastic("cap", "latest", "spot=none", "--remote")
    assert client.get(f"/v1/runs/{run}").json()["caps"] == {}
    assert "no provider of the run" in elastic("cap", run, "serving=1", code=2)
    assert json.loads(elastic("runs", "stop", run, "--json"))["id"] == run
    for what in ("workers", "leases", "trajectories"):
        elastic("runs", what, NO_RUN, code=2)


def test_trajectories_of_a_run_on_the_server(elastic: Elastic, site: Site, submission: Submission) -> None:
    run = site.submitted(submission())
    chats = ChatRun(site.settings.run_dir(run), site.settings.models[0] / "policy")
    chats.small()
    chats.close()

    def names(*wanted: object) -> list[str]:
        found = json.loads(elastic("runs", "trajectories", run, *wanted, "--json").splitlines()[-1])
        return [one["id"] for one in found["trajectories"]]

    assert names("--worst", 2, "--step", 2) == ["2/1/1", "2/1/2"]
    assert names("--failed") == ["2/1/3"]
    assert names("--truncated", "--group", "2/1") == ["2/1/2"]
    assert "2 are shown, and there are more" in elastic("runs", "trajectories", "latest", "--remote", "--best", 2)
    assert "rewards by part: right 1, short 0.1" in elastic("runs", "trajectory", run, "2/1/0")
    assert "no trajectory '9/9/9'" in elastic("runs", "trajectory", run, "9/9/9", code=2)


def test_chats_with_runs_that_are_not_there(elastic: Elastic, site: Site, submission: Submission) -> None:
    assert NO_RUN in elastic("chat", NO_RUN, "-m", "hello", code=2)
    run = site.submitted(submission())
    assert f"run {run} has no fronts now" in elastic("chat", run, "-m", "hello", code=2)
    assert "--set is for runs on disk" in elastic("chat", run, "-m", "hello", "--set", "engine.kind=torch", code=2)
    with site.store.writing() as tx:
        tx.execute(sa.update(runs).values(phase=RunPhase.FINISHED.value, managed=False))
    assert "its checkpoints are on its server" in elastic("chat", "latest", "--remote", "-m", "hello", code=2)


def test_top_shows_what_goes_on_on_a_server(
    elastic: Elastic, site: Site, submission: Submission, tmp_path: Path
) -> None:
    run = site.submitted(submission(labels={"team": "agents"}))
    assert elastic("top", "--remote").splitlines()[-1].split()[:4] == [run, "small", "pending", "0/2"]
    told = RunFigures(
        step=3,
        steps=9,
        tokens_per_s=812.0,
        last_success_rate=0.25,
        usd=1.5,
        providers={"spot": ProviderFigures(ready=2, tokens=90)},
    )
    with site.store.writing() as tx:
        tx.execute(sa.update(runs).values(phase=RunPhase.RUNNING.value, figures=told.model_dump()))
    assert elastic("top", "--remote").splitlines()[-1].split() == [
        run,
        "small",
        "running",
        "3/9",
        "25%",
        "-",
        "812",
        "2",
        "0",
        "$1.5000",
    ]
    shown = elastic("top", run)
    assert "812 tokens/s" in shown
    assert "spot" in shown
    assert f"no run '{NO_RUN}'" in elastic("top", NO_RUN, code=2)
    file = tmp_path / "pool.toml"
    file.write_text(POOL.format(directory=tmp_path))
    with StandIn(file) as pool:
        state = site.app.state.server
        state.settings = replace(state.settings, pools=(pool.directory,))
        shown = elastic("top", "--remote", "--pool", "lab")
        assert "pool lab, up 0 s: $0.0000 so far" in shown
        assert "no job" in shown.splitlines()[-1]
        assert [line.split()[:2] for line in shown.splitlines()[-5:-2]] == [
            ["rollout-1", "rollout"],
            ["rollout-2", "rollout"],
            ["train-1", "train"],
        ]


def test_logs_of_a_pool_s_job_also_while_its_pool_is_away(elastic: Elastic, site: Site, tmp_path: Path) -> None:
    state, project = site.app.state.server, site.projects["ours"]
    state.settings = replace(state.settings, pools=(tmp_path / "lab",))
    logs = state.settings.job_dir(project, "job_one") / "logs"
    logs.mkdir(parents=True)
    (logs / "process.log").write_text("first\nsecond\n")
    (logs / "orchestrator.log").write_text("other\n")
    with site.store.writing() as tx:
        jobs.insert(tx, "job_one", project, "lab", "", "{}", 1, None)
    command = ("jobs", "logs", "job_one", "--remote")
    assert elastic(*command, "--pool", "lab", "-n", 1) == "second\n"
    assert elastic(*command, "--source", "orchestrator") == "other\n"
    assert "no log 'trainer'" in elastic(*command, "--source", "trainer", code=2)
    for other in ("job_two", ".", "..", "job\udcff"):
        assert "no job '" in elastic("jobs", "logs", other, "--remote", code=2)
    with site.store.writing() as tx:
        jobs.settle(tx, "job_one", usd=0.0, over=True)
    assert elastic(*command, "-f") == "first\nsecond\n"
    state.settings = replace(state.settings, pools=(tmp_path / "lab", tmp_path / "far"))
    assert "--pool: found none; allowed, of http" in elastic(*command, code=2)
