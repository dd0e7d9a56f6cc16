"""Tools of the kind `chat`: plain Python functions, told to the policy as OpenAI's function tools.

What the policy may say follows from a function's signature, and what it is told of it from the docstring: the text, and
of each parameter what stands behind its name in the section `Args:`. Whatever a call comes to is an answer to the
policy: also that there is no such tool, that its arguments are none, that it raises, or that it takes too long.
"""

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from elastic.environments.calling import called, ends_caller
from elastic.environments.kinds import as_text
from elastic.system.named_code import CodeUnusable, load, parsed
from elastic.system.plain_values import shown, told

ERROR = "Error: "
"""How the answer begins of a call that came to nothing."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ARGUMENTS = re.compile(r"^\s*(Args|Arguments|Parameters):\s*$")
_SECTION = re.compile(r"^[A-Z][A-Za-z ]*:\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class PythonTool:
    """`told` is what the policy is told of the function, as OpenAI's APIs have it."""

    name: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    """Its fields have the parameters' names as aliases."""
    told: Mapping[str, Any]

    def given(self, arguments: str) -> dict[str, Any]:
        """The arguments of a call, by parameter. Raises `ValueError`."""
        try:
            valid = self.arguments.model_validate(call_arguments(arguments))
        except ValidationError as error:
            said = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            raise ValueError("; ".join(said)) from None
        fields = self.arguments.model_fields
        return {cast("str", fields[name].alias): getattr(valid, name) for name in valid.model_fields_set}


def call_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call of the policy's, as it has written them. Raises `ValueError`."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the arguments are {shown(found)}; allowed: a JSON object")
    return cast("dict[str, Any]", found)


class Toolbox:
    """The tools of an environment. A call may take `limit_s`, and its answer has so many `characters` at most."""

    def __init__(self, named: Sequence[str], limit_s: float, characters: int) -> None:
        """Raises `CodeUnusable`."""
        self._tools = {tool.name: tool for tool in map(load_tool, named)}
        self._limit_s, self._characters = limit_s, characters
        self.told = [tool.told for tool in self._tools.values()]

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The message that answers a call of the policy's."""
        asked = call["function"]
        content = await self._content(asked["name"], asked["arguments"])
        if (more := len(content) - self._characters) > 0:
            content = f"{content[: self._characters]}… ({more} characters more)"
        # Half of a surrogate pair, as JSON may name one, is in no request.
        content = content.encode("utf-8", "replace").decode()
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    async def _content(self, name: str, arguments: str) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return f"{ERROR}there is no tool {name!r}; there are: {', '.join(self._tools)}"
        try:
            return as_text(await called(tool.function, tool.given(arguments), self._limit_s))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if ends_caller(error):
                raise
            return f"{ERROR}{told(error)}"


def load_tool(named: str) -> PythonTool:
    """Raises `CodeUnusable` for what cannot be loaded, or cannot be told to a model."""
    name, function = parsed(named).name, load(named)
    if not callable(function):
        raise CodeUnusable(f"{named}: found {type(function).__name__}; allowed: a function")
    if not _NAME.fullmatch(name):
        raise CodeUnusable(f"{named}: found {name!r}; allowed as a tool's name: letters, digits, '_' and '-'")
    about, parameters = documented(inspect.getdoc(function) or "")
    try:
        arguments = _arguments(named, function, parameters)
        schema = _untitled(arguments.model_json_schema(by_alias=True))
    except (NameError, PydanticUserError) as error:
        raise CodeUnusable(f"{named}: its parameters cannot be told to a model: {told(error, 300)}") from error
    told_as = {"name": name, **({"description": about} if about else {}), "parameters": schema}
    return PythonTool(name, function, arguments, {"type": "function", "function": told_as})


def documented(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says: of the function, before any section, and of each parameter."""
    about, parameters = list[str](), dict[str, str]()
    section, name, indent = "", "", 0
    for line in text.splitlines():
        if _ARGUMENTS.match(line):
            section, name = "arguments", ""
        elif _SECTION.match(line):
            section = "another"
        elif not section:
            about.append(line)
        elif section == "arguments" and line.strip():
            here, found = len(line) - len(line.lstrip()), _ARGUMENT.match(line.strip())
            if found and (not name or here <= indent):
                name, indent = found[1], here
                parameters[name] = found[2].strip()
            elif name:
                parameters[name] = f"{parameters[name]} {line.strip()}".strip()
    return "\n".join(about).strip(), parameters


def _arguments(named: str, function: Callable[..., Any], about: Mapping[str, str]) -> type[BaseModel]:
    """A model of a call's arguments. Raises `CodeUnusable`, and what names and types may raise."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise CodeUnusable(f"{named}: its parameters cannot be seen: {told(error)}") from error
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for place, parameter in enumerate(signature.parameters.values()):
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise CodeUnusable(f"{named}: parameter {parameter.name!r} has no name in calls; allowed: named parameters")
        default = ... if parameter.default is parameter.empty else parameter.default
        described: dict[str, Any] = {"description": about[parameter.name]} if parameter.name in about else {}
        field = Field(default, alias=parameter.name, **described)
        fields[f"p{place}"] = (hints.get(parameter.name, Any), field)
    return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)


_VALUES = ("default", "examples", "enum", "const")


def _untitled(schema: Any) -> Any:
    """A schema without the titles that are made up of names."""
    if isinstance(schema, dict):
        inner = cast("dict[str, Any]", schema)
        return {
            key: value if key in _VALUES else _untitled(value)
            for key, value in inner.items()
            if key != "title" or not isinstance(value, str)
        }
    return [_untitled(one) for one in cast("list[Any]", schema)] if isinstance(schema, list) else schema
