"""The learning rate by update."""

import pytest

from elastic.config import TrainerConfig
from elastic.worker.trainer.schedules import learning_rate


def rates(updates: int, last: int | None, **settings: object) -> list[float]:
    config = TrainerConfig.model_validate({"learning_rate": 1.0, "warmup_updates": 2} | settings)
    return [learning_rate(config, number, last) for number in range(updates)]


def test_it_rises_and_stays() -> None:
    assert rates(4, 4) == [0.5, 1.0, 1.0, 1.0]
    assert rates(4, None, schedule="linear") == [0.5, 1.0, 1.0, 1.0]


def test_it_falls_until_the_last_update() -> None:
    assert rates(7, 6, schedule="linear") == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    assert rates(6, 6, schedule="cosine", schedule_final_share=0.2) == pytest.approx(
        [0.5, 1.0, 0.2 + 0.8 * (1 + 2**-0.5) / 2, 0.6, 0.2 + 0.8 * (1 - 2**-0.5) / 2, 0.2]
    )


def test_without_a_rise_it_falls_from_the_first_update_on() -> None:
    found = rates(4, 4, schedule="cosine", warmup_updates=0)
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(0.0)
