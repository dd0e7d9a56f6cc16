"""What fronts are told of what is not done, for their clients."""

from elastic.core.types import InfrastructureCause

TOO_MANY_TURNS = "too_many_turns"
"""The code of calls that are refused since too many turns are open."""


class CallRefused(Exception):
    """What a front asks for is not done: the status, the code and the words for its client."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str = "",
        retry: bool | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry, self.retry_after_s = retry, retry_after_s


def refused_turn(cause: str) -> CallRefused:
    """What a client is told of a turn that was given up."""
    if cause.startswith((InfrastructureCause.CAPACITY, InfrastructureCause.PROGRESS)):
        return CallRefused(503, "no_capacity", cause, retry_after_s=1.0)
    return CallRefused(500, "turn_failed", cause)
