"""Rendering: as transformers render, control tokens from the template alone, and nothing that was sampled twice."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.rendering.renderer import ChatRenderer, TemplateRenderer, make_renderer
from elastic.front.rendering.templates import RendererError, RenderingError
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.tiny import PLAIN, SPECIAL, TEMPLATE
from tests.front import chats

TOOL = {"type": "function", "function": {"name": "add", "description": "é <b>", "parameters": {"type": "object"}}}
TEMPLATES = {
    "tiny": TEMPLATE,
    "chatml": chats.CHATML,
    "qwen3": chats.QWEN3,
    "dated": chats.DATED,
    "of parts": chats.OF_PARTS,
}
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
plain_texts = words.filter(lambda text: "<" not in text and ">" not in text)
hostile = st.lists(words | st.sampled_from([*SPECIAL, *PLAIN, "<|im_", "start|>", "<", "|>", ">"]), max_size=5).map(
    "".join
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        name: chats.checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", template)
        for name, template in TEMPLATES.items()
    }


@pytest.fixture(scope="module")
def theirs(tokenizers: dict[str, Tokenizer]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    return {name: AutoTokenizer.from_pretrained(tokenizer.directory) for name, tokenizer in tokenizers.items()}


@pytest.fixture(scope="module")
def renderers(tokenizers: dict[str, Tokenizer]) -> dict[str, TemplateRenderer]:
    return {name: TemplateRenderer(tokenizer, "hermes", "qwen3") for name, tokenizer in tokenizers.items()}


def messages_of(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    call = st.fixed_dictionaries(
        {
            "id": st.just("call_1"),
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": texts, "arguments": st.dictionaries(texts, texts | st.integers() | st.none(), max_size=2)}
            ),
        }
    )
    user = st.fixed_dictionaries({"role": st.just("user"), "content": texts})
    system = st.fixed_dictionaries({"role": st.just("system"), "content": texts})
    tool = st.fixed_dictionaries({"role": st.just("tool"), "content": texts, "tool_call_id": st.just("call_1")})
    assistant = st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": texts},
        optional={"reasoning_content": texts, "tool_calls": st.lists(call, min_size=1, max_size=2)},
    )
    later = st.lists(user | assistant | tool, max_size=4)
    return st.tuples(st.lists(system, max_size=1), user, later).map(lambda parts: [*parts[0], parts[1], *parts[2]])


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "dated"])
@given(data=st.data(), tools=st.sampled_from([None, [TOOL]]))
def test_benign_messages_are_rendered_as_by_transformers(
    renderers: dict[str, TemplateRenderer], theirs: dict[str, Any], name: str, data: st.DataObject, tools: Any
) -> None:
    messages = data.draw(messages_of(plain_texts))
    there = theirs[name].apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    spelled = json.loads(json.dumps(messages))
    for message in spelled:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert renderers[name].prompt(spelled, tools, {}) == there


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
def test_no_text_becomes_a_control_token(
    tokenizers: dict[str, Tokenizer], renderers: dict[str, TemplateRenderer], name: str, data: st.DataObject
) -> None:
    """A conversation of the same shape, whose texts are benign, has the same special tokens; texts come out whole."""
    messages = data.draw(messages_of(hostile))
    tools = data.draw(st.sampled_from([None, [{"type": "function", "function": {"name": data.draw(hostile)}}]]))

    def benign(value: Any) -> Any:
        if isinstance(value, str):
            return "x" if value else ""
        if isinstance(value, dict):
            return {benign(k): benign(v) if k not in ("role", "type") else v for k, v in value.items()}
        return [benign(one) for one in value] if isinstance(value, list) else value

    like = [
        {"role": message["role"]} | {k: benign(v) for k, v in message.items() if k != "role"} for message in messages
    ]
    for message, other in zip(messages, like, strict=True):
        if calls := message.get("tool_calls"):  # keys have to stay keys of templates
            other["tool_calls"] = [
                {
                    "id": "x",
                    "type": "function",
                    "function": {"name": "x", "arguments": benign(c["function"]["arguments"])},
                }
                for c in calls
            ]
    tokenizer = tokenizers[name]
    ids, others = (renderers[name].prompt(one, tools and [TOOL], {}) for one in (messages, like))
    special = set(tokenizer.special)
    assert [number for number in ids if number in special] == [number for number in others if number in special]
    if name == "chatml":
        said = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        assert tokenizer.decode(ids, special=True) == f"{said}<|im_start|>assistant\n"
    renderers[name].prompt(messages, tools, {})


def test_texts_of_users_and_tools_name_no_token_of_the_templates_and_a_system_prompt_may(
    tokenizers: dict[str, Tokenizer], renderers: dict[str, TemplateRenderer]
) -> None:
    think = tokenizers["tiny"].token_id("<think>")
    end = tokenizers["tiny"].token_id("<|im_end|>")
    text = "<think> <|im_end|>"
    for role, plain in (("user", False), ("tool", False), ("system", True), ("assistant", True)):
        ids = renderers["tiny"].prompt([{"role": role, "content": text}], None, {})
        assert (think in ids, ids.count(end)) == (plain, 1)


def test_texts_that_make_a_control_token_with_what_stands_beside_them(tmp_path: Path) -> None:
    template = "{{ '<|im_' + messages[0].content + '|>' + messages[0].content + messages[1].content }}"
    tokenizer = chats.checkpoint(tmp_path / "model", template)
    renderer = TemplateRenderer(tokenizer)
    for first, second in (
        ("end|>", "x"),
        ("<|im_", "end|>"),
        ("<", "|im_end|>"),
        ("<|im_end|", ">"),
        ("x<", "|im_end|>y"),
    ):
        ids = renderer.prompt([{"role": "user", "content": first}, {"role": "user", "content": second}], None, {})
        assert not set(ids) & set(tokenizer.control)
        assert tokenizer.decode(ids) == f"<|im_{first}|>{first}{second}"


def test_a_mark_of_ours_in_a_text_is_just_text(
    renderers: dict[str, TemplateRenderer], tokenizers: dict[str, Tokenizer]
) -> None:
    private = "".join(chr(number) for number in range(0xF0000, 0xF0000 + 30_000))
    ids = renderers["chatml"].prompt([{"role": "user", "content": private + "<|im_end|>"}], None, {})
    assert private + "<|im_end|>" in tokenizers["chatml"].decode(ids, special=True)
    everything = "".join(chr(number) for number in range(0xF0000, 0xFFFFE))
    with pytest.raises(RenderingError, match="private characters"):
        renderers["chatml"].prompt([{"role": "user", "content": everything}], None, {})


# What comes behind an answer.


class Agent:
    """An agent with tools, and what a run keeps of its conversation: tokens, and where its answers end."""

    def __init__(self, tokenizer: Tokenizer, renderer: ChatRenderer, draw: random.Random) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.draw = draw
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": self.said()}]
        if draw.random() < 0.5:
            self.messages.insert(0, {"role": draw.choice(["system", "developer"]), "content": self.said()})
        self.tools = draw.choice([None, [TOOL]])
        self.ids = renderer.prompt(self.messages, self.tools, {})
        self.answers: list[tuple[int, int, int]] = []
        """Of each answer: the messages up to it, the tokens up to it, its own tokens."""

    def said(self) -> str:
        return self.draw.choice(["hi", "The sum is 42.", "", "<|im_end|>\n", "é🎉", "  two\n\n", "<tool_response>"])

    def answer(self) -> None:
        """Sample something: text, calls, cut anywhere, or ended as it should be."""
        text = self.draw.choice(["", "<think>\nHm.\n</think>\n\n"]) + self.draw.choice(["", "Yes.", "é🎉  no"])
        if self.draw.random() < 0.5:
            text += '\n<tool_call>\n{"name":"add",  "arguments": {"a":1.0}}\n</tool_call>'
        sampled = self.tokenizer.encode(text, special=True)
        if self.draw.random() < 0.3:
            sampled += [self.draw.randrange(256) for _ in range(3)]
        if self.draw.random() < 0.3:
            sampled = sampled[: self.draw.randrange(len(sampled) + 1)]
        elif self.draw.random() < 0.8:
            sampled.append(self.tokenizer.eos_token_ids[0])
        message = self.renderer.parse(sampled, self.ids, self.tools).message()
        if self.draw.random() < 0.5:
            message.pop("reasoning_content", None)
        self.messages.append(message)
        self.ids = self.ids + sampled
        self.answers.append((len(self.messages), len(self.ids), len(sampled)))

    def go_on(self) -> None:
        """The agent's own messages; now and then it has forgotten, or changed, what came after an earlier answer."""
        if self.draw.random() < 0.2:
            self.answers = self.answers[: self.draw.randrange(1, len(self.answers) + 1)]
            matched, tokens, _ = self.answers[-1]
            self.messages, self.ids = self.messages[:matched], self.ids[:tokens]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": self.said()}
            for call in self.messages[-1].get("tool_calls", [])
        ]
        self.messages += results
        if not results or self.draw.random() < 0.2:
            self.messages.append({"role": "user", "content": self.said()})
        if self.draw.random() < 0.1:
            self.messages += [{"role": "assistant", "content": self.said()}, {"role": "user", "content": self.said()}]


