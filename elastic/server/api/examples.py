"""Examples of the bodies in the API's description: those of their models' fields, put together."""

from collections.abc import Mapping
from typing import Any

_OF_TYPE = {"integer": 1, "number": 1.0, "boolean": False, "string": ""}


def example(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """Return an example of a JSON schema, whose references are to `schemas`. What may be left out, or be null, is where
    its field has no example."""
    if "examples" in schema:
        return schema["examples"][0]
    if "$ref" in schema:
        return example(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        first = schema["anyOf"][0]
        nullable = {"type": "null"} in schema["anyOf"] and not first.keys() & {"$ref", "examples"}
        return None if nullable else example(first, schemas)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "array":
        return [one for one in [example(schema["items"], schemas)] if one not in ("", {})]
    if "properties" in schema:
        required = schema.get("required", ())
        fields = schema["properties"].items()
        return {name: example(said, schemas) for name, said in fields if name in required or _is_shown(said)}
    if schema.get("type") == "object":
        values = schema.get("additionalProperties", True)
        return {} if isinstance(values, bool) else {"spot": example(values, schemas)}
    return _OF_TYPE.get(schema.get("type", ""))


def _is_shown(said: Mapping[str, Any]) -> bool:
    """Whether a field that may be left out has an example."""
    return "const" in said or "examples" in said or any("examples" in one for one in said.get("anyOf", ()))
