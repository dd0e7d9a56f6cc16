"""Where a hosted run's agents are served, as its journal says."""

import json
from pathlib import Path

from elastic.config import Config, JournalConfig, validate
from elastic.protocol.api import AccessRole
from elastic.protocol.front_messages import AgentCaller
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.journal import AGENTS, RunDirectory
from elastic.server.history.journals import agents_of
from tests.server.conftest import Site, Submission

RAW = {"model": {"checkpoint": "base"}, "environment": {"name": "outside"}}


def test_a_run_that_agents_drive_says_where_and_gives_a_drivers_key(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    assert agents_of(run.path, "main") is None
    notes = {"config": validate(Config, RAW, "here").model_dump_json()}
    journal = run.begin_journal(JournalConfig(), notes=notes)  # type: ignore[call-arg]
    try:
        assert agents_of(run.path, "main") is None
        journal.meta(AGENTS, "127.0.0.1:4711")
        journal.durable().result(10)
        secrets = RunSecrets.of(run.path)
        served = agents_of(run.path, "main")
    finally:
        journal.close()
    assert served is not None
    base_url, key, viewer_key = served
    assert base_url == "http://127.0.0.1:4711/v1"
    assert secrets.caller_of(key) == AgentCaller(driver="main")
    assert secrets.caller_of(viewer_key) == AgentCaller(viewer="main")
    assert json.loads(notes["config"])["front"]["host"] == "127.0.0.1"


def test_who_reads_runs_gets_the_viewers_key_and_no_drivers(site: Site, submission: Submission) -> None:
    hosted = site.member(AccessRole.RUNNER).post("/v1/runs", json=submission()).json()["id"]
    run = RunDirectory(site.settings.run_dir(hosted))
    run.path.mkdir(parents=True, exist_ok=True)
    notes = {"config": validate(Config, RAW, "here").model_dump_json()}
    journal = run.begin_journal(JournalConfig(), notes=notes)  # type: ignore[call-arg]
    try:
        journal.meta(AGENTS, "127.0.0.1:4711")
        journal.durable().result(10)
        secrets = RunSecrets.of(run.path)
        told = {role: site.member(role).get(f"/v1/runs/{hosted}/agents").json() for role in AccessRole}
    finally:
        journal.close()
    for role, agents in told.items():
        assert secrets.caller_of(agents["viewer_key"]) == AgentCaller(viewer="main")
        if role is AccessRole.VIEWER:
            assert (agents["driver"], agents["key"]) == (None, None)
        else:
            assert secrets.caller_of(agents["key"]) == AgentCaller(driver="main")
