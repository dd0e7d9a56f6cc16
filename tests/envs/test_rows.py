"""Rows of data sets: which group has which, and what cannot be read is told by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.compose.data import data_source
from elastic.config import EnvironmentConfig, validate
from elastic.environments.rows import BadData, DataSource, check_first_row, column, read_rows
from policies.curriculum import CURRICULA, in_order, shuffled


@given(rows=st.integers(1, 400), seed=st.integers(0, 2**63), passes=st.integers(0, 10**6))
def test_each_pass_has_every_row_once(rows: int, seed: int, passes: int) -> None:
    """That groups are numbered without a gap and without a repeat, whatever dies, is held by the worlds of faults."""
    for curriculum in CURRICULA.values():
        found = [curriculum(passes * rows + place, rows, seed) for place in range(rows)]
        assert sorted(found) == list(range(rows))


def test_a_shuffled_order_is_another_one_in_each_pass_and_for_each_seed() -> None:
    orders = [[shuffled(first + place, 50, seed) for place in range(50)] for first, seed in ((0, 1), (50, 1), (0, 2))]
    assert len({tuple(order) for order in orders}) == 3
    assert [in_order(number, 3, 0) for number in range(5)] == [0, 1, 2, 0, 1]


def source(file: Path, prompt: str = "q", answer: str = "") -> DataSource:
    return DataSource(source=file, prompt=prompt, answer=answer, order="in_order", seed=0)


def test_columns_may_be_dotted() -> None:
    row = {"a": {"b": {"c": 1}}, "a.b": 2}
    assert column(row, "a.b.c") == 1
    assert column(row, "a.b") == 2
    for missing in ("a.x", "a.b.c.d", "x"):
        with pytest.raises(KeyError):
            column(row, missing)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.jsonl", "", "has no rows; allowed: at least one"),
        ("rows.jsonl", '{"p": 1}\n', "row 0 has no column 'q'; it has p"),
        ("rows.jsonl", "[1]\n", "line 1: found list; allowed: an object of columns"),
        ("rows.jsonl", "{q: 1}\n", "line 1 is no JSON"),
        ("rows.csv", "q\n1\n", "found '.csv'; allowed: FILE.jsonl, FILE.parquet, hf:NAME"),
    ],
)
def test_what_cannot_be_used_is_told_by_its_first_row(tmp_path: Path, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    for look in (check_first_row, read_rows):
        with pytest.raises(BadData) as bad:
            look(source(tmp_path / name))
        assert str(bad.value).startswith(str(tmp_path / name))
        assert told in str(bad.value)


def test_a_later_row_is_told_as_all_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"q": 1}) + "\n\n" + json.dumps({"p": 1}) + "\n")
    check_first_row(source(file))
    with pytest.raises(BadData, match="row 1 has no column 'q'; it has p"):
        read_rows(source(file))
    with pytest.raises(BadData, match="cannot be read"):
        check_first_row(source(tmp_path / "none.jsonl"))


def test_a_file_has_the_rows_that_its_order_counts_on(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": 1}\n{"prompt": 2}\n')
    for order, rows, fits in (("by_difficulty", 2, True), ("by_difficulty", 3, False), ("shuffled", 3, True)):
        data = {"source": str(file), "order": order, "rows": rows}
        of = data_source(validate(EnvironmentConfig, {"name": "agent", "data": data}, ""), 0)
        assert of is not None
        if fits:
            assert len(read_rows(of).rows) == 2
            continue
        with pytest.raises(BadData, match="has 2 rows; allowed: at least the 3 that its order counts on"):
            read_rows(of)


def test_a_row_keeps_the_columns_that_are_named_and_a_prompt_is_a_text_or_messages(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"q": "1+1", "a": {"n": 2, "why": ""}, "level": 3, "rest": None}
    file.write_text(json.dumps(row))
    named = replace(source(file, answer="a.n"), columns=("level",), texts=True)
    (kept,) = read_rows(named).rows
    assert kept == {"q": "1+1", "a": {"n": 2, "why": ""}, "level": 3}
    with pytest.raises(BadData, match="row 0 has no column 'hard'"):
        read_rows(replace(named, columns=("hard",)))
    for prompt in (3, None, [], ["a"]):
        file.write_text(json.dumps({**row, "q": prompt}))
        with pytest.raises(BadData, match=r"row 0, column 'q': found .*allowed: a text, or a list of messages"):
            read_rows(named)
