"""What it takes until a directory of weights is served that a trainer elsewhere has written, and what it is made of."""

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file

from benchmarks._common import Figures
from benchmarks._served import DoorsRun, client, step_on
from benchmarks._shapes import write_chat_policy
from elastic.engine.model.stored import stored_tensors
from elastic.runtime.journal import PullRow, RunDirectory
from elastic.weights.publisher import Publisher
from elastic.weights.relay import open_relay
from elastic.worker.trainer.imported.forms import read_tensors

CHANGED = 0.013
"""The share of weights that an AdamW step at 1e-6 changes in bfloat16."""
OFFERS = 4
"""The first of which is not counted: workers load their first weights meanwhile."""
TIMEOUT_S = 300.0
SETTINGS = ("engine.kv_blocks=64", "engine.max_context_tokens=256")


def measured_update(directory: Path, memory: Path) -> Figures:
    """`memory` is a directory in memory, as relays of runs are."""
    base = write_chat_policy(directory / "large", "61m")
    with DoorsRun(directory, *SETTINGS, policy=base) as run:
        run.until("a turn", lambda: _answers(run), TIMEOUT_S)
        offered = [_written(run, number, base) for number in range(1, OFFERS + 1)]
        answered_s, pulled = list[float](), list[int]()
        for version, path in enumerate(offered, 1):
            answered_s.append(_answered_s(run, path))
            pulled.append(run.until("its pull", lambda version=version: _pulled_bytes(run, version)))
    alone = _alone_s([base, *offered], memory)
    size = sum(path.stat().st_size for path in offered[-1].iterdir())
    read_s, publish_s = (median(part[1:]) for part in zip(*alone, strict=True))
    return {
        "directory_bytes": size,
        "read_s": read_s,
        "publish_s": publish_s,
        "answered_s": median(answered_s[1:]),
        "ratio": median(answered_s[1:]) / (read_s + publish_s),
        "wire_share": pulled[-1] / size,
    }


def _answers(run: DoorsRun) -> bool:
    with client(run) as http:
        return http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).status_code == 200


def _written(run: DoorsRun, number: int, base: Path) -> Path:
    """The directory of this step, which goes on from the one before."""
    before = base if number == 1 else run.root / f"step_{number - 1}"
    directory = run.root / f"step_{number}"
    directory.mkdir()
    save_file(step_on(load_file(before / "model.safetensors"), number, CHANGED), directory / "model.safetensors")
    return directory


def _answered_s(run: DoorsRun, directory: Path) -> float:
    with client(run) as http:
        began_s = time.monotonic()
        answer = http.post("/update_weights", json={"weight_dir": str(directory)}, timeout=TIMEOUT_S)
        took_s = time.monotonic() - began_s
    if answer.status_code != 200:
        raise RuntimeError(f"{directory.name}: {answer.text}")
    return took_s


def _pulled_bytes(run: DoorsRun, version: int) -> int | None:
    with RunDirectory(run.run_dir).newest_journal() as journal:
        found = [row.bytes for row in journal.rows(PullRow) if row.version == version and not row.error]
    return max(found, default=None)


def _alone_s(directories: list[Path], memory: Path) -> list[tuple[float, float]]:
    """Of each directory but the first, how long its files take to be read, and its version to be published, in this
    process alone."""
    publisher = Publisher(open_relay(str(memory / "relay")), "alone", {})
    publisher.publish(0, _read(directories[0]))
    times: list[tuple[float, float]] = []
    for version, directory in enumerate(directories[1:], 1):
        began_s = time.monotonic()
        tensors = _read(directory)
        read_s = time.monotonic() - began_s
        publisher.publish(version, tensors)
        times.append((read_s, time.monotonic() - began_s - read_s))
    return times


def _read(directory: Path) -> Mapping[str, torch.Tensor]:
    return read_tensors(stored_tensors(directory))
