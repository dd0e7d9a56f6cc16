"""`elastic doctor`: what this machine has, and what is missing, with what to do about it."""

import asyncio
import importlib.metadata
import os
import platform
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer
from rich.table import Table

from elastic.cli.capacity import examined, plan_of
from elastic.cli.options import AsJson
from elastic.cli.output import EXIT_FAILED, console, emit, program, say
from elastic.cli.pool import SUPERVISOR
from elastic.compose.execution import end_left_behind
from elastic.compose.modal_deployment import rewards_fault
from elastic.compose.plan import RunPlan
from elastic.compose.pool_config import POOL_CONFIG, PoolConfig, load_pool
from elastic.compose.runs import is_claimed
from elastic.compose.scheduling import short_limits
from elastic.config import Config, ConfigError, load_config
from elastic.pool.control_messages import PoolControl
from elastic.pool.status import PoolStatus
from elastic.protocol.run_control import ControlError
from elastic.runtime.journal import DirectoryStore
from elastic.runtime.left_behind import left_behind
from elastic.system.cores import cores
from elastic.system.installed import installed, is_ours, load_point, package_of, passed_over
from elastic.system.named_code import CodeUnusable
from elastic.system.plain_values import told
from providers.base import ProviderUnavailable
from providers.vendor_calls import CALL_NAME, called

SHOWN_AFTER_S = 5.0
"""After so long it is told for whom doctor waits."""
ROOM_GB_MIN = 1.0
"""Room on disk for a short run's journal, checkpoints and weights, several times over."""
PACKAGES = ("elastic-rl", "torch", "safetensors", "gymnasium", "numba", "xxhash", "zstandard")
"""The packages of Elastic and of its extra `train`."""
GROUPS = ("elastic.providers", "elastic.environments", "elastic.engines", "elastic.trainers", "elastic.policies")
ALL_GROUPS = (*GROUPS, "elastic.rewards", "elastic.relays", "elastic.function_pools")
"""What everybody has some of; of plug-ins' other groups doctor says only what is not used."""


