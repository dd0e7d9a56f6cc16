"""What bad links between a run and its workers cost: tokens lost, tokens twice, and how soon open turns go on.

A real orchestrator listens beyond loopback, so that its workers speak TLS, and drives embedded engines (the examples'
model, untrained, paced): two workers behind a proxy that is the link, one before it. Weights come over HTTPS.

- `lan`: 0.2 ms each way, `wan_50ms`: 25 ms each way and 100 Mbit/s. Every connection is reset now and then.
- `stalls`: nothing passes for 1.5 s now and then, which nobody is told.
- `cut_10s`: nothing passes for 10 s, which nobody is told.

`recovered_s` is the time until every turn that was open behind the link has its next token: from the reset or the cut,
for stalls from the link's return. `first_token_s` is the median over turns behind the link, from their dispatch.
`tokens_lost` and `duplicated` are judged by replaying the journal. Processes share this machine's processors: when
they are busy, times hold the machine's own delays, too.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from benchmarks._common import Arguments, Figures, Measured, benchmark
from benchmarks._configurations import endless
from benchmarks._live import Capacity, LiveRun, live_run, replay, reserved
from benchmarks._paced import LimitedSettings, LimitedTask
from benchmarks._shapes import write_policy
from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import NS_PER_S, TurnId
from elastic.protocol.sockets import listening_socket
from elastic.runtime.journal import RunDirectory
from providers.base import ProviderContext, ProviderSettings
from providers.reserved import ReservedProvider
from tests.bad_link import BadLink, LinkQuality
from tests.proof import check_tokens

FAR_WORKERS, NEAR_WORKERS = 2, 1
READY_TIMEOUT_S, RECOVERY_TIMEOUT_S = 240.0, 60.0
STALL_S, CUT_S, CALM_S = 1.5, 10.0, 2.0
POLL_S = 0.01
TURNS = 16
"""At once, which is what one worker has room for."""


class FarProvider(ReservedProvider):
    """Workers on this machine that dial as if they were on another."""

    on_this_machine: ClassVar[bool] = False

    def __init__(self, name: str, settings: ProviderSettings, context: ProviderContext) -> None:
        endpoint = msgspec.structs.replace(context.endpoint, local=context.endpoint.address)
        super().__init__(name, settings, msgspec.structs.replace(context, endpoint=endpoint))


@dataclass(frozen=True)
class LinkCase:
    quality: LinkQuality
    disturb: Callable[[BadLink], Any]
    returns_after_s: float = 0.0
    """From the loss to the link's return …"""
    from_return: bool = False
    """… from which recovery counts."""


async def _stall(link: BadLink, seconds: float) -> None:
    link.cut()
    await asyncio.sleep(seconds)
    link.mend()


async def _reset(link: BadLink) -> None:
    link.reset()


LINKS = {
    "lan": LinkCase(LinkQuality(delay_s=0.0002), _reset),
    "wan_50ms": LinkCase(LinkQuality(delay_s=0.025, bytes_per_s=12.5e6), _reset),
    "stalls": LinkCase(LinkQuality(delay_s=0.0002), lambda link: _stall(link, STALL_S), STALL_S, from_return=True),
    "cut_10s": LinkCase(LinkQuality(delay_s=0.0002), lambda link: _stall(link, CUT_S), CUT_S),
}


