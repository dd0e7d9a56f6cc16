"""Where a call goes by the name of its model: to the run, as one of its policies, or upstream. Pure."""

from typing import NamedTuple, TypeAlias

from elastic.protocol.openai.errors import FrontError, no_such_model

NAME_CHARS_MAX = 256
"""The most characters of the name of a model elsewhere."""


class ModelNames(NamedTuple):
    """What the run's model is called: by its `own` name, and by those of its `policies`. Whatever else is asked for is
    `upstream`'s, where there is one."""

    own: str
    policies: tuple[str, ...] = ()
    upstream: bool = False

    @property
    def served(self) -> tuple[str, ...]:
        """Those that the run serves by itself, its own first."""
        return (self.own, *self.policies)


class ToRun(NamedTuple):
    """The run generates the answer. `policy` is empty for a call by the model's own name, or by none."""

    policy: str = ""


class ToUpstream(NamedTuple):
    model: str


Destination: TypeAlias = ToRun | ToUpstream

FORWARDED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/messages", "/v1/messages/count_tokens"),
)
"""Routes that an upstream has, too."""


def destination(names: ModelNames, route: str, asked: object) -> Destination:
    """Where a call of this route goes whose body's `model` is `asked`.

    Raises `FrontError`: 400 for what is no name, 404 for one that nobody has.
    """
    if asked is None or asked == "":
        return ToRun()
    if not isinstance(asked, str):
        raise FrontError(400, f"model: found {asked!r:.100}; allowed: the name of a model", "model", "invalid_value")
    if asked == names.own:
        return ToRun()
    if asked in names.policies:
        return ToRun(asked)
    plain = len(asked) <= NAME_CHARS_MAX and asked.isascii() and asked.isprintable()
    if names.upstream and route in FORWARDED and plain:
        return ToUpstream(asked)
    raise no_such_model(asked, *names.served)
