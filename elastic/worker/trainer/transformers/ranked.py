"""A trainer of several ranks, as its first rank's process sees it: it starts the others, and has them do what it does.

The other ranks are processes in this one's group. If one of them dies, or an order takes longer than a step may, this
process ends at once, whatever it waits for: the process that has started it starts another, which goes on from the last
checkpoint. With this process all others end.
"""

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
import structlog
import torch
from torch import Tensor

from elastic.config import Config
from elastic.core.types import LogprobCheck
from elastic.engine.model.stored import CheckpointError
from elastic.pool.messages import RANKS_VARIABLE, RankPlaces
from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.system.interfaces import reached_by
from elastic.system.parking import Switch
from elastic.system.plain_values import told
from elastic.system.processes import MARK_VARIABLE, RUN_VARIABLE, end_own_kin, inherited
from elastic.system.supervision import how_ended
from elastic.weights.errors import WeightsError
from elastic.weights.publisher import PublishReport
from elastic.worker.publication import PublishingTerms, RelayPlace
from elastic.worker.trainer.ranks import ProcessRanks
from elastic.worker.trainer.transformers import rank_messages as m
from elastic.worker.trainer.transformers.making import trainer_on
from elastic.worker.trainer.transformers.own_part import OwnPart
from elastic.worker.trainer.transformers.rank_nodes import OtherNodes
from elastic.worker.trainer.transformers.rank_stops import RankStops
from elastic.worker.trainer.transformers.settings import TransformersSettings
from elastic.worker.trainer.transformers.trainer import TransformersTrainer

log = structlog.get_logger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 600.0
"""For all ranks to have the policy."""
LOOK_S = 0.25
"""Between two looks at whether an order takes too long."""
AGREEMENT_S = 10.0
"""For the first rank to refuse for itself what another one refuses."""
SIGNALLED = 128
"""What is added to a signal's number in the exit status of a process that ends for it (`providers.processes`)."""
THIS_MACHINE = "lo"
"""The network interface by which ranks of one machine reach each other: nobody else can."""


class Lines:
    """One to each rank, for orders of one sort. What is done where one of them breaks is for `broken` to say."""

    def __init__(self, broken: Callable[[Exception], NoReturn]) -> None:
        self._lines: list[m.RankLine] = []
        self._broken = broken

    def open(self) -> socket.socket:
        """Return the next rank's end of a new one."""
        ours, theirs = socket.socketpair()
        self._lines.append(m.RankLine.of_first(ours.detach()))
        return theirs

    def add(self, line: m.RankLine) -> None:
        """Have the next rank's, which is on another node."""
        self._lines.append(line)

    def cut(self) -> None:
        """End them: ranks end with them."""
        for line in self._lines:
            line.cut()

    def tell(self, orders: Sequence[m.ToRank]) -> None:
        """Send each rank its own."""
        try:
            for line, order in zip(self._lines, orders, strict=True):
                line.send(order)
        except OSError as error:
            self._broken(error)

    def send_all(self, order: m.ToRank) -> None:
        self.tell([order] * len(self._lines))

    def answers(self) -> list[m.FromRank]:
        """What each rank has answered."""
        try:
            return [line.receive() for line in self._lines]
        except (OSError, EOFError) as error:
            self._broken(error)

    def answers_as_they_come(self) -> Iterator[tuple[int, m.FromRank]]:
        """The answers of all ranks with their numbers, in the order in which they come."""
        try:
            with selectors.DefaultSelector() as selector:
                for rank, line in enumerate(self._lines, 1):
                    selector.register(line, selectors.EVENT_READ, rank)
                while selector.get_map():
                    for key, _ in selector.select():
                        selector.unregister(line := key.fileobj)
                        assert isinstance(line, m.RankLine)
                        yield key.data, line.receive()
        except (OSError, EOFError) as error:
            self._broken(error)


