"""A planted fault for vLLM's processes, which import this from their path: adapters but the first are not put in force.

Those of the trainer's own worker are spared, since with them the run would end.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "elastic.engine.vllm.extension"


def _keep_the_first(extension: Any) -> None:
    write = extension.RankWeights._write_adapter

    def written(self: Any, tensors: Any) -> None:
        if not getattr(self, "has_written", False):
            write(self, tensors)
        self.has_written = True

    extension.RankWeights._write_adapter = written


class _FaultyLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _keep_the_first(module)


class _ImportFault(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _FaultyLoader(spec.loader)
        return spec


def _of_a_dedicated_worker() -> bool:
    """Whether this is vLLM's process, started by a worker that does not train."""
    try:
        asked, asks = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ("self", os.getppid()))
    except OSError:
        return False
    return b"elastic.engine.vllm.process" in asked and b"--trainer" not in asks


if _of_a_dedicated_worker():
    sys.meta_path.insert(0, _ImportFault())
