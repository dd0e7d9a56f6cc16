"""The weights of TRL's `AsyncGRPOTrainer` for `elastic serve-rollouts`, by a directory in the place of NCCL.

    AsyncGRPOTrainer(…, weight_transfer=ElasticWeights("https://HOST:8000", "/shared/weights", key=CONTROL_KEY))

Needs torch, safetensors and httpx, and nothing else of Elastic, so that a trainer's environment stays as it is.
"""

import contextlib
import json
import logging
import os
import secrets
import shutil
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

log = logging.getLogger(__name__)

KEY_VARIABLE = "ELASTIC_CONTROL_KEY"
"""Where the control key is looked for that was not given."""
SHARD_BYTES = 4 * 1024**3
CONNECT_TIMEOUT_S = 10.0
RETRY_S = 1.0
RETRY_MAX_S = 10.0
INDEX = "model.safetensors.index.json"
UNREADY = (502, 503, 504)
"""Statuses of a server that is not there yet, or has no place for a call now."""


class ElasticError(RuntimeError):
    """The run does not take the weights, for what the message says."""


class ElasticWeights:
    """Offers each version of the policy's weights to a run, as a directory of safetensors; TRL's
    `WeightTransferProtocol`.

    url: where the run is reached, as TRL's `vllm_server_base_url`. directory: below a root that the run was given as
    `--weights-root`, on a file system that both see. key: the run's control key; without it that of the environment's
    `ELASTIC_CONTROL_KEY`, and none for peers of a `--plain` network. dtype: of the tensors that are written; None for
    the one that the run serves. timeout_s: for one call, with all of its repetitions. authority: the file (PEM) of who
    is trusted to have issued the run's certificate, such as `tls/ca.pem` in its directory; None for the public ones.
    """

    def __init__(
        self,
        url: str,
        directory: str | os.PathLike[str],
        *,
        key: str = "",
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        timeout_s: float = 1800.0,
        authority: str | os.PathLike[str] | None = None,
    ) -> None:
        if shard_bytes < 1 or timeout_s <= 0:
            raise ValueError(f"shard_bytes: found {shard_bytes}, timeout_s: found {timeout_s}; allowed: above 0")
        self._root = Path(directory)
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        self._timeout_s = timeout_s
        self._name = f"trl-{secrets.token_hex(4)}"
        self._version = 0
        shown = key or os.environ.get(KEY_VARIABLE, "")
        self._client = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {shown}"} if shown else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            verify=True if authority is None else ssl.create_default_context(cafile=authority),
        )

    def init_weight_transfer(self) -> None:
        """Wait until the run answers, and find out in which dtype it has its weights. Raises `ElasticError`."""
        self._call("GET", "/health")
        if self._dtype is None:
            found = self._call("GET", "/server_info", params={"config_format": "json"}).json()
            self._dtype = _dtype_of(found["vllm_config"]["model_config"]["dtype"])

    def pause(self) -> None:
        """Have new turns wait. Those that are under way go on. Raises `ElasticError`."""
        self._call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write a directory, and return once every new turn has its weights. It is removed then: the run has its own.

        Raises `ElasticError`, `OSError`.
        """
        self._version += 1
        directory = self._root / f"{self._name}-{self._version:06d}"
        try:
            self._write(directory, iterator)
            self._call("POST", "/update_weights", json={"weight_dir": directory.as_posix()})
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def resume(self) -> None:
        """Let new turns go on. Raises `ElasticError`."""
        self._call("POST", "/resume")

    def destroy(self) -> None:
        """Let go of the run, which goes on serving what it has."""
        self._client.close()

    def _write(self, directory: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write all of a directory, under its name once it is whole."""
        half = directory.with_name(f".{directory.name}")
        half.mkdir(parents=True)
        try:
            _write_shards(half, self._kept(weights), self._shard_bytes)
            half.rename(directory)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise

    def _kept(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies on the CPU: the trainer goes on with its own."""
        for name, tensor in weights:
            dtype = self._dtype if tensor.is_floating_point() else None
            yield name, tensor.detach().to("cpu", dtype, copy=True).contiguous()

    def _call(self, method: str, path: str, **what: Any) -> httpx.Response:
        """Call until it is answered; each call may be made again. Raises `ElasticError`."""
        ends_s, wait_s = time.monotonic() + self._timeout_s, RETRY_S
        while True:
            left_s = ends_s - time.monotonic()
            try:
                limits = httpx.Timeout(max(left_s, RETRY_S), connect=CONNECT_TIMEOUT_S)
                answer = self._client.request(method, path, timeout=limits, **what)
                if answer.is_success:
                    return answer
                said = f"{answer.status_code}: {_message(answer)}"
                final = answer.status_code not in UNREADY
            except httpx.TransportError as error:
                said, final = str(error) or type(error).__name__, False
            if final or left_s <= wait_s:
                raise ElasticError(f"{method} {path} at {self._client.base_url}: {said}")
            log.warning("%s %s is asked again in %g s: %s", method, path, wait_s, said)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)


def _write_shards(directory: Path, weights: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    """One file, or several and their index, each of about as many bytes, of which one at a time is in memory."""
    shard: dict[str, torch.Tensor] = {}
    places: dict[str, int] = {}
    held = total = number = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            save_file(shard, directory / _part(number))
            shard, held, number = {}, 0, number + 1
        shard[name], places[name] = tensor, number
        held, total = held + size, total + size
    save_file(shard, directory / _part(number))
    _name_shards(directory, places, number + 1, total)


def _name_shards(directory: Path, places: Mapping[str, int], shards: int, total_bytes: int) -> None:
    if shards == 1:
        (directory / _part(0)).rename(directory / "model.safetensors")
        return
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    for number, name in enumerate(names):
        (directory / _part(number)).rename(directory / name)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: names[number] for name, number in places.items()},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def _dtype_of(name: str) -> torch.dtype:
    """The dtype of `torch.bfloat16`, or of `bfloat16`. Raises `ElasticError`."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ElasticError(f"the run serves weights of dtype {name!r}, which torch does not know")
    return found


def _message(answer: httpx.Response) -> str:
    """What a refusal says; of others than the run's, the beginning."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(answer.json()["error"]["message"])
    return answer.text[:300]
