"""What one rank publishes of each version, together with all others."""

from collections.abc import Collection

from torch import Tensor

from elastic.config import Config
from elastic.weights.publisher import PublishReport
from elastic.worker.publication import PublishingTerms, RelayPlace, VersionPublisher, shares, tensors_of
from elastic.worker.trainer.transformers.trainer import TransformersTrainer


class OwnPart:
    """The part of the model that a rank publishes. It is a copy, so that training goes on while it is published."""

    def __init__(self, config: Config, trainer: TransformersTrainer, rank: int) -> None:
        self._config = config
        self._trainer = trainer
        self._rank = rank
        self._held: dict[str, Tensor] = {}

    def hold(self, *, in_host_memory: bool) -> None:
        """Keep what is published of the weights as they are. All ranks call this at the same time."""
        self._held = tensors_of(self._trainer, in_host_memory=in_host_memory)

    def begin(self, terms: PublishingTerms) -> None:
        """Publish on these terms from now on."""
        published = self._trainer.published
        share = shares(self._config, published.shards(), published.float32)[self._rank]
        self._publisher = VersionPublisher(self._config.weights, terms, share)

    def discard_all(self) -> None:
        """Delete what lies on the relay, before any rank publishes."""
        self._publisher.discard_all()

    def publish(self, version: int, pulled: Collection[int]) -> PublishReport:
        """Publish what is held, under this version. Raises as `elastic.weights.publisher.Publisher` does."""
        held, self._held = self._held, {}
        return self._publisher.publish(version, held, pulled)

    def follow(self, place: RelayPlace) -> None:
        self._publisher.follow(place)
