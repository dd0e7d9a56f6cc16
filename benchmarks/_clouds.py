"""What a run's journals say of one provider: its workers' time to their first token, what they cost, what is lost."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks._common import Figures
from elastic.compose.incarnations import replay
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import NS_PER_S
from elastic.protocol import wire
from elastic.report import summarise
from elastic.runtime.journal import RunDirectory
from tests.proof import check_tokens

PARTS = ("request", "boot", "join", "pull", "warm")
"""Of the time to a worker's first token: from asking to the grant, to its process's start, to its session with an
engine built, to its weights, to the token."""


def skipped_without_aws() -> str:
    """Why what needs the stand-in for AWS is skipped; empty where it is not."""
    if all(importlib.util.find_spec(name) for name in ("boto3", "moto")):
        return ""
    return "boto3 and moto are not installed here: `make test-clouds` sets up what has them"


class _Starts:
    """Hears a run once more: when each worker's parts were over."""

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self._asked_ns: dict[str, int] = {}
        self._grants: dict[str, int] = {}
        self.parts_ns: dict[str, dict[str, int]] = {}
        self._last_ns: dict[str, int] = {}

    def hear(self, t_ns: int, event: e.Event, _: wire.Tokens | None, commands: Sequence[c.Command]) -> None:
        for command in commands:
            if isinstance(command, c.AcquireLease) and command.provider == self._provider:
                self._asked_ns[command.lease] = t_ns
        match event:
            case e.LeaseGranted() if event.lease in self._asked_ns:
                for worker in event.workers:
                    self.parts_ns[worker] = {"request": t_ns - self._asked_ns[event.lease]}
                    self._grants[worker] = self._last_ns[worker] = t_ns
            case e.WorkerJoined() | e.WeightsApplied() if event.worker in self.parts_ns:
                self._over(event.worker, "join" if isinstance(event, e.WorkerJoined) else "pull", t_ns)
            case e.WorkerReported() if event.worker in self.parts_ns and "boot" not in self.parts_ns[event.worker]:
                self._born(event.worker, t_ns - sum(event.accounts_ns.values()))
            case e.TokensReceived() if event.worker in self.parts_ns and len(event.chunks):
                self._over(event.worker, "warm", t_ns)

    def _over(self, worker: str, part: str, t_ns: int) -> None:
        """The first time counts; before its turn a part is no news."""
        parts = self.parts_ns[worker]
        if part not in parts and PARTS[PARTS.index(part) - 1] in (*parts, "boot"):
            parts[part] = t_ns - self._last_ns[worker]
            self._last_ns[worker] = t_ns

    def _born(self, worker: str, born_ns: int) -> None:
        """Its first report says how old its process is; until it joined, that is the boot and the rest the joining."""
        parts, granted_ns = self.parts_ns[worker], self._grants[worker]
        if "join" in parts:
            parts["boot"] = max(0, min(parts["join"], born_ns - granted_ns))
            parts["join"] -= parts["boot"]


def starts_of(run: RunDirectory, provider: str) -> list[Mapping[str, int]]:
    """The parts, in nanoseconds, of each worker's start, as far as it came."""
    starts = _Starts(provider)
    replay(run, starts.hear)
    return list(starts.parts_ns.values())


def start_figures(starts: Sequence[Mapping[str, int]]) -> Figures:
    """Medians over the workers that came as far."""
    parts_s = {part: [one[part] / NS_PER_S for one in starts if part in one] for part in PARTS}
    boots_s = [(one["boot"] + one["join"]) / NS_PER_S for one in starts if {"boot", "join"} <= one.keys()]
    return {
        "boot_s_p50": median(boots_s) if boots_s else None,
        "first_token_s": {part: median(found) if found else None for part, found in parts_s.items()},
    }


def figures_of(run_dir: Path, provider: str) -> Figures:
    """Of a run that is over. `leases` were granted."""
    run = RunDirectory(run_dir)
    starts = starts_of(run, provider)
    summary = summarise(run)
    usage = summary.providers[provider]
    return {
        "leases": usage.leases,
        "tokens_lost": sum(check_tokens(run)),  # What is generated again was lost, too.
        **start_figures(starts),
        "allocation_overhead": usage.overhead_share,
        "usd": usage.usd,
    }
