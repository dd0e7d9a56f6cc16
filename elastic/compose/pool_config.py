"""A pool's configuration: one TOML file, validated, with errors that name the key and what is allowed."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from elastic.compose.named_policies import AUTO, NO_POLICY, named_policy, refuse_settings
from elastic.compose.nanoseconds import in_nanoseconds
from elastic.config import (
    ConfigError,
    GivenPath,
    JobNeeds,
    JobPlanConfig,
    read_sections,
    validate,
)
from elastic.core.cluster.policy import ClusterPolicies
from elastic.core.cluster.types import (
    ClusterError,
    JobRequest,
    KindName,
    NodeKind,
    PhaseKind,
    PhasePlan,
    PoolSpec,
    WaitLimits,
)
from elastic.core.decisions import OF_POOLS
from elastic.pool.machines import SITE, JoinRules
from elastic.protocol.endpoint import Address, is_wildcard
from elastic.system.devices import DeviceName, devices_here, machine_gpus
from elastic.system.files import write_whole
from elastic.system.interfaces import interface_address
from policies.clusters import PLACED_ANEW, TAILS
from policies.drift import NoDrift
from policies.tails import NoTails
from providers.markets import SpotMarket, SpotSettings, SpotTraceSettings
from providers.ray_nodes import RayNodesSettings

GB = 1_000_000_000
NS_PER_S = 1_000_000_000
POOL_CONFIG = "pool.json"
"""The file with the resolved configuration. A directory with this file is a pool's directory."""

_WAITS = WaitLimits()


class _PoolPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class PoolPolicyConfig(_PoolPart):
    """The policy that makes one of a pool's decisions, by the name under which it is installed (`elastic.policies`)."""

    policy: str = Field(
        AUTO,
        description="a policy that is installed; `auto`: the one that goes with `pool.policy`; `none`, of tails and "
        "drift: nothing moves",
    )
    settings: dict[str, Any] = Field({}, description="the policy's own keys")


_AS_PLACED = PoolPolicyConfig()  # type: ignore[call-arg]
_NOBODY: Mapping[str, Any] = {"tail": NoTails(), "drift": NoDrift()}


def cluster_policies(
    name: str, sections: Mapping[str, PoolPolicyConfig] | None = None, where: str = "the pool's configuration"
) -> ClusterPolicies:
    """Return the policies of a pool: the placement of this name with what goes with it, except where `sections`, by
    decision, name another policy or settings. Raises `ConfigError` for what is not installed, and for settings that a
    policy does not have."""
    chosen = sections or {}
    return ClusterPolicies(
        **{decision: _decided(decision, name, chosen.get(decision, _AS_PLACED), where) for decision in OF_POOLS}
    )


def _decided(decision: str, placement: str, section: PoolPolicyConfig, where: str) -> Any:
    name, own, key = section.policy, {}, (decision, "policy")
    if name == AUTO:
        name, own = _beside(decision, placement)
        key = ("pool", "policy") if decision == "placement" else key
    if name == NO_POLICY and decision in _NOBODY:
        refuse_settings(section.settings, where, decision)
        return _NOBODY[decision]
    words = (AUTO, NO_POLICY) if decision in _NOBODY else () if key[0] == "pool" else (AUTO,)
    settings = {**own, **section.settings}
    return named_policy(
        decision, name, settings, where=where, key=key, settings_key=(decision, "settings"), others=words
    )


