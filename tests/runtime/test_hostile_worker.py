"""A spot worker that holds a valid session and attacks the weights of a live run, by every way that it was given."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from providers.base import ProviderContext
from providers.markets import SpotSettings
from providers.spot import SpotProvider

pytestmark = [pytest.mark.slow, pytest.mark.alone]

HOSTILE_WORKER = """
import sys

from elastic.weights.encoder import publish_keyframe
from elastic.weights.records import begun_key, keyframe_key, manifest_key
from elastic.weights.client import WeightsClient
from elastic.weights.errors import RelayError
from elastic.weights.relay import open_relay
from elastic.weights.signing import SigningKey

report, sound = sys.argv.pop(1), WeightsClient.stage


def attack(self, source, timeout_s):
    pulled = sound(self, source, timeout_s)
    zeros = {name: tensor * 0 for name, tensor in self.apply(source).tensors.items()}
    relay, run, version = open_relay(source.relay, source.relay_token), source.run, source.version

    def replace_keyframe():
        for key in (manifest_key(version), keyframe_key(version)):
            relay.delete(key)
        publish_keyframe(relay, run, version, zeros, {}, SigningKey())

    attacks = {
        "replace": replace_keyframe,
        "put": lambda: publish_keyframe(relay, run, version + 1, zeros, {}, SigningKey()),
        "begin": lambda: relay.put(begun_key(version + 1, version), b"junk"),
        "complete": lambda: relay.put(manifest_key(version + 2), b"junk"),
    }
    for name, act in attacks.items():
        try:
            act()
            outcome = "done"
        except RelayError as error:
            outcome = str(error)
        with open(report, "a") as file:
            print(f"{name}: {outcome}", file=file)
    return pulled


WeightsClient.stage = attack
from elastic.cli import main

main()
"""


def hostile(directory: Path) -> tuple[type[SpotProvider], Path]:
    """A market whose instances were somebody else's before; and what they report of their attacks."""
    script, report = directory / "hostile.py", directory / "attacks"
    script.write_text(HOSTILE_WORKER)

    class Hostile(SpotProvider):
        def __init__(self, name: str, settings: SpotSettings, context: ProviderContext) -> None:
            command = (sys.executable, str(script), str(report), *context.worker_command[3:])
            super().__init__(name, settings, msgspec.structs.replace(context, worker_command=command))

    return Hostile, report


def last_weights(run: Any) -> dict[str, torch.Tensor]:
    return load_file(sorted((run.run_dir / "checkpoints").glob("*.safetensors"))[-1])


@pytest.mark.nightly
async def test_a_worker_that_attacks_the_weights_leaves_no_trace_in_them(live, live_config, tmp_path: Path) -> None:
    market, report = hostile(tmp_path)
    calm = last_weights(await live(live_config(), ()))
    for relay in ("http", "directory"):
        config = live_config(weights={"relay": relay})
        attacked = await live(config, ("serving", "spot"), provider_types={"spot": market})
        assert attacked.outcome.failed == ""
        outcomes = [line.partition(": ")[2] for line in report.read_text().splitlines()]
        report.unlink()
        assert len(outcomes) >= 4
        if relay == "http":
            assert all(" 403 " in outcome for outcome in outcomes), outcomes
        else:
            assert "done" in outcomes, "on a disk nothing keeps workers apart"
        weights = last_weights(attacked)
        assert weights.keys() == calm.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, calm[name]), name
