"""How many processors this process may use: by its affinity, which a cpuset sets, and by its cgroups' quotas."""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """At least 1; a part of a processor counts as one. `own` says in which of the `cgroups` this process is."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas(cgroups, own))]))


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """The processors that each limited group above this process may use, in both versions of cgroups."""
    for line in _read(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        top = cgroups if not controllers else next((x for x in _mounts(cgroups, controllers) if x.is_dir()), cgroups)
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):
            where = top / each
            if controllers:
                quota, period = _read(where / "cpu.cfs_quota_us"), _read(where / "cpu.cfs_period_us")
            else:
                quota, period = (*_read(where / "cpu.max").split(), "", "")[:2]
            if quota.strip().isdecimal() and period.strip().isdecimal() and int(period):
                yield int(quota) / int(period)


def _mounts(cgroups: Path, controllers: str) -> Iterator[Path]:
    yield from (cgroups / controllers, cgroups / "cpu")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
