"""Every key of a run's configuration, and of a pool's: meaning, unit, default and bounds, by the models of settings."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import structlog
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from elastic.compose.named_policies import ENTRY_POINTS, policy_kind, policy_names, settings_of
from elastic.compose.plan import TRACE_PLAYERS
from elastic.compose.pool_config import PoolConfig
from elastic.config import Config, ConfigError
from elastic.core.decisions import DECISIONS, OF_DEVICES, OF_POOLS, OF_RUNS
from elastic.system.installed import installed, is_ours, load_point
from elastic.system.named_code import CodeUnusable

log = structlog.get_logger(__name__)

UNITS = {
    "usd_per_gpu_hour": "$/GPU-hour",
    "usd_per_s": "$/s",
    "usd_per_call": "$/call",
    "usd": "$",
    "per_s": "1/s",
    "ms": "ms",
    "ns": "ns",
    "s": "s",
    "gbps": "Gbit/s",
    "gb": "GB",
    "mb": "MB",
    "bytes": "bytes",
    "tokens": "tokens",
    "share": "share, 0 to 1",
}
"""By the end of a key's name; the first that fits."""
_NAMES = {float: "number", int: "whole number", bool: "true or false", str: "text", Path: "path", dict: "section"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "max_length": "length ≤"}
ENVIRONMENTS = "elastic.environments"
ASKED_WITHIN_S = 60.0
"""How long other packages' environments may take to be imported."""
_INSTALLED = (
    ("providers.NAME", "elastic.providers", "for `kind = {kind!r}`"),
    ("engine", "elastic.engines", ""),
    ("trainer", "elastic.trainers", ""),
    ("environment.settings", ENVIRONMENTS, "of environment {kind!r}"),
    ("rewards.pool_settings", "elastic.function_pools", "of pool {kind!r}"),
)
"""Where the settings of what is installed stand, its group of entry points, and when they apply."""


_SECTIONS = {
    **dict.fromkeys(OF_RUNS, "{}"),
    "curriculum": "",
    **dict.fromkeys(OF_POOLS, "{}"),
    **dict.fromkeys(OF_DEVICES, "providers.NAME.executor.{}"),
}
"""The section with a decision's `settings`; empty where a policy has none."""


POLICIES = "with policy "
_BY_KIND = ("engine", "trainer")
"""Places in which each kind has a section of its own."""


class KeyMeaning(msgspec.Struct, frozen=True, kw_only=True):
    """`applies` says for which provider, engine, environment, pool of functions or policy the key is, or that it is a
    pool's; empty for a key of all runs."""

    key: str
    section: str
    kind: str
    default: str
    unit: str
    meaning: str
    applies: str = ""

    def line(self) -> str:
        applies = f" ({self.applies})" if self.applies else ""
        unit = f", in {self.unit}" if self.unit else ""
        return f"{self.key}{applies}: {self.kind}{unit}; default {self.default or 'none: it is required'}"


def key_meanings() -> list[KeyMeaning]:
    """All keys, those of what is installed included, in the order of the models."""
    found = list(_of(Config, "", ""))
    elsewhere: list[str] = []
    for place, group, applies in _INSTALLED:
        for name, point in sorted(installed(group).items()):
            if group == ENVIRONMENTS and not is_ours(point):
                elsewhere.append(name)  # Our processes import none of those.
                continue
            found += _of_installed(place, group, applies, name)
    return [*found, *_asked_elsewhere(elsewhere), *_of(PoolConfig, "", "in POOL.toml"), *_of_policies()]


def _of_installed(place: str, group: str, applies: str, name: str) -> Iterator[KeyMeaning]:
    """Yield the keys of what is installed; none of what cannot be loaded, which the log names."""
    try:
        settings = getattr(load_point(installed(group)[name]), "Settings", None)
    except CodeUnusable as error:
        log.warning("keys not explained", group=group, reason=str(error))
        return
    if isinstance(settings, type) and issubclass(settings, BaseModel):
        section = f"{place}.{name}" if place in _BY_KIND else place
        yield from _of(settings, section, applies.format(kind=name))


