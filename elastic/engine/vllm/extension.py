"""What each of vLLM's workers does besides: pull its weights, put them in force in place, and sample with our noise.

vLLM mixes `Extension` into its worker class, and `collective_rpc` calls its methods on every rank. What takes long and
leaves the model alone runs on a thread beside the model: `begin` starts it, `poll` asks for it.
"""

# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic.engine.base import WeightsMismatch
from elastic.engine.model.stored import misfit
from elastic.engine.vllm.parts import RankParts, parts_of, without_value
from elastic.weights.client import WeightsClient
from elastic.weights.source import PullReport, RelaySource

ADAPTER_NAME, ADAPTER_ID = "policy", 1
"""Rollouts have one adapter; each version takes the place of the one before."""
MEMORY_DIRECTORY = "/dev/shm"
JOBS_AT_ONCE = 2
"""A pull, and an audit, which takes its time."""


class Polled(NamedTuple):
    """A job's progress: whether it is over, its result or error, and the bytes that have come off relays so far."""

    done: bool
    result: Any
    error: Exception | None
    received_bytes: int


def adapter(path: str = ADAPTER_NAME) -> Any:
    """The policy's adapter, as vLLM wants to be asked for it; to be loaded, from the directory `path`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, path, load_inplace=path != ADAPTER_NAME)


class RankWeights:
    """A rank's weights: those held on its host, verified, and the live model's, which are the same or older."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        adapts = worker.vllm_config.lora_config is not None
        self._parts = None if adapts else parts_of(worker.model_runner.get_model())
        """What this rank pulls of each tensor; None for all of it."""
        self._client = WeightsClient(None if self._parts is None else self._parts.shard)
        self._shapes: Mapping[str, Sequence[int]] | None = None
        """The shapes of the tensors of this kind of model, known from the first model that was loaded."""
        self._written: tuple[Mapping[str, Any], RankParts | None] | None = None
        """What was written last, and of which parts it is."""
        self._jobs: dict[int, Future[Any]] = {}
        self._threads = ThreadPoolExecutor(JOBS_AT_ONCE, thread_name_prefix="weights")

    def begin(self, job: int, what: str, *arguments: Any) -> None:
        self._jobs[job] = self._threads.submit(getattr(self, what), *arguments)

    def poll(self, job: int) -> Polled:
        future = self._jobs[job]
        if not future.done():
            return Polled(False, None, None, self._client.received_bytes)
        error = future.exception()
        if isinstance(error, Exception):
            return Polled(True, None, error, self._client.received_bytes)
        return Polled(True, future.result(), None, self._client.received_bytes)

    def forget(self, job: int) -> None:
        """Once all ranks are done with it: each is asked until then."""
        del self._jobs[job]

    def prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        return self._client.stage(source, timeout_s)

    def audit(self) -> bool:
        return self._client.audit()

    def put_in_force(self, source: RelaySource) -> None:
        self._write(self._client.apply(source).tensors, self._parts)

    def put_file_in_force(self, path: str) -> None:
        from safetensors.torch import load_file

        self._write(load_file(path), None)

    def rewrite(self) -> None:
        """Writes the held weights again, into a model whose weights were freed."""
        if self._written is not None:
            self._write(*self._written)

    def state_bytes(self) -> int:
        """Return the bytes of the live parameters."""
        parameters = self._worker.model_runner.get_model().parameters()
        return sum(one.numel() * one.element_size() for one in parameters)

    def read_back(self, path: str) -> None:
        """Writes the live parameters to a file of this rank's own, by vLLM's names, with further tensors where the
        device keeps them packed.
        """
        from safetensors.torch import save_file

        model, own = self._worker.model_runner.get_model(), f"{path}.{getattr(self._worker, 'rank', 0)}"
        save_file({name: p.detach().cpu().contiguous().clone() for name, p in model.named_parameters()}, own)

    def _write(self, tensors: Mapping[str, Any], parts: RankParts | None) -> None:
        """Into the live model, by vLLM's own loaders: they fuse, split and pack as they do when it starts. With `parts`
        the tensors are these.

        Raises `WeightsMismatch`, also for whatever the loaders warn of: a layer that goes on computing with former
        weights is worse than none. From then on the model is as it was only if it has had weights before.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        from elastic.engine.vllm.reload import LoaderWarnings, layers_left_out, make_kernels_anew, pack_again

        shapes = {name: tensor.shape for name, tensor in tensors.items()} if parts is None else parts.shapes
        self._verify(tensors, shapes)
        if self._worker.vllm_config.lora_config is not None:
            self._write_adapter(tensors)
            if any(bool(tensor.any()) for name, tensor in tensors.items() if name.endswith("lora_B.weight")):
                self._shapes = shapes  # One of no effect stands for the base, until there is one that has some.
            return
        runner = self._worker.model_runner
        model = runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        with torch.no_grad(), self._worker.vllm_device(), LoaderWarnings() as warnings:
            make_kernels_anew(model)
            initialize_layerwise_reload(model)
            try:
                loaded = model.load_weights(iter(tensors.items() if parts is None else parts.spread(tensors)))
            except (KeyError, ValueError, AssertionError, RuntimeError) as error:
                raise WeightsMismatch(f"vLLM's {type(model).__name__} does not take them: {error!r}") from error
            finally:
                left_out = layers_left_out(model)
                finalize_layerwise_reload(model, runner.model_config)
            pack_again(left_out.tied)
        if loaded is not None and (missing := sorted(wanted - loaded)):
            raise WeightsMismatch(f"tensors for {missing[0]} are missing" + _and_more(missing))
        if left_out.unloaded:
            raise WeightsMismatch(f"{left_out.unloaded[0]} took no weights" + _and_more(left_out.unloaded))
        if unexpected := warnings.beside(left_out):
            raise WeightsMismatch(f"vLLM's loader warns: {unexpected[0]}" + _and_more(unexpected))
        if parts is not None and not parts.proven:
            if (wanting := without_value(model)) is not None:
                self._client.close()
                self._parts, self._client = None, WeightsClient()
                raise WeightsMismatch(f"{wanting} takes more than this rank's part; the next load is of everything")
            parts.proven = True
        self._shapes = shapes
        self._written = tensors, parts

    def _write_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """As a directory in memory, in the form of PEFT: vLLM reads adapters from disks. Their scale is 1."""
        from safetensors.torch import save_file

        ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith("lora_A.weight")}
        if len(ranks) != 1:
            raise WeightsMismatch(f"an adapter has tensors named ….lora_A.weight of one rank; found: {sorted(ranks)}")
        rank = ranks.pop()
        modules = sorted({name.split(".")[-3] for name in tensors})
        about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
        memory = MEMORY_DIRECTORY if Path(MEMORY_DIRECTORY).is_dir() else None
        with TemporaryDirectory(prefix="elastic-adapter-", dir=memory) as directory:
            save_file(dict(tensors), Path(directory) / "adapter_model.safetensors")
            (Path(directory) / "adapter_config.json").write_text(dumps(about))
            try:
                self._worker.add_lora(adapter(directory))
            except (KeyError, ValueError, AssertionError, RuntimeError) as error:
                raise WeightsMismatch(f"vLLM does not take the adapter: {error!r}") from error

    def _verify(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
        adapts = self._worker.vllm_config.lora_config is not None
        for name, tensor in tensors.items():
            if tensor.dtype is not torch.bfloat16 and (adapts or tensor.dtype is not torch.float32):
                allowed = "bfloat16" if adapts else "bfloat16 or float32"
                raise WeightsMismatch(f"{name}: expected {allowed}, found {tensor.dtype}")
        if self._shapes is not None and (why := misfit(shapes, self._shapes)) is not None:
            raise WeightsMismatch(why)


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


class Extension:
    """Mixed into vLLM's worker; its methods' names are its own."""

    model_runner: Any
    device: torch.device
    vllm_config: Any

    def vllm_device(self) -> torch.device:
        return self.device

    def elastic_prepare(self) -> None:
        from elastic.engine.vllm.sampling import install

        if self.device.type == "cpu" and torch.cpu._is_amx_tile_supported():
            # Linux allows AMX's tiles to processes that ask for them. vLLM's attention does not, and dies by SIGILL.
            torch.cpu._init_amx()
        self.elastic_weights = RankWeights(self)
        install(self.model_runner.sampler)

    def elastic_call(self, what: str, *arguments: Any) -> Any:
        """What this rank's `RankWeights` returns."""
        return getattr(self.elastic_weights, what)(*arguments)
