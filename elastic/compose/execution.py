"""A live run: everything wired to the orchestrator, until it ends."""

import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex

import msgspec
import structlog

from elastic.compose.agents import agents_wiring, make_hosts
from elastic.compose.checked_markets import make_provider
from elastic.compose.checkpoints import discard_checkpoint
from elastic.compose.incarnations import (
    PastIncarnations,
    PreviousIncarnation,
    configured_budget,
    journaled,
    next_incarnation,
    previous_incarnation,
)
from elastic.compose.plan import TRAINER_PROVIDER, RunPlan, read_model_config, resolve
from elastic.compose.relay import weights_relay
from elastic.compose.runs import claimed, load_run_config
from elastic.compose.scheduling import limits, policies, run_plan, short_limits
from elastic.compose.tracking import tracked
from elastic.config import Config
from elastic.core.scheduler import Scheduler
from elastic.core.types import PolicyFault
from elastic.pool.client import PoolClient, PoolUnavailable, membership_here
from elastic.protocol import wire
from elastic.protocol.endpoint import Endpoint, is_wildcard
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.ticket_store import TicketBook
from elastic.protocol.tls import Certificate, TlsError, given_certificate, run_certificate
from elastic.runtime.gateway import GatewayError
from elastic.runtime.journal import INTERRUPTED, RELAY, RUNNING, RunDirectory
from elastic.runtime.left_behind import left_behind, write_down
from elastic.runtime.orchestrator import Orchestrator, Wiring
from elastic.runtime.status import RunStatus
from elastic.system.installed import installed
from elastic.system.machine import raise_descriptor_limit
from elastic.system.supervision import RecordedProcesses, end_left_over, records
from elastic.weights.rights import RelayRights
from functions.base import FunctionError, FunctionPool, Meter
from functions.local import FUNCTIONS, Prices
from providers.base import Provider, ProviderContext, ProviderUnavailable
from providers.pending_workers import PendingWorkers

log = structlog.get_logger(__name__)

CANNOT_BEGIN = (GatewayError, ProviderUnavailable, FunctionError, TlsError)
"""What `execute` raises where something that the run needs is not to be had: nothing of the run has happened then."""
REDIAL_SHARE = 2 / 3
"""Share of the fencing silence after which a worker dials again, early enough to resume its session."""
WORKER_DRAIN_SHARE = 0.8
"""A worker's share of the drain timeout, so that its goodbye arrives in time."""


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    run_dir: Path
    failed: str
    interrupted: bool
    bad_input: bool = False
    """Whether it has failed for what it was given, which has to be mended."""
    stopped: str = ""
    """Why it was stopped before its end; empty where it was not."""
    ended_early: str = ""
    """Why it came to its end before its last step, by its evaluations; empty where it did not."""