def _asked_elsewhere(environments: Sequence[str]) -> Sequence[KeyMeaning]:
    """The keys of other packages' environments, which a process of its own imports."""
    if not environments:
        return ()
    try:
        command = [sys.executable, "-m", __name__, *environments]
        told = subprocess.run(command, capture_output=True, check=True, timeout=ASKED_WITHIN_S).stdout
        return msgspec.json.decode(told.splitlines()[-1], type=list[KeyMeaning])
    except (subprocess.SubprocessError, OSError, IndexError, msgspec.DecodeError) as error:
        log.warning("keys not explained", group=ENVIRONMENTS, environments=environments, reason=repr(error))
        return ()


class InstalledPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that is installed: what it decides, the name that configurations give it, where its code is, what it
    does, and its settings by name with their types. `fault` says why it cannot be used, if it cannot."""

    decision: str
    policy: str
    code: str
    meaning: str = ""
    settings: dict[str, str] = {}
    fault: str = ""


def installed_policies() -> list[InstalledPolicy]:
    """Return all policies that are installed, by decision and name."""
    found: list[InstalledPolicy] = []
    for decision in DECISIONS:
        for name in policy_names(decision):
            code = installed(ENTRY_POINTS)[f"{decision}.{name}"].value
            try:
                kind = policy_kind(decision, name, ENTRY_POINTS, (decision, "policy"))
            except ConfigError as error:
                found.append(InstalledPolicy(decision=decision, policy=name, code=code, fault=str(error)))
                continue
            settings = {key: _typed(annotation) for key, annotation in settings_of(kind).items()}
            meaning = _first_sentence(kind)
            found.append(InstalledPolicy(decision=decision, policy=name, code=code, meaning=meaning, settings=settings))
    return found


def _of_policies() -> Iterator[KeyMeaning]:
    """Yield the settings of policies; those that several policies of a decision have in common once."""
    for decision, section in _SECTIONS.items():
        place, pools = f"{section.format(decision)}.settings", " in POOL.toml" if decision in OF_POOLS else ""
        found: dict[tuple[str, str], dict[str, type[Any]]] = {}
        for name in policy_names(decision) if section else ():
            with contextlib.suppress(ConfigError):  # `elastic policies` says which cannot be used, and why.
                kind = policy_kind(decision, name, ENTRY_POINTS, (decision, "policy"))
                for key, annotation in settings_of(kind).items():
                    found.setdefault((key, _typed(annotation)), {})[name] = kind
        for (key, typed), kinds in found.items():
            described = {_described(settings_of(kind)[key]) for kind in kinds.values()}
            defaults = {_defaults(kind).get(key, "") for kind in kinds.values()}
            if "" in defaults and all(kind.__module__.startswith("policies.") for kind in kinds.values()):
                defaults = {"as the configuration's own keys say"}
            yield KeyMeaning(
                key=f"{place}.{key}",
                section=place,
                kind=typed,
                default=defaults.pop() if len(defaults) == 1 else "the policy's own",
                unit=_unit(key),
                meaning="; ".join(sorted(filter(None, described))) or _of_which(kinds),
                applies=f"{POLICIES}{', '.join(kinds)}{pools}",
            )


def _of_which(kinds: Mapping[str, type[Any]]) -> str:
    if len(kinds) > 1:
        return f"a setting of these policies, which {next(iter(kinds.values())).__module__} describes"
    return f"a setting of this policy: {_first_sentence(next(iter(kinds.values())))}"


def _first_sentence(kind: type[Any]) -> str:
    words = " ".join((kind.__doc__ or kind.__name__).split())
    return words.partition(". ")[0].rstrip(".")


def _defaults(kind: type[Any]) -> Mapping[str, str]:
    """Return the defaults of a policy's settings as JSON; none of those that are required."""
    if issubclass(kind, msgspec.Struct):
        fields = {one.name: one.default for one in msgspec.structs.fields(kind) if one.default is not msgspec.NODEFAULT}
    else:
        fields = {one.name: one.default for one in dataclasses.fields(kind) if one.default is not dataclasses.MISSING}
    return {name: "none" if value is None else json.dumps(value, default=str) for name, value in fields.items()}


def _typed(annotation: Any) -> str:
    metas = [one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, msgspec.Meta)]
    bounds = [
        f"{sign} {bound:g}"
        for one in metas
        for at, sign in _BOUNDS.items()
        if (bound := getattr(one, at, None)) is not None
    ]
    return " ".join([_type(annotation), ", ".join(bounds)]).strip()


