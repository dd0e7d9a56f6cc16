"""Which keys of a configuration name files, or code: those that its settings type as paths, or as names of code."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from elastic.compose.plan import kind_of
from elastic.config import Config, EngineConfig, TrainerConfig
from elastic.system.installed import installed, is_ours
from elastic.system.named_code import FORMAT, KNOWN_OR_FORMAT

Place = tuple[str, ...]
Schema = Mapping[str, Any]


def names_file(raw: Mapping[str, Any], place: Place) -> bool | None:
    """Whether the key at this place of a configuration is typed as a path; None where no setting says what it is."""
    return _has_format(raw, place, "path")


def names_code(raw: Mapping[str, Any], place: Place, value: str) -> bool:
    """Whether the value of the key at this place of a configuration is, by the key's type, a name of code."""
    return bool(_has_format(raw, place, FORMAT) or (":" in value and _has_format(raw, place, KNOWN_OR_FORMAT)))


def _has_format(raw: Mapping[str, Any], place: Place, wanted: str) -> bool | None:
    settings, rest = _settings_at(raw, place)
    schema = _schema(settings) if settings is not None else {}
    return _is(wanted, schema, schema, rest)


def _settings_at(raw: Mapping[str, Any], place: Place) -> tuple[type[BaseModel] | None, Place]:
    """Return the settings that the key belongs to, and its place in them; None for settings of nothing installed."""
    match place:
        case ("providers", _, "engine", *rest) | ("trainer", "engine", *rest) | ("engine", *rest):
            if rest and rest[0] not in EngineConfig.model_fields:
                return settings_of("elastic.engines", rest[0]), tuple(rest[1:])
            return EngineConfig, tuple(rest)
        case ("trainer", kind, *rest) if kind not in TrainerConfig.model_fields:
            return settings_of("elastic.trainers", kind), tuple(rest)
        case ("providers", name, *rest) if isinstance(raw["providers"][name], dict):
            return settings_of("elastic.providers", kind_of(raw["providers"], name)), tuple(rest)
        case ("environment", "settings", *rest):
            return settings_of("elastic.environments", _kind_of(raw["environment"])), tuple(rest)
        case ("environments", number, "settings", *rest) if number.isdecimal():
            return settings_of("elastic.environments", _kind_of(raw["environments"][int(number)])), tuple(rest)
        case ("evaluation", "splits", number, "settings", *rest) if number.isdecimal():
            split = raw["evaluation"]["splits"][int(number)]
            return settings_of("elastic.environments", _kind_of_split(raw, split)), tuple(rest)
        case ("rewards", "pool_settings", *rest):
            return settings_of("elastic.function_pools", raw["rewards"].get("pool", "local")), tuple(rest)
    return Config, place


def _kind_of(environment: Mapping[str, Any]) -> object:
    return environment.get("kind") or environment.get("name", "frozenlake")


def _kind_of_split(raw: Mapping[str, Any], split: Mapping[str, Any]) -> object:
    """Return the kind of the environment that a split is like, unless the split has a kind of its own."""
    like = split.get("like")
    if "kind" in split or like is None:
        return _kind_of(split)
    several = raw.get("environments")
    known = [raw.get("environment"), *(several if isinstance(several, list) else ())]
    alike = [one for one in known if isinstance(one, dict) and one.get("name", "frozenlake") == like]
    return _kind_of(alike[-1]) if alike else like


def settings_of(group: str, name: object) -> type[BaseModel] | None:
    """Return the settings of what is installed under this name; None if there are none, or env workers alone know."""
    point = installed(group).get(str(name))
    if point is not None and group == "elastic.environments" and not is_ours(point):
        return None
    try:
        return None if point is None else getattr(point.load(), "Settings", None)
    except ImportError:  # What it needs is not installed here, and the plan says so.
        return None


@cache
def _schema(settings: type[BaseModel]) -> Schema:
    try:
        return settings.model_json_schema()
    except PydanticInvalidForJsonSchema:
        return {}


def _is(wanted: str, schema: Schema, whole: Schema, place: Place) -> bool | None:
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    branches = [one for key in ("anyOf", "allOf", "oneOf") for one in schema.get(key, ())]
    if place:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        inner = [properties[place[0]]] if place[0] in properties else [others, schema.get("items")]
        inner = [*inner, *schema.get("prefixItems", ())]
        found = [_is(wanted, one, whole, place[1:]) for one in inner if isinstance(one, dict)]
    else:
        found = [schema["format"] == wanted] if "format" in schema else [False] if "type" in schema else []
    found += [_is(wanted, one, whole, place) for one in branches]
    return True if True in found else False if False in found else None
