"""A choice says the same however its tokens come, and its tokens end with the one that made a stop string whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.choices import Choice, StopFinder, TokensDiffer
from elastic.protocol.openai.answers import ParsedAnswer, joined_calls
from tests.front.small_model import EOS, BracketReader, BytesDecoder

texts = st.text(alphabet="ab|<f {}>é", max_size=30)
stops = st.lists(st.text(alphabet="ab|é", min_size=1, max_size=3), max_size=3)
cuts = st.lists(st.integers(min_value=1, max_value=4))


def pieces(ids: list[int], sizes: list[int]) -> list[list[int]]:
    found = []
    for size in sizes:
        found.append(ids[:size])
        ids = ids[size:]
    return [piece for piece in [*found, ids] if piece]


def played(ids: list[int], sizes: list[int], stops: list[str], reads: bool) -> tuple[ParsedAnswer, Choice]:
    """The choice that these tokens make in these pieces, and what its pieces add up to."""
    reader = BracketReader(reasons=True, reads_calls=True, turn="t") if reads else None
    choice = Choice(BytesDecoder(), reader, stops, frozenset({EOS}))
    said = [choice.take(piece, [0.0] * len(piece))[0] for piece in pieces(ids, sizes)]
    said.append(choice.rest())
    said = [ParsedAnswer(one) if isinstance(one, str) else one for one in said]
    whole = ParsedAnswer(
        "".join(one.content for one in said),
        "".join(one.reasoning for one in said),
        joined_calls([call for one in said for call in one.tool_calls]),
    )
    return whole, choice


@given(texts, stops, cuts, st.booleans())
def test_a_stream_adds_up_to_the_whole_answer(text, stops, sizes, reads):
    ids = [*text.encode(), EOS]
    streamed, choice = played(ids, sizes, stops, reads)
    whole, at_once = played(ids, [], stops, reads)
    assert streamed == choice.said == whole == at_once.said
    assert choice.ids == at_once.ids == ids[: len(choice.ids)]


@given(texts, stops, cuts)
def test_an_answer_ends_where_a_stop_string_begins(text, stops, sizes):
    said, choice = played([*text.encode()], sizes, stops, reads=False)
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert (said.content, choice.stop, len(choice.ids)) == (text, None, len(text.encode()))
        return
    end, start, _ = min(ends)
    assert said.content == text[:start]
    assert len(choice.ids) == len(text[:end].encode())


@given(st.text(alphabet="ab|é {}", max_size=30), stops, cuts)
def test_a_call_ends_where_a_stop_string_begins(arguments, stops, sizes):
    text = f"|<f {arguments}"
    said, choice = played([*text.encode()], sizes, stops, reads=True)
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    start = min(ends)[1] if ends else len(text)
    if start >= len("|<f "):
        assert [call.arguments for call in said.tool_calls] == [text[len("|<f ") : start]]
    else:
        assert said.content + said.reasoning == text[:start].removeprefix("|")
    assert said == choice.said


@given(texts, stops, cuts, cuts, st.integers(0, 40), st.booleans())
def test_tokens_that_come_again_add_nothing(text, stops, sizes, again, joined_after, reads):
    ids = [*text.encode()]
    expected, _ = played(ids, [], stops, reads)
    reader = BracketReader(reasons=True, reads_calls=True, turn="t") if reads else None
    choice = Choice(BytesDecoder(), reader, stops)
    for piece in pieces(ids[:joined_after], sizes):
        choice.take(piece, [0.0] * len(piece))
    choice.join()
    for piece in pieces(ids, again):
        choice.take(piece, [0.0] * len(piece))
    choice.rest()
    assert choice.rest() == choice.rest()
    assert choice.said == expected


def test_tokens_that_come_again_otherwise_are_noticed():
    choice = Choice(BytesDecoder())
    choice.take([*b"abc"], [-1.0] * 3)
    choice.join()
    choice.take([*b"a"], [-2.0])
    with pytest.raises(TokensDiffer):
        choice.take([*b"Xyz"], [0.0] * 3)
    assert choice.again() == ([*b"a"], [-2.0])
    with pytest.raises(TokensDiffer):
        choice.rest()


def test_a_turn_that_was_over_does_not_go_on():
    choice = Choice(BytesDecoder())
    choice.take([*b"abc"], [0.0] * 3)
    choice.rest()
    choice.join()
    with pytest.raises(TokensDiffer):
        choice.take([*b"abcd"], [0.0] * 4)


def test_a_choice_keeps_so_many_calls():
    choice = Choice(BytesDecoder(), BracketReader(False, True, "t"), calls_max=1)
    choice.take([*b"<f {}><g {}>"], [0.0] * 12)
    choice.take([*b"<h {}>"], [0.0] * 6)
    assert [(call.name, call.arguments) for call in choice.said.tool_calls] == [("f", "{}")]


def test_what_may_begin_a_stop_string_is_held_back():
    finder = StopFinder(["END", "ENTER"])
    assert finder.feed("the EN") == "the "
    assert finder.feed("V E") == "ENV "
    assert finder.rest() == "E"
    assert finder.found is None
