"""Versions onto a run's relay: whole ones, or what one rank of a trainer has of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import msgspec
import structlog
import torch
from torch import Tensor

from elastic.config import Config, WeightsConfig
from elastic.engine import resolve_engine
from elastic.protocol import wire
from elastic.system.host import here
from elastic.weights.choice import BYTES_PER_S_IN_GBPS
from elastic.weights.codecs import warm_up
from elastic.weights.encoder import PART_TIMEOUT_S
from elastic.weights.errors import WeightsError
from elastic.weights.placements import tensor_parallel
from elastic.weights.publisher import Publisher, PublishReport, PublishSettings, TrainerRank
from elastic.weights.relay import Relay, open_relay
from elastic.weights.sharding import Shard, whole, whole_shapes
from elastic.weights.signing import SigningKey
from elastic.weights.versions import discard_all
from elastic.weights.waiting import PatientRelay
from elastic.worker.trainer.base import PolicyTrainer

log = structlog.get_logger(__name__)

REQUEST_POLL_S = 1.0
"""How often the relay is checked for workers that ask for a keyframe."""
PUTS_AT_ONCE = 2
"""Buckets that are sent to a distant relay at the same time."""

OpenRelay = Callable[[str, str, str], Relay]
"""Opens the relay at a URL, with a token and a certificate."""


class RelayPlace(msgspec.Struct, frozen=True):
    """Where a run's relay is. Its repr keeps the token to itself."""

    url: str
    token: str
    anchor: str

    @classmethod
    def of(cls, welcome: wire.Welcome) -> "RelayPlace":
        return cls(welcome.relay, welcome.relay_token, welcome.relay_anchor)

    def __repr__(self) -> str:
        return f"RelayPlace(url={self.url!r})"


class PublishingTerms(msgspec.Struct, frozen=True):
    """What all ranks of a trainer publish with, and nobody else may know. Its repr keeps key and token to itself."""

    run: str
    model: dict[str, Any]
    """The `config.json` of the policy."""
    place: RelayPlace
    patience_s: float
    """How long the relay may be away."""
    secret: bytes
    """The private half of the trainer's signing key."""

    def __repr__(self) -> str:
        return f"PublishingTerms(run={self.run!r}, place={self.place!r})"


@runtime_checkable
class PublishesVersions(Protocol):
    """How versions of a trainer are published. A trainer of several ranks is one, each of which publishes what it has:
    nobody has a version's tensors whole.

    Methods block, and may be called from any thread, but for `hold`, which is one of the trainer's orders.
    """

    def begin_publishing(self, terms: PublishingTerms) -> None:
        """Publish on these terms from now on, what is held to begin with. What lies on the relay is deleted."""
        ...

    def hold(self, *, in_host_memory: bool) -> dict[str, Tensor]:
        """Keep a copy of the weights as they are now, for `publish`. Returns the tensors, where this process has them
        whole, else nothing."""
        ...

    def publish(self, version: int, pulled: Collection[int]) -> PublishReport:
        """Publish what is held, under this version. Bytes and times are those of all ranks.

        Raises `RelayError`, and whatever else a rank fails with.
        """
        ...

    def follow(self, place: RelayPlace) -> None:
        """Publish to the relay at this place from now on."""
        ...


