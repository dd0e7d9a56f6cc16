"""Templates of the sorts that there are, and checkpoints with them."""

import json
from pathlib import Path

from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.tiny import write_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

QWEN3 = (Path(__file__).parent / "templates/qwen3.jinja").read_text()
"""Qwen's own (Apache-2.0). It shows the reasoning of answers behind the last question alone."""

NEVER_SHOWS_THOUGHTS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|im_start|>A' + message.content.split('</think>')[-1] + '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>U' + message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>A' + opening }}{% endif %}"
)
"""As DeepSeek-R1's."""

NEVER_CLOSES = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

DATED = (
    "{{ '<|im_start|>system\n' + strftime_now('%d %b %Y %H:%M:%S') + '<|im_end|>\n' }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ message.content }}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% continue %}{% endif %}"
    "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content | trim ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ENDS_LATER = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{{ '<|endoftext|>' if loop.last and message.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What closes a message depends on what follows."""

OF_PARTS = (
    "{% for message in messages %}{{ '<|' ~ ('im_start' if message.role != 'tool' else 'endoftext') ~ '|>' }}"
    "{{ message.role }}\n{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Puts control tokens together."""


def checkpoint(directory: Path, template: str | None) -> Tokenizer:
    """The tiny tokenizer with another template."""
    write_tokenizer(directory)
    path = directory / "chat_template.jinja"
    path.unlink() if template is None else path.write_text(template)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return Tokenizer(directory)
