"""Families of models: their control tokens, and templates that render as theirs do.

The templates are written for these tests, by the published formats: what a message looks like, what is dropped of old
ones, what an answer begins with. They leave out what nothing here depends on, such as the text that describes tools.
"""

import json
from pathlib import Path
from typing import NamedTuple

from elastic.front.rendering.renderer import ChatRenderer, make_renderer
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.tiny import TEMPLATE
from tests.front import chats

# ruff: noqa: E501  # templates

LAST_QUESTION = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
VALUES = "{{ value if value is string else value | tojson }}"

QWEN35 = (
    LAST_QUESTION + "{%- if tools -%}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last -%}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif -%}"
    "{{ m.content }}{%- for call in m.tool_calls or [] -%}"
    "{{ ('\n\n' if m.content and loop.first else '' if loop.first else '\n') + '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for name, value in call.function.arguments.items() -%}{{ '<parameter=' + name + '>\n' }}"
    + VALUES
    + "{{ '\n</parameter>\n' }}"
    "{%- endfor -%}{{ '</function>\n</tool_call>' }}{%- endfor -%}{{ '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' -%}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"
)


def glm(line: str, opening: str) -> str:
    """GLM's: nothing closes a message but the beginning of the next one."""
    return (
        (
            LAST_QUESTION + "[gMASK]<sop>{%- if tools -%}<|system|>{{ tools | tojson }}{%- endif -%}"
            "{%- for m in messages -%}{%- if m.role == 'assistant' -%}<|assistant|>{{ LINE }}"
            "{%- if loop.index0 > ns.last and m.reasoning_content -%}{{ '<think>' + m.reasoning_content + '</think>' }}"
            "{%- else -%}{{ NOTHING }}{%- endif -%}{{ (LINE if m.content else '') + m.content }}"
            "{%- for call in m.tool_calls or [] -%}{{ LINE + '<tool_call>' + call.function.name + LINE }}"
            "{%- for name, value in call.function.arguments.items() -%}"
            "{{ '<arg_key>' + name + '</arg_key>' + LINE + '<arg_value>' }}" + VALUES + "{{ '</arg_value>' + LINE }}"
            "{%- endfor -%}{{ '</tool_call>' }}{%- endfor -%}"
            "{%- elif m.role == 'tool' -%}{{ '<|observation|>' if loop.previtem.role != 'tool' }}"
            "{{ LINE + '<tool_response>' + LINE + m.content + LINE + '</tool_response>' }}"
            "{%- else -%}{{ '<|' + m.role + '|>' + LINE + m.content }}{%- endif -%}{%- endfor -%}"
            "{%- if add_generation_prompt -%}{{ '<|assistant|>' + OPENING }}{%- endif -%}"
        )
        .replace("LINE", repr(line))
        .replace("OPENING", repr(opening))
        .replace("NOTHING", repr("<think></think>" if line else "</think>"))
    )


def deepseek(call: str, opening: str, opened: str, results: tuple[str, str, str]) -> str:
    """DeepSeek's: an answer goes on behind results of tools, without a beginning of its own."""
    start, end, after = results
    return (
        (
            LAST_QUESTION
            + "{{ bos_token }}{%- for m in messages if m.role == 'system' -%}{{ m.content }}{%- endfor -%}"
            "{{ tools | tojson if tools }}"
            "{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<｜User｜>' + m.content }}"
            "{%- elif m.role == 'assistant' -%}"
            "{{ '<｜Assistant｜>' + OPENED if loop.previtem.role != 'tool' }}"
            "{{ m.content.split('</think>')[-1] }}{%- if m.tool_calls -%}"
            + call
            + "{%- endif -%}{{ '<｜end▁of▁sentence｜>' }}"
            "{%- elif m.role == 'tool' -%}{{ (START if loop.previtem.role != 'tool' else '') + '<｜tool▁output▁begin｜>' }}"
            "{{ m.content + '<｜tool▁output▁end｜>' + (AFTER if loop.last or loop.nextitem.role != 'tool' else '') }}{%- endif -%}{%- endfor -%}"
            "{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{ '<｜Assistant｜>' + OPENING }}{%- endif -%}"
        )
        .replace("OPENING", repr(opening))
        .replace("OPENED", repr(opened))
        .replace("START", repr(start))
        .replace("AFTER", repr(end + after))
    )


