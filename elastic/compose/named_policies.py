"""Policies by the names that configurations give them: entry points `elastic.policies`, ours and third parties' alike.

An entry point is called `DECISION.NAME`, after what it decides (`elastic.core.decisions`) and what
configurations call it. It names a class whose instances cannot change: a frozen `msgspec.Struct` or dataclass. Its
fields are its settings, so it has nothing else that it could remember.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

import msgspec

from elastic.compose.checked_policies import CheckedPolicy
from elastic.config import ConfigError, ConfigProblem
from elastic.core.decisions import DECISIONS
from elastic.system.installed import found_point, installed, is_ours, load_point, package_of
from elastic.system.named_code import CodeUnusable
from elastic.system.plain_values import shown, told

ENTRY_POINTS = "elastic.policies"
NO_POLICY = "none"
"""What configurations say where nothing is to be decided."""
AUTO = "auto"
"""What configurations say where their other keys decide which policy it is."""


def policy_names(decision: str) -> list[str]:
    """What configurations call the policies that are installed for a decision."""
    of_decision = f"{decision}."
    return sorted(name.removeprefix(of_decision) for name in installed(ENTRY_POINTS) if name.startswith(of_decision))


def settings_of(kind: type[Any]) -> Mapping[str, Any]:
    """Return a policy's settings by name, each with its type, annotations included."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in _fields(kind)}


def asked_of(decision: str) -> list[str]:
    """The names of what a policy of this decision must have."""
    return sorted(name for name in vars(DECISIONS[decision]) if not name.startswith("_"))


def named_policy(
    decision: str,
    name: str,
    settings: Mapping[str, Any],
    *,
    where: str,
    key: tuple[str, ...],
    settings_key: tuple[str, ...],
    others: Iterable[str] = (),
) -> Any:
    """The policy of this name, with these settings; the answers of one from another package are checked. Raises
    `ConfigError`.

    `key` is the configuration's key that has the name, `settings_key` the one that has the settings, and `others` are
    words that it allows in place of a policy's name.
    """
    kind = policy_kind(decision, name, where, key, others)
    full, fields = f"{decision}.{name}", _fields(kind)
    point = installed(ENTRY_POINTS)[full]
    if unknown := sorted(settings.keys() - set(fields)):
        allowed = ", ".join(fields) or "none"
        problems = [ConfigProblem(f"unknown key; allowed: {allowed}", (*settings_key, one), where) for one in unknown]
        raise ConfigError(*problems)
    try:
        policy = msgspec.convert(dict(settings), kind)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$.")
        inner = tuple(part for part in at.rstrip("`").split(".") if part)
        found = f" (found {shown(settings[inner[0]])})" if inner and inner[0] in settings else ""
        detail = f"{problem[:1].lower()}{problem[1:]}{found}"
        raise ConfigError(ConfigProblem(detail, (*settings_key, *inner), where)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem = f"{found_point(point)} cannot be made: {told(error)}"
        raise ConfigError(ConfigProblem(problem, settings_key, where)) from error
    return policy if is_ours(point) else CheckedPolicy(policy, decision, f"{full} of the package {package_of(point)}")


def refuse_settings(settings: Mapping[str, Any], where: str, *section: str) -> None:
    """Raises `ConfigError` for settings of a section that names no policy."""
    if settings:
        problem = f"found {', '.join(settings)}, and no policy to take them; allowed: none"
        raise ConfigError(ConfigProblem(problem, (*section, "settings"), where))


def policy_kind(decision: str, name: str, where: str, key: tuple[str, ...], others: Iterable[str] = ()) -> type[Any]:
    """The class of the policy of this name. Raises `ConfigError` for one that is not installed, cannot be loaded, or is
    not what the decision asks for."""
    full = f"{decision}.{name}"
    points = installed(ENTRY_POINTS)
    if full not in points:
        allowed = ", ".join(map(repr, [*policy_names(decision), *others])) or "none"
        problem = f"found {name!r}; allowed: {allowed}, or another that is installed ({ENTRY_POINTS}: {decision}.NAME)"
        raise ConfigError(ConfigProblem(problem, key, where))
    try:
        kind = load_point(points[full])
    except CodeUnusable as error:
        raise ConfigError(ConfigProblem(str(error), key, where)) from error
    if not _cannot_change(kind) or any(not hasattr(kind, one) for one in asked_of(decision)):
        wanted = " and ".join(asked_of(decision))
        problem = (
            f"{found_point(points[full])} is {shown(kind)}; allowed: a frozen msgspec.Struct or "
            f"dataclass with {wanted} ({DECISIONS[decision].__module__}.{DECISIONS[decision].__name__})"
        )
        raise ConfigError(ConfigProblem(problem, key, where))
    try:
        settings_of(kind)
    except Exception as error:
        problem = f"found {full!r}, whose fields have types that cannot be read: {told(error)}"
        raise ConfigError(ConfigProblem(problem, key, where)) from error
    return kind


def _cannot_change(kind: object) -> bool:
    if not isinstance(kind, type):
        return False
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_config__.frozen
    return dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _fields(kind: type[Any]) -> list[str]:
    if issubclass(kind, msgspec.Struct):
        return list(kind.__struct_fields__)
    return [one.name for one in dataclasses.fields(kind) if one.init]