def _beside(decision: str, placement: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the settings of the policy that goes with a placement."""
    match decision:
        case "placement":
            return placement, {}
        case "tail":
            return ("long", TAILS[placement]) if placement in TAILS else (NO_POLICY, {})
        case "drift":
            return ("slo_at_stake" if placement in PLACED_ANEW else NO_POLICY), {}
        case _:
            return "idle_as_alone", {}


M = TypeVar("M", bound=BaseModel)


def one_or_several(kind: type[M]) -> BeforeValidator:
    """Return what lets a section stand for a list of one."""

    def several(found: Any) -> Any:
        if isinstance(found, Mapping):
            return (kind.model_validate_json(json.dumps(found), strict=True),)
        if isinstance(found, list):
            kinds: Any = GenericAlias(tuple, (kind, ...))
            return TypeAdapter(kinds).validate_json(json.dumps(found), strict=True)
        return found

    return BeforeValidator(several)


class PoolNodesConfig(_PoolPart):
    """Nodes of one kind. A GPU's price has no default, since bills depend on it."""

    name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,39})?$",
        description="what its nodes are called, with a number; else `rollout` or `train`. Kinds have different names",
    )
    site: str = Field(
        "",
        pattern=SITE,
        description="where its nodes are. A group's training nodes are of one kind, at one site",
    )
    nodes: int = Field(ge=1, le=4096, description="how many there are; with `spot`, at most")
    gpus: int = Field(1, ge=1, le=1024, description="GPUs of each node")
    usd_per_gpu_hour: float = Field(ge=0, le=1e6, description="what a GPU costs")
    memory_gb: float = Field(ge=0, le=1e6, description="host memory of a node that jobs' states may take")
    kind: Literal["local", "joined", "ray"] = Field(
        "local",
        description="`joined`: other machines, at most `nodes`, which join by `elastic pool join`; `ray`: machines of "
        "a Ray cluster, at most `nodes`, which the pool asks for and gives back",
    )
    ray: RayNodesSettings | None = Field(None, description="the Ray cluster of kind `ray`, and what is asked of it")

    @model_validator(mode="after")
    def _asked_of_a_cluster(self) -> Self:
        if (self.ray is None) == (self.kind == "ray"):
            found = "no table" if self.ray is None else "a table"
            raise ValueError(f"kind {self.kind!r}: found {found} `ray`; allowed: one with kind 'ray' alone")
        return self

    def node_kind(self, phase: PhaseKind) -> NodeKind:
        return NodeKind(
            name=self.name or phase.value,
            site=self.site,
            nodes=self.nodes,
            gpus=self.gpus,
            memory_bytes=round(self.memory_gb * GB),
            nano_usd_per_hour=round(self.gpus * self.usd_per_gpu_hour * 1e9),
        )


class PoolRolloutConfig(PoolNodesConfig):
    """Nodes for rollouts. With `spot` they are instances of a spot market, at most `nodes` at a time."""

    spot: SpotTraceSettings | None = Field(None, description="the market whose instances these nodes are")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.spot is not None and self.kind != "local":
            raise ValueError(f"kind {self.kind!r} and spot: found both; allowed: one of them")
        return self

    def market(self) -> SpotMarket | None:
        if self.spot is None:
            return None
        settings = {"max_workers": self.nodes, "usd_per_gpu_hour": self.usd_per_gpu_hour, **self.spot.model_dump()}
        return SpotMarket(f"pool.{self.name or 'rollout'}", SpotSettings.model_validate(settings))


class PoolTrainConfig(PoolNodesConfig):
    """Nodes for training."""

    interface: str = Field(
        "",
        pattern=r"^[^\s/:]{0,15}$",
        description="the network interface by which a trainer's ranks on several nodes reach each other, of a private "
        "network; else that by which a node reaches the pool",
    )

    @property
    def trains_across(self) -> bool:
        """Whether a trainer's ranks may be on several machines."""
        return self.kind != "local" and self.nodes > 1


RolloutKinds = Annotated[tuple[PoolRolloutConfig, ...], one_or_several(PoolRolloutConfig), Field(min_length=1)]
TrainKinds = Annotated[tuple[PoolTrainConfig, ...], one_or_several(PoolTrainConfig), Field(min_length=1)]


def pool_spec(rollout: Sequence[PoolNodesConfig], train: Sequence[PoolNodesConfig]) -> PoolSpec:
    """Return the kinds of nodes that these sections name. Raises `ClusterError`, as for two of one name."""
    return PoolSpec(
        rollout=tuple(one.node_kind(PhaseKind.ROLLOUT) for one in rollout),
        train=tuple(one.node_kind(PhaseKind.TRAIN) for one in train),
    )


