"""HTML and SVG from nested calls, escaped by construction: what is not `Markup` is text.

Pages made this way are well-formed XML too, whatever a run, a provider or an error calls itself.
"""

from html import escape

from elastic.system.plain_values import printable


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """An element. Attribute names: `class_` is class, `stroke_width` is stroke-width; None leaves one out."""
    inner = "".join(child if isinstance(child, Markup) else _escape(child) for child in children if child is not None)
    given = ((key, value) for key, value in attributes.items() if value is not None)
    opening = name + "".join(f' {_name(key)}="{_value(value)}"' for key, value in given)
    return Markup(f"<{opening}>{inner}</{name}>" if children else f"<{opening}/>")


def join(parts: list[Markup]) -> Markup:
    return Markup("".join(parts))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return _escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def _escape(text: str) -> str:
    return escape(printable(text))