@pytest.mark.parametrize("name", ["tiny", "chatml", "qwen3", "dated"])
@given(draw=st.randoms(use_true_random=False))
def test_more_is_what_the_whole_has_behind_the_answer_and_sampled_tokens_stay(
    tokenizers: dict[str, Tokenizer], renderers: dict[str, TemplateRenderer], name: str, draw: random.Random
) -> None:
    tokenizer, renderer = tokenizers[name], renderers[name]
    agent = Agent(tokenizer, renderer, draw)
    closing = tokenizer.eos_token_ids[0]
    for _ in range(4):
        agent.answer()
        agent.go_on()
        matched, tokens, answer_tokens = agent.answers[-1]
        so_far = agent.ids[:tokens]
        more = renderer.more(agent.messages, matched, agent.tools, {}, so_far, answer_tokens)
        whole = renderer.prompt(agent.messages, agent.tools, {})
        if more is None:
            assert name == "qwen3"
            agent.ids, agent.answers = whole, []
            continue
        assert whole[-len(more) :] == more
        # The message is closed exactly once, and what the agent said stands behind it.
        closed = answer_tokens > 0 and so_far[-1] == closing
        ends = sum(1 for message in agent.messages[matched:] if message["role"] != "tool")
        tools = [m["role"] for m in agent.messages[matched:]]
        runs = sum(role == "tool" and (at == 0 or tools[at - 1] != "tool") for at, role in enumerate(tools))
        runs = runs if name in ("tiny", "qwen3") else tools.count("tool")
        assert more.count(closing) == ends + runs + (not closed)
        assert renderer.more(agent.messages, matched, agent.tools, {}, so_far[-1:], min(answer_tokens, 1)) == more
        agent.ids = so_far + more


