"""vLLM servers that others start take a run's versions from its relay: vLLM's weight-transfer backend `elastic`.

    vllm serve MODEL --weight-transfer-config '{"backend": "elastic"}'

`init_info` says where the relay is and whose signature counts. `update_info` names a version: with `stage` it is
fetched and verified on a thread, while the server generates; without, it is put in force in place. One that does not
verify, or does not fit, is an error of that call, and what was served goes on.
"""

# pyright: reportMissingImports=false

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch
from prometheus_client import Counter, Gauge
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from elastic.engine.vllm.extension import RankWeights
from elastic.weights.source import PullReport, RelaySource

TOKEN_VARIABLE = "ELASTIC_RELAY_TOKEN"
"""The environment's, with the relay's token where that wants one."""
VERSION = Gauge(
    "elastic:weights_version", "Weights version in force; of several ranks the oldest.", multiprocess_mode="livemin"
)
PULLED_BYTES = Counter("elastic:weights_pulled_bytes", "Bytes of weights that were pulled from the relay.")
REFUSED = Counter("elastic:weights_refused", "Versions that did not come, did not verify or did not fit.")
"""Ranks are in processes of their own: vLLM's `/metrics` show these where `PROMETHEUS_MULTIPROC_DIR` is set."""


@dataclass
class RelayInitInfo(WeightTransferInitInfo):
    """`relay` is a directory or URL, `publisher` the trainer's public key in hexadecimal, `relay_anchor` the relay's
    certificate or that of its issuer (PEM)."""

    run: str
    relay: str
    publisher: str
    relay_anchor: str = ""
    timeout_s: float = 600.0


@dataclass
class VersionUpdateInfo(WeightTransferUpdateInfo):
    """The version to serve, or to `stage` alone."""

    version: int
    stage: bool = False


class RelayTransfer(WeightTransferEngine[RelayInitInfo, VersionUpdateInfo]):
    """`vllm.distributed.weight_transfer.base.WeightTransferEngine` of whole models."""

    init_info_cls = RelayInitInfo
    update_info_cls = VersionUpdateInfo
    supports_draft_weight_update: ClassVar = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        if vllm_config.lora_config is not None:
            raise ValueError("weight transfer by 'elastic' takes whole models; start vLLM without --enable-lora")
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="elastic-stage")
        self._weights: RankWeights | None = None
        self._source: RelaySource | None = None
        self._timeout_s = 0.0
        self._staging: tuple[int, Future[PullReport]] | None = None

    def init_transfer_engine(self, init_info: RelayInitInfo) -> None:
        if not init_info.publisher:
            raise ValueError("publisher: found none; allowed: the trainer's public key, in hexadecimal")
        self._source = RelaySource(
            run=init_info.run,
            version=0,
            relay=init_info.relay,
            relay_token=os.environ.get(TOKEN_VARIABLE, ""),
            relay_anchor=init_info.relay_anchor,
            publisher=init_info.publisher,
        )
        self._timeout_s = init_info.timeout_s
        self._staging = None
        self._weights = RankWeights(_RankOfServer(self))

    def start_weight_update(self) -> None:
        """Nothing: what is staged leaves the model alone."""

    def finish_weight_update(self) -> None:
        """Nothing: a version is in force once it was named."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: VersionUpdateInfo) -> None:
        """Raises `WeightsError` and `TimeoutError`, before anything is written, and `WeightsMismatch`."""
        weights, source = self._weights, self._source
        if weights is None or source is None:
            raise ValueError("no relay is known: call /init_weight_transfer_engine first")
        wanted = msgspec.structs.replace(source, version=update_info.version)
        if self._staging is None or self._staging[0] != wanted.version:
            self._staging = wanted.version, self._threads.submit(weights.prefetch, wanted, self._timeout_s)
        if update_info.stage:
            return
        (_, staged), self._staging = self._staging, None
        try:
            report = staged.result(self._timeout_s)
            weights.put_in_force(wanted)
        except Exception:
            REFUSED.inc()
            raise
        PULLED_BYTES.inc(report.size_bytes)
        VERSION.set(wanted.version)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _RankOfServer:
    """What `RankWeights` asks of a worker of vLLM's, of the model that an engine of weight transfer was given."""

    def __init__(self, transfer: RelayTransfer) -> None:
        self._transfer = transfer
        self.model_runner = self
        self.vllm_config = transfer.vllm_config
        self.model_config = transfer.model_config
        self.rank: int = transfer.parallel_config.rank

    def get_model(self) -> torch.nn.Module:
        return self._transfer.model

    def vllm_device(self) -> torch.device:
        return self._transfer.device
