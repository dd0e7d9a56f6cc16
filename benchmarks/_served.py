"""A run that others train, by `elastic serve-rollouts`, whose processes may be killed, and a trainer that offers it
weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import load_file, save_file

from benchmarks._configurations import written
from benchmarks._crashes import FrontedRun
from benchmarks._runs import sets
from benchmarks._shapes import write_chat_policy
from elastic.protocol.http_clients import sync_client
from elastic.runtime.journal import PUBLISHER, RunDirectory
from elastic.weights.puller import Puller
from elastic.weights.relay import open_relay
from elastic.weights.signing import Trust

MODEL = "tiny"
ADAPTER_RANK = 8
WAIT_S = 120.0


class DoorsRun(FrontedRun):
    """A run below `directory` with so many dedicated workers, which is offered weights below `directory/weights`."""

    def __init__(
        self,
        directory: Path,
        *settings: str,
        workers: int = 1,
        policy: Path | None = None,
        options: Sequence[str] = (),
        kind: str = "served",
    ) -> None:
        self.base = policy or write_chat_policy(directory / MODEL)
        self.root = directory / "weights"
        self.root.mkdir()
        sections: dict[str, Any] = {"providers": {"reserved": {"max_workers": workers}}}
        if kind == "adapted":
            sections["engine"] = {
                "vllm": {"base": str(self.base), "adapter_rank": ADAPTER_RANK, "start_timeout_s": 600.0}
            }
        config = written(directory / "served.toml", kind, policy=self.base, **sections)
        arguments = [str(config), "--providers", "reserved", "--weights-root", str(self.root), *options]
        super().__init__(directory / "runs", [*arguments, *sets(settings)])

    def start(self, *arguments: str) -> None:
        first = arguments[0] == "run" and "--resume" not in arguments
        super().start(*(("serve-rollouts", *arguments[1:]) if first else arguments))

    def control_key(self) -> str:
        return self.secrets.control_key()

    def importers(self) -> list[int]:
        """The ids of its importer's processes."""
        return self.recorded("trainer-*.json")

    def pulled(self, version: int) -> dict[str, torch.Tensor]:
        """The version's tensors, as workers pull them."""
        with RunDirectory(self.run_dir).newest_journal() as journal:
            key = journal.meta()[PUBLISHER]
        return Puller(open_relay(str(self.run_dir / "weights")), Trust(self.run_dir.name, key)).pull(version, WAIT_S)


def write_version(run: DoorsRun, version: int, share: float = 1.0) -> Path:
    """A directory as a trainer writes it after a step: of the base's weights this share has changed, scattered over all
    tensors."""
    directory = run.root / f"step_{version}"
    directory.mkdir()
    save_file(stepped(run.base, version, share), directory / "model.safetensors")
    return directory


def write_adapter(run: DoorsRun, version: int) -> Path:
    """A directory of a LoRA adapter as peft writes it, of the rank and the scale that it is served with."""
    directory = run.root / f"lora_{version}"
    directory.mkdir()
    noise = torch.Generator().manual_seed(version)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(run.base / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            at, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", tensor.shape
            for part, shape in (("A", (ADAPTER_RANK, columns)), ("B", (rows, ADAPTER_RANK))):
                tensors[f"{at}.lora_{part}.weight"] = (0.1 * torch.randn(shape, generator=noise)).bfloat16()
    save_file(tensors, directory / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(about))
    return directory


def stepped(base: Path, version: int, share: float = 1.0) -> dict[str, torch.Tensor]:
    """The weights of that directory."""
    return step_on(load_file(base / "model.safetensors"), version, share)


def step_on(tensors: Mapping[str, torch.Tensor], seed: int, share: float) -> dict[str, torch.Tensor]:
    """These weights after a step that changes such a share of them."""
    noise = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        changed = torch.rand(tensor.shape, generator=noise) < share
        step = torch.where(torch.rand(tensor.shape, generator=noise) < 0.5, -1.0, 1.0) * 2.0**-7
        weights[name] = torch.where(changed, (tensor.float() * (1 + step)).to(tensor.dtype), tensor)
    return weights


def client(run: DoorsRun) -> httpx.Client:
    headers = {"authorization": f"Bearer {run.control_key()}"}
    return sync_client(run.url(), by_proxy=False, base_url=run.url(), headers=headers, timeout=WAIT_S)


def alive(pids: Sequence[int]) -> bool:
    return any(psutil.pid_exists(pid) for pid in pids)
