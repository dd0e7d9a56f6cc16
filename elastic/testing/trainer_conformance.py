"""What every trainer must do (`elastic.worker.trainer.base.PolicyTrainer`), as tests of pytest.

A third party's trainer passes the suite from one file:

    from elastic.testing.trainer_conformance import *
    from elastic.testing.trainers import TrainerUnderTest

    @pytest.fixture(params=[TrainerUnderTest("warp", make_trainer)], ids=str)
    def trainer_under_test(request):
        return request.param
"""

# pyright: basic

import pytest
import torch

from elastic.engine.model.stored import CheckpointError
from elastic.system.parking import Parkable
from elastic.testing.trainers import GROUPS, step_of


def equal(one, other):
    """Bit for bit: what is no number is equal to itself."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int16), other[name].view(torch.int16)) for name in one
    )


def train(made, step, skipped=()):
    """A whole step, of whose groups some are skipped; returns the weights after it."""
    for group in step_of(step):
        if group.index in skipped:
            made.skip_group(group.index, 1, group.trajectories)
        else:
            made.train_group(group)
    made.update()
    return made.tensors()


@pytest.fixture
def make(trainer_under_test):
    return trainer_under_test.make


def test_a_version_is_a_step_and_keeps_names_shapes_and_types(make, trainer_under_test):
    made = make()
    assert made.version == 0
    before = made.tensors()
    after = train(made, 0)
    assert made.version == 1
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    stored = torch.float32 if trainer_under_test.float32 else torch.bfloat16
    assert {tensor.dtype for tensor in (*before.values(), *after.values())} == {stored}
    assert all(tensor.is_contiguous() for tensor in after.values())
    assert not equal(before, after)
    assert dict(made.unusable) == {}


def test_what_was_published_stays_as_it_is(make):
    made = make()
    published = made.tensors()
    copies = {name: tensor.clone() for name, tensor in published.items()}
    train(made, 0)
    assert equal(published, copies)


def test_the_same_orders_come_to_the_same_weights(make):
    one, other = make(), make()
    for step in range(2):
        assert equal(train(one, step, skipped={1}), train(other, step, skipped={1}))
    assert one.metrics == other.metrics


def test_a_skipped_group_is_not_trained_on(make):
    assert not equal(train(make(), 0), train(make(), 0, skipped={GROUPS - 1}))


def test_checks_are_told_once(make):
    made = make()
    train(made, 0)
    checks = made.take_checks()
    assert sum(check.tokens for check in checks) > 0
    assert {check.version for check in checks} == {0}
    assert made.take_checks() == []


def test_it_goes_on_from_what_was_saved(make, tmp_path):
    through, stopped = make(), make()
    for made in (through, stopped):
        train(made, 0)
    stopped.save(tmp_path / "checkpoints" / "00000001.safetensors")
    resumed = make()
    resumed.load(tmp_path / "checkpoints" / "00000001.safetensors")
    assert (resumed.version, resumed.metrics) == (1, stopped.metrics)
    assert equal(resumed.tensors(), stopped.tensors())
    assert equal(train(through, 1), train(resumed, 1))


def test_what_was_not_saved_by_it_is_refused(make, tmp_path):
    made = make()
    before = made.tensors()
    (tmp_path / "odd").write_bytes(b"nothing of ours")
    with pytest.raises(CheckpointError):
        made.load(tmp_path / "odd")
    assert made.version == 0
    assert equal(made.tensors(), before)


def test_it_parks_between_any_orders_and_nothing_changes(make, tmp_path):
    made, undisturbed = make(), make()
    assert isinstance(make(), Parkable)
    for group in step_of(0):
        made.park()
        made.park()
        made.resume()
        made.train_group(group)
        undisturbed.train_group(group)
    made.park()
    made.resume()
    made.update()
    undisturbed.update()
    made.park()
    made.save(tmp_path / "parked")
    made.resume()
    made.resume()
    assert equal(made.tensors(), undisturbed.tensors())
    resumed = make()
    resumed.load(tmp_path / "parked")
    assert equal(resumed.tensors(), undisturbed.tensors())
