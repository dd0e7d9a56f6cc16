"""The trainer's process: a worker whose engine seeds, with the trainer on the same device.

One of them uses the device at a time. The orchestrator alternates Sleep, training and Wake; the worker's device
thread takes orders one by one, and the engine sleeps through every one of the trainer's, so they never overlap.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import assert_never

import structlog
import torch
from msgspec.structs import replace

from elastic.config import Config, TrainerPacingConfig
from elastic.core.types import LogprobCheck, WeightMode
from elastic.engine.base import RolloutEngine
from elastic.engine.model.stored import CheckpointError
from elastic.protocol import wire
from elastic.protocol.best_checkpoint import best_kept, returned
from elastic.system.files import write_whole
from elastic.system.host import here
from elastic.system.logs import PaceLog
from elastic.system.parking import Parkable, Switch
from elastic.weights.puller import Puller
from elastic.weights.relay import open_relay
from elastic.weights.shared_memory import kept_in_memory
from elastic.weights.signing import SigningKey, Trust
from elastic.weights.source import TensorSource
from elastic.worker.agent import AgentExit, BuildEngine, Ticket, build_engine, run_agent
from elastic.worker.device_permit import DevicePermit
from elastic.worker.idle_engine import idle_engine
from elastic.worker.publication import (
    REQUEST_POLL_S,
    OpenRelay,
    PublishesVersions,
    PublishingTerms,
    RelayPlace,
    WholeVersions,
    tensors_of,
)
from elastic.worker.seeding_engines import several_engines
from elastic.worker.trainer import checkpoint, create_trainer, generates, resolve_trainer, seeding_engines
from elastic.worker.trainer.base import (
    OfferRefused,
    PolicyTrainer,
    TakesOffers,
    checkpoint_path,
    remove_saved,
    saved,
)
from elastic.worker.trainer.layers import changed_shares
from elastic.worker.training import TrainerOrder, TrainerReply, TrainerStatus
from elastic.worker.weights import source_of

log = structlog.get_logger(__name__)

KEEP_CHECKPOINTS = 2
RETURN_POLL_S = 0.1
FORMER_KEY = ".publisher"
"""The file with the public key of the process that has published last: its successor may need what that was."""

MakeTrainer = Callable[[Config], PolicyTrainer]
"""Makes the trainer from the run's configuration."""


async def run_trainer_host(
    ticket: Ticket,
    config: Config,
    run_dir: Path,
    resume: bool,
    permit: DevicePermit | None = None,
    make_trainer: MakeTrainer = create_trainer,
    open_relay: OpenRelay = open_relay,
    make_engine: BuildEngine | None = None,
) -> AgentExit:
    """Be the trainer's worker until drained (code 0), or refused, cut off or failed (code 1).

    Publishes the base policy as version 0 before it is ready, and version v after step v, while the device is free
    for what comes next; with `resume` it goes on from the newest checkpoint in `run_dir`, under that checkpoint's
    version, where there is one. What it publishes is signed with a key of this process alone, so what an earlier one
    published is of no use, and deleted.
    While it lives the run's weights stay in shared memory, whatever becomes of the orchestrator.
    A `permit` says when it has the device, which other jobs use in between.
    """
    shares_device = permit is not None and permit.shared
    parts = config, run_dir, resume, make_trainer, make_engine
    host = TrainerHost(*parts, shares_device=shares_device, open_relay=open_relay)
    with kept_in_memory(run_dir / "weights"):
        return await run_agent(ticket, host.build_engine, trainer=host, permit=permit)


