"""What only the embedded engine promises."""

import pytest
import torch

from elastic.core.types import FinishReason, WeightMode
from elastic.engine.base import WeightsMismatch
from elastic.weights.source import TensorSource


def test_declares_itself_replayable_on_one_cpu_thread(make_torch_engine):
    one, two = (make_torch_engine(threads=threads).engine.capabilities for threads in (1, 2))
    assert (one.engine, one.device, one.max_context_tokens) == ("torch", "cpu", 256)
    assert one.replayable_sampling
    assert not two.replayable_sampling


@pytest.mark.parametrize("mode", list(WeightMode))
def test_weights_that_diverged_end_turns_and_leave_no_trace(make_torch_engine, turn, weights, mode):
    recorder = make_torch_engine()
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights(1).items()}
    recorder.engine.load_version(TensorSource(2, broken), WeightMode.FINISH)
    requests = [turn(f"broken {i}", prompt=60) for i in range(3)]
    recorder.run(*requests)
    assert {recorder.end(request.request_id).finish for request in requests} == {FinishReason.ERROR}
    assert "not finite" in recorder.end("broken 0").detail
    recorder.engine.load_version(TensorSource(3, weights(3)), mode)
    found = recorder.run(turn("a"), turn("b", prompt=90))
    assert found == make_torch_engine(version=3).run(turn("a"), turn("b", prompt=90))


def test_tensors_of_another_dtype_are_refused(make_torch_engine, turn, weights):
    recorder = make_torch_engine()
    tensors = weights(2)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    with pytest.raises(WeightsMismatch, match=r"model\.norm\.weight: expected bfloat16"):
        recorder.engine.load_version(TensorSource(2, tensors), WeightMode.FINISH)
    (after,) = recorder.run(turn("a"))
    assert recorder.versions("a") == [1] * 12
    assert make_torch_engine().run(turn("a")) == [after]


def test_a_failing_iteration_ends_its_turns_and_the_engine_serves_on(make_torch_engine, turn):
    recorder = make_torch_engine(max_batch=1)
    failures = iter([RuntimeError("out of memory")])

    def failing_once(step):
        if (error := next(failures, None)) is not None:
            raise error

    recorder.engine.runner.before = failing_once
    recorder.run(turn("unlucky"), turn("lucky"))
    assert recorder.end("unlucky").finish is FinishReason.ERROR
    assert recorder.end("unlucky").detail == "RuntimeError: out of memory"
    assert recorder.tokens("lucky") == make_torch_engine().run(turn("lucky"))[0]
    assert recorder.engine.statistics().kv_blocks_used == 0


def test_waiting_for_itself_is_refused(make_torch_engine, turn, published):
    recorder = make_torch_engine()
    errors = []

    def from_the_sink():
        for call in (recorder.engine.sleep, lambda: recorder.load(published(2))):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    recorder.on_chunks = from_the_sink
    recorder.run(turn("a", max_new_tokens=1))
    recorder.until(lambda: len(errors) == 2)
    assert all("cannot wait for itself" in error for error in errors)


def test_starts_once(make_torch_engine):
    recorder = make_torch_engine()
    with pytest.raises(RuntimeError, match="started before"):
        recorder.engine.start(lambda chunks: None)


@pytest.mark.parametrize("late", [True, False])
def test_it_counts_the_iterations_that_took_longer_than_modelled(make_torch_engine, turn, late):
    pacing = {"prefill_tokens_per_s": 1e9 if late else 100.0, "decode_step_s": {1: 1e-7 if late else 0.2}}
    recorder = make_torch_engine(max_batch=1, pacing=pacing)
    recorder.run(turn("a", prompt=20, max_new_tokens=4))
    found = recorder.engine.statistics()
    assert found.paced_iterations == found.progress > 0
    assert (found.late_iterations > 0) == late
