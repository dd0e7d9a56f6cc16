"""A trainer of several ranks, as its first rank's process sees it: it starts the others, and has them do what it does.

The other ranks are processes in this one's group. If one of them dies, or an order takes longer than a step may, this
process ends at once, whatever it waits for: whoever has started it starts another, which goes on from the last
checkpoint. With this process all others end.
"""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import structlog
import torch
from torch import Tensor

from elastic.config import Config
from elastic.core.types import LogprobCheck
from elastic.engine.model.stored import CheckpointError
from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.system.parking import Switch
from elastic.system.processes import MARK_VARIABLE, RUN_VARIABLE, end_own_kin, inherited
from elastic.worker.trainer.ranks import ProcessRanks
from elastic.worker.trainer.transformers import rank_messages as m
from elastic.worker.trainer.transformers.making import trainer_on
from elastic.worker.trainer.transformers.settings import TransformersSettings
from elastic.worker.trainer.transformers.trainer import TransformersTrainer

log = structlog.get_logger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 600.0
"""For all ranks to have the policy."""
LOOK_S = 0.25
"""Between two looks at whether an order takes too long."""
THIS_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks listen for each other where nobody else can reach them."""


class OtherRanks:
    """The processes of all ranks but the first, with a line to each."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[m.RankLine] = []
        self._deadline_s: float | None = None
        self._closed = False

    def start(self, number: int) -> None:
        """Start so many, and watch them from now on."""
        environment = inherited(RUN_VARIABLE, MARK_VARIABLE) | THIS_MACHINE
        for _ in range(number):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "elastic.worker.trainer.transformers.rank", str(theirs.fileno())]
                self._processes.append(
                    subprocess.Popen(
                        command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=2
                    )
                )
            self._lines.append(m.RankLine.of_first(ours.detach()))
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """In the order of the ranks."""
        return [process.pid for process in self._processes]

    def tell(self, orders: Sequence[m.ToRank]) -> None:
        """Send each rank its own."""
        for line, order in zip(self._lines, orders, strict=True):
            line.send(order)

    def answers(self) -> list[m.FromRank]:
        """What each rank has answered."""
        return [line.receive() for line in self._lines]

    @contextlib.contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """A context: the process ends if it takes longer."""
        self._deadline_s = time.monotonic() + timeout_s
        try:
            yield
        except (OSError, EOFError) as error:
            self._end(f"the line to a rank is broken: {error!r}")
        finally:
            self._deadline_s = None

    def close(self) -> None:
        """End them, and watch no longer."""
        self._closed = True
        self._kill()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes, 1):
                selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)
            while not (died := selector.select(LOOK_S)):
                deadline_s = self._deadline_s
                if deadline_s is not None and time.monotonic() > deadline_s:
                    self._end("a rank has not done in time what all of them do")
        if self._closed:
            return
        rank = died[0][0].data
        self._end(f"rank {rank} has died: exit status {self._processes[rank - 1].poll()}")

    def _end(self, why: str) -> NoReturn:
        """End the process, whatever its threads are at, and all ranks: a collective cannot be left otherwise."""
        log.error("the trainer ends", reason=why)
        self._kill()
        sys.stdout.flush()
        sys.stderr.flush()
        end_own_kin()
        os._exit(1)

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)


class RankedTrainer:
    """`elastic.worker.trainer.base.PolicyTrainer`, of a first rank's own trainer and the others."""

    def __init__(self, own: TransformersTrainer, others: OtherRanks, timeout_s: float) -> None:
        self._own = own
        self._others = others
        self._timeout_s = timeout_s

    @property
    def version(self) -> int:
        return self._own.version

    @property
    def metrics(self) -> dict[str, float]:
        return self._own.metrics

    @property
    def unusable(self) -> Mapping[str, str]:
        return self._own.unusable

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return self._others.pids

    def train_group(self, group: TrainGroupFrame) -> None:
        self._together(m.TrainShare(group), lambda: self._own.train_group(group))

    def skip_group(self, index: int, tokens: int = 0, trajectories: Sequence[TrajectoryData] = ()) -> None:
        order = m.SkipShare(index, tokens, trajectories)
        self._together(order, lambda: self._own.skip_group(index, tokens, trajectories))

    def take_checks(self) -> list[LogprobCheck]:
        return self._own.take_checks()

    def update(self) -> dict[str, float]:
        return self._together(m.UpdateShare(), self._own.update)[0]

    def tensors(self) -> dict[str, Tensor]:
        return self._together(m.CollectShards(), self._own.tensors)[0]

    def proof(self) -> list[float]:
        return self._own.proof()

    def save(self, path: Path) -> None:
        self._together(m.SaveShards(str(path)), lambda: self._own.save(path))

    def load(self, path: Path) -> None:
        self._together(m.LoadShards(str(path)), lambda: self._own.load(path))

    def park(self) -> Switch:
        return _of_all(*self._together(m.ParkShards(), self._own.park))

    def resume(self) -> Switch:
        return _of_all(*self._together(m.ResumeShards(), self._own.resume))

    def _together(self, order: m.RankOrder, work: Callable[[], T]) -> tuple[T, list[Switch]]:
        """Have all ranks do this; returns what it comes to here, and what it cost the others.

        Raises the error with which it is refused, by all.
        """
        with self._others.within(self._timeout_s):
            self._others.tell([order] * len(self._others.pids))
            try:
                found = work()
            except (CheckpointError, ValueError):
                self._others.answers()
                raise
            answers = self._others.answers()
        for answer in answers:
            if isinstance(answer, m.RankRefused):
                raise RuntimeError(f"a rank refuses what the first one did: {answer.why}")
        return found, [
            answer.switch for answer in answers if isinstance(answer, m.RankDone) and answer.switch is not None
        ]


def ranked_trainer(config: Config, settings: TransformersSettings, device: torch.device) -> RankedTrainer:
    """Start as many ranks as the trainer has GPUs, this process being the first. Blocks.

    Raises what `trainer_on` does.
    """
    size, timeout_s = config.trainer.gpus, config.trainer.step_timeout_s
    devices = [f"cuda:{rank}" if device.type == "cuda" else "cpu" for rank in range(size)]
    meeting = Path(tempfile.mkdtemp(prefix="elastic-ranks-"))
    os.environ.update(THIS_MACHINE)
    others = OtherRanks()
    others.start(size - 1)
    try:
        with others.within(START_TIMEOUT_S):
            given = config.model_dump(mode="json")
            others.tell(
                [m.BeRank(rank, size, devices[rank], str(meeting), START_TIMEOUT_S, given) for rank in range(1, size)]
            )
            own_device = torch.device(devices[0])
            ranks = ProcessRanks.joined(0, size, own_device, meeting, START_TIMEOUT_S)
            own = trainer_on(config, settings, own_device, ranks)
            others.answers()
    except (CheckpointError, ValueError):
        others.close()
        raise
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    return RankedTrainer(own, others, timeout_s)


def _of_all(own: Switch, others: Sequence[Switch]) -> Switch:
    """They switch at the same time, each on its own device."""
    parts = [own, *others]
    return Switch(
        max(part.seconds for part in parts),
        sum(part.state_bytes for part in parts),
        sum(part.rest_bytes for part in parts),
    )
