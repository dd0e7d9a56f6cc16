"""What commands say of EC2 without a run."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.aws_server.cloud import Cloud
from tests.clouds.together import toml

pytestmark = pytest.mark.clouds


def with_ec2(config: Path, aws: Cloud, **more: Any) -> Path:
    settings = "\n".join(f"{key} = {toml(value)}" for key, value in aws.settings(max_workers=3, **more).items())
    config.write_text(f"{config.read_text()}\n[providers.ec2]\n{settings}\n")
    return config


def test_a_dry_run_shows_the_price_that_stands_and_orders_nothing(
    aws: Cloud, config: Path, elastic: Callable[..., Any]
) -> None:
    code, out, err = elastic("run", with_ec2(config, aws), "--providers", "ec2", "--dry-run", "--json")
    assert (code, err) == (0, "")
    (row,) = [row for row in json.loads(out)["would_acquire"] if row["provider"] == "ec2"]
    kind, zone = min(aws.books.capacity)
    history = [usd for at_s, usd in aws.books.prices.history(kind, zone)]
    assert min(history) <= row["usd_per_gpu_hour"] <= max(history)
    assert row["usd_per_hour_max"] == pytest.approx(3 * row["usd_per_gpu_hour"])
    assert aws.living() == []


def test_a_dry_run_that_cannot_ask_says_so_and_shows_the_limit(
    aws: Cloud, config: Path, elastic: Callable[..., Any]
) -> None:
    aws.proxy.keys = {"another"}
    path = with_ec2(config, aws, usd_per_gpu_hour_max=2.5)
    code, out, err = elastic("run", path, "--providers", "ec2", "--dry-run", "--json")
    assert code == 0
    assert "warning: the price of ec2 is not known: ec2: " in err
    assert "AuthFailure" in err
    (row,) = [row for row in json.loads(out)["would_acquire"] if row["provider"] == "ec2"]
    assert row["usd_per_gpu_hour"] == 2.5


def test_a_run_that_ec2_refuses_ends_with_one_message(aws: Cloud, config: Path, elastic: Callable[..., Any]) -> None:
    aws.proxy.clock_s = 3600.0
    code, out, err = elastic("run", with_ec2(config, aws), "--providers", "ec2")
    assert (code, out) == (2, "")
    assert re.search(r"this machine's clock is (3599|3600) s behind AWS's", " ".join(err.split()))
    assert "Traceback" not in err
    assert aws.living() == []
