"""Conversations that an environment demonstrates: which of their tokens are the policy's, and what is none."""

from pathlib import Path

import pytest

from elastic.compose.demonstrations import demonstrated
from elastic.compose.plan import resolve
from elastic.compose.preparation import Prepared, prepare
from elastic.config import Config, ConfigError, validate
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.tiny import write_tokenizer

SHOWN = """
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

def calculator():
    yield {
        "messages": [
            {"role": "user", "content": "2+2="},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "4"},
            {"role": "assistant", "content": "It is 4"},
        ],
        "tools": [TOOL],
    }

def nothing(): return []
def unanswered(): return [{"messages": [{"role": "user", "content": "2+2="}]}]
def leaving(): raise SystemExit(0)
def other(): return ["2+2=4"]
def broken(): return 1 / 0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SHOWN)
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    return tmp_path / "mine.py"


def test_the_policy_says_its_answers_and_their_ends(file: Path) -> None:
    (found,) = demonstrated(f"{file}:calculator", file.parent)
    tokenizer = Tokenizer(file.parent)
    assert len(found.token_ids) == len(found.trained)
    said = [token if trained else -1 for token, trained in zip(found.token_ids, found.trained, strict=True)]
    runs = [tokenizer.decode(run, special=True) for run in _runs(said)]
    assert runs == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>',
        "It is 4<|im_end|>",
    ]


def _runs(said: list[int]) -> list[list[int]]:
    runs, before = list[list[int]](), -1
    for token in said:
        if token != -1:
            runs = [*runs[:-1], [*runs[-1], token]] if before != -1 else [*runs, [token]]
        before = token
    return runs


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing", "found no answer of the policy's; allowed: at least one"),
        ("unanswered", "found no answer of the policy's; allowed: at least one"),
        ("leaving", "SystemExit: 0"),
        ("other", "allowed: a mapping with messages"),
        ("broken", "ZeroDivisionError"),
        ("absent", "has no 'absent'"),
    ],
)
def test_what_is_no_demonstration_is_told(file: Path, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        demonstrated(f"{file}:{name}", file.parent)


@pytest.mark.environments
def test_a_small_policy_is_made_of_them(file: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}')
    settings = {"rewards": [f"{file}:nothing"], "demonstrations": f"{file}:calculator", "demonstration_steps": 2}
    raw = {
        "model": {"checkpoint": str(tmp_path / "base")},
        "environment": {"name": "chat", "data": {"source": str(tmp_path / "rows.jsonl")}, "settings": settings},
    }
    done: list[int] = []
    plan = resolve(validate(Config, raw, ""), [], "")
    assert prepare(plan, lambda step, steps, loss: done.append(step)) is Prepared.MADE
    assert (done, (tmp_path / "base" / "chat_template.jinja").is_file()) == ([1, 2], True)
    assert prepare(plan, lambda *_: None) is Prepared.THERE
    file.write_text(file.read_text() + "\n")
    assert prepare(plan, lambda *_: None) is Prepared.OF_OTHER_SETTINGS