class Finding(msgspec.Struct, frozen=True):
    what: str
    ok: bool
    found: str
    hint: str = ""
    fault: str = "missing"
    """The word for a finding that is not ok, or that only `warns`."""
    warns: bool = False


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="A run's TOML file; checks what its providers' clouds say, too.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
    pools: Annotated[Path, typer.Option("--pools", help="Where pools are kept, which are looked at, too.")] = Path(
        "pools"
    ),
    within_s: Annotated[
        float, typer.Option("--within-s", min=0.1, help="Longest to wait for each answer, such as a driver's.")
    ] = 60.0,
) -> int:
    """Check this machine and its pools; with CONFIG also what its providers' clouds say: credentials, quotas, reach.

    Example: elastic doctor examples/frozenlake.toml
    """
    findings = findings_of(load_config(config) if config is not None else None, within_s)
    for directory in sorted(path.parent for path in pools.glob(f"*/{POOL_CONFIG}")):
        findings += _answered(f"pool {directory.name}", "the pool's process", within_s, _pool, directory)
    healthy = all(finding.ok for finding in findings)
    if as_json:
        emit({"healthy": healthy, "findings": findings})
    else:
        table = Table(box=None, show_header=False)
        for finding in findings:
            hint = f"\nhint: {finding.hint}" if finding.hint and not finding.ok else ""
            judged = "ok" if finding.ok and not finding.warns else finding.fault
            table.add_row(judged, finding.what, finding.found + hint)
        console().print(table)
    code = 0 if healthy else EXIT_FAILED
    if any(thread.name.startswith(CALL_NAME) for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(code)  # What has not answered by now would keep the process.
    return code


def findings_of(config: Config | None, within_s: float = 60.0) -> list[Finding]:
    """Return the findings about this machine. Whoever does not answer within that time is a finding, too."""
    findings = [_python(), *_packages()]
    findings += _answered("device", "torch and the GPUs' driver", within_s, _device)
    findings += [_cores(), _room(), *_entry_points()]
    for point in _of_others():
        findings += _answered(point.group, package_of(point), within_s, _loads, point)
    if config is None:
        return findings
    release_s = config.scheduler.release_timeout_s
    return [
        *findings,
        *_limits(config),
        *_clouds(config, within_s),
        *_answered("rewards", "Modal", within_s, _rewards, config),
        *_answered("left behind", "providers of runs that are over", release_s + within_s, _left_behind, config),
    ]


def _answered(what: str, who: str, within_s: float, ask: Callable[..., list[Finding]], *of: object) -> list[Finding]:
    """Ask on a thread of its own, which is left alone where it does not answer in time; a long wait is told of.

    Raises `ConfigError`.
    """
    waits = threading.Timer(SHOWN_AFTER_S, say, [f"doctor waits for {who}, up to {within_s:g} s"])
    waits.daemon = True
    waits.start()
    try:
        return called(within_s, ask, *of)
    except TimeoutError:
        return [
            Finding(what, False, f"no answer from {who} within {within_s:g} s", "--within-s waits longer", "silent")
        ]
    except ConfigError:
        raise
    except Exception as error:
        return [Finding(what, False, told(error), f"it came from {who}", "failed")]
    finally:
        waits.cancel()


def _pool(directory: Path) -> list[Finding]:
    """How a pool of this machine is that has been started and not stopped."""
    name = f"pool {directory.name}"
    if not is_claimed(directory) and not is_claimed(directory, SUPERVISOR):
        return [Finding(name, True, "it does not run")]
    try:
        config, reply = load_pool(directory / POOL_CONFIG), asyncio.run(PoolControl(directory).status())
    except (ConfigError, ControlError) as error:
        return [Finding(name, False, str(error), f"look into {directory / 'logs'}", "silent")]
    return findings_of_pool(name, config, reply.status)


def findings_of_pool(name: str, config: PoolConfig, status: PoolStatus) -> list[Finding]:
    """Return what is to be said of a pool that runs. Nodes that are on their way are no fault; devices that are set
    aside are."""
    kinds = config.spec().kinds.values()
    up = Counter(node.kind for node in status.nodes if node.node_agent.up)
    there = ", ".join(f"{up[kind.name]} of {kind.nodes} {kind.name} nodes" for kind in kinds)
    missing = any(up[kind.name] < kind.nodes for kind in kinds)
    found = [Finding(name, True, there, fault="short" if missing else "missing", warns=missing)]
    for device, reason in status.set_aside.items():
        hint = f"once it is mended: {program()} pool put-back {device}"
        found.append(Finding(f"{name}: {device}", False, reason, hint, "set aside"))
    return found


def _clouds(config: Config, within_s: float) -> list[Finding]:
    """Credentials, quotas and reach of each provider that has a vendor to ask."""
    plan = plan_of(config, [], "the configuration")
    findings: list[Finding] = []
    for name, settings in plan.providers.items():
        longest_s = within_s + getattr(settings, "answer_timeout_s", 0.0)
        findings += _answered(name, f"the vendor of {name}", longest_s, _cloud, plan, name)
    return findings


def _cloud(plan: RunPlan, name: str) -> list[Finding]:
    found = [finding for _, examination in examined(plan, [name]) for finding in examination.findings]
    return [Finding(one.what, one.ok, one.found, one.mend, "wrong") for one in found]


def _limits(config: Config) -> list[Finding]:
    warnings = short_limits(config)
    if not warnings:
        return [Finding("limits", True, "longer than the longest turn")]
    return [Finding("limit", True, warning, fault="short", warns=True) for warning in warnings]


def _left_behind(config: Config) -> list[Finding]:
    """What runs have left at their providers, which is looked for now, and ended."""
    found: list[Finding] = []
    for run in DirectoryStore(config.run.directory).runs():
        if not (former := left_behind(run.path)):
            continue
        try:
            left = asyncio.run(end_left_behind(run.path))
        except (ConfigError, ProviderUnavailable) as error:
            left = {name: f"{words} ({error})" for name, words in former.items()}
        for name, hint in former.items():
            told = left.get(name, "nothing is left any more")
            found.append(Finding(f"{run.name}: {name}", name not in left, told, hint, "left"))
    return found


def _rewards(config: Config) -> list[Finding]:
    """The app on Modal that rewards run on, where they do: whether it is there, lets us in, and fits."""
    fault = rewards_fault(config)
    if fault is None:
        return []
    return [Finding("modal: the app of rewards", not fault, fault or "deployed, of this version", fault="unusable")]


def _python() -> Finding:
    version = platform.python_version()
    return Finding("python", sys.version_info >= (3, 11), version, "Elastic needs Python 3.11 or later", "too old")


def _packages() -> list[Finding]:
    return [_package(name) for name in PACKAGES]


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", "pip install -e '.[train]' in a clone of elastic")


def _device() -> list[Finding]:
    try:
        import torch
    except ImportError:
        return [Finding("device", False, "unknown", "install torch first")]
    if torch.cuda.is_available():
        return [Finding("device", True, f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}")]
    return [Finding("device", True, "CPU only: examples run, paced")]


def _cores() -> Finding:
    memory_gb = psutil.virtual_memory().available / 1e9
    found = f"{cores()} cores, {memory_gb:.1f} GB memory free"
    return Finding("machine", memory_gb >= 3, found, "the example run needs about 3 GB", "low")


def _room() -> Finding:
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    found = f"{free_gb:.1f} GB free here"
    return Finding("disk", free_gb >= ROOM_GB_MIN, found, f"runs need {ROOM_GB_MIN:g} GB", "low")


def _entry_points() -> list[Finding]:
    return [
        *(
            Finding(group, bool(names := sorted(installed(group))), ", ".join(names) or "none", "reinstall elastic-rl")
            for group in GROUPS
        ),
        *(
            Finding(group, True, words, fault="unused", warns=True)
            for group in ALL_GROUPS
            for words in passed_over(group)
        ),
    ]


def _of_others() -> list[importlib.metadata.EntryPoint]:
    return [point for group in ALL_GROUPS for point in installed(group).values() if not is_ours(point)]


def _loads(point: importlib.metadata.EntryPoint) -> list[Finding]:
    try:
        load_point(point)
    except CodeUnusable as error:
        return [Finding(point.group, False, str(error), f"mend {package_of(point)}, or uninstall it", "broken")]
    return []
