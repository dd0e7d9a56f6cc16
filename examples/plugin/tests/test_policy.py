"""The suite of policies."""

import pytest

from elastic.testing.policies import PolicyUnderTest
from elastic.testing.policy_conformance import *  # noqa: F403


@pytest.fixture
def policies_under_test() -> list[PolicyUnderTest]:
    return [PolicyUnderTest("routing", "preferred", {"providers": ["serving", "spot"]})]
