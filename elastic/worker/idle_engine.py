"""The engine of a trainer whose devices do not generate: it takes no turn, and says so."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from elastic.config import EngineConfig, validate
from elastic.core.types import Account, Capabilities, Nanoseconds, WeightMode
from elastic.engine.base import ChunkSink, EngineStatistics, GenerateRequest
from elastic.protocol import wire
from elastic.system.host import here
from elastic.system.parking import Switch
from elastic.weights.source import PullReport, RelaySource, WeightsSource


class IdleEngine:
    """`elastic.engine.base.RolloutEngine`, without weights and without credit. It is `Parkable`."""

    def __init__(self, max_context_tokens: int, device: str) -> None:
        self.capabilities = Capabilities(
            engine="none", replayable_sampling=False, max_context_tokens=max_context_tokens, device=device
        )
        self._lock = Lock()
        self._accounts: dict[Account, Nanoseconds] = {}
        self._idle = Account.LOADING
        self._asleep = False
        self._version: int | None = None
        self._since_ns = here().monotonic_ns()

    def start(self, sink: ChunkSink) -> None:
        """Nothing ever comes out of it."""

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        raise RuntimeError("the trainer's devices do not generate")

    def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing runs."""

    def prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        raise RuntimeError("the trainer's devices do not generate")

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        self._version = source.version
        return 0.0

    def audit(self) -> bool:
        return True

    def sleep(self) -> None:
        self._turn(asleep=True)

    def wake(self) -> None:
        self._turn(asleep=False)

    def set_idle_account(self, account: Account) -> None:
        with self._lock:
            self._meter()
            self._idle = account

    def statistics(self) -> EngineStatistics:
        with self._lock:
            self._meter()
            accounts: Mapping[Account, Nanoseconds] = dict(self._accounts)
        return EngineStatistics(
            pending=0,
            executing=0,
            capacity_turns=0,
            kv_blocks_used=0,
            kv_blocks_total=1,
            prefix_hit_tokens=0,
            prompt_tokens=0,
            decoded_tokens=0,
            progress=0,
            accounts_ns=accounts,
            weights_version=self._version,
            asleep=self._asleep,
        )

    def close(self) -> None:
        """Nothing is held."""

    def park(self) -> Switch:
        return Switch(0.0, 0)

    def resume(self) -> Switch:
        return Switch(0.0, 0)

    def _turn(self, *, asleep: bool) -> None:
        with self._lock:
            self._meter()
            self._asleep = asleep

    def _meter(self) -> None:
        now_ns = here().monotonic_ns()
        account = Account.ASLEEP if self._asleep else self._idle
        self._accounts[account] = self._accounts.get(account, 0) + now_ns - self._since_ns
        self._since_ns = now_ns


def idle_engine(welcome: wire.Welcome) -> IdleEngine:
    """In the place of the engine that the orchestrator asks for (`elastic.worker.agent.build_engine`)."""
    settings: Any = validate(EngineConfig, welcome.engine, "the orchestrator's welcome")
    return IdleEngine(settings.max_context_tokens, settings.device)
