"""Times of configurations, which are in seconds, as the core takes them."""

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from elastic.core.types import NS_PER_S

S = TypeVar("S", bound=msgspec.Struct)


def in_nanoseconds(kind: type[S], seconds: BaseModel, **others: Any) -> S:
    """The struct whose fields have the names of these settings, and `_ns` where those have `_s`; and `others`."""
    settings = seconds.model_dump()
    times = {key: round(value * NS_PER_S) for key, value in settings.items() if key.endswith("_s")}
    settings |= {f"{key.removesuffix('_s')}_ns": value for key, value in times.items()} | others
    return kind(**{key: value for key, value in settings.items() if key in kind.__struct_fields__})
