"""What whoever looks after the server sees: every request by its id, its route and its time, and nothing of secrets."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import structlog

from elastic.protocol.api import AccessRole, RunPhase
from elastic.server.api.request_log import BUCKETS_S
from elastic.server.store.tables import runs
from elastic.system.logs import log_to
from tests.server.conftest import Site, Submission


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What has been logged, line by line."""
    path = tmp_path / "server.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    former = structlog.get_config()
    log_to(descriptor)
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    structlog.configure(**former)
    os.close(descriptor)


def metrics(site: Site, key: str = "") -> dict[str, float]:
    """Samples by name and labels."""
    text = site.client(key).get("/metrics").text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_a_request_is_found_by_its_id(
    site: Site, submission: Submission, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    client = site.client()
    run = client.post("/v1/runs", json=submission()).json()["id"]
    shown = client.get(f"/v1/runs/{run}")
    missing = client.get("/v1/runs/run_x")
    assert missing.json()["request_id"] == missing.headers["x-request-id"]
    by_id = {line["request"]: line for line in logged() if line["event"] == "request"}
    line = by_id[shown.headers["x-request-id"]]
    assert (line["run"], line["status"], line["path"]) == (run, 200, f"/v1/runs/{run}")
    assert by_id[missing.headers["x-request-id"]]["status"] == 404
    assert site.admin not in json.dumps(logged())


def test_what_fails_is_logged_without_what_it_knew(site: Site, logged: Callable[[], list[dict[str, Any]]]) -> None:
    def ready() -> list[str]:
        key = site.admin
        raise RuntimeError(f"a secret of {len(key)} characters")

    site.app.state.server.ready = ready
    assert site.client().get("/readyz").status_code == 500
    (failed,) = [line for line in logged() if line["event"] == "request failed"]
    assert "Traceback" in failed["exception"]
    assert f"a secret of {len(site.admin)} characters" in failed["exception"]
    assert site.admin not in json.dumps(logged())


def test_nor_is_anything_told_where_nobody_set_up_logs() -> None:
    program = """
import structlog
import elastic.server

def fails(key):
    try:
        raise RuntimeError("with a local variable")
    except RuntimeError:
        structlog.get_logger().exception("failed")

fails("elastic_" + "s3cret")
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "RuntimeError: with a local variable" in told.stdout
    assert "s3cret" not in told.stdout + told.stderr


def test_requests_are_counted_by_route_and_class(site: Site) -> None:
    """Every route is called."""
    client = site.client()
    for number in range(30):
        client.get(f"/v1/runs/run_{number}")
        client.get(f"/nowhere/{number}")
        client.request(f"M{number}", "/v1/me")
    told = metrics(site)
    name = "elastic_http_request_duration_seconds"
    labels = 'method="GET",route="/v1/runs/{run}",status="4xx"'
    assert told[f"{name}_count{{{labels}}}"] == 30
    assert told[f'{name}_bucket{{{labels},le="+Inf"}}'] == 30
    ladder = [told[f'{name}_bucket{{{labels},le="{bound:g}"}}'] for bound in BUCKETS_S]
    assert ladder == sorted(ladder)
    kinds = [key for key in told if key.startswith(f"{name}_count")]
    assert len(kinds) <= 4, "what is asked for makes no new series"
    assert told["elastic_http_streams_open"] == 0
    assert not [key for key in metrics(site, site.key("ours", AccessRole.ADMIN)) if key.startswith("elastic_http")]


def test_engines_stand_under_the_names_that_boards_know(site: Site, submission: Submission) -> None:
    run = site.submitted(submission())
    figures = {"queued_turns": 3, "providers": {"spot": {"running_turns": 24, "tokens": 123_456_789}}}
    with site.store.writing() as tx:
        tx.execute(sa.update(runs).values(phase=RunPhase.RUNNING.value, figures=figures))
    told = metrics(site)
    engine = f'model_name="small",engine="spot",run="{run}"'
    assert told[f"vllm:num_requests_running{{{engine}}}"] == 24
    assert told[f"vllm:generation_tokens_total{{{engine}}}"] == 123_456_789
    assert told[f'vllm:num_requests_waiting{{model_name="small",engine="queue",run="{run}"}}'] == 3
