"""The contract of a rollout engine: token ids in, token chunks out, weights pulled by itself and swapped in place.

An engine runs on its own thread and never touches an event loop. It calls `sink` from that thread, once an
iteration, with every chunk of that iteration; the agent carries them over. All other methods may be called
from any thread. Source: docs/design.md, `RolloutEngine`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec
from pydantic import BaseModel, ConfigDict

from elastic.config import EngineConfig
from elastic.core.types import Account, Capabilities, FinishReason, SamplingParameters, WeightMode
from elastic.weights.source import PullReport, RelaySource, WeightsSource

BF16_NOISE = 0.05
"""`Capabilities.logprob_noise` of engines that compute in bfloat16, or with other kernels than the trainer's."""
PROOF_TOKENS = 129
"""In the text by which a version is known."""
NO_VERSION = -1
"""The `weights_version` of a chunk without tokens, where no weights have had a part in it."""


def proof_text(vocab_size: int) -> list[int]:
    """The tokens on whose log-probabilities a version is known: the same for all who have the model."""
    return [(2654435761 * (place + 1)) % 2**32 % vocab_size for place in range(PROOF_TOKENS)]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a turn.

    `token_ids` is the prompt followed by the `start` tokens of this turn that are already accepted; generation goes on
    at position `start`. With `recompute` prefill that is not cached has been paid for before, and counts as such.
    """

    request_id: str
    token_ids: list[int]
    start: int
    sampling: SamplingParameters
    recompute: bool = False


class TokenChunk(msgspec.Struct, frozen=True):
    """Tokens of one request from one iteration. The last chunk of a request carries `finish`.

    `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution it was sampled from.
    `cached_tokens` and `prefilled_tokens` are given on a request's first chunk and are zero afterwards.
    A chunk with a finish of ABORTED, STALLED or ERROR may carry no tokens; `detail` then says why.
    """

    request_id: str
    start: int
    token_ids: list[int]
    logprobs: list[float]
    weights_version: int
    finish: FinishReason | None = None
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    detail: str = ""


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent snapshot. `accounts_ns` sums exactly to the engine's age; `progress` counts iterations.

    `waits_to_apply`: new weights are not applied before running turns have ended. `received_bytes` grows with what
    comes off relays, `load_progress` with every piece of weights that is applied. `paced_iterations` are those whose
    time was modelled; `late_iterations` of them took longer than that.
    """

    pending: int
    executing: int
    capacity_turns: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_hit_tokens: int
    prompt_tokens: int
    decoded_tokens: int
    progress: int
    accounts_ns: Mapping[Account, int]
    weights_version: int | None
    asleep: bool
    waits_to_apply: bool = False
    load_progress: int = 0
    received_bytes: int = 0
    paced_iterations: int = 0
    late_iterations: int = 0


ChunkSink = Callable[[Sequence[TokenChunk]], None]


class RolloutEngine(Protocol):
    """What every engine offers. Methods that change its state return once the change is in force.

    Errors: `load_version` raises `WeightsMismatch` when names, shapes or dtypes differ from the model; the
    engine then still serves the version it had. A version that does not verify is never served.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def start(self, sink: ChunkSink) -> None: ...

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start, or queue. A request whose id is still alive joins that one; it is not started twice."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Each request that is still alive ends with a chunk whose finish is ABORTED, holding all it has."""
        ...

    def prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        """Fetch a version and verify it, while turns go on with the one that is served. Blocks the caller.

        An engine of several ranks has each of them pull its own share (`elastic.weights.client.WeightsClient`).
        Raises `WeightsError` for what cannot be had or does not verify, `TimeoutError`, and `WeightsMismatch`.
        """
        ...

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        """Put a version in force, in place: the one prefetched last, or tensors of this process. Blocks the caller.

        `mode` says what becomes of running turns. Returns for how many seconds it wrote copies of its own while turns
        went on. Raises `VersionSuperseded`, with nothing done, where `source` is not what was prefetched last.
        An engine without access to this process's memory need take no `TensorSource`; it raises `TypeError`.
        """
        ...

    def audit(self) -> bool:
        """Whether the verified weights are still what they were; if not, the next `prefetch` replaces them.

        Blocks its thread for as long as that takes at a small share of a core.
        """
        ...

    def sleep(self) -> None:
        """Abort what runs (as `abort`), free the KV cache and generate nothing until `wake`."""
        ...

    def wake(self) -> None: ...

    def set_idle_account(self, account: Account) -> None:
        """Name what the device is doing while the engine has nothing to run (idle, loading, draining, …)."""
        ...

    def statistics(self) -> EngineStatistics: ...

    def close(self) -> None: ...


@runtime_checkable
class Provable(Protocol):
    """An engine that proves which version it serves, where verified weights do not show it: adapters beside a base."""

    @property
    def proof(self) -> Sequence[float]:
        """The log-probabilities that the version in force gives to `proof_text`, from its second token on; computed
        as it was put in force. Empty where there is nothing to show."""
        ...


class EngineSettings(BaseModel):
    """What is an engine's own; each subclasses it. By default there is nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def ranks(self) -> int:
        """Over how many ranks a model is split, each of which pulls its part of the weights."""
        return 1


class DeviceShare(Protocol):
    """A device that a rollout engine borrows from a serving engine, which always goes first.

    An engine that has one asks before each iteration. A device of its own needs none. All methods may be
    called from any thread. Source: ROSE §4.1.
    """

    def capacity_turns(self, most: int) -> int:
        """How many of at most `most` turns rollouts may hold now."""
        ...

    def acquire_iteration(self) -> int:
        """Block while serving holds the device; returns the nanoseconds spent so (they are account SERVING's).

        The wait is bounded. Where serving still holds the device at its end, `hold_back` turns true, and
        nothing may be computed before it is false and the device has been asked for again.
        """
        ...

    def hold_back(self) -> bool:
        """Whether rollouts must leave now: running turns are given up with finish STALLED.

        Raises `RuntimeError` where the device is gone for good.
        """
        ...


class EngineKind(Protocol):
    """What an entry point of the group "elastic.engines" names: a class that any process can import.

    An orchestrator imports it to check settings for workers elsewhere, so what the engine itself needs (torch, vLLM)
    is imported by `create` alone. A kind subclasses it, and need not say again what has a body here.
    """

    Settings: ClassVar[type[EngineSettings]]

    @staticmethod
    def unfit(model_config: Mapping[str, Any]) -> str:
        """Why this kind cannot serve the model of this `config.json`; empty if it can, or if only a start can tell."""
        return ""

    @staticmethod
    def check(model_config: Mapping[str, Any], config: EngineConfig, settings: Any) -> None:
        """Raises `ValueError` for settings that do not go with this model, before a process starts."""
        return

    @staticmethod
    def parks(settings: Any, device: str) -> bool:
        """Whether a pool's job keeps its engines' processes while another job has the device, which is "cpu" or a GPU's
        name."""
        return True

    @staticmethod
    def in_turns(settings: Any) -> Mapping[str, Any]:
        """Return those of its settings that are open, as they are best for a job that shares its devices."""
        return {}

    @staticmethod
    def create(
        model_config: Mapping[str, Any],
        config: EngineConfig,
        settings: Any,
        share: DeviceShare | None = None,
        devices: Sequence[int] = (),
    ) -> RolloutEngine:
        """An engine without weights for the model whose `config.json` this is; `settings` are of `Settings`. Blocks.
        It is on these of this process's `devices`; where none are named, on those that it takes by itself.

        Raises `ValueError`, or a subclass, that names what does not fit, and what would mend it.
        """
        ...


class WeightsMismatch(ValueError):
    """The offered tensors do not fit the model; names the first that does not."""