class PoolSection(_PoolPart):
    name: str = Field(
        "pool", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="what commands and its directory call it"
    )
    directory: GivenPath = Field(Path("pools"), description="where pools keep their journals and logs, each in its own")
    policy: str = Field(
        "ours",
        description="policy that places jobs, with the others that go with it: one that is installed as "
        "placement.NAME; the sections placement, tail, drift and charging name others",
    )
    host: str = Field(
        "127.0.0.1", min_length=1, description="address on which node agents and jobs dial; beyond loopback by TLS"
    )
    port: int = Field(0, ge=0, le=65535, description="0 takes a free one")
    advertise: str = Field(
        "", description="by which name or address other machines reach this one: HOST or HOST:PORT; else `host`"
    )
    devices: Literal["auto", "cuda", "rocm", "cpu", "all"] = Field(
        "auto",
        description="what nodes take on this machine, `gpus` each: NVIDIA's or AMD's GPUs, or `cpu`, where a resident "
        "sees none; `auto` takes GPUs where there are any; with `all` every resident sees all",
    )
    rollout: RolloutKinds = Field(description="one section, or several ([[pool.rollout]]) of kinds that differ")
    train: TrainKinds = Field(description="one section, or several ([[pool.train]]); a job trains on one kind")

    @property
    def interfaces(self) -> Mapping[KindName, str]:
        """The network interfaces of training nodes, by the kinds that name one."""
        return {one.node_kind(PhaseKind.TRAIN).name: one.interface for one in self.train if one.interface}

    @model_validator(mode="after")
    def _of_one_name_each(self) -> "PoolSection":
        pool_spec(self.rollout, self.train)
        return self

    @model_validator(mode="after")
    def _of_one_cluster(self) -> "PoolSection":
        clusters = [one.ray for one in (*self.rollout, *self.train) if one.ray is not None]
        found = sorted({one.address for one in clusters})
        if len(found) > 1:
            raise ValueError(f"ray.address: found {', '.join(found)}; allowed: one Ray cluster for a pool")
        if any(one.runtime_env != clusters[0].runtime_env for one in clusters):
            raise ValueError("ray.runtime_env: found several; allowed: the same for all kinds of a pool's nodes")
        if found and self.devices in ("auto", "all"):
            raise ValueError(
                f"pool.devices: found '{self.devices}'; allowed with kind 'ray', which is asked for them: 'cuda', "
                "'rocm', 'cpu'"
            )
        return self

    @model_validator(mode="after")
    def _reached(self) -> "PoolSection":
        if (
            any(one.kind != "local" for one in (*self.rollout, *self.train))
            and is_wildcard(self.host)
            and not self.advertise
        ):
            raise ValueError(
                f"advertise is missing: nobody can dial pool.host = {self.host}; name the address by which machines "
                "that join reach this one"
            )
        return self

    @field_validator("advertise")
    @classmethod
    def _address(cls, advertise: str) -> str:
        if advertise:
            Address.parse(advertise, 0)
        return advertise


