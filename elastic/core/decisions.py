"""The decisions that policies make, each by its name, and the contract of the policy that makes it."""

from collections.abc import Mapping
from typing import Any

from elastic.core.cluster.policy import ChargingPolicy, DriftPolicy, PlacementPolicy, TailPolicy
from elastic.core.device_sharing import AdmissionPolicy, MemoryPolicy
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

OF_RUNS: Mapping[str, type[Any]] = {
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
OF_POOLS: Mapping[str, type[Any]] = {
    "placement": PlacementPolicy,
    "tail": TailPolicy,
    "drift": DriftPolicy,
    "charging": ChargingPolicy,
}
OF_DEVICES: Mapping[str, type[Any]] = {
    "admission": AdmissionPolicy,
    "memory": MemoryPolicy,
}
"""The decisions about a serving device that rollouts share."""
DECISIONS: Mapping[str, type[Any]] = {**OF_RUNS, **OF_POOLS, **OF_DEVICES}
