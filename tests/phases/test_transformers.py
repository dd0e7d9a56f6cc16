"""The callback for Transformers' trainers, told what a trainer tells it. With a real one: `make test-trl`."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool import phases
from elastic.pool.phases.transformers import ElasticCallback
from tests.phases.stub_pool import StubPool


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubPool]:
    with StubPool() as stub:
        for name, value in stub.environment().items():
            monkeypatch.setenv(name, value)
        yield stub
        phases.leave()


def test_what_the_model_is_used_for_is_its_phase(pool: StubPool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    callback, state, control = ElasticCallback(), TrainerState(), TrainerControl()
    callback.on_train_begin(None, state, control, model=model, optimizer=optimizer)  # type: ignore[arg-type]
    for step in (11, 12):
        with torch.no_grad():
            model(torch.ones(2))
            model(torch.ones(2))
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
        optimizer.step()
        state.global_step = step
        callback.on_step_end(None, state, control)  # type: ignore[arg-type]
        model.state_dict()
    phases.leave()
    pool.until(lambda stub: stub.held is None and len(stub.said(w.YieldPhase)) == 4)
    assert [ask.phase for ask in pool.said(w.AskPhase)] == [PhaseKind.ROLLOUT, PhaseKind.TRAIN] * 2
    assert [done.steps for done in pool.said(w.StepsDone)] == [11, 12]