class PoolLimits(_PoolPart):
    """The limits of every wait in a pool."""

    profile_s: float = Field(_WAITS.profile_ns / NS_PER_S, gt=0, description="for a few steps of a job alone, timed")
    queue_s: float = Field(
        _WAITS.queue_ns / NS_PER_S, gt=0, description="for room in the pool; then the job is rejected"
    )
    start_s: float = Field(_WAITS.start_ns / NS_PER_S, gt=0, description="for a job's residents and its process")
    stop_s: float = Field(
        _WAITS.stop_ns / NS_PER_S, gt=0, description="for a job's end of step, beside two of its steps"
    )
    notice_s: float = Field(_WAITS.notice_ns / NS_PER_S, gt=0, description="from a recall to the kill of its residents")
    overrun_share: float = Field(
        _WAITS.overrun_share, ge=0, description="of its planned time that a phase may last longer"
    )
    late_share: float = Field(_WAITS.late_share, ge=0, description="of its planned step that a late job is waited for")
    silence_s: float = Field(10.0, gt=0, description="after which a node agent that says nothing is taken to be gone")
    orphan_s: float = Field(
        120.0, gt=0, description="after which a node agent without its pool ends, and its residents"
    )
    measure_s: float = Field(5.0, gt=0, description="between two measurements of host memory")
    stall_s: float = Field(
        30.0,
        ge=1,
        description="in which a resident that is up says nothing, or three times as long as it has lately been silent "
        "before it went on, at most ten times this; then it hangs, and is killed",
    )
    still_s: float = Field(
        1.5,
        ge=0,
        description="the same of a resident that neither uses a processor nor waits for one meanwhile, or three times "
        "as long as it has lately been still before it went on; 0 for never",
    )
    park_s: float = Field(10.0, gt=0, description="for a resident that was told to park; then it is killed")
    plug_in_s: float = Field(
        10.0, gt=0, description="longest that a policy of another package computes; then it has given no answer"
    )


class PoolConfig(_PoolPart):
    """A whole pool."""

    pool: PoolSection
    placement: PoolPolicyConfig = Field(default_factory=PoolPolicyConfig, description="where jobs are placed")  # type: ignore[arg-type]
    tail: PoolPolicyConfig = Field(default_factory=PoolPolicyConfig, description="when a rollout's tail moves")  # type: ignore[arg-type]
    drift: PoolPolicyConfig = Field(default_factory=PoolPolicyConfig, description="which job is placed anew")  # type: ignore[arg-type]
    charging: PoolPolicyConfig = Field(default_factory=PoolPolicyConfig, description="who pays for a group's time")  # type: ignore[arg-type]
    limits: PoolLimits = Field(default_factory=PoolLimits)  # type: ignore[arg-type]

    @property
    def path(self) -> Path:
        """The pool's own directory."""
        return self.pool.directory / self.pool.name

    def spec(self) -> PoolSpec:
        return pool_spec(self.pool.rollout, self.pool.train)

    @property
    def joins(self) -> Mapping[KindName, JoinRules]:
        """What machines must have that join as nodes, by the kinds whose nodes do; others are this machine's."""
        found = [kind for one, kind in self._sections_of_nodes() if one.kind != "local"]
        devices, interfaces = self.pool.devices, self.pool.interfaces
        return {
            kind.name: JoinRules(kind=kind, devices=devices, interface=interfaces.get(kind.name, "")) for kind in found
        }

    def _sections_of_nodes(self) -> Sequence[tuple[PoolNodesConfig, NodeKind]]:
        """Return the sections of nodes, with the kinds that they name."""
        rollout = [(one, one.node_kind(PhaseKind.ROLLOUT)) for one in self.pool.rollout]
        return [*rollout, *((one, one.node_kind(PhaseKind.TRAIN)) for one in self.pool.train)]

    @property
    def trains_elsewhere(self) -> bool:
        """Whether training nodes may be on other machines."""
        return any(one.kind != "local" for one in self.pool.train)

    @property
    def clusters(self) -> Mapping[KindName, RayNodesSettings]:
        """The Ray clusters of which nodes are asked, by the kinds of those nodes."""
        return {kind.name: one.ray for one, kind in self._sections_of_nodes() if one.ray is not None}

    @property
    def markets(self) -> Mapping[KindName, SpotMarket]:
        """Where nodes come from, by the kinds whose nodes are instances of a market."""
        found = {one.node_kind(PhaseKind.ROLLOUT).name: one.market() for one in self.pool.rollout}
        return {name: market for name, market in found.items() if market is not None}

    def policies(self) -> ClusterPolicies:
        """Return the policies of `pool.policy` and of the sections that name others. Raises `ConfigError`."""
        return cluster_policies(self.pool.policy, self.sections)

    @property
    def policy_names(self) -> str:
        """The names of the policies, with the settings that are given. A pool that goes on has the same."""
        others = [
            f"{decision}.{section.policy} {json.dumps(section.settings, sort_keys=True)}"
            for decision, section in self.sections.items()
            if section != _AS_PLACED
        ]
        return ", ".join([self.pool.policy, *others])

    @property
    def sections(self) -> Mapping[str, PoolPolicyConfig]:
        return {decision: getattr(self, decision) for decision in OF_POOLS}

    def wait_limits(self) -> WaitLimits:
        return in_nanoseconds(WaitLimits, self.limits)