V3_CALLS = (
    "{{ '<｜tool▁calls▁begin｜>' }}{%- for call in m.tool_calls -%}{{ '' if loop.first else '\n' }}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}"
    "{{ call.function.arguments | tojson }}{{ '\n```<｜tool▁call▁end｜>' }}{%- endfor -%}{{ '<｜tool▁calls▁end｜>' }}"
)
V31_CALLS = (
    "{{ '<｜tool▁calls▁begin｜>' }}{%- for call in m.tool_calls -%}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}"
    "{%- endfor -%}{{ '<｜tool▁calls▁end｜>' }}"
)
V32_CALLS = (
    "{{ '\n\n<｜DSML｜function_calls>\n' }}{%- for call in m.tool_calls -%}"
    "{{ '<｜DSML｜invoke name=\"' + call.function.name + '\">\n' }}"
    "{%- for name, value in call.function.arguments.items() -%}"
    "{{ '<｜DSML｜parameter name=\"' + name + '\" string=\"' + ('true' if value is string else 'false') + '\">' }}"
    + VALUES
    + "{{ '</｜DSML｜parameter>\n' }}{%- endfor -%}{{ '</｜DSML｜invoke>\n' }}{%- endfor -%}{{ '</｜DSML｜function_calls>' }}"
)
V3_RESULTS = ("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "")

GPT_OSS = (
    "<|start|>system<|message|>You are ChatGPT.<|end|>"
    "{%- if tools or messages[0].role == 'system' -%}<|start|>developer<|message|>"
    "{{ messages[0].content if messages[0].role == 'system' }}{{ tools | tojson if tools }}<|end|>{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'tool' -%}{{ '<|start|>functions.' + (m.name or 'f') + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content | tojson }}<|end|>"
    "{%- elif m.tool_calls -%}"
    "{%- if m.content and m.thinking -%}{{ raise_exception('content and thinking in one message') }}{%- endif -%}"
    "{%- if m.content or m.thinking -%}{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}"
    "{%- endif -%}{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}"
    "{{ '<|channel|>commentary json<|message|>' }}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{%- elif m.role == 'assistant' -%}"
    "{%- if loop.last and m.thinking -%}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif -%}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)

LLAMA3 = (
    "{{ bos_token }}{%- for m in messages -%}{%- if m.tool_calls -%}"
    "{%- if m.tool_calls | length != 1 -%}{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif -%}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{%- elif m.role == 'tool' -%}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}"
    "{%- else -%}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ (tools | tojson if tools and m.role == 'user' and loop.first else '') + (m.content | trim) + '<|eot_id|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"
)


class Family(NamedTuple):
    """`losses` are what the probe at the start says of it, `behind_tools` and `behind_user` whether its branches go on
    there. `wrote` is an answer with a call as such a model samples it."""

    template: str
    tool_parser: str
    reasoning_parser: str
    tokens: tuple[str, ...]
    ends: tuple[str, ...]
    wrote: str
    losses: tuple[str, ...] = ()
    behind_tools: bool = True
    behind_user: bool = False

    @property
    def reasons(self) -> bool:
        """Whether the answer has reasoning."""
        return "Hm." in self.wrote


ONE_CALL = "an answer has one call of a tool at most"
BESIDE = "text beside calls is left out, or is not read as text"
NO_REASONING = "the template leaves the reasoning of answers out"
V3_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "｜DSML｜",
    "<｜action｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜latest_reminder｜>",
    "<｜query｜>",
    "<｜read_url｜>",
    "<｜title｜>",
)
GLM_TOKENS = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
QWEN35_TOKENS = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
IM = ("<|im_end|>",)
HERMES_CALL = '<tool_call>\n{"name":"add",  "arguments": {"a":1}}\n</tool_call>'
QWEN35_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
V31_CALL = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a":1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
V3_CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a":1}\n```<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
V32_CALL = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
EOS = "<｜end▁of▁sentence｜>"

FAMILIES = {
    "chatml": Family(
        TEMPLATE, "hermes", "qwen3", (), IM, f"<think>\nHm.\n</think>\n\n{HERMES_CALL}<|im_end|>", behind_user=True
    ),
    "qwen3": Family(chats.QWEN3, "hermes", "qwen3", (), IM, f"<think>\nHm.\n</think>\n\n{HERMES_CALL}<|im_end|>"),
    "qwen3.5": Family(QWEN35, "qwen3_coder", "qwen3", QWEN35_TOKENS, IM, f"Hm.\n</think>\n\n{QWEN35_CALL}<|im_end|>"),
    "glm-4.5": Family(
        glm("\n", ""),
        "glm45",
        "glm45",
        GLM_TOKENS,
        GLM_ENDS,
        "\n<think>Hm.</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
    ),
    "glm-4.7": Family(
        glm("", "<think>"),
        "glm47",
        "glm47",
        GLM_TOKENS,
        GLM_ENDS,
        "Hm.</think><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><|observation|>",
    ),
    "deepseek-v3": Family(
        deepseek(V3_CALLS, "", "", V3_RESULTS), "deepseek_v3", "", V3_TOKENS, (EOS,), V3_CALL + EOS, behind_user=True
    ),
    "deepseek-r1": Family(
        deepseek(V3_CALLS, "<think>\n", "", V3_RESULTS),
        "deepseek_v3",
        "deepseek_r1",
        V3_TOKENS,
        (EOS,),
        f"Hm.\n</think>\n\n{V3_CALL}{EOS}",
        (NO_REASONING,),
        behind_tools=False,
    ),
    "deepseek-v3.1": Family(
        deepseek(V31_CALLS, "</think>", "</think>", ("", "", "")),
        "deepseek_v31",
        "deepseek_v3",
        V3_TOKENS,
        (EOS,),
        V31_CALL + EOS,
        (NO_REASONING,),
        behind_user=True,
    ),
    "deepseek-v3.2": Family(
        deepseek(V32_CALLS, "</think>", "</think>", ("\n\n<function_results>\n", "</function_results>", "\n\n")),
        "deepseek_v32",
        "",
        V3_TOKENS,
        (EOS,),
        f"\n\n{V32_CALL}{EOS}",
        behind_user=True,
    ),
    "gpt-oss": Family(
        GPT_OSS,
        "openai",
        "openai_gptoss",
        HARMONY_TOKENS,
        ("<|return|>", "<|call|>"),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
        '<|message|>{"a":1}<|call|>',
        (ONE_CALL, BESIDE),
    ),
    "llama-3": Family(
        LLAMA3,
        "llama3_json",
        "",
        LLAMA_TOKENS,
        ("<|eot_id|>", "<|eom_id|>"),
        '{"name": "add", "parameters": {"a":1}}<|eot_id|>',
        (ONE_CALL, BESIDE),
        behind_user=True,
    ),
}


def checkpoint(directory: Path, family: Family) -> Tokenizer:
    """The tiny tokenizer with a family's control tokens and template."""
    chats.checkpoint(directory, family.template)
    path = directory / "tokenizer.json"
    given = json.loads(path.read_text())
    known = {token["content"]: token["id"] for token in given["added_tokens"]}
    for token in family.tokens:
        if token not in known:
            known[token] = max(known.values()) + 1
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            given["added_tokens"].append({"id": known[token], "content": token, **flags, "special": True})
    path.write_text(json.dumps(given))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {"eos_token": family.ends[0], "bos_token": family.tokens[0] if family.tokens else None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ends = {"eos_token_id": [known[token] for token in family.ends]}
    (directory / "generation_config.json").write_text(json.dumps(ends))
    return Tokenizer(directory)


def renderer_of(tokenizer: Tokenizer, family: Family) -> ChatRenderer:
    return make_renderer(
        tokenizer, renderer="template", tool_parser=family.tool_parser, reasoning_parser=family.reasoning_parser
    )
