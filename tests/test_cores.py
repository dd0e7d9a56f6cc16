"""Processors are counted as this process may use them, not as the host has them."""

import os
from pathlib import Path

import pytest

from elastic.system.cores import cores

HOST = len(os.sched_getaffinity(0))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own"


@pytest.mark.parametrize(
    ("quotas", "count"),
    [
        ({"": "max 100000", "pod/it": "150000 100000"}, 2),
        ({"pod": "50000 100000", "pod/it": "max 100000"}, 1),
        ({"": "100000 100000"}, 1),
        ({"pod/it": "6400000 100000"}, HOST),
        ({"pod/it": "max 100000"}, HOST),
        ({"pod/it": "nonsense"}, HOST),
        ({}, HOST),
    ],
)
def test_a_quota_of_any_group_above_counts(tmp_path: Path, own: Path, quotas: dict[str, str], count: int) -> None:
    own.write_text("0::/pod/it\n")
    for group, quota in quotas.items():
        (tmp_path / "cgroup" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / group / "cpu.max").write_text(f"{quota}\n")
    assert cores(tmp_path / "cgroup", own) == min(count, HOST)


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "count"), [("50000", 1), ("-1", HOST)])
def test_the_first_version_of_cgroups_too(tmp_path: Path, own: Path, mount: str, quota: str, count: int) -> None:
    own.write_text("5:memory:/pod\n4:cpu,cpuacct:/pod\n")
    group = tmp_path / "cgroup" / mount / "pod"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert cores(tmp_path / "cgroup", own) == count


def test_where_nothing_is_told_affinity_counts(tmp_path: Path, own: Path) -> None:
    assert cores(tmp_path, own) == HOST
    assert 1 <= cores() <= HOST
