"""A model that is split over two ranks: each pulls its part, and what is said is what the whole model says."""

import pytest

pytest.importorskip("vllm")

from tests.engine.vllm.reference import Reference
from tests.engine.vllm.test_weights import apart, said_by

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_moe"])
def test_each_rank_pulls_its_part(start, trainer, tmp_path, architecture):
    publishes = trainer(architecture, ranks=2)
    recorder = start(architecture, vllm={"start_timeout_s": 1200.0, "tensor_parallel": 2})
    model = publishes.model
    versions = [model.tensors(0)]
    versions.append(model.drifted(versions[0], 1))
    says = [Reference(tmp_path / f"v{number}", model, tensors) for number, tensors in enumerate(versions)]
    for version, tensors in enumerate(versions):
        source = publishes.publish(version, tensors)
        report = recorder.engine.prefetch(source, 60.0)
        full_bytes = sum(tensor.nbytes for tensor in tensors.values())
        # Both ranks together; norms, routers and padded vocabularies are everybody's.
        assert report.full_bytes < 1.2 * full_bytes, "each rank holds half of what is split"
        recorder.load(source)
        said, noise = said_by(recorder, f"{version}/"), recorder.engine.capabilities.logprob_noise
        assert apart(said, says[version]) <= noise
        assert apart(said, says[1 - version]) > 4 * noise
    recorder.close()
