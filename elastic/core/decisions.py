"""The decisions that policies make, each by its name, and the contract of who makes it."""

from collections.abc import Mapping
from typing import Any

from elastic.core.policy import (
    BalancingPolicy,
    CurriculumPolicy,
    DeparturePolicy,
    HoldingPolicy,
    ProvisioningPolicy,
    ReplacementPolicy,
    RoutingPolicy,
    SamplingPolicy,
    SeedingPolicy,
    SelectionPolicy,
)

DECISIONS: Mapping[str, type[Any]] = {
    "routing": RoutingPolicy,
    "balancing": BalancingPolicy,
    "seeding": SeedingPolicy,
    "provisioning": ProvisioningPolicy,
    "holding": HoldingPolicy,
    "replacement": ReplacementPolicy,
    "departure": DeparturePolicy,
    "selection": SelectionPolicy,
    "sampling": SamplingPolicy,
    "curriculum": CurriculumPolicy,
}
