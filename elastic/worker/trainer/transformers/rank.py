"""The process of a trainer's further rank: it does what the first rank says, and ends with it."""

import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import structlog
import torch

from elastic.config import Config
from elastic.engine.model.stored import CheckpointError
from elastic.system.parking import Switch
from elastic.system.processes import end_with_parent
from elastic.worker.trainer import resolve_trainer
from elastic.worker.trainer.ranks import ProcessRanks
from elastic.worker.trainer.transformers import rank_messages as m
from elastic.worker.trainer.transformers.making import trainer_on
from elastic.worker.trainer.transformers.trainer import TransformersTrainer

log = structlog.get_logger(__name__)


class OrderInbox:
    """What the first rank says, received on a thread of its own; the process ends with the connection."""

    def __init__(self, line: m.RankLine) -> None:
        self._line = line
        self._messages: queue.SimpleQueue[m.ToRank] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="orders", daemon=True).start()

    def take(self) -> m.ToRank:
        return self._messages.get()

    def _receive(self) -> None:
        try:
            while True:
                self._messages.put(self._line.receive())
        except (OSError, EOFError):
            # Nobody is there any more, whatever is computed now.
            os._exit(0)


def obey(trainer: TransformersTrainer, order: m.RankOrder) -> m.FromRank:
    """Carry out an order as the first rank does, at the same time."""
    try:
        return m.RankDone(_carried_out(trainer, order))
    except (CheckpointError, ValueError) as error:
        return m.RankRefused(str(error))


def _carried_out(trainer: TransformersTrainer, order: m.RankOrder) -> Switch | None:
    match order:
        case m.TrainShare(group):
            trainer.train_group(group)
        case m.SkipShare(index, tokens, trajectories):
            trainer.skip_group(index, tokens, trajectories)
        case m.UpdateShare():
            trainer.update()
        case m.CollectShards():
            trainer.tensors()
        case m.SaveShards(path):
            trainer.save(Path(path))
        case m.LoadShards(path):
            trainer.load(Path(path))
        case m.ParkShards():
            return trainer.park()
        case m.ResumeShards():
            return trainer.resume()
    trainer.take_checks()  # The first rank tells them.
    return None


def main(descriptor: int) -> NoReturn:
    end_with_parent()
    line = m.RankLine.of_rank(descriptor)
    inbox = OrderInbox(line)
    begin = inbox.take()
    assert isinstance(begin, m.BeRank), "the first message says what to be"
    try:
        trainer = _made(begin)
    except (CheckpointError, ValueError) as error:
        line.send(m.RankRefused(str(error)))
        inbox.take()  # The first rank is refused, too, and ends this one.
        os._exit(1)
    line.send(m.RankDone())
    while True:
        order = inbox.take()
        assert not isinstance(order, m.BeRank), "it has begun"
        line.send(obey(trainer, order))


def _made(begin: m.BeRank) -> TransformersTrainer:
    config, device = Config.model_validate(begin.config), torch.device(begin.device)
    ranks = ProcessRanks.joined(begin.rank, begin.size, device, Path(begin.directory), begin.timeout_s)
    _, settings = resolve_trainer(config.trainer, "the run's configuration")
    return trainer_on(config, settings, device, ranks)  # type: ignore[arg-type]


def ended(work: Callable[[], NoReturn]) -> NoReturn:
    """Do this, and let the process end with any error at once: threads of torch's are not waited for."""
    try:
        work()
    except BaseException:
        log.exception("a trainer's rank fails")
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    ended(lambda: main(int(sys.argv[1])))
