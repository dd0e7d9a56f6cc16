"""Submissions: all faults at once, each with its place; only installed components and the project's own files."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from elastic.config import Config
from elastic.protocol.api import AccessRole
from elastic.protocol.api import Submission as Body
from elastic.server.api.app import create_app
from elastic.server.intake import submissions
from elastic.server.problems import ApiProblem
from elastic.server.store.quotas import QuotaRow
from elastic.server.store.tables import runs
from tests.server.conftest import CONFIG, Site, Submission

EXAMPLE = Path(__file__).parents[2] / "examples" / "frozenlake.toml"


def pointers(site: Site, body: dict[str, Any]) -> dict[str, str]:
    answer = site.client().post("/v1/runs/dry-run", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "/problems/invalid-configuration"
    assert site.client().post("/v1/runs", json=body).status_code == 400
    return {one["pointer"]: one["detail"] for one in answer.json()["errors"]}


def test_all_faults_at_once(shared_site: Site, submission: Submission) -> None:
    body = submission(caps={"nobody": 1})
    body["config"]["run"] |= {"steps": -1, "host": "0.0.0.0"}
    body["config"]["trainer"]["learning_rate"] = "fast"
    body["config"]["nonsense"] = 1
    found = pointers(shared_site, body)
    for place in ("run/steps", "run/host", "trainer/learning_rate", "nonsense"):
        assert f"#/config/{place}" in found
    assert "#/caps/nobody" in found


def test_a_configuration_may_come_as_the_text_of_its_file(shared_site: Site, submission: Submission) -> None:
    body = submission()
    told = [
        shared_site.client().post("/v1/runs/dry-run", json=one).json()["config"]
        for one in (body, body | {"config": CONFIG})
    ]
    assert told[0] == told[1]
    assert told[0]["run"]["name"] == "small"
    for text, words in {
        "[run": "is no TOML",
        "[run]\nname = 2026-01-01": "a date",
        "a" * 70_000: "65536 at most",
        "a.": "is no TOML",
        f"a = {'[' * 9_000}": "nested",
        "a = 1e99": "numbers from",
    }.items():
        answer = shared_site.client().post("/v1/runs", json=body | {"config": text})
        assert answer.status_code in (400, 422), answer.text
        assert words in answer.text


def test_the_example_is_taken_as_it_is_or_says_how_to_make_a_base_policy(site: Site) -> None:
    policy = site.settings.models[0] / "policy"
    (policy / "config.json").touch()
    told = site.client().get("/v1/runs/example").json()
    made = site.client().post("/v1/runs", json=told["submission"])
    assert made.status_code == 201, made.text
    assert site.client().get(f"/v1/runs/{made.json()['id']}").json()["created_by_name"] == "first-admin"
    ours = site.member(AccessRole.RUNNER).post("/v1/runs", json=told["submission"]).json()["id"]
    assert site.client().get(f"/v1/runs/{ours}").json()["created_by_name"] == "ours-runner"
    (policy / "config.json").unlink()
    bare = site.client().get("/v1/runs/example").json()
    assert bare["submission"] is None
    assert "elastic prepare" in bare["says"]


def test_unknown_components(shared_site: Site, submission: Submission) -> None:
    assert "installed:" in pointers(shared_site, submission(providers=["moon"]))["#/providers"]
    dotted = submission()
    dotted["config"]["providers"]["a.b"] = {"kind": "moon"}
    assert "installed:" in pointers(shared_site, dotted)["#/config/providers/a.b"]
    for section, name in (("environment", "os.path:join"), ("rewards", "os:system"), ("engine", None)):
        body = submission()
        body["config"].setdefault(section, {}).update({"name": name} if name else {"kind": "os:system"})
        assert "unknown" in str(pointers(shared_site, body)), section


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "checkpoint", "/etc"),
        ("model", "checkpoint", "../server"),
        ("model", "checkpoint", "policy/../../server/elastic.sqlite"),
        ("model", "checkpoint", "."),
        ("model", "checkpoint", ""),
        ("model", "checkpoint", "a\0b"),
        ("run", "certificate", "/etc/passwd"),
        ("run", "pass_env", ["HOME"]),
        ("run", "directory", "elsewhere"),
        ("front", "upstream", "https://10.0.0.1"),
        ("front", "upstream_key_env", "ELASTIC_SERVED"),
        ("run", "port", 22),
        ("providers.spot", "trace", "/etc/passwd"),
        ("providers.spot", "trace", "../theirs/trace.csv"),
        ("providers.spot", "trace", "pyproject.toml"),
        ("providers.spot", "trace", "Makefile"),
        ("providers.spot", "endpoint_url", "http://10.0.0.1:9"),
        ("providers.spot", "urls", ["https://10.0.0.1:9"]),
        ("providers.spot", "address", "ray://10.0.0.1:10001"),
        ("providers.spot", "engine", {"vllm": {"arguments": {"worker_cls": "os.system"}}}),
        ("engine", "vllm", {"arguments": {"worker_cls": "os.system"}}),
    ],
)
def test_no_file_host_or_import_path_of_anybody_else(
    shared_site: Site, submission: Submission, section: str, key: str, value: Any
) -> None:
    body = submission()
    table = body["config"]
    for part in section.split("."):
        table = table.setdefault(part, {})
    table[key] = value
    found = pointers(shared_site, body)
    assert any(pointer.startswith(f"#/config/{section.replace('.', '/')}/{key}") for pointer in found), found


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "ec2", "image": "ami-0123456789abcdef0", "install": ["pip install /opt/x.whl"]},
        {"kind": "ec2", "image": "ami-0123456789abcdef0", "queue": "https://sqs.us-east-1.amazonaws.com/1/notices"},
        {
            "kind": "ec2",
            "image": "ami-0123456789abcdef0",
            "instance_profile": "worker",
            "secret_prefix": "elastic/ours/",
        },
        {"kind": "modal", "gpu": "H100", "volume": "weights", "volume_path": "/mnt/weights"},
    ],
    ids=lambda section: list(section)[-1],
)
def test_only_what_is_typed_as_a_path_is_one(site: Site, submission: Submission, section: dict[str, Any]) -> None:
    body = submission()
    body["config"]["providers"]["spot"] = section
    raw, project = Body(config=body["config"], providers=["spot"]), site.projects["ours"]
    reached = replace(site.settings, runs_listen="0.0.0.0", runs_advertise="gpu.example")
    kept, _ = submissions.check(reached, raw, project)
    assert kept.config.providers["spot"] == section


CLOUD = {"kind": "ec2", "image": "ami-0123456789abcdef0", "max_workers": 4}


def test_a_run_that_its_workers_cannot_reach_is_refused(shared_site: Site, submission: Submission) -> None:
    body = submission()
    body["config"]["providers"]["spot"] = CLOUD
    advice = pointers(shared_site, body)["#/config/providers/spot"]
    assert "elastic serve --runs-listen HOST, and --runs-advertise HOST" in advice
    assert " --listen" not in advice


def test_faults_of_a_projects_own_files_name_no_place_of_the_server(site: Site, submission: Submission) -> None:
    storage = site.settings.storage(site.projects["ours"])
    storage.mkdir(parents=True)
    (storage / "market.csv").write_text("no trace")
    body = submission(project="ours")
    body["config"]["providers"]["spot"] = {"trace": "market.csv"}
    answer = site.client().post("/v1/runs/dry-run", json=body)
    assert answer.status_code == 400
    assert str(site.settings.home.resolve()) not in answer.text
    assert "market.csv" in answer.json()["detail"]


def test_a_runs_configuration_names_files_as_its_submission_did(site: Site, submission: Submission) -> None:
    storage = site.settings.storage(site.projects["ours"])
    storage.mkdir(parents=True)
    (storage / "market.csv").write_text("time_s,event,instance_id\n0,add,a\n9,remove,a\n")
    body = submission(project="ours")
    body["config"]["providers"]["spot"] = {"trace": "market.csv"}
    dry = site.client().post("/v1/runs/dry-run", json=body)
    made = site.client().post("/v1/runs", json=body)
    for answer in (dry, site.client().get(made.headers["location"])):
        config = answer.json()["config"]
        assert config["model"]["checkpoint"] == body["config"]["model"]["checkpoint"]
        assert config["providers"]["spot"]["trace"] == "market.csv"
        for place in (site.settings.home, *site.settings.models):
            assert str(place.resolve()) not in answer.text


def test_a_price_that_only_a_vendor_knows_is_no_price_of_zero(site: Site, submission: Submission) -> None:
    body = submission()
    body["config"]["providers"]["spot"] = CLOUD
    raw, project = Body(config=body["config"], providers=["spot"]), site.projects["ours"]
    reached = replace(site.settings, runs_listen="10.0.0.5")
    _, plan = submissions.check(reached, raw, project)
    assert (plan.config.run.host, plan.config.run.port) == ("10.0.0.5", 0)
    shown = submissions.dry_run(plan)
    trainer, cloud = shown.would_acquire
    assert cloud.usd_per_gpu_hour is cloud.usd_per_hour_max is None
    assert shown.usd_per_hour_max == trainer.usd_per_hour_max
    assert any("price of spot is not known" in warning for warning in shown.warnings)


@pytest.mark.parametrize("limits", [{"budget_usd": 5.0}, {"usd_per_day": 5.0}])
def test_no_budget_holds_without_a_price(site: Site, submission: Submission, limits: dict[str, Any]) -> None:
    reached = replace(site.settings, runs_listen="10.0.0.5")
    project = site.projects["ours"]
    for bound, fits in (({}, False), ({"usd_per_gpu_hour_max": 3.0}, True)):
        body = submission()
        body["config"]["providers"]["spot"] = CLOUD | bound
        run, _ = submissions.check(reached, Body(config=body["config"], providers=["spot"]), project)
        submissions.refuse_beyond(QuotaRow(project=project), run.needs)
        if fits:
            submissions.refuse_beyond(QuotaRow(project=project, **limits), run.needs)
            continue
        with pytest.raises(ApiProblem, match="usd_per_gpu_hour_max bounds it"):
            submissions.refuse_beyond(QuotaRow(project=project, **limits), run.needs)


def test_a_projects_own_files(site: Site, submission: Submission, tmp_path: Path) -> None:
    storage = site.settings.storage(site.projects["ours"])
    storage.mkdir(parents=True)
    (storage / "base").mkdir()
    (storage / "market.csv").write_text("time_s,event,instance_id\n0,add,a\n9,remove,a\n")
    (storage / "link").symlink_to(tmp_path)
    body = submission()
    body["config"]["model"]["checkpoint"] = "base"
    body["config"]["providers"]["spot"]["trace"] = "market.csv"
    ours, theirs = (site.member(AccessRole.RUNNER, project) for project in ("ours", "theirs"))
    made = ours.post("/v1/runs", json=body)
    assert made.status_code == 201, made.text
    with site.store.reading() as connection:
        config = json.loads(connection.execute(sa.select(runs.c.config)).scalar_one())
    assert config["model"]["checkpoint"] == str(storage.resolve() / "base")
    assert config["providers"]["spot"]["trace"] == str(storage.resolve() / "market.csv")
    assert theirs.post("/v1/runs", json=body).status_code == 400
    body["config"]["model"]["checkpoint"] = "link/server"
    assert ours.post("/v1/runs", json=body).status_code == 400


def test_the_example_is_submitted_as_it_runs_on_disk(site: Site, tmp_path: Path) -> None:
    """Its base policy lies in `.cache`, which is what `elastic serve` has for models unless told otherwise."""
    base = tmp_path / ".cache" / "frozenlake-base"
    base.mkdir(parents=True)
    (base / "config.json").touch()
    settings = replace(site.settings, models=(base.parent,))

    def checked(**model: str) -> Config:
        config = tomllib.loads(EXAMPLE.read_text())
        config["model"] |= model
        config["trainer"] |= {"reference": config["model"]["checkpoint"], "kl_coefficient": 0.1}
        return submissions.check(settings, Body(config=config, providers=["spot"]), site.projects["ours"])[0].config

    assert checked().model.checkpoint == checked().trainer.reference == base.resolve()
    for name in (".cache", ".cache/", ".cache/../server", "cache/frozenlake-base"):
        with pytest.raises(ApiProblem, match=r"no base policy .* the server's models \(frozenlake-base\)"):
            checked(checkpoint=name)


def test_a_dry_run_has_prices_and_keeps_nothing(shared_site: Site, submission: Submission) -> None:
    client = shared_site.client()
    before = client.get("/v1/runs").json()
    shown = client.post("/v1/runs/dry-run", json=submission()).json()
    assert {row["provider"] for row in shown["would_acquire"]} == {"trainer", "spot"}
    assert shown["usd_per_hour_max"] == pytest.approx(sum(row["usd_per_hour_max"] for row in shown["would_acquire"]))
    assert client.get("/v1/runs").json() == before


@pytest.mark.parametrize(
    "change",
    [
        {"project": "\ud800"},
        {"caps": {f"spot-{number}": 1 for number in range(33)}},
        {"config": {"run": {"caps": {"\ud800": 1}}}},
        {"config": {"run": {"name": "half\udfff"}}},
    ],
)
def test_what_cannot_be_kept_or_is_too_much_is_refused(
    site: Site, submission: Submission, change: dict[str, Any]
) -> None:
    body = json.dumps({**submission(), **change})
    answer = site.client().post("/v1/runs/dry-run", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-request")


def test_code_is_of_the_projects_files_and_never_runs_as_the_server(shared_site: Site, submission: Submission) -> None:
    body = submission()
    body["config"]["trainer"]["other"] = {"loss": "/etc/loss.py:loss", "more": "upload:upl_1/loss.py:loss"}
    found = pointers(shared_site, body)
    assert "no file '/etc/loss.py' in the project's storage" in found["#/config/trainer/other/loss"]
    assert "no complete upload" in found["#/config/trainer/other/more"]
    settings = replace(shared_site.settings, shared_trust=False)
    apart = replace(shared_site, settings=settings, app=create_app(shared_site.store, settings))
    assert "as the server's own user" in pointers(apart, body)["#/config/trainer/other/loss"]
    body = submission()
    body["config"]["trainer"]["loss"] = "os:system"
    assert "as the server's own user" in pointers(apart, body)["#/config/trainer/loss"]
    assert list(submissions.code_in({"trainer": {"loss": "cispo"}})) == []
    for kind, key in (
        ("openenv", "url"),
        ("openenv", "image"),
        ("openenv", "project"),
        ("verifiers", "id"),
        ("gymnasium", "id"),
    ):
        body = submission()
        body["config"]["environment"] = {"name": kind, "settings": {key: "anybodys"}}
        assert "as the server's own user" in pointers(apart, body)[f"#/config/environment/settings/{key}"]


def test_what_is_the_servers_to_choose_is_refused_of_each_of_several_environments(
    shared_site: Site, submission: Submission
) -> None:
    for key, value in (("container", "image"), ("network", "host")):
        body = submission()
        body["config"].pop("environment", None)
        body["config"]["environments"] = [{"name": "frozenlake"}, {"name": "b", "kind": "frozenlake", key: value}]
        refused = pointers(shared_site, body)
        assert "the server's to choose" in refused[f"#/config/environments/1/{key}"]
