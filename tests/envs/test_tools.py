"""Tools as the policy is told of them, and what their calls come to: always an answer."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.environments.tools import Toolbox, documented, load_tool
from elastic.system.named_code import CodeUnusable

TOOLS = '''
import asyncio, time
from typing import Annotated, Literal
from pydantic import BaseModel, Field

class Point(BaseModel):
    x: int
    y: int = 0

def add(a: int, b: int = 2, *, unit: Literal["m", "s"] = "m") -> str:
    """Adds two numbers.

    Both are whole.

    Args:
        a: The first
            of them.
        b (int): The second.

    Returns:
        Their sum.
    """
    return f"{a + b} {unit}"

async def mirror(point: Point, title: Annotated[str, Field(description="Its name.")] = "") -> dict:
    await asyncio.sleep(0)
    return {"point": Point(x=-point.x, y=point.y), "title": title, "é": {1}}

def divide(a: float, b: float) -> float:
    return a / b

def leave(**rest) -> None:
    raise SystemExit(3)

async def leave_too() -> None:
    raise SystemExit(3)

async def cancel() -> None:
    raise asyncio.CancelledError

def sleepy() -> None:
    time.sleep(20)

async def deaf() -> None:
    try:
        await asyncio.sleep(20)
    except asyncio.CancelledError:
        await asyncio.sleep(0.5)

def long() -> str:
    return "x" * 1000

def many(*numbers: int) -> None: ...
def strange(thing: "Nowhere") -> None: ...
class Odd: ...
def odd(thing: Odd) -> None: ...
number = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path / "tools.py"


async def answered(file: Path, name: str, arguments: Any, limit_s: float = 5.0, characters: int = 100) -> str:
    toolbox = Toolbox([f"{file}:{name}"], limit_s, characters)
    said = arguments if isinstance(arguments, str) else json.dumps(arguments)
    called = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": said}}
    answer = await toolbox.answer(called)
    assert (answer["role"], answer["tool_call_id"]) == ("tool", "call_1")
    return answer["content"]


def test_a_function_is_told_by_its_signature_and_its_docstring(file: Path) -> None:
    assert load_tool(f"{file}:add").told == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.\n\nBoth are whole.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first of them."},
                    "b": {"type": "integer", "description": "The second.", "default": 2},
                    "unit": {"type": "string", "enum": ["m", "s"], "default": "m"},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    mirror = load_tool(f"{file}:mirror").told["function"]["parameters"]
    assert mirror["properties"]["title"] == {"type": "string", "description": "Its name.", "default": ""}
    assert mirror["$defs"]["Point"]["properties"] == {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}}


def test_a_docstring_without_sections_is_all_description() -> None:
    assert documented("Adds.\n\nNote: both.") == ("Adds.\n\nNote: both.", {})
    assert documented("") == ("", {})
    assert documented("Adds.\n\nExample:\n    a: 1\n\nArgs:\n    a: One.\n") == ("Adds.", {"a": "One."})


async def test_an_answer_can_be_sent_whatever_is_in_it(file: Path) -> None:
    assert await answered(file, "mirror", {"point": {"x": 1}, "title": "\ud800"}) == (
        '{"point": {"x": -1, "y": 0}, "title": "?", "é": "{1}"}'
    )


async def test_arguments_are_made_what_the_function_takes(file: Path) -> None:
    assert await answered(file, "add", {"a": "40", "unit": "s"}) == "42 s"
    assert json.loads(await answered(file, "mirror", {"point": {"x": 1}, "title": "p"})) == {
        "point": {"x": -1, "y": 0},
        "title": "p",
        "é": "{1}",
    }


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("divide", {"a": 1, "b": 0}, "Error: ZeroDivisionError: float division by zero"),
        ("divide", {"a": 1}, "Error: ValueError: b: Field required"),
        ("divide", {"a": 1, "b": 1, "c": 1}, "c: Extra inputs are not permitted"),
        ("divide", "{", "the arguments are no JSON"),
        ("divide", [1, 2], "allowed: a JSON object"),
        ("leave", {}, "Error: SystemExit: 3"),
        ("leave_too", {}, "Error: SystemExit: 3"),
        ("cancel", {}, "Error: CancelledError"),
        ("long", "", "x… (900 characters more)"),
    ],
)
async def test_whatever_a_call_comes_to_is_answered(file: Path, name: str, arguments: Any, told: str) -> None:
    assert told in await answered(file, name, arguments)


@pytest.mark.parametrize("name", ["sleepy", "deaf"])
async def test_a_tool_that_hangs_is_left_behind(file: Path, name: str) -> None:
    began_s = time.monotonic()
    assert await answered(file, name, {}, limit_s=0.1) == "Error: TooSlow: no answer within 0.1 s"
    assert time.monotonic() - began_s < 10


async def test_a_tool_that_is_none_is_answered_with_those_that_there_are(file: Path) -> None:
    call = {"id": "1", "function": {"name": "sub", "arguments": "{}"}}
    answer = await Toolbox([f"{file}:add", f"{file}:divide"], 5.0, 100).answer(call)
    assert answer["content"] == "Error: there is no tool 'sub'; there are: add, divide"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("number", "found int; allowed: a function"),
        ("many", "allowed: named parameters"),
        ("strange", "cannot be told to a model: NameError"),
        ("odd", "cannot be told to a model"),
        ("nothing", "has no 'nothing'"),
    ],
)
def test_what_cannot_be_a_tool_is_told_as_it_is_loaded(file: Path, name: str, told: str) -> None:
    with pytest.raises(CodeUnusable, match=told):
        load_tool(f"{file}:{name}")