def _described(annotation: Any) -> str:
    return next(
        (one.description for one in getattr(annotation, "__metadata__", ()) if getattr(one, "description", None)), ""
    )


def _unit(name: str) -> str:
    return next((unit for end, unit in UNITS.items() if name == end or name.endswith(f"_{end}")), "")


def explained(asked: str, meanings: Sequence[KeyMeaning] | None = None) -> list[KeyMeaning]:
    """The meanings of a key, or of all keys of a section. A provider's section may be called by its kind, or by
    the name that a configuration gives to a provider of any kind. Where there is no such key, those are meant that end
    like that: `executor.admission`. `meanings` are all there are, where they are known already.

    Raises `ConfigError` for a key that there is not, with those that are nearly it.
    """
    meanings = key_meanings() if meanings is None else meanings
    wanted = [asked]
    parts = asked.split(".")
    if parts[0] == "providers" and len(parts) > 1 and parts[1]:
        kind = f"for `kind = {TRACE_PLAYERS.get(parts[1], parts[1])!r}`"
        own = [one for one in meanings if one.applies == kind]
        meanings = [*own, *(one for one in meanings if one.applies.startswith(POLICIES))] if own else meanings
        wanted.append(".".join(["providers", "NAME", *parts[2:]]))
    for name in wanted if asked else ():
        if found := [one for one in meanings if one.key == name or f"{one.section}.".startswith(f"{name}.")]:
            return found
    ends = f".{asked}"
    if asked and (found := [one for one in meanings if one.key.endswith(ends) or f"{ends}." in f"{one.section}."]):
        return found
    named = [*(one.key for one in meanings), *(one.section for one in meanings if one.section)]
    known = list(dict.fromkeys(named))
    same = [key for key in known if key.rpartition(".")[2] == parts[-1]]
    near = list(dict.fromkeys([*same, *get_close_matches(asked, known, 5, 0.6)]))[:5]
    allowed = (
        f"near: {', '.join(near)}"
        if near
        else f"sections: {', '.join(sorted({*Config.model_fields, *PoolConfig.model_fields}))}"
    )
    raise ConfigError(f"elastic config explain: unknown key {asked!r}; {allowed}")


def changed(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a resolved configuration whose values are not the defaults, with what they are."""
    return dict(_changed(resolved, Config, ""))


def _changed(values: Mapping[str, Any], kind: type[BaseModel] | None, above: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{above}.{name}" if above else name
        field = kind.model_fields.get(name) if kind is not None else None
        inner = _model(field.annotation) if field is not None else None
        if isinstance(value, Mapping) and value and (inner is not None or field is None or not above):
            yield from _changed(value, inner, key)
        elif field is None or value != _plain(field):
            yield key, value


def _plain(field: FieldInfo) -> Any:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    plain = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
    return json.loads(json.dumps(plain, default=str))


def _of(kind: type[BaseModel], section: str, applies: str) -> Iterator[KeyMeaning]:
    for name, field in kind.model_fields.items():
        key = f"{section}.{name}" if section else name
        inner = _model(field.annotation)
        if inner is not None and (not section or not field.description):
            yield from _of(inner, key, applies)
            continue
        yield KeyMeaning(
            key=key,
            section=section,
            kind=_kind(field),
            default=_default(field),
            unit=_unit(name),
            meaning=field.description or "",
            applies=applies,
        )
        if inner is not None:
            yield from _of(inner, key, applies)


def _model(annotation: Any) -> type[BaseModel] | None:
    """The model of a section, also of one that may be left out."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and not get_args(one) and issubclass(one, BaseModel):
            return one
    return None


def _kind(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(each, name):g}"
        for each in field.metadata
        for name, sign in _BOUNDS.items()
        if isinstance(getattr(each, name, None), int | float)
    ]
    return " ".join([_type(field.annotation), ", ".join(bounds)]).strip()


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(json.dumps(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(one) for one in arguments if one is not type(None))
    if origin in (tuple, list):
        return "list"
    if origin is dict:
        return "section"
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = _plain(field)
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    place, group, applies = next(one for one in _INSTALLED if one[1] == ENVIRONMENTS)
    found = [one for name in sys.argv[1:] for one in _of_installed(place, group, applies, name)]
    sys.stdout.write(f"\n{msgspec.json.encode(found).decode()}\n")
