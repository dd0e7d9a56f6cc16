"""Every key of a run's configuration, and of a pool's: meaning, unit, default and bounds, by the models of settings."""

import json
import types
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from elastic.compose.plan import TRACE_PLAYERS
from elastic.compose.pool_config import PoolConfig
from elastic.config import Config, ConfigError
from elastic.system.installed import installed, is_ours

UNITS = {
    "usd_per_gpu_hour": "$/GPU-hour",
    "usd_per_s": "$/s",
    "usd_per_call": "$/call",
    "usd": "$",
    "per_s": "1/s",
    "ms": "ms",
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
_INSTALLED = (
    ("providers.NAME", "elastic.providers", "for `kind = {kind!r}`"),
    ("engine", "elastic.engines", ""),
    ("trainer", "elastic.trainers", ""),
    ("environment.settings", "elastic.environments", "of environment {kind!r}"),
    ("rewards.pool_settings", "elastic.function_pools", "of pool {kind!r}"),
)
"""Where the settings of what is installed stand, its group of entry points, and when they apply."""


_BY_KIND = ("engine", "trainer")
"""Places in which each kind has a section of its own."""


class KeyMeaning(msgspec.Struct, frozen=True, kw_only=True):
    """`applies` says for which provider, engine, environment or pool of functions the key is, or that it is a pool's;
    empty for a key of all runs."""

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
    for place, group, applies in _INSTALLED:
        for _, point in sorted(installed(group).items()):
            if group == "elastic.environments" and not is_ours(point):
                continue  # Env workers alone import those.
            settings = getattr(point.load(), "Settings", None)
            if isinstance(settings, type) and issubclass(settings, BaseModel):
                section = f"{place}.{point.name}" if place in _BY_KIND else place
                found += _of(settings, section, applies.format(kind=point.name))
    return [*found, *_of(PoolConfig, "", "in POOL.toml")]


def explained(asked: str) -> list[KeyMeaning]:
    """The meanings of a key, or of all keys of a section. A provider's section may be called by its kind, or by
    the name that a configuration gives to a provider of any kind.

    Raises `ConfigError` for a key that there is not, with those that are nearly it.
    """
    meanings = key_meanings()
    wanted = [asked]
    parts = asked.split(".")
    if parts[0] == "providers" and len(parts) > 1 and parts[1]:
        kind = f"for `kind = {TRACE_PLAYERS.get(parts[1], parts[1])!r}`"
        meanings = [one for one in meanings if one.applies == kind] or meanings
        wanted.append(".".join(["providers", "NAME", *parts[2:]]))
    for name in wanted if asked else ():
        found = [one for one in meanings if one.key == name] or [
            one for one in meanings if one.section == name or one.section.startswith(f"{name}.")
        ]
        if found:
            return found
    meanings = key_meanings()
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
            unit=next((unit for end, unit in UNITS.items() if name == end or name.endswith(f"_{end}")), ""),
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
