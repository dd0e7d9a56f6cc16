"""The suite of environments in token ids."""

import random

import pytest

from elastic.testing.episode_conformance import *  # noqa: F403
from elastic.testing.episodes import EpisodesUnderTest

SEED = 5
SECRET = random.Random(SEED).randint(0, 9)


@pytest.fixture
def episodes_under_test() -> EpisodesUnderTest:
    wrong = (SECRET + 1) % 10
    return EpisodesUnderTest("guess", seed=SEED, won=[[wrong], [SECRET]], reward=0.5)
