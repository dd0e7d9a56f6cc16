"""Texts within bounds: a long one lacks its middle and says so there."""

from collections.abc import Sequence

from elastic.protocol.api import HostedCall, HostedMessage

_CUT = " … {left_out} bytes left out … "


def bounded(messages: Sequence[HostedMessage], most_bytes: int) -> list[HostedMessage]:
    """The messages within so many bytes of texts: a long one keeps its beginning and its end, later ones what is
    left."""
    found = list[HostedMessage]()
    for place, message in enumerate(messages):
        share = most_bytes // (len(messages) - place)
        texts = 2 + 2 * len(message.tool_calls)
        kept = _Share(share, texts)
        shown = message.model_copy(
            update={
                "content": kept.take(message.content),
                "reasoning": kept.take(message.reasoning),
                "tool_calls": [
                    HostedCall(name=kept.take(call.name), arguments=kept.take(call.arguments))
                    for call in message.tool_calls
                ],
            }
        )
        found.append(shown)
        most_bytes -= share - kept.left
    return found


class _Share:
    """A number of bytes for a number of texts: what one text does not need is for those that follow."""

    def __init__(self, most_bytes: int, texts: int) -> None:
        self.left = most_bytes
        self._texts = texts

    def take(self, text: str) -> str:
        shown = cut(text, self.left // max(1, self._texts))
        self._texts -= 1
        self.left -= len(shown.encode())
        return shown


def whole(text: str) -> str:
    """The text with halves of surrogate pairs, which no encoding has, made visible."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut(text: str, most_bytes: int) -> str:
    """The text within so many bytes of UTF-8, with a word on what was left out of its middle, if there is room."""
    data = text.encode()
    if len(data) <= most_bytes:
        return text
    word = _CUT.format(left_out=len(data))
    half = (most_bytes - len(word.encode())) // 2
    if half <= 0:
        return data[:most_bytes].decode(errors="ignore")
    left_out = len(data) - 2 * half
    word = _CUT.format(left_out=left_out)
    return data[:half].decode(errors="ignore") + word + data[len(data) - half :].decode(errors="ignore")
