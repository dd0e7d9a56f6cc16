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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"env": None}, ("NoCredentials", "AWS_PROFILE")),
        ({"keys": {"another"}}, ("AuthFailure", "aws configure")),
        ({"keys": {"another"}, "unknown": "ExpiredToken"}, ("ExpiredToken", "aws sso login")),
        ({"region": "mars-east-1", "endpoint_url": "", "answer_timeout_s": 2.0}, ("mars-east-1", "region")),
        ({"region": "mars"}, ("providers.ec2.region", "found 'mars'")),
        ({"image": "ubuntu"}, ("providers.ec2.image", "found 'ubuntu'")),
    ],
)
def test_what_ec2_can_never_do_ends_a_run_before_it_begins(
    aws: Cloud,
    config: Path,
    elastic: Callable[..., Any],
    refused: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    billed_usd, settings = aws.books.usd(), dict(wrong)
    if "env" in settings:
        del settings["env"]
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(config.parent))
    aws.proxy.keys, aws.proxy.unknown = settings.pop("keys", None), settings.pop("unknown", "AuthFailure")
    refused(elastic("run", with_ec2(config, aws, **settings), "--providers", "ec2"), "ec2", *words)
    assert aws.living() == []
    assert aws.books.usd() == billed_usd