def turns(renderer: ChatRenderer, tokenizer: Tokenizer, text: str, new: list[dict[str, Any]], **kwargs: Any) -> Any:
    """What `more` gives behind an answer to one question."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    ids = renderer.prompt(messages, [TOOL], kwargs)
    sampled = tokenizer.encode(text, special=True)
    messages.append(renderer.parse(sampled, ids, [TOOL]).message())
    return renderer.more([*messages, *new], 2, [TOOL], kwargs, ids + sampled, len(sampled))


CALLS = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
RESULT = {"role": "tool", "tool_call_id": "x", "content": "2"}
QUESTION = {"role": "user", "content": "why"}


def test_a_template_that_drops_old_reasoning_goes_on_behind_tools_and_not_behind_questions(
    tokenizers: dict[str, Tokenizer], renderers: dict[str, TemplateRenderer]
) -> None:
    renderer, tokenizer = renderers["qwen3"], tokenizers["qwen3"]
    assert renderer.habits == {
        "continues": False,
        "continues_behind_tools": True,
        "closes_messages_with": "<|im_end|>",
    }
    said = "<think>\nHm.\n</think>\n\n" + CALLS
    more = turns(renderer, tokenizer, said, [RESULT])
    assert tokenizer.decode(more, special=True) == (
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert turns(renderer, tokenizer, said, [RESULT, QUESTION]) is None
    assert turns(renderer, tokenizer, "Yes.<|im_end|>", [QUESTION]) is None
    assert turns(renderer, tokenizer, said, [RESULT], enable_thinking=False) is None


def test_a_template_that_never_shows_reasoning_goes_on_where_there_is_none(tmp_path: Path) -> None:
    tokenizer = chats.checkpoint(tmp_path / "model", chats.NEVER_SHOWS_THOUGHTS)
    renderer = TemplateRenderer(tokenizer)
    assert turns(renderer, tokenizer, "Yes.<|im_end|>", [QUESTION], opening="") is not None
    assert turns(renderer, tokenizer, "Hm.</think>Yes.<|im_end|>", [QUESTION], opening="") is None
    assert turns(renderer, tokenizer, "Yes.<|im_end|>", [QUESTION], opening="<think>") is None


@pytest.mark.parametrize("template", [chats.NEVER_CLOSES, chats.ENDS_LATER])
def test_what_cannot_be_proven_is_rendered_whole(tmp_path: Path, template: str) -> None:
    tokenizer = chats.checkpoint(tmp_path / "model", template)
    renderer = TemplateRenderer(tokenizer)
    assert turns(renderer, tokenizer, "Yes.", [QUESTION]) is None
    assert not renderer.habits["continues"]


def test_an_answer_that_lacks_its_closing_gets_it(
    tokenizers: dict[str, Tokenizer], renderers: dict[str, TemplateRenderer]
) -> None:
    asked = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    for said, behind in (
        ("Yes.<|im_end|>", "\n"),
        ("Yes", "<|im_end|>\n"),
        ("", "<|im_end|>\n"),
        ("Yes.<|endoftext|>", "<|im_end|>\n"),
    ):
        more = turns(renderers["tiny"], tokenizers["tiny"], said, [QUESTION])
        assert tokenizers["tiny"].decode(more, special=True) == behind + asked


def test_settings_of_the_template_change_the_prompt_and_what_follows(
    tokenizers: dict[str, Tokenizer], renderers: dict[str, TemplateRenderer]
) -> None:
    prompt = renderers["tiny"].prompt([QUESTION], None, {"enable_thinking": True})
    assert tokenizers["tiny"].decode(prompt, special=True).endswith("<|im_start|>assistant\n<think>\n")
    more = turns(renderers["tiny"], tokenizers["tiny"], "Hm.</think>Yes.<|im_end|>", [QUESTION], enable_thinking=True)
    assert tokenizers["tiny"].decode(more, special=True).endswith("why<|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_the_same_messages_once_more_need_nothing_more(renderers: dict[str, TemplateRenderer]) -> None:
    messages = [QUESTION]
    ids = renderers["tiny"].prompt(messages, None, {})
    assert renderers["tiny"].more(messages, 1, None, {}, ids, 0) == []
    assert renderers["tiny"].more([*messages, RESULT], 1, None, {}, ids, 0) is None
    assert renderers["tiny"].more(messages, 0, None, {}, [], 0) is None


def test_a_message_that_ends_an_answer_stops_it(tmp_path: Path) -> None:
    tokenizer = chats.checkpoint(tmp_path / "model", chats.CHATML.replace("<|im_end|>", "<tool_response>"))
    stops = [tokenizer.token(number) for number in TemplateRenderer(tokenizer).stop_token_ids]
    assert stops == ["<|im_end|>", "<|endoftext|>", "<tool_response>"]


def test_templates_get_content_and_arguments_as_they_want_them(tmp_path: Path) -> None:
    of_parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    of_text = (
        "{% for m in messages %}{{ m.content }}"
        "{% for call in m.tool_calls %}{{ '!' + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "hi "},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a":[1]}'}}]},
    ]
    for place, (template, said) in enumerate(((of_parts, "hi "), (of_text, 'hi !{"a": [1]}'))):
        tokenizer = chats.checkpoint(tmp_path / str(place), template)
        assert tokenizer.decode(TemplateRenderer(tokenizer).prompt(messages, None, {})) == said


# Errors.


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "does not take these messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "more than"),
        ("{{ range(999999999) | list }}", "range"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
        ("{{ namespace(__class__=1) }}", "no attribute"),
        ("{% include 'x' %}", "does not take these messages"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_fails_is_an_error_of_the_call(tmp_path: Path, template: str | None, said: str) -> None:
    renderer = TemplateRenderer(chats.checkpoint(tmp_path / "model", template))
    with pytest.raises(RenderingError, match=said):
        renderer.prompt([QUESTION], None, {})
    assert not renderer.habits["continues"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages are empty"),
        ([{"role": "user<|im_end|>", "content": ""}], "a name in letters"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "type 'image_url'"),
    ],
)
def test_messages_that_cannot_be_rendered(
    renderers: dict[str, TemplateRenderer], messages: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(RenderingError, match=said):
        renderers["chatml"].prompt(messages, None, {})


def test_names_of_renderers_and_parsers_are_checked(tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(RendererError, match=r"front.renderer: found 'qwen'; allowed: 'auto', 'template'"):
        make_renderer(tokenizers["tiny"], renderer="qwen")
    with pytest.raises(RendererError, match=r"front.tool_parser: found 'pythonic'; allowed: 'deepseek_v3', 'deepseek"):
        make_renderer(tokenizers["tiny"], tool_parser="pythonic")
    with pytest.raises(
        RendererError, match=r"front.reasoning_parser: found 'think'; allowed: 'deepseek_r1', 'deepseek"
    ):
        make_renderer(tokenizers["tiny"], reasoning_parser="think")
    with pytest.raises(RendererError, match=r"chat template 'default': .*expected token"):
        make_renderer(chats.checkpoint(tmp_path / "model", "{{ a b }}"))
    assert isinstance(make_renderer(tokenizers["tiny"]), TemplateRenderer)


def test_neither_torch_nor_transformers_is_imported(tiny_directory: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "import elastic.front.rendering.messages\n"
        "from elastic.front.rendering.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer(Path({str(tiny_directory)!r}))\n"
        "tokenizer.encode('a')\n"
        "assert 'numpy' not in sys.modules\n"
        "from elastic.front.rendering.renderer import make_renderer\n"
        "renderer = make_renderer(tokenizer, tool_parser='hermes')\n"
        "renderer.prompt([{'role': 'user', 'content': 'hi'}], None, {})\n"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
