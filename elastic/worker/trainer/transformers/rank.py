"""The process of a trainer's further rank: it does what the first rank says, and ends with it."""

import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog
import torch

from elastic.config import Config
from elastic.engine.model.stored import CheckpointError
from elastic.pool.messages import RANKS_VARIABLE, RankPlaces
from elastic.system.logs import STANDARD_ERROR, log_to
from elastic.system.parking import Switch
from elastic.system.processes import end_with_parent
from elastic.worker.trainer import resolve_trainer
from elastic.worker.trainer.ranks import ProcessRanks
from elastic.worker.trainer.transformers import rank_messages as m
from elastic.worker.trainer.transformers.making import trainer_on
from elastic.worker.trainer.transformers.own_part import OwnPart
from elastic.worker.trainer.transformers.trainer import TransformersTrainer

log = structlog.get_logger(__name__)


class OrderInbox:
    """What the first rank says, received on a thread of its own; the process ends with the connection."""

    def __init__(self, line: m.RankLine, follow: Callable[[m.FollowRelay], None] | None = None) -> None:
        """What is to be heard at once is given to `follow`, on that thread."""
        self._line = line
        self._follow = follow
        self._messages: queue.SimpleQueue[m.ToRank] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="orders", daemon=True).start()

    def take(self) -> m.ToRank:
        return self._messages.get()

    def _receive(self) -> None:
        try:
            while True:
                message = self._line.receive()
                if isinstance(message, m.FollowRelay) and self._follow is not None:
                    self._follow(message)
                else:
                    self._messages.put(message)
        except (OSError, EOFError):
            # Nobody is there any more, whatever is computed now.
            os._exit(0)


class Rank:
    """A further rank at work: its own trainer, and what it publishes."""

    def __init__(self, config: Config, trainer: TransformersTrainer, rank: int, publications: m.RankLine) -> None:
        self._trainer = trainer
        self._part = OwnPart(config, trainer, rank)
        self._publications = publications

    def obey(self, order: m.RankOrder) -> m.FromRank:
        """Carry out an order as the first rank does, at the same time."""
        try:
            return m.RankDone(self._carried_out(order))
        except (CheckpointError, ValueError) as error:
            return m.RankRefused(str(error))

    def _carried_out(self, order: m.RankOrder) -> Switch | None:
        trainer = self._trainer
        match order:
            case m.TrainShare(group):
                trainer.train_group(group)
            case m.SkipShare(index, tokens, trajectories):
                trainer.skip_group(index, tokens, trajectories)
            case m.UpdateShare():
                trainer.update()
            case m.HoldShards(in_host_memory):
                self._part.hold(in_host_memory=in_host_memory)
            case m.BePublisher(terms):
                self._part.begin(terms)
                threading.Thread(target=self._publish, name="publishing", daemon=True).start()
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

    def _publish(self) -> NoReturn:
        inbox = OrderInbox(self._publications, lambda message: self._part.follow(message.place))
        while True:
            order = inbox.take()
            assert isinstance(order, m.PublishShards), "nothing else is said there"
            self._publications.send(self._published(order))

    def _published(self, order: m.PublishShards) -> m.FromRank:
        try:
            report = self._part.publish(order.version, order.pulled)
        except Exception as error:  # The first rank says what becomes of the run.
            log.exception("weights not published", version=order.version)
            return m.RankRefused(f"{type(error).__name__}: {error}")
        return m.RankPublished(report.encode_s, report.put_s)


def main(orders: int, publications: int, number: int = 0, own_config: int = 0) -> NoReturn:
    """Be a rank. The arguments are descriptors of both sockets to the first one. On another node than that one's there
    are also the rank's number, and a descriptor of the run's configuration as it is here."""
    end_with_parent()
    log_to(STANDARD_ERROR)
    line, publishing = m.RankLine.of_rank(orders), m.RankLine.of_rank(publications)
    if number:
        places = msgspec.json.decode(os.environ[RANKS_VARIABLE], type=RankPlaces)
        for one in (line, publishing):
            one.prove(places.token, dials=True)
            one.send(m.LineOpened(places.place, number, one is publishing))
    inbox = OrderInbox(line)
    begin = inbox.take()
    assert isinstance(begin, m.BeRank), "the first message says what to be"
    config = Config.model_validate(begin.config)
    if number:
        with open(own_config, "rb") as file:
            config = Config.model_validate_json(file.read())
    try:
        trainer = _made(config, begin)
    except (CheckpointError, ValueError) as error:
        line.send(m.RankRefused(str(error)))
        inbox.take()  # The first rank is refused, too, and ends this one.
        os._exit(1)
    line.send(m.RankDone())
    rank = Rank(config, trainer, begin.rank, publishing)
    while True:
        order = inbox.take()
        assert not isinstance(order, m.BeRank | m.PublishShards | m.FollowRelay), (
            "it has begun, and publishes elsewhere"
        )
        line.send(rank.obey(order))


def _made(config: Config, begin: m.BeRank) -> TransformersTrainer:
    device = torch.device(begin.device)
    ranks = ProcessRanks.joined(begin.rank, begin.size, device, begin.meeting, begin.timeout_s)
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
    ended(lambda: main(*map(int, sys.argv[1:])))
