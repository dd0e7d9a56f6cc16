"""The policies by which rollouts share the device of a serving host, as its settings name them."""

from collections.abc import Mapping
from typing import Any

from elastic.compose.named_policies import NO_POLICY, named_policy, refuse_settings
from elastic.core.decisions import OF_DEVICES
from elastic.core.device_sharing import SharingPolicies
from elastic.core.types import NS_PER_S
from policies.admission import NoAdmission
from providers.serving_messages import ExecutorSettings, SharingPolicySettings


def sharing_policies(executor: ExecutorSettings, where: str, *section: str) -> SharingPolicies:
    """Return the policies that an executor's settings name; `section` is the key of those settings.

    Raises `ConfigError` for a policy that is not installed, and for settings that it does not have.
    """
    return SharingPolicies(**{decision: _decided(decision, executor, where, section) for decision in OF_DEVICES})


def _decided(decision: str, executor: ExecutorSettings, where: str, section: tuple[str, ...]) -> Any:
    chosen: SharingPolicySettings = getattr(executor, decision)
    words = (NO_POLICY,) if decision == "admission" else ()
    if chosen.policy in words:
        refuse_settings(chosen.settings, where, *section, decision)
        return NoAdmission()
    return named_policy(
        decision,
        chosen.policy,
        {**_own_keys(decision, chosen.policy, executor), **chosen.settings},
        where=where,
        key=(*section, decision, "policy"),
        settings_key=(*section, decision, "settings"),
        others=words,
    )


def _own_keys(decision: str, name: str, executor: ExecutorSettings) -> Mapping[str, Any]:
    """Return what the executor's own keys say to a policy of ours."""
    ttft_ns, tpot_ns = round(executor.ttft_slo_s * NS_PER_S), round(executor.tpot_slo_s * NS_PER_S)
    match decision, name:
        case "admission", "slo":
            slo = {"ttft_ns": ttft_ns, "tpot_ns": tpot_ns}
            return {"slo": slo, "longest_ns": round(executor.longest_share * ttft_ns)}
        case "memory", "preemptive":
            return {"headroom_share": executor.headroom_share, "lease_ns": round(executor.lease_s * NS_PER_S)}
        case "memory", "fine_grained" | "static":
            return {"lease_ns": round(executor.lease_s * NS_PER_S)}
        case _:
            return {}
