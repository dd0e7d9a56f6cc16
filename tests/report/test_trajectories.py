"""Trajectories are read from journals as messages and tokens, within bounds; what they say is text, wherever it is."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.protocol.api import HostedMessage, HostedTrajectoryDetail
from elastic.protocol.sampled import Sampled
from elastic.report import as_html, summarise
from elastic.report.bounds import bounded, whole
from elastic.report.history import history_of
from elastic.report.samples import EACH, TRAJECTORY_BYTES_MAX, Chosen, samples_of
from elastic.report.search import Searched, search
from elastic.report.texts import DECODED_CHARACTERS_MAX, MESSAGES_BYTES_MAX, Reading, told_samples, with_texts
from elastic.report.trajectories import TOKENS_MAX, detail_of
from elastic.runtime.journal import EvaluatedRow, JournalError, RunDirectory, TrajectoryFilter, TrajectoryRow
from tests.report.chat_run import CALL, CONTROLS, MARKUP, ChatRun
from tests.seeds import examples


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, Reading]:
    place = tmp_path_factory.mktemp("chats")
    run = ChatRun(place / "run", place / "policy")
    run.small()
    return run.close(), Reading.of(run.config)


def told(run: RunDirectory, reading: Reading, name: str) -> HostedTrajectoryDetail:
    with history_of(run) as history:
        found = detail_of(history, name)
    assert found is not None
    (detail,) = with_texts([found], reading)
    return detail


def page_of(run: RunDirectory) -> ElementTree.Element:
    text = as_html(summarise(run), chosen=told_samples(run))
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def test_a_trajectory_is_told_with_messages_calls_rewards_and_branches(small: tuple[RunDirectory, Reading]) -> None:
    detail = told(*small, "2/1/0")
    assert detail.no_text == ""
    assert detail.messages is not None
    assert [one.role for one in detail.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [one.content for one in detail.messages[1:]] == ["What is 1 + 1?", "Let me add.", "2", "It is 2."]
    (call,) = detail.messages[2].tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 1, "b": 1}')
    assert detail.rewards == {"right": 1.0, "short": 0.1}
    assert detail.metrics == {"calls": 1.0}
    assert (detail.task, detail.environment, detail.ended_s) == ('{"row": 7}', "chat", 1.0)
    (branch,) = detail.branches
    assert (branch.policy, branch.policy_reward) == ("critic", 0.25)
    assert branch.messages is not None
    own = [one.content for one in branch.messages if one.start + one.tokens > branch.shared_tokens]
    assert own == ["3", "It is 3."]
    for context in (detail, branch):
        assert context.pieces is not None
        assert "".join(context.pieces) == context.text
        by_policy = [one for one in context.messages or () if one.by_policy]
        marked = {place for one in by_policy for place in range(one.start, one.start + one.tokens)}
        assert marked == {place for place, trained in enumerate(context.trained) if trained}


def test_an_episode_of_an_evaluation_is_told_by_its_name(tmp_path: Path) -> None:
    run = ChatRun(tmp_path / "run", tmp_path / "policy")
    run.trajectory("1/0/0", run.spoken("?", ("!", ())))
    directory, reading = run.close(), Reading.of(run.config)
    with history_of(directory) as history:
        (row,) = history.rows(TrajectoryRow)
    again = ChatRun(tmp_path / "again", tmp_path / "policy")
    again.append(msgspec.convert(msgspec.structs.asdict(row) | {"trajectory": "e1/0/0"}, EvaluatedRow))
    found = told(again.close(), reading, "e1/0/0")
    assert [one.content for one in found.messages or ()][-2:] == ["?", "!"]


def test_a_reward_of_a_function_has_the_environments_as_a_part(tmp_path: Path) -> None:
    run = ChatRun(tmp_path / "run", tmp_path / "policy")
    context = run.spoken("?", ("!", ()))
    run.trajectory("0/0/0", context, 0.5)
    row = msgspec.structs.replace
    directory = run.close()
    with history_of(directory) as history:
        (found,) = history.rows(TrajectoryRow)
    sampled = msgspec.msgpack.decode(found.sampled)
    sampled[4] = 0.25
    again = ChatRun(tmp_path / "again", tmp_path / "policy")
    again.append(row(found, sampled=msgspec.msgpack.encode(sampled)))
    detail = told(again.close(), Reading(tmp_path / "policy"), "0/0/0")
    assert (detail.reward, detail.rewards) == (0.5, {"environment": 0.25})


def test_what_cannot_be_told_as_text_says_why(small: tuple[RunDirectory, Reading], tmp_path: Path) -> None:
    run, reading = small
    gone = told(run, reading._replace(checkpoint=tmp_path / "gone"), "2/1/0")
    assert "tokenizer.json: cannot be read (No such file or directory)" in gone.no_text
    assert gone.token_ids
    assert (gone.text, gone.pieces, gone.messages) == (None, None, None)
    for content in (
        "[]",
        "{",
        '{"added_tokens": [{}]}',
        '{"added_tokens": [], "model": {"type": "Unheard"}}',
        "[" * 9999,
    ):
        (tmp_path / "tokenizer.json").write_text(content)
        broken = told(run, reading._replace(checkpoint=tmp_path), "2/1/0")
        assert broken.no_text
        assert broken.messages is None
    assert "tool_parser" in told(run, reading._replace(tool_parser="unheard"), "2/1/0").no_text


def test_a_record_that_is_none_is_an_error_of_the_journal(tmp_path: Path) -> None:
    run = ChatRun(tmp_path / "run", tmp_path / "policy")
    run.trajectory("0/0/0", run.spoken("?", ("!", ())))
    directory = run.close()
    with history_of(directory) as history:
        (row,) = history.rows(TrajectoryRow)
    again = ChatRun(tmp_path / "again", tmp_path / "policy")
    odd = [{"sampled": b"\xc1"}, {"sampled": b"\x01"}, {"branches": b"\x91\xc0"}]
    odd += [{"token_ids": b"xyz"}, {"token_ids": b""}]
    for number, fields in enumerate(odd):
        again.append(msgspec.structs.replace(row, trajectory=f"0/0/{number}", metrics=b"\xc1", **fields))
    with history_of(again.close()) as history:
        for number in range(5):
            with pytest.raises(JournalError, match=f"0/0/{number} is no record"):
                detail_of(history, f"0/0/{number}")


def test_a_text_of_megabytes_is_cut_and_says_so(tmp_path: Path) -> None:
    """The text is as long as the limit that it is to reach."""
    run = ChatRun(tmp_path / "run", tmp_path / "policy")
    ids, sampled = run.spoken("1 + 1?", ("It is 2.", ()))
    text = run.answer(" function" * (TOKENS_MAX + 1000))
    run.trajectory("0/0/0", (ids + text, sampled))
    directory, reading = run.close(), Reading.of(run.config)
    detail = told(directory, reading, "0/0/0")
    assert len(detail.token_ids) == TOKENS_MAX
    assert detail.left_out_tokens == len(ids) + len(text) - TOKENS_MAX
    assert detail.messages is not None
    assert len((detail.text or "").encode()) <= MESSAGES_BYTES_MAX
    assert sum(len(one.content.encode()) for one in detail.messages) <= MESSAGES_BYTES_MAX
    assert "bytes left out" in detail.messages[-1].content
    assert len("".join(detail.pieces or ())) <= DECODED_CHARACTERS_MAX
    page = as_html(summarise(directory), chosen=told_samples(directory))
    assert len(page) < 200_000
    assert "tokens at its end are left out" in page


def test_what_is_decoded_is_bounded_over_all_branches(tmp_path: Path) -> None:
    """Whoever made a tokenizer may have made its words as long as they like."""
    run = ChatRun(tmp_path / "run", tmp_path / "policy")
    said = run.spoken("?", ("a" * 40, ()))
    run.trajectory("0/0/0", said, branches=[said] * 5)
    directory, reading = run.close(), Reading.of(run.config)
    tokenizer = tmp_path / "policy" / "tokenizer.json"
    written = json.loads(tokenizer.read_text())
    words = written["model"]["vocab"]
    longer = {"a" * 60_000 if word == "a" else word: number for word, number in words.items()}
    written["model"] |= {"vocab": longer, "merges": []}
    tokenizer.write_text(json.dumps(written))
    detail = told(directory, reading, "0/0/0")
    contexts = [detail, *detail.branches]
    characters = [sum(map(len, one.pieces or ())) for one in contexts]
    assert characters[0] > 40 * 60_000
    assert sum(characters) <= DECODED_CHARACTERS_MAX
    assert [bool(one.left_out_tokens) for one in contexts] == [False, *[True] * 5]


@given(st.lists(st.tuples(st.text(max_size=300), st.text(max_size=300)), max_size=6), st.integers(0, 500))
def test_messages_within_bounds(texts: list[tuple[str, str]], most_bytes: int) -> None:
    messages = [
        HostedMessage(role="user", content=content, reasoning=reasoning, by_policy=False, start=0, tokens=1)
        for content, reasoning in texts
    ]
    kept = bounded(messages, most_bytes)
    assert len(kept) == len(messages)
    size = sum(len(one.content.encode()) + len(one.reasoning.encode()) for one in kept)
    assert size <= most_bytes
    if (
        sum(len(content.encode()) + len(reasoning.encode()) for content, reasoning in texts) * 2 * len(texts)
        <= most_bytes
    ):
        assert kept == messages


@given(st.text(st.characters(exclude_categories=())))
def test_halves_of_surrogates_are_made_visible(text: str) -> None:
    whole(text).encode()
    assert [one for one in whole(text) if one != "\N{REPLACEMENT CHARACTER}"] == [
        one
        for one in text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if one != "\N{REPLACEMENT CHARACTER}"
    ]


def test_a_report_shows_some_of_every_kind_and_says_of_how_many(small: tuple[RunDirectory, Reading]) -> None:
    page = page_of(small[0])
    shown = {one.get("class"): one for one in page.iter("details") if "sample" in (one.get("class") or "").split()}
    kinds = {kind for classes in shown for kind in (classes or "").split()}
    assert kinds == {"sample", "best", "worst", "truncated", "failed"}
    titles = ["".join(one.itertext()) for one in page.iter("summary")]
    assert any(title.startswith("2/1/3: no reward, raised ") for title in titles)
    (note,) = [one for one in texts_of(page, "p") if " of 16 trajectories" in one]
    assert f"up to {EACH} of the best" in note
    assert any(one.startswith("Let me add.") for one in texts_of(page, "pre"))
    assert 'add({"a": 1, "b": 1})' in texts_of(page, "pre")
    assert any("rewards by part: right 1, short 0.1" in one for one in texts_of(page, "p"))
    assert any(re.search(r"tokens: \d+ of version 0, \d+ of version 1; mean", one) for one in texts_of(page, "p"))


def texts_of(page: ElementTree.Element, tag: str) -> list[str]:
    return ["".join(one.itertext()) for one in page.iter(tag)]


def test_what_trajectories_say_is_text_in_a_report(small: tuple[RunDirectory, Reading]) -> None:
    page = page_of(small[0])
    tags = {one.tag for one in page.iter()}
    assert not tags & {"script", "img", "iframe", "a"}
    assert any(MARKUP in one for one in texts_of(page, "pre"))
    controls = [one for one in texts_of(page, "pre") if "evil" in one]
    assert controls
    for one in controls:
        assert "\n" in one
        assert not set(one) & set("\x1b\x00\x07\x9b\r\u202e\u2066")


@settings(max_examples=examples(7, 40), deadline=None)
@given(text=st.text(max_size=80) | st.just(MARKUP) | st.just(CONTROLS), name=st.text(max_size=20))
def test_no_text_of_a_run_is_markup_in_its_report(small: tuple[RunDirectory, Reading], text: str, name: str) -> None:
    detail = told(*small, "2/1/0")
    assert detail.messages is not None
    hostile = [one.model_copy(update={"role": name, "content": text, "reasoning": text}) for one in detail.messages]
    told_so = {
        "cause": text,
        "task": text,
        "environment": name,
        "rewards": {name: 0.5},
        "no_text": text,
        "policy": name,
    }
    odd = detail.model_copy(update={"messages": hostile, "pieces": [text] * len(detail.token_ids), **told_so})
    plain = Chosen(details=[detail], kinds={detail.id: ["best"]}, first_step=0, last_step=2)
    summary = summarise(small[0])
    pages = [
        ElementTree.fromstring(as_html(summary, chosen=one).removeprefix("<!DOCTYPE html>"))
        for one in (plain, msgspec.structs.replace(plain, details=[odd]))
    ]
    allowed = {one.tag for one in pages[0].iter()}
    assert {one.tag for one in pages[1].iter()} <= allowed
    attributes = {(one.tag, name) for one in pages[0].iter() for name in one.attrib}
    assert {(one.tag, name) for one in pages[1].iter() for name in one.attrib} <= attributes


def test_a_sample_is_bounded(small: tuple[RunDirectory, Reading]) -> None:
    detail = told(*small, "2/1/0")
    assert detail.messages is not None
    long = [one.model_copy(update={"content": "x" * 10**6}) for one in detail.messages]
    chosen = Chosen(
        details=[detail.model_copy(update={"messages": long})], kinds={"2/1/0": ["best"]}, first_step=2, last_step=2
    )
    (sample,) = samples_of(chosen, 1).samples
    size = sum(len(message.content) for context in sample.contexts for message in context.messages)
    assert size <= TRAJECTORY_BYTES_MAX
    assert all(not message.stretches for context in sample.contexts[:1] for message in context.messages)


def test_a_run_without_trajectories_shows_none(tmp_path: Path) -> None:
    run = ChatRun(tmp_path / "run", tmp_path / "policy")
    directory = run.close()
    assert told_samples(directory) is None
    assert 'class="samples"' not in as_html(summarise(directory))


def test_what_is_said_is_found_part_by_part(tmp_path: Path) -> None:
    """Each part of a search has its time, searches at least one trajectory, and says where to go on."""
    run = ChatRun(tmp_path / "run", tmp_path / "policy")
    said = {"0/0/0": "I Walk to the Left.", "0/0/1": "I stay.", "0/0/2": f"We walk on.\n{CALL}", "0/0/3": "It walks."}
    for name, text in said.items():
        run.trajectory(name, run.spoken("Where to?", (text, ())))
    left, right = (run.spoken("Where to?", (f"Not {side}.", ())) for side in ("left", "right"))
    run.trajectory("0/0/4", left, branches=[right])
    run.trajectory("0/0/5", ([], Sampled()))
    directory, reading = run.close(), Reading.of(run.config)

    def parts(text: str, limit: int = 20, for_s: float = 0.0) -> list[Searched]:
        found = list[Searched]()
        with history_of(directory) as history:
            while not found or found[-1].has_more:
                after = found[-1].last if found else ""
                found.append(search(history, TrajectoryFilter(), text, reading, after, limit, for_s))
        return found

    one_by_one = parts("WALK")
    assert [(part.searched, part.textless, part.last) for part in one_by_one] == [
        (1, int(member == 5), f"0/0/{member}") for member in range(5, -1, -1)
    ]
    for limit in (1, 20):
        told = [one for part in parts("WALK", limit, for_s=60.0) for one in part.found]
        assert (
            [one.id for one in told]
            == ["0/0/3", "0/0/2", "0/0/0"]
            == [one.id for part in one_by_one for one in part.found]
        )
    (passage,) = told[-1].passages
    assert (passage.role, passage.before, passage.found, passage.after) == ("assistant", "I ", "Walk", " to the Left.")
    (part,) = parts('add({"a": 1', for_s=60.0)
    assert (part.found, part.searched, part.textless) == ([], 6, 1), "found is what was written"
    (part,) = parts('"a": 1', for_s=60.0)
    assert [one.id for one in part.found] == ["0/0/2"]
    (part,) = parts("right", for_s=60.0)
    assert [(one.id, [passage.branch for passage in one.passages]) for one in part.found] == [("0/0/4", [1])]
    (part,) = parts("assistant", for_s=60.0)
    assert part.found == [], "who speaks is not said"
