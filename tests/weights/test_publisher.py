"""What a publisher does beside the deltas may fail, and is made up for."""

from pathlib import Path

import torch

from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import RelayError
from elastic.weights.publisher import Publisher, PublishSettings
from elastic.weights.records import keyframe_key
from elastic.weights.relay import Buffer
from elastic.weights.versions import published_updates
from tests.weights.signed import KEY, TRUST, pull

EVERY = PublishSettings(bucket_elements=64, tile_elements=16, keyframe_every=2, merge_every=2, keep_versions=9)


class WithoutKeyframes(DirectoryRelay):
    """Has no room for keyframes of versions 1 to 3."""

    def put(self, key: str, *parts: Buffer) -> None:
        if key in (keyframe_key(1), keyframe_key(2), keyframe_key(3)):
            raise RelayError(f"{key}: no space left")
        super().put(key, *parts)


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((9,), version, dtype=torch.bfloat16)}


def test_a_keyframe_that_fails_is_due_again_and_stops_no_version(tmp_path: Path):
    relay = WithoutKeyframes(tmp_path / "relay")
    publisher = Publisher(relay, "run", {}, EVERY, key=KEY)
    for version in range(6):
        publisher.publish(version, weights(version))
    publisher.close()
    assert [update.version for update in published_updates(relay) if update.base is None] == [0, 4]
    for version in range(6):
        assert torch.equal(pull(relay, TRUST, version)["a"], weights(version)["a"])
