import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes depends on what else the machine does; pytest's timeout bounds the whole test.
settings.register_profile("elastic", deadline=None, max_examples=25)
settings.load_profile("elastic")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy as small as can be, on disk. Most tests need no torch, so it is imported here."""
    import torch

    from elastic.model.checkpoint import model_tensors, write_checkpoint
    from elastic.model.config import Qwen3Config
    from elastic.model.qwen3 import Qwen3

    tiny = Qwen3Config(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    directory = tmp_path_factory.mktemp("base") / "checkpoint"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_checkpoint(directory, tiny, model_tensors(Qwen3(tiny)))
    return directory


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    options = ("-t", "tmpfs", "-o", "size=512k", "elastic-test")
    if mount is None or subprocess.run([mount, *options, path], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)
