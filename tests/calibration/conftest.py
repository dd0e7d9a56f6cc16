"""A small policy on disk, and settings of engines that are quickly measured."""

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.config import Config

ENGINE = {"max_batch": 4, "max_context_tokens": 128, "prefill_chunk_tokens": 64, "kv_blocks": 64, "device": "cpu"}


@pytest.fixture
def configured(tmp_path: Path, checkpoint: Path) -> Callable[..., Config]:
    """A configuration with these engine settings on top of `ENGINE`."""

    def of(sections: dict[str, object] | None = None, **engine: object) -> Config:
        body = {
            "run": {"steps": 2, "directory": str(tmp_path / "runs"), "seed": 3},
            "model": {"checkpoint": str(checkpoint)},
            "rollout": {"groups": 3, "group_size": 4, "max_turns": 4, "max_tokens_per_turn": 16},
            "trainer": {"updates_per_step": 1},
            "engine": ENGINE | engine,
        }
        return Config.model_validate(body | (sections or {}))

    return of
