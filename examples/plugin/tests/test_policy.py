"""The suite of policies."""

import pytest

from elastic.testing.policies import PolicyUnderTest
from elastic.testing.policy_conformance import *  # noqa: F403


@pytest.fixture
def policies_under_test() -> list[PolicyUnderTest]:
    preferred = PolicyUnderTest("routing", "preferred", {"providers": ["serving", "spot"]})
    return [preferred, PolicyUnderTest("charging", "by_use")]
