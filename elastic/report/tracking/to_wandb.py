"""Weights & Biases: its server, or with `WANDB_MODE=offline` files below the run's directory for `wandb sync`.

Rows go through a process of W&B's, which sends or writes them later. What is there is therefore read anew by each
process of ours, after all of W&B's that an earlier one has left are ended: offline off the files, else as the server
says how far the run has come. Rows that W&B's process still held are written again.
"""
# It is installed beside elastic by those who use it.
# pyright: reportMissingImports=false

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

from elastic.report.tracking.delivery import TrackedRow, TrackedRun
from elastic.system.processes import end_marked

TRACKED_VARIABLE = "ELASTIC_TRACKED"
"""What W&B's process inherits, by which one that was left is found."""
PATIENCE_S = 20.0
"""For its server to answer. After that the delivery of rows reports it and asks again."""
HEADER_BYTES, BLOCK_BYTES = 7, 32 * 1024
RECORD = struct.Struct("<IHB")
"""Before each piece of a record: its checksum, its length and which piece it is."""
WHOLE, FIRST, _MIDDLE, LAST = 1, 2, 3, 4
COLUMNS = ("step", "trajectory", "reward", "messages")


class WandbLogger:
    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run
        self._run: Any = None
        self._offline = os.environ.get("WANDB_MODE", "") == "offline"

    def open(self) -> set[int]:
        run = self._tracked
        mark = str(run.directory.absolute())
        wandb.teardown()
        end_marked(TRACKED_VARIABLE, mark)
        run.directory.mkdir(parents=True, exist_ok=True)
        there = {step for path in self._files() for step in steps_in(path)} if self._offline else set[int]()
        with _marking(mark):
            self._run = self._begun()
        return there if self._offline else set(range(self._run.starting_step))

    def _begun(self) -> Any:
        run = self._tracked
        return wandb.init(
            project=run.project,
            id=run.name,
            name=run.name,
            dir=str(run.directory),
            config=dict(run.settings),
            resume=None if self._offline else "allow",
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                x_disable_meta=True,
                disable_git=True,
                disable_code=True,
                init_timeout=PATIENCE_S,
            ),
        )

    def write(self, row: TrackedRow) -> None:
        told = dict[str, object](row.figures)
        if row.samples:
            lines = [
                [
                    row.step,
                    one.trajectory,
                    one.reward,
                    "\n\n".join(f"{m['role']}: {m['content']}" for m in one.messages),
                ]
                for one in row.samples
            ]
            told["samples"] = wandb.Table(columns=list(COLUMNS), data=lines)
        self._run.log(told, step=row.step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _files(self) -> list[Path]:
        return sorted(self._tracked.directory.glob(f"wandb/offline-run-*/run-{self._tracked.name}.wandb"))


@contextmanager
def _marking(mark: str) -> Iterator[None]:
    """What is started within it carries the mark; nothing that other loggers start does."""
    os.environ[TRACKED_VARIABLE] = mark
    try:
        yield
    finally:
        del os.environ[TRACKED_VARIABLE]


def steps_in(path: Path) -> Iterator[int]:
    """The steps of the rows that a file of W&B's has whole. Source: LevelDB's log format, in W&B's own header."""
    for body in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(body)
        if record.WhichOneof("record_type") == "history":
            yield record.history.step.num


def _records(data: bytes) -> Iterator[bytes]:
    at, gathered = HEADER_BYTES, b""
    while at + RECORD.size <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < RECORD.size:  # No piece begins in the last bytes of a block.
            at += left
            continue
        _, length, piece = RECORD.unpack_from(data, at)
        at += RECORD.size
        if at + length > len(data):
            return
        body = data[at : at + length]
        at += length
        gathered = body if piece in (WHOLE, FIRST) else gathered + body
        if piece in (WHOLE, LAST):
            yield gathered
