"""The embedded engine off its device: in an arena that others use meanwhile, and with weights of its own process."""

import msgspec
import pytest
import torch
from torch import Tensor

from elastic.core.types import WeightMode
from elastic.weights.source import TensorSource


def arena(recorder) -> list[Tensor]:
    return list(recorder.engine.runner.tables.values())


def test_others_use_the_arena_meanwhile_and_nothing_grows(make_torch_engine, turn):
    recorder = make_torch_engine()
    before, tables = recorder.run(turn("a")), arena(recorder)
    places = {table.data_ptr() for table in tables}
    for again in range(20):
        recorder.engine.park()
        assert arena(recorder) == []
        with torch.inference_mode():
            for table in tables:
                table.fill_(torch.nan)
        resumed = recorder.engine.resume()
        assert resumed.state_bytes == sum(table.nbytes for table in arena(recorder))
        assert {table.data_ptr() for table in arena(recorder)} == places
        assert recorder.run(msgspec.structs.replace(turn("a"), request_id=f"a{again}")) == before


def test_tensors_of_this_process_are_lost_once_and_kept_from_then_on(make_torch_engine, turn, weights):
    recorder = make_torch_engine(version=None)
    engine = recorder.engine
    engine.load_version(TensorSource(1, weights(1)), WeightMode.FINISH)
    engine.park()
    assert engine.statistics().weights_version is None
    engine.resume()
    engine.submit([turn("a")])
    assert engine.statistics().executing == 0
    engine.load_version(TensorSource(2, weights(2)), WeightMode.FINISH)
    recorder.finish("a")
    engine.park()
    engine.load_version(TensorSource(3, weights(3)), WeightMode.FINISH)
    engine.resume()
    assert recorder.run(turn("b")) == make_torch_engine(version=3).run(turn("b"))


def test_what_does_not_fit_on_the_device_leaves_it_and_may_come_again(make_torch_engine, turn):
    recorder = make_torch_engine()
    engine = recorder.engine
    engine.park()
    failures = iter([None] * 5 + [RuntimeError("out of memory")])

    def failing_once(step):
        if (error := next(failures, None)) is not None:
            raise error

    engine.runner.before = failing_once
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.resume()
    assert arena(recorder) == []
    assert engine.statistics().weights_version == 1
    engine.resume()
    assert recorder.run(turn("a")) == make_torch_engine().run(turn("a"))
