"""What passes between a serving host and those who borrow from it, and the settings of both."""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

import traces
from elastic.protocol.endpoint import is_loopback
from providers.base import ProviderSettings
from traces.serving import read_serving_trace

HOST_VARIABLE = "ELASTIC_SERVING_HOST"
"""The environment variable with a host's settings as JSON; out of sight of process lists, as there is a token in it."""


class LendOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /lend`: start a worker for this run, which dials `join` with its one-time `token`. Never log it.

    Who answers there has the certificate of this `fingerprint`; without one it is plain TCP, on loopback.
    """

    run: str
    join: str
    worker: str
    token: str
    fingerprint: str = ""


class ReturnOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /return`: end this worker. Nothing happens when the host is not lent to it."""

    worker: str


class ServiceReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a host with a real serving model has served its own load so far, and what rollouts made of the rest.

    Latencies and targets are in milliseconds, None before there is a first. `violated_minutes` is how long a P99 was
    above its target. The device's time is that of the host's loans alone: `lent_s` in all, of which serving computed
    for `serving_s` and rollouts for `rollout_s`. A reclaim runs from serving's need of pages that
    rollouts hold to its having them.
    """

    requests: int
    failed: int
    ttft_slo_ms: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_slo_ms: float
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    violated_minutes: float
    lent_s: float
    serving_s: float
    rollout_s: float
    reclaims: int
    reclaim_p99_ms: float | None

    @property
    def idle_utilisation(self) -> float | None:
        """The rollouts' part of the time that serving left them."""
        idle_s = self.lent_s - self.serving_s
        return self.rollout_s / idle_s if idle_s > 0 else None


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /load`, and the answer to every order: how the host stands.

    `active_requests` counts serving requests in work or waiting, `busy_share` the serving engine's share of the
    device of late, `pressed` whether rollouts must leave. `lent_run` and `lent_worker` are empty when the host is
    not lent; `ended_worker` is the last one that ended, `ended_error` why if it failed. `service` is None where the
    device is modelled.
    """

    active_requests: int
    busy_share: float
    kv_used_share: float
    pressed: bool
    lent_run: str = ""
    lent_worker: str = ""
    ended_worker: str = ""
    ended_error: str = ""
    service: ServiceReport | None = None


SERVICE_NOTE = "co-serving/"
"""What the run's notes of a host's `ServiceReport` are called, before the host's name."""


def _readable(trace: str) -> str:
    read_serving_trace(traces.find(trace))
    return traces.settled(trace)


class _HostSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)


class LoadSettings(_HostSection):
    """A host's own load, replayed from a trace."""

    trace: Annotated[str, AfterValidator(_readable)] = Field(
        "azure-conversation",
        validate_default=True,
        description="a shipped trace's name, or a path",
        json_schema_extra={"format": "path"},
    )
    start_s: float = Field(0.0, ge=0, description="where in the trace to begin")
    speed: float = Field(1.0, gt=0, description="seconds of the trace in a second: arrivals come closer together")
    share: float = Field(0.2, gt=0, le=1, description="the share of all requests that comes to one host")


class DeviceSettings(_HostSection):
    """The modelled device and serving model; the defaults stand for an 8B model on one H100-class GPU."""

    prefill_tokens_per_s: float = Field(12_000, gt=0, description="prompt tokens a second")
    decode_base_s: float = Field(0.010, gt=0, description="time of a decode iteration for no request at all …")
    decode_per_request_s: float = Field(0.0002, ge=0, description="… and what each request adds")
    tpot_s: float = Field(0.05, gt=0, description="time between two tokens that serving keeps to while it can")
    kv_tokens: int = Field(200_000, ge=1, description="tokens of KV cache")


class LendingSettings(_HostSection):
    """When rollouts get how much (ROSE §4.1)."""

    window_s: float = Field(2.0, gt=0, le=30, description="time over which the device's use is averaged")
    credit_interval_s: float = Field(0.5, gt=0, description="time between two changes of credit without pressure")
    kv_high_share: float = Field(0.8, gt=0, le=1, description="KV use of serving from which rollouts must leave …")
    kv_low_share: float = Field(0.6, gt=0, le=1, description="… and to which it must fall before they may return")
    stall_s: float = Field(1.0, gt=0, description="longest an iteration waits for serving before rollouts must leave")
    resume_busy_share: float = Field(0.8, gt=0, le=1, description="use to which serving must fall after a stall")

    @model_validator(mode="after")
    def _ordered(self) -> "LendingSettings":
        if self.kv_low_share > self.kv_high_share:
            raise ValueError("kv_low_share must not exceed kv_high_share")
        return self


class SharingPolicySettings(_HostSection):
    """The policy that makes one of a shared device's decisions, by the name under which it is installed."""

    policy: str = Field(description="a policy that is installed (`elastic.policies`)")
    settings: dict[str, Any] = Field({}, description="the policy's own keys")


class ExecutorSettings(_HostSection):
    """A real serving model on the host's device instead of a modelled one: rollouts share the device by the co-serving
    executor. Then `device` does not count, and of `lending` only `window_s`, `kv_high_share` and `kv_low_share` do."""

    checkpoint: Path | None = Field(
        None, description="directory of the serving model; without one a small random model"
    )
    model_name: str = Field("serving", min_length=1, description="its name at the OpenAI-compatible endpoint")
    max_context_tokens: int = Field(512, ge=2, description="most tokens of a request, its prompt included")
    max_batch: int = Field(32, ge=1, description="most requests that run at once")
    prefill_chunk_tokens: int | None = Field(
        None, ge=1, description="most prompt tokens of serving in one iteration; a whole prompt unless set"
    )
    kv_pages: int = Field(256, ge=1, description="pages of KV cache that serving and rollouts share")
    page_kib: int = Field(128, ge=1, description="on a GPU rounded up to what it can map, 2048")
    ttft_slo_s: float = Field(0.5, gt=0, description="serving's target for the time to the first token …")
    tpot_slo_s: float = Field(0.15, gt=0, description="… and for each token after it")
    rollout_chunk_tokens: int = Field(512, ge=1, description="most prompt tokens of rollouts in one iteration")
    longest_share: float = Field(0.1, gt=0, le=1, description="longest rollout iteration, as a share of ttft_slo_s")
    headroom_share: float = Field(0.2, ge=0, lt=1, description="memory that rollouts leave free above serving's use")
    lease_s: float = Field(10.0, ge=0, description="how long rollout prefix cache is kept unused")
    stall_s: float = Field(2.0, gt=0, description="time without progress after which a turn is routed elsewhere")
    length_scale: float = Field(1 / 16, gt=0, description="by which the trace's prompts and answers are scaled")
    profiles: Path | None = Field(None, description="directory in which cost profiles are kept")
    admission: SharingPolicySettings = Field(
        SharingPolicySettings.model_validate({"policy": "slo"}),
        description="when a rollout iteration may begin: slo: in serving's slack; exclusive: while serving has nothing "
        "to do; none: whenever it can; or another that is installed",
    )
    memory: SharingPolicySettings = Field(
        SharingPolicySettings.model_validate({"policy": "preemptive"}),
        description="how serving and rollouts share KV memory: preemptive: a headroom and one cut under pressure; "
        "fine_grained: what serving lacks, each time; static: a share each; or another that is installed",
    )


class ServedLoad(_HostSection):
    """What hosts serve, how fast, and how much of their devices they lend."""

    load: LoadSettings = Field(default_factory=LoadSettings, description="what the hosts serve")  # type: ignore[arg-type]
    device: DeviceSettings = Field(default_factory=DeviceSettings, description="how fast hosts serve")  # type: ignore[arg-type]
    lending: LendingSettings = Field(default_factory=LendingSettings, description="when lent")  # type: ignore[arg-type]
    executor: ExecutorSettings | None = Field(None, description="a real serving model on the hosts started here")


class HostSettings(ServedLoad):
    """A serving host. It listens on the inherited socket `listen_fd`, else on `address`."""

    token: SecretStr = Field(description="who shows it may order the host about, and ask its model")
    api_key: SecretStr | None = Field(None, description="who shows it may ask the host's model, and nothing else")
    host_names: tuple[str, ...] = Field((), description="names under which clients reach the host, beside addresses")
    name: str = "serving-host"
    phase: int = Field(0, ge=0, description="which share of the requests, counted from 0")
    listen_fd: int | None = None
    address: str = "127.0.0.1"
    port: int = Field(8077, ge=0, le=65_535)
    return_grace_s: float = Field(0.2, ge=0, description="time a worker has to hand over its tokens when it must go")
    return_timeout_s: float = Field(5.0, gt=0)
    orchestrator_timeout_s: float | None = Field(
        None,
        gt=0,
        description="time without an order or a look by a client that shows the token, after which the host ends",
    )

    def to_json(self) -> str:
        """With its secrets, for the host's environment; every other way to print settings hides them."""
        secrets = {"token": self.token.get_secret_value()}
        if self.api_key is not None:
            secrets["api_key"] = self.api_key.get_secret_value()
        return msgspec.json.encode(self.model_dump(mode="json") | secrets).decode()


def _safe(url: str) -> str:
    parsed = urlsplit(url)
    host = parsed.hostname or ""
    if not (host and (parsed.scheme == "https" or (parsed.scheme == "http" and is_loopback(host)))):
        raise ValueError("must begin with https://, or with http:// on this machine: tokens pass here")
    return url


class ServingSettings(ServedLoad, ProviderSettings):
    max_workers: int = Field(2, ge=0, le=10_000, description="most hosts to borrow at once")
    hosts: int = Field(2, ge=0, le=64, description="hosts to start on this machine")
    urls: tuple[Annotated[str, AfterValidator(_safe)], ...] = Field((), description="hosts that are there already")
    token_variable: str = Field(
        "ELASTIC_SERVING_TOKEN",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="environment variable with the token of the hosts at urls",
    )
    poll_s: float = Field(0.5, gt=0, description="time between two looks at a host")
    kv_window_s: float = Field(30.0, gt=0, description="time over which a host's KV use decides which host is borrowed")
    lost_after_s: float = Field(3.0, gt=0, description="silence after which a lent host counts as lost")
