"""Helpers for tests: the suites that engines, trainers, providers, environments and policies pass, of this distribution
and of others, and worlds of faults."""

import sys

SUITES = (
    "conformance",
    "trainer_conformance",
    "provider_conformance",
    "environment_conformance",
    "episode_conformance",
    "policy_conformance",
)

if (pytest := sys.modules.get("pytest")) is not None:  # Without it nobody runs a suite.
    pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in SUITES))
