"""Where tokens come from: figures are told by provider and engine, so that one that computes otherwise is seen."""

from collections.abc import Callable
from typing import TypeAlias

from elastic.config import Config
from elastic.core.ids import provider_of

TRAINER_PROVIDER = "trainer"
"""The provider whose worker seeds on the trainer's own device."""

SourceOf: TypeAlias = Callable[[str], str]
"""What a worker is counted under."""


def sources_of(config: Config) -> SourceOf:
    """By provider and engine, such as "spot/vllm"."""
    own = {name: section.get("engine", {}) for name, section in config.providers.items()}

    def source(worker: str) -> str:
        provider = provider_of(worker)
        engine = config.trainer.engine if provider == TRAINER_PROVIDER else own.get(provider, {})
        return f"{provider}/{engine.get('kind', config.engine.kind)}"

    return source