async def execute(
    plan: RunPlan,
    run_dir: Path,
    *,
    resume: bool = False,
    observe: Callable[[RunStatus], None] = lambda _: None,
    on_ready: Callable[[Orchestrator], None] = lambda _: None,
    on_agents: Callable[[str], None] = lambda _: None,
) -> RunOutcome:
    """Carry out a run in `run_dir`. `on_ready` gets the orchestrator, to stop it from outside, `on_agents` the base URL
    of agents, if they drive the run.

    Raises what the orchestrator raises when the run cannot begin; every process is gone by then.
    """
    config = plan.config
    for warning in short_limits(config):
        log.warning("short limit", limit=warning)
    raise_descriptor_limit()
    scheduler = Scheduler(run_plan(plan), limits(config), policies(config), 0)
    run = RunDirectory(run_dir)
    async with contextlib.AsyncExitStack() as claims:
        claims.enter_context(claimed(run_dir))
        former = previous_incarnation(run, config) if resume else PreviousIncarnation(told=configured_budget(config))
        past = claims.enter_context(next_incarnation(run, config, scheduler)) if resume else PastIncarnations()
        (run_dir / "logs").mkdir(exist_ok=True)
        await claims.enter_async_context(tracked(config, run_dir))
        notes = notes_of(plan, run_dir) | former.notes_to_keep()
        journal = run.begin_journal(config.journal, notes=notes)
        secrets = RunSecrets.of(run_dir)
        pool = await claims.enter_async_context(_pool(plan))
        with journaled(journal, scheduler) as ending:
            former_names = dict.fromkeys((*past.providers, *left_behind(run_dir)))
            await _end_former(plan, run_dir, [name for name in former_names if name not in plan.providers])
            rights = RelayRights(secrets.relay_owner())
            certificate = _certificate(config, run_dir)
            async with weights_relay(config, run_dir, former.relay, rights, certificate) as relay:
                journal.meta(RELAY, relay.local)
                pending_workers = PendingWorkers(TicketBook(run_dir))
                wiring = Wiring(
                    make_providers=lambda endpoint, now_ns: make_providers(
                        plan,
                        run_dir,
                        endpoint,
                        now_ns,
                        secrets=secrets,
                        note=journal.meta,
                        spent_usd=scheduler.spent_usd,
                        pending_workers=pending_workers,
                        pool=pool,
                        fault=lambda words: orchestrator.faulted(words),
                    ),
                    token_level={one.config.name: one.make for one in plan.environments if not one.driven_outside},
                    make_hosts=make_hosts(plan, run_dir),
                    welcome=_welcome(config, run_dir.name, relay.far, certificate),
                    secrets=secrets,
                    kept=run,
                    discard=partial(discard_checkpoint, run_dir),
                    make_reward_pool=partial(make_reward_pool, plan, run_dir) if plan.reward else None,
                    engines={n: plan.engine(n).model_dump(mode="json") for n in (TRAINER_PROVIDER, *plan.providers)},
                    relays=dict.fromkeys(_on_this_machine(plan, pool), relay.local),
                    relay_rights=relay.rights,
                    resident=plan.in_turns.keys(),
                    certificate=certificate,
                    pending_workers=pending_workers,
                    pool=pool,
                    agents=agents_wiring(plan, run_dir, former.notes, on_agents),
                )
                orchestrator = Orchestrator(
                    config, scheduler, journal, wiring, former.taken_up(), told=former.told, observe=observe
                )
                if pool is not None:
                    pool.turned_away = orchestrator.kill
                on_ready(orchestrator)
                failed = await orchestrator.run()
            ending.conclude(failed, scheduler.stopped)
    return RunOutcome(
        run_dir=run_dir,
        failed=failed,
        interrupted=failed == INTERRUPTED,
        bad_input=orchestrator.bad_input,
        stopped=scheduler.stopped,
        ended_early=scheduler.ended_early,
    )


def make_reward_pool(plan: RunPlan, run_dir: Path, meter: Meter) -> FunctionPool:
    rewards = plan.config.rewards
    own = {"settings": rewards.pool_settings} if rewards.pool_settings else {}
    return installed("elastic.function_pools")[rewards.pool].load()(
        plan.reward,
        concurrency=rewards.concurrency,
        idle_s=rewards.idle_s,
        prices=Prices(rewards.usd_per_s, rewards.usd_per_call, rewards.pacing_s),
        log=run_dir / "logs" / "functions.log",
        meter=meter,
        run=run_dir.name,
        records=records(run_dir),
        pass_env=plan.config.run.pass_env,
        **own,
    )


def make_providers(
    plan: RunPlan,
    run_dir: Path,
    endpoint: Endpoint,
    now_ns: Callable[[], int],
    *,
    secrets: RunSecrets,
    note: Callable[[str, str], None] = lambda key, text: None,
    spent_usd: Callable[[str], float] = lambda provider: 0.0,
    pending_workers: PendingWorkers | None = None,
    pool: PoolClient | None = None,
    fault: Callable[[str], Exception] = PolicyFault,
) -> Mapping[str, Provider]:
    """The trainer's device and every chosen provider, ready to start; `note` keeps what they have to say for the
    run's report, and `spent_usd` is as in `ProviderContext`. `fault` makes the error of what another package's
    provider has done."""
    from providers.pool import JobContext
    from providers.reserved import TrainerProvider

    make_context = ProviderContext if pool is None else partial(JobContext, pool=pool)

    def context(command: Sequence[str]) -> ProviderContext:
        return make_context(
            run=run_dir.name,
            run_dir=run_dir.resolve(),
            endpoint=endpoint,
            worker_command=tuple(command),
            host_command=(*elastic, "serving-host"),
            pass_env=plan.config.run.pass_env,
            now_ns=now_ns,
            note=note,
            spent_usd=spent_usd,
            acquire_timeout_s=plan.config.scheduler.acquire_timeout_s,
            release_timeout_s=plan.config.scheduler.release_timeout_s,
            secret=secrets.host_token,
            pending_workers=pending_workers,
            orchestrator_timeout_s=plan.config.run.orchestrator_timeout_s,
        )

    elastic = (sys.executable, "-m", "elastic.cli")
    trainer = plan.config.trainer
    trainer_command = (*elastic, "worker", "--trainer", str(run_dir.resolve()), "--resume")
    trainer_type = next(iter(plan.in_turns.values()), TrainerProvider)
    providers: dict[str, Provider] = {
        TRAINER_PROVIDER: trainer_type(
            TRAINER_PROVIDER,
            trainer_type.Settings(
                max_workers=1,
                usd_per_gpu_hour=trainer.usd_per_gpu_hour,
                gpus_per_worker=trainer.gpus,
                billing=trainer.billing,
            ),
            context(trainer_command),
        )
    }
    for name, settings in plan.providers.items():
        worker = context((*elastic, "worker"))
        providers[name] = make_provider(plan.provider_types[name], name, settings, worker, fault)
    return providers