class WholeVersions:
    """`PublishesVersions`, of a trainer that has its tensors whole."""

    def __init__(
        self, trainer: PolicyTrainer, config: Config, open_relay: OpenRelay, request_poll_s: float = REQUEST_POLL_S
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._open_relay = open_relay
        self._request_poll_s = request_poll_s
        self._held: dict[str, Tensor] = {}

    def begin_publishing(self, terms: PublishingTerms) -> None:
        share = _whole_share(self._config, self._held)
        given = self._config.weights, terms, share, self._open_relay, self._request_poll_s
        self._publisher = VersionPublisher(*given)
        self._publisher.discard_all()

    def hold(self, *, in_host_memory: bool) -> dict[str, Tensor]:
        self._held = tensors_of(self._trainer, in_host_memory=in_host_memory)
        return self._held

    def publish(self, version: int, pulled: Collection[int]) -> PublishReport:
        held, self._held = self._held, {}
        return self._publisher.publish(version, held, pulled)

    def follow(self, place: RelayPlace) -> None:
        self._publisher.follow(place)


def tensors_of(trainer: PolicyTrainer, *, in_host_memory: bool) -> dict[str, Tensor]:
    """The trainer's tensors, on its device or in host memory."""
    tensors = trainer.tensors()
    return {name: tensor.cpu() for name, tensor in tensors.items()} if in_host_memory else tensors


class VersionPublisher:
    """A process's `Publisher`, with its relay."""

    def __init__(
        self,
        config: WeightsConfig,
        terms: PublishingTerms,
        share: TrainerRank | None = None,
        open_relay: OpenRelay = open_relay,
        request_poll_s: float = REQUEST_POLL_S,
    ) -> None:
        """Publish for a process that has a `share` of versions, or all of them."""
        warm_up()
        self._open_relay = open_relay
        self._place = terms.place
        self._relay = PatientRelay(self._opened(), terms.patience_s)
        self._request_poll_s = request_poll_s
        self._hears = False
        settings = _settings(config, terms.patience_s)
        self._publisher = Publisher(self._relay, terms.run, terms.model, settings, share, SigningKey(terms.secret))

    def discard_all(self) -> None:
        """Delete what an earlier trainer has published: nobody believes its signature."""
        discard_all(self._relay)

    def publish(self, version: int, tensors: Mapping[str, Tensor], pulled: Collection[int]) -> PublishReport:
        """`Publisher.publish`. From the first version on workers' requests are answered."""
        report = self._publisher.publish(version, tensors, pulled)
        if not self._hears:
            self._hears = True
            here().thread(target=self._answer_requests, name="requests").start()
        return report

    def follow(self, place: RelayPlace) -> None:
        """Publish to the relay at this place from now on; a put that is under way is tried again there."""
        if place != self._place:
            self._place = place
            self._relay.follow(self._opened())

    def _opened(self) -> Relay:
        return self._open_relay(self._place.url, self._place.token, self._place.anchor)

    def _answer_requests(self) -> None:
        """Publish keyframes for workers that can verify no chain of deltas, until the process ends."""
        while True:
            here().sleep(self._request_poll_s)
            try:
                self._publisher.answer_requests()
            except Exception as error:  # the run goes on without; the next poll may fare better
                said, foreseen = f"{type(error).__name__}: {error}", isinstance(error, WeightsError)
                log.error("requests for keyframes not answered", reason=said, exc_info=not foreseen)


def shares(config: Config, shards: Sequence[Shard], float32: Collection[str]) -> list[TrainerRank]:
    """What each rank publishes, where together they hold the policy in these `shards`; each rank of a worker's engine
    pulls its part."""
    _, engine = resolve_engine(config.engine, "")
    shapes = whole_shapes(chain.from_iterable(local.boxes for shard in shards for local in shard.values()))
    return TrainerRank.of_all(shards, tensor_parallel(shapes, engine.ranks) if engine.ranks > 1 else (), float32)


def _whole_share(config: Config, tensors: Mapping[str, Tensor]) -> TrainerRank | None:
    """How versions of one rank are cut for workers whose engine has several ranks; else None."""
    _, engine = resolve_engine(config.engine, "")
    if engine.ranks == 1:
        return None
    float32 = [name for name, tensor in tensors.items() if tensor.dtype == torch.float32]
    (share,) = shares(config, [whole({name: tuple(tensor.shape) for name, tensor in tensors.items()})], float32)
    return share


def _settings(config: WeightsConfig, patience_s: float) -> PublishSettings:
    elsewhere = "://" in config.relay
    return PublishSettings(
        keyframe_every=config.keyframe_every,
        merge_every=config.merge_every,
        keyframe_in_buckets=elsewhere,
        puts_at_once=PUTS_AT_ONCE if elsewhere else 1,
        keep_versions=config.keep_versions,
        link_bytes_per_s=config.link_gbps * BYTES_PER_S_IN_GBPS,
        part_timeout_s=PART_TIMEOUT_S + patience_s,
    )