def load_pool(path: Path) -> PoolConfig:
    """Read a POOL.toml or a pool's own `pool.json`. Raises `ConfigError` with one line per problem."""
    config = validate(PoolConfig, read_sections(path), str(path))
    cluster_policies(config.pool.policy, config.sections, str(path))
    return config


def save_pool(config: PoolConfig) -> Path:
    """Create the pool's directory, for its user only, with its configuration; returns it. Raises `ConfigError`."""
    path = config.path
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path / POOL_CONFIG, config.model_dump_json(indent=2).encode())
    except OSError as error:
        raise ConfigError(f"pool.directory: {path} cannot be made ({error.strerror})") from error
    return path


def check_interfaces(config: PoolConfig) -> None:
    """Raises `ConfigError` for a network interface of training nodes on this machine that it does not have."""
    for kind, interface in config.pool.interfaces.items():
        if kind not in config.joins:
            try:
                interface_address(interface)
            except OSError as error:
                raise ConfigError(f"pool.train.interface, of nodes {kind}: {error}") from error


def pool_devices(config: PoolConfig, gpus: Callable[[], Sequence[DeviceName]] = machine_gpus) -> Sequence[DeviceName]:
    """Return the devices of this machine that the pool's nodes take; none where every resident sees all.

    `gpus` lists this machine's. Raises `ConfigError` if there are fewer than the nodes need.
    """
    pool, joins = config.pool, config.joins
    here = [kind for name, kind in config.spec().kinds.items() if name not in joins]
    needed, whose = sum(kind.nodes * kind.gpus for kind in here), ", ".join(kind.name for kind in here)
    if pool.devices == "all":
        return ()
    found = devices_here(pool.devices, needed, gpus)
    if len(found) < needed:
        raise ConfigError(
            f"pool.devices: {pool.devices}: the nodes {whose} need {needed} GPUs; found "
            f'{", ".join(found) or "none"}; allowed: fewer nodes, or "cpu", or "all", where every resident sees all'
        )
    return found


def job_request(
    name: str,
    job: JobNeeds,
    steps: int,
    plan: JobPlanConfig | None,
    train_gpus: int | None = None,
    rollout_gpus: int = 1,
) -> JobRequest:
    """Return the request of a job of this name; without a `plan` a few of its steps are timed first. A live job's
    trainer has so many ranks, and is no faster on more nodes, and its workers take so many GPUs each. Raises
    `ConfigError`."""
    try:
        return JobRequest(
            id=name,
            slo=job.slo,
            plan=None if plan is None else phase_plan(plan),
            steps=steps,
            rollout_nodes=job.rollout_nodes,
            rollout_gpus=rollout_gpus,
            train_nodes=job.train_nodes,
            train_gpus=train_gpus or 1,
            rollout_bytes=round(job.rollout_memory_gb * GB),
            train_bytes=round(job.train_memory_gb * GB),
            train_efficiency=job.train_efficiency if train_gpus is None else 0.0,
            restart_ns=round(job.restart_s * NS_PER_S),
            max_resubmissions=job.max_resubmissions,
        )
    except ClusterError as error:
        raise ConfigError(str(error)) from error


def phase_plan(plan: JobPlanConfig) -> PhasePlan:
    return in_nanoseconds(PhasePlan, plan)