class OtherRanks:
    """All ranks but the first, with lines to each: processes here, and those on other nodes."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._nodes: OtherNodes | None = None
        self.orders, self.publications = Lines(self._broken), Lines(self._broken)
        self._deadlines_s: dict[object, float] = {}
        self._closed = False
        self._why = "the first one has ended"
        """Why they were ended."""

    def start(self, number: int, meeting: int, pass_env: Sequence[str], interface: str) -> None:
        """Start so many here, and watch them from now on. They inherit the descriptor `meeting`, and these variables.
        Ranks reach each other by this network interface."""
        environment = inherited(*pass_env, RUN_VARIABLE, MARK_VARIABLE) | reached_by(interface)
        for _ in range(number):
            with self.orders.open() as orders, self.publications.open() as publications:
                descriptors = orders.fileno(), publications.fileno()
                command = [sys.executable, "-m", "elastic.worker.trainer.transformers.rank", *map(str, descriptors)]
                given = (*descriptors, meeting)
                self._processes.append(
                    subprocess.Popen(command, pass_fds=given, env=environment, stdin=subprocess.DEVNULL, stdout=2)
                )
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def join(self, places: RankPlaces) -> "OtherNodes":
        """Wait for the ranks on other nodes, and watch them from now on. Blocks."""

        def lost(why: str) -> None:
            time.sleep(m.DEATH_SHOWS_S)
            if not self._closed:
                self._end(why, SIGNALLED + signal.SIGKILL)

        self._nodes = OtherNodes(places, lost)
        for orders, publications in self._nodes.join():
            self.orders.add(orders)
            self.publications.add(publications)
        return self._nodes

    @property
    def nodes(self) -> OtherNodes | None:
        return self._nodes

    @property
    def pids(self) -> list[int]:
        """Of those here, in the order of the ranks."""
        return [process.pid for process in self._processes]

    @contextlib.contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """A context: the process ends if it takes longer. Several threads may be in one. Raises `RuntimeError` once
        they were ended: what a rank answered before that is not taken for another answer."""
        self._check_there()
        this = object()
        self._deadlines_s[this] = time.monotonic() + timeout_s
        try:
            yield
        finally:
            del self._deadlines_s[this]

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """A context, in which this rank begins as they do. Raises `ValueError` at its end where one of them refuses
        alone to begin. Where this rank waits for that one, in the context, the process ends."""
        refused: list[str] = []
        begun = threading.Event()

        def hear() -> None:
            with contextlib.suppress(RuntimeError):  # They were ended, as this one has failed.
                for rank, answer in self.orders.answers_as_they_come():
                    if isinstance(answer, m.RankRefused):
                        refused.append(f"rank {rank} refuses what the first one does not: {answer.why}")
                        break
            if refused and not begun.wait(AGREEMENT_S):
                self._end(refused[0])

        hearing = threading.Thread(target=hear, name="beginnings", daemon=True)
        hearing.start()
        try:
            yield
        except (CheckpointError, ValueError) as refusal:
            self.close(told(refusal))
            raise
        except Exception as error:
            self.give_up(told(error))
            raise
        finally:
            begun.set()
        hearing.join()
        if refused:
            self.close(refused[0])
            raise ValueError(refused[0])

    def give_up(self, why: str) -> None:
        """End them, since work of the first rank's own has failed, and they are out of step with it.

        Where that work has failed since one of them is dead, this process ends meanwhile.
        """
        time.sleep(m.DEATH_SHOWS_S)
        self.close(why)

    def close(self, why: str) -> None:
        """End them, and watch no longer."""
        self._closed, self._why = True, why
        self._kill()

    def _watch(self) -> None:
        stops = RankStops()
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes, 1):
                selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)
            while not (died := selector.select(LOOK_S)):
                if time.monotonic() > min([*self._deadlines_s.values()], default=math.inf):
                    self._end("a rank has not done in time what all of them do")
                if (stopped := stops.hang(self.pids, time.monotonic())) is not None:
                    self._end(f"rank {stopped + 1} hangs: it was stopped")
        if self._closed:
            return
        rank = died[0][0].data
        status = self._processes[rank - 1].wait()
        # A rank that was killed ends the trainer: that is no failure of the trainer's own.
        self._end(f"rank {rank} {how_ended(status)}", SIGNALLED - status if status < 0 else 1)

    def _broken(self, error: Exception) -> NoReturn:
        time.sleep(m.DEATH_SHOWS_S)  # The process that sees it dead, or has ended them all, says why.
        self._check_there(error)
        self._end(f"the line to a rank is broken: {error!r}")

    def _check_there(self, error: Exception | None = None) -> None:
        if self._closed:
            raise RuntimeError(f"the ranks have been ended: {self._why}") from error

    def _end(self, why: str, status: int = 1) -> NoReturn:
        """End the process, whatever its threads are at, and all ranks: a collective cannot be left otherwise."""
        log.error("the trainer ends", reason=why)
        self._kill()
        sys.stdout.flush()
        sys.stderr.flush()
        end_own_kin()
        os._exit(status)

    def _kill(self) -> None:
        if self._nodes is not None:
            self._nodes.close()
            for lines in (self.orders, self.publications):
                lines.cut()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)


class RankedTrainer:
    """`elastic.worker.trainer.base.PolicyTrainer`, of a first rank's own trainer and the others. It is
    `elastic.worker.publication.PublishesVersions`."""

    def __init__(self, own: TransformersTrainer, part: OwnPart, others: OtherRanks, timeout_s: float) -> None:
        self._own = own
        self._part = part
        self._others = others
        self._timeout_s = timeout_s
        self._patience_s = 0.0

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
        return {}

    def proof(self) -> list[float]:
        return self._own.proof()

    def save(self, path: Path) -> None:
        self._together(m.SaveShards(_anywhere(path)), lambda: self._own.save(path))

    def load(self, path: Path) -> None:
        self._together(m.LoadShards(_anywhere(path)), lambda: self._own.load(path))

    def park(self) -> Switch:
        switch = _of_all(*self._together(m.ParkShards(), self._own.park))
        if self._others.nodes is not None:
            self._others.nodes.left()
        return switch

    def resume(self) -> Switch:
        if self._others.nodes is not None:
            with self._others.within(self._timeout_s):
                self._others.nodes.wait_for_devices()
        return _of_all(*self._together(m.ResumeShards(), self._own.resume))

    def begin_publishing(self, terms: PublishingTerms) -> None:
        self._patience_s = terms.patience_s
        self._part.begin(terms)
        self._part.discard_all()
        self._together(m.BePublisher(terms), lambda: None)

    def hold(self, *, in_host_memory: bool) -> dict[str, Tensor]:
        self._together(m.HoldShards(in_host_memory), lambda: self._part.hold(in_host_memory=in_host_memory))
        return {}

    def publish(self, version: int, pulled: Collection[int]) -> PublishReport:
        """As the contract says. A rank that hangs ends the process, as one does in an order."""
        failed: Exception | None = None
        report: PublishReport | None = None
        with self._others.within(self._timeout_s + self._patience_s):
            self._others.publications.send_all(m.PublishShards(version, pulled))
            try:
                report = self._part.publish(version, pulled)
            except Exception as error:  # Another rank may know better why.
                failed = error
            answers = self._others.publications.answers()
        for rank, answer in enumerate(answers, 1):
            if isinstance(answer, m.RankRefused):
                raise WeightsError(f"rank {rank}: {answer.why}") from failed
        if report is None:
            assert failed is not None
            raise failed
        found = [answer for answer in answers if isinstance(answer, m.RankPublished)]
        return report._replace(
            encode_s=report.encode_s + sum(one.encode_s for one in found),
            put_s=report.put_s + sum(one.put_s for one in found),
        )

    def follow(self, place: RelayPlace) -> None:
        self._part.follow(place)
        self._others.publications.send_all(m.FollowRelay(place))

    def _together(self, order: m.RankOrder, work: Callable[[], T]) -> tuple[T, list[Switch]]:
        """Have all ranks do this; returns what it comes to here, and what it cost the others.

        Raises the error with which it is refused, by all. With any other one of this rank's own the others end: they
        are out of step.
        """
        with self._others.within(self._timeout_s):
            self._others.orders.send_all(order)
            try:
                found = work()
            except (CheckpointError, ValueError) as refusal:
                if all(isinstance(answer, m.RankRefused) for answer in self._others.orders.answers()):
                    raise
                raise self._out_of_step(f"a rank did what the first one refuses: {refusal}") from refusal
            except Exception as error:
                self._others.give_up(told(error))
                raise
            answers = self._others.orders.answers()
        for answer in answers:
            if isinstance(answer, m.RankRefused):
                raise self._out_of_step(f"a rank refuses what the first one did: {answer.why}")
        return found, [
            answer.switch for answer in answers if isinstance(answer, m.RankDone) and answer.switch is not None
        ]

    def _out_of_step(self, why: str) -> RuntimeError:
        self._others.close(why)
        return RuntimeError(why)


def ranked_trainer(config: Config, settings: TransformersSettings, device: torch.device) -> RankedTrainer:
    """Start as many ranks as the trainer has GPUs, this process being the first; in a pool as many as there are, those
    on other nodes by these nodes. Blocks.

    Raises what `trainer_on` does, and `ValueError` where another rank refuses alone.
    """
    places = RankPlaces(counts=(config.trainer.gpus,))
    if told_places := os.environ.get(RANKS_VARIABLE, ""):
        places = msgspec.json.decode(told_places, type=RankPlaces)
    size, timeout_s = sum(places.counts), config.trainer.step_timeout_s
    devices = [f"cuda:{rank}" if device.type == "cuda" else "cpu" for count in places.counts for rank in range(count)]
    # It has no name, so that nothing is left of it, however the process ends.
    own_meeting = os.memfd_create("ranks")
    meeting: int | tuple[str, int] = own_meeting
    interface, store = THIS_MACHINE if places.alone else places.interface, None
    os.environ.update(reached_by(interface))
    others = OtherRanks()
    others.start(places.counts[0] - 1, own_meeting, config.run.pass_env, interface)
    with others.within(START_TIMEOUT_S):
        if not places.alone:
            nodes = others.join(places)
            nodes.wait_for_devices()
            store = socket.create_server((nodes.host, 0))
            meeting = (nodes.host, store.getsockname()[1])
        given = config.model_dump(mode="json")
        others.orders.tell(
            [m.BeRank(rank, size, devices[rank], meeting, START_TIMEOUT_S, given) for rank in range(1, size)]
        )
        with others.beginning():
            own_device = torch.device(devices[0])
            listener = None if store is None else store.detach()
            ranks = ProcessRanks.joined(0, size, own_device, meeting, START_TIMEOUT_S, listener)
            own = trainer_on(config, settings, own_device, ranks)
    return RankedTrainer(own, OwnPart(config, own, 0), others, timeout_s)


def _anywhere(path: Path) -> str:
    """Return a path of the run's as all of its nodes have it, each in its own directory."""
    return os.path.relpath(path)


def _of_all(own: Switch, others: Sequence[Switch]) -> Switch:
    """They switch at the same time, each on its own device."""
    parts = [own, *others]
    return Switch(
        max(part.seconds for part in parts),
        sum(part.state_bytes for part in parts),
        sum(part.rest_bytes for part in parts),
    )