def free_port() -> int:
    with listening_socket("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def behind(run: LiveRun) -> dict[TurnId, int]:
    """The turns that run behind the link, and how many tokens of each have been accepted."""
    live = run.orchestrator.scheduler.turns.live
    return {turn: live[turn].accepted for worker in run.ready("far") for turn in worker.turns if turn in live}


async def recovery_s(run: LiveRun, link: BadLink, case: LinkCase) -> float:
    """Disturb the link under load; how long it took until each turn that was open behind it had its next token."""

    seen: dict[TurnId, int] = {}

    def at_work() -> bool:
        """Whether turns have grown behind the link: those that have moved there bring tokens along."""
        grown = sum(had > seen.setdefault(turn, had) for turn, had in behind(run).items())
        return len(run.ready("far")) == FAR_WORKERS and grown >= FAR_WORKERS

    await run.until("turns under way behind the link", at_work, READY_TIMEOUT_S)
    live, loop = run.orchestrator.scheduler.turns.live, asyncio.get_running_loop()
    waiting, lost_s = behind(run), loop.time()
    last_s = lost_s
    disturbance = asyncio.create_task(case.disturb(link))
    while waiting:
        if loop.time() - lost_s > RECOVERY_TIMEOUT_S:
            raise TimeoutError(f"{len(waiting)} turns had no next token within {RECOVERY_TIMEOUT_S:g} s")
        await asyncio.sleep(POLL_S)
        going = {turn: had for turn, had in waiting.items() if turn in live and live[turn].accepted <= had}
        last_s = loop.time() if len(going) < len(waiting) else last_s
        waiting = going
    await disturbance
    return max(0.0, last_s - lost_s - (case.returns_after_s if case.from_return else 0.0))


def first_token_s(config: Config, run_dir: Path, run: LiveRun) -> float | None:
    """From dispatch to the first accepted token, the median over attempts behind the link."""
    far: set[str] = set()
    begun: dict[TurnId, int] = {}
    took_s: list[float] = []
    for t_ns, event, commands in replay(config, run_dir, run.orchestrator.scheduler):
        if isinstance(event, e.LeaseGranted) and event.lease.startswith("far"):
            far.update(event.workers)
        for command in commands:
            if isinstance(command, c.StartTurn):
                begun.pop(command.turn, None)
                if command.worker in far:
                    begun[command.turn] = t_ns
            elif isinstance(command, c.AcceptTokens) and isinstance(event, e.TokensReceived):
                heard = (begun.pop(turn, None) for turn in command.turns)
                took_s += [(t_ns - since_ns) / NS_PER_S for since_ns in heard if since_ns is not None]
    return statistics.median(took_s) if took_s else None


async def measure(policy: Path, directory: Path, name: str, times: int) -> Figures:
    case, run_dir, port = LINKS[name], directory / name, free_port()
    link = BadLink(f"127.0.0.1:{port}", case.quality)
    listen = {"host": "0.0.0.0", "port": port, "advertise": await link.start()}
    config = endless(policy=policy, turns=TURNS, run=listen)
    providers: dict[str, Capacity] = {
        "far": (FarProvider, ProviderSettings.model_validate({"max_workers": FAR_WORKERS})),
        "near": reserved(NEAR_WORKERS),
    }
    places = asyncio.Semaphore(TURNS)
    task = LimitedSettings(prompts={"a": 24}, turns=4, observations={"a": 4}, places=places)
    recovered_s: list[float] = []
    try:
        async with live_run(config, run_dir, providers, LimitedTask, task) as run:
            for _ in range(times):
                await asyncio.sleep(CALM_S)
                recovered_s.append(await recovery_s(run, link, case))
    finally:
        await link.aclose()
    lost, duplicated = check_tokens(RunDirectory(run_dir))
    return {
        "tokens_lost": lost,
        "duplicated": duplicated,
        "recovered_s_p50": statistics.median(recovered_s),
        "recovered_s_max": max(recovered_s),
        "first_token_s": first_token_s(config, run_dir, run),
        "disturbances": times,
    }


async def measure_all(times: Mapping[str, int], directory: Path) -> Figures:
    policy = write_policy(directory / "policy")
    figures = {link: await measure(policy, directory, link, count) for link, count in times.items() if count}
    return {link: figures.get(link) for link in LINKS}


def main(arguments: Arguments) -> Measured:
    times = {"lan": 1, "cut_10s": 1} if arguments.quick else dict.fromkeys(LINKS, 10)
    return measure_all(times, arguments.scratch)


if __name__ == "__main__":
    benchmark(__doc__, main)
