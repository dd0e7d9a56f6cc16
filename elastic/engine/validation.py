"""What a request must satisfy; one that does not ends by itself, with a detail that says why."""

import math
from collections.abc import Iterable

from elastic.engine.base import GenerateRequest

LOGPROB_MIN = -1000.0
"""vLLM writes -9999 where a log-probability is no number, or the token was impossible."""


def refusal(request: GenerateRequest, vocab_size: int, max_context_tokens: int) -> str | None:
    """Why the request cannot be run, or None."""
    count = len(request.token_ids)
    if not 0 <= request.start < count:
        return f"empty prompt: {count} token_ids of which start={request.start} are accepted output"
    if count > max_context_tokens:
        return f"prompt too long: {count} tokens; at most {max_context_tokens} are allowed"
    foreign = next((token for token in request.token_ids if not 0 <= token < vocab_size), None)
    if foreign is not None:
        return f"token id {foreign} is not in the vocabulary (0 to {vocab_size - 1})"
    sampling = request.sampling
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature must be finite and not negative (found {sampling.temperature})"
    if not 0 < sampling.top_p <= 1:
        return f"top_p must be above 0 and at most 1 (found {sampling.top_p})"
    if sampling.top_k < 0:
        return f"top_k must not be negative (found {sampling.top_k})"
    return None


def is_complete(request: GenerateRequest, max_context_tokens: int) -> bool:
    """Whether the accepted tokens already leave no room for another one."""
    return request.start >= request.sampling.max_new_tokens or len(request.token_ids) >= max_context_tokens


def unsound_logprob(logprobs: Iterable[float]) -> float | None:
    """The first that no token that was drawn can have."""
    return next((value for value in logprobs if not (math.isfinite(value) and value > LOGPROB_MIN)), None)
