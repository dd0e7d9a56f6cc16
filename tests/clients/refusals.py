"""A front that refuses what it is asked, and how often a client asks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from elastic.protocol.front_messages import Declined, LookUp
from tests.front.fronted import Served

TOLD = "told why"
CALM_S = 0.1


class Refusal(NamedTuple):
    """What a call is refused with, and how often a client that asks twice at most asks then."""

    status: int
    attempts: int = 1
    retry: bool | None = None

    def declined(self) -> Declined:
        after_s = CALM_S if self.attempts > 1 else None
        return Declined(0, self.status, f"code_{self.status}", TOLD, retry=self.retry, retry_after_s=after_s)


REFUSALS = (
    Refusal(400),
    Refusal(404),
    Refusal(409, retry=False),
    Refusal(410, retry=False),
    Refusal(429, attempts=2),
    Refusal(500, attempts=2),
    Refusal(503, attempts=2),
)
"""With what the run's own refusals say of trying again."""
OPENAI_KINDS: Mapping[int, str] = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    410: "APIStatusError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "InternalServerError",
}
"""What OpenAI's client raises."""


def refuse(served: Served, refusal: Refusal) -> None:
    declined = refusal.declined()
    served.run.decline = lambda message: declined if isinstance(message, LookUp) else None


def attempts(served: Served) -> int:
    return len(served.run.of(LookUp))


async def answers_one_token(run: Any, turn: Any) -> None:
    """A turn that goes on for ever."""
    run.tokens(turn, [*b"."])


async def break_turn(served: Served, restarts: bool) -> None:
    """The answer under way breaks: other tokens come from a run that was started again, or its turn fails."""
    turn = served.run.turns[-1]
    if turn.over:
        return
    if restarts:
        turn.ids = [*b"x"]
        await served.run.restart()
    else:
        served.run.over(turn, "", "the engine broke")