@contextlib.asynccontextmanager
async def _pool(plan: RunPlan) -> AsyncIterator[PoolClient | None]:
    """The connection to the pool of which the run is a job; None where nothing is shared.

    Raises `ProviderUnavailable` where the pool is not to be had.
    """
    membership = membership_here() if plan.in_turns else None
    if membership is None:
        yield None
        return
    client = PoolClient(membership)
    try:
        await client.open(plan.config.run.orchestrator_timeout_s)
        yield client
    except PoolUnavailable as error:
        raise ProviderUnavailable(str(error)) from error
    finally:
        await client.aclose()


async def _end_former(plan: RunPlan, run_dir: Path, names: Sequence[str]) -> None:
    """End what the run's earlier incarnations left of its functions, and of providers that it no longer uses.

    What it had in turns ends without it.
    """
    in_turns = resolve(plan.config, names, str(run_dir)).in_turns
    names = [name for name in names if name not in in_turns]
    former = resolve(plan.config, names, str(run_dir))
    secrets, nobody = RunSecrets.of(run_dir), PendingWorkers(TicketBook(run_dir))
    providers = make_providers(
        former, run_dir, Endpoint(""), time.monotonic_ns, secrets=secrets, pending_workers=nobody
    )
    timeout_s = plan.config.scheduler.release_timeout_s
    await end_left_over(RecordedProcesses.found(records(run_dir), run_dir.name, FUNCTIONS), timeout_s)
    for name in names:
        await providers[name].adopt([], lambda _: None)
        write_down(run_dir, {name: await providers[name].aclose()})


async def end_left_behind(run_dir: Path) -> dict[str, str]:
    """End what a run that is over has left at its providers. Returns what is not proven to be gone, by provider.

    Raises `ConfigError` while a process is at the run, and `ProviderUnavailable`.
    """
    with claimed(run_dir):
        names = [name for name in left_behind(run_dir) if name != TRAINER_PROVIDER]
        await _end_former(resolve(load_run_config(run_dir), names, str(run_dir)), run_dir, names)
    return left_behind(run_dir)


def notes_of(plan: RunPlan, run_dir: Path) -> dict[str, str]:
    """The notes that a new journal begins with."""
    return {
        "run": run_dir.name,
        "incarnation": token_hex(8),
        "status": RUNNING,
        "config": plan.config.model_dump_json(),
        "providers": ",".join(plan.providers),
        "seed": str(plan.config.run.seed),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _certificate(config: Config, run_dir: Path) -> Certificate | None:
    """Return the certificate of what the run serves beyond loopback. Raises `TlsError` if a given one is unusable."""
    run = config.run
    if not run.beyond_loopback:
        return None
    if run.certificate is not None and run.certificate_key is not None:
        return given_certificate(run.certificate, run.certificate_key)
    names = (run.advertised_host, run.host, "localhost", "127.0.0.1")
    return run_certificate(run_dir, [name for name in names if name and not is_wildcard(name)])


def _on_this_machine(plan: RunPlan, pool: PoolClient | None) -> list[str]:
    """The providers whose workers can read the run's files."""
    trainer = () if pool is not None and pool.welcome.trains_elsewhere else (TRAINER_PROVIDER,)
    return [*trainer, *(name for name, kind in plan.provider_types.items() if kind.on_this_machine)]


def _welcome(config: Config, run: str, relay: str, certificate: Certificate | None) -> wire.Welcome:
    s = config.scheduler
    return wire.Welcome(
        session_key="",
        epoch=0,
        heartbeat_interval_s=s.heartbeat_interval_s,
        flush_interval_s=s.flush_interval_s,
        silence_timeout_s=s.heartbeat_timeout_s * REDIAL_SHARE,
        engine=config.engine.model_dump(mode="json"),
        model=read_model_config(config),
        relay=relay,
        resume_timeout_s=config.resume_timeout_s,
        orchestrator_timeout_s=config.run.orchestrator_timeout_s,
        pull_timeout_s=config.weights.pull_timeout_s,
        load_timeout_s=s.load_timeout_s,
        drain_timeout_s=s.drain_timeout_s * WORKER_DRAIN_SHARE,
        whole_turns=s.collect == "responses",
        run=run,
        relay_anchor=certificate.anchor if certificate else "",
    )
