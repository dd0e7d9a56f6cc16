"""What is deployed by: every file that is named exists, and units and compose file say what they must."""

import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic.cli import main
from elastic.compose.pool_config import load_pool
from elastic.config import load_config

ROOT = Path(__file__).parents[1]
INFRA = ROOT / "infra"
UNITS = sorted((INFRA / "systemd").glob("*.service"))


def parsed(unit: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read(unit)
    return parser


def test_every_file_that_is_named_exists() -> None:
    named: set[Path] = set()
    for path in INFRA.rglob("*"):
        if path.is_file():
            text = path.read_text()
            named |= {ROOT / found for found in re.findall(r"\binfra/[\w./-]*\w", text)}
            if path.suffix == ".md":
                near = re.findall(r"`((?:systemd/)?[\w-]+\.(?:service|py|yaml|Dockerfile))`", text)
                named |= {path.parent / found if (path.parent / found).exists() else INFRA / found for found in near}
            if path.suffix == ".Dockerfile":
                for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
                    named |= {ROOT / found for found in line.split()}
    assert len(named) > 10
    assert [str(path) for path in named if not path.exists()] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_parse_and_start_what_there_is(unit: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = parsed(unit)
    assert {"Unit", "Service", "Install"} <= set(found.sections())
    command, *words = found["Service"]["ExecStart"].split()
    assert command == "/opt/elastic/bin/elastic"
    first = next(number for number, word in enumerate(words) if word.startswith("--"))
    part, options = words[:first], words[first:]
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([*part, "--help"])
    help_ = capsys.readouterr().out
    assert [option for option in options if option.startswith("--") and option not in help_] == []
    defined = dict(pair.split("=", 1) for pair in found["Service"].get("Environment", "").split())
    assert set(re.findall(r"\$\{(\w+)\}", " ".join(options))) == set(defined)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd: apt-get install systemd")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """With a command that is there."""
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/elastic/bin/elastic", "/bin/true"))
    paths = [str(tmp_path / unit.name) for unit in UNITS]
    found = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")


def test_no_run_is_killed_with_its_runner() -> None:
    service = parsed(INFRA / "systemd" / "elastic-runner.service")["Service"]
    assert (service["KillMode"], service["SendSIGKILL"]) == ("process", "no")


def test_the_containers_share_a_home_and_wait_for_the_database() -> None:
    composed = yaml.safe_load((INFRA / "compose.yaml").read_text())
    services = composed["services"]
    assert (INFRA / services["server"]["build"]["context"]).resolve() == ROOT
    for name in ("server", "runner"):
        assert services[name]["volumes"] == ["home:/var/lib/elastic"]
        assert services[name]["depends_on"] == {"database": {"condition": "service_healthy"}}
    assert "--no-runner" in services["server"]["command"]


def test_what_is_configured_on_kubernetes_is_what_elastic_reads(tmp_path: Path) -> None:
    (pool, *_), (job,) = documents("pool.yaml"), documents("job.yaml")
    for manifest in (pool, job):
        for name, content in manifest["data"].items():
            (tmp_path / name).write_text(content)
    config = load_pool(tmp_path / "pool.toml")
    (rollout,), (train,) = config.pool.rollout, config.pool.train
    cluster = documents("ray-cluster.yaml")[0]
    service = f"{cluster['metadata']['name']}-head-svc"
    run = load_config(tmp_path / "lake.toml")
    assert run.run.advertise == config.pool.advertise == "elastic-pool-0.elastic-pool"
    assert run.job.plan is not None, "this pool times no job"
    assert run.job.rollout_memory_gb < rollout.memory_gb
    assert run.job.train_memory_gb < train.memory_gb
    for section, group in zip((rollout, train), cluster["spec"]["workerGroupSpecs"], strict=True):
        assert section.ray is not None
        assert section.ray.address == f"ray://{service}:10001"
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert int(limits["cpu"]) >= section.ray.num_cpus
        assert int(limits["memory"].removesuffix("Gi")) > section.memory_gb / 0.7, "Ray counts 70 % of it"
        own = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert section.ray.resources.keys() == own.keys()


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((INFRA / "kubernetes" / name).read_text()))