class TrainerHost:
    """Takes the orders of the trainer's worker, with a `PolicyTrainer`. Methods block, on the worker's device thread.

    It is `Parkable`. Where it `shares_device` versions are kept in host memory, and published and activated from there.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        resume: bool,
        make_trainer: MakeTrainer = create_trainer,
        make_engine: BuildEngine | None = None,
        shares_device: bool = False,
        request_poll_s: float = REQUEST_POLL_S,
        open_relay: OpenRelay = open_relay,
    ) -> None:
        # An orchestrator that is away may have taken the relay with it.
        self.timeout_s = config.trainer.order_timeout_s + config.run.orchestrator_timeout_s
        self._config = config
        self._make_trainer = make_trainer
        engines = seeding_engines(config)
        self._makes_way = engines > 0
        """Whether it is parked while its engines generate, which then pull its weights as other workers do."""
        self._make_engine = make_engine or _maker(generates(config), engines)
        kind, _ = resolve_trainer(config.trainer, "the run's configuration")
        self._in_directories = kind.in_directories or config.trainer.gpus > 1
        self._open_relay = open_relay
        self._run = run_dir.name
        self._paces = PaceLog("training")
        self._key = SigningKey()
        self.publisher = self._key.public
        """The key with which its versions are signed."""
        self._checkpoints = run_dir / "checkpoints"
        self._former_key = self._checkpoints / FORMER_KEY
        self._resume = resume
        self._publishing = here().executor(1, "publishing")
        self._publication: Future[wire.PublishedFrame] = Future()
        self._stepped: wire.Stepped | None = None
        self._checks: dict[str, list[LogprobCheck]] = {}
        """By the group of this step with whose answer they were told."""
        self._shares_device = shares_device
        self._request_poll_s = request_poll_s
        self._parked = shares_device
        self._learning: Parkable | None = None
        self._seeding: Parkable | None = None
        """Trainer and engine, where there are any that can make way."""

    def build_engine(self, welcome: wire.Welcome) -> RolloutEngine:
        """Make the trainer, put its weights on the relay, and return the seeding engine, still without weights."""
        self._trainer = self._make_trainer(self._config)
        if self._shares_device:
            self._learning = self._trainer
        if self._resume:
            self._restore(welcome)
        self._status = self._between_steps()
        self._versions = self._versions_of(self._trainer)
        self._hold()
        patience_s, model = welcome.orchestrator_timeout_s, dict(welcome.model)
        terms = PublishingTerms(self._run, model, RelayPlace.of(welcome), patience_s, self._key.secret)
        self._versions.begin_publishing(terms)
        if isinstance(self._trainer, TakesOffers):
            write_whole(self._former_key, self.publisher.encode())
        self._publication.set_result(self._publish(self._trainer.version, ()))
        self._welcome = welcome
        if self._makes_way:
            self._trainer.park()
        return self._make_engine(welcome)

    def load_policy(self, engine: RolloutEngine) -> None:
        """Load the trainer's weights into its engine, before the worker is ready."""
        self._engine = engine
        if self._makes_way:
            self._pull()
            return
        if not self._shares_device:
            self._apply(tensors_of(self._trainer, in_host_memory=False))
            return
        self._seeding = _parkable(engine)
        # So that it keeps what it is given in host memory.
        self._seeding.park()
        self._apply(tensors_of(self._trainer, in_host_memory=True))
        self._seeding.resume()

    def wake(self) -> None:
        """Wake the engine, with the trainer's weights. A parked engine comes to the device when the device is
        resumed."""
        if self._makes_way:
            self._trainer.park()
            self._pull()
        elif self._seeding is not None and not self._parked:
            self._seeding.resume()
        self._engine.wake()

    def park(self) -> Switch:
        self._parked = True
        return _both(each.park() for each in (self._seeding, self._learning) if each is not None)

    def resume(self) -> Switch:
        """Bring the state to the device. The engine stays in host memory while it sleeps."""
        self._parked = False
        asleep = self._seeding is not None and self._engine.statistics().asleep
        coming = (self._learning, None if asleep else self._seeding)
        return _both(each.resume() for each in coming if each is not None)

    def follow(self, welcome: wire.Welcome) -> None:
        """Use the relay of an orchestrator that has come back."""
        self._welcome = welcome
        self._versions.follow(RelayPlace.of(welcome))

    def status(self) -> TrainerStatus:
        """Return the progress. Any thread may call it once there is an engine."""
        return self._status

    def has(self, order: TrainerOrder) -> bool:
        """Return whether the order was carried out before. Then it is only answered again, and needs no device."""
        match order:
            case wire.TrainGroupFrame():
                return order.group in self._status.groups
            case wire.SkipGroup():
                return order.index in self._status.slots
            case wire.UpdateFrame():
                stands = self._status
                return self._stepped is not None and (order.version, order.source) == (stands.version, stands.source)
            case _:
                assert_never(order)

    def carry_out(self, order: TrainerOrder) -> TrainerReply:
        """Carry out the order. The engine sleeps meanwhile, except during a `SkipGroup`."""
        began_s = here().monotonic()
        if self._makes_way and not isinstance(order, wire.SkipGroup) and not self.has(order):
            self._trainer.resume()
        match order:
            case wire.TrainGroupFrame():
                if not self.has(order):
                    self._given(order.index, order.group)
                    self._trainer.train_group(order)
                    self._checks[order.group] = self._trainer.take_checks()
                    self._pace(began_s, _tokens_s(self._config.trainer.pacing, order))
                return wire.Trained(order.group, here().monotonic() - began_s, self._checks[order.group])
            case wire.SkipGroup():
                if not self.has(order):
                    self._given(order.index)
                    self._trainer.skip_group(order.index, order.tokens, order.trajectories)
                return None
            case wire.UpdateFrame():
                if self._stepped is None or not self.has(order):
                    try:
                        self._take(order)
                    except OfferRefused as refused:
                        return wire.UpdateRefused(order.version, wire.clipped(str(refused)), refused.again)
                    self._stepped = self._update(order)
                    self._pace(began_s, pacing.update_s if (pacing := self._config.trainer.pacing) is not None else 0.0)
                return self._stepped
            case _:
                assert_never(order)

    def _pace(self, began_s: float, modelled_s: float) -> None:
        """Wait until the modelled time is over."""
        left_s = modelled_s - (here().monotonic() - began_s)
        if modelled_s:
            self._paces.took(held=left_s >= 0)
        if left_s > 0:
            here().sleep(left_s)

    def _given(self, slot: int, *groups: str) -> None:
        stands = self._status
        self._status = replace(stands, groups=(*stands.groups, *groups), slots=stands.slots | {slot})

    def _take(self, order: wire.UpdateFrame) -> None:
        """Have the trainer read the weights that were offered to it. Raises `OfferRefused`."""
        if order.version <= self._trainer.version:
            raise RuntimeError(f"version {order.version} is here of another offer, {self._status.source!r}")
        if isinstance(self._trainer, TakesOffers):
            self._trainer.take(order.source)

    def _update(self, order: wire.UpdateFrame) -> wire.Stepped:
        metrics = self._trainer.update()
        for group, reason in self._trainer.unusable.items():
            log.warning("group not trained on", group=group, reason=reason)
        if self._trainer.version != order.version:
            raise RuntimeError(f"the trainer stepped to version {self._trainer.version}, not {order.version}")
        tensors = self._hold()
        self._publication = self._publishing.submit(self._publish, order.version, order.pulled)
        self._status = self._between_steps()
        self._checks.clear()
        began_s = here().monotonic()
        if not self._makes_way:
            self._apply(tensors)
        applied_s = here().monotonic()
        if self._checkpoint_due():
            self._save()
        times = {"apply_s": applied_s - began_s, "checkpoint_s": here().monotonic() - applied_s}
        if order.version == self._config.run.steps:
            self._publication.result()  # No rollouts follow, and once they are over the device is given back.
        unusable = {group: wire.clipped(why) for group, why in self._trainer.unusable.items()}
        checks = self._trainer.take_checks()
        return wire.Stepped(order.version, wire.finite(metrics | times), unusable, checks, self._status.proof)

    def _between_steps(self) -> TrainerStatus:
        trainer = self._trainer
        source = trainer.source if isinstance(trainer, TakesOffers) else ""
        return TrainerStatus(trainer.version, proof=wire.sound_proof(trainer.proof()), source=source)

    def checkpoint(self) -> None:
        """Save what was trained, before the device is given back, unless it is saved or a step is under way.

        Raises what failed.
        """
        path, stands = self._checkpoint_path, self._status
        if stands.version and not stands.groups and not stands.slots and not path.exists():
            self._save()

    def published(self) -> wire.PublishedFrame:
        """Wait until the last version is on the relay; returns how long that took. Raises what failed."""
        return self._publication.result()

    def returned(self) -> None:
        """Wait until the run has every checkpoint, where this is another machine than its.

        Raises `TimeoutError` after half of the time that an order may take.
        """
        limit_s = self._config.trainer.order_timeout_s / 2
        until_s = here().monotonic() + limit_s
        while (there := returned(self._checkpoints)) is not None:
            late = {path.name for path in saved(self._checkpoints)} - there
            if not late:
                return
            if here().monotonic() > until_s:
                raise TimeoutError(f"the run has not got {', '.join(sorted(late))} within {limit_s:g} s")
            here().sleep(RETURN_POLL_S)

    def _publish(self, version: int, pulled: Sequence[int]) -> wire.PublishedFrame:
        """Publish the version while the engine already generates with it and workers pull it bucket by bucket."""
        began_s = here().monotonic()
        published = self._versions.publish(version, pulled)
        figures = {
            "publish_s": here().monotonic() - began_s,
            "weights_encode_s": published.encode_s,
            "weights_put_s": published.put_s,
            "weights_bytes": float(published.size_bytes),
            "weights_over_full": published.size_bytes / max(published.full_bytes, 1),
            "weights_changed_share": 2 * sum(published.changed.values()) / max(published.full_bytes, 1),
        }
        changed = changed_shares(published.changed, published.patterns)
        return wire.PublishedFrame(version, wire.finite(figures), changed)

    def _pull(self) -> None:
        """Have the engine serve the trainer's version, as it is on the relay, if it does not yet."""
        version = self._trainer.version
        if self._engine.statistics().weights_version == version:
            return
        self._publication.result()
        order = wire.PullWeights(version, WeightMode.FINISH, self.publisher)
        source = replace(source_of(self._welcome, order), run=self._run)
        self._engine.prefetch(source, self._config.weights.pull_timeout_s)
        self._engine.load_version(source, WeightMode.FINISH)

    def _apply(self, tensors: dict[str, torch.Tensor]) -> None:
        self._engine.load_version(TensorSource(self._trainer.version, tensors), WeightMode.FINISH)

    def _hold(self) -> dict[str, torch.Tensor]:
        """Have the weights kept for publication, in host memory if the device may have to be left meanwhile. Returns
        them where this process has them whole: only then an engine is here."""
        return self._versions.hold(in_host_memory=self._shares_device or self._makes_way)

    def _versions_of(self, trainer: PolicyTrainer) -> PublishesVersions:
        if isinstance(trainer, PublishesVersions):
            return trainer
        return WholeVersions(trainer, self._config, self._open_relay, self._request_poll_s)

    def _checkpoint_due(self) -> bool:
        version, evaluation = self._trainer.version, self._config.evaluation
        decides = evaluation is not None and (evaluation.keep_best or evaluation.stop_when)
        if evaluation is not None and decides and evaluation.every and version % evaluation.every == 0:
            return True  # It may be the best, or the last.
        return version % self._config.trainer.checkpoint_every_steps == 0 or version == self._config.run.steps

    @property
    def _checkpoint_path(self) -> Path:
        return self._checkpoint_of(self._trainer.version)

    def _checkpoint_of(self, version: int) -> Path:
        return checkpoint_path(self._checkpoints, version, in_directories=self._in_directories)

    def _save(self) -> None:
        self._trainer.save(self._checkpoint_path)
        best = best_kept(self._checkpoints)
        for old in saved(self._checkpoints)[:-KEEP_CHECKPOINTS]:
            if best is None or old != self._checkpoint_of(best):
                remove_saved(old)

    def _restore(self, welcome: wire.Welcome) -> None:
        """Go on from the newest checkpoint that is as it was written, if there are any: the run has kept what was
        trained since the one before. Of what others train only the newest will do.

        Raises `CheckpointError`, with what is wrong with each.
        """
        checkpoint.sweep(self._checkpoints)
        most = 1 if isinstance(self._trainer, TakesOffers) else KEEP_CHECKPOINTS
        found, wrong, read = saved(self._checkpoints)[-most:], list[str](), "none"
        for path in reversed(found):
            try:
                self._load(path, welcome)
                read = str(path)
                break
            except CheckpointError as damage:
                wrong.append(str(damage))
        if found and len(wrong) == len(found):
            raise CheckpointError("; ".join(wrong))
        for damage in wrong:
            log.warning("a checkpoint is damaged, and the one before it is taken", damage=damage)
        if found:
            proof = wire.sound_proof(self._trainer.proof())
            self._stepped = wire.Stepped(self._trainer.version, wire.finite(self._trainer.metrics), proof=proof)
        log.info("resuming", version=self._trainer.version, checkpoint=read)

    def _load(self, path: Path, welcome: wire.Welcome) -> None:
        """Raises `CheckpointError`."""
        try:
            self._trainer.load(path)
        except CheckpointError as damage:
            self._mend(path, damage, welcome)

    def _mend(self, path: Path, damage: CheckpointError, welcome: wire.Welcome) -> None:
        """Go on from what was published of a version that others have trained and written over since.

        Raises `CheckpointError`.
        """
        trainer, place = self._trainer, RelayPlace.of(welcome)
        if not isinstance(trainer, TakesOffers):
            raise damage
        try:
            trust = Trust(self._run, self._former_key.read_text())
            puller = Puller(self._open_relay(place.url, place.token, place.anchor), trust)
            trainer.mend(path, lambda version: puller.pull(version, self._config.weights.pull_timeout_s))
            trainer.load(path)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{damage}; {error}") from error
        log.warning("what was kept had been written over: goes on from what was published", damage=str(damage))


def _maker(generates: bool, engines: int) -> BuildEngine:
    """How the engine of a trainer is built whose device generates, or does not."""
    if engines > 1:
        return several_engines(engines)
    return build_engine if generates else idle_engine


def _tokens_s(pacing: TrainerPacingConfig | None, group: wire.TrainGroupFrame) -> float:
    """Return the time that a modelled device takes for the group."""
    if pacing is None:
        return 0.0
    return sum(len(trajectory.token_ids) for trajectory in group.trajectories) / pacing.train_tokens_per_s


def _parkable(part: object) -> Parkable:
    if not isinstance(part, Parkable):
        raise ValueError(f"{type(part).__name__} cannot make way on a shared device: it has no park and resume")
    return part


def _both(switches: Iterable[Switch]) -> Switch:
    """Return the cost of two switches one after the other. What one process holds all the time counts once."""
    parts = list(switches)
    return Switch(
        sum(part.seconds for part in parts),
        sum(part.state_bytes for part in parts),
        max((part.rest_bytes for part in parts), default=0),
    )
