"""`elastic pool` and `elastic jobs` as a user has them, against a cluster whose jobs do nothing by themselves."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.cli.doctor import Finding, findings_of_pool
from elastic.compose.pool_config import load_pool, save_pool
from elastic.compose.runs import claimed, load_run_config
from elastic.core.cluster import Cluster
from elastic.core.cluster import events as e
from elastic.pool.machines import read_node_ticket
from elastic.pool.status import pool_status
from tests.pool.stand_in import POOL, TICKET, StandIn

JOB = """
[job]
slo = 2.0
rollout_memory_gb = 1
train_memory_gb = 1
plan = { rollout_s = 10, train_s = 10, rollout_switch_s = 1 }
"""


@pytest.fixture
def pool_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pool.toml"
    path.write_text(POOL.format(directory=tmp_path))
    return path


@pytest.fixture
def pool(pool_file: Path) -> Iterator[StandIn]:
    with StandIn(pool_file) as found:
        yield found


@pytest.fixture
def job(config: Path) -> Path:
    config.write_text(config.read_text() + JOB)
    return config


def submit(elastic: Callable[..., tuple[int, str, str]], job: Path, *more: str) -> dict[str, object]:
    code, out, err = elastic("jobs", "submit", job, "--json", *more)
    assert code == 0, err
    return json.loads(out)


def test_a_submission_is_checked_placed_and_has_its_runs_directory(elastic, pool: StandIn, job: Path) -> None:
    told = submit(elastic, job, "--providers", "spot", "--slo", "1.8", "--name", "one")
    (sent,) = pool.submitted
    assert sent.request.slo == 1.8
    assert sent.request.id == told["job"] == "one"
    assert sent.request.rollout_bytes == 1_000_000_000
    assert sent.entry.providers == ("spot",)
    run_dir = Path(sent.entry.directory)
    assert run_dir.is_absolute()
    assert load_run_config(run_dir).job.slo == 1.8
    assert told["placement"]["placement"]["how"] == "new"  # type: ignore[index]
    second = submit(elastic, job)
    assert str(second["job"]).startswith("small-")
    code, out, _ = elastic("jobs", "list", "--json")
    assert (code, [row["name"] for row in json.loads(out)["jobs"]]) == (0, ["one", second["job"]])


def test_a_dry_run_says_where_and_in_numbers_why_not_elsewhere(elastic, pool: StandIn, job: Path) -> None:
    runs = job.parent / "runs"
    submit(elastic, job, "--name", "one")
    had = set(runs.iterdir())
    code, out, err = elastic("jobs", "submit", job, "--dry-run", "--slo", "1.05", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["placement"]["group"] == "group-1"
    assert (plan["placement"]["how"], plan["placement"]["usd_per_hour"]) == ("scaled", 2.0)
    assert plan["placement"]["planned_slowdown"] == pytest.approx(1.05)
    submit(elastic, job, "--name", "two")
    code, out, err = elastic("jobs", "submit", job, "--dry-run", "--slo", "1.1")
    assert code == 0, err
    assert "no group takes it" in out
    assert "training in a cycle" in out
    assert "30" in out
    assert len(set(runs.iterdir()) - had) == 1
    assert len(pool.submitted) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--slo", "0.9"), ("--slo: found 0.9", "allowed: at least 1")),
        (("--slo", "nan"), ("--slo: found nan",)),
        (("--slo", "1.01"), ("cannot keep its slo of 1.01 even alone", "it could keep 1.05")),
        (("--set", "job.rollout_memory_gb=3"), ("fits no rollout node", "needed 3000000000", "largest: 2000000000")),
        (("--set", "job.train_nodes=2"), ("needed 2 train nodes", "largest: 1")),
        (("--set", "job.plan.train_s=0"), ("job.plan.train_s", "greater than or equal to 0.000001")),
        (("--set", "job.memory=1"), ("job.memory: unknown key", "rollout_memory_gb")),
        (("--providers", "nosuch"), ("unknown provider 'nosuch'",)),
        (("--set", "trainer.gpus=2"), ("trainer.gpus: found 2",)),
        (("--name", "a/b"), ("--name: found 'a/b'",)),
        (("--phases", "phases.toml"), ("--phases: is for a script",)),
        (("--pool", "other"), ("no pool 'other'", "there are: lab")),
        (("--set", "model.checkpoint=nosuch"), ("model.checkpoint", "elastic prepare")),
    ],
)
def test_what_is_no_submission_leaves_nothing(
    refused, elastic, pool: StandIn, job: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(elastic("jobs", "submit", job, *arguments), *words)
    assert not pool.submitted
    assert not (job.parent / "runs").exists()


def test_a_script_brings_its_command_and_no_secrets(
    refused, elastic, pool: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("MY_DATA", "here")
    file = tmp_path / "script.toml"
    file.write_text('[run]\nname = "grpo"\nsteps = 7\npass_env = ["MY_DATA"]\n' + JOB)
    mine = ("--name", "mine", "--set", "job.max_restarts=1")
    code, _, err = elastic("jobs", "submit", file, *mine, "--", "python", "train.py", "--json")
    assert code == 0, err
    (sent,) = pool.submitted
    assert sent.entry.max_restarts == 1
    assert sent.entry.script == ("python", "train.py", "--json")
    assert (sent.request.steps, sent.entry.directory) == (7, str(tmp_path))
    assert sent.entry.environment["MY_DATA"] == "here"
    assert "AWS_SECRET_ACCESS_KEY" not in sent.entry.environment
    refused(elastic("jobs", "submit", file, "--"), "nothing stands behind --")
    refused(elastic("jobs", "submit", "--", "python", "train.py"), "job: required but missing")
    refused(elastic("jobs", "submit", file, "--providers", "spot", "--", "x"), "--providers: a script has none")


def test_a_run_brings_what_it_passes_on_and_no_more(
    elastic, pool: StandIn, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("JUDGE_KEY", "passed on")
    submit(elastic, job, "--name", "one", "--set", "run.pass_env=['JUDGE_KEY', 'PATH']")
    (sent,) = pool.submitted
    assert sent.entry.environment == {"JUDGE_KEY": "passed on"}


def test_a_script_with_a_phases_file_is_wrapped(refused, elastic, pool: StandIn, tmp_path: Path) -> None:
    file, phases = tmp_path / "script.toml", tmp_path / "phases.toml"
    file.write_text('[run]\nname = "grpo"\n' + JOB)
    phases.write_text('[phases]\n"grpo:roll" = "rollout"\n"grpo:update" = "train"\n')
    code, _, err = elastic("jobs", "submit", file, "--phases", "phases.toml", "--", "python", "-u", "-m", "grpo", "-m")
    assert code == 0, err
    (sent,) = pool.submitted
    assert sent.entry.script == ("python", "-u", "-m", "elastic.pool.phases.run", str(phases), "-m", "grpo", "-m")
    submission = ("jobs", "submit", file, "--phases", "phases.toml", "--")
    refused(
        elastic(*submission, "bash", "run.sh"), "--phases: a phases file goes with a Python program: found 'bash run."
    )
    phases.write_text('[phases]\n"grpo:roll" = "rolout"\n')
    refused(elastic(*submission, "python", "x.py"), "'grpo:roll': phase: found 'rolout'; allowed: rollout, train, sync")
    refused(
        elastic("jobs", "submit", file, "--phases", "none.toml", "--", "python", "x.py"),
        "phases file none.toml: No such",
    )
    (tmp_path / "x.py").write_text("def roll(): ...\n")
    phases.write_text('[phases]\n"__main__:roll" = "rollout"\n"__main__:update" = "train"\n')
    refused(elastic(*submission, "python", "x.py"), "x.py has no __main__:update")
    assert len(pool.submitted) == 1


def test_how_pool_and_jobs_stand(refused, elastic, pool: StandIn, job: Path) -> None:
    submit(elastic, job, "--name", "one")
    code, out, _ = elastic("pool", "status")
    assert code == 0
    for words in ("pool lab", "rollout-1", "train-1", "group-1", "one", "running"):
        assert words in out
    code, out, _ = elastic("pool", "status", "lab", "--json")
    assert [node["name"] for node in json.loads(out)["nodes"]] == ["rollout-1", "rollout-2", "train-1"]
    code, out, _ = elastic("jobs", "show", "on")
    assert "running: its residents are up" in out
    assert "placed: new in group-1" in out
    refused(elastic("jobs", "show", "nosuch"), "no job 'nosuch' in pool lab; the latest are: one")


def test_waiting_tells_how_a_job_ended(elastic, pool: StandIn, job: Path) -> None:
    for name in ("one", "two", "three"):
        submit(elastic, job, "--name", name, "--slo", "4")
    code, _, err = elastic("jobs", "wait", "one", "--timeout-s", "0")
    assert (code, "not over after 0 s: running" in err) == (1, True)
    pool.tell(e.JobFinished(job="one"))
    pool.tell(e.JobFailed(job="two", cause="it was killed"))
    assert elastic("jobs", "wait", "one").code == 0
    code, _, err = elastic("jobs", "wait", "two")
    assert (code, "failed after 0 of 2 steps: it was killed" in err) == (1, True)
    assert elastic("jobs", "cancel", "three").code == 0
    assert elastic("jobs", "wait", "three").code == 3
    assert elastic("jobs", "resubmit", "two").code == 0
    code, out, _ = elastic("jobs", "list", "--json")
    assert [(row["name"], row["resubmissions"]) for row in json.loads(out)["jobs"]] == [("two", 1)]


def test_what_a_pool_refuses_is_bad_input(refused, elastic, pool: StandIn, job: Path) -> None:
    submit(elastic, job, "--name", "one")
    refused(elastic("jobs", "resubmit", "one"), "job one has not failed")


@pytest.mark.parametrize("name", ["", " "])
def test_a_name_without_text_is_not_the_only_job_or_pool(refused, elastic, pool: StandIn, job: Path, name: str) -> None:
    submit(elastic, job, "--name", "one")
    for command in ("show", "logs", "wait", "cancel", "resubmit"):
        refused(elastic("jobs", command, name), f"JOB: found {name!r}; allowed: a name")
    for command in (("jobs", "list", "--pool", name), ("pool", "status", name), ("pool", "stop", name)):
        refused(elastic(*command), f"POOL: found {name!r}; allowed: a name")
    assert pool.commands == [pool.submitted[0].id]
    refused(elastic("pool", "drain", name), f"node {name!r} is no node of another machine")


def test_logs_of_a_job(elastic, refused, pool: StandIn, job: Path) -> None:
    logs = Path(str(submit(elastic, job, "--name", "one")["directory"])) / "logs"
    refused(elastic("jobs", "logs", "one"), "has no log", "there are: none")
    logs.mkdir()
    (logs / "orchestrator.log").write_text("first\nsecond\n")
    assert elastic("jobs", "logs", "one", "-n", "1") == (0, "second\n", "")


def test_no_pool_or_one_of_another_version(refused, elastic, pool_file: Path, job: Path) -> None:
    for command in (("pool", "status"), ("pool", "stop"), ("jobs", "list"), ("jobs", "submit", job)):
        refused(elastic(*command), "no pool in pools")
    save_pool(load_pool(pool_file))
    for command in (("pool", "status"), ("pool", "stop", "lab"), ("jobs", "cancel", "x"), ("jobs", "submit", job)):
        refused(elastic(*command), "pool pools/lab: no process is at it now", "elastic pool start POOL.toml")
    with StandIn(pool_file, version="0"):
        for command in (("pool", "status"), ("pool", "stop"), ("jobs", "list"), ("jobs", "submit", job)):
            refused(elastic(*command), "is of another version: found 0; allowed: ")
        refused(elastic("pool", "start", pool_file), "is running already")


def test_pools_by_name_path_and_file(refused, elastic, pool: StandIn, pool_file: Path, tmp_path: Path) -> None:
    for name in ("lab", str(pool.directory), str(pool_file)):
        assert elastic("pool", "status", name, "--json").code == 0
    other = tmp_path / "other.toml"
    other.write_text(pool_file.read_text().replace('"lab"', '"other"'))
    refused(elastic("pool", "status", other), "has been started")
    save_pool(load_pool(other))
    assert json.loads(elastic("pool", "status", "--json").out)["pool"] == "lab"  # The only one that runs.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("nodes = 1", "nodes = 0"), ("pool.train.nodes", "found 0")),
        (("usd_per_gpu_hour = 5.0", "usd_per_gpu_hour = -5.0"), ("pool.train.usd_per_gpu_hour", "found -5.0")),
        (("memory_gb = 4", "memory_gb = -4"), ("pool.train.memory_gb", "found -4")),
    ],
)
def test_what_is_no_pool_is_not_started(
    refused, elastic, pool_file: Path, change: tuple[str, str], words: tuple[str, ...]
) -> None:
    pool_file.write_text(pool_file.read_text().replace(*change, 1))
    refused(elastic("pool", "start", pool_file), str(pool_file), *words)
    assert not (pool_file.parent / "pools").exists()


def test_a_network_interface_that_this_machine_has_not_is_named_before_a_pool_starts(
    refused, elastic, pool_file: Path
) -> None:
    pool_file.write_text(pool_file.read_text() + 'interface = "nowhere"\n')
    words = "pool.train.interface, of nodes train: no network interface 'nowhere' with an IPv4 address is here"
    refused(elastic("pool", "start", pool_file), words, "found: lo")
    assert not (pool_file.parent / "pools").exists()


def test_a_pool_goes_on_with_what_it_was_begun_with(refused, elastic, pool_file: Path) -> None:
    directory = save_pool(load_pool(pool_file))
    (directory / "journal.sqlite").touch()
    pool_file.write_text(pool_file.read_text().replace("usd_per_gpu_hour = 5.0", "usd_per_gpu_hour = 6.0"))
    refused(elastic("pool", "start", pool_file), "pool.rollout and pool.train", "was begun with others")


def test_doctor_tells_how_pools_do(elastic: Any, pool_file: Path) -> None:
    def findings() -> dict[str, Finding]:
        found = json.loads(elastic("doctor", "--json").out)["findings"]
        return {one["what"]: Finding(**one) for one in found if one["what"].startswith("pool ")}

    assert findings() == {}
    save_pool(load_pool(pool_file))
    assert findings()["pool lab"].found == "it does not run"
    with claimed(save_pool(load_pool(pool_file))):
        silent = findings()["pool lab"]
    assert (silent.ok, silent.fault) == (False, "silent")
    with StandIn(pool_file):
        up = findings()["pool lab"]
    assert (up.ok, up.warns, up.found) == (True, True, "0 of 2 rollout nodes, 0 of 1 train nodes")


def test_doctor_names_devices_that_are_set_aside_and_how_they_are_put_back(pool_file: Path) -> None:
    config = load_pool(pool_file)
    status = pool_status(Cluster(config.spec(), config.policies(), config.wait_limits(), 0))
    for node in status.nodes:
        node.node_agent.up = True
    status.set_aside = {"cuda:1": "it is ill"}
    whole, device = findings_of_pool("pool lab", config, status)
    assert (whole.found, whole.warns) == ("2 of 2 rollout nodes, 1 of 1 train nodes", False)
    assert (device.what, device.ok, device.found) == ("pool lab: cuda:1", False, "it is ill")
    assert device.hint.endswith("pool put-back cuda:1")


def test_a_ticket_is_in_a_file_for_its_user_alone_and_printed_where_none_is_named(
    elastic: Any, pool: StandIn, tmp_path: Path
) -> None:
    code, out, err = elastic("pool", "ticket", "-o", tmp_path / "ticket")
    assert (code, out) == (0, "")
    assert "good for one machine within 60 min" in err
    assert "only this machine can dial 127.0.0.1:1" in err
    assert TICKET.token not in err
    assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600
    assert read_node_ticket((tmp_path / "ticket").read_bytes()) == TICKET
    assert read_node_ticket(elastic("pool", "ticket").out.encode()) == TICKET
    told = json.loads(elastic("pool", "ticket", "--nodes", "1", "--json").out)
    assert (told["nodes"], told["content"]["token"]) == ([TICKET.node], TICKET.token)


def test_no_ticket_is_minted_where_it_cannot_be_handed_out(
    refused: Any, elastic: Any, pool: StandIn, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path, "", tmp_path / "file" / "ticket"):
        refused(elastic("pool", "ticket", "-o", output), "error: --output: ")
    assert not pool.commands


def test_names_that_are_no_text_or_longer_than_a_path_are_bad_input(refused: Any, elastic: Any, pool: StandIn) -> None:
    for command in (("drain", "\udcff"), ("put-back", "\udcff"), ("ticket", "--label", "\udcff")):
        refused(elastic("pool", *command), r"found '\udcff'; allowed: text in UTF-8")
    refused(elastic("pool", "status", "n" * 300), "File name too long")


def test_a_drained_node_is_waited_for(elastic: Any, pool: StandIn) -> None:
    code, out, err = elastic("pool", "drain", "rollout-2", "--json")
    assert (code, json.loads(out)["gone"]) == (0, True)
    assert "node rollout-2 is no node of pool lab any more" in err
    code, _, err = elastic("pool", "drain", "nowhere")
    assert (code, "'nowhere' is no node of another machine" in err) == (2, True)


def test_who_joins_is_told_what_is_wrong_with_the_ticket_the_address_and_the_devices(
    elastic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good").write_bytes(msgspec.json.encode(TICKET))
    Path("other").write_text('{"run": "one", "join": "a:1", "fingerprint": "", "ticket": "t", "token": "secret"}')
    for options, told in (
        ((), "give --ticket-file FILE, or ELASTIC_TICKET with a ticket"),
        (("--ticket-file", "none"), "--ticket-file none: cannot be read (No such file or directory)"),
        (("--ticket-file", "other"), "other: not a ticket as `elastic pool ticket` writes it"),
        (("nowhere", "--ticket-file", "good"), "elastic pool join: "),
        (("--ticket-file", "good", "--devices", "cpu:1"), "--devices: found cpu:1; allowed: 2 of cpu:0, cpu:1"),
        (
            ("--ticket-file", "good", "--devices", "cpu:0,cpu:x"),
            "--devices: found cpu:x; allowed: names such as cuda:2",
        ),
        (("--ticket-file", "good", "--directory", "good"), "cannot be made (Not a directory)"),
    ):
        code, _, err = elastic("pool", "join", *options)
        assert code == 2, (options, err)
        assert told in err
        assert TICKET.token not in err
    Path("nodes/lab-rollout-1").mkdir(parents=True)
    with claimed(Path("nodes/lab-rollout-1")):
        code, _, err = elastic("pool", "join", "--ticket-file", "good")
    assert (code, "node nodes/lab-rollout-1 is still going on in another process" in err) == (2, True)
