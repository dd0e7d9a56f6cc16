"""A second engine on a device that serves, awake while serving rests; here the embedded one in vLLM's place."""

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.types import FinishReason
from elastic.engine.vllm.alternation import Alternation, RestfulServing
from elastic.testing.engines import EngineUnderTest


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=40), st.integers(1, 100))
def test_rollouts_are_awake_only_after_a_rest(looks, rest_ns):
    serving, now_ns, busy_ns = RestfulServing(rest_ns, 0), 0, 0
    for pause_ns, load in looks:
        now_ns += pause_ns
        busy_ns = now_ns if load else busy_ns
        assert serving.may_be_awake(load, now_ns) is (now_ns - busy_ns >= rest_ns)


def test_a_second_engine_sleeps_while_serving_has_requests(published, turn):
    recorder: Any = EngineUnderTest("torch").start({})
    load = [0]
    try:
        recorder.load(published(1))
        with Alternation(recorder.engine, lambda: load[0], rest_s=0.1):
            assert recorder.engine.statistics().asleep
            recorder.run(turn("after a rest"))
            recorder.engine.submit([turn("long", max_new_tokens=230)])
            recorder.until_tokens("long", 1)
            load[0] = 1
            recorder.finish("long")
            assert recorder.end("long").finish is FinishReason.ABORTED
            recorder.engine.submit([turn("waits")])
            time.sleep(0.2)  # longer than the rest: it is not the time alone that wakes
            assert recorder.engine.statistics().asleep
            load[0] = 0
            recorder.finish("waits")
    finally:
        recorder.close()
